"""The sections of a comparison, in reading order. A plugin's section takes part by its ``compare`` method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.reports.comparison import Comparison
from kvbench.reports.comparison_cautions import comparison_cautions
from kvbench.reports.comparison_figures import (
    compression_figures,
    curves,
    energy_figures,
    figures_html,
    fingerprint_figures,
    fingerprint_layer_figures,
    latency_figures,
    layer_figures,
    needle_figures,
    pareto_figures,
)
from kvbench.reports.comparison_runs import commands_markdown, left_out_table, runs_html
from kvbench.reports.comparison_summary import controls, tiles
from kvbench.reports.comparison_table import HOW_TO_READ, comparison_table
from kvbench.reports.compression_section import compression_table
from kvbench.reports.curves import latency_table
from kvbench.reports.differences import differences_table
from kvbench.reports.escaping import html_text, markdown_text
from kvbench.reports.figure import Figure
from kvbench.reports.score_tables import score_tables
from kvbench.reports.scores import finite, whole_or_number
from kvbench.reports.table import Cell, Column, Table

Render = Callable[[Comparison], str]


@dataclass(frozen=True)
class Part:
    """A section: ``html`` and ``markdown`` give its body, or "" where it does not apply."""

    name: str
    title: str
    html: Render
    markdown: Render


def _summary_html(comparison: Comparison) -> str:
    cautions = "".join(f"<li>{html_text(sentence)}</li>" for sentence in comparison_cautions(comparison))
    notice = f'<div class="cautions" role="note" aria-label="Cautions"><ul>{cautions}</ul></div>' if cautions else ""
    table = f'<div id="comparison-table">{comparison_table(comparison).html()}</div>'
    return f"{tiles(comparison)}{notice}{controls(comparison)}{table}<p>{html_text(HOW_TO_READ)}</p>"


def _summary_markdown(comparison: Comparison) -> str:
    cautions = [f"- {markdown_text(sentence)}" for sentence in comparison_cautions(comparison)]
    table = comparison_table(comparison).markdown()
    return "\n".join([table, "", markdown_text(HOW_TO_READ), *([""] if cautions else []), *cautions])


def _drawn(of: Callable[[Comparison], list[Figure]]) -> Render:
    def render(comparison: Comparison) -> str:
        return figures_html(of(comparison))

    return render


def _allocation_html(comparison: Comparison) -> str:
    shares = figures_html(fingerprint_figures(comparison))
    layers = figures_html(fingerprint_layer_figures(comparison))
    return f"{shares}<details><summary>Layer by layer</summary>{layers}</details>" if shares else ""


def _compression_html(comparison: Comparison) -> str:
    return figures_html(compression_figures(comparison)) + _sizes(comparison).html()


def _sizes(comparison: Comparison) -> Table:
    return compression_table(
        (row.contender, row.key, Cell(row.run.result.run_id[:8], link=comparison.run_anchors[row.run.path]))
        for row in comparison.rows
    )


def _latency_html(comparison: Comparison) -> str:
    found = [latency_table(of) for setting in comparison.settings if (of := curves(comparison, setting))]
    tables = "".join(f"<details><summary>Values at each context</summary>{table.html()}</details>" for table in found)
    return figures_html(latency_figures(comparison)) + tables


def _latency_markdown(comparison: Comparison) -> str:
    found = [curves(comparison, setting) for setting in comparison.settings]
    return "\n\n".join(latency_table(of).markdown() for of in found if of)


def _differences(comparison: Comparison) -> Table | None:
    return differences_table((row.contender, row.key) for row in comparison.rows)


def _scores_html(comparison: Comparison) -> str:
    return "".join(table.html() for table in score_tables(comparison))


def _scores_markdown(comparison: Comparison) -> str:
    return "\n\n".join(table.markdown() for table in score_tables(comparison))


def _tasks(comparison: Comparison) -> Table:
    rows: list[list[Cell | str]] = []
    data = []
    for row in comparison.rows:
        for name, record in row.measurement.tasks.items():
            scalars = {key: finite(value) for key, value in record.metrics.items()}
            told = ", ".join(f"{key} {whole_or_number(value)}" for key, value in scalars.items() if value is not None)
            status = Cell(record.status, bad=record.status != "ok")
            notes = "; ".join([*record.notes, (record.error or "").strip().rpartition("\n")[2]]).strip("; ")
            samples = f"{record.n:,} {record.unit}".strip()
            rows.append([row.label, name, status, record.path or "–", told or "–", samples, notes or "–"])
            data.append({"row": row.key})
    titles = ("quantizer", "task", "status", "path", "metrics", "samples", "notes")
    return Table("Every task of every row.", tuple(Column(title, numeric=False) for title in titles), rows, data)


def _table_html(of: Callable[[Comparison], Table | None], folded: str = "") -> Render:
    def render(comparison: Comparison) -> str:
        table = of(comparison)
        html = table.html() if table else ""
        return f"<details><summary>{folded}</summary>{html}</details>" if html and folded else html

    return render


def _table_markdown(of: Callable[[Comparison], Table | None]) -> Render:
    def render(comparison: Comparison) -> str:
        table = of(comparison)
        return table.markdown() if table else ""

    return render


def _nothing(comparison: Comparison) -> str:
    return ""


PARTS: tuple[Part, ...] = (
    Part("summary", "Comparison", _summary_html, _summary_markdown),
    Part("pareto", "Size against quality", _drawn(pareto_figures), _nothing),
    Part("differences", "Differences that count", _table_html(_differences), _table_markdown(_differences)),
    Part("compression", "Compression", _compression_html, _table_markdown(_sizes)),
    Part("layers", "Logit error by layer", _drawn(layer_figures), _nothing),
    Part("allocation", "Bit allocation", _allocation_html, _nothing),
    Part("energy", "Energy of RoPE blocks", _drawn(energy_figures), _nothing),
    Part("needles", "Needle in a haystack", _drawn(needle_figures), _nothing),
    Part("scores", "Scores by task", _scores_html, _scores_markdown),
    Part("latency", "Latency and memory", _latency_html, _latency_markdown),
    Part("tasks", "All measurements", _table_html(_tasks, "Every task of every row"), _table_markdown(_tasks)),
    Part("left-out", "Left out", _table_html(left_out_table), _table_markdown(left_out_table)),
    Part("runs", "Repeat a run", runs_html, commands_markdown),
)


def parts_of(plugins: Sequence[type[Any]] = ()) -> list[Part]:
    """The built-in sections, and those of ``plugins`` (report sections) that compare; the runs stay last."""
    compared = [_plugin_part(section) for section in plugins]
    return [*PARTS[:-2], *compared, *PARTS[-2:]]


def _plugin_part(section: type[Any]) -> Part:
    def html(comparison: Comparison) -> str:
        return section().compare([run.result for run in comparison.runs])

    name = str(getattr(section, "name", section.__name__))
    return Part(name, str(getattr(section, "title", name)), html, _nothing)
