"""Runs sections so that one that fails, a plugin's or ours, says so in its place and leaves the rest alone."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvbench.progress import track
from kvbench.reports.section import ReportSection

if TYPE_CHECKING:
    from kvbench.reports.comparison import Comparison
    from kvbench.reports.comparison_sections import Part
    from kvbench.results import Result


@dataclass(frozen=True)
class Rendered:
    """A section's output: ``body`` in the asked format, or why there is none."""

    anchor: str
    title: str
    body: str
    failure: str | None = None


def render_sections(
    result: "Result", sections: Iterable[type[ReportSection]], form: Literal["html", "markdown"]
) -> list[Rendered]:
    """Every section that applies to ``result``, in order; anchors are unique and safe in a URL."""

    def body(section: type[ReportSection]) -> str:
        instance = section()
        return instance.html(result) if form == "html" else instance.markdown(result)

    return _rendered([(*_heading(section), partial(body, section)) for section in sections], form)


def render_parts(
    comparison: "Comparison", parts: "Iterable[Part]", form: Literal["html", "markdown"]
) -> list[Rendered]:
    """Every part that applies to ``comparison``, in order."""
    named = [(part.name, part.title, partial(getattr(part, form), comparison)) for part in parts]
    return _rendered(track(named, "rendering sections"), form)


def render_bodies(named: Iterable[tuple[str, str, Callable[[], str]]]) -> list[Rendered]:
    """Sections given as ``(name, title, HTML body)``, in order."""
    return _rendered(named, "html")


def _heading(section: type[ReportSection]) -> tuple[str, str]:
    name = str(getattr(section, "name", section.__name__))
    return name, str(getattr(section, "title", name))


def _rendered(named: "Iterable[tuple[str, str, Callable[[], str]]]", form: str) -> list[Rendered]:
    """The bodies of ``(name, title, body)`` that are not empty; one that raises becomes a failure."""
    rendered: list[Rendered] = []
    for name, title, body_of in named:
        anchor = _unique(name, {other.anchor for other in rendered})
        try:
            body = body_of()
            if not isinstance(body, str):
                raise TypeError(f"{form}() returned {type(body).__name__}, not str")
        except Exception as error:
            rendered.append(Rendered(anchor, title, "", f"{type(error).__name__}: {error}"))
        else:
            if body.strip():
                rendered.append(Rendered(anchor, title, body))
    return rendered


def _unique(name: str, taken: set[str]) -> str:
    base = "section-" + (re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "unnamed")
    anchor, count = base, 1
    while anchor in taken:
        count += 1
        anchor = f"{base}-{count}"
    return anchor
