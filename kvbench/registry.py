"""The plugin registry: which quantizers, tasks, models and report sections are there, and who provides them.

Plugins are found through the entry-point group ``kvbench``. A plugin that is broken is recorded with its error, and
takes nothing down but itself. ``KVBENCH_DISABLE_PLUGINS`` holds names of plugins to leave out, separated by commas.
"""

import importlib.metadata
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from omegaconf import DictConfig

import kvbench
from kvbench import builtins, hookspecs
from kvbench.errors import ConfigurationError, PluginError, unknown_name
from kvbench.options import build
from kvbench.plugin_contract import (
    check_api_version,
    check_model,
    check_quantizer,
    check_report_section,
    check_task,
)

if TYPE_CHECKING:
    from kvbench.configuration import ModelConfig
    from kvbench.quantizer import Quantizer
    from kvbench.reports.section import ReportSection
    from kvbench.task import Task

GROUP = "kvbench"
DISABLE_VARIABLE = "KVBENCH_DISABLE_PLUGINS"
BUILTIN_PLUGIN = "builtins"
LONGEST_ERROR = 300  # characters; the traceback has the rest
# Names are typed in overrides and become folders: letters, digits, dot, dash, underscore.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

T = TypeVar("T")


@dataclass
class Plugin:
    """One installed plugin: an entry point, or kvbench's own built-ins."""

    name: str
    distribution: str
    version: str
    disabled: bool = False
    registered: bool = False
    errors: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"plugin '{self.name}' ({self.distribution} {self.version})"

    def fail(self, error: BaseException | str) -> None:
        """Record why (a part of) the plugin cannot be used."""
        if isinstance(error, str):
            self.errors.append(error)
            return
        words = " ".join(str(error).split())
        self.errors.append(textwrap.shorten(f"{type(error).__name__}: {words}", LONGEST_ERROR).rstrip(": "))
        self.tracebacks.append("".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Entry(Generic[T]):
    """Something a plugin provides under a name: a class, or a model's configuration."""

    name: str
    value: T
    plugin: Plugin

    @property
    def distribution(self) -> str:
        return self.plugin.distribution

    @property
    def version(self) -> str:
        return self.plugin.version

    @property
    def description(self) -> str:
        """First line of the docstring."""
        lines = (getattr(self.value, "__doc__", None) or "").strip().splitlines()
        return lines[0].strip() if lines else ""


class Registry:
    """Everything that is installed, by name. Made by :func:`load_registry`; not changed afterwards.

    ``quantizers``, ``tasks``, ``models`` and ``report_sections`` map names to entries. ``models`` holds the plugins'
    models only; the built-in ones are files in ``kvbench.conf``, their names in ``builtin_models``.
    """

    def __init__(self, manager: pluggy.PluginManager, plugins: list[Plugin], warnings: list[str]) -> None:
        self._manager = manager
        self.plugins = plugins
        self.warnings = warnings
        self.builtin_models = _builtin_models()
        self.quantizers: dict[str, Entry[type[Quantizer]]] = self._collect("quantizer", check_quantizer)
        self.tasks: dict[str, Entry[type[Task]]] = self._collect("task", check_task)
        self.models: dict[str, Entry[ModelConfig]] = self._collect("model", check_model, taken=self.builtin_models)

    @cached_property
    def report_sections(self) -> "dict[str, Entry[type[ReportSection]]]":
        """Report sections, in the order in which reports show them. Asked for late: they import the result schema."""
        return self._collect("report_section", check_report_section)

    @property
    def broken(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.errors]

    def notices(self) -> list[str]:
        """One line for each thing about plugins that a user should know before a run."""
        return self.warnings + [f"{plugin} is broken, see 'kvbench plugins'" for plugin in self.broken]

    def quantizer(self, name: str) -> "Entry[type[Quantizer]]":
        """Raises ConfigurationError with the known names where there is none of that name."""
        return self._look_up("quantizer", name, self.quantizers)

    def task(self, name: str) -> "Entry[type[Task]]":
        """Raises ConfigurationError with the known names where there is none of that name."""
        return self._look_up("task", name, self.tasks)

    def build_quantizer(self, node: DictConfig | Mapping[str, Any]) -> "Quantizer":
        """The quantizer that a configuration node describes: ``name`` and its options.

        Raises ConfigurationError where the name is unknown or an option's value is not allowed.
        """
        return build("quantizer", self.quantizer(str(node["name"])).value, node)

    def build_task(self, name: str, node: DictConfig | Mapping[str, Any]) -> "Task":
        """The task ``name`` with the options of a configuration node. Raises as :meth:`build_quantizer`."""
        return build("task", self.task(name).value, node)

    def unknown(self, kind: str, name: str, known: Any) -> str:
        """What to say of a name that is not there: near misses, and plugins that could have provided it."""
        absent = [f"plugin '{plugin.name}' is broken: {plugin.errors[0]}" for plugin in self.broken]
        absent += [
            f"plugin '{plugin.name}' is disabled by {DISABLE_VARIABLE}" for plugin in self.plugins if plugin.disabled
        ]
        absent.sort(key=lambda text: f"'{name}'" not in text)
        more = f" ('kvbench plugins' lists {len(absent) - 1} more)" if len(absent) > 1 else ""
        return unknown_name(kind, name, known) + (f"\nNot available: {absent[0]}{more}." if absent else "")

    def _look_up(self, kind: str, name: str, known: dict[str, Entry[T]]) -> Entry[T]:
        if name not in known:
            raise ConfigurationError(self.unknown(kind, name, known))
        return known[name]

    def _collect(
        self, kind: str, check: Callable[[Any], None], taken: frozenset[str] = frozenset()
    ) -> dict[str, Entry[Any]]:
        entries: dict[str, Entry[Any]] = {}
        for plugin in self.plugins:
            for value in self._provided(plugin, f"kvbench_{kind}s"):
                try:
                    check(value)
                    name = _checked_name(value)
                    if name in taken:
                        raise PluginError(f"{kind.replace('_', ' ')} '{name}' is already provided by kvbench")
                    if name in entries:
                        owner = entries[name]
                        raise PluginError(
                            f"{kind.replace('_', ' ')} '{name}' ({_qualified(value)}) is already provided by "
                            f"{owner.distribution} {owner.version} ({_qualified(owner.value)})"
                        )
                except PluginError as error:
                    plugin.fail(str(error))
                else:
                    entries[name] = Entry(name, value, plugin)
        return entries

    def _provided(self, plugin: Plugin, hook: str) -> Iterator[Any]:
        """What one plugin's implementation of a hook returns; its errors are recorded, not raised."""
        if not plugin.registered:
            return
        implementation = self._manager.get_plugin(plugin.name)
        for impl in getattr(self._manager.hook, hook).get_hookimpls():
            if impl.plugin is not implementation:
                continue
            try:
                values = impl.function()
                if isinstance(values, str | bytes | type) or not hasattr(values, "__iter__"):
                    raise PluginError(f"{hook} must return a list, not {values!r:.100}")
                yield from list(values)
            except PluginError as error:
                plugin.fail(str(error))
            except (Exception, SystemExit) as error:
                plugin.fail(error)


def load_registry(environ: Mapping[str, str] = os.environ) -> Registry:
    """Find and register all plugins: the built-ins first, then the installed ones by name."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    own = Plugin(BUILTIN_PLUGIN, "kvbench", kvbench.__version__)
    plugins = [own]
    disabled = {name.strip() for name in environ.get(DISABLE_VARIABLE, "").split(",")} - {""}
    _register(manager, own, lambda: builtins, disabled)
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        distribution = point.dist
        plugin = Plugin(
            point.name, distribution.name if distribution else "?", distribution.version if distribution else "?"
        )
        plugins.append(plugin)
        _register(manager, plugin, point.load, disabled)
    unknown = disabled - {plugin.name for plugin in plugins}
    warnings = [
        f"{DISABLE_VARIABLE}: {unknown_name('plugin', name, [p.name for p in plugins])}" for name in sorted(unknown)
    ]
    return Registry(manager, plugins, warnings)


def _register(manager: pluggy.PluginManager, plugin: Plugin, load: Callable[[], Any], disabled: set[str]) -> None:
    if plugin.name in disabled:
        plugin.disabled = True
        return
    if manager.has_plugin(plugin.name):
        plugin.fail(f"another plugin is called '{plugin.name}'; disable or uninstall one of them")
        return
    implementation = None
    try:
        implementation = load()
        check_api_version(implementation)
        manager.register(implementation, plugin.name)
        manager.check_pending()
        if not manager.get_hookcallers(implementation):
            raise PluginError(
                "provides nothing: it has no function kvbench_quantizers, kvbench_tasks, kvbench_models or "
                "kvbench_report_sections decorated with @hookimpl"
            )
        plugin.registered = True
    except PluginError as error:
        plugin.fail(str(error))
        _forget(manager, plugin.name, implementation)
    except (Exception, SystemExit) as error:
        plugin.fail(error)
        _forget(manager, plugin.name, implementation)


def _forget(manager: pluggy.PluginManager, name: str, implementation: Any) -> None:
    """pluggy keeps a plugin whose registration failed, and would call the hooks it got to."""
    if implementation is not None and manager.get_plugin(name) is implementation:
        manager.unregister(implementation)


def _checked_name(value: Any) -> str:
    name = getattr(value, "name", None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PluginError(
            f"{_qualified(value)} needs a 'name' of letters, digits, dots, dashes and underscores, not {name!r:.60}"
        )
    return name


def _qualified(value: Any) -> str:
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def _builtin_models() -> frozenset[str]:
    folder = resources.files("kvbench.conf") / "model"
    if not folder.is_dir():
        return frozenset()
    return frozenset(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))
