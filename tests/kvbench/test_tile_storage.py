"""A layer in tile pages answers as one in the reference's planes: same tokens in, same attention out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from kvbench.attention import kvbench_attention
from kvbench.bit_plane_storage import BitPlaneStorage
from kvbench.cache_options import CacheOptions
from kvbench.errors import ConfigurationError
from kvbench.kernels.formats import Group, HaarRotation, HeadFormat, LogNorm, RotatedCodebook, Segment
from kvbench.packed_cache import PackedLayer
from kvbench.quantizers.codebooks import codebook
from kvbench.tile_storage import TileStorage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, GROUP = 1, 2


def tensor_format(seed: int, bits: int = 3) -> RotatedCodebook:
    """``bits`` a coordinate, one log-coded norm a head."""
    return RotatedCodebook((HeadFormat((group_of(128, seed, bits),)),) * HEADS)


def group_of(dim: int, seed: int = 1, bits: int = 3) -> Group:
    segment = Segment(dim, codebook(dim, bits))
    return Group(tuple(range(dim)), HaarRotation(dim, seed), (segment,), LogNorm(-6.0, 12.0 / 254))


def layer(backend: str, bits: int = 3, **options: object) -> PackedLayer:
    chosen = CacheOptions(backend=backend, **options)  # type: ignore[arg-type]
    return PackedLayer(0, tensor_format(1, bits), tensor_format(2, bits), chosen, GROUP)


def filled(backend: str, **options: Any) -> PackedLayer:
    found = layer(backend, **options)
    found.update(states(1, 3, HEADS, 0), states(1, 3, HEADS, 1))
    found.store()
    return found


def states(batch: int, tokens: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, 128, generator=generator).to(DEVICE)


def answers(backend: str, chunks: list[int], starts: list[int], **options: Any) -> list[Tensor]:
    """The attention outputs of chunks of those sizes, one after another; sequence b begins at slot ``starts[b]``."""
    found, batch, past = layer(backend, **options), len(starts), 0
    outputs = []
    for number, count in enumerate(chunks):
        handles, _ = found.update(states(batch, count, HEADS, 3 * number), states(batch, count, HEADS, 3 * number + 1))
        slots = torch.arange(past + count, device=DEVICE)
        causal = slots <= slots[past:, None]
        mask = (causal[None] & (slots >= torch.tensor(starts, device=DEVICE)[:, None, None]))[:, None]
        query = states(batch, count, HEADS * GROUP, 3 * number + 2)
        output, _ = kvbench_attention(nn.Module(), query, handles, handles, mask if any(starts) else None)
        real = slots[past:] >= torch.tensor(starts, device=DEVICE)[:, None]
        outputs.append(output[real])
        past += count
    assert found.backend == backend
    return outputs


@pytest.mark.parametrize("options", [{}, {"exact_prefill": True, "n_sink": 2}], ids=str)
@pytest.mark.parametrize(("chunks", "starts"), [([1, 1], [0]), ([6, 1, 3], [2, 0])], ids=["alone", "left-padded"])
def test_attention_over_pages_is_the_references(
    options: dict[str, object], chunks: list[int], starts: list[int]
) -> None:
    """The bound is the rounding of fp16 operands and of probabilities in 15 bits."""
    for ours, theirs in zip(
        answers("triton", chunks, starts, **options), answers("reference", chunks, starts, **options), strict=True
    ):
        assert (ours - theirs).norm() <= 3e-3 * theirs.norm()


def test_recent_windows_and_sinks_over_pages_are_the_references() -> None:
    options = {"n_sink": 1, "recent_window": 2}
    for ours, theirs in zip(
        answers("triton", [4, 1, 1], [0], **options), answers("reference", [4, 1, 1], [0], **options), strict=True
    ):
        assert (ours - theirs).norm() <= 3e-3 * theirs.norm()


@pytest.mark.parametrize("options", [{}, {"exact_prefill": True, "n_sink": 1}], ids=str)
def test_formats_that_tiles_cannot_hold_are_read_by_the_general_kernel(options: dict[str, object]) -> None:
    assert isinstance(filled("triton", bits=5).storage, BitPlaneStorage)
    chunks, starts = [4, 1], [2, 0]
    found, expected = (answers(backend, chunks, starts, bits=5, **options) for backend in ("triton", "reference"))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 3e-3 * theirs.norm()


def test_forcing_triton_where_nothing_serves_names_the_layer_and_the_reason() -> None:
    wide = RotatedCodebook((HeadFormat((group_of(320),)),))
    found = PackedLayer(4, wide, wide, CacheOptions(backend="triton"), 1)
    with pytest.raises(ConfigurationError, match=r"layer 4: backend=triton cannot serve this layer: head_dim 320"):
        found.update(*(torch.randn(1, 1, 2, 320, device=DEVICE) for _ in range(2)))


def test_pages_give_back_what_the_references_planes_give_back() -> None:
    found, expected = layer("triton"), layer("reference")
    keys, values = states(1, 130, HEADS, 0), states(1, 130, HEADS, 1)
    for each in (found, expected):
        each.update(keys, values)
    for ours, theirs in zip(found.decode(), expected.decode(), strict=True):
        differ = ((ours - theirs).abs() > 1e-4).any(-1)  # a coordinate on a threshold may take the next code
        assert differ.float().mean() < 0.02


def test_bytes_are_the_pages_and_grow_with_them() -> None:
    found = layer("triton")
    assert isinstance(filled("triton").storage, TileStorage)
    found.update(states(1, 100, HEADS, 0), states(1, 100, HEADS, 1))
    page = HEADS * 128 * (3 * 128 // 8 + 1)  # tokens x (codes and a norm)
    assert found.bytes_allocated() == (page, page)
    found.update(states(1, 100, HEADS, 2), states(1, 100, HEADS, 3))
    assert found.bytes_allocated() == (2 * page, 2 * page)


def test_rows_move_with_their_pages_and_a_crop_forgets() -> None:
    found = layer("triton")
    found.update(states(2, 3, HEADS, 0), states(2, 3, HEADS, 1))
    before, _ = found.decode()
    found.reorder_cache(torch.tensor([1, 1, 0]))
    assert torch.equal(found.decode()[0], before[[1, 1, 0]])
    found.crop(-2)
    assert torch.equal(found.decode()[0], before[[1, 1, 0], :1])


def test_numbers_that_are_not_finite_are_told_when_the_layer_is_proven() -> None:
    found = layer("triton")
    keys = states(1, 3, HEADS, 0)
    keys[0, 0, 2, 7] = torch.nan
    found.update(keys, states(1, 3, HEADS, 1))
    found.store()
    assert found.storage is not None
    assert "NaN" in (found.storage.defect() or "")
    assert found.storage.defect() is None
