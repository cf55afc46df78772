"""The latency task: what a cell's row holds, out of memory as a result, and options that make no sense."""

import dataclasses

import pytest
import torch

from kvbench.errors import ConfigurationError
from kvbench.packed_cache import PackedCache
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.tasks.latency import ON_CPU, Latency

from .sessions import session

TINY = Latency(contexts=[20, 40], batches=[1, 2], steps=3)


@pytest.mark.parametrize("quantizer", [TQMSE(), Fp16()], ids=lambda each: each.name)
def test_every_context_and_batch_has_a_row_with_times_and_bytes(quantizer: TQMSE | Fp16) -> None:
    of = session(quantizer)
    done = TINY.run(of)
    rows = done.metrics["curve"]
    assert [(row["context"], row["batch"]) for row in rows] == [(20, 1), (40, 1), (20, 2), (40, 2)]
    for row in rows:
        assert row["method"] == quantizer.name
        assert 0 < row["decode_ms_p5"] <= row["decode_ms_median"] <= row["decode_ms_p95"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["decode_ms_median"])
        assert row["ttft_s"] >= row["prefill_s"] > 0
        assert row["attention"] == "reference"
        assert not row["out_of_memory"]
    assert rows[2]["cache_bytes"] == 2 * rows[0]["cache_bytes"]
    assert of.engagement[0].backend == "reference"


def test_a_cpu_is_named_and_has_no_floor_and_no_graph() -> None:
    done = dataclasses.replace(TINY, contexts=[20], batches=[1]).run(session(TQMSE()))
    assert ON_CPU in done.notes
    (row,) = done.metrics["curve"]
    assert (row["floor_ms"], row["peak_bytes"], row["graph"], row["compile_s"]) == (None, None, False, None)


def test_the_last_step_reads_the_whole_context() -> None:
    of = session(TQMSE())
    dataclasses.replace(TINY, contexts=[20], batches=[1]).run(of)
    assert of.compression is not None
    assert of.compression.tokens == 20


def test_a_synthetic_cache_repeats_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tasks.latency.REPEATED", 8)
    kept: list[PackedCache] = []
    of = session(TQMSE())
    monkeypatch.setattr(of, "note", lambda cache: kept.append(cache))
    (row,) = dataclasses.replace(TINY, contexts=[40], batches=[1], fill="synthetic").run(of).metrics["curve"]
    assert (row["fill"], row["prefill_s"], row["ttft_s"]) == ("synthetic", None, None)
    keys, _ = kept[0].packed_layers[0].decode()
    assert torch.equal(keys[:, 8:16], keys[:, :8])
    assert torch.equal(keys[:, 24:32], keys[:, :8])


def test_running_out_of_memory_is_a_row_and_the_other_cells_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    of = session(TQMSE())
    stream = of.stream

    def short_of_memory(tokens: torch.Tensor, *arguments: object, **options: object) -> object:
        if tokens.shape[1] > 20:
            raise torch.OutOfMemoryError("not enough")
        return stream(tokens, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(of, "stream", short_of_memory)
    small, large = dataclasses.replace(TINY, batches=[1]).run(of).metrics["curve"]
    assert (small["out_of_memory"], large["out_of_memory"]) == (False, True)
    assert large["decode_ms_median"] is None
    assert set(small) == set(large)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"contexts": [5]}, "leaves no prompt"),
        ({"contexts": []}, "at least one entry"),
        ({"steps": 0}, "1 or more"),
        ({"fill": "random"}, "prefill or synthetic"),
        ({"compile": "fast"}, "none or default or tuned or max-autotune"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        dataclasses.replace(TINY, **options)  # type: ignore[arg-type]
