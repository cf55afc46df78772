"""Latency and memory against context length, from the points that ``tasks.latency.metrics.curve`` lists.

A point is one context and batch: its keys are ``context``, ``batch``, ``attention``, ``prefill_s``, ``ttft_s``,
``decode_ms_median``, ``decode_ms_p5``, ``decode_ms_p95``, ``tokens_per_s``, ``cache_bytes``, ``peak_bytes``,
``floor_ms`` and ``out_of_memory``. What was not measured is null. ``other_attention`` lists points of attentions that
were timed beside the fastest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.reports.charts import HEIGHT, PLOT, lines_with_points, logarithmic_axis
from kvbench.reports.escaping import shorten
from kvbench.reports.figure import Figure, Spec
from kvbench.reports.palette import colour
from kvbench.reports.scores import REFERENCE, finite, number
from kvbench.reports.series import (
    FADED,
    PARAMETERS,
    SHOWN,
    STYLES,
    TOLD,
    series_encoding,
    series_names,
)
from kvbench.reports.table import Cell, Column, Table

if TYPE_CHECKING:
    from kvbench.results import Measurement

MIB = 1024 * 1024
DECODE = "decode_ms_median"


@dataclass(frozen=True)
class Curve:
    """The points of one quantizer at one batch size, by rising context.

    ``row`` is its row of a comparison, or ""; ``run`` is the run that measured it. ``is_other`` tells the points of
    another attention than the fastest, which have lines in the table only.
    """

    label: str
    row: str
    quantizer: str
    run: str
    batch: float
    points: Sequence[Mapping[str, Any]]
    is_other: bool = False

    @property
    def is_reference(self) -> bool:
        return self.quantizer == REFERENCE and not self.is_other

    def value(self, context: float, field: str) -> float | None:
        return next((finite(point.get(field)) for point in self.points if point["context"] == context), None)


def curves_of(label: str, row: str, run: str, measurement: "Measurement") -> list[Curve]:
    """A curve for each batch size that the latency task measured; none where it told no points."""
    record = measurement.tasks.get("latency")
    metrics = record.metrics if record is not None else {}
    quantizer = measurement.quantizer.name
    several = len(_by_batch(metrics.get("curve"))) > 1
    curves = []
    for field in ("curve", "other_attention"):
        for batch, points in _by_batch(metrics.get(field)).items():
            name = f"{label}, batch {batch:g}" if several else label
            curves.append(Curve(name, row, quantizer, run, batch, points, field != "curve"))
    return curves


def _by_batch(points: Any) -> dict[float, list[Mapping[str, Any]]]:
    """Points that have a context, by batch and then by rising context; anything else is left out."""
    apart: dict[float, list[Mapping[str, Any]]] = {}
    for point in points if isinstance(points, list) else ():
        if isinstance(point, dict) and (finite(point.get("context")) or 0) > 0:
            apart.setdefault(finite(point.get("batch")) or 1.0, []).append(point)
    return {batch: sorted(members, key=lambda point: point["context"]) for batch, members in apart.items()}


def shown_together(curves: Sequence[Curve]) -> list[list[Curve]]:
    """Curves of one batch size, as many as can be told apart, each time with the first fp16 of that batch."""
    drawn = [curve for curve in curves if not curve.is_other]
    groups = []
    for batch in dict.fromkeys(curve.batch for curve in drawn):
        of_batch = [curve for curve in drawn if curve.batch == batch]
        reference = [curve for curve in of_batch if curve.is_reference][:1]
        others = [curve for curve in of_batch if not curve.is_reference]
        groups += [[*reference, *others[start : start + STYLES]] for start in range(0, max(1, len(others)), STYLES)]
    return groups


def latency_figures_of(curves: Sequence[Curve], where: str = "") -> list[Figure]:
    """Time of a decode step, speed-up against fp16, cache and peak memory; those that some point has a value for.

    ``where`` begins the captions.
    """
    return [figure for shown in shown_together(curves) for figure in _figures(shown, curves, where)]


def _figures(shown: Sequence[Curve], curves: Sequence[Curve], where: str) -> list[Figure]:

    def titled(what: str) -> str:
        return f"{where}: {what}" if where else what.capitalize()

    found = (
        _against_context(shown, DECODE, titled("time of a decode step"), "ms"),
        speed_up_figure(shown, curves, titled(f"decode speed-up against {REFERENCE}")),
        _against_context(shown, "cache_bytes", titled("memory of the cache"), "MiB", MIB),
        _against_context(shown, "peak_bytes", titled("peak memory"), "MiB", MIB),
    )
    return [figure for figure in found if figure is not None]


def _against_context(curves: Sequence[Curve], field: str, title: str, unit: str, scale: float = 1.0) -> Figure | None:
    """``field / scale`` against context, both axes logarithmic; None where no point has a positive value."""
    names = series_names([curve.label for curve in curves])
    values: list[Spec] = []
    floors: list[Spec] = []
    lost: list[Spec] = []
    for number_of, (name, curve) in enumerate(zip(names, curves, strict=True)):
        for point in curve.points:
            context, value = finite(point["context"]), finite(point.get(field))
            at = {"context": context, "series": name, "row": curve.row, "curve": number_of}
            if value is not None and value > 0:
                told = f"{name}, {context:,.0f} tokens: {number(value / scale)} {unit}{_spread(point, field)}"
                values.append({**at, "value": value / scale, **_bounds(point, field), "told": told})
            if point.get("out_of_memory"):
                lost.append({**at, "told": f"{name}, {context:,.0f} tokens: out of memory"})
            floor = finite(point.get("floor_ms"))
            if field == DECODE and floor:
                floors.append({**at, "value": floor})
    if not values:
        return None
    layers = lines_with_points(40, detail="curve")
    layers[0] |= {"data": {"values": values}}
    layers[1] |= {"data": {"values": values}}
    if any("low" in value for value in values):
        spread = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}, **FADED}
        layers.append({"data": {"values": [value for value in values if "low" in value]},
                       "mark": {"type": "rule", "strokeWidth": 1.5, "aria": False}, "encoding": spread})  # fmt: skip
    if floors:
        thin = {"type": "line", "strokeWidth": 1.2, "opacity": 0.75, "aria": False}
        layers.append({"data": {"values": floors}, "mark": thin,
                       "encoding": {"strokeDash": {"value": [1, 3]}, "detail": {"field": "curve"}}})  # fmt: skip
    if lost:
        cross = {"type": "point", "shape": "cross", "filled": True, "size": 110, "angle": 45}
        layers.append({"data": {"values": lost}, "mark": cross,
                       "encoding": {"y": {"value": 8}, "shape": {"value": "cross"}, "strokeDash": {"value": [1, 0]},
                                    **TOLD}})  # fmt: skip
    top = max(max(value["value"], value.get("high", 0.0)) for value in values)
    bottom = min(value["value"] for value in [*values, *floors])
    y = {"field": "value", "type": "quantitative", "title": unit, **logarithmic_axis(bottom / 1.25, top * 1.6)}
    caption = f"{title}. Both axes logarithmic."
    caption += " Bars: 5th to 95th percentile." if any("low" in value for value in values) else ""
    caption += " Fine dots: the bytes that a step must read, at the bandwidth of the memory." if floors else ""
    caption += " Crosses at the top: out of memory." if lost else ""
    return _figure(curves, names, title, caption, y, layers)


def speed_up_figure(shown: Sequence[Curve], measured: Sequence[Curve], title: str) -> Figure | None:
    """fp16's time of a decode step over the quantizer's, at equal context and batch; None where there is no pair.

    ``measured`` are all curves, among them the references.
    """
    curves = [curve for curve in shown if not curve.is_reference]
    names = series_names([curve.label for curve in curves])
    values: list[Spec] = []
    for place, (name, curve) in enumerate(zip(names, curves, strict=True)):
        for point in curve.points:
            factor = speed_up(curve, point, measured)
            if factor is not None:
                told = f"{name}, {point['context']:,} tokens: {factor:.2f}× as fast as {REFERENCE}"
                values.append({"context": point["context"], "value": factor, "series": name, "row": curve.row,
                               "curve": place, "told": told})  # fmt: skip
    if not values:
        return None
    layers = lines_with_points(40, detail="curve")
    layers[0] |= {"data": {"values": values}}
    layers[1] |= {"data": {"values": values}}
    even = {
        "type": "rule",
        "strokeWidth": 1.5,
        "strokeDash": [1, 4],
        "color": colour("series-reference"),
        "aria": False,
    }
    layers.append({"data": {"values": [{"value": 1}]}, "mark": even,
                   "encoding": {"x": None, "color": None, "shape": None, "strokeDash": None}})  # fmt: skip
    y: Spec = {"field": "value", "type": "quantitative", "title": "times as fast", "scale": {"zero": True}}
    caption = f"{title}, at equal context and batch; above the dotted line is faster."
    return _figure(curves, names, title, caption, y, layers)


def speed_up(curve: Curve, point: Mapping[str, Any], curves: Sequence[Curve]) -> float | None:
    """How many times as fast as fp16 a point decodes: as that of its own run, else the first that has its context."""
    mine = finite(point.get(DECODE))
    if curve.quantizer == REFERENCE or not mine:
        return None
    references = [other for other in curves if other.is_reference and other.batch == curve.batch]
    references.sort(key=lambda other: other.run != curve.run)
    theirs = (other.value(point["context"], DECODE) for other in references)
    return next((value / mine for value in theirs if value), None)


def _figure(
    curves: Sequence[Curve], names: Sequence[str], title: str, caption: str, y: Spec, layers: Sequence[Spec]
) -> Figure:
    contexts = sorted({finite(point["context"]) or 1.0 for curve in curves for point in curve.points})
    label = "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'K' : datum.value"
    x: Spec = {
        "field": "context",
        "type": "quantitative",
        "title": "context, tokens",
        "scale": {"type": "log", "domain": [contexts[0] / 1.1, contexts[-1] * 1.1], "nice": False},
        "axis": {"values": contexts, "labelExpr": label, "labelOverlap": True, "grid": False},
    }
    quantizers = {name: curve.quantizer for name, curve in zip(names, curves, strict=True)}
    spec: Spec = {
        "width": PLOT,
        "height": HEIGHT,
        "params": PARAMETERS,
        "transform": [SHOWN],
        "encoding": {"x": x, "y": y, **series_encoding(quantizers)},
        "layer": list(layers),
    }
    described = f"{len(contexts)} context lengths: {'; '.join(names[:12])}."
    return Figure(title, described, caption, spec, [curve.row for curve in curves if curve.row])


def _bounds(point: Mapping[str, Any], field: str) -> Spec:
    """The 5th and 95th percentile of a decode step, where they are told."""
    low, high = finite(point.get("decode_ms_p5")), finite(point.get("decode_ms_p95"))
    return {"low": low, "high": high} if field == DECODE and low and high else {}


def _spread(point: Mapping[str, Any], field: str) -> str:
    bounds = _bounds(point, field)
    return f" ({number(bounds['low'])} to {number(bounds['high'])})" if bounds else ""


def latency_table(curves: Sequence[Curve]) -> Table:
    """Every point, with the speed-up of decoding against fp16 at the same context and batch."""
    rows: list[list[Cell | str]] = []
    for curve in curves:
        for point in curve.points:
            factor, lost = speed_up(curve, point, curves), bool(point.get("out_of_memory"))
            name = shorten(str(point.get("attention") or "–"), 40)
            numbers = (_shown(point, field, scale, form) for _, field, scale, form in FIELDS)
            cells: list[Cell | str] = [*numbers, "–" if factor is None else f"{factor:.2f}×"]
            rows.append([curve.label, *cells, name, Cell("out of memory", bad=True) if lost else "ok"])
    columns = (
        Column("quantizer", numeric=False),
        *(Column(title) for title, *_ in FIELDS),
        Column(f"speed-up vs {REFERENCE}"),
        Column("attention", numeric=False),
        Column("status", numeric=False),
    )
    data = [{"row": curve.row} if curve.row else {} for curve in curves for _ in curve.points]
    return Table("Latency and memory at each context.", columns, rows, row_data=data)


FIELDS: tuple[tuple[str, str, float, str], ...] = (
    ("context", "context", 1, "{:,.0f}"),
    ("batch", "batch", 1, "{:g}"),
    ("prefill, s", "prefill_s", 1, ""),
    ("first token, s", "ttft_s", 1, ""),
    ("decode, ms a step", DECODE, 1, ""),
    ("5th percentile", "decode_ms_p5", 1, ""),
    ("95th percentile", "decode_ms_p95", 1, ""),
    ("floor, ms", "floor_ms", 1, ""),
    ("tokens/s", "tokens_per_s", 1, ""),
    ("cache, MiB", "cache_bytes", MIB, ""),
    ("peak, MiB", "peak_bytes", MIB, ""),
)
"""Columns of the table of points: title, key, what a value is divided by, and its format."""


def _shown(point: Mapping[str, Any], field: str, scale: float, form: str) -> str:
    value = finite(point.get(field))
    if value is None:
        return "–"
    return form.format(value / scale) if form else number(value / scale)
