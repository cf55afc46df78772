"""The comparison as Markdown: its tables and cautions, and the command of every run."""

from kvbench.reports.comparison import Comparison
from kvbench.reports.comparison_sections import parts_of
from kvbench.reports.escaping import markdown_text
from kvbench.reports.rendering import render_parts
from kvbench.reports.scores import counted


def render_comparison_markdown(comparison: Comparison) -> str:
    """GitHub-flavoured Markdown. A section that raises is shown as one that could not be rendered."""
    settings = ", ".join(dict.fromkeys(setting.title for setting in comparison.settings))
    parts = ["# KV-cache quantizers compared", f"{markdown_text(settings)}; {counted(len(comparison.runs), 'run')}."]
    for part in render_parts(comparison, parts_of(), "markdown"):
        failure = f"**This section could not be rendered:** {markdown_text(part.failure)}" if part.failure else ""
        parts += [f"## {markdown_text(part.title)}", failure or part.body.strip("\n")]
    return "\n\n".join(parts) + "\n"
