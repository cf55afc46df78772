"""What stands behind each row: the exact command, and the configuration, environment and engagement of its run."""

import json
from collections.abc import Iterable

from kvbench.reports.comparison import Comparison
from kvbench.reports.escaping import html_preformatted, html_text, markdown_block, markdown_text
from kvbench.reports.provenance import engagement_line, engagement_table, facts_table, quantizers_table
from kvbench.reports.scores import contenders
from kvbench.reports.table import Column, Table
from kvbench.results import Result


def runs_html(comparison: Comparison) -> str:
    """A paragraph and a command for each run, the rest folded; model geometries once, behind them."""
    return "".join(_run(comparison, number) for number in range(len(comparison.runs))) + _geometries(comparison)


def _run(comparison: Comparison, number: int) -> str:
    run = comparison.runs[number]
    result, anchor = run.result, comparison.run_anchors[run.path]
    title = f"{result.quantizer.name} on {result.model.name}, run {result.run_id[:8]}"
    engaged = "".join(
        f"<p>{html_text(engagement_line(row))}</p>" + (table.html() if (table := engagement_table(row)) else "")
        for row in contenders(result)
    )
    config = html_preformatted(json.dumps(result.config, indent=1, ensure_ascii=False, default=str))
    return (
        f'<details class="run" id="{anchor}"><summary>{html_text(title)}: {html_text(result.status)}</summary>'
        f'<pre class="wrap" tabindex="0" aria-label="Command">{html_preformatted(result.command)}</pre>'
        f"<p>From {html_text(str(run.path))}</p>"
        f"{facts_table(result).html()}{quantizers_table(result).html()}{engaged}"
        f'<p>Resolved configuration:</p><pre tabindex="0" aria-label="Configuration">{config}</pre></details>\n'
    )


def _geometries(comparison: Comparison) -> str:
    """Attention geometry of each model, which all its runs share."""
    models = {result.model.fingerprint: result.model for result in _results(comparison)}
    return "".join(
        f"<details><summary>Geometry of {html_text(model.name)}</summary>"
        f'<pre tabindex="0" aria-label="Geometry">{html_preformatted(json.dumps(model.geometry, default=str))}</pre>'
        "</details>"
        for model in models.values()
    )


def _results(comparison: Comparison) -> Iterable[Result]:
    return (run.result for run in comparison.runs)


def commands_markdown(comparison: Comparison) -> str:
    """The command of every run, for a README's readers."""
    parts = []
    for run in comparison.runs:
        result, device = run.result, run.result.environment.device
        title = f"{result.quantizer.name} on {result.model.name}, run {result.run_id[:8]}, {device}"
        parts.append(f"{markdown_text(title)}, kvbench {markdown_text(result.environment.kvbench)}:")
        parts.append(markdown_block(result.command, "sh"))
    return "\n\n".join(parts)


def left_out_table(comparison: Comparison) -> Table | None:
    """Files that are not in the comparison, and why; None where all are."""
    if not comparison.left_out:
        return None
    rows = [[str(each.path), each.reason] for each in comparison.left_out]
    columns = (Column("file or folder", numeric=False), Column("reason", numeric=False))
    return Table(f"{len(rows)} left out of this comparison.", columns, rows)
