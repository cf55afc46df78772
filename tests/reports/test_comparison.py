"""Rows, references and cautions of a comparison."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbench.reports.collect import Collection, Run
from kvbench.reports.comparison import METRICS, Comparison, compare
from kvbench.reports.comparison_cautions import comparison_cautions, run_cautions
from kvbench.reports.pareto import pareto_front
from kvbench.reports.terminal import print_summary
from kvbench.results import PairedDifference, Result, TaskRecord

from .example_runs import BITS, QUANTIZERS, fidelity, niah, run

LOGIT_ERROR, PERPLEXITY = METRICS[:2]


def comparison(*results: Result) -> Comparison:
    return compare(Collection([Run(Path(f"{i}/result.json"), each) for i, each in enumerate(results)], []))


def labels(compared: Comparison) -> list[str]:
    return [row.label for row in compared.rows]


def change(compared: Comparison, label: str, metric: Any) -> float | None:
    return compared.change(next(row for row in compared.rows if row.label == label), metric)


@pytest.fixture(scope="module")
def sweep() -> Comparison:
    return comparison(*(run(name, bits) for name in QUANTIZERS for bits in BITS))


def test_a_baseline_that_many_runs_share_is_one_row(sweep: Comparison) -> None:
    assert labels(sweep).count("fp16") == 1
    assert labels(sweep).count("tqmse K3 V3") == 1
    assert len(sweep.rows) == 10


def test_a_quantizer_that_was_run_itself_is_not_a_baseline(sweep: Comparison) -> None:
    assert [row.label for row in sweep.rows if row.is_baseline] == ["fp16"]


def test_a_baseline_measured_anew_with_other_numbers_has_its_own_row() -> None:
    first, second = run("blockgtq", 3), run("blockgtq", 4)
    second.baselines["fp16"].tasks["perplexity"].metrics["perplexity"] = 25.1
    assert len([row for row in comparison(first, second).rows if row.name == "fp16"]) == 2


def test_rows_of_one_name_are_told_apart_by_what_differs() -> None:
    one, two = run("blockgtq", 3, run_id="1"), run("blockgtq", 3, run_id="2")
    two.quantizer.parameters["seed"] = 7
    one.quantizer.parameters["seed"] = 1
    assert {"blockgtq K3 V3, seed=1", "blockgtq K3 V3, seed=7"} <= set(labels(comparison(one, two)))


def test_options_written_as_floats_and_as_integers_are_the_same() -> None:
    one, two = run("blockgtq", 3), run("cblockgtq", 3)
    two.baselines["tqmse"].quantizer.parameters = {"k_bits": 3.0, "v_bits": 3.0}
    one.baselines["tqmse"].quantizer.parameters = {"k_bits": 3, "v_bits": 3}
    assert labels(comparison(one, two)).count("tqmse K3 V3") == 1


def test_changes_are_against_fp16_and_against_tqmse_of_equal_bits(sweep: Comparison) -> None:
    assert change(sweep, "blockgtq K2 V2", LOGIT_ERROR) == pytest.approx(0.55 - 1)
    assert change(sweep, "tqmse K3 V3", PERPLEXITY) == pytest.approx(29.94 / 24.94 - 1)
    assert change(sweep, "tqmse K3 V3", LOGIT_ERROR) is None
    assert change(sweep, "fp16", PERPLEXITY) is None


def test_a_reference_with_other_task_options_is_no_reference() -> None:
    short = run("blockgtq", 3, config={"task": {"perplexity": {"windows": 2}}}, baselines={})
    long = run("tqmse", 3, config={"task": {"perplexity": {"windows": 64}}})
    assert change(comparison(short, long), "blockgtq K3 V3", PERPLEXITY) is None


def test_a_reference_on_other_texts_is_no_reference() -> None:
    other = run("blockgtq", 3, corpus={"name": "novel", "evaluation": "aa"}, baselines={})
    assert change(comparison(other, run("tqmse", 3)), "blockgtq K3 V3", PERPLEXITY) is None


@pytest.mark.parametrize(
    ("lower_is_better", "front"), [(True, [1, 3]), (False, [0])], ids=["lower is better", "higher is better"]
)
def test_the_front_holds_what_nothing_beats(lower_is_better: bool, front: list[int]) -> None:
    points = [(2.0, 9.0), (2.0, 5.0), (3.0, 5.0), (4.0, 1.0), (5.0, 1.0)]
    assert pareto_front(points, lower_is_better) == front


def cautions(*results: Result) -> str:
    return "\n".join(comparison_cautions(comparison(*results)))


def without_latency(*names: str) -> Sequence[Result]:
    """Runs that nothing can be said against."""
    made = [run(name, 3, run_id=name) for name in names]
    for each in made:
        for measurement in each.measurements().values():
            del measurement.tasks["latency"]
            for record in measurement.tasks.values():
                record.paired = {}
    return made


def test_sound_runs_give_no_caution() -> None:
    assert cautions(*without_latency("blockgtq", "cblockgtq")) == ""


def test_simulated_beside_packed_is_called_out() -> None:
    runs = without_latency("blockgtq")
    runs[0].tasks["perplexity"].path = "simulated"
    assert "perplexity: simulated numbers" in cautions(*runs)


def test_a_peer_beside_packed_is_called_out_and_marked() -> None:
    runs = without_latency("blockgtq", "cblockgtq")
    runs[0].tasks["perplexity"].path = "peer"
    told = cautions(*runs)
    assert "perplexity: peer: keys and values went through another library's cache" in told
    assert "simulated" not in told


def test_different_models_are_called_out() -> None:
    one, two = without_latency("blockgtq", "cblockgtq")
    two = two.model_copy(update={"model": two.model.model_copy(update={"name": "other", "fingerprint": "ff" * 32})})
    assert "2 different models or weights" in cautions(one, two)


def test_different_texts_are_called_out() -> None:
    one, two = without_latency("blockgtq", "cblockgtq")
    two.corpus = {"name": "novel", "evaluation_sha256": "aa"}
    assert "Different calibration or evaluation texts: novel, pydoc" in cautions(one, two)


def test_different_prompts_are_called_out() -> None:
    one, two = without_latency("blockgtq", "cblockgtq")
    two.config = {"task": {"perplexity": {"windows": 99}}}
    assert "perplexity on smollm2-135m was measured on different prompts" in cautions(one, two)


def test_few_samples_are_called_out() -> None:
    runs = without_latency("blockgtq")
    runs[0].tasks["niah"] = niah(0.9, samples=4)
    assert "Few samples: task 'niah' has as few as 4" in cautions(*runs)


@pytest.mark.parametrize(("low", "called_out"), [(-0.01, True), (0.01, False)])
def test_an_interval_that_holds_zero_is_called_out(low: float, called_out: bool) -> None:
    runs = without_latency("blockgtq")
    paired = {"tqmse": {"nll": PairedDifference(mean=0.02, low=low, high=0.05, n=40)}}
    runs[0].tasks["perplexity"].paired = paired
    assert ("Overlapping intervals: perplexity nll of blockgtq K3 V3" in cautions(*runs)) == called_out


def test_timings_on_a_cpu_are_called_out() -> None:
    assert "Timed on a CPU" in cautions(run("blockgtq", 3))


def test_random_weights_are_called_out() -> None:
    runs = without_latency("blockgtq")
    runs[0].model.source = "random"
    assert "Random weights: smollm2-135m." in cautions(*runs)


def test_a_single_runs_report_has_the_same_cautions() -> None:
    made = run("blockgtq", 3)
    made.tasks["niah"] = niah(0.9, samples=4)
    made.environment.device = "NVIDIA H200"
    told = "\n".join(run_cautions(made))
    for words in ("Fallback: the torch reference", "Few samples: task 'niah'", "Overlapping intervals: perplexity nll"):
        assert words in told
        assert words in print_to_text(made)


def print_to_text(result: Result) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_fallback_backend_on_a_gpu_is_called_out() -> None:
    runs = without_latency("blockgtq")
    runs[0].environment.device = "NVIDIA H200"
    assert "Fallback: the torch reference ran on a GPU" in cautions(*runs)


@pytest.mark.parametrize(("status", "words"), [("oom", "Out of memory"), ("failed", "Failed"), ("partial", "Not fin")])
def test_what_did_not_finish_is_called_out(status: Any, words: str) -> None:
    runs = without_latency("blockgtq")
    runs[0].tasks["fidelity"] = TaskRecord(status=status)
    assert f"{words}" in cautions(*runs)


def test_what_the_harness_found_suspicious_is_repeated() -> None:
    runs = without_latency("blockgtq")
    runs[0].tasks["fidelity"] = fidelity(0.1)
    runs[0].tasks["fidelity"].notes = ["identical to tqmse: two formats gave the same numbers"]
    assert "blockgtq K3 V3, fidelity: identical to tqmse" in cautions(*runs)


def test_prompts_that_were_cut_are_called_out() -> None:
    runs = without_latency("blockgtq")
    runs[0].tasks["longbench"] = TaskRecord(status="ok", path="packed", metrics={"average": 30.0, "truncated": 12})
    assert "Task 'longbench': 12 prompts were too long" in cautions(*runs)
