"""The figures of a run and of a comparison: logit error by layer, code widths, and where the bytes go."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvbench.reports.drawing import WIDTH
from kvbench.reports.escaping import shorten
from kvbench.reports.figure import Figure, Spec
from kvbench.reports.palette import colour
from kvbench.reports.scores import REFERENCE, BitsByUse, number
from kvbench.reports.series import (
    CHOSEN,
    FADED,
    MARKED,
    PARAMETERS,
    SHOWN,
    TOLD,
    emphasis,
    legend_of,
    series_encoding,
    series_names,
)
from kvbench.reports.table import Cell, Column, Table

T = TypeVar("T")
Allocation = list[list[list[int]]]

HEIGHT = 240  # of the plot, without axes and legend
PLOT = WIDTH - 70  # width of the plot, without the axis at its left
BAR_STEP = 42  # from one bar, with its name above it, to the next
LOGARITHM_FROM = 50  # a linear axis hides the smaller of two series further apart than this
NAMED_WIDTHS = range(1, 9)  # that have colours of their own
DASH = "–"


def error_by_layer(
    series: Mapping[str, Sequence[float | None]],
    quantizers: Mapping[str, str],
    where: str = "",
    rows: Mapping[str, str] | None = None,
) -> Figure | None:
    """One line a quantizer over the layers. Linear from zero, or logarithmic where the series are far apart.

    The fp16 cache's error is orders of magnitude lower: it lies on the zero of a linear axis and is left out of a
    logarithmic one, which the caption says. ``quantizers`` and ``rows`` give the quantizer, and the row of a
    comparison, that a label belongs to; ``where`` begins the caption.
    """
    points = {label: [value for value in values if value is not None] for label, values in series.items()}
    scaled = [value for label, values in points.items() if quantizers[label] != REFERENCE for value in values]
    scaled = scaled or [value for values in points.values() for value in values]
    if not scaled or max(scaled) <= 0:
        return None
    logarithmic = min(scaled) > 0 and max(scaled) / min(scaled) > LOGARITHM_FROM
    drawn = [label for label in series if points[label] and not (logarithmic and quantizers[label] == REFERENCE)]
    names = dict(zip(drawn, series_names(drawn), strict=True))
    count = max(len(series[label]) for label in drawn)
    values = [
        {
            "layer": layer,
            "error": None if value is None or (logarithmic and value <= 0) else value,
            "series": names[label],
            "row": rows[label] if rows else "",
            "told": f"{shorten(label, 60)}, layer {layer}: {DASH if value is None else number(value)}",
        }
        for label in drawn
        for layer, value in enumerate(series[label])
    ]
    scale = logarithmic_axis(min(scaled) / 1.3, max(scaled) * 1.3) if logarithmic else {"scale": {"zero": True}}
    spec: Spec = {
        "width": PLOT,
        "height": HEIGHT,
        "data": {"values": values},
        "params": PARAMETERS,
        "transform": [SHOWN],
        "encoding": {
            "x": {"field": "layer", "type": "quantitative", "title": "layer",
                  "scale": {"domain": [0, max(1, count - 1)]},
                  "axis": {"grid": False, "tickMinStep": 1, "format": "d"}},
            "y": {"field": "error", "type": "quantitative", "title": "logit error", **scale},
            **series_encoding({names[label]: quantizers[label] for label in drawn}),
        },
        "layer": lines_with_points(),
    }  # fmt: skip
    caption = f"{where}Mean absolute logit error of each layer; lower is better."
    if logarithmic:
        left_out = any(quantizers[label] == REFERENCE and points[label] for label in series)
        caption += " Logarithmic axis." + (f" The {REFERENCE} cache, near zero, is not drawn." if left_out else "")
    described = "; ".join(f"{names[of]}: {number(min(points[of]))} to {number(max(points[of]))}" for of in drawn)
    shown_rows = [rows[label] for label in drawn] if rows else []
    return Figure(
        "Logit error by layer", f"{count} layers. {described}.", caption, spec, shown_rows, errors_table(series)
    )


def logarithmic_axis(low: float, high: float) -> Spec:
    """``scale`` and ``axis`` of an encoding, with the fewest round values that are at least four, where that can be."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            break
    axis = {"values": ticks, "format": ",~g", "labelOverlap": True}
    return {"scale": {"type": "log", "domain": [low, high], "nice": False}, "axis": axis}


