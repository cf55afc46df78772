"""The head of a comparison: the answers in tiles, and the controls that filter its rows."""

from kvbench.reports.comparison import METRICS, Comparison, Row
from kvbench.reports.comparison_table import FILTERS, filter_choices, filter_facts
from kvbench.reports.escaping import NAME_LIMIT, html_name, html_text, shorten
from kvbench.reports.scores import counted, number, percent

CLOSE = 0.01
"""Relative rise of perplexity that papers of the field call near-lossless."""

MOST_SETTINGS = 3

_LOGIT_ERROR, _PERPLEXITY = METRICS[0], METRICS[1]


def tiles(comparison: Comparison) -> str:
    """How many runs; for each of the first settings, the smallest near-lossless cache and the best at lowest bits."""
    found = [_counts(comparison)]
    for setting in comparison.settings[:MOST_SETTINGS]:
        rows = [row for row in comparison.rows if row.setting == setting and not row.is_reference]
        title = shorten(comparison.setting_titles[setting], NAME_LIMIT)
        where = f" ({title})" if len(comparison.settings) > 1 else ""
        found += [tile for tile in (_smallest(comparison, rows, where), _least_error(comparison, rows, where)) if tile]
    return f'<dl class="tiles">{"".join(found)}</dl>'


def _tile(label: str, value: str, detail: str) -> str:
    return (
        f"<div><dt>{html_text(label)}</dt><dd>"
        f'<span class="value">{html_name(value, NAME_LIMIT)}</span> <span class="detail">{html_text(detail)}</span>'
        "</dd></div>"
    )


def _counts(comparison: Comparison) -> str:
    quantizers = {row.name for row in comparison.rows}
    left_out = f"; {len(comparison.left_out)} left out" if comparison.left_out else ""
    detail = f"{counted(len(quantizers), 'quantizer')}, {counted(len(comparison.rows), 'row')}{left_out}"
    return _tile("Runs compared", f"{len(comparison.runs)}", detail)


def _smallest(comparison: Comparison, rows: list[Row], where: str) -> str:
    """The smallest cache whose perplexity rises by no more than CLOSE."""
    measured = [(row, comparison.change(row, _PERPLEXITY)) for row in rows]
    close = [
        (row.measurement.compression.ratio, row, change)
        for row, change in measured
        if change is not None and change <= CLOSE and row.measurement.compression is not None
    ]
    label = f"Smallest within {CLOSE:.0%} of fp16's perplexity{where}"
    if not close:
        changed = [(change, row) for row, change in measured if change is not None]
        if not changed:
            return ""
        change, row = min(changed, key=lambda found: found[0])
        return _tile(label, "none", f"closest: {shorten(row.label, NAME_LIMIT)}, perplexity {percent(change)}")
    ratio, row, change = max(close, key=lambda found: found[0])
    return _tile(label, f"{ratio:.2f}× smaller", f"{shorten(row.label, NAME_LIMIT)}, perplexity {percent(change)}")


def _least_error(comparison: Comparison, rows: list[Row], where: str) -> str:
    """Of the rows with the largest cut in logit error against uniform TQ-MSE at equal code bits."""
    cuts = [(change, row) for row in rows if (change := comparison.change(row, _LOGIT_ERROR)) is not None]
    if not cuts:
        return ""
    change, row = min(cuts, key=lambda cut: cut[0])
    detail = f"{shorten(row.label, NAME_LIMIT)}: {number(row.score(_LOGIT_ERROR).value or 0)}"
    label = f"Logit error against {_LOGIT_ERROR.reference} of equal code bits, best{where}"
    return _tile(label, percent(change), detail)


def controls(comparison: Comparison) -> str:
    """A search box, a list for every fact that tells rows apart, and whether baselines are shown."""
    choices = filter_choices([filter_facts(comparison, row) for row in comparison.rows])
    lists = "".join(_list(name, title, choices[name]) for name, title in FILTERS if name in choices)
    return (
        '<div class="controls" role="search" aria-label="Filter rows">'
        '<label>Search<input type="search" id="filter-text" autocomplete="off"></label>'
        f"{lists}"
        '<label class="tick-box"><input type="checkbox" id="filter-baselines" checked>Baselines</label>'
        f'<output id="filter-count">{len(comparison.rows)} rows</output></div>'
    )


def _list(name: str, title: str, values: list[str]) -> str:
    options = "".join(
        f'<option value="{html_text(value)}">{html_text(shorten(value, NAME_LIMIT))}</option>' for value in values
    )
    return f'<label>{title}<select name="{name}"><option value="">all</option>{options}</select></label>'
