"""The HTML report: one file, no script, no remote asset, readable on paper, on a phone, by keyboard and by ear."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.reports.escaping import NAME_LIMIT, html_name, html_text
from kvbench.reports.rendering import Rendered, render_sections
from kvbench.reports.section import ReportSection
from kvbench.reports.sections import SECTIONS
from kvbench.reports.stylesheet import STYLESHEET

if TYPE_CHECKING:
    from kvbench.results import Result

# Even a section that forgot to escape can then neither run a script nor call home.
SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render_html(result: "Result", sections: Sequence[type[ReportSection]] = SECTIONS) -> str:
    """The report as an HTML document. A section that raises is shown as one that could not be rendered."""
    rendered = render_sections(result, sections, "html")
    links = section_links(rendered)
    created = result.created.isoformat(sep=" ", timespec="seconds")
    quantizer, model = html_name(result.quantizer.name, NAME_LIMIT), html_name(result.model.name, NAME_LIMIT)
    corpus = html_name(result.corpus.get("name", "unnamed corpus"), NAME_LIMIT)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{html_text(SECURITY_POLICY)}">
<meta name="generator" content="kvbench {html_text(result.environment.kvbench)}">
<title>{html_text(result.quantizer.name)} on {html_text(result.model.name)} – kvbench</title>
<style>{STYLESHEET}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{quantizer} on {model}</h1>
<p class="context">KV-cache quantization, evaluated on {corpus}, {html_text(result.environment.device)}.
Status: {result.status}. <time datetime="{result.created.isoformat()}">{created}</time></p>
</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main id="content" tabindex="-1">
{"".join(map(section_html, rendered))}</main>
<footer><p>kvbench {html_text(result.environment.kvbench)}, run {html_text(result.run_id)}</p></footer>
</body>
</html>
"""


def section_links(rendered: Sequence[Rendered]) -> str:
    """List items that lead to the sections."""
    return "".join(f'<li><a href="#{part.anchor}">{html_name(part.title, NAME_LIMIT)}</a></li>' for part in rendered)


def section_html(part: Rendered) -> str:
    """A section with its heading; one that failed says so."""
    body = part.body
    if part.failure is not None:
        body = f'<p class="bad">This section could not be rendered: {html_text(part.failure)}</p>'
    heading = f'<a href="#{part.anchor}">{html_name(part.title, NAME_LIMIT)}</a>'
    return (
        f'<section id="{part.anchor}" aria-labelledby="{part.anchor}-title">'
        f'<h2 id="{part.anchor}-title">{heading}</h2>\n{body}\n</section>\n'
    )
