"""Heat maps: needles in a haystack side by side, and the energy of RoPE blocks by layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.reports.charts import counted_axis, downwards, runs
from kvbench.reports.drawing import WIDTH
from kvbench.reports.escaping import shorten
from kvbench.reports.figure import Figure, Spec
from kvbench.reports.palette import colour
from kvbench.reports.scores import finite, number
from kvbench.reports.series import PARAMETERS, SHOWN, TOLD, legend_of, series_names
from kvbench.reports.table import Column, Table

STEPS = 8  # colours, pale to strong, as the code widths have them
MIDDLE = 4  # the one colour on which dark ink reads well in both schemes
CELL_HEIGHT = 26
ABREAST = 3  # maps in a row
FILLED_UP_TO = 8  # columns that still have room for a number in each cell
NOT_MEASURED = "not measured"

Grid = Sequence[Sequence[float | None]]


def heat_map_of(metrics: Mapping[str, Any], metric: str) -> tuple[list[Any], list[Any], Grid] | None:
    """Lengths, depths and values (a row a depth) of a ``heat_map`` metric; None where it is not one."""
    found = metrics.get("heat_map")
    if not isinstance(found, dict) or not isinstance(found.get(metric), list):
        return None
    lengths, depths, values = found.get("lengths"), found.get("depths"), found[metric]
    if not isinstance(lengths, list) or not isinstance(depths, list) or len(values) != len(depths):
        return None
    if not lengths or not depths or any(not isinstance(row, list) or len(row) != len(lengths) for row in values):
        return None
    return lengths, depths, [[finite(value) for value in row] for row in values]


def needle_maps(
    named: Sequence[tuple[str, str, Mapping[str, Any]]], metric: str, title: str, caption: str
) -> Figure | None:
    """A map for each ``(label, row key, metrics)`` that has one, on one scale of colours: depth down, length across."""
    found = [(label, row, grid) for label, row, metrics in named if (grid := heat_map_of(metrics, metric)) is not None]
    measured = [value for _, _, (_, _, grid) in found for line in grid for value in line if value is not None]
    if not measured:
        return None
    bands = Bands(0.0, 1.0) if metric == "score" else Bands(min(measured), max(measured))
    names = series_names([label for label, _, _ in found])
    values: list[Spec] = []
    lines: list[list[str]] = []
    for name, (_, row, (lengths, depths, cells)) in zip(names, found, strict=True):
        for depth, line in zip(depths, cells, strict=True):
            for length, value in zip(lengths, line, strict=True):
                told = NOT_MEASURED if value is None else number(value)
                values.append({
                    "map": name, "row": row, "length": _tokens(length), "depth": _depth(depth),
                    "band": bands.name(value),
                    "text": "" if value is None or len(lengths) > FILLED_UP_TO else f"{value:.2f}",
                    "ink": colour(bands.ink(value)),
                    "told": f"{name}, {length} tokens, depth {_depth(depth)}: {told}",
                })  # fmt: skip
                lines.append([name, _tokens(length), _depth(depth), told])
    depths_of = list(dict.fromkeys(_depth(depth) for _, _, (_, depths, _) in found for depth in depths))
    lengths_of = list(dict.fromkeys(_tokens(length) for _, _, (lengths, _, _) in found for length in lengths))
    spec: Spec = {
        "data": {"values": values},
        "params": PARAMETERS,
        "transform": [SHOWN],
        "facet": {"field": "map", "type": "nominal", "sort": names},
        "columns": ABREAST,
        "spacing": 24,
        "spec": {
            "width": (WIDTH - 60) / ABREAST - 24,
            "height": CELL_HEIGHT * len(depths_of),
            "encoding": {
                "x": {"field": "length", "type": "ordinal", "sort": lengths_of, "title": "prompt tokens",
                      "axis": {"labelAngle": 0, "labelOverlap": True}},
                "y": {"field": "depth", "type": "ordinal", "sort": depths_of, "title": "depth"},
            },
            "layer": [
                {"mark": {"type": "rect"},
                 "encoding": {**bands.encoding(), "stroke": {"value": colour("page")}, **TOLD}},
                {"mark": {"type": "text", "fontSize": 11, "aria": False},
                 "encoding": {"text": {"field": "text"}, "color": {"field": "ink", "type": "nominal", "scale": None}}},
            ],
        },
    }  # fmt: skip
    means = "; ".join(f"{name}: mean {_mean(grid)}" for name, (_, _, (_, _, grid)) in zip(names, found, strict=True))
    columns = tuple(Column(what, numeric=i == 3) for i, what in enumerate(("quantizer", "tokens", "depth", title)))
    return Figure(
        title,
        f"{len(depths_of)} depths by {len(lengths_of)} lengths. {means}.",
        caption,
        spec,
        [row for _, row, _ in found if row],
        Table(f"{title} at each length and depth.", columns, lines),
    )


class Bands:
    """``low`` to ``high`` in :data:`STEPS` equal bands, each with a colour."""

    def __init__(self, low: float, high: float, text: Callable[[float], str] = number) -> None:
        self.low, self.high = low, high
        edges = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
        self.names = [f"{text(edges[step])} to {text(edges[step + 1])}" for step in range(STEPS)]
        if high <= low:
            self.names = [f"{text(high)}"] * STEPS

    def step(self, value: float) -> int:
        """The band of a value, counted from 1."""
        if self.high <= self.low:
            return STEPS
        return min(STEPS, max(1, 1 + int((value - self.low) / (self.high - self.low) * STEPS)))

    def name(self, value: float | None) -> str:
        return NOT_MEASURED if value is None else self.names[self.step(value) - 1]

    def ink(self, value: float | None) -> str:
        """The colour of text on a value's band."""
        step = 0 if value is None else self.step(value)
        return "on-pale" if step < MIDDLE else "on-strong" if step > MIDDLE else "on-middle"

    def encoding(self) -> Spec:
        colours = dict(zip(self.names, (colour(f"width-{step + 1}") for step in range(STEPS)), strict=True))
        colours[NOT_MEASURED] = colour("width-other")
        legend = legend_of(self.names, symbolType="square", symbolStrokeWidth=0, values=list(dict.fromkeys(self.names)))
        scale = {"domain": list(colours), "range": list(colours.values())}
        return {"color": {"field": "band", "type": "ordinal", "scale": scale, "legend": legend}}


