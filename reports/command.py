"""``kvbench report DIR...``: compare everything that was run, on the terminal or in files."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvbench.errors import ConfigurationError, unknown_name
from kvbench.progress import track
from kvbench.reports.collect import collect
from kvbench.reports.comparison import Comparison, compare
from kvbench.reports.comparison_markdown import render_comparison_markdown
from kvbench.reports.comparison_terminal import print_comparison
from kvbench.reports.tabular import render_csv, write_parquet
from kvbench.results import write_atomically, write_text_atomically

FIGURE_FORMATS = ("svg", "png", "pdf")  # a file a figure
FORMATS = ("html", "md", "csv", "parquet", *FIGURE_FORMATS)
PRINTABLE = ("md", "csv")  # those that may go to standard output

EXAMPLES = """\
examples:
  kvbench report outputs multirun                  a table on the terminal
  kvbench report multirun --out comparison.html    one page, works offline
  kvbench report . --out all --format html,csv     all.html and all.csv
  kvbench report . --format md                     Markdown on standard output
  kvbench report . --out figures --format svg,pdf  figures-pareto-1.svg, .pdf and so on, for papers
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"kvbench report: {message}.\n'kvbench report --help' explains.")


def main(arguments: Sequence[str]) -> int:
    """Compare the runs under some folders. Returns 0 if there was something to compare, whatever was left out.

    Raises KvbenchError for what the user can mend.
    """
    given = _parser().parse_args(list(arguments))
    out = Path(given.out) if given.out is not None else None
    formats = _formats(given.format, out)
    comparison = compare(collect(Path(place) for place in given.places))
    if not formats:
        print_comparison(comparison)
        return 0
    if out is None:
        write = render_csv if formats == ["csv"] else render_comparison_markdown
        sys.stdout.write(write(comparison))
    else:
        for form in formats:
            path = _path(out, form, formats)
            WRITERS[form](comparison, path)
            wrote = path.with_name(f"{path.stem}-*.{form}") if form in FIGURE_FORMATS else path
            print(f"wrote {wrote}", file=sys.stderr)
    for each in comparison.left_out:
        print(f"kvbench: left out {each.path}: {each.reason}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvbench report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("places", nargs="+", metavar="DIR", help="folders with results, at any depth, or result.json")
    parser.add_argument("--out", metavar="FILE", help="where to write; its ending tells the format")
    parser.add_argument("--format", metavar="FORMAT,...", help=f"of {', '.join(FORMATS)}; several make several files")
    return parser


def _formats(given: str | None, out: Path | None) -> list[str]:
    """The formats asked for; none means the terminal."""
    if given is None:
        if out is None:
            return []
        ending = out.suffix.lstrip(".").lower()
        if ending not in FORMATS:
            raise ConfigurationError(
                f"--out {out} does not tell the format. Let it end in .{', .'.join(FORMATS)}, or add --format."
            )
        return [ending]
    formats = list(dict.fromkeys(name.strip().lower() for name in given.split(",") if name.strip()))
    for name in formats:
        if name not in FORMATS:
            raise ConfigurationError(unknown_name("format", name, FORMATS))
    if out is None and (len(formats) != 1 or formats[0] not in PRINTABLE):
        raise ConfigurationError(f"--format {given} needs --out FILE; only {' or '.join(PRINTABLE)} can be printed.")
    return formats


def _path(out: Path, form: str, formats: Sequence[str]) -> Path:
    """``out`` itself for one format; with the format's ending for several."""
    if len(formats) == 1:
        return out
    known = out.suffix.lstrip(".").lower() in FORMATS
    return out.with_suffix(f".{form}") if known else out.with_name(f"{out.name}.{form}")


def _write_html(comparison: Comparison, path: Path) -> None:
    from kvbench.registry import load_registry
    from kvbench.reports.comparison_html import render_comparison_html

    sections = [entry.value for entry in load_registry().report_sections.values() if entry.distribution != "kvbench"]
    write_text_atomically(path, render_comparison_html(comparison, sections))


def _write_figures(form: str, comparison: Comparison, path: Path) -> None:
    """One file a figure, beside ``path`` and named after it."""
    from kvbench.reports.comparison_figures import FIGURES
    from kvbench.reports.drawing import file_of

    figures = {name: figures_of(comparison) for name, figures_of in FIGURES.items()}
    named = [(f"{name}-{i}", figure) for name, found in figures.items() for i, figure in enumerate(found, start=1)]
    for name, figure in track(named, f"drawing {form}"):
        write_atomically(path.with_name(f"{path.stem}-{name}.{form}"), file_of(figure.spec, figure.title, form))


def _write_markdown(comparison: Comparison, path: Path) -> None:
    write_text_atomically(path, render_comparison_markdown(comparison))


def _write_csv(comparison: Comparison, path: Path) -> None:
    write_text_atomically(path, render_csv(comparison))


WRITERS: dict[str, Callable[[Comparison, Path], None]] = {
    "html": _write_html,
    "md": _write_markdown,
    "csv": _write_csv,
    "parquet": write_parquet,
    **{form: partial(_write_figures, form) for form in FIGURE_FORMATS},
}
