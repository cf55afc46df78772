"""The picture that a choice is made from: effective bits against quality, its Pareto front, and fp16 as a line."""

import math
from collections.abc import Sequence

from kvbench.reports.charts import HEIGHT, LOGARITHM_FROM, PLOT, logarithmic_axis
from kvbench.reports.comparison import Comparison, Metric, Row, Setting
from kvbench.reports.escaping import shorten
from kvbench.reports.figure import Figure, Spec
from kvbench.reports.palette import colour
from kvbench.reports.scores import REFERENCE, number
from kvbench.reports.series import (
    CHOSEN,
    FADED,
    MARKED,
    PARAMETERS,
    SHOWN,
    TOLD,
    emphasis,
    series_encoding,
    series_names,
)
from kvbench.reports.table import Cell, Column, Table

NEAR_ZERO = 100  # an error this many times smaller than the others' would take the axis for itself
LABEL_LENGTH = 28
LETTER = 6.6  # mean width of a letter at the size of labels, enough to tell which of them would overlap


def pareto_front(points: Sequence[tuple[float, float]], lower_is_better: bool) -> list[int]:
    """Indices of the points that no other one beats in both bits and quality, by rising bits."""
    sign = 1 if lower_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or sign * points[i][1] < sign * points[front[-1]][1]:
            front.append(i)
    return front


def pareto(comparison: Comparison, setting: Setting, metric: Metric) -> Figure | None:
    """A mark a row of ``setting``; None where no quantized row has both numbers."""
    rows = [row for row in comparison.rows if row.setting == setting and row.score(metric).value is not None]
    quantized = [row for row in rows if not row.is_reference and row.effective_bits is not None]
    if not quantized:
        return None
    points = [(row.effective_bits or 0.0, row.score(metric).value or 0.0) for row in quantized]
    levels = {row.score(metric).value or 0.0: row for row in rows if row.is_reference}
    near_zero = metric.lower_is_better and bool(levels) and min(levels) * NEAR_ZERO < min(value for _, value in points)
    if near_zero or metric.reference != REFERENCE:
        levels = {}
    scale, logarithmic = _quality_scale([value for _, value in points] + [*levels])
    if logarithmic:
        levels = {level: row for level, row in levels.items() if level > 0}
    front = pareto_front(points, metric.lower_is_better)
    where, better = comparison.setting_titles[setting], "lower" if metric.lower_is_better else "higher"
    axis = " Logarithmic axis." if logarithmic else ""
    if near_zero:
        axis += f" The {REFERENCE} cache, near zero, is not drawn."
    described = "; ".join(f"{quantized[i].label}: {points[i][0]:.2f} bits, {number(points[i][1])}" for i in front[:12])
    return Figure(
        f"{metric.title} against effective bits, {shorten(where, 60)}",
        f"{len(points)} quantizers. On the front: {described}.",
        f"{where}: {metric.title} ({better} is better) against bits per cached element, all bytes counted. "
        f"The line joins the Pareto front.{axis}",
        _spec(quantized, points, front, levels, metric, scale, logarithmic),
        [row.key for row in quantized],
        _table(quantized, points, front, metric),
    )


def _quality_scale(values: Sequence[float]) -> tuple[Spec, bool]:
    """An axis around the values with room at the edges; logarithmic where they span orders of magnitude."""
    low, high = min(values), max(values)
    if low > 0 and high / low > LOGARITHM_FROM:
        return logarithmic_axis(low / 1.3, high * 1.3), True
    room = (high - low) * 0.08 or max(abs(high), 1e-9) * 0.1
    domain = [max(0.0, low - room) if low >= 0 else low - room, high + room]
    return {"scale": {"domain": domain, "nice": False}, "axis": {"tickCount": 6}}, False


