"""The figures of a comparison: for each section, the pictures it shows and the standalone files that it exports."""

from collections.abc import Callable, Iterable, Sequence

from kvbench.reports import charts
from kvbench.reports.comparison import Comparison, Row, Setting
from kvbench.reports.curves import MIB, Curve, curve_figure, curves_of
from kvbench.reports.heat_maps import heat_maps
from kvbench.reports.pareto import pareto
from kvbench.reports.scores import REFERENCE, code_bits
from kvbench.reports.svg import Figure
from kvbench.reports.task_sections import NEEDLE_METRICS

MOST_PICTURES = 24
"""Pictures a section shows; past it a page of hundreds of runs would be pictures that nobody compares."""

MOST_LINES = 5
"""Quantizers in one picture of lines: as many as there are styles that can be told apart."""


def figures_html(found: Sequence[Figure]) -> str:
    """At most MOST_PICTURES of them, and how many more there would be."""
    more = len(found) - MOST_PICTURES
    note = f"<p>{more} more are not drawn; compare fewer runs to see them.</p>" if more > 0 else ""
    return "".join(figure.html() for figure in found[:MOST_PICTURES]) + note


def pareto_figures(comparison: Comparison) -> list[Figure]:
    """Effective bits against every metric, for each setting."""
    found = (
        pareto(comparison, setting, metric, f"pareto-{i}-{j}")
        for i, setting in enumerate(comparison.settings)
        for j, metric in enumerate(comparison.metrics)
    )
    return [figure for figure in found if figure is not None]


def _by_setting_and_bits(rows: Iterable[Row]) -> dict[tuple[Setting, str], list[Row]]:
    """Rows that a picture may show together: of one model and texts, with the same code bits."""
    groups: dict[tuple[Setting, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.setting, code_bits(row.measurement) or "unknown bits"), []).append(row)
    return groups


def layer_figures(comparison: Comparison) -> list[Figure]:
    """Logit error of each layer, rows of equal code bits together."""
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
    return figures


def _allocated(comparison: Comparison) -> dict[str, tuple[str, charts.Allocation, str]]:
    """Label, allocation and setting of every different allocation that has more than one width, by row."""
    rows = {
        (row.setting, row.measurement.quantizer.format_digest or row.key): row
        for row in comparison.rows
        if row.measurement.quantizer.allocation and len(charts.widths_used(row.measurement.quantizer.allocation)) > 1
    }
    return {
        row.key: (row.label, row.measurement.quantizer.allocation or [], comparison.setting_titles[row.setting])
        for row in rows.values()
    }


def fingerprint_figures(comparison: Comparison) -> list[Figure]:
    """Share of all blocks at each code width, a bar a quantizer and MOST_PICTURES bars a picture."""
    named = list(_allocated(comparison).items())
    return [
        charts.shares_by_quantizer(dict(named[start : start + MOST_PICTURES]), f"fingerprint-{start}")
        for start in range(0, len(named), MOST_PICTURES)
    ]


def fingerprint_layer_figures(comparison: Comparison) -> list[Figure]:
    """Share of blocks at each code width, layer by layer."""
    return [
        charts.shares_by_layer(f"{label}, {setting}", allocation, f"fingerprint-{key}", key)
        for key, (label, allocation, setting) in _allocated(comparison).items()
    ]


def needle_figures(comparison: Comparison) -> list[Figure]:
    """Heat maps of needles in a haystack, MOST_PICTURES of them side by side."""
    figures = []
    for i, setting in enumerate(comparison.settings):
        named = [
            (row.label, row.key, record.metrics)
            for row in comparison.rows
            if row.setting == setting and (record := row.task("niah")) is not None
        ]
        for metric, title, unit in NEEDLE_METRICS:
            caption = f"{comparison.setting_titles[setting]}: {title} ({unit}); depth down, prompt length across."
            for start in range(0, len(named), MOST_PICTURES):
                shown = named[start : start + MOST_PICTURES]
                figures.append(heat_maps(shown, metric, title, caption, f"needles-{i}-{metric}-{start}"))
    return [figure for figure in figures if figure is not None]


def curves(comparison: Comparison, setting: Setting) -> list[Curve]:
    """Latency and memory of every row of a setting."""
    return [
        curve
        for row in comparison.rows
        if row.setting == setting and (record := row.measurement.tasks.get("latency")) is not None
        for curve in curves_of(row.label, row.key, row.name, record.metrics)
    ]


def latency_figures(comparison: Comparison) -> list[Figure]:
    """Time of a decode step, memory of the cache and peak memory against context; fp16 is in every picture."""
    figures = []
    for i, setting in enumerate(comparison.settings):
        found = curves(comparison, setting)
        reference = [curve for curve in found if curve.quantizer == REFERENCE]
        others = [curve for curve in found if curve.quantizer != REFERENCE]
        for start in range(0, max(1, len(others)) if found else 0, MOST_LINES):
            shown = [*reference, *others[start : start + MOST_LINES]]
            for key, of, scale in _curve_kinds(comparison.setting_titles[setting]):
                figures.append(curve_figure(shown, *of, f"{key}-{i}-{start}", scale))
    return [figure for figure in figures if figure is not None]


def _curve_kinds(setting: str) -> list[tuple[str, tuple[str, str, str], float]]:
    """Key, then field, title and unit of the figures of latency and memory, and what a value is divided by."""
    return [
        ("decode", ("decode_ms", f"{setting}: time of a decode step", "ms"), 1),
        ("memory", ("cache_bytes", f"{setting}: memory of the cache", "MiB"), MIB),
        ("peak", ("peak_bytes", f"{setting}: peak memory", "MiB"), MIB),
    ]


FIGURES: dict[str, Callable[[Comparison], list[Figure]]] = {
    "pareto": pareto_figures,
    "layers": layer_figures,
    "allocation": fingerprint_figures,
    "allocation-layers": fingerprint_layer_figures,
    "needles": needle_figures,
    "latency": latency_figures,
}
"""By the name that an exported file begins with."""