def lines_with_points(size: float = 22, detail: str | None = None) -> list[Spec]:
    """Layers of a figure: a line a series, and a mark with a tooltip at each of its points."""
    apart: Spec = {"detail": {"field": detail}} if detail else {}
    line = {"strokeWidth": emphasis(2, 4), **FADED, **apart}
    points = {"size": emphasis(size, 3 * size), **TOLD, **FADED, "strokeDash": {"value": [1, 0]}}
    return [
        {"params": [CHOSEN], "mark": {"type": "line", "strokeJoin": "round", "aria": False}, "encoding": line},
        {"mark": {"type": "point", "filled": True}, "encoding": points},
    ]


def errors_table(series: Mapping[str, Sequence[float | None]]) -> Table:
    """Layers down, quantizers across."""
    count = max(len(values) for values in series.values())
    columns = (Column("layer"), *(Column(label) for label in series))
    padded = [[*values, *[None] * count][:count] for values in series.values()]
    lines = [
        [str(layer), *(DASH if value is None else number(value) for value in values)]
        for layer, values in enumerate(zip(*padded, strict=True))
    ]
    return Table("Logit error of each layer.", columns, lines)


def widths_used(allocation: Allocation) -> list[int]:
    """The code widths that occur, ascending."""
    return sorted({bits for layer in allocation for head in layer for bits in head})


def width_shares(layer: Sequence[Sequence[int]]) -> dict[int, float]:
    """Share of a layer's blocks, all KV heads together, at each code width."""
    counts = Counter(bits for head in layer for bits in head)
    return {bits: count / counts.total() for bits, count in sorted(counts.items())}


