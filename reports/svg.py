"""Inline SVG: elements, scales, axes, and the figure around a picture. Colours come from the report's stylesheet.

A plotting library would bring its own colours, which cannot follow the reader's light or dark setting, and megabytes
of script or of outlined glyphs; the four pictures of a report need rectangles, lines and text.
"""

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.reports.escaping import html_name, html_text, visible

Element = ET.Element


def drawing(key: str, title: str, description: str, width: float, height: float) -> Element:
    """An ``<svg>`` of ``width`` x ``height`` units with an accessible name; ``key`` is unique within the page."""
    root = ET.Element(
        "svg",
        {
            "viewBox": f"0 0 {width:g} {height:g}",
            "role": "img",
            "aria-labelledby": f"{key}-title {key}-desc",
            "style": f"--width:{width:g}px",
        },
    )
    add(root, "title", visible(title), id=f"{key}-title")
    add(root, "desc", visible(description), id=f"{key}-desc")
    return root


def add(parent: Element, tag: str, text: str | None = None, **attributes: str | float) -> Element:
    """Appends an element. Attribute names take ``_`` for ``-``; ``class_`` is ``class``."""
    child = ET.SubElement(parent, tag)
    for name, value in attributes.items():
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
        child.set(name.rstrip("_").replace("_", "-"), shown)
    child.text = text
    return child


def markup(root: Element) -> str:
    """The element as HTML-embeddable text, every name and value escaped."""
    return ET.tostring(root, encoding="unicode")


@dataclass(frozen=True)
class Scale:
    """Maps ``low..high`` to ``start..end`` in drawing units, linearly or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values to label: 1, 2, 5 times powers of ten; about five of them, on a logarithm one to nine."""
        if self.logarithmic:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(exponents) <= 3 else (1,)
            candidates = [step * 10.0**exponent for exponent in exponents for step in steps]
            return [value for value in candidates if self.low <= value <= self.high]
        step = round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def index_ticks(count: int, most: int = 8) -> list[int]:
    """Indices of ``count`` things to label, at most ``most`` and evenly apart."""
    step = max(1, round(round_step(max(1.0, count / most))))
    return list(range(0, count, step))


@dataclass(frozen=True)
class LegendEntry:
    """``style`` is the CSS class that colours both the swatch and what it stands for.

    ``marker`` is the shape of a scatter plot's marks, where the legend is of one.
    """

    style: str
    label: str
    marker: str | None = None


@dataclass(frozen=True)
class Figure:
    """Pictures that share a legend and a caption."""

    caption: str
    pictures: Sequence[Element]
    legend: Sequence[LegendEntry] = ()

    def html(self) -> str:
        legend = "".join(f"<li>{_swatch(entry)}{html_name(entry.label)}</li>" for entry in self.legend)
        scroll = f'<div class="scroll" role="group" tabindex="0" aria-label="{html_text(self.caption)}">'
        pictures = "".join(f"{scroll}{markup(picture)}</div>" for picture in self.pictures)
        return (
            "<figure>"
            + (f'<ul class="legend">{legend}</ul>' if legend else "")
            + f'<div class="pictures">{pictures}</div><figcaption>{html_text(self.caption)}</figcaption></figure>\n'
        )


def _swatch(entry: LegendEntry) -> str:
    """Both a filled and a lined sample; the stylesheet shows the one that fits the style."""
    samples = '<rect class="fill" width="22" height="12"/><path class="line" d="M0 6H22"/>'
    style = entry.style
    if entry.marker is not None:
        samples, style = f'<path class="fill" d="{marker_path(entry.marker, 11, 6, 4.5)}"/>', f"{style} marker"
    return f'<svg class="swatch {style}" viewBox="0 0 22 12" aria-hidden="true">{samples}</svg>'


def marker_path(shape: str, x: float, y: float, size: float) -> str:
    """An outline around ``(x, y)``, of about the same area for every shape."""
    s = size
    if shape == "circle":
        return f"M{x - s:.1f} {y:.1f}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z"
    if shape == "square":
        return f"M{x - s * 0.9:.1f} {y - s * 0.9:.1f}h{s * 1.8:.1f}v{s * 1.8:.1f}h{-s * 1.8:.1f}z"
    if shape == "diamond":
        r = s * 1.25
        return f"M{x:.1f} {y - r:.1f}l{r:.2f} {r:.2f}l{-r:.2f} {r:.2f}l{-r:.2f} {-r:.2f}z"
    if shape == "triangle":
        return f"M{x:.1f} {y - s * 1.2:.1f}l{s * 1.2:.1f} {s * 2.1:.1f}h{-s * 2.4:.1f}z"
    half, out = s * 0.4, s * 0.75
    return (
        f"M{x - half:.1f} {y - half - out:.2f}h{2 * half:.1f}v{out:.2f}h{out:.2f}v{2 * half:.1f}h{-out:.2f}"
        f"v{out:.2f}h{-2 * half:.1f}v{-out:.2f}h{-out:.2f}v{-2 * half:.1f}h{out:.2f}z"
    )
