"""Prompts read one after another: the same numbers as each on its own, whatever is shared between them."""

import inspect

import pytest
import torch
from torch import Tensor

from kvbench.errors import EngagementError
from kvbench.packed_cache import PackedLayer
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session

from .tiny_models import session, tokens

CHUNK = 16
NO_STOP: frozenset[int] = frozenset()


def packed(**cache: int) -> Session:
    return session("three", TQMSE(k_bits=3, v_bits=3), **{"prefill_chunk": CHUNK, **cache})


def losses(reading: Session, prompts: list[Tensor], answer: Tensor) -> list[Tensor]:
    """The answer's losses after each prompt, all prompts read by one reader."""
    with reading.reading() as reader:
        found = []
        for prompt in prompts:
            reader.read([prompt])
            found.append(reader.score([answer])[0].losses)
        return found


def related_prompts() -> tuple[Tensor, Tensor]:
    """Two prompts of 50 tokens that differ in their 41st."""
    first = tokens(50, seed=1)
    second = first.clone()
    second[40] = (second[40] + 1) % 200
    return first, second


@pytest.mark.parametrize("cache", [{}, {"recent_window": 8}, {"n_sink": 4}, {"prefill_chunk": 0}], ids=str)
def test_a_prompt_scores_the_same_to_the_last_bit_whatever_was_read_before(cache: dict[str, int]) -> None:
    first, second = related_prompts()
    answer = tokens(7, seed=2)
    alone = losses(packed(**cache), [second], answer)[0]
    after = losses(packed(**cache), [first, second], answer)[1]
    assert torch.equal(alone, after)


def test_only_the_prefill_steps_that_differ_are_computed_again() -> None:
    first, second = related_prompts()
    reading = packed()
    fed: list[int] = []
    feed = reading.loaded.model.forward

    def counting(piece: Tensor, **options: object) -> object:
        fed.append(piece.shape[1])
        return feed(piece, **options)

    counting.__signature__ = inspect.signature(feed)  # type: ignore[attr-defined]
    reading.loaded.model.forward = counting
    try:
        losses(reading, [first, second], tokens(3))
    finally:
        reading.loaded.model.forward = feed
    assert fed == [16, 16, 16, 2, 3] + [16, 2, 3]  # the second prompt keeps its first 32 tokens


def test_generating_leaves_no_trace_in_what_is_scored_afterwards() -> None:
    prompt, answer = tokens(20, seed=3), tokens(4, seed=4)
    with packed().reading() as reader:
        reader.read([prompt])
        before = reader.score([answer])[0].losses
        reader.generate(6, NO_STOP)
        assert torch.equal(reader.score([answer])[0].losses, before)


def test_greedy_answers_are_those_of_transformers_own_generate() -> None:
    prompts = [tokens(23, seed=5), tokens(9, seed=6)]
    reading = packed()
    with reading.reading() as reader:
        reader.read(prompts)
        found = reader.generate(6, NO_STOP)
    assert found == [answer.tolist() for answer in reading.generate(prompts, 6)]


def test_an_answer_ends_before_a_stop_token() -> None:
    with packed().reading() as reader:
        reader.read([tokens(23, seed=5)])
        answer = reader.generate(6, NO_STOP)[0]
        assert len(set(answer[:3])) == 3
        assert reader.generate(6, frozenset({answer[2]})) == [answer[:2]]


def test_prompts_of_one_batch_score_like_single_ones() -> None:
    prompts = [tokens(40, seed=7), tokens(11, seed=8), tokens(26, seed=9)]
    continuations = [tokens(2, seed=10), tokens(6, seed=11), tokens(4, seed=12)]
    with packed().reading() as reader:
        reader.read(prompts)
        batch = reader.score(continuations)
    for prompt, continuation, scored in zip(prompts, continuations, batch, strict=True):
        alone = losses(packed(), [prompt], continuation)[0]
        assert len(scored.losses) == len(continuation)
        torch.testing.assert_close(scored.losses, alone, atol=1e-4, rtol=1e-4)


def test_reads_are_counted_once_for_each_note() -> None:
    reading = packed()
    with reading.reading() as reader:
        reader.read([tokens(8)])
        reader.note()
        assert reading.engagement[0].packed_tokens_read == 8
        reader.score([tokens(2)])
        reader.note()
    assert reading.engagement[0].packed_tokens_read == 8 + 10


def read_and_forget_a_layer(reading: Session) -> None:
    with reading.reading() as reader:
        reader.read([tokens(8)])
        layer = reader.cache.layers[1]
        assert isinstance(layer, PackedLayer)
        layer.packed_tokens_read = 0


def test_a_layer_that_was_not_read_is_refused_on_leaving() -> None:
    with pytest.raises(EngagementError, match="layer 1"):
        read_and_forget_a_layer(packed())
