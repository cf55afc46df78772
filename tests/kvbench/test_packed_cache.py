"""The packed cache under transformers: every way of feeding it gives what one plain pass gives.

Two formats stand for all. Float32 storage has no quantization, so any difference is a fault of masks, positions or
merging, and the bound is rounding. 3-bit Block-GTQ adds codes: where a way of feeding changes the last bit of a key, a
coordinate on a threshold may take the next code, so single logits may move a little, but few.
"""

import pytest
import torch
from torch import Tensor

from kvbench.attention import cache_argument
from kvbench.kernels.formats import Dense
from kvbench.packed_cache import PackedCache
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.session import Session

from .tiny_models import GEOMETRIES, session, tiny_model, tokens

ROUNDING = 3e-5  # relative, of float32 logits after two layers summed in another order
QUANTIZERS = [pytest.param(None, id="float32"), pytest.param(BlockGTQ(), id="blockgtq")]
# Window caches keep tokens by arrival, and Gemma's sliding layers are transformers' own
CROPPABLE = [name for name in GEOMETRIES if "sliding" not in name]


def logits_of(of: Session, ids: Tensor, mask: Tensor | None = None, cache: PackedCache | None = None) -> Tensor:
    """Logits ``[batch, tokens, vocabulary]`` of ``ids`` fed through the session's cache, chunk by chunk."""
    if cache is not None:
        return torch.cat([logits for _, logits in of.stream(ids, cache, mask)], 1)
    with of.engage() as cache:
        return torch.cat([logits for _, logits in of.stream(ids, cache, mask)], 1)


def assert_same(found: Tensor, expected: Tensor, exact: bool) -> None:
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    if exact:
        assert error.max() < ROUNDING
    else:
        assert error.max() < 0.05
        assert error.quantile(0.9) < 1e-3


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_without_quantization_logits_are_the_models_own(geometry: str) -> None:
    """FIELD-CASES 1, 3, 4, 5, 7: head dims, query heads per KV head, rotary layouts, sliding layers, q/k norms."""
    of, ids = session(geometry, prefill_chunk=0), tokens(2, 40)
    with torch.no_grad():
        expected = of.loaded.model(ids, use_cache=False).logits
    assert_same(logits_of(of, ids), expected, exact=True)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_chunked_prefill_equals_one_pass(geometry: str, quantizer: BlockGTQ | None, chunk: int) -> None:
    ids = tokens(1, 70)
    whole = logits_of(session(geometry, quantizer, prefill_chunk=0), ids)
    pieces = logits_of(session(geometry, quantizer, prefill_chunk=chunk), ids)
    assert_same(pieces, whole, exact=quantizer is None)


@pytest.mark.parametrize("options", [{"n_sink": 4}, {"recent_window": 5}, {"n_sink": 3, "recent_window": 6}], ids=str)
@pytest.mark.parametrize("geometry", ["three", "interleaved, partial rotary (glm)"])
def test_windows_do_not_depend_on_the_chunk(geometry: str, options: dict[str, int]) -> None:
    ids, quantizer = tokens(1, 30), BlockGTQ(k_bits=2, v_bits=2)
    one_by_one = logits_of(session(geometry, quantizer, prefill_chunk=1, **options), ids)
    for chunk in (7, 0):
        pieces = logits_of(session(geometry, quantizer, prefill_chunk=chunk, **options), ids)
        assert_same(pieces, one_by_one, exact=False)
    without = logits_of(session(geometry, quantizer, prefill_chunk=1), ids)
    assert not torch.allclose(without, one_by_one, rtol=0.01)


def test_windows_that_hold_everything_give_full_precision() -> None:
    ids = tokens(1, 30)
    exact = logits_of(session("three"), ids)
    for options in ({"n_sink": 30}, {"recent_window": 30}, {"n_sink": 7, "recent_window": 23}):
        found = logits_of(session("three", BlockGTQ(k_bits=2, v_bits=2), prefill_chunk=7, **options), ids)
        assert_same(found, exact, exact=True)


