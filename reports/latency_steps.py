"""The tables of ``docs/latency.md``: whole decode steps beside fp16's, and where they stand against what was aimed at.

    python -m kvbench.reports.latency_steps RUNS... --docs docs

``RUNS`` are folders with runs of ``task=latency`` on a GPU, each with the baseline fp16 and with
``task.latency.attention=[auto,torch-flash]``. What several runs measured of one model, dtype, compilation, context and
batch size is taken from the last one.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.errors import KvbenchError, ResultError
from kvbench.reports.collect import Run, collect
from kvbench.reports.evidence import between
from kvbench.reports.table import Cell, Column, Table
from kvbench.results import write_text_atomically

PAGE = "latency.md"
GIB = 2**30
FLASH = "torch-flash"
Row = dict[str, Any]


class Setting(NamedTuple):
    """What two steps must have in common to be compared."""

    model: str
    dtype: str
    compile: str
    batch: int
    context: int


@dataclass(frozen=True)
class Steps:
    """The rows of one setting, as ``tasks.latency`` writes them; fp16's is its fastest attention's."""

    packed: Row
    fp16: Row
    flash: Row | None

    def times(self, other: Row | None) -> float | None:
        """How many times as long the other step takes; None where one of them was not measured."""
        ours, theirs = self.packed["decode_ms_median"], other and other["decode_ms_median"]
        return theirs / ours if ours and theirs else None

    @property
    def best(self) -> float | None:
        """Against fp16 with its fastest attention."""
        return self.times(self.fp16)

    @property
    def over_flash(self) -> float | None:
        """Against fp16 with PyTorch's FlashAttention-2."""
        return self.times(self.fp16 if self.fp16["attention"] == FLASH else self.flash)


def steps_of(runs: Iterable[Run]) -> dict[Setting, Steps]:
    """All settings that were measured on a GPU with both methods, in order."""
    found: dict[Setting, Steps] = {}
    for run in sorted(runs, key=lambda run: run.result.created):
        result = run.result
        baseline = result.baselines.get("fp16")
        own, other = result.tasks.get("latency"), baseline and baseline.tasks.get("latency")
        if own is None or other is None or result.environment.device.startswith("CPU"):
            continue
        curves = [_by_cell(task.metrics["curve"]) for task in (own, other)]
        flash = _by_cell(row for row in other.metrics["other_attention"] if row["attention"] == FLASH)
        for cell, packed in curves[0].items():
            if cell in curves[1]:
                setting = Setting(result.model.name, result.model.dtype, packed["compile"], *cell)
                found[setting] = Steps(packed, curves[1][cell], flash.get(cell))
    if not found:
        raise ResultError("no run of task=latency on a GPU with the baseline fp16 is there: nothing to make tables of.")
    return dict(sorted(found.items()))


def _by_cell(rows: Iterable[Row]) -> dict[tuple[int, int], Row]:
    return {(row["batch"], row["context"]): row for row in rows}


def steps_table(steps: dict[Setting, Steps]) -> Table:
    """A line a setting."""
    titles = (
        "model", "batch", "context", "fp16's attention", "fp16 ms", "packed ms", "faster", "than FlashAttention-2",
        "rest of the model ms", "floor ms", "fp16 cache GiB", "packed cache GiB", "packed peak GiB",
    )  # fmt: skip
    lines: list[list[Cell | str]] = []
    for setting, each in steps.items():
        packed, fp16 = each.packed, each.fp16
        lines.append(
            [
                f"{setting.model}, {setting.dtype}, {setting.compile}",
                str(setting.batch),
                f"{setting.context >> 10}K",
                "out of memory" if fp16["out_of_memory"] else str(fp16["attention"]),
                _number(fp16["decode_ms_median"], 3),
                "out of memory" if packed["out_of_memory"] else _number(packed["decode_ms_median"], 3),
                _number(each.best, 2),
                _number(each.over_flash, 2),
                _number((packed["parts"] or {}).get("rest"), 2),
                _number(packed["floor_ms"], 2),
                _number(fp16["cache_bytes"], 2, GIB),
                _number(packed["cache_bytes"], 2, GIB),
                _number(packed["peak_bytes"], 2, GIB),
            ]
        )
    caption = "Medians; rest: the packed step without attention; floor: reading weights and packed cache once."
    return Table(caption, tuple(Column(title, index not in (0, 3)) for index, title in enumerate(titles)), lines)


