"""The text of ``kvbench --help``."""

import dataclasses
import textwrap
from collections.abc import Iterator
from importlib import resources
from typing import Any

import kvbench
from kvbench.configuration import CacheConfig, CalibrationConfig, Config, CorpusConfig, ModelConfig
from kvbench.registry import Entry, Registry

WIDTH = 34
SHOWN_VALUES = 4  # of a list
PAGE = 118
GROUP_OPTIONS: dict[str, type] = {"model": ModelConfig, "corpus": CorpusConfig}
HEADER = f"""\
kvbench {kvbench.__version__}: benchmark LLM KV-cache quantizers on packed bytes, next to fp16 and TQ-MSE.

Usage
  kvbench [KEY=VALUE ...]             run one benchmark
  kvbench -m KEY=VALUE1,VALUE2 ...    run a sweep: one folder a cell, one summary at the end
  kvbench report DIR... [--out FILE]  compare everything that was run, as a table or as HTML, Markdown, CSV, Parquet
  kvbench plugins                     what is installed, and what failed to load
  kvbench new-plugin NAME             the beginnings of a plugin: a distribution that works as it is
  kvbench bench kernels --out DIR     the packed kernels against the best fp16 attention, on a GPU
  kvbench doctor                      versions, devices, the attention baseline, the default model

Examples
  kvbench quantizer=blockgtq model=smollm2-135m quantizer.k_bits=3 quantizer.v_bits=3
  kvbench quantizer=tqmse task=[logit_error] task.logit_error.tokens=512 hydra.run.dir=out
  kvbench -m quantizer=tqmse,blockgtq quantizer.k_bits=2,3
  kvbench report multirun --out comparison.html
  kvbench model=local model.path=DIR corpus=files corpus.calibration=A.txt corpus.evaluation=B.txt
"""
FOOTER = """\
Flags
  --cfg job                           show the configuration instead of running
  -m, --multirun                      sweep over values separated by commas; hydra.launcher.jobs=N at a time
  --version, --hydra-help             versions; Hydra's own flags and tab completion
"""


def help_text(registry: Registry) -> str:
    """Commands, examples, every choice and every option with its default and meaning.

    Hydra's own ``--help`` would compose the configuration and take three times as long.
    """
    lines = [HEADER, "Quantizers: quantizer=NAME, options quantizer.OPTION=VALUE"]
    lines += _choices(registry.quantizers)
    lines += ["", "Tasks: task=[NAME,...], options task.NAME.OPTION=VALUE"]
    lines += _choices(registry.tasks)
    for group, names in _configuration_groups(registry):
        lines += ["", f"{group.capitalize()}: {group}=NAME, options {group}.OPTION=VALUE"]
        lines += textwrap.wrap(
            ", ".join(names), PAGE, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        if group in GROUP_OPTIONS:
            lines += _options(GROUP_OPTIONS[group], "  ", skip=("name",))
    lines += ["", "Options"]
    lines += _options(Config, "", skip=("quantizer", "model", "task", "corpus", "calibration", "cache"))
    lines += _options(CalibrationConfig, "calibration.")
    lines += _options(CacheConfig, "cache.")
    lines += ["", FOOTER]
    return "\n".join(lines)


def _configuration_groups(registry: Registry) -> Iterator[tuple[str, list[str]]]:
    """Groups that are folders of ``kvbench.conf``, and the names of their choices."""
    for folder in sorted(resources.files("kvbench.conf").iterdir(), key=lambda folder: folder.name):
        if not folder.is_dir():
            continue
        names = {item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml")}
        if folder.name == "model":
            names |= set(registry.models)
        if names:
            yield folder.name, sorted(names)


def _choices(entries: dict[str, Entry[Any]]) -> Iterator[str]:
    for name, entry in sorted(entries.items()):
        origin = "" if entry.distribution == "kvbench" else f" [{entry.distribution} {entry.version}]"
        yield _row(f"  {name}", entry.description + origin)
        yield from _options(entry.value, "  ")


def _options(cls: type, prefix: str, skip: tuple[str, ...] = ()) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if field.name in skip or not field.init:
            continue
        default: Any = "???"
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = _listed(default) if isinstance(default, list) else default
        yield _row(f"  {prefix}{field.name}={'null' if shown is None else shown}", field.metadata.get("help", ""))


def _listed(values: list[Any]) -> str:
    """A list as it is written on the command line, cut where it is long."""
    shown = [str(value) for value in values]
    return f"[{', '.join(shown if len(shown) <= SHOWN_VALUES else [*shown[:SHOWN_VALUES], '...'])}]"


def _row(left: str, right: str) -> str:
    """``right`` beside ``left``, cut into lines; reStructuredText's double quotes are left out."""
    text = right.replace("``", "")
    indent = " " * (WIDTH + 2)
    return (
        textwrap.fill(
            text, PAGE, initial_indent=f"{left:<{WIDTH}}  ", subsequent_indent=indent, break_on_hyphens=False
        ).rstrip()
        or left
    )
