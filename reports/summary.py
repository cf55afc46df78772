"""The section that answers in ten seconds: how small, how good, against what, and what to be careful about."""

from typing import TYPE_CHECKING, ClassVar

from kvbench.reports.comparison_cautions import run_cautions
from kvbench.reports.escaping import html_name, html_text, markdown_text
from kvbench.reports.scores import (
    REFERENCE,
    YARDSTICK,
    Contender,
    Score,
    bits_by_use,
    comparison,
    contenders,
    error_change,
    number,
    percent,
    perplexity_change,
)
from kvbench.reports.section import ReportSection
from kvbench.reports.table import Cell, Column, Table

if TYPE_CHECKING:
    from kvbench.results import Result


def score_cell(score: Score) -> Cell:
    """The number and its marks, or the reason there is none."""
    if score.value is None:
        return Cell(score.status, bad=score.status != "not run")
    return Cell(number(score.value), score.marks)


class SummarySection(ReportSection):
    """How small, how good, against what."""

    name: ClassVar[str] = "summary"
    title: ClassVar[str] = "Summary"

    def html(self, result: "Result") -> str:
        tiles = "".join(_tile(*tile) for tile in _tiles(result))
        warnings = "".join(f"<li>{html_text(sentence)}</li>" for sentence in run_cautions(result))
        notice = (
            f'<div class="cautions" role="note" aria-label="Cautions"><ul>{warnings}</ul></div>' if warnings else ""
        )
        return f'<dl class="tiles">{tiles}</dl>{summary_table(result).html()}{notice}'

    def markdown(self, result: "Result") -> str:
        warnings = [f"- {markdown_text(sentence)}" for sentence in run_cautions(result)]
        return "\n".join([summary_table(result).markdown(), *([""] if warnings else []), *warnings])


def summary_table(result: "Result") -> Table:
    """One row a quantizer: the one asked for first, then its baselines."""
    rows = contenders(result)
    with_fidelity = any("fidelity" in row.measurement.tasks for row in rows)
    titles = ["ratio", "effective bits K", "effective bits V", "logit error", f"vs {YARDSTICK}", "perplexity"]
    titles += [f"vs {REFERENCE}"] + (["KL divergence", "top-1 agreement"] if with_fidelity else [])
    columns = (Column("quantizer", numeric=False), *map(Column, titles))
    return Table(
        "Ratio: fp16 bytes over allocated bytes.", columns, [_summary_row(result, row, with_fidelity) for row in rows]
    )


def _summary_row(result: "Result", row: Contender, with_fidelity: bool) -> list[Cell | str]:
    size = row.measurement.compression
    cells: list[Cell | str] = [row.label]
    if size is None:
        cells += [Cell("not measured", bad=True), "–", "–"]
    else:
        cells += [f"{size.ratio:.2f}×", number(size.effective_bits_k), number(size.effective_bits_v)]
    cells += [score_cell(row.score("logit_error", "mean")), percent(error_change(result, row))]
    cells += [score_cell(row.score("perplexity", "perplexity")), percent(perplexity_change(result, row))]
    if with_fidelity:
        cells += [score_cell(row.score("fidelity", metric)) for metric in ("kl", "top1_agreement")]
    return cells


def _tiles(result: "Result") -> list[tuple[str, Cell, str]]:
    """The three headline numbers: label, value, and a line of HTML under it."""
    mine = contenders(result)[0]
    size = result.compression
    tiles = [("Smaller than fp16", Cell("not measured", bad=True), "")]
    if size is not None:
        tiles = [
            (
                "Smaller than fp16",
                Cell(f"{size.ratio:.2f}×"),
                f"{bits_by_use(size).total:.2f} bits per element, all bytes counted",
            )
        ]
    for label, task, metric, change, against in (
        ("Mean logit error", "logit_error", "mean", error_change(result, mine), YARDSTICK),
        ("Perplexity", "perplexity", "perplexity", perplexity_change(result, mine), REFERENCE),
    ):
        score = mine.score(task, metric)
        marks = "".join(f' <span class="mark">{html_text(mark)}</span>' for mark in score.marks)
        reference = comparison(result, against)
        base = reference.score(task, metric).value if reference is not None else None
        detail = (
            f"{html_text(percent(change))} against {html_name(against)} ({number(base or 0)})"
            if change is not None
            else ""
        )
        tiles.append((label, score_cell(score), detail + marks))
    return tiles


def _tile(label: str, value: Cell, detail: str) -> str:
    style = "value bad" if value.bad else "value"
    figure = f'<span class="{style}">{html_text(value.text)}</span>'
    return f'<div><dt>{html_text(label)}</dt><dd>{figure} <span class="detail">{detail}</span></dd></div>'
