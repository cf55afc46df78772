"""The comparison as a table on a terminal, or as plain lines in a pipe."""

from rich import box
from rich.console import Console
from rich.measure import Measurement as Measure
from rich.table import Table
from rich.text import Text

from kvbench.reports.comparison import Comparison, Row
from kvbench.reports.comparison_cautions import comparison_cautions
from kvbench.reports.scores import Score, number, percent
from kvbench.reports.terminal import PIPE_WIDTH, SHORT_MARKS, shown

MOST_LEFT_OUT = 10


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints one row a quantizer, what to be careful about, and what was left out.

    On a terminal it fits the window and has colours; in a pipe it is plain text, one line a row, never wrapped.
    """
    console = console or Console()
    table = _table(comparison, console)
    lines = [Text(shown(sentence, console, 400), style="yellow") for sentence in comparison_cautions(comparison)]
    lines += [
        Text(shown(f"left out: {each.path}: {each.reason}", console, 4096), style="red")
        for each in comparison.left_out[:MOST_LEFT_OUT]
    ]
    if len(comparison.left_out) > MOST_LEFT_OUT:
        lines.append(Text(f"left out: {len(comparison.left_out) - MOST_LEFT_OUT} more", style="red"))
    if console.is_terminal:
        console.print(table)
        for line in lines:
            console.print(line, highlight=False)
        return
    plain = Console(file=console.file, width=PIPE_WIDTH, color_system=None, force_terminal=False, highlight=False)
    plain.print(table, width=Measure.get(plain, plain.options, table).maximum)
    for line in lines:
        plain.print(line, soft_wrap=True)


def _table(comparison: Comparison, console: Console) -> Table:
    piped = not console.is_terminal
    several = len(comparison.settings) > 1
    table = Table(box=None if piped else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if piped else 1, 0, 0))
    table.add_column("quantizer", overflow="ellipsis", no_wrap=True, min_width=12)
    if several:
        table.add_column("model", overflow="ellipsis", no_wrap=True, min_width=8)
    titles = ["ratio", "bits"]
    for metric in comparison.metrics:
        titles += [metric.title] + ([f"vs {metric.reference}"] if comparison.has_changes(metric) else [])
    for title in titles:
        table.add_column(title, justify="right", no_wrap=piped)
    for row in comparison.rows:
        where = [Text(shown(comparison.setting_titles[row.setting], console))] if several else []
        label = Text(shown(row.label, console))
        table.add_row(label, *where, *_cells(comparison, row, not piped), style="" if row.is_baseline else "bold")
    return table


def _cells(comparison: Comparison, row: Row, short: bool) -> list[Text]:
    size = row.measurement.compression
    cells = [Text("-", style="red"), Text("-", style="red")]
    if size is not None:
        cells = [Text(f"{size.ratio:.2f}x"), Text(f"{row.effective_bits or 0:.2f}")]
    for metric in comparison.metrics:
        cells.append(_score(row.score(metric), short))
        if comparison.has_changes(metric):
            change = comparison.change(row, metric)
            cells.append(Text("-" if change is None else percent(change).replace(" ", "")))
    return cells


def _score(score: Score, short: bool) -> Text:
    if score.value is None:
        quiet = score.status in ("not run", "not reported")
        return Text("-" if quiet else score.status, style="dim" if quiet else "red")
    text = Text(number(score.value))
    for mark in score.marks:
        text.append(f" {SHORT_MARKS[mark] if short else mark}", style="not bold dim")
    return text