def bits_text(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def _width_encoding(used: Sequence[int]) -> Spec:
    names = [bits_text(bits) for bits in used]
    colours = [colour(f"width-{bits}" if bits in NAMED_WIDTHS else "width-other") for bits in used]
    legend = legend_of(names, symbolType="square", symbolStrokeWidth=0)
    scale = {"domain": names, "range": colours}
    return {"color": {"field": "width", "type": "nominal", "scale": scale, "legend": legend}}


def _stacked(shares: Mapping[int, float]) -> list[Spec]:
    """Parts of a stack in percent, narrow codes first."""
    parts: list[Spec] = []
    below = 0.0
    for bits, share in shares.items():
        parts.append({"width": bits_text(bits), "from": round(below, 3), "to": round(below + 100 * share, 3)})
        below += 100 * share
    return parts


def shares_table(shares: Mapping[str, Mapping[int, float]], what: str, caption: str) -> Table:
    """Things down, code widths across, shares in percent."""
    used = sorted({bits for share in shares.values() for bits in share})
    lines = [[name, *(f"{100 * share.get(bits, 0):.1f} %" for bits in used)] for name, share in shares.items()]
    return Table(caption, (Column(what, numeric=False), *(Column(bits_text(bits)) for bits in used)), lines)


def shares_by_layer(name: str, allocation: Allocation, row: str = "") -> Figure:
    """A stacked column a layer: the share of its RoPE blocks at each code width, narrow codes at the bottom."""
    used = widths_used(allocation)
    shares = [width_shares(layer) for layer in allocation]
    values = [
        {
            "layer": layer + 0.04,
            "next": layer + 0.96,
            **part,
            "row": row,
            "told": f"layer {layer}: {part['to'] - part['from']:.0f} % of blocks at {part['width']}",
        }
        for layer, of in enumerate(shares)
        for part in _stacked(of)
    ]
    spec: Spec = {
        "width": PLOT,
        "height": HEIGHT,
        "data": {"values": values},
        "params": PARAMETERS,
        "transform": [SHOWN],
        "mark": {"type": "rect"},
        "encoding": {
            "x": {**counted_axis(len(allocation), "layer"), "field": "layer"},
            "x2": {"field": "next"},
            "y": {
                "field": "from",
                "type": "quantitative",
                "title": "share of blocks, %",
                "scale": {"domain": [0, 100]},
            },
            "y2": {"field": "to"},
            **_width_encoding(used),
            **TOLD,
        },
    }
    return Figure(
        f"Share of blocks at each code width, {shorten(name, 60)}",
        f"{len(allocation)} layers; widths from {used[0]} to {used[-1]} bits.",
        f"{shorten(name, 90)}: share of each layer's RoPE blocks at each code width, all KV heads together.",
        spec,
        [row] if row else [],
        shares_table({str(i): of for i, of in enumerate(shares)}, "layer", "Share of blocks at each code width."),
    )


def counted_axis(count: int, title: str) -> Spec:
    """An axis over ``count`` things of width 1, labelled in the middle of each."""
    step = max(1, -(-count // 10))
    ticks = [i + 0.5 for i in range(0, count, step)]
    axis = {"values": ticks, "labelExpr": "datum.value - 0.5", "grid": False}
    return {"type": "quantitative", "title": title, "axis": axis, "scale": {"domain": [0, count], "nice": False}}


def shares_by_quantizer(named: Mapping[str, tuple[str, Allocation, str]]) -> Figure:
    """A stacked bar a quantizer: the share of all RoPE blocks at each code width.

    ``named`` gives label, allocation and setting by the row of the comparison.
    """
    labels = series_names([f"{label}, {setting}" for label, _, setting in named.values()])
    shares = [width_shares([head for layer in allocation for head in layer]) for _, allocation, _ in named.values()]
    values = [
        {
            "name": name,
            **part,
            "row": row,
            "told": f"{shorten(label, 60)}: {part['to'] - part['from']:.1f} % of blocks at {part['width']}",
        }
        for name, (row, (label, _, _)), of in zip(labels, named.items(), shares, strict=True)
        for part in _stacked(of)
    ]
    used = sorted({bits for of in shares for bits in of})
    encoding = {
        "x": {
            "field": "from",
            "type": "quantitative",
            "title": "share of RoPE blocks, %",
            "scale": {"domain": [0, 100]},
        },
        "x2": {"field": "to"},
        **_width_encoding(used),
    }
    return Figure(
        "Share of blocks at each code width",
        f"{len(named)} allocations.",
        "Share of all key RoPE blocks at each code width, all layers and KV heads.",
        bars(values, labels, encoding),
        list(named),
        shares_table(dict(zip(labels, shares, strict=True)), "quantizer", "Share of all blocks at each code width."),
    )


def bars(values: Sequence[Spec], names: Sequence[str], encoding: Spec) -> Spec:
    """A stacked bar for each of ``names``, its name above it."""
    place = {"field": "name", "type": "nominal", "sort": list(names), "axis": None}
    outline = {"condition": {"test": MARKED, "value": colour("ink")}, "value": None}
    return {
        "width": WIDTH - 30,
        "height": {"step": BAR_STEP},
        "data": {"values": list(values)},
        "params": PARAMETERS,
        "transform": [SHOWN],
        "encoding": {"y": place},
        "layer": [
            {"mark": {"type": "bar", "height": 18, "yOffset": 9}, "encoding": {**encoding, "stroke": outline, **TOLD}},
            {
                "transform": [{"filter": "datum.from === 0"}],
                "mark": {"type": "text", "align": "left", "yOffset": -9, "fontSize": 13, "aria": False},
                "encoding": {"x": {"value": 0}, "text": {"field": "name"}},
            },
        ],
    }


def width_maps(name: str, allocation: Allocation) -> Figure:
    """A map a KV head: layers down, RoPE blocks across, coloured by code width."""
    heads = max(len(layer) for layer in allocation)
    blocks = max(len(head) for layer in allocation for head in layer)
    values = [
        {
            "head": f"KV head {head}",
            "layer": i,
            "below": i + 1,
            "from": start,
            "to": start + length,
            "width": bits_text(bits),
        }
        for i, layer in enumerate(allocation)
        for head, widths in enumerate(layer)
        for start, length, bits in runs(widths)
    ]
    columns = min(heads, 3)
    width = (WIDTH - 50) / columns - 24
    spec: Spec = {
        "data": {"values": values},
        "facet": {"field": "head", "type": "nominal", "sort": [f"KV head {head}" for head in range(heads)]},
        "columns": columns,
        "spacing": 24,
        "spec": {
            "width": width,
            "height": max(3.0, min(8.0, 240 / len(allocation))) * len(allocation),
            "mark": {"type": "rect", "aria": False},
            "encoding": {
                "x": {**counted_axis(blocks, "RoPE block"), "field": "from"},
                "x2": {"field": "to"},
                "y": {**downwards(len(allocation), "layer"), "field": "layer"},
                "y2": {"field": "below"},
                **_width_encoding(widths_used(allocation)),
            },
        },
    }
    lines = [
        [f"{i}, {head}", " ".join(map(str, widths))]
        for i, layer in enumerate(allocation)
        for head, widths in enumerate(layer)
    ]
    columns_told = (Column("layer, KV head", numeric=False), Column("bits of each block", numeric=False))
    return Figure(
        f"Code widths, {shorten(name, 60)}",
        f"{heads} KV heads, {len(allocation)} layers of {blocks} RoPE blocks.",
        f"{shorten(name, 60)}: code width of every RoPE block, one map per KV head; layers from top to bottom, blocks "
        "from fast-turning (left) to slow-turning (right).",
        spec,
        table=Table("Code width of every RoPE block, fast-turning first.", columns_told, lines),
    )


def downwards(count: int, title: str) -> Spec:
    """:func:`counted_axis` from top to bottom."""
    axis = counted_axis(count, title)
    return {**axis, "scale": {**axis["scale"], "reverse": True}}


def runs(row: Sequence[T]) -> list[tuple[int, int, T]]:
    """Equal neighbours as ``(start, length, value)``: a third of the rectangles for the same picture."""
    found: list[tuple[int, int, T]] = []
    for i, value in enumerate(row):
        if found and found[-1][2] == value:
            start, length, _ = found[-1]
            found[-1] = (start, length + 1, value)
        else:
            found.append((i, 1, value))
    return found


USES = {
    "codes": "codes (or 16-bit values)",
    "norms": "norms and scales",
    "padding": "padding and spare capacity",
}
"""The parts of :class:`BitsByUse`, in the order of a bar, with their titles."""


def bits_by_quantizer(uses: Mapping[str, BitsByUse], rows: Sequence[str] = ()) -> Figure:
    """A bar a quantizer: bits per cached element for codes, norms and scales, padding.

    ``uses`` is by label; ``rows`` are the labels' rows of a comparison.
    """
    names = series_names(list(uses))
    values: list[Spec] = []
    for place, (name, use) in enumerate(zip(names, uses.values(), strict=True)):
        start = 0.0
        for part, title in USES.items():
            bits = getattr(use, part)
            if bits > 0:
                values.append({
                    "name": name, "use": title, "from": round(start, 4), "to": round(start + bits, 4),
                    "row": rows[place] if rows else "", "told": f"{name}, {part}: {number(bits)} bits per element",
                })  # fmt: skip
            start += bits
    scale = {"domain": list(USES.values()), "range": [colour(f"use-{part}") for part in USES]}
    legend = legend_of(list(USES.values()), symbolType="square", symbolStrokeWidth=0)
    encoding = {
        "x": {"field": "from", "type": "quantitative", "title": "bits per element", "scale": {"zero": True}},
        "x2": {"field": "to"},
        "color": {"field": "use", "type": "nominal", "scale": scale, "legend": legend},
    }
    lines: list[list[Cell | str]] = [
        [name, number(use.codes), number(use.norms), number(use.padding), number(use.total)]
        for name, use in zip(names, uses.values(), strict=True)
    ]
    columns = (Column("quantizer", numeric=False), *map(Column, (*USES.values(), "total")))
    return Figure(
        "Bits per cached element",
        "; ".join(f"{name}: {number(use.total)} bits" for name, use in zip(names, uses.values(), strict=True)) + ".",
        "Bits per cached element, keys and values averaged, from allocated bytes.",
        bars(values, names, encoding),
        rows,
        Table("Bits per cached element.", columns, lines),
    )
