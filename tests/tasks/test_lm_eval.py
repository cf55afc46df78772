"""lm-eval through the packed cache: its own scores where nothing is lost, other ones where something is."""

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvbench.errors import ConfigurationError
from kvbench.identity import implementation
from kvbench.lm_eval_model import KvbenchLM, find_model
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.sample_store import SampleStore
from kvbench.task import TaskResult
from kvbench.tasks.lm_eval import LmEval, paired_samples, scalars

from .lm_eval_tasks import write_tasks
from .sessions import Identity, model, session

COARSE = TQMSE(k_bits=2, v_bits=2)
BOTH = ["local_choice", "local_generate"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tasks(tmp_path)


def task(folder: Path, **options: Any) -> LmEval:
    return LmEval(**{"tasks": BOTH, "include_path": str(folder), **options})


def answers(found: dict[str, Any]) -> tuple[list[float], list[str]]:
    """Every choice's log-likelihood, and every generated text."""
    choices = [float(reply[0]) for document in found["local_choice"] for reply in document["filtered_resps"]]
    return choices, [document["filtered_resps"][0] for document in found["local_generate"]]


def evaluate(lm: Any, folder: Path) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model=lm, tasks=BOTH, task_manager=TaskManager(include_path=str(folder), include_defaults=False)
    )
    assert found is not None
    return found


@pytest.fixture
def whole(folder: Path) -> TaskResult:
    return task(folder).run(session(COARSE))


def test_without_quantization_the_answers_are_lm_evals_own(folder: Path) -> None:
    loaded = model()
    expected = evaluate(HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer), folder)
    found = evaluate(KvbenchLM(session=session(Identity(), prefill_chunk=16)), folder)
    choices, texts = answers(expected["samples"])
    assert answers(found["samples"])[0] == pytest.approx(choices, abs=1e-3)
    assert answers(found["samples"])[1] == texts
    assert found["results"] == expected["results"]


def test_the_fp16_cache_scores_as_lm_eval_does(folder: Path) -> None:
    loaded = model()
    expected = evaluate(HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer), folder)
    assert evaluate(KvbenchLM(session=session(Fp16())), folder)["results"] == expected["results"]