def _number(value: float | None, digits: int, unit: float = 1) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


@dataclass(frozen=True)
class Aim:
    """A number aimed at: ``value`` of a step, in the settings that it is about, at least (or at most) ``bound``."""

    text: str
    bound: float
    value: Callable[[Steps], float | None]
    about: Callable[[Setting], bool]
    at_most: bool = False

    def lines(self, steps: Mapping[Setting, Steps]) -> list[list[Cell | str]]:
        """The aim in every setting that was measured; one line that says so where none was."""
        told: list[list[Cell | str]] = []
        for setting, each in steps.items():
            if self.about(setting) and (value := self.value(each)) is not None:
                met = value <= self.bound if self.at_most else value >= self.bound
                where = f"{setting.dtype}, batch {setting.batch}, {setting.context >> 10}K"
                told.append([self.text, where, f"{self.bound:g}", Cell(f"{value:.2f}", () if met else ("missed",))])
        return told or [[self.text, "not measured", f"{self.bound:g}", "–"]]


def _rest(steps: Steps) -> float | None:
    parts = steps.packed["parts"]
    return parts and float(parts["rest"])


def _peak(steps: Steps) -> float | None:
    peak = steps.packed["peak_bytes"]
    return peak and peak / 1e9


def _about(model: str, batch: int, *contexts: int) -> Callable[[Setting], bool]:
    return lambda at: (at.model, at.batch, at.compile) == (model, batch, "default") and at.context in contexts


QWEN, LLAMA = "qwen2.5-3b", "llama3.1-8b"
K4, K16, K64, K128, K512 = (count << 10 for count in (4, 16, 64, 128, 512))
SHORT = (K4, K16, K64, K128)
AIMS = (
    Aim(f"{QWEN}: never slower", 1.0, lambda each: each.best, _about(QWEN, 1, *SHORT)),
    Aim(f"{LLAMA}: never slower", 1.0, lambda each: each.best, _about(LLAMA, 1, *SHORT)),
    Aim(f"{QWEN}, 128K, against FlashAttention-2", 1.34, lambda each: each.over_flash, _about(QWEN, 1, K128)),
    Aim(f"{QWEN}, 128K", 1.15, lambda each: each.best, _about(QWEN, 1, K128)),
    Aim(f"{QWEN}, 512K", 1.55, lambda each: each.best, _about(QWEN, 1, K512)),
    Aim(f"{QWEN}, 128K, batch 8", 1.8, lambda each: each.best, _about(QWEN, 8, K128)),
    Aim(f"{LLAMA}, 128K", 1.3, lambda each: each.best, _about(LLAMA, 1, K128)),
    Aim(f"{LLAMA}, 128K, batch 8", 2.0, lambda each: each.best, _about(LLAMA, 8, K128)),
    Aim(f"{QWEN}, without attention, ms at most", 3.5, _rest, _about(QWEN, 1, *SHORT), at_most=True),
    Aim(f"{QWEN}, 512K, GB at the peak at most", 25, _peak, _about(QWEN, 1, K512), at_most=True),
)
"""What the packed cache is to reach: times as fast as fp16 where nothing else is said."""


def aims_table(steps: Mapping[Setting, Steps]) -> Table:
    """Where the steps stand."""
    columns = (Column("aim", False), Column("where", False), Column("bound"), Column("measured"))
    lines = [line for aim in AIMS for line in aim.lines(steps)]
    return Table("Times as fast as fp16 where nothing else is said.", columns, lines)


def filled(text: str, runs: Sequence[Run]) -> str:
    """The page ``text`` with its tables made of the runs."""
    steps = steps_of(runs)
    text = between(text, "steps", steps_table(steps).markdown())
    return between(text, "aims", aims_table(steps).markdown())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; the exit code is 2 where runs or page are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.reports.latency_steps", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with runs")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the page is")
    given = parser.parse_args(arguments)
    page = given.docs / PAGE
    try:
        text = filled(page.read_text(encoding="utf-8"), collect(given.runs).runs)
    except OSError as error:
        print(f"cannot read {page}: {error.strerror or error}. Give the folder with --docs.", file=sys.stderr)
        return 2
    except KvbenchError as error:
        print(error, file=sys.stderr)
        return 2
    write_text_atomically(page, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
