"""How quantizers look in every figure, and what a page lets its reader do: parts of Vega-Lite specifications.

A datum names its quantizer in ``series``, what its tooltip says in ``told``, and, in a comparison, its row in ``row``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.reports.drawing import WIDTH
from kvbench.reports.escaping import shorten
from kvbench.reports.palette import colour
from kvbench.reports.scores import REFERENCE

Spec = dict[str, Any]

STYLES = 5  # that can be told apart
DASHES: tuple[list[int], ...] = ([1, 0], [7, 3], [2, 3], [9, 3, 2, 3], [5, 5])
TRIANGLE, DIAMOND = "M0,-1.2L1.2,1L-1.2,1Z", "M0,-1.3L1.3,0L0,1.3L-1.3,0Z"  # Vega's own look half as large as a square
SHAPES = ("circle", "square", TRIANGLE, DIAMOND, "cross")
REFERENCE_DASH, REFERENCE_SHAPE = [1, 4], "circle"
LONGEST_NAME = 48
LETTER = 7.2  # mean width of a letter of a legend
SYMBOL = 50.0  # width of a legend's symbol and the gaps around it

PARAMETERS: list[Spec] = [{"name": "hidden", "value": []}, {"name": "marked", "value": ""}]
"""``hidden``: rows that the page's filters hide. ``marked``: the row that the reader points at. Set by the script."""

SHOWN: Spec = {"filter": "indexof(hidden, datum.row) < 0"}
MARKED = "datum.row && datum.row === marked"
CHOSEN: Spec = {"name": "chosen", "select": {"type": "point", "fields": ["series"]}, "bind": "legend"}
TOLD: Spec = {"tooltip": {"field": "told"}, "description": {"field": "told"}}


def series_names(labels: Sequence[str]) -> list[str]:
    """The labels, short enough for a legend and each different from the others."""
    names: list[str] = []
    for label in labels:
        name, count = shorten(label, LONGEST_NAME), 1
        while name in names:
            count += 1
            name = f"{shorten(label, LONGEST_NAME - 6)} ({count})"
        names.append(name)
    return names


def series_encoding(quantizers: Mapping[str, str], shaped: bool = True) -> Spec:
    """Colour, dash and shape by ``series``, given its quantizer: the reference is grey, the others take the palette.

    Past STYLES quantizers colours come again, each with the next shape and dash.
    """
    others = [name for name, quantizer in quantizers.items() if quantizer != REFERENCE]
    places = {name: others.index(name) if name in others else None for name in quantizers}

    def ranged(of: Sequence[Any], reference: Any, ahead: int = 1) -> Spec:
        """``ahead``: how many places a value moves on with every round of colours."""
        values = [
            reference if place is None else of[(place + place // STYLES * ahead) % STYLES] for place in places.values()
        ]
        return {"field": "series", "type": "nominal", "scale": {"domain": list(places), "range": values}}

    legend = legend_of(list(quantizers))
    palette = [colour(f"series-{i + 1}") for i in range(STYLES)]
    encoding = {"color": {**ranged(palette, colour("series-reference"), ahead=0), "legend": legend}}
    if shaped:
        encoding["shape"] = {**ranged(SHAPES, REFERENCE_SHAPE), "legend": legend}
    encoding["strokeDash"] = {**ranged(DASHES, REFERENCE_DASH), "legend": legend}
    return encoding


def legend_of(names: Sequence[str], **others: Any) -> Spec:
    """A legend in as many columns as fit."""
    longest = max((len(name) for name in names), default=0)
    return {"columns": max(1, min(len(names), int(WIDTH / (longest * LETTER + SYMBOL)))), **others}


def emphasis(normal: float, marked: float) -> Spec:
    """A size or width that grows where the reader points."""
    return {"condition": {"test": MARKED, "value": marked}, "value": normal}


FADED: Spec = {"opacity": {"condition": {"param": "chosen", "value": 1}, "value": 0.15}}
"""What the legend does not have chosen."""
