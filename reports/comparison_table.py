"""The table of a comparison: one row a quantizer, sortable in HTML, the same in Markdown and on a terminal."""

import json
from collections.abc import Sequence

from kvbench.reports.comparison import Comparison, Metric, Row
from kvbench.reports.scores import Score, number, percent
from kvbench.reports.table import Cell, Column, Table

DASH = "–"
HOW_TO_READ = (
    "Ratio: fp16 bytes over allocated bytes. Effective bits: all allocated bytes, keys and values averaged. "
    "Changes are against the same model, texts, task options and, for tqmse, code bits."
)


def comparison_table(comparison: Comparison) -> Table:
    """Sizes, then every metric that some row has with its change against its reference, then how it was measured."""
    several = len(comparison.settings) > 1
    columns = [Column("quantizer", numeric=False)]
    columns += [Column("model", numeric=False)] if several else []
    columns += [Column("ratio"), Column("effective bits")]
    for metric in comparison.metrics:
        columns += [Column(metric.title)]
        columns += [Column(change_title(metric))] if comparison.has_changes(metric) else []
    columns += [Column("path", numeric=False), Column("backend", numeric=False), Column("run", numeric=False)]
    lines = [_line(comparison, row, several) for row in comparison.rows]
    data = [{"row": row.key, "facts": json.dumps(filter_facts(comparison, row))} for row in comparison.rows]
    return Table("Quantizers compared.", tuple(columns), lines, row_data=data, sortable=True)


def change_title(metric: Metric) -> str:
    return f"{metric.title} vs {metric.reference}"


def _line(comparison: Comparison, row: Row, several: bool) -> list[Cell | str]:
    size = row.measurement.compression
    marks = ("baseline",) if row.is_baseline else ()
    cells: list[Cell | str] = [Cell(row.label, marks)]
    cells += [comparison.setting_titles[row.setting]] if several else []
    if size is None:
        cells += [Cell("not measured", bad=True), DASH]
    else:
        bits = row.effective_bits or 0.0
        cells += [Cell(f"{size.ratio:.2f}×", value=size.ratio), Cell(f"{bits:.3f}", value=bits)]
    for metric in comparison.metrics:
        cells.append(_score(row.score(metric)))
        if comparison.has_changes(metric):
            change = comparison.change(row, metric)
            cells.append(Cell(percent(change), value=change))
    cache = row.measurement.cache
    paths = sorted({record.path for record in row.measurement.tasks.values() if record.path})
    cells += [" and ".join(paths) or DASH, cache.backend if cache else DASH]
    cells.append(Cell(row.run.result.run_id[:8], link=comparison.run_anchors[row.run.path]))
    return cells


def _score(score: Score) -> Cell:
    if score.value is None:
        return Cell(score.status, bad=score.status not in ("not run", "not reported"))
    return Cell(number(score.value), score.marks, value=score.value)


def filter_facts(comparison: Comparison, row: Row) -> dict[str, str]:
    """What a row can be filtered by."""
    cache = row.measurement.cache
    return {
        "label": row.label,
        "quantizer": row.name,
        "setting": comparison.setting_titles[row.setting],
        "backend": cache.backend if cache else "none",
        "device": row.run.result.environment.device,
        "status": row.measurement.status,
        "role": "baseline" if row.is_baseline else "run",
        "run": row.run.result.run_id,
    }


FILTERS: tuple[tuple[str, str], ...] = (
    ("quantizer", "Quantizer"),
    ("setting", "Model and texts"),
    ("backend", "Backend"),
    ("device", "Device"),
    ("status", "Status"),
)


def filter_choices(facts: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """For every filter that tells rows apart, its values."""
    choices = {name: sorted({fact[name] for fact in facts}) for name, _ in FILTERS}
    return {name: values for name, values in choices.items() if len(values) > 1}
