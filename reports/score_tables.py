"""Scores of tasks that are made of many: LongBench's datasets, lm-eval's tasks, the kinds of needles, plugins' own."""

from collections.abc import Iterable

from kvbench.reports.comparison import Comparison, Row
from kvbench.reports.differences import significant, verdict
from kvbench.reports.scores import REFERENCE, finite, whole_or_number
from kvbench.reports.table import Cell, Column, Table

ELSEWHERE = frozenset({"logit_error", "perplexity", "fidelity", "latency"})  # tasks with sections of their own
PER_TASK = "per_task"  # the metric under which niah keeps its kinds of needles
NOT_SCORES = frozenset(
    {
        "trials",
        "batch_size",
        "max_new_tokens",
        "new_tokens",
        "prompt_tokens",
        "truncated",
        "longest_prompt",
        "seconds",
        "sample_len",
        "windows",
    }
)
SPREAD = ("_stderr", ",stderr", "_std")


def score_tables(comparison: Comparison) -> list[Table]:
    """A table for each such task: a line a quantizer, a column a score; significant differences to fp16 are marked."""
    tasks = dict.fromkeys(task for row in comparison.rows for task in row.measurement.tasks if task not in ELSEWHERE)
    return [table for task in tasks if (table := _table(comparison, task)) is not None]


def _table(comparison: Comparison, task: str) -> Table | None:
    scored = [(row, _scores(row, task)) for row in comparison.rows if row.task(task) is not None]
    names = list(dict.fromkeys(name for _, scores in scored for name in scores))
    if not names:
        return None
    several = len(comparison.settings) > 1
    columns = [Column("quantizer", numeric=False), *([Column("model", numeric=False)] if several else [])]
    lines: list[list[Cell | str]] = []
    for row, scores in scored:
        where: list[Cell | str] = [comparison.setting_titles[row.setting]] if several else []
        lines.append([row.label, *where, *(_cell(row, task, name, scores.get(name)) for name in names)])
    caption = f"Task {task}. Marked: different from {REFERENCE} on the same samples, at 95 %."
    data = [{"row": row.key} for row, _ in scored]
    return Table(caption, (*columns, *map(Column, names)), lines, data, sortable=True)


def _scores(row: Row, task: str) -> dict[str, float]:
    """Scalar metrics by name, spreads left out; the parts of a task by ``part metric``."""
    record = row.task(task)
    if record is None:
        return {}
    found = dict(_scalars(record.metrics.items()))
    parts = record.metrics.get(PER_TASK)
    for part, metrics in parts.items() if isinstance(parts, dict) else ():
        if isinstance(metrics, dict):
            found |= {f"{part} {name}": value for name, value in _scalars(metrics.items())}
    return found


def _scalars(metrics: Iterable[tuple[str, object]]) -> Iterable[tuple[str, float]]:
    for name, value in metrics:
        number = finite(value)
        own = name.rpartition(".")[2]
        if number is not None and own not in NOT_SCORES and not own.endswith(SPREAD):
            yield name, number


def _cell(row: Row, task: str, name: str, value: float | None) -> Cell:
    if value is None:
        return Cell("–")
    difference = row.measurement.tasks[task].paired.get(REFERENCE, {}).get(name)
    if difference is None or not significant(difference):
        return Cell(whole_or_number(value), value=value)
    return Cell(whole_or_number(value), (verdict(name, difference),), strong=True, value=value)
