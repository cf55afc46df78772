"""Runs sections so that one that fails, a plugin's or ours, says so in its place and leaves the rest alone."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvbench.reports.section import ReportSection

if TYPE_CHECKING:
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
    rendered: list[Rendered] = []
    for section in sections:
        name = str(getattr(section, "name", section.__name__))
        title = str(getattr(section, "title", name))
        anchor = _unique(name, {other.anchor for other in rendered})
        try:
            instance = section()
            body = instance.html(result) if form == "html" else instance.markdown(result)
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
