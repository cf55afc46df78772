"""The sections of a run's report about fidelity, needles in a haystack, latency and memory."""

from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.reports.curves import Curve, curves_of, latency_figures_of, latency_table
from kvbench.reports.heat_maps import needle_maps
from kvbench.reports.scores import Contender, contenders, finite, number
from kvbench.reports.section import ReportSection
from kvbench.reports.summary import score_cell
from kvbench.reports.table import Cell, Column, Table

if TYPE_CHECKING:
    from kvbench.results import Result

DASH = "–"
NEEDLE_METRICS = (
    ("score", "NIAH score", "share of the needles found, higher is better"),
    ("answer_nll", "NIAH answer NLL", "nats per token, lower is better"),
)
"""Metrics of task ``niah`` with their titles and units; each may have a heat map."""


class FidelitySection(ReportSection):
    """How far the next-token distributions are from the unquantized model's."""

    name: ClassVar[str] = "fidelity"
    title: ClassVar[str] = "Fidelity"

    def html(self, result: "Result") -> str:
        table = _task_table(result, "fidelity", ("kl", "top1_agreement"), "Against the same model, unquantized: {}")
        return table.html() if table else ""

    def markdown(self, result: "Result") -> str:
        table = _task_table(result, "fidelity", ("kl", "top1_agreement"), "Against the same model, unquantized: {}")
        return table.markdown() if table else ""


class NeedlesSection(ReportSection):
    """Needle in a haystack: means, and a heat map a quantizer."""

    name: ClassVar[str] = "needles"
    title: ClassVar[str] = "Needle in a haystack"

    def html(self, result: "Result") -> str:
        table = self._table(result)
        if table is None:
            return ""
        named = [
            (row.label, "", row.measurement.tasks["niah"].metrics)
            for row in contenders(result)
            if "niah" in row.measurement.tasks
        ]
        figures = [
            needle_maps(named, metric, title, f"{title} ({unit}); depth down, prompt length across.")
            for metric, title, unit in NEEDLE_METRICS
        ]
        return table.html() + "".join(figure.html() for figure in figures if figure is not None)

    def markdown(self, result: "Result") -> str:
        table = self._table(result)
        return table.markdown() if table else ""

    def _table(self, result: "Result") -> Table | None:
        return _task_table(result, "niah", ("score", "answer_nll"), "Needles found, and answers' likelihood: {}")


class LatencySection(ReportSection):
    """Decode latency and memory against context length."""

    name: ClassVar[str] = "latency"
    title: ClassVar[str] = "Latency and memory"

    def html(self, result: "Result") -> str:
        curves = self._curves(result)
        if not curves:
            return ""
        return "".join(figure.html() for figure in latency_figures_of(curves)) + latency_table(curves).html()

    def markdown(self, result: "Result") -> str:
        curves = self._curves(result)
        return latency_table(curves).markdown() if curves else ""

    def _curves(self, result: "Result") -> list[Curve]:
        return [
            curve for row in contenders(result) for curve in curves_of(row.label, "", result.run_id, row.measurement)
        ]


def _task_table(result: "Result", task: str, metrics: tuple[str, ...], caption: str) -> Table | None:
    """The metrics of one task with their intervals, a line a quantizer; None where nothing ran it."""
    rows: list[list[Cell | str]] = []
    unit = ""
    for row in contenders(result):
        record = row.measurement.tasks.get(task)
        if record is None:
            continue
        unit = record.unit or unit
        cells: list[Cell | str] = []
        for metric in metrics:
            cells += [score_cell(row.score(task, metric)), _interval(row, task, metric)]
        rows.append([row.label, *cells, f"{record.n:,} {record.unit}".strip()])
    if not rows:
        return None
    titles = [title for metric in metrics for title in (metric.replace("_", " "), "95 % interval")]
    columns = (Column("quantizer", numeric=False), *map(Column, titles), Column("samples"))
    return Table(caption.format(f"means over {unit or 'samples'}."), columns, rows)


def _interval(row: Contender, task: str, metric: str) -> str:
    """``<metric>_interval`` as tasks report it: mean, low, high."""
    found: Any = row.measurement.tasks[task].metrics.get(f"{metric}_interval")
    bounds = [finite(value) for value in found] if isinstance(found, list) else []
    if len(bounds) != 3 or bounds[1] is None or bounds[2] is None:
        return DASH
    return f"{number(bounds[1])} to {number(bounds[2])}"
