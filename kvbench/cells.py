"""The cells of a sweep: their names, what became of them, and the summary of all."""

import hashlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import ResultError

if TYPE_CHECKING:
    from kvbench.results import Result

# Folder names of 255 bytes are the limit of common file systems; half of it leaves room for files' temporary names.
MAX_NAME = 120
UNSAFE = re.compile(r"[^A-Za-z0-9._=,+\[\]-]+")
WIDE = 200
NOT_RUN = "not run"
FAILURES = ("failed", "partial", NOT_RUN)


class SweepFailed(Exception):
    """At least one cell of a sweep failed; everything about it has been reported."""


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep's overrides, and the name of its folder."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class CellOutcome:
    """What became of a cell: a result's status, or ``failed`` with the reason, or ``not run`` after an interrupt."""

    name: str
    overrides: tuple[str, ...]
    status: str
    error: str | None = None
    ratio: float | None = None
    effective_bits_k: float | None = None
    effective_bits_v: float | None = None
    logit_error: float | None = None
    perplexity: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the sweep ends with an error for it. Out of memory is a finding, not a failure."""
        return self.status in FAILURES


def name_cells(combinations: Sequence[Sequence[str]]) -> list[Cell]:
    """Cells named by those of their overrides that differ between cells (by all of them, where none does).

    A name that had to be changed or cut for the file system ends in a hash of the overrides, so that names differ
    where overrides do.
    """
    shared = set.intersection(*map(set, combinations)) if len(combinations) > 1 else set()
    return [Cell(_name([each for each in cell if each not in shared] or cell), tuple(cell)) for cell in combinations]


def _name(overrides: Sequence[str]) -> str:
    plain = ",".join(overrides) or "defaults"
    safe = UNSAFE.sub("_", plain).lstrip(".-")
    if safe == plain and len(safe) <= MAX_NAME:
        return safe
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return f"{safe[: MAX_NAME - 9]}-{digest}"


def read_outcome(cell: Cell, directory: Path, error: str | None = None) -> CellOutcome:
    """The outcome of a cell from the result in its folder; ``error`` says why there is none or a bad one."""
    from kvbench.results import read_result

    path = directory / "result.json"
    if error is not None or not path.exists():
        return CellOutcome(cell.name, cell.overrides, "failed" if error else NOT_RUN, error)
    try:
        result = read_result(path)
    except ResultError as unreadable:
        return CellOutcome(cell.name, cell.overrides, "failed", str(unreadable))
    return CellOutcome(cell.name, cell.overrides, result.status, result_error(result), **_figures(result))


def result_error(result: "Result") -> str | None:
    """Why a result is not ``ok``, in one line: its own error, or its tasks', of a traceback the last line."""
    errors = [f"{name}: {_last_line(task.error)}" for name, task in result.tasks.items() if task.error]
    for name, baseline in result.baselines.items():
        errors += [f"{name}, {task}: {_last_line(each.error)}" for task, each in baseline.tasks.items() if each.error]
    return _last_line(result.error) if result.error else "; ".join(errors) or None


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip() if text.strip() else "no reason given"


def _figures(result: "Result") -> dict[str, float | None]:
    figures: dict[str, float | None] = {
        "logit_error": _metric(result, "logit_error", "mean"),
        "perplexity": _metric(result, "perplexity", "perplexity"),
    }
    if result.compression is not None:
        for key in ("ratio", "effective_bits_k", "effective_bits_v"):
            figures[key] = getattr(result.compression, key)
    return figures


def _metric(result: "Result", task: str, key: str) -> float | None:
    record = result.tasks.get(task)
    value: Any = record.metrics.get(key) if record else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def write_summary(outcomes: Sequence[CellOutcome], directory: Path) -> None:
    """Write ``summary.json`` and ``summary.md`` into a sweep's folder."""
    from kvbench.results import write_text_atomically

    data = {"schema_version": 1, "cells": [{**asdict(each), "directory": each.name} for each in outcomes]}
    write_text_atomically(directory / "summary.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    rows = [_row(outcome) for outcome in outcomes]
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'|'.join(['---', '---'] + ['---:'] * (len(HEADINGS) - 2))}|"]
    lines += [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows]
    failures = [f"- `{each.name}`: {_one_line(each.error)}" for each in outcomes if each.error]
    text = "\n".join(["# kvbench sweep", "", *lines, *(["", "## Failures", "", *failures] if failures else [])])
    write_text_atomically(directory / "summary.md", text + "\n")


HEADINGS = ("cell", "status", "ratio", "bits K", "bits V", "logit error", "perplexity")


def print_cells(outcomes: Sequence[CellOutcome]) -> None:
    """Print the summary as a table, and below it the error of each cell that has one."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # In a pipe there is no width to fit: names are not broken there.
    console = Console(width=None if sys.stdout.isatty() else WIDE, soft_wrap=True)
    table = Table(caption="ratio and bits count all allocated bytes", caption_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 2 else "right", overflow="fold")
    for outcome in outcomes:
        style = "red" if outcome.failed else "yellow" if outcome.status != "ok" else "green"
        cell, status, *figures = _row(outcome)
        table.add_row(Text(cell), Text(status, style=style), *figures)
    console.print(table)
    for outcome in outcomes:
        if outcome.error:
            console.print(Text(f"{outcome.name}: {_one_line(outcome.error)}"))


def _row(outcome: CellOutcome) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return (
        outcome.name,
        outcome.status,
        f"{outcome.ratio:.2f}x" if outcome.ratio is not None else "–",
        shown(outcome.effective_bits_k, ".2f"),
        shown(outcome.effective_bits_v, ".2f"),
        shown(outcome.logit_error, ".3f"),
        shown(outcome.perplexity, ".2f"),
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
