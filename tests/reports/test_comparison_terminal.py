"""The comparison on a terminal and in a pipe."""

import io
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from kvbench.reports.collect import Collection, LeftOut, Run
from kvbench.reports.comparison import compare
from kvbench.reports.comparison_terminal import MOST_LEFT_OUT, print_comparison
from kvbench.results import Result

from .example_results import HOSTILE_NAMES, renamed
from .example_runs import run


def printed(console: Console, *results: Result, left_out: int = 0) -> str:
    absent = [LeftOut(Path(f"{i}/result.json"), "empty") for i in range(left_out)]
    runs = [Run(Path(f"{i}/result.json"), each) for i, each in enumerate(results)]
    print_comparison(compare(Collection(runs, absent)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, legacy_windows=False)


def test_in_a_pipe_a_row_is_a_line() -> None:
    lines = printed(pipe(), run("blockgtq", 3)).splitlines()
    row = next(line for line in lines if line.startswith("blockgtq"))
    assert " ".join(row.split()) == "blockgtq K3 V3 4.41x 3.62 0.5500 -45.0% 27.69 +11.0% 0.05500 0.9725 0.8812 1.119"


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_terminal_is_not_overrun(width: int) -> None:
    lines = printed(terminal(width), run("blockgtq", 3), run("cblockgtq", 2)).splitlines()
    assert max(map(cell_len, lines)) <= width


def test_what_was_left_out_is_listed_up_to_a_limit() -> None:
    text = printed(pipe(), run("blockgtq", 3), left_out=MOST_LEFT_OUT + 3)
    assert "left out: 0/result.json: empty" in text
    assert text.count("left out: ") == MOST_LEFT_OUT + 1
    assert "left out: 3 more" in text


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_does_not_drive_the_terminal(name: str) -> None:
    text = printed(pipe(), renamed(name))
    assert not any(character in text for character in "\x1b\x07\u202e\u202c")
