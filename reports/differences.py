"""Paired differences to the baselines with their intervals: which are real, and in whose favour."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from kvbench.reports.scores import Contender, contenders, number
from kvbench.reports.section import ReportSection
from kvbench.reports.table import Cell, Column, Table

if TYPE_CHECKING:
    from kvbench.results import PairedDifference, Result

LOWER_IS_BETTER = frozenset({"nll", "kl", "answer_nll", "perplexity", "logit_error", "mean"})
HIGHER_IS_BETTER = frozenset(
    {
        "score",
        "top1_agreement",
        "agreement",
        "agreed_prefix",
        "accuracy",
        "acc",
        "acc_norm",
        "exact_match",
        "f1",
        "average",
    }
)


def significant(difference: "PairedDifference") -> bool:
    """Whether the 95 percent interval leaves zero out; never with a single pair."""
    return difference.n > 1 and (difference.low > 0 or difference.high < 0)


def verdict(metric: str, difference: "PairedDifference") -> str:
    """``better`` or ``worse`` where the interval leaves zero out and the metric has a direction."""
    if not significant(difference):
        return "not significant"
    own = metric.rpartition(".")[2]  # lm-eval's are called ``task.metric``
    if own in LOWER_IS_BETTER:
        return "better" if difference.mean < 0 else "worse"
    if own in HIGHER_IS_BETTER:
        return "better" if difference.mean > 0 else "worse"
    return "lower" if difference.mean < 0 else "higher"


def differences_table(rows: Iterable[tuple[Contender, str]]) -> Table | None:
    """One line a quantizer, task, metric and baseline, from pairs of a contender and its row's key ("" for none).

    None where nothing is paired.
    """
    lines: list[list[Cell | str]] = []
    data = []
    for row, key in rows:
        for task, record in row.measurement.tasks.items():
            for baseline, differences in record.paired.items():
                for metric, difference in differences.items():
                    lines.append([row.label, f"{task} {metric}", baseline, *_cells(metric, difference)])
                    data.append({"row": key} if key else {})
    if not lines:
        return None
    titles = ("quantizer", "metric", "against")
    columns = (
        *(Column(title, numeric=False) for title in titles),
        Column("difference"),
        Column("95 % interval"),
        Column("pairs"),
        Column("verdict", numeric=False),
    )
    caption = (
        "Paired differences: the same samples under both, quantizer minus baseline, with 95 % bootstrap intervals. "
        "Significant where the interval leaves zero out."
    )
    return Table(caption, columns, lines, row_data=data)


def _cells(metric: str, difference: "PairedDifference") -> list[Cell | str]:
    told = verdict(metric, difference)
    return [
        Cell(_signed(difference.mean), strong=significant(difference)),
        f"{_signed(difference.low)} to {_signed(difference.high)}",
        f"{difference.n:,}",
        Cell(told, bad=told == "worse", strong=significant(difference)),
    ]


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + (number(value) if value else "0")


class DifferencesSection(ReportSection):
    """Paired differences between the quantizer and its baselines."""

    name: ClassVar[str] = "differences"
    title: ClassVar[str] = "Differences that count"

    def html(self, result: "Result") -> str:
        table = differences_table((row, "") for row in contenders(result))
        return table.html() if table else ""

    def markdown(self, result: "Result") -> str:
        table = differences_table((row, "") for row in contenders(result))
        return table.markdown() if table else ""
