"""The sections of a comparison, in reading order. A plugin's section takes part by its ``compare`` method."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.reports import charts
from kvbench.reports.comparison import Comparison, Row, Setting
from kvbench.reports.comparison_cautions import comparison_cautions
from kvbench.reports.comparison_runs import commands_markdown, left_out_table, runs_html
from kvbench.reports.comparison_summary import controls, tiles
from kvbench.reports.comparison_table import HOW_TO_READ, comparison_table
from kvbench.reports.curves import MIB, Curve, curve_figure, curves_of, latency_table
from kvbench.reports.differences import differences_table
from kvbench.reports.escaping import html_text, markdown_text
from kvbench.reports.heat_maps import heat_maps
from kvbench.reports.pareto import pareto
from kvbench.reports.score_tables import score_tables
from kvbench.reports.scores import REFERENCE, code_bits, finite, whole_or_number
from kvbench.reports.svg import Figure
from kvbench.reports.table import Cell, Column, Table
from kvbench.reports.task_sections import NEEDLE_METRICS

MOST_PICTURES = 24
"""Pictures a section shows; past it a page of hundreds of runs would be pictures that nobody compares."""

MOST_LINES = 5
"""Quantizers in one picture of lines: as many as there are styles that can be told apart."""

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


def _figures(found: Iterable[Figure | None]) -> str:
    """At most MOST_PICTURES of them, and how many more there would be."""
    figures = [figure for figure in found if figure is not None]
    more = len(figures) - MOST_PICTURES
    note = f"<p>{more} more are not drawn; compare fewer runs to see them.</p>" if more > 0 else ""
    return "".join(figure.html() for figure in figures[:MOST_PICTURES]) + note


def _pareto_html(comparison: Comparison) -> str:
    return _figures(
        pareto(comparison, setting, metric, f"pareto-{i}-{j}")
        for i, setting in enumerate(comparison.settings)
        for j, metric in enumerate(comparison.metrics)
    )


def _by_setting_and_bits(rows: Iterable[Row]) -> dict[tuple[Setting, str], list[Row]]:
    """Rows that a picture may show together: of one model and texts, with the same code bits."""
    groups: dict[tuple[Setting, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.setting, code_bits(row.measurement) or "unknown bits"), []).append(row)
    return groups


def _layers_html(comparison: Comparison) -> str:
    rows = [row for row in comparison.rows if row.contender.per_layer_error and not row.is_reference]
    figures = []
    for i, ((setting, bits), members) in enumerate(_by_setting_and_bits(rows).items()):
        for start in range(0, len(members), MOST_LINES):
            shown = members[start : start + MOST_LINES]
            series = {row.label: row.contender.per_layer_error for row in shown}
            keys = {row.label: row.key for row in shown}
            figure = charts.error_by_layer(series, f"layers-{i}-{start}", keys)
            if figure is not None:
                title = f"{comparison.setting_titles[setting]}, code bits {bits}. {figure.caption}"
                figures.append(Figure(title, figure.pictures, figure.legend))
    return _figures(figures)


def _allocation_html(comparison: Comparison) -> str:
    rows = {
        (row.setting, row.measurement.quantizer.format_digest or row.key): row
        for row in comparison.rows
        if row.measurement.quantizer.allocation and len(charts.widths_used(row.measurement.quantizer.allocation)) > 1
    }
    if not rows:
        return ""
    named = {
        row.key: (row.label, row.measurement.quantizer.allocation or [], comparison.setting_titles[row.setting])
        for row in rows.values()
    }
    shares = charts.shares_by_quantizer(named, "fingerprint").html()
    layers = _figures(
        charts.shares_by_layer(f"{label}, {setting}", allocation, f"fingerprint-{key}", key)
        for key, (label, allocation, setting) in list(named.items())
    )
    return f"{shares}<details><summary>Layer by layer</summary>{layers}</details>"


def _needles_html(comparison: Comparison) -> str:
    figures = []
    for i, setting in enumerate(comparison.settings):
        named = [
            (row.label, row.key, record.metrics)
            for row in comparison.rows
            if row.setting == setting and (record := row.task("niah")) is not None
        ]
        for metric, title, unit in NEEDLE_METRICS:
            caption = f"{comparison.setting_titles[setting]}: {title} ({unit}); depth down, prompt length across."
            figures.append(heat_maps(named[:MOST_PICTURES], metric, title, caption, f"needles-{i}-{metric}"))
    return _figures(figures)


def _curves(comparison: Comparison, setting: Setting) -> list[Curve]:
    return [
        curve
        for row in comparison.rows
        if row.setting == setting and (record := row.measurement.tasks.get("latency")) is not None
        for curve in curves_of(row.label, row.key, row.name, record.metrics)
    ]


def _latency_html(comparison: Comparison) -> str:
    parts = []
    for i, setting in enumerate(comparison.settings):
        curves = _curves(comparison, setting)
        if not curves:
            continue
        reference = [curve for curve in curves if curve.quantizer == REFERENCE]
        others = [curve for curve in curves if curve.quantizer != REFERENCE]
        figures = [
            curve_figure([*reference, *others[start : start + MOST_LINES]], *of, f"{key}-{i}-{start}", scale)
            for start in range(0, max(1, len(others)), MOST_LINES)
            for key, of, scale in _curve_kinds(comparison.setting_titles[setting])
        ]
        table = latency_table(curves).html()
        parts.append(_figures(figures) + f"<details><summary>Values at each context</summary>{table}</details>")
    return "".join(parts)


def _curve_kinds(setting: str) -> list[tuple[str, tuple[str, str, str], float]]:
    """Key, then field, title and unit of the figures of latency and memory, and what a value is divided by."""
    return [
        ("decode", ("decode_ms", f"{setting}: time of a decode step", "ms"), 1),
        ("memory", ("cache_bytes", f"{setting}: memory of the cache", "MiB"), MIB),
        ("peak", ("peak_bytes", f"{setting}: peak memory", "MiB"), MIB),
    ]


def _latency_markdown(comparison: Comparison) -> str:
    found = [_curves(comparison, setting) for setting in comparison.settings]
    return "\n\n".join(latency_table(curves).markdown() for curves in found if curves)


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
    Part("pareto", "Size against quality", _pareto_html, _nothing),
    Part("differences", "Differences that count", _table_html(_differences), _table_markdown(_differences)),
    Part("layers", "Logit error by layer", _layers_html, _nothing),
    Part("allocation", "Bit allocation", _allocation_html, _nothing),
    Part("needles", "Needle in a haystack", _needles_html, _nothing),
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
