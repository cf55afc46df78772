"""The HTML comparison: one file, nothing from outside, two scripts that the page's policy names by hash."""

from collections.abc import Sequence

import kvbench
from kvbench.reports.comparison import Comparison
from kvbench.reports.comparison_script import script_source, scripts
from kvbench.reports.comparison_sections import parts_of
from kvbench.reports.escaping import NAME_LIMIT, html_name, html_text
from kvbench.reports.html import SECURITY_POLICY, section_html, section_links
from kvbench.reports.rendering import render_parts
from kvbench.reports.scores import counted
from kvbench.reports.section import ReportSection
from kvbench.reports.stylesheet import STYLESHEET

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
    policy = f"{SECURITY_POLICY}; script-src {script_source()}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{html_text(policy)}">
<meta name="generator" content="kvbench {html_text(kvbench.__version__)}">
<title>KV-cache quantizers compared – kvbench</title>
<style>{STYLESHEET}</style>
</head>
<body class="wide no-script">
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>KV-cache quantizers compared</h1>
<p class="context">{settings}. Latest run
<time datetime="{latest.isoformat()}">{latest.isoformat(sep=" ", timespec="minutes")}</time></p>
</header>
<nav aria-label="Sections"><ul>{section_links(rendered)}</ul></nav>
<main id="content" tabindex="-1">
{"".join(map(section_html, rendered))}</main>
<footer><p>kvbench {html_text(kvbench.__version__)}, {counted(len(comparison.runs), "run")}</p></footer>
{"".join(f"<script>{text}</script>" for text in scripts())}
</body>
</html>
"""