def test_two_bits_change_both_kinds_of_answers(folder: Path) -> None:
    sharp = "llama, sharp attention"
    exact, coarse = (
        answers(evaluate(KvbenchLM(session=session(q, sharp)), folder)["samples"]) for q in (Fp16(), COARSE)
    )
    changes = [abs(one - other) for one, other in zip(exact[0], coarse[0], strict=True)]
    assert min(changes) > 1e-4
    assert sum(changes) / len(changes) > 0.1
    assert all(one != other for one, other in zip(exact[1], coarse[1], strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_both_kinds_of_requests_are_proven_to_read_the_packed_cache(folder: Path, name: str) -> None:
    opened = session(COARSE)
    task(folder, tasks=[name]).run(opened)
    assert [layer.key_format for layer in opened.engagement] == ["rotated_codebook"] * 2
    assert all(layer.packed_tokens_read > 5 * 30 for layer in opened.engagement)


@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("cache", [{}, {"recent_window": 8}], ids=str)
def test_answers_do_not_depend_on_how_many_requests_are_read_together(
    folder: Path, size: int, cache: dict[str, int]
) -> None:
    alone = evaluate(KvbenchLM(session=session(COARSE, **cache)), folder)
    together = evaluate(KvbenchLM(session=session(COARSE, **cache), batch_size=size), folder)
    assert answers(together["samples"])[0] == pytest.approx(answers(alone["samples"])[0], abs=1e-3)
    assert answers(together["samples"])[1] == answers(alone["samples"])[1]
    assert together["results"] == alone["results"]


def test_metrics_hold_lm_evals_scores_and_its_own_results(whole: TaskResult) -> None:
    assert whole.metrics["local_choice.acc"] == whole.metrics["lm_eval"]["results"]["local_choice"]["acc,none"]
    assert "local_generate.exact_match" in whole.metrics
    assert json.loads(json.dumps(whole.metrics, allow_nan=False)) == whole.metrics
    assert whole.n == 10
    assert len(whole.samples["local_choice.acc"]) == 5


def test_an_interrupted_task_ends_with_the_same_numbers_and_proof(folder: Path) -> None:
    kept = folder / "kept.jsonl"
    first = session(COARSE, prefill_chunk=16)
    first.samples = SampleStore(kept)
    expected = task(folder).run(first)
    lines = kept.read_text().splitlines(keepends=True)
    for finished in (2, 7):
        kept.write_text("".join(lines[:finished]) + lines[finished][:50])
        resumed = session(COARSE, prefill_chunk=16)
        resumed.samples = SampleStore(kept)
        assert task(folder).run(resumed) == expected
        assert resumed.engagement == first.engagement
        assert len(kept.read_text().splitlines()) == len(lines) + 1  # the torn line stays


def test_documents_are_limited_and_examples_given(folder: Path) -> None:
    result = task(folder, tasks=["local_choice"], limit=2, num_fewshot=1).run(session(Fp16()))
    assert result.n == 2
    assert result.metrics["lm_eval"]["n-shot"] == {"local_choice": 1}


def test_a_task_whose_files_changed_is_another_measurement(folder: Path) -> None:
    before = implementation(task(folder))
    assert implementation(task(folder)) == before
    with (folder / "documents.jsonl").open("a") as file:
        file.write("\n")
    assert implementation(task(folder)) != before


@pytest.mark.slow  # lm-eval reads all its task files first
def test_an_unknown_task_is_refused_with_the_nearest_name(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'local_choice'"):
        task(folder, tasks=["local_choise"]).run(session(Fp16()))


@pytest.mark.parametrize("options", [{"tasks": []}, {"limit": 0}, {"include_path": "/nowhere"}], ids=str)
def test_options_that_make_no_sense_are_refused(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        task(folder, **options)


def test_lm_eval_finds_the_model_by_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "kvbench"))
    found = lm_eval.simple_evaluate(
        model="kvbench",
        model_args="pretrained=random,quantizer=tqmse,k_bits=2,v_bits=2,prefill_chunk=16,max_length=256",
        tasks=["local_choice"],
        limit=1,
        device="cpu",
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    assert found is not None
    assert found["config"]["quantizer"]["name"] == "tqmse"
    assert found["config"]["quantizer"]["k_bits"] == 2
    assert found["config"]["cache"]["prefill_chunk"] == 16


def test_arguments_that_nobody_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown argument 'bits'"):
        KvbenchLM(pretrained="random", quantizer="tqmse", bits=3)
    with pytest.raises(ConfigurationError, match="batch_size=auto"):
        KvbenchLM(pretrained="random", batch_size="auto")


def test_lm_evals_cache_of_answers_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="use_cache"):
        lm_eval.simple_evaluate(
            model=KvbenchLM(session=session(Fp16())),
            tasks=["local_choice"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            use_cache=str(folder / "answers"),
        )


def test_models_are_kvbenchs_own_folders_or_the_hubs(tmp_path: Path) -> None:
    assert find_model("smollm2-135m").wheel is not None
    assert find_model(str(tmp_path)).path == str(tmp_path)
    assert find_model("org/name").hub_id == "org/name"


def test_metric_names_lose_the_filter_that_does_nothing() -> None:
    results = {"t": {"alias": "t", "sample_len": 2, "acc,none": 0.5, "acc_stderr,none": "N/A", "exact_match,strict": 1}}
    assert scalars(results) == {"t.acc": 0.5, "t.exact_match.strict": 1.0}


def test_samples_are_in_the_order_of_documents() -> None:
    documents = [{"doc_id": 1, "metrics": ["acc"], "acc": 0.0}, {"doc_id": 0, "metrics": ["acc"], "acc": 1.0}]
    assert paired_samples({"t": documents}) == {"t.acc": [1.0, 0.0]}


def test_without_lm_eval_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigurationError, match=r"kvbench\[lm-eval\]"):
        LmEval(tasks=["arc_easy"])


def test_nothing_is_said_in_a_pipe(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    task(folder, limit=1).run(session(Fp16()))
    assert capfd.readouterr() == ("", "")
