"""The sections of every report, in reading order. Plugins' sections follow them and are rendered the same way."""

from typing import TYPE_CHECKING, ClassVar

from kvbench.reports import charts
from kvbench.reports.compression_section import CompressionSection
from kvbench.reports.differences import DifferencesSection
from kvbench.reports.escaping import markdown_text
from kvbench.reports.figure import Figure
from kvbench.reports.heat_maps import energy_maps
from kvbench.reports.provenance import EngagementSection, EnvironmentSection
from kvbench.reports.scores import (
    REFERENCE,
    YARDSTICK,
    contenders,
    error_change,
    finite,
    number,
    percent,
    perplexity_change,
    whole_or_number,
)
from kvbench.reports.section import ReportSection
from kvbench.reports.summary import SummarySection, score_cell
from kvbench.reports.table import Cell, Column, Table
from kvbench.reports.task_sections import FidelitySection, LatencySection, NeedlesSection

if TYPE_CHECKING:
    from kvbench.results import Result

DASH = "–"


class LogitErrorSection(ReportSection):
    """Error of attention logits, layer by layer."""

    name: ClassVar[str] = "logit-error"
    title: ClassVar[str] = "Logit error"

    def html(self, result: "Result") -> str:
        rows = [row for row in contenders(result) if row.per_layer_error]
        series = {row.label: row.per_layer_error for row in rows}
        figure = charts.error_by_layer(series, {row.label: row.measurement.quantizer.name for row in rows})
        picture = figure.html() if figure else ""
        return picture + self._means(result).html() if self._applies(result) else ""

    def markdown(self, result: "Result") -> str:
        if not self._applies(result):
            return ""
        series = {row.label: row.per_layer_error for row in contenders(result) if row.per_layer_error}
        by_layer = [charts.errors_table(series).markdown()] if series else []
        return "\n\n".join([self._means(result).markdown(), *by_layer])

    def _applies(self, result: "Result") -> bool:
        return any("logit_error" in row.measurement.tasks for row in contenders(result))

    def _means(self, result: "Result") -> Table:
        titles = ("mean", f"vs {YARDSTICK}", "best layer", "worst layer", "samples")
        rows: list[list[Cell | str]] = []
        for row in contenders(result):
            layers = {i: value for i, value in enumerate(row.per_layer_error) if value is not None}
            record = row.measurement.tasks.get("logit_error")
            ends = [f"{number(layers[i])} (layer {i})" for i in _extremes(layers)] if layers else [DASH, DASH]
            samples = f"{record.n:,} {record.unit}" if record is not None else DASH
            mean = score_cell(row.score("logit_error", "mean"))
            rows.append([row.label, mean, percent(error_change(result, row)), *ends, samples])
        caption = "Mean absolute error of attention logits over layers, heads, tokens and offsets."
        return Table(caption, (Column("quantizer", numeric=False), *map(Column, titles)), rows)


def _extremes(layers: dict[int, float]) -> tuple[int, int]:
    return min(layers, key=layers.__getitem__), max(layers, key=layers.__getitem__)


class AllocationSection(ReportSection):
    """Where the key bits went: code widths by layer, KV head and RoPE block."""

    name: ClassVar[str] = "allocation"
    title: ClassVar[str] = "Bit allocation"

    def html(self, result: "Result") -> str:
        parts = []
        for name, allocation in _allocations(result).items():
            if len(charts.widths_used(allocation)) > 1:
                parts.append(charts.shares_by_layer(name, allocation).html())
                parts.append(charts.width_maps(name, allocation).html())
            parts.append(_shares_table(name, allocation).html())
        return "".join(parts)

    def markdown(self, result: "Result") -> str:
        return "\n\n".join(
            _shares_table(name, allocation).markdown() for name, allocation in _allocations(result).items()
        )


def _allocations(result: "Result") -> dict[str, charts.Allocation]:
    found = {row.label: row.measurement.quantizer.allocation for row in contenders(result)}
    return {name: allocation for name, allocation in found.items() if allocation and charts.widths_used(allocation)}


