"""``kvbench plugins``: what is installed, who provides it, and what failed to load."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.configuration import ModelConfig
from kvbench.registry import DISABLE_VARIABLE, Entry, Registry, load_registry

PIPE_WIDTH = 200


def main(arguments: Sequence[str]) -> int:
    """Print the listing. Broken plugins do not change the exit code: the listing is what was asked for."""
    parser = argparse.ArgumentParser(prog="kvbench plugins", description=__doc__)
    parser.parse_args(list(arguments))
    registry = load_registry()
    sections = registry.report_sections  # asked for first: what fails here belongs to the list of errors
    _print_plugins(registry)
    _print_quantizers(registry)
    _print_table("Tasks", registry.tasks.values())
    _print_table("Models", registry.models.values(), builtin=sorted(registry.builtin_models))
    _print_table("Report sections", sections.values())
    _print_problems(registry)
    return 0


def _print_plugins(registry: Registry) -> None:
    """Every distribution's plugin, whether it takes part, and if not, why in a few words."""
    rows = []
    for plugin in registry.plugins:
        status = "disabled" if plugin.disabled else "enabled" if plugin.registered else "failed"
        if plugin.registered and plugin.errors:
            status = "enabled in part"
        rows.append((plugin.name, plugin.distribution, plugin.version, status))
    _print("Plugins", ("name", "from", "version", "status"), rows)


def _print_quantizers(registry: Registry) -> None:
    from kvbench.plugin_probe import probe_quantizer

    rows = []
    for entry in registry.quantizers.values():
        served = probe_quantizer(entry.value)
        found = (served.formats, served.backends, served.status)
        rows.append((entry.name, entry.distribution, entry.version, *found, entry.description))
    headings = ("name", "from", "version", "formats", "backends", "status", "what it is")
    _print("Quantizers", headings, rows)


def _print_table(title: str, entries: Iterable[Entry[Any]], builtin: Sequence[str] = ()) -> None:
    rows = []
    for entry in entries:
        description = _model_line(entry.value) if isinstance(entry.value, ModelConfig) else entry.description
        rows.append((entry.name, entry.distribution, entry.version, description))
    rows += [(name, "kvbench", _kvbench_version(), f"model={name}") for name in builtin]
    _print(title, ("name", "from", "version", "what it is"), rows)


def _print(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell.replace("``", "")) for cell in row))
    console.print(table)
    console.print()


def _kvbench_version() -> str:
    import kvbench

    return kvbench.__version__


def _model_line(model: ModelConfig) -> str:
    if model.random:
        return "random weights"
    return model.path or model.wheel or model.hub_id or "given by its options"


def _print_problems(registry: Registry) -> None:
    for warning in registry.warnings:
        print(f"warning: {warning}")
    for plugin in registry.plugins:
        if plugin.disabled:
            print(f"disabled: {plugin}, by {DISABLE_VARIABLE}")
    for plugin in registry.broken:
        for error in plugin.errors:
            print(f"broken: {plugin}: {error}")
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            print("\n".join(plugin.tracebacks), file=sys.stderr)
    if any(plugin.tracebacks for plugin in registry.broken):
        print("HYDRA_FULL_ERROR=1 kvbench plugins shows tracebacks.")