def energy_maps(energies: Mapping[str, Sequence[Sequence[float]]], where: str) -> Figure | None:
    """A map for queries and one for keys: layers down, RoPE blocks across, coloured by the logarithm of energy.

    ``energies`` is ``[layers, blocks]`` by tensor; a value that is not positive is left white.
    """
    found = {name: grid for name, grid in energies.items() if any(value > 0 for line in grid for value in line)}
    if not found:
        return None
    logs = [math.log10(value) for grid in found.values() for line in grid for value in line if value > 0]
    bands = Bands(min(logs), max(logs), _two_digits)
    layers = max(map(len, found.values()))
    blocks = max(len(line) for grid in found.values() for line in grid)
    values = [
        {"map": name, "layer": layer, "below": layer + 1, "from": start, "to": start + length, "band": band}
        for name, grid in found.items()
        for layer, line in enumerate(grid)
        for start, length, band in runs([bands.name(math.log10(value)) if value > 0 else "" for value in line])
        if band
    ]
    spec: Spec = {
        "data": {"values": values},
        "facet": {"field": "map", "type": "nominal", "sort": list(found)},
        "columns": len(found),
        "spacing": 24,
        "spec": {
            "width": (WIDTH - 60) / len(found) - 24,
            "height": max(3.0, min(8.0, 240 / layers)) * layers,
            "mark": {"type": "rect", "aria": False},
            "encoding": {
                "x": {**counted_axis(blocks, "RoPE block"), "field": "from"},
                "x2": {"field": "to"},
                "y": {**downwards(layers, "layer"), "field": "layer"},
                "y2": {"field": "below"},
                **bands.encoding(),
            },
        },
    }
    strongest = "; ".join(f"{name}: strongest block {_strongest(grid)}" for name, grid in found.items())
    lines = [
        [f"{layer}, {name}", " ".join(f"{value:.3g}" for value in line)]
        for name, grid in found.items()
        for layer, line in enumerate(grid)
    ]
    columns = (Column("layer, tensor", numeric=False), Column("energy of each block", numeric=False))
    return Figure(
        f"Energy of RoPE blocks, {shorten(where, 60)}",
        f"{layers} layers of {blocks} RoPE blocks. {strongest}.",
        f"{where}: mean energy of every RoPE block over calibration tokens and KV heads, logarithmic colours; layers "
        "from top to bottom, blocks from fast-turning (left) to slow-turning (right).",
        spec,
        table=Table("Mean energy of every RoPE block, fast-turning first.", columns, lines),
    )


def _two_digits(exponent: float) -> str:
    """A power of ten in two significant digits, without an exponent."""
    return f"{float(f'{10**exponent:.2g}'):,g}"


def _strongest(grid: Sequence[Sequence[float]]) -> str:
    value, layer, block = max((value, i, j) for i, line in enumerate(grid) for j, value in enumerate(line))
    return f"{block} of layer {layer}, {value:.3g}"


def _mean(grid: Grid) -> str:
    shown = [value for line in grid for value in line if value is not None]
    return number(sum(shown) / len(shown)) if shown else "none"


def _depth(depth: Any) -> str:
    share = finite(depth)
    return shorten(str(depth), 6) if share is None else f"{100 * share:.0f} %"


def _tokens(length: Any) -> str:
    value = finite(length)
    if value is None:
        return shorten(str(length), 8)
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
