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
    _print_table("Quantizers", registry.quantizers.values())
    _print_table("Tasks", registry.tasks.values())
    _print_table("Models", registry.models.values(), builtin=sorted(registry.builtin_models))
    _print_table("Report sections", sections.values())
    _print_problems(registry)
    return 0


def _print_table(title: str, entries: Iterable[Entry[Any]], builtin: Sequence[str] = ()) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for heading in ("name", "from", "version", "what it is"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        description = _model_line(entry.value) if isinstance(entry.value, ModelConfig) else entry.description
        table.add_row(*map(Text, (entry.name, entry.distribution, entry.version, description.replace("``", ""))))
    for name in builtin:
        table.add_row(*map(Text, (name, "kvbench", _kvbench_version(), f"model={name}")))
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
