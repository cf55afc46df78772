"""HTML pages, and a run's report: one file, no remote asset, readable on paper, on a phone, by keyboard and by ear."""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Page:
    """What stands around the sections of a page; ``title`` is text, other words are HTML."""

    title: str
    heading: str
    context: str
    footer: str
    kvbench: str
    body_class: str = ""
    scripts: Sequence[str] = ()


def document(page: Page, rendered: Sequence[Rendered]) -> str:
    """A whole page, with the policy that lets no script run but the page's own, by their SHA-256."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts)
    allowed = "; script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) if page.scripts else ""
    body = f'<body class="{page.body_class}">' if page.body_class else "<body>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{html_text(SECURITY_POLICY + allowed)}">
<meta name="generator" content="kvbench {html_text(page.kvbench)}">
<title>{html_text(page.title)} – kvbench</title>
<style>{STYLESHEET}</style>
</head>
{body}
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{page.heading}</h1>
<p class="context">{page.context}</p>
</header>
<nav aria-label="Sections"><ul>{section_links(rendered)}</ul></nav>
<main id="content" tabindex="-1">
{"".join(map(section_html, rendered))}</main>
<footer><p>kvbench {html_text(page.kvbench)}, {page.footer}</p></footer>
{"".join(f"<script>{text}</script>" for text in page.scripts)}
</body>
</html>
"""


def render_html(result: "Result", sections: Sequence[type[ReportSection]] = SECTIONS) -> str:
    """The report as an HTML document. A section that raises is shown as one that could not be rendered."""
    created = result.created.isoformat(sep=" ", timespec="seconds")
    quantizer, model = html_name(result.quantizer.name, NAME_LIMIT), html_name(result.model.name, NAME_LIMIT)
    corpus = html_name(result.corpus.get("name", "unnamed corpus"), NAME_LIMIT)
    page = Page(
        title=f"{result.quantizer.name} on {result.model.name}",
        heading=f"{quantizer} on {model}",
        context=f"KV-cache quantization, evaluated on {corpus}, {html_text(result.environment.device)}.\n"
        f'Status: {result.status}. <time datetime="{result.created.isoformat()}">{created}</time>',
        footer=f"run {html_text(result.run_id)}",
        kvbench=result.environment.kvbench,
    )
    return document(page, render_sections(result, sections, "html"))


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
