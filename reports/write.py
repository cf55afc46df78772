"""Writes a run's reports beside its result."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.reports.html import render_html
from kvbench.reports.markdown import render_markdown
from kvbench.reports.section import ReportSection
from kvbench.reports.sections import SECTIONS
from kvbench.results import write_text_atomically

if TYPE_CHECKING:
    from kvbench.results import Result


def write_reports(
    result: "Result", directory: Path, sections: Sequence[type[ReportSection]] = SECTIONS
) -> tuple[Path, Path]:
    """Writes ``report.md`` and ``report.html`` into ``directory``, each whole or not at all, and returns their paths.

    Raises ResultError when they cannot be written.
    """
    markdown, html = directory / "report.md", directory / "report.html"
    write_text_atomically(markdown, render_markdown(result, sections))
    write_text_atomically(html, render_html(result, sections))
    return markdown, html