def _shares_table(name: str, allocation: charts.Allocation) -> Table:
    widths = [bits for layer in allocation for head in layer for bits in head]
    rows = [
        [charts.bits_text(bits), f"{widths.count(bits):,}", f"{100 * widths.count(bits) / len(widths):.1f} %"]
        for bits in sorted(set(widths))
    ]
    rows.append(["mean", f"{len(widths):,}", f"{number(sum(widths) / len(widths))} bits"])
    columns = (Column("code width", numeric=False), Column("RoPE blocks"), Column("share"))
    return Table(f"{name}: key code widths over {len(allocation)} layers, all KV heads.", columns, rows)


class EnergySection(ReportSection):
    """Where the model's queries and keys have their energy: what mixed bit widths are made from."""

    name: ClassVar[str] = "energy"
    title: ClassVar[str] = "Energy of RoPE blocks"

    def html(self, result: "Result") -> str:
        figure = self._figure(result)
        return figure.html() if figure else ""

    def markdown(self, result: "Result") -> str:
        figure = self._figure(result)
        return markdown_text(f"{figure.caption} {figure.description}") if figure else ""

    def _figure(self, result: "Result") -> Figure | None:
        energy = result.block_energy
        return energy_maps(energy.by_tensor(), result.model.name) if energy is not None else None


class PerplexitySection(ReportSection):
    """Perplexity of the evaluation text."""

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Perplexity"

    def html(self, result: "Result") -> str:
        return self._table(result).html() if self._applies(result) else ""

    def markdown(self, result: "Result") -> str:
        return self._table(result).markdown() if self._applies(result) else ""

    def _applies(self, result: "Result") -> bool:
        return any("perplexity" in row.measurement.tasks for row in contenders(result))

    def _table(self, result: "Result") -> Table:
        rows: list[list[Cell | str]] = []
        for row in contenders(result):
            main = score_cell(row.score("perplexity", "perplexity"))
            rest = (
                row.score("perplexity", metric).value for metric in ("nll", "tokens", "windows", "stride", "seconds")
            )
            texts = [DASH if value is None else whole_or_number(value) for value in rest]
            rows.append([row.label, main, percent(perplexity_change(result, row)), *texts])
        titles = ("perplexity", f"vs {REFERENCE}", "nll", "tokens", "windows", "stride", "seconds")
        caption = "Perplexity of the evaluation text; nll in nats per token."
        return Table(caption, (Column("quantizer", numeric=False), *map(Column, titles)), rows)


class TasksSection(ReportSection):
    """Every task of every quantizer, whatever became of it."""

    name: ClassVar[str] = "tasks"
    title: ClassVar[str] = "All measurements"

    def html(self, result: "Result") -> str:
        return f"<details><summary>Every task of every quantizer</summary>{self._table(result).html()}</details>"

    def markdown(self, result: "Result") -> str:
        return self._table(result).markdown()

    def _table(self, result: "Result") -> Table:
        rows: list[list[Cell | str]] = []
        for row in contenders(result):
            for name, record in row.measurement.tasks.items():
                scalars = {key: finite(value) for key, value in record.metrics.items()}
                metrics = ", ".join(
                    f"{key} {whole_or_number(value)}" for key, value in scalars.items() if value is not None
                )
                notes = "; ".join(
                    [*record.notes, *(["reused from an earlier run"] if record.reused else []), record.error or ""]
                )
                status = Cell(record.status, bad=record.status != "ok")
                facts = [
                    record.path or DASH,
                    metrics or DASH,
                    f"{record.n:,} {record.unit}".strip(),
                    f"{record.duration_s:.1f} s",
                    DASH if record.prefill_peak_bytes is None else f"{record.prefill_peak_bytes / 1e6:,.0f} MB",
                ]
                rows.append([row.label, name, status, *facts, notes.strip("; ") or DASH])
        titles = ("quantizer", "task", "status", "path", "metrics", "samples", "time", "prefill peak", "notes")
        return Table("Tasks as recorded.", tuple(Column(title, numeric=False) for title in titles), rows)


SECTIONS: tuple[type[ReportSection], ...] = (
    SummarySection,
    CompressionSection,
    LogitErrorSection,
    AllocationSection,
    EnergySection,
    PerplexitySection,
    FidelitySection,
    DifferencesSection,
    NeedlesSection,
    LatencySection,
    TasksSection,
    EngagementSection,
    EnvironmentSection,
)
