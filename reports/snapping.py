"""What it costs that RoPE blocks share a width, as kernels want it: the table in ``docs/kernels.md``, from runs.

    python -m kvbench.reports.snapping RUNS... --docs docs --data benchmarks/results/snapping.json

Writes the data file, and the table between the page's markers. Without runs the table is made anew from the data file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import KvbenchError
from kvbench.reports.centered_page import ERROR, WIKITEXT, columns, of_texts, provenance, with_bits
from kvbench.reports.collect import collect
from kvbench.reports.evidence import Evidence, between, evidence, find, read_evidence, write_evidence
from kvbench.reports.scores import percent
from kvbench.reports.table import Cell, Table
from kvbench.results import write_text_atomically

PAGE, MARKER = "kernels.md", "snapping"
DATA = Path("benchmarks/results/snapping.json")
BITS = 3
ALIGNMENTS = (1, 4, 8, 16)
METHODS = ("blockgtq", "cblockgtq")


def snapping_table(data: Evidence) -> Table:
    """Logit error by the number of blocks that share a width, and its increase over blocks with widths of their own."""
    rows = of_texts(data, WIKITEXT)
    exact = {name: find(rows, name, needs=ERROR, k_bits=BITS, align=1).metrics[ERROR] for name in METHODS}
    lines: list[list[Cell | str]] = []
    for align in ALIGNMENTS:
        line: list[Cell | str] = [str(align)]
        for name in METHODS:
            row = find(rows, name, needs=ERROR, k_bits=BITS, align=align)
            line += [with_bits(row), "–" if align == 1 else percent(row.metrics[ERROR] / exact[name] - 1)]
        lines.append(line)
    titles = [title for name in METHODS for title in (name, "over align=1")]
    return Table(
        f"Mean logit error with k_bits={BITS}; in brackets the bits a key element, all allocated bytes counted.",
        columns("align", *titles, words=0),
        lines,
    )


def filled(text: str, data: Evidence) -> str:
    """The page ``text`` with its table made of the data."""
    return between(text, MARKER, f"{snapping_table(data).markdown()}\n\n{provenance(data)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write data and table; the exit code is 2 where a run is missing."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.reports.snapping", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs; none: the data file as it is")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where the page is")
    parser.add_argument("--data", type=Path, default=DATA, help="the data file")
    given = parser.parse_args(arguments)
    page = given.docs / PAGE
    try:
        data = evidence(collect(given.runs).runs) if given.runs else read_evidence(given.data)
        text = filled(page.read_text(encoding="utf-8"), data)
        write_evidence(data, given.data)
        write_text_atomically(page, text)
    except (KvbenchError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
