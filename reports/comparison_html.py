"""The HTML comparison: one file, nothing from outside, two scripts that the page's policy names by hash."""

from collections.abc import Sequence

import kvbench
from kvbench.reports.comparison import Comparison
from kvbench.reports.comparison_script import scripts
from kvbench.reports.comparison_sections import parts_of
from kvbench.reports.escaping import NAME_LIMIT, html_name
from kvbench.reports.html import Page, document
from kvbench.reports.rendering import render_parts
from kvbench.reports.scores import counted
from kvbench.reports.section import ReportSection

MOST_SETTINGS = 3  # named in the heading


def render_comparison_html(comparison: Comparison, plugins: Sequence[type[ReportSection]] = ()) -> str:
    """The comparison as an HTML document; ``plugins`` are report sections whose ``compare`` takes part.

    A section that raises is shown as one that could not be rendered.
    """
    rendered = render_parts(comparison, parts_of(plugins), "html")
    latest = max(run.result.created for run in comparison.runs)
    named = list(dict.fromkeys(setting.title for setting in comparison.settings))
    settings = ", ".join(html_name(title, NAME_LIMIT) for title in named[:MOST_SETTINGS])
    settings += f" and {len(named) - MOST_SETTINGS} more" if len(named) > MOST_SETTINGS else ""
    page = Page(
        title="KV-cache quantizers compared",
        heading="KV-cache quantizers compared",
        context=f"{settings}. Latest run\n"
        f'<time datetime="{latest.isoformat()}">{latest.isoformat(sep=" ", timespec="minutes")}</time>',
        footer=counted(len(comparison.runs), "run"),
        kvbench=kvbench.__version__,
        body_class="wide no-script",
        scripts=scripts(),
    )
    return document(page, rendered)