def _spec(
    rows: Sequence[Row],
    points: Sequence[tuple[float, float]],
    front: Sequence[int],
    levels: dict[float, Row],
    metric: Metric,
    scale: Spec,
    logarithmic: bool,
) -> Spec:
    names = list(dict.fromkeys(row.name for row in rows))
    shown = dict(zip(names, series_names(names), strict=True))
    bits = [point[0] for point in points]
    margin = (max(bits) - min(bits)) * 0.06 or 0.5
    across = [min(bits) - margin, max(bits) + margin]
    marks = [
        {
            "bits": bit,
            "value": value,
            "series": shown[row.name],
            "row": row.key,
            "told": f"{shorten(row.label, 60)}: {bit:.3f} bits, {metric.title} {number(value)}",
        }
        for row, (bit, value) in zip(rows, points, strict=True)
    ]
    lines = [
        {"value": level, "series": REFERENCE, "told": f"{shorten(row.label, 60)}: {number(level)}"}
        for level, row in levels.items()
    ]
    x = {"field": "bits", "type": "quantitative", "title": "effective bits per element",
         "scale": {"domain": across, "nice": False}, "axis": {"grid": False, "tickCount": 8}}  # fmt: skip
    y = {"field": "value", "type": "quantitative", "title": metric.title, **scale}
    quantizers = {
        name: REFERENCE if name == REFERENCE else "" for name in [*shown.values(), *[REFERENCE] * bool(lines)]
    }
    outline = {"condition": {"test": MARKED, "value": colour("ink")}, "value": colour("page")}
    return {
        "width": PLOT,
        "height": HEIGHT,
        "params": PARAMETERS,
        "encoding": {"y": y},
        "layer": [
            {"data": {"values": [{"bits": points[i][0], "value": points[i][1]} for i in front]},
             "mark": {"type": "line", "color": colour("muted"), "strokeWidth": 1.5, "aria": False},
             "encoding": {"x": x}},
            {"data": {"values": lines}, "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [1, 4],
                                                 "strokeCap": "round", "color": colour("series-reference")},
             "encoding": TOLD},
            {"data": {"values": marks}, "transform": [SHOWN], "params": [CHOSEN],
             "mark": {"type": "point", "filled": True},
             "encoding": {"x": x, **_marks(quantizers), "size": emphasis(90, 220),
                          "stroke": outline, **FADED, **TOLD}},
            {"data": {"values": _labels(rows, points, front, metric, scale, across, logarithmic)},
             "transform": [SHOWN], "mark": {"type": "text", "color": colour("muted"), "aria": False,
                                            "align": {"expr": "datum.align"}, "dx": {"expr": "datum.dx"},
                                            "dy": {"expr": "datum.dy"}},
             "encoding": {"x": x, "text": {"field": "text"}}},
        ],
    }  # fmt: skip


def _marks(quantizers: dict[str, str]) -> Spec:
    encoding = series_encoding(quantizers)
    del encoding["strokeDash"]
    return encoding


def _labels(
    rows: Sequence[Row],
    points: Sequence[tuple[float, float]],
    front: Sequence[int],
    metric: Metric,
    scale: Spec,
    across: Sequence[float],
    logarithmic: bool,
) -> list[Spec]:
    """Names beside their marks, off a falling or rising front, as many as fit; the others are in the tooltips."""
    placed: list[tuple[float, float, float]] = []
    labels: list[Spec] = []
    by = math.log if logarithmic else float
    low, high = (by(edge) for edge in scale["scale"]["domain"])
    for i in dict.fromkeys([*front, *range(len(rows))]):  # the front's labels have the first right to room
        bits, value = points[i]
        x = (bits - across[0]) / (across[1] - across[0]) * PLOT
        y = (high - by(value)) / (high - low) * HEIGHT
        text = shorten(rows[i].label, LABEL_LENGTH)
        width, right = len(text) * LETTER, x < PLOT * 0.75
        left = x + 9 if right else x - 9 - width
        above = metric.lower_is_better if right or i not in front else not metric.lower_is_better
        dy = -7 if above else 12
        if any(abs(y + dy - other) < 14 and left < end and start < left + width for start, end, other in placed):
            continue
        placed.append((left, left + width, y + dy))
        label = {"align": "left", "dx": 9} if right else {"align": "right", "dx": -9}
        labels.append({"bits": bits, "value": value, "text": text, "row": rows[i].key, **label, "dy": dy})
    return labels


def _table(rows: Sequence[Row], points: Sequence[tuple[float, float]], front: Sequence[int], metric: Metric) -> Table:
    lines: list[list[Cell | str]] = [
        [row.label, f"{bits:.3f}", number(value), "yes" if i in front else "no"]
        for i, (row, (bits, value)) in enumerate(zip(rows, points, strict=True))
    ]
    columns = (Column("quantizer", numeric=False), Column("effective bits"), Column(metric.title))
    data = [{"row": row.key} for row in rows]
    return Table(
        f"{metric.title} against effective bits.", (*columns, Column("on the front", numeric=False)), lines, data
    )
