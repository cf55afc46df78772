"""The Markdown report: well-formed tables with the right numbers, and names that stay text."""

from typing import ClassVar

import pytest
from markdown_it import MarkdownIt

from kvbench.reports.markdown import render_markdown
from kvbench.reports.section import ReportSection
from kvbench.reports.sections import SECTIONS
from kvbench.results import Result, TaskRecord

from .example_results import HOSTILE_NAMES, renamed, result
from .example_runs import run
from .parsed_page import ParsedPage

RENDERER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def rows_of(markdown: str, first_column: str) -> list[list[str]]:
    """The rows of the first table whose first column has this title."""
    lines = markdown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return [table[0], *table[2:]]


def test_summary_numbers() -> None:
    header, asked, *_ = rows_of(render_markdown(result()), "quantizer")
    row = dict(zip(header, asked, strict=True))
    assert row["quantizer"] == "blockgtq"
    assert row["ratio"] == "4.41×"
    assert row["logit error"] == "2.406 (simulated)"
    assert row["vs tqmse"] == "-43.6 %"
    assert row["perplexity"] == "27.43 (simulated)"
    assert row["vs fp16"] == "+10.0 %"


def test_failure_is_shown() -> None:
    text = render_markdown(result(tasks={"perplexity": TaskRecord(status="oom", error="3 GiB asked")}))
    header, asked, *_ = rows_of(text, "quantizer")
    assert dict(zip(header, asked, strict=True))["perplexity"] == "oom"
    assert "3 GiB asked" in text


def test_every_section_has_its_heading() -> None:
    text = render_markdown(run("blockgtq", 3))
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [section.title for section in SECTIONS]


def test_the_command_and_the_configuration_are_code_blocks() -> None:
    blocks = [token.content for token in RENDERER.parse(render_markdown(result())) if token.type == "fence"]
    assert blocks[0].strip() == result().command
    assert '"stride": 512' in blocks[1]


@pytest.mark.parametrize("name", ["plain", *HOSTILE_NAMES.values()], ids=["plain", *HOSTILE_NAMES])
def test_every_table_is_recognized_whatever_the_names(name: str) -> None:
    text = render_markdown(renamed(name))
    written = sum(line.startswith(("| :---", "| ---:")) for line in text.splitlines())
    assert ParsedPage(RENDERER.render(text)).count("table") == written > 5


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_adds_no_markup(name: str) -> None:
    hostile = ParsedPage(RENDERER.render(render_markdown(renamed(name))))
    harmless = ParsedPage(RENDERER.render(render_markdown(renamed("plain"))))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert hostile.unbalanced == []


def test_backticks_do_not_close_the_command_block() -> None:
    command = "kvbench quantizer=x\n```\n# not a heading"
    blocks = [
        token.content for token in RENDERER.parse(render_markdown(result(command=command))) if token.type == "fence"
    ]
    assert blocks[0].strip() == command


class Broken(ReportSection):
    name: ClassVar[str] = "broken"
    title: ClassVar[str] = "Broken"

    def html(self, result: "Result") -> str:
        return "<p>fine</p>"

    def markdown(self, result: "Result") -> str:
        raise ValueError("no *data*")


def test_a_section_that_raises_says_so_and_the_rest_is_there() -> None:
    text = render_markdown(result(), [Broken, *SECTIONS])
    assert "could not be rendered" in text
    assert r"ValueError: no \*data\*" in text
    assert "## Summary" in text
