"""Progress bars: on a terminal's standard error, silent elsewhere."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate over ``items`` with a bar that disappears when done; no output unless standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return items
    return rich_track(items, description=description, console=console, transient=True)


def announce(step: str) -> None:
    """Say on a terminal what is being done now."""
    console = Console(stderr=True)
    if console.is_terminal:
        console.print(f"{step} ...", style="dim", highlight=False)
