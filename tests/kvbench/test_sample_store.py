"""Samples kept as they finish: recalled whole, never half, and told in the run's own file."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.quantizers.tqmse import TQMSE
from kvbench.sample_store import KeptSamples, SampleStore
from kvbench.session import Session

from .tiny_models import session, tokens


def kept(name: str, value: float) -> KeptSamples:
    return KeptSamples(names=[name], records=[{"value": value}])


def measuring(store: SampleStore) -> Session:
    opened = session("three", TQMSE(k_bits=3, v_bits=3))
    opened.samples = store
    return opened


def sample(opened: Session, name: str, calls: list[str]) -> dict[str, Any]:
    """Measure a prompt of its own for each name."""

    def measure() -> list[dict[str, Any]]:
        calls.append(name)
        return [{"nll": -opened.loglikelihood(tokens(9, seed=len(name)), tokens(3, seed=1))[0]}]

    return opened.measured([name], measure)[0]


def test_a_new_store_recalls_what_an_earlier_one_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    SampleStore(path).remember(kept("a", 0.1))
    found = SampleStore(path).recall(["a"])
    assert found is not None and found.records == [{"value": 0.1}]


def test_a_line_cut_short_by_a_kill_is_not_a_sample_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    store = SampleStore(path)
    store.remember(kept("a", 1.0))
    store.remember(kept("b", 2.0))
    path.write_bytes(path.read_bytes()[:-9])
    assert SampleStore(path).recall(["b"]) is None
    SampleStore(path).remember(kept("c", 3.0))
    again = SampleStore(path)
    assert [name for name in "abc" if again.recall([name])] == ["a", "c"]


def test_samples_measured_together_are_recalled_only_together(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "kept.jsonl")
    store.remember(KeptSamples(names=["a", "b"], records=[{"value": 1}, {"value": 2}]))
    assert store.recall(["a"]) is None
    assert store.recall(["a", "b"]) is not None


def test_the_runs_file_has_a_line_for_every_sample_measured_or_recalled(tmp_path: Path) -> None:
    path, report = tmp_path / "kept.jsonl", tmp_path / "samples.jsonl"
    SampleStore(path).remember(kept("a", 1.0))
    store = SampleStore(path, report, {"quantizer": "fp16", "task": "niah"})
    store.recall(["a"])
    store.remember(kept("b", 2.0))
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert lines == [
        {"quantizer": "fp16", "task": "niah", "sample": "a", "value": 1.0},
        {"quantizer": "fp16", "task": "niah", "sample": "b", "value": 2.0},
    ]


def test_a_sample_that_is_not_json_data_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        SampleStore().remember(kept("a", float("nan")))


def test_an_interrupted_session_continues_to_the_same_records_proof_and_size(tmp_path: Path) -> None:
    names = ["a", "bb", "ccc"]
    whole = measuring(SampleStore(tmp_path / "whole.jsonl"))
    expected = [sample(whole, name, []) for name in names]

    path, calls = tmp_path / "interrupted.jsonl", []
    interrupted = measuring(SampleStore(path))
    for name in names[:2]:
        sample(interrupted, name, [])
    resumed = measuring(SampleStore(path))
    assert [sample(resumed, name, calls) for name in names] == expected
    assert calls == ["ccc"]
    assert resumed.engagement == whole.engagement
    assert resumed.compression == whole.compression
