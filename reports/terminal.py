"""The table after a run: how small, how good, against what."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement as Measure
from rich.table import Table
from rich.text import Text

from kvbench.reports.comparison_cautions import run_cautions
from kvbench.reports.escaping import shorten
from kvbench.reports.scores import (
    REFERENCE,
    YARDSTICK,
    Contender,
    Score,
    contenders,
    error_change,
    number,
    percent,
    perplexity_change,
)

if TYPE_CHECKING:
    from kvbench.results import Result

NAME_LIMIT = 40
PIPE_WIDTH = 1000  # wide enough that nothing wraps; the table takes what it needs
SHORT_MARKS = {"simulated": "sim.", "partial": "part."}  # the table fits 80 columns


def print_summary(result: "Result", console: Console | None = None, directory: Path | None = None) -> None:
    """Prints one row a quantizer, what to be careful about, and where the report lies (in ``directory``, if given).

    On a terminal it fits the window and has colours; in a pipe it is plain text, one line a row, never wrapped.
    """
    console = console or Console()
    piped = not console.is_terminal
    table = _table(result, console)
    model, corpus = result.model.name, result.corpus.get("name", "unnamed")
    lines = [Text(f"model {shown(model, console)}, corpus {shown(corpus, console)}")]
    lines += [Text(shown(sentence, console, 400), style="yellow") for sentence in run_cautions(result)]
    if directory is not None:
        lines.append(Text(f"report {shown(str(directory / 'report.html'), console, 4096)}", style="bold"))
    if not piped:
        console.print(table)
        for line in lines:
            console.print(line, highlight=False)
        return
    plain = Console(file=console.file, width=PIPE_WIDTH, color_system=None, force_terminal=False, highlight=False)
    plain.print(table, width=Measure.get(plain, plain.options, table).maximum)
    for line in lines:
        plain.print(line, soft_wrap=True)


def _table(result: "Result", console: Console) -> Table:
    piped = not console.is_terminal
    rows = contenders(result)
    with_fidelity = any("fidelity" in row.measurement.tasks for row in rows)
    table = Table(box=None if piped else box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if piped else 1, 0, 0))
    table.add_column("quantizer", overflow="ellipsis", no_wrap=True, min_width=8)
    titles = ["ratio", "bits K/V", "logit error", f"vs {YARDSTICK}", "perplexity", f"vs {REFERENCE}"]
    for title in titles + (["KL", "top-1"] if with_fidelity else []):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = _cells(result, row, with_fidelity, short=not piped)
        table.add_row(Text(shown(row.label, console)), *cells, style="" if row.is_baseline else "bold")
    return table


def _cells(result: "Result", row: Contender, with_fidelity: bool, short: bool) -> list[Text]:
    size = row.measurement.compression
    cells = [Text("-", style="red"), Text("-", style="red")]
    if size is not None:
        cells = [Text(f"{size.ratio:.2f}x"), Text(f"{size.effective_bits_k:#.3g}/{size.effective_bits_v:#.3g}")]
    cells += [_score(row.score("logit_error", "mean"), short), _change(error_change(result, row))]
    cells += [_score(row.score("perplexity", "perplexity"), short), _change(perplexity_change(result, row))]
    if with_fidelity:
        cells += [_score(row.score("fidelity", metric), short) for metric in ("kl", "top1_agreement")]
    return cells


def _score(score: Score, short: bool) -> Text:
    if score.value is None:
        return Text(score.status, style="dim" if score.status == "not run" else "red")
    text = Text(number(score.value))
    for mark in score.marks:
        text.append(f" {SHORT_MARKS[mark] if short else mark}", style="not bold dim")
    return text


def _change(change: float | None) -> Text:
    return Text("-" if change is None else percent(change).replace(" ", ""))


def shown(text: str, console: Console, limit: int = NAME_LIMIT) -> str:
    """Text that neither drives the terminal nor fails to be encoded for it."""
    shown = shorten(text, limit)
    return shown.encode(console.encoding, "backslashreplace").decode(console.encoding)
