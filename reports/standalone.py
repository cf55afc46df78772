"""Figures as SVG files for papers: light colours written into each element, the legend drawn below the picture.

In a page colours come from its stylesheet's variables, which LaTeX, Inkscape and most converters do not know.
"""

import copy
import re
from functools import cache

from kvbench.reports.escaping import shorten
from kvbench.reports.stylesheet import STYLESHEET
from kvbench.reports.svg import Element, Figure, LegendEntry, add, marker_path, markup

FONT = "system-ui, Helvetica, Arial, sans-serif"
LETTER = 7.2  # mean width of a letter at the legend's size
ROW = 20.0
SWATCH = 30.0
LONGEST_LABEL = 60


@cache
def light_colours() -> dict[str, str]:
    """The stylesheet's colours for light pages, by variable name."""
    block = re.search(r":root \{(.*?)\}", STYLESHEET, re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", block.group(1))) if block else {}


@cache
def dashes() -> dict[str, str]:
    """The stylesheet's dash patterns, by the class of a series."""
    return dict(re.findall(r"\.(series-[\w-]+) \.line \{ stroke-dasharray: ([\d ]+);", STYLESHEET))


def standalone_pictures(figure: Figure) -> list[str]:
    """Each picture of ``figure`` as the text of an SVG file."""
    return [_document(picture, figure) for picture in figure.pictures]


def _document(picture: Element, figure: Figure) -> str:
    root = copy.deepcopy(picture)
    _, _, width, height = (float(value) for value in root.get("viewBox", "0 0 1 1").split())
    height = _draw_legend(root, list(figure.legend), width, height)
    _paint(root, light_colours()["ink"], "")
    root.attrib.pop("style", None)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("viewBox", f"0 0 {width:g} {height:g}")
    root.set("width", f"{width:g}")
    root.set("height", f"{height:g}")
    root.set("font-family", FONT)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{markup(root)}\n'


def _draw_legend(root: Element, entries: list[LegendEntry], width: float, height: float) -> float:
    """Entries in rows below the picture; returns the height with them."""
    x, y = 8.0, height + ROW / 2
    for entry in entries:
        label = shorten(entry.label, LONGEST_LABEL)
        needed = SWATCH + len(label) * LETTER + 14
        if x > 8 and x + needed > width:
            x, y = 8.0, y + ROW
        group = add(root, "g", class_=entry.style)
        if entry.marker is not None:
            add(group, "path", class_="fill", d=marker_path(entry.marker, x + 11, y, 4.5))
        elif entry.style.startswith("series"):
            add(group, "path", class_="line", d=f"M{x:.1f} {y:.1f}h22")
        else:
            add(group, "rect", class_="fill", x=x, y=y - 6, width=22, height=12)
        add(group, "text", label, x=x + SWATCH, y=y + 4)
        x += needed
    return y + ROW if entries else height


def _paint(element: Element, colour: str, series: str) -> None:
    """Sets what the stylesheet would: ``colour`` is that of the nearest series, width or use around the element."""
    colours = light_colours()
    classes = (element.get("class") or "").split()
    for name in classes:
        if name.startswith(("series-", "width-", "use-")) and name in colours:
            colour, series = colours[name], name
    if "line" in classes:
        _set(element, fill="none", stroke=colour, stroke_width="2", stroke_dasharray=dashes().get(series))
    elif "grid" in classes or "front" in classes:
        _set(element, fill="none", stroke=colours["rule" if "grid" in classes else "muted"], stroke_width="1")
    elif "fill" in classes or "dot" in classes:
        _set(element, fill=colour)
    elif element.tag == "text":
        quiet = "tick" in classes or "axis" in classes
        on = next((name for name in classes if name.startswith("on-")), None)
        ink = colours.get(on, colours["ink"]) if on else colours["muted" if quiet else "ink"]
        _set(element, fill=ink, font_size="12" if quiet else "13", font_weight="600" if "label" in classes else None)
    for name in ("class", "data-row"):
        element.attrib.pop(name, None)
    for child in element:
        _paint(child, colour, series)


def _set(element: Element, **attributes: str | None) -> None:
    for name, value in attributes.items():
        if value is not None:
            element.set(name.replace("_", "-"), value)
