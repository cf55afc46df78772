"""Needle-in-a-haystack heat maps, side by side: depth down, prompt length across, one map a quantizer."""

from collections.abc import Sequence
from typing import Any

from kvbench.reports.escaping import shorten
from kvbench.reports.scores import finite, number
from kvbench.reports.svg import Element, Figure, LegendEntry, add, drawing

STEPS = 8  # colours, pale to strong, as the code widths have them
MIDDLE = 4  # the one colour on which dark ink reads well in both schemes
LEFT, TOP, CELL_HEIGHT, MAP_WIDTH = 52.0, 26.0, 26.0, 250.0
FILLED_UP_TO = 8  # columns that still have room for a number in each cell

Grid = Sequence[Sequence[float | None]]


def heat_map_of(metrics: dict[str, Any], metric: str) -> tuple[list[Any], list[Any], Grid] | None:
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


def heat_maps(
    named: Sequence[tuple[str, str, dict[str, Any]]], metric: str, title: str, caption: str, key: str
) -> Figure | None:
    """A map for each ``(label, row key, metrics)`` that has one, on one scale of colours."""
    found = [(label, row, grid) for label, row, metrics in named if (grid := heat_map_of(metrics, metric)) is not None]
    values = [value for _, _, (_, _, grid) in found for line in grid for value in line if value is not None]
    if not values:
        return None
    low, high = (0.0, 1.0) if metric == "score" else (min(values), max(values))
    maps = [_map(f"{key}-{i}", label, row, title, grid, low, high) for i, (label, row, grid) in enumerate(found)]
    edges = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
    legend = [
        LegendEntry(f"width-{step + 1}", f"{number(edges[step])} to {number(edges[step + 1])}")
        for step in range(STEPS)
        if high > low
    ]
    return Figure(caption, maps, legend)


def _map(
    key: str, label: str, row: str, title: str, grid: tuple[list[Any], list[Any], Grid], low: float, high: float
) -> Element:
    lengths, depths, values = grid
    width, bottom = MAP_WIDTH / len(lengths), TOP + CELL_HEIGHT * len(depths)
    shown = [value for line in values for value in line if value is not None]
    mean = number(sum(shown) / len(shown)) if shown else "none"
    described = f"{len(depths)} depths by {len(lengths)} lengths; mean {mean}."
    root = drawing(key, f"{title}, {shorten(label, 60)}", described, LEFT + MAP_WIDTH + 6, bottom + 36)
    if row:
        root.set("data-row", row)
    add(root, "text", shorten(label, 34), class_="axis", x=LEFT, y=16.0)
    for i, (depth, line) in enumerate(zip(depths, values, strict=True)):
        y = TOP + i * CELL_HEIGHT
        share = finite(depth)
        name = shorten(str(depth), 6) if share is None else f"{100 * share:.0f} %"
        add(root, "text", name, class_="tick", x=LEFT - 6, y=y + CELL_HEIGHT / 2 + 4, text_anchor="end")
        for j, (length, value) in enumerate(zip(lengths, line, strict=True)):
            at = LEFT + j * width
            step = None if value is None else _step(value, low, high)
            style = "width-other" if step is None else f"width-{step}"
            cell = add(root, "rect", class_=f"fill {style}", x=at, y=y, width=width - 1, height=CELL_HEIGHT - 1)
            told = "not measured" if value is None else number(value)
            add(cell, "title", f"{shorten(label, 40)}, {length} tokens, depth {name}: {told}")
            if value is not None and len(lengths) <= FILLED_UP_TO:
                ink = "on-pale" if (step or 0) < MIDDLE else "on-strong" if (step or 0) > MIDDLE else "on-middle"
                add(
                    root,
                    "text",
                    f"{value:.2f}",
                    class_=f"cell {ink}",
                    x=at + (width - 1) / 2,
                    y=y + CELL_HEIGHT / 2 + 4,
                    text_anchor="middle",
                )
    every = max(1, -(-len(lengths) // 6))
    for j, length in list(enumerate(lengths))[::every]:
        add(
            root,
            "text",
            _tokens(length),
            class_="tick",
            x=LEFT + (j + 0.5) * width,
            y=bottom + 15,
            text_anchor="middle",
        )
    add(root, "text", "prompt tokens", class_="tick", x=LEFT + MAP_WIDTH / 2, y=bottom + 31, text_anchor="middle")
    return root


def _step(value: float, low: float, high: float) -> int:
    """The colour of a value: 1 to ``STEPS``."""
    if high <= low:
        return STEPS
    return min(STEPS, max(1, 1 + int((value - low) / (high - low) * STEPS)))


def _tokens(length: Any) -> str:
    value = finite(length)
    if value is None:
        return shorten(str(length), 8)
    return f"{value / 1024:g}K" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
