"""Checks of what plugins provide, made when it is registered: a broken contract is told by name, at start-up."""

import dataclasses
import inspect
from typing import Any

import kvbench
from kvbench.errors import PluginError
from kvbench.options import options_class

API_ATTRIBUTE = "kvbench_api_version"


def check_api_version(plugin: Any) -> None:
    """Raises PluginError where ``plugin`` was built for an API that this kvbench does not have.

    A plugin without the attribute ``kvbench_api_version`` is taken at its word that it fits.
    """
    from kvbench.api import API_VERSION

    declared = getattr(plugin, API_ATTRIBUTE, None)
    if declared is None:
        return
    major, _, minor = str(declared).partition(".")
    if not major.isdecimal() or not (minor or "0").isdecimal():
        raise PluginError(f"{API_ATTRIBUTE} must be a version such as '{API_VERSION}', not {declared!r:.60}")
    ours_major, ours_minor = map(int, API_VERSION.split("."))
    if (int(major), int(minor or 0)) > (ours_major, ours_minor):
        way_out = "upgrade kvbench"
    elif int(major) < ours_major:
        way_out = "install a newer version of the plugin"
    else:
        return
    raise PluginError(
        f"was built for kvbench API {declared}; kvbench {kvbench.__version__} has API {API_VERSION}: {way_out}"
    )


def check_quantizer(value: Any) -> None:
    """Raises PluginError unless ``value`` is a usable quantizer class."""
    from kvbench.quantizer import Quantizer

    _check_class("quantizer", value, Quantizer)
    _check_options("quantizer", value)


def check_task(value: Any) -> None:
    """Raises PluginError unless ``value`` is a usable task class."""
    from kvbench.task import Task

    _check_class("task", value, Task)
    _check_options("task", value)


def check_model(value: Any) -> None:
    """Raises PluginError unless ``value`` is a model configuration."""
    from kvbench.configuration import ModelConfig

    if not isinstance(value, ModelConfig):
        raise PluginError(f"kvbench_models must return ModelConfig objects, not {value!r:.100}")


def check_report_section(value: Any) -> None:
    """Raises PluginError unless ``value`` is a usable report section class."""
    from kvbench.reports.section import ReportSection

    _check_class("report section", value, ReportSection)


def _check_class(kind: str, value: Any, base: type) -> None:
    if not isinstance(value, type) or not issubclass(value, base):
        raise PluginError(f"a {kind} must be a subclass of {base.__module__}.{base.__name__}, not {value!r:.100}")
    if inspect.isabstract(value):
        missing = ", ".join(sorted(getattr(value, "__abstractmethods__", ())))
        raise PluginError(f"{kind} {value.__module__}.{value.__qualname__} does not implement {missing}")


def _check_options(kind: str, value: type) -> None:
    where = f"{kind} {value.__module__}.{value.__qualname__}"
    # A subclass that is not decorated itself would silently lose the fields it declares.
    if "__dataclass_fields__" not in vars(value) or not dataclasses.is_dataclass(value):
        raise PluginError(f"{where} must be decorated with @dataclass(frozen=True)")
    if not isinstance(getattr(value, "name", None), str):
        raise PluginError(f"{where} needs a class attribute 'name: ClassVar[str]'")
    try:
        options_class(value)
    except (TypeError, NameError) as error:
        raise PluginError(f"{where}: {error}") from error
