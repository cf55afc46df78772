"""Draws Vega-Lite specifications with vl-convert: into pages, into files, and for the page's own Vega to redraw.

vl-convert carries Vega, fonts and a JavaScript engine: no browser is started and nothing is fetched.
"""

import xml.etree.ElementTree as ET
from typing import Any

from kvbench.reports.palette import colour, painted

Spec = dict[str, Any]

WIDTH = 660
"""Units that a figure is wide; a page scales it down to its column."""

PIXELS_A_UNIT = 3  # of PNG files: 288 dots an inch at a figure's own size
SVG = "http://www.w3.org/2000/svg"
PAGE_FONT = "system-ui, sans-serif"
FILE_FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
VEGA_LITE = "https://vega.github.io/schema/vega-lite/v6.json"  # names the version; nobody fetches it


def _configuration(font: str) -> Spec:
    ink, muted, rule = colour("ink"), colour("muted"), colour("rule")
    quiet = {"labelColor": muted, "titleColor": muted, "labelFontSize": 12, "titleFontSize": 13}
    return {
        "font": font,
        "view": {"stroke": None},
        "axis": {
            **quiet,
            "titleFontWeight": "normal",
            "titlePadding": 8,
            "gridColor": rule,
            "tickColor": rule,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
            "aria": False,
        },
        "legend": {
            **quiet,
            "labelColor": ink,
            "labelFontSize": 13,
            "labelLimit": 320,
            "title": None,
            "orient": "top",
            "columnPadding": 28,  # a reader's font may be wider than the one that the picture was laid out with
            "direction": "horizontal",
            "symbolStrokeWidth": 0,
            "aria": False,
        },
        "header": {"labelColor": muted, "labelFontSize": 13, "labelLimit": 260, "title": None},
        "title": {"aria": False},
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": muted},
    }


def _complete(spec: Spec, font: str, **others: Any) -> Spec:
    return {"$schema": VEGA_LITE, "background": None, **spec, "config": _configuration(font), **others}


def live_specification(spec: Spec) -> Spec:
    """What the page's own Vega draws."""
    complete = _complete(spec, PAGE_FONT)
    complete["config"]["aria"] = False  # the picture has a label, and the numbers a table
    return complete


def picture(spec: Spec) -> str:
    """An ``<svg>`` element for a page: colours from its stylesheet, every mark with its text as tooltip."""
    root = _drawn(_complete(spec, PAGE_FONT))
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("aria-hidden", "true")  # what stands around it has its name
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{SVG}}}")  # HTML knows an <svg> without its namespace
    return ET.tostring(root, encoding="unicode")


def file_of(spec: Spec, title: str, form: str) -> bytes:
    """In light colours on white: an ``svg`` document, a ``png`` image, or a ``pdf`` page of the figure's own size."""
    import vl_convert

    complete: Spec = painted(_complete(spec, FILE_FONT, background=colour("page")))
    if form == "png":
        return bytes(vl_convert.vegalite_to_png(complete, scale=PIXELS_A_UNIT))
    if form == "pdf":
        return bytes(vl_convert.vegalite_to_pdf(complete))
    root = _drawn(complete)
    name = ET.Element(f"{{{SVG}}}title")
    name.text = title
    root.insert(0, name)
    root.set("role", "img")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'.encode()


def _drawn(complete: Spec) -> ET.Element:
    """The SVG as a tree without Vega's roles for screen readers; a mark's description becomes its tooltip."""
    import vl_convert

    ET.register_namespace("", SVG)
    root = ET.fromstring(vl_convert.vegalite_to_svg(complete))
    for element in root.iter():
        told = element.attrib.pop("aria-label", None)
        for name in ("role", "aria-roledescription", "aria-hidden", "pointer-events"):
            element.attrib.pop(name, None)
        if told is not None and "mark-group" not in element.get("class", ""):
            title = ET.Element(f"{{{SVG}}}title")
            title.text = told
            element.insert(0, title)
    return root
