"""The Markdown report: the HTML report's tables for a README, an issue or a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.reports.escaping import markdown_text
from kvbench.reports.rendering import render_sections
from kvbench.reports.section import ReportSection
from kvbench.reports.sections import SECTIONS

if TYPE_CHECKING:
    from kvbench.results import Result


def render_markdown(result: "Result", sections: Sequence[type[ReportSection]] = SECTIONS) -> str:
    """The report as GitHub-flavoured Markdown. A section that raises is shown as one that could not be rendered."""
    created = result.created.isoformat(sep=" ", timespec="seconds")
    corpus = result.corpus.get("name", "unnamed corpus")
    parts = [
        f"# {markdown_text(result.quantizer.name)} on {markdown_text(result.model.name)}",
        f"Evaluated on {markdown_text(corpus)}, {markdown_text(result.environment.device)}. "
        f"Status: {result.status}. {created}, run {markdown_text(result.run_id)}, "
        f"kvbench {markdown_text(result.environment.kvbench)}.",
    ]
    for part in render_sections(result, sections, "markdown"):
        failure = f"**This section could not be rendered:** {markdown_text(part.failure)}" if part.failure else ""
        parts += [f"## {markdown_text(part.title)}", failure or part.body.strip("\n")]
    return "\n\n".join(parts) + "\n"
