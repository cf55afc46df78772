"""What a comparison's page holds, and what a section that fails or comes from a plugin does to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from kvbench.reports.collect import Collection, LeftOut, Run
from kvbench.reports.comparison import Comparison, compare
from kvbench.reports.comparison_html import render_comparison_html
from kvbench.reports.comparison_markdown import render_comparison_markdown
from kvbench.reports.section import ReportSection
from kvbench.results import PairedDifference, Result, TaskRecord

from .example_results import allocation
from .example_runs import run
from .parsed_page import ParsedPage


def comparison(*results: Result, left_out: Sequence[LeftOut] = ()) -> Comparison:
    return compare(Collection([Run(Path(f"{i}/result.json"), each) for i, each in enumerate(results)], left_out))


def page(*results: Result, sections: Sequence[type[ReportSection]] = ()) -> ParsedPage:
    return ParsedPage(render_comparison_html(comparison(*results), sections))


class FromPlugin(ReportSection):
    name: ClassVar[str] = "from-plugin"
    title: ClassVar[str] = "From a plugin"

    def html(self, result: Result) -> str:
        return "<p>of one run</p>"

    def compare(self, results: Sequence[Result]) -> str:
        return f"<p>of {len(results)} runs</p>"


class OfOneRun(ReportSection):
    name: ClassVar[str] = "of-one-run"
    title: ClassVar[str] = "Only in a run's own report"

    def html(self, result: Result) -> str:
        return "<p>of one run</p>"


class Broken(FromPlugin):
    def compare(self, results: Sequence[Result]) -> str:
        raise RuntimeError("no <data> here")


def test_a_plugins_section_compares_all_runs() -> None:
    shown = page(run("tqmse", 3), run("blockgtq", 3), sections=[FromPlugin])
    assert "of 2 runs" in shown.text
    assert shown.unbalanced == []


def test_a_plugins_section_that_compares_nothing_has_no_heading() -> None:
    assert "Only in a run's own report" not in page(run("tqmse", 3), sections=[OfOneRun]).text


def test_a_plugins_section_that_raises_says_so_and_the_rest_is_there() -> None:
    shown = page(run("tqmse", 3), sections=[Broken])
    assert "This section could not be rendered: RuntimeError: no <data> here" in shown.text
    assert shown.row("Quantizers compared.", "tqmse K3 V3")["ratio"] == "4.41×"


def test_every_number_leads_to_its_run() -> None:
    shown = page(run("tqmse", 3), run("blockgtq", 3))
    ids = {attributes.get("id") for _, attributes in shown.elements}
    links = [link["href"] or "" for link in shown.attributes("a")]
    assert sum(link.startswith("#run-") for link in links) == 2 * 3  # in the first table and in that of sizes
    assert {link[1:] for link in links} <= ids


def test_every_run_has_its_command_and_configuration() -> None:
    text = page(run("tqmse", 3), run("blockgtq", 2)).text
    assert "kvbench quantizer=tqmse quantizer.k_bits=3 quantizer.v_bits=3" in text
    assert "kvbench quantizer=blockgtq quantizer.k_bits=2 quantizer.v_bits=2" in text
    assert text.count("Resolved configuration:") == 2


def test_all_runs_are_of_one_setting_or_figures_are_drawn_apart() -> None:
    other = run("blockgtq", 3)
    other = other.model_copy(update={"model": other.model.model_copy(update={"name": "other", "fingerprint": "e" * 8})})
    text = page(run("tqmse", 3), other).text
    for setting in ("smollm2-135m on pydoc", "other on pydoc"):
        assert f"{setting}: perplexity (lower is better) against bits per cached element" in text
        assert f"{setting}: mean energy of every RoPE block" in text


def test_the_fingerprint_gives_the_share_of_blocks_at_each_width() -> None:
    widths = [bits for layer in allocation() for head in layer for bits in head]
    share = 100 * widths.count(1) / len(widths)
    assert f"blockgtq K3 V3: {share:.1f} % of blocks at 1 bit" in page(run("blockgtq", 3)).text


def test_a_task_of_many_has_a_column_a_score_and_marks_what_is_significant() -> None:
    made = run("blockgtq", 3)
    made.tasks["longbench"] = TaskRecord(
        status="ok",
        path="packed",
        metrics={"qasper": 31.5, "qasper_stderr": 2.0, "average": 31.5, "truncated": 3},
        n=40,
        unit="samples",
        paired={"fp16": {"average": PairedDifference(mean=-2, low=-3, high=-1, n=40)}},
    )
    row = page(made).row("Task longbench.", "blockgtq K3 V3")
    assert row == {"quantizer": "blockgtq K3 V3", "qasper": "31.50", "average": "31.50 worse"}


def test_what_was_left_out_is_listed_in_both_formats() -> None:
    left_out = [LeftOut(Path("a/result.json"), "damaged <b>")]
    compared = comparison(run("tqmse", 3), left_out=left_out)
    assert ParsedPage(render_comparison_html(compared)).row("1 left out", "a/result.json")["reason"] == "damaged <b>"
    assert "damaged &lt;b&gt;" in render_comparison_markdown(compared)


@pytest.mark.parametrize("task", ["perplexity", "logit_error", "fidelity", "niah", "latency"])
def test_a_failed_task_leaves_the_page_whole(task: str) -> None:
    made = run("blockgtq", 3, baselines={})
    made.tasks[task] = TaskRecord(status="oom", error="out of memory")
    shown = page(made)
    assert "could not be rendered" not in shown.text
    assert "Out of memory" in shown.text


def test_a_run_without_any_measurement_is_a_row_all_the_same() -> None:
    shown = page(run("blockgtq", 3, tasks={}, compression=None, cache=None, baselines={}, status="failed"))
    assert shown.row("Quantizers compared.", "blockgtq K3 V3")["ratio"] == "not measured"
    assert "could not be rendered" not in shown.text


def test_fp16_is_a_line_where_it_has_a_level_and_is_left_out_where_it_is_zero() -> None:
    text = page(run("blockgtq", 3)).text
    assert "fp16: 24.94" in text
    assert "The fp16 cache, near zero, is not drawn." in text


def test_without_a_near_lossless_row_the_closest_one_is_named() -> None:
    text = page(run("blockgtq", 2), run("blockgtq", 3)).text
    assert "closest: blockgtq K3 V3, perplexity +11.0 %" in text


def test_the_smallest_near_lossless_row_is_named() -> None:
    near = run("blockgtq", 3)
    near.tasks["perplexity"].metrics["perplexity"] = 25.0
    assert "4.41× smaller blockgtq K3 V3, perplexity +0.2 %" in page(run("blockgtq", 2), near).text
