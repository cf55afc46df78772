"""Sections of a run's report about differences, fidelity, needles, latency and memory."""

import pytest

from kvbench.reports.html import render_html
from kvbench.reports.markdown import render_markdown
from kvbench.results import PairedDifference

from .example_runs import CONTEXTS, niah, run
from .parsed_page import ParsedPage


@pytest.fixture(scope="module")
def page() -> ParsedPage:
    made = run("blockgtq", 3)
    made.tasks["fidelity"].metrics["kl_interval"] = [0.055, 0.05, 0.06]
    made.tasks["fidelity"].paired = {
        "tqmse": {"top1_agreement": PairedDifference(mean=0.02, low=0.01, high=0.03, n=64)},
        "fp16": {"kl": PairedDifference(mean=0.05, low=0.04, high=0.06, n=1)},
    }
    return ParsedPage(render_html(made))


def differences(page: ParsedPage) -> dict[tuple[str, str], list[str]]:
    rows = next(rows for caption, rows in page.tables.items() if caption.startswith("Paired differences"))
    return {(row[1], row[2]): row[3:] for row in rows[1:]}


def test_a_difference_has_its_interval_and_a_verdict(page: ParsedPage) -> None:
    told = differences(page)
    assert told["perplexity nll", "fp16"] == ["+0.08000", "+0.05000 to +0.1100", "40", "worse"]
    assert told["perplexity nll", "tqmse"][-1] == "not significant"


def test_more_is_better_where_the_metric_is_an_agreement(page: ParsedPage) -> None:
    assert differences(page)["fidelity top1_agreement", "tqmse"][-1] == "better"


def test_a_single_pair_is_never_significant(page: ParsedPage) -> None:
    assert differences(page)["fidelity kl", "fp16"][-2:] == ["1", "not significant"]


def test_fidelity_has_its_interval_where_the_task_gave_one(page: ParsedPage) -> None:
    row = page.row("Against the same model", "blockgtq")
    assert row["kl"] == "0.05500"
    cells = next(rows for caption, rows in page.tables.items() if caption.startswith("Against the same model"))
    assert cells[1][2] == "0.05000 to 0.06000"


def test_every_quantizer_has_a_heat_map_of_every_cell(page: ParsedPage) -> None:
    for label in ("blockgtq", "fp16", "tqmse"):
        for metric in ("NIAH score", "NIAH answer NLL"):
            assert f"{metric}, {label}" in page.text
    assert page.text.count("blockgtq, 256 tokens, depth 10 %: ") == 2


@pytest.mark.parametrize("broken", [None, [], {"score": [[1.0]]}, {"lengths": [1], "depths": [], "score": []}, "map"])
def test_a_heat_map_that_is_none_is_left_out_and_the_table_stays(broken: object) -> None:
    made = run("blockgtq", 3)
    made.tasks["niah"].metrics["heat_map"] = broken
    for baseline in made.baselines.values():
        del baseline.tasks["niah"]
    page = ParsedPage(render_html(made))
    assert "NIAH score, blockgtq" not in page.text
    assert page.row("Needles found", "blockgtq")["score"] == "0.8812"
    assert "could not be rendered" not in page.text


def test_a_cell_without_a_value_says_so() -> None:
    made = run("blockgtq", 3)
    made.tasks["niah"] = niah(0.9)
    made.tasks["niah"].metrics["heat_map"]["score"][0][0] = None
    assert "blockgtq, 256 tokens, depth 10 %: not measured" in ParsedPage(render_html(made)).text


def test_latency_gives_the_speed_up_at_the_same_context(page: ParsedPage) -> None:
    rows = page.tables["Latency and memory at each context."]
    found = {(row[0], row[1]): row for row in rows[1:]}
    ours, theirs = found["blockgtq", "16,384"], found["fp16", "16,384"]
    assert float(ours[4].rstrip("×")) == pytest.approx(float(theirs[3]) / float(ours[3]), abs=0.01)
    assert theirs[4] == "–"


def test_a_point_out_of_memory_is_marked_in_picture_and_table(page: ParsedPage) -> None:
    assert f"fp16, {CONTEXTS[-1]:,} tokens: out of memory" in page.text
    row = next(row for row in page.tables["Latency and memory at each context."] if row[:2] == ["fp16", "65,536"])
    assert row[-1] == "oom"


def test_markdown_has_the_same_tables() -> None:
    text = render_markdown(run("blockgtq", 3))
    for title in ("Differences that count", "Fidelity", "Needle in a haystack", "Latency and memory"):
        assert f"## {title}" in text
