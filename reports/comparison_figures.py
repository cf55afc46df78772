"""The figures of a comparison: for each section, the pictures it shows and the standalone files that it exports."""

from collections.abc import Callable, Iterable, Sequence

from kvbench.reports import charts
from kvbench.reports.comparison import Comparison, Row, Setting
from kvbench.reports.curves import Curve, curves_of, latency_figures_of
from kvbench.reports.figure import Figure
from kvbench.reports.heat_maps import energy_maps, needle_maps
from kvbench.reports.pareto import pareto
from kvbench.reports.scores import bits_by_use, code_bits
from kvbench.reports.series import STYLES
from kvbench.reports.task_sections import NEEDLE_METRICS

MOST_PICTURES = 8
"""Pictures a section shows; past it a page of hundreds of runs would be pictures that nobody compares."""


MOST_PARTS = 12
"""Bars or heat maps in one picture."""


def figures_html(found: Sequence[Figure]) -> str:
    """At most MOST_PICTURES of them, and how many more there would be."""
    more = len(found) - MOST_PICTURES
    note = f"<p>{more} more are not drawn; compare fewer runs to see them.</p>" if more > 0 else ""
    return "".join(figure.html(live=True) for figure in found[:MOST_PICTURES]) + note


def pareto_figures(comparison: Comparison) -> list[Figure]:
    """Effective bits against every metric, for each setting."""
    found = (pareto(comparison, setting, metric) for setting in comparison.settings for metric in comparison.metrics)
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
    for (setting, bits), members in _by_setting_and_bits(rows).items():
        for start in range(0, len(members), STYLES):
            shown = members[start : start + STYLES]
            figures.append(
                charts.error_by_layer(
                    {row.label: row.contender.per_layer_error for row in shown},
                    {row.label: row.name for row in shown},
                    f"{comparison.setting_titles[setting]}, code bits {bits}. ",
                    {row.label: row.key for row in shown},
                )
            )
    return [figure for figure in figures if figure is not None]


def compression_figures(comparison: Comparison) -> list[Figure]:
    """Where the bits of an element go, a bar a row and MOST_PARTS bars a picture."""
    sized = [row for row in comparison.rows if row.measurement.compression is not None]
    return [
        charts.bits_by_quantizer(
            {row.label: bits_by_use(size) for row in shown if (size := row.measurement.compression)},
            [row.key for row in shown],
        )
        for start in range(0, len(sized), MOST_PARTS)
        if (shown := sized[start : start + MOST_PARTS])
    ]


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
    """Share of all blocks at each code width, a bar a quantizer and MOST_PARTS bars a picture."""
    named = list(_allocated(comparison).items())
    return [
        charts.shares_by_quantizer(dict(named[start : start + MOST_PARTS]))
        for start in range(0, len(named), MOST_PARTS)
    ]


def fingerprint_layer_figures(comparison: Comparison) -> list[Figure]:
    """Share of blocks at each code width, layer by layer."""
    return [
        charts.shares_by_layer(f"{label}, {setting}", allocation, key)
        for key, (label, allocation, setting) in _allocated(comparison).items()
    ]


def energy_figures(comparison: Comparison) -> list[Figure]:
    """Energy of RoPE blocks, once for each setting: it is the model's, not a quantizer's."""
    figures = []
    for setting in comparison.settings:
        runs = (row.run.result for row in comparison.rows if row.setting == setting)
        energy = next((result.block_energy for result in runs if result.block_energy), None)
        if energy is not None:
            figures.append(energy_maps(energy.by_tensor(), comparison.setting_titles[setting]))
    return [figure for figure in figures if figure is not None]


def needle_figures(comparison: Comparison) -> list[Figure]:
    """Heat maps of needles in a haystack, MOST_PARTS of them side by side."""
    figures = []
    for setting in comparison.settings:
        named = [
            (row.label, row.key, record.metrics)
            for row in comparison.rows
            if row.setting == setting and (record := row.task("niah")) is not None
        ]
        for metric, title, unit in NEEDLE_METRICS:
            caption = f"{comparison.setting_titles[setting]}: {title} ({unit}); depth down, prompt length across."
            figures += [
                needle_maps(named[start : start + MOST_PARTS], metric, title, caption)
                for start in range(0, len(named), MOST_PARTS)
            ]
    return [figure for figure in figures if figure is not None]


def curves(comparison: Comparison, setting: Setting) -> list[Curve]:
    """Latency and memory of every row of a setting."""
    return [
        curve
        for row in comparison.rows
        if row.setting == setting
        for curve in curves_of(row.label, row.key, row.run.result.run_id, row.measurement)
    ]


def latency_figures(comparison: Comparison) -> list[Figure]:
    """Decode steps, speed-up and memory against context, for each setting and batch size."""
    titles = comparison.setting_titles
    return [
        figure
        for setting in comparison.settings
        for figure in latency_figures_of(curves(comparison, setting), titles[setting])
    ]


FIGURES: dict[str, Callable[[Comparison], list[Figure]]] = {
    "pareto": pareto_figures,
    "compression": compression_figures,
    "layers": layer_figures,
    "allocation": fingerprint_figures,
    "allocation-layers": fingerprint_layer_figures,
    "energy": energy_figures,
    "needles": needle_figures,
    "latency": latency_figures,
}
"""By the name that an exported file begins with."""
