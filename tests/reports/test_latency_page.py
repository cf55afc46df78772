"""The tables in docs/latency.md are those of the committed runs, and compare what may be compared."""

import json
from pathlib import Path

import pytest

from kvbench.errors import ResultError
from kvbench.reports.collect import Run, collect
from kvbench.reports.latency_steps import AIMS, PAGE, Setting, aims_table, filled, main, steps_of, steps_table
from kvbench.reports.table import Cell

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "benchmarks/results/latency-h200-2026-12-01"
LONG = Setting("qwen2.5-3b", "float16", "default", 1, 131072)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return list(collect([RUNS]).runs)


def test_the_page_is_made_of_the_committed_runs(runs: list[Run]) -> None:
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    assert filled(text, runs) == text


def test_a_step_is_compared_with_fp16s_fastest_and_with_flash_attention(runs: list[Run]) -> None:
    result = json.loads((RUNS / "qwen2.5-3b/result.json").read_text(encoding="utf-8"))
    fp16 = result["baselines"]["fp16"]["tasks"]["latency"]["metrics"]
    [own, best, flash] = (
        next(row["decode_ms_median"] for row in rows if row["context"] == LONG.context)
        for rows in (result["tasks"]["latency"]["metrics"]["curve"], fp16["curve"], fp16["other_attention"])
    )
    step = steps_of(runs)[LONG]
    assert (step.best, step.over_flash) == (best / own, flash / own)
    assert best < flash


def test_the_readme_quotes_the_runs(runs: list[Run]) -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    long, middle, short = (steps_of(runs)[LONG._replace(context=count << 10)].best for count in (512, 128, 4))
    assert f"{long:.2f} times as fast as fp16 with its fastest attention at 512K tokens" in text
    assert f"{middle:.2f} at 128K, {short:.2f} at 4K" in text


def test_of_one_setting_the_last_run_counts(runs: list[Run]) -> None:
    run = next(run for run in runs if run.path.parent.name == "qwen2.5-3b")
    later = run.result.model_copy(deep=True)
    later.created = later.created.replace(year=2100)
    for row in later.tasks["latency"].metrics["curve"]:
        row["decode_ms_median"] *= 2
    steps = steps_of([Run(run.path, later), run])
    assert steps[LONG].packed["decode_ms_median"] == 2 * steps_of([run])[LONG].packed["decode_ms_median"]


def test_what_was_missed_and_what_was_not_measured_is_said(runs: list[Run]) -> None:
    steps = steps_of(runs)
    lines = aims_table(steps).rows
    assert [line for line in lines if line[1] == "not measured"]
    for line in lines:
        cell = line[3]
        if isinstance(cell, Cell):
            aim = next(aim for aim in AIMS if aim.text == line[0])
            met = float(cell.text) <= aim.bound if aim.at_most else float(cell.text) >= aim.bound
            assert met == (not cell.marks)


def test_running_out_of_memory_is_a_line(runs: list[Run]) -> None:
    run = next(run for run in runs if run.path.parent.name == "llama3.1-8b")
    result = run.result.model_copy(deep=True)
    for row in result.baselines["fp16"].tasks["latency"].metrics["curve"]:
        row |= {"out_of_memory": True, "decode_ms_median": None, "attention": None}
    steps = steps_of([Run(run.path, result)])
    assert all(step.best is None for step in steps.values())
    assert all(line[3] == "out of memory" for line in steps_table(steps).rows)


def test_runs_without_a_step_to_compare_with_are_refused(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    alone = [Run(run.path, run.result.model_copy(update={"baselines": {}})) for run in runs]
    with pytest.raises(ResultError, match="no run of task=latency on a GPU with the baseline fp16"):
        steps_of(alone)
    assert main([str(RUNS), "--docs", str(ROOT / "tests")]) == 2
    assert "latency.md" in capsys.readouterr().err
