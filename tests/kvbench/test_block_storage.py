"""A cache of formats that encode tokens a block at a time: residuals, padding, crop, beams and bytes."""

import pytest
import torch
from torch import Tensor

from kvbench.block_storage import BlockStorage
from kvbench.cache_options import CacheOptions
from kvbench.errors import NonFiniteError
from kvbench.packed_cache import PackedLayer
from kvbench.plane_storage import PlaneStorage
from kvbench.quantizers.kivi import Kivi

from .tiny_models import calibration, session, tiny_model, tokens

KIVI = Kivi(group=4, residual=8)


def layer(quantizer: Kivi = KIVI, **options: int) -> PackedLayer:
    format = quantizer.fit(calibration("three"), tiny_model("three").geometry)
    return PackedLayer(0, format.key[0], format.value[0], CacheOptions(**options))


def states(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 2, count, 64, generator=torch.Generator().manual_seed(seed))


def filled(count: int, batch: int = 1, pieces: int = 3) -> tuple[PackedLayer, Tensor]:
    """A layer of ``count`` tokens that came a few at a time, and those ``[batch, tokens, kv_heads, head_dim]``."""
    x, found = states(batch, count), layer()
    for start in range(0, count, pieces):
        found.update(x[:, :, start : start + pieces], x[:, :, start : start + pieces])
    return found, x.transpose(1, 2)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_full_blocks_are_coded_and_the_rest_is_exact(count: int) -> None:
    found, x = filled(count)
    coded = count // 8 * 8
    for stored in found.decode():
        assert torch.equal(stored[:, coded:], x[:, coded:])
        if coded:
            error = (stored[:, :coded] - x[:, :coded]).square().mean() / x.square().mean()
            assert 0.01 < error < 0.3


def test_a_left_padded_batch_stores_what_single_sequences_do() -> None:
    """FIELD-CASES 12, where KIVI's blocks would otherwise begin inside the padding."""
    lengths, longest = (21, 9, 16), 21
    x = states(3, longest)
    batched = layer()
    batched.update(x[:, :, :13], x[:, :, :13])
    starts = torch.tensor([longest - length for length in lengths])
    batched.store(starts)
    batched.update(x[:, :, 13:], x[:, :, 13:])
    batched.store(starts)
    together, _ = batched.decode()
    for row, length in enumerate(lengths):
        alone = layer()
        alone.update(x[row : row + 1, :, longest - length :], x[row : row + 1, :, longest - length :])
        assert torch.equal(together[row, longest - length :], alone.decode()[0][0])


def test_logits_of_a_padded_batch_are_those_of_single_prompts() -> None:
    of = session("three", KIVI, prefill_chunk=0)
    prompts = [tokens(30, seed=1), tokens(19, seed=2)]
    batch, mask = of.left_pad(prompts)
    with of.engage() as cache:
        ((_, together),) = of.stream(batch, cache, mask)
    for row, prompt in enumerate(prompts):
        with of.engage() as cache:
            ((_, alone),) = of.stream(prompt[None], cache)
        assert torch.allclose(together[row, -len(prompt) :], alone[0], atol=1e-3)


@pytest.mark.parametrize("kept", [3, 8, 11, 16, 17, 19])
def test_crop_forgets_tokens_in_blocks_and_tail_and_can_go_on(kept: int) -> None:
    found, x = filled(20)
    before, _ = found.decode()
    found.crop(kept - 20)
    after, _ = found.decode()
    assert torch.equal(after, before[:, :kept])
    more = states(1, 5, seed=9)
    found.update(more, more)
    again, _ = found.decode()
    assert again.shape[1] == kept + 5
    assert torch.equal(again[:, : kept // 8 * 8], before[:, : kept // 8 * 8])
    rest = (kept + 5) // 8 * 8
    assert torch.equal(again[:, max(rest, kept) :], more.transpose(1, 2)[:, max(rest - kept, 0) :])
    assert x.shape[1] == 20


def test_beams_take_their_blocks_and_tails_with_them() -> None:
    found, _ = filled(13, batch=3)
    before, _ = found.decode()
    found.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(found.decode()[0], before[[2, 0, 0]])
    found.batch_repeat_interleave(2)
    assert torch.equal(found.decode()[0], before[[2, 2, 0, 0, 0, 0]])


def test_bytes_hold_blocks_and_tail_and_grow_with_blocks() -> None:
    found = layer(capacity=40)
    found.update(states(2, 4), states(2, 4))
    assert isinstance(found.storage, PlaneStorage)
    storage, values_storage = found.storage.keys, found.storage.values
    assert isinstance(storage, BlockStorage)
    tail = 2 * 7 * 2 * 64 * 4  # batch, tokens, heads, dims, float32
    assert storage.nbytes == 2 * 40 * storage.codec.bytes_per_token + tail
    keys, values = found.bytes_allocated()
    assert (keys, values) == (storage.nbytes, values_storage.nbytes)


def test_nan_is_refused_even_while_a_token_waits_uncoded() -> None:
    x = states(1, 2)
    x[0, 0, 1, 5] = torch.nan
    found = layer()
    found.update(x, x)
    with pytest.raises(NonFiniteError, match="layer 0: keys: cannot encode NaN or infinity"):
        found.decode()


def test_sinks_and_recent_windows_work_over_blocks() -> None:
    ids = tokens(30)
    everything_kept = session("three", KIVI, n_sink=30)
    exact = session("three")
    assert torch.allclose(everything_kept.token_losses(ids), exact.token_losses(ids), atol=1e-4)


def test_generation_through_blocks_is_proven_to_engage() -> None:
    of = session("three", KIVI)
    (answer,) = of.generate([tokens(12)], max_new_tokens=10)
    assert len(answer) == 10
    assert {record.key_format for record in of.engagement} == {"channel_affine"}
    assert {record.value_format for record in of.engagement} == {"token_blocks"}
