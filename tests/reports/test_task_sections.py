"""Sections of a run's report about differences, fidelity, needles, latency and memory."""

import pytest

from kvbench.reports.html import render_html
from kvbench.reports.markdown import render_markdown
from kvbench.results import PairedDifference

from .example_results import LAYERS
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
            rows = page.tables[f"{metric} at each length and depth."]
            assert [row[1:3] for row in rows if row[0] == label][:3] == [
                ["256", "10 %"],
                ["512", "10 %"],
                ["256", "50 %"],
            ]
        assert page.text.count(f"{label}, 256 tokens, depth 10 %: ") == 2


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


def latency_row(page: ParsedPage, label: str, context: int) -> dict[str, str]:
    titles, *rows = page.tables["Latency and memory at each context."]
    return next(dict(zip(titles, row, strict=True)) for row in rows if row[:2] == [label, f"{context:,}"])


def test_latency_gives_the_speed_up_at_the_same_context(page: ParsedPage) -> None:
    ours, theirs = latency_row(page, "blockgtq", 16384), latency_row(page, "fp16", 16384)
    ratio = float(theirs["decode, ms a step"]) / float(ours["decode, ms a step"])
    assert float(ours["speed-up vs fp16"].rstrip("×")) == pytest.approx(ratio, abs=0.01)
    assert theirs["speed-up vs fp16"] == "–"
    assert f"blockgtq, 16,384 tokens: {ratio:.2f}× as fast as fp16" in page.text


def test_latency_names_the_attention_that_fp16_is_and_the_floor(page: ParsedPage) -> None:
    row = latency_row(page, "fp16", 1024)
    assert (row["attention"], row["floor, ms"]) == ("torch-flash", f"{0.1 + 1024 * 16 * 3e-7:.4f}")
    assert "the bytes that a step must read, at the bandwidth of the memory" in page.text


def test_an_attention_that_was_slower_is_in_the_table_only(page: ParsedPage) -> None:
    rows = page.tables["Latency and memory at each context."]
    assert [row[-2] for row in rows if row[:2] == ["fp16", "1,024"]] == ["torch-flash", "torch-cudnn"]
    assert page.text.count("fp16, 1,024 tokens: ") == 3  # decode steps, cache, peak


def test_latency_on_a_cpu_has_no_floor_and_no_figure_of_one() -> None:
    made = run("blockgtq", 3, baselines={})
    for point in made.tasks["latency"].metrics["curve"]:
        point |= {"floor_ms": None, "decode_ms_p5": None, "decode_ms_p95": None}
    text = ParsedPage(render_html(made)).text
    assert "Time of a decode step. Both axes logarithmic.Numbers" in text.replace(
        "logarithmic.\n", "logarithmic.Numbers"
    )


def test_a_point_out_of_memory_is_marked_in_every_picture_and_in_the_table(page: ParsedPage) -> None:
    pictures = 3  # decode steps, cache, peak; a speed-up has no such point
    assert page.text.count(f"fp16, {CONTEXTS[-1]:,} tokens: out of memory") == pictures
    assert latency_row(page, "fp16", CONTEXTS[-1])["status"] == "out of memory"


def test_batches_have_figures_of_their_own() -> None:
    made = run("blockgtq", 3, baselines={})
    points = made.tasks["latency"].metrics["curve"]
    points += [{**point, "batch": 8} for point in points]
    text = ParsedPage(render_html(made)).text
    assert text.count("Time of a decode step. Both axes") == 2
    assert "blockgtq, batch 8, 1,024 tokens: " in text


@pytest.mark.parametrize(
    "broken", [None, [], "curve", [1], [{"context": "x"}], [{"context": 5, "decode_ms_median": "x"}]]
)
def test_points_that_are_none_leave_the_page_whole(broken: object) -> None:
    made = run("blockgtq", 3, baselines={})
    made.tasks["latency"].metrics["curve"] = broken
    assert "could not be rendered" not in ParsedPage(render_html(made)).text


def test_the_energy_of_every_block_is_in_the_picture_and_in_its_table(page: ParsedPage) -> None:
    rows = page.tables["Mean energy of every RoPE block, fast-turning first."]
    assert len(rows) == 1 + 2 * LAYERS
    assert rows[1][1].split()[:2] == ["1", "1.33"]
    assert "queries: strongest block 31 of layer 2" in render_markdown(run("blockgtq", 3))


def test_markdown_has_the_same_tables() -> None:
    text = render_markdown(run("blockgtq", 3))
    for title in ("Differences that count", "Fidelity", "Needle in a haystack", "Latency and memory"):
        assert f"## {title}" in text
