"""Perplexity against transformers' own loss, and what it counts."""

import math

import pytest
import torch
from torch import Tensor

from kvbench.errors import ConfigurationError
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.tasks.perplexity import Perplexity

from .sessions import Identity, model, session


def losses(tokens: Tensor) -> Tensor:
    """Negative log-likelihood of ``tokens[1:]`` by the model without kvbench."""
    with torch.no_grad():
        logits = model().model(tokens[None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none").double()


@pytest.mark.parametrize("chunk", [0, 1, 7, 512])
def test_without_quantization_it_is_exp_of_the_models_own_loss(chunk: int) -> None:
    work = session(Identity(), prefill_chunk=chunk)
    result = Perplexity(windows=2, window=40).run(work)
    tokens = work.windows(80)[0]
    with torch.no_grad():
        own = [model().model(part[None], labels=part[None]).loss.item() for part in (tokens[:40], tokens[40:])]
    assert result.metrics["perplexity"] == pytest.approx(math.exp(sum(own) / 2), rel=1e-5)
    assert result.metrics["per_window"] == pytest.approx([math.exp(loss) for loss in own], rel=1e-5)


def test_overlapping_windows_score_every_token_once() -> None:
    work = session(Identity())
    result = Perplexity(windows=3, window=40, stride=15).run(work)
    text = work.windows(70)[0]
    scored = torch.cat([losses(text[:40]), losses(text[15:55])[-15:], losses(text[30:70])[-15:]])
    assert result.n == result.metrics["tokens"] == len(scored) == len(text) - 1
    assert result.metrics["nll"] == pytest.approx(scored.mean().item(), rel=1e-5)


def test_windows_side_by_side_score_all_but_their_first_tokens() -> None:
    result = Perplexity(windows=3, window=40).run(session(Identity()))
    assert result.n == 3 * 39
    assert result.metrics["stride"] == 40


def test_coarser_caches_move_it_further() -> None:
    task = Perplexity(windows=2, window=64)
    exact = task.run(session(Identity())).metrics["nll"]
    moved = [abs(task.run(session(TQMSE(k_bits=b, v_bits=b))).metrics["nll"] - exact) for b in (1, 4, 8)]
    assert moved[0] > 3 * moved[1] > 6 * moved[2] > 0


def test_half_precision_moves_it_least_but_does_move_it() -> None:
    task = Perplexity(windows=2, window=64)
    exact, half, three = (task.run(session(q)).metrics["nll"] for q in (Identity(), Fp16(), TQMSE()))
    assert 0 < abs(half - exact) < 0.01 * abs(three - exact)


def test_result_says_that_it_read_packed_storage() -> None:
    work = session(TQMSE())
    assert Perplexity(windows=1, window=16).run(work).path == "packed"
    assert [(record.key_format, record.packed_tokens_read) for record in work.engagement] == [
        ("rotated_codebook", 16)
    ] * 2


@pytest.mark.parametrize(
    "options", [{"windows": 0}, {"window": 1}, {"stride": -1}, {"window": 8, "stride": 9}], ids=str
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.perplexity"):
        Perplexity(**options)
