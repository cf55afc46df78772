"""A figure as data: one Vega-Lite specification from which every medium is drawn, and the numbers in it as a table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.reports.drawing import WIDTH, live_specification, picture
from kvbench.reports.escaping import html_text
from kvbench.reports.table import Table

Spec = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """What is drawn and what is said of it.

    ``spec`` is Vega-Lite without colours of its own (:func:`kvbench.reports.palette.colour`) and without
    configuration, which :mod:`kvbench.reports.drawing` adds. ``description`` is what a screen reader says of the
    picture. ``rows`` are the rows of a comparison that it shows, and ``table`` has its numbers.
    """

    title: str
    description: str
    caption: str
    spec: Spec
    rows: Sequence[str] = ()
    table: Table | None = None

    def html(self, live: bool = False) -> str:
        """The figure drawn into the page. A ``live`` one carries its specification for the page's script."""
        caption, label = html_text(self.caption), html_text(f"{self.title}. {self.description}")
        rows = f' data-rows="{html_text(" ".join(self.rows))}"' if self.rows else ""
        script = (
            f'<script type="application/json">{_inert_json(live_specification(self.spec))}</script>' if live else ""
        )
        numbers = f"<details><summary>Numbers</summary>{self.table.html()}</details>" if self.table else ""
        return (
            f"<figure{rows}>"
            f'<div class="scroll" role="group" tabindex="0" aria-label="{caption}">'
            f'<div class="picture" style="--width:{WIDTH}px" role="img" aria-label="{label}">'
            f"{picture(self.spec)}</div></div>{script}"
            f"<figcaption>{caption}</figcaption>{numbers}</figure>\n"
        )


def _inert_json(value: Any) -> str:
    """JSON that no HTML parser finds a tag in, and that is ASCII."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