def test_exact_prefill_sees_its_own_chunk_in_full_precision() -> None:
    ids = tokens(1, 24)
    exact = logits_of(session("three"), ids)
    quantizer = BlockGTQ(k_bits=2, v_bits=2)
    one_chunk = logits_of(session("three", quantizer, prefill="exact", prefill_chunk=0), ids)
    assert_same(one_chunk, exact, exact=True)
    halves = logits_of(session("three", quantizer, prefill="exact", prefill_chunk=12), ids)
    assert_same(halves[:, :12], exact[:, :12], exact=True)
    assert not torch.allclose(halves[:, 12:], exact[:, 12:], rtol=0.01)


@pytest.mark.parametrize("options", [{}, {"n_sink": 3}, {"recent_window": 4}], ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_left_padded_batches_equal_single_prompts(
    geometry: str, quantizer: BlockGTQ | None, options: dict[str, int]
) -> None:
    """FIELD-CASES 12: scores do not depend on the batch."""
    of = session(geometry, quantizer, prefill_chunk=7, **options)
    prompts = [tokens(count, seed=count) for count in (5, 17, 30)]
    batch, mask = of.left_pad(prompts)
    together = logits_of(of, batch, mask)
    for row, prompt in enumerate(prompts):
        alone = logits_of(session(geometry, quantizer, prefill_chunk=7, **options), prompt[None])
        assert_same(together[row : row + 1, -len(prompt) :], alone, exact=quantizer is None)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("geometry", CROPPABLE)
def test_crop_forgets_packed_tokens(geometry: str, quantizer: BlockGTQ | None) -> None:
    """FIELD-CASES 13: after a crop the cache is what it was before the cropped tokens came."""
    of, ids, other = session(geometry, quantizer, prefill_chunk=8), tokens(1, 40), tokens(1, 20, seed=9)
    with of.engage() as cache:
        logits_of(of, ids, cache=cache)
        cache.crop(-15)
        assert cache.get_seq_length() == 25
        found = logits_of(of, other, cache=cache)
    expected = logits_of(of, torch.cat([ids[:, :25], other], 1))[:, 25:]
    assert_same(found, expected, exact=quantizer is None)


@pytest.mark.parametrize("options", [{"n_sink": 3}, {"recent_window": 9}, {"n_sink": 5, "recent_window": 9}], ids=str)
@pytest.mark.parametrize("removed", [4, 9, 15, 38])
def test_after_a_crop_every_token_is_read_once(options: dict[str, int], removed: int) -> None:
    """Without quantization it does not matter from which copy a token is read, only that it is from one."""
    of, ids, other = session("three", prefill_chunk=8, **options), tokens(1, 40), tokens(1, 20, seed=9)
    with of.engage() as cache:
        logits_of(of, ids, cache=cache)
        cache.crop(-removed)
        found = logits_of(of, other, cache=cache)
    expected = logits_of(session("three"), torch.cat([ids[:, :-removed], other], 1))[:, -20:]
    assert_same(found, expected, exact=True)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_several_turns_on_one_cache(geometry: str, quantizer: BlockGTQ | None) -> None:
    """FIELD-CASES 16: later turns see the earlier ones as one long prompt would."""
    of, turns = session(geometry, quantizer), [tokens(1, count, seed=count) for count in (11, 1, 20, 3)]
    with of.engage() as cache:
        found = torch.cat([logits_of(of, turn, cache=cache) for turn in turns], 1)
    assert_same(found, logits_of(of, torch.cat(turns, 1)), exact=quantizer is None)


@pytest.mark.parametrize("geometry", CROPPABLE)
def test_beam_search_equals_transformers_own_cache(geometry: str) -> None:
    """FIELD-CASES 13."""
    of, prompt = session(geometry), tokens(9)
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = of.loaded.model.generate(prompt[None], attention_mask=torch.ones(1, 9), **settings)
    with of.engage() as cache:
        name = cache_argument(of.loaded.model)
        found = of.loaded.model.generate(prompt[None], attention_mask=torch.ones(1, 9), **{name: cache}, **settings)
    assert found.tolist() == expected.tolist()


def test_beam_search_reorders_packed_bytes() -> None:
    of = session("three", BlockGTQ(), n_sink=2, recent_window=3)
    with of.engage() as cache:
        logits_of(of, tokens(3, 10), cache=cache)
        before = [layer.decode() for layer in cache.packed_layers]
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        for (keys, values), layer in zip(before, cache.packed_layers, strict=True):
            found_keys, found_values = layer.decode()
            assert torch.equal(found_keys, keys[[2, 0, 0]])
            assert torch.equal(found_values, values[[2, 0, 0]])
        windows = [tensor for layer in cache.packed_layers for tensor in layer.window_tensors]
        assert all(torch.equal(tensor[1], tensor[2]) for tensor in windows)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_greedy_generation_equals_transformers_own_cache(geometry: str) -> None:
    of = session(geometry, prefill_chunk=4)
    prompts = [tokens(count, seed=count) for count in (3, 10)]
    found = of.generate(prompts, max_new_tokens=20)
    for prompt, continuation in zip(prompts, found, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        expected = of.loaded.model.generate(
            prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert continuation.tolist() == expected[0, len(prompt) :].tolist()


def test_sampling_is_reproducible() -> None:
    of = session("three", BlockGTQ())
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(of.generate([tokens(6)], max_new_tokens=20, do_sample=True)[0].tolist())
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_assisted_decoding_gives_the_greedy_tokens() -> None:
    """FIELD-CASES 13: rejected drafts are cropped out of the packed cache."""
    of, prompt = session("three", BlockGTQ()), tokens(20)
    prompt = torch.cat([prompt, prompt])  # so that prompt look-up finds drafts
    greedy = of.generate([prompt], max_new_tokens=24)[0]
    with of.engage() as cache:
        assisted = of.loaded.model.generate(
            prompt[None],
            attention_mask=torch.ones(1, 40, dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
            prompt_lookup_num_tokens=3,
            **{cache_argument(of.loaded.model): cache},
        )
    assert assisted[0, 40:].tolist() == greedy.tolist()


def test_eager_storage_grows_geometrically_and_capacity_is_fixed() -> None:
    of = session("three", BlockGTQ())
    cache, states = of.new_cache(), torch.randn(1, 2, 1, 64)
    layer = cache.packed_layers[0]
    sizes = []
    for _ in range(300):
        layer.update(states, states)
        sizes.append(layer.bytes_allocated())
    assert len(set(sizes)) <= 6
    layer.reset()
    cache.expect(300)
    for _ in range(300):
        layer.update(states, states)
    exact = sum(codec.bytes_per_token for codec in (layer.key_format.codec(), layer.value_format.codec()))
    assert sum(layer.bytes_allocated()) == 300 * exact


def test_padding_tokens_cannot_reach_a_score() -> None:
    """A left-padded row gives the same logits whatever stands in its padding."""
    of, prompt = session("three", BlockGTQ(), prefill_chunk=6), tokens(9)
    batch, mask = of.left_pad([prompt, tokens(20, seed=3)])
    first = logits_of(of, batch, mask)
    batch[0, :11] = 77
    assert torch.equal(logits_of(of, batch, mask)[0, 11:], first[0, 11:])


def test_bf16_models_store_bf16() -> None:
    """FIELD-CASES 10: windows and dense layers follow the model's dtype; nothing is squeezed through fp16."""
    loaded = tiny_model("three", "bfloat16")
    format = Fp16().fit(None, loaded.geometry)
    assert {layer.dtype for layer in (*format.key, *format.value) if isinstance(layer, Dense)} == {"bfloat16"}
    huge = torch.full((1, 2, 3, 64), 1e30, dtype=torch.bfloat16)
    layer = PackedCache(format, loaded.geometry).packed_layers[0]
    layer.update(huge, huge)
    assert torch.equal(layer.decode()[0], huge.transpose(1, 2).float())
