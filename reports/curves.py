"""Latency and memory against context length, from the points that ``tasks.latency.metrics.curve`` lists.

A point is ``{context, batch, decode_ms, prefill_s, tokens_per_s, cache_bytes, peak_bytes, status}``; one that did not
fit in memory has the status ``oom`` and is drawn as a cross at the top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.reports.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, frame, series_styles
from kvbench.reports.escaping import shorten
from kvbench.reports.scores import REFERENCE, finite, number
from kvbench.reports.svg import Figure, LegendEntry, Scale, add, drawing, marker_path
from kvbench.reports.table import Cell, Column, Table

MIB = 1024 * 1024


@dataclass(frozen=True)
class Curve:
    """The points of one quantizer at one batch size, by rising context."""

    label: str
    row: str
    quantizer: str
    batch: float
    points: Sequence[Mapping[str, Any]]

    def value(self, context: float, field: str) -> float | None:
        return next((finite(point.get(field)) for point in self.points if point["context"] == context), None)


def curves_of(label: str, row: str, quantizer: str, metrics: Mapping[str, Any]) -> list[Curve]:
    """A curve for each batch size of a latency task's metrics; none where they hold no curve."""
    points = metrics.get("curve")
    if not isinstance(points, list):
        return []
    sound = [point for point in points if isinstance(point, dict) and finite(point.get("context"))]
    batches = sorted({finite(point.get("batch")) or 1.0 for point in sound})
    return [
        Curve(
            f"{label}, batch {batch:g}" if len(batches) > 1 else label,
            row,
            quantizer,
            batch,
            sorted(
                (point for point in sound if (finite(point.get("batch")) or 1.0) == batch),
                key=lambda point: point["context"],
            ),
        )
        for batch in batches
    ]


def curve_figure(
    curves: Sequence[Curve], field: str, title: str, unit: str, key: str, scale: float = 1.0
) -> Figure | None:
    """``field / scale`` against context, both axes logarithmic; None where no point has a positive value."""
    values = [
        (point["context"], value / scale)
        for curve in curves
        for point in curve.points
        if (value := finite(point.get(field))) is not None and value > 0
    ]
    if not values:
        return None
    contexts = sorted({finite(point["context"]) or 1.0 for curve in curves for point in curve.points})
    x = Scale(contexts[0] / 1.1, contexts[-1] * 1.1, LEFT + 8, WIDTH - RIGHT - 8, logarithmic=True)
    heights = [value for _, value in values]
    y = Scale(min(heights) / 1.3, max(heights) * 1.6, HEIGHT - BOTTOM, TOP, logarithmic=True)
    names = [curve.label for curve in curves]
    described = "; ".join(f"{name}" for name in names[:12])
    root = drawing(key, title, f"{len(contexts)} context lengths: {described}.", WIDTH, HEIGHT)
    frame(root, y, [(x(context), _tokens(context)) for context in _spaced(contexts, x)], "context, tokens", unit)
    styles = series_styles([REFERENCE if curve.quantizer == REFERENCE else curve.label for curve in curves])
    legend = []
    any_oom = False
    for curve in curves:
        style = styles[REFERENCE if curve.quantizer == REFERENCE else curve.label]
        group = add(root, "g", class_=style, data_row=curve.row)
        shown = [(p["context"], v / scale) for p in curve.points if (v := finite(p.get(field))) is not None and v > 0]
        path = "".join(
            f"{'L' if i else 'M'}{x(context):.1f} {y(value):.1f}" for i, (context, value) in enumerate(shown)
        )
        add(group, "path", class_="line", d=path)
        for context, value in shown:
            dot = add(group, "circle", class_="dot", cx=x(context), cy=y(value), r=3.5)
            add(dot, "title", f"{shorten(curve.label, 40)}, {context:,} tokens: {number(value)} {unit}")
        for point in curve.points:
            if point.get("status") == "oom":
                any_oom = True
                mark = add(group, "path", class_="fill", d=marker_path("cross", x(point["context"]), TOP + 8.0, 5.0))
                add(mark, "title", f"{shorten(curve.label, 40)}, {point['context']:,} tokens: out of memory")
        legend.append(LegendEntry(style, curve.label))
    caption = f"{title}. Both axes logarithmic." + (" Crosses at the top: out of memory." if any_oom else "")
    return Figure(caption, [root], legend)


def _spaced(contexts: Sequence[float], x: Scale, apart: float = 44.0) -> list[float]:
    """Contexts whose labels do not touch."""
    kept: list[float] = []
    for context in contexts:
        if not kept or x(context) - x(kept[-1]) >= apart:
            kept.append(context)
    return kept


def _tokens(context: float) -> str:
    return f"{context / 1024:g}K" if context >= 1024 and context % 1024 == 0 else f"{context:g}"


def latency_table(curves: Sequence[Curve]) -> Table:
    """Every point, with the speed-up of decoding against fp16 at the same context and batch."""
    baselines = {curve.batch: curve for curve in curves if curve.quantizer == REFERENCE}
    rows: list[list[Cell | str]] = []
    for curve in curves:
        for point in curve.points:
            base = baselines.get(curve.batch)
            reference = base.value(point["context"], "decode_ms") if base else None
            mine = finite(point.get("decode_ms"))
            speedup = reference / mine if reference and mine and curve is not base else None
            status = str(point.get("status", "ok"))
            cells = [
                _shown(point, "context", 1, "{:,.0f}"),
                _shown(point, "batch", 1, "{:g}"),
                _shown(point, "decode_ms"),
                "–" if speedup is None else f"{speedup:.2f}×",
                _shown(point, "prefill_s"),
                _shown(point, "tokens_per_s"),
                _shown(point, "cache_bytes", MIB),
                _shown(point, "peak_bytes", MIB),
            ]
            rows.append([curve.label, *cells, Cell(status, bad=status != "ok")])
    titles = (
        "context", "batch", "decode, ms a token", f"speed-up vs {REFERENCE}",
        "prefill, s", "tokens/s", "cache, MiB", "peak, MiB",
    )  # fmt: skip
    columns = (Column("quantizer", numeric=False), *map(Column, titles), Column("status", numeric=False))
    data = [{"row": curve.row} if curve.row else {} for curve in curves for _ in curve.points]
    return Table("Latency and memory at each context.", columns, rows, row_data=data)


def _shown(point: Mapping[str, Any], field: str, scale: float = 1, form: str = "") -> str:
    value = finite(point.get(field))
    if value is None:
        return "–"
    return form.format(value / scale) if form else number(value / scale)
