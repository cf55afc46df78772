"""Formats that encode tokens a block at a time: what a block's bytes hold, and what its error is."""

import pytest
import torch

from kvbench.kernels.comparator_formats import Affine, ChannelAffine, TokenBlocks


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_channel_of_each_group_of_tokens_has_a_scale_and_a_zero_point() -> None:
    codec = ChannelAffine(kv_heads=1, head_dim=2, bits=2, group=4, block_tokens=8).codec()
    first = [[0.0, 10.0], [1.0, 20.0], [2.0, 30.0], [3.0, 40.0]]
    second = [[-6.0, 0.0], [-4.0, 0.0], [-2.0, 0.0], [0.0, 0.0]]
    x = torch.tensor(first + second)[:, None]
    _, scales, zeros = planes = codec.encode(x)
    assert scales.tolist() == [[1.0, 10.0, 2.0, 0.0]]
    assert zeros.tolist() == [[0.0, 10.0, -6.0, 0.0]]
    assert torch.equal(codec.decode(planes), x)


def test_symmetric_blocks_store_no_zero_point() -> None:
    format = ChannelAffine(1, 2, 2, group=4, block_tokens=4, symmetric=True)
    x = torch.tensor([[-1.5, 3.0], [-0.5, 1.0], [0.5, -1.0], [1.5, -3.0]])[:, None]
    planes = format.codec().encode(x)
    assert [plane.name for plane in format.codec().planes] == ["codes", "scales"]
    assert torch.equal(format.codec().decode(planes), x)
    assert format.bits_per_token == 2 * (2 + 16 / 4)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_codes_scales_and_zeros_and_nothing_else(bits: int) -> None:
    format = ChannelAffine(kv_heads=2, head_dim=64, bits=bits, group=32, block_tokens=64)
    assert format.bits_per_token == 2 * 64 * (bits + 1)
    assert 8 * format.codec().bytes_per_token == format.bits_per_token
    inner = Affine(2, 64, bits, group=32)
    assert TokenBlocks(inner, 64).codec().bytes_per_token == inner.codec().bytes_per_token


def test_tokens_in_blocks_are_the_tokens_coded_one_by_one() -> None:
    inner = Affine(2, 64, 3, group=32)
    x = vectors(3, 32, 2, 64)
    assert torch.equal(TokenBlocks(inner, 16).codec().reconstruct(x), inner.codec().reconstruct(x))


def test_channels_of_uneven_size_keep_their_precision_only_per_channel() -> None:
    """Why KIVI codes keys per channel: a channel far from zero spoils a token's scale, not its own."""
    x = vectors(64, 1, 64)
    x[..., 3] += 50
    per_channel = ChannelAffine(1, 64, 2, group=32, block_tokens=32).codec().reconstruct(x)
    per_token = Affine(1, 64, 2).codec().reconstruct(x)
    assert (per_channel - x).square().mean() < 0.05 * (per_token - x).square().mean()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ChannelAffine(1, 64, 9, 32, 32), "1 to 8 bits"),
        (lambda: ChannelAffine(1, 64, 2, 32, 48), "a whole number of groups, not 48 of 32"),
        (lambda: TokenBlocks(Affine(1, 64, 2, hadamard=1), 32), "without a rotation"),
        (lambda: TokenBlocks(Affine(1, 64, 2), 1), "at least 2"),
    ],
)
def test_options_that_mean_nothing_are_refused(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=reason):
        make()
