"""The 8-bit and block-scaled 4-bit float formats against their published definitions."""

import pytest
import torch

from kvbench.kernels.comparator_formats import BlockFloat4, Float8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def head(*numbers: float, dim: int) -> torch.Tensor:
    """One token of one head, filled up with zeros: ``[1, 1, dim]``."""
    return torch.tensor([*numbers, *[0.0] * (dim - len(numbers))])[None, None]


def test_fp8_is_torchs_own_cast_of_the_scaled_numbers() -> None:
    x = torch.randn(20, 2, 64, generator=torch.Generator().manual_seed(0))
    for encoding, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        found = Float8(2, 64, encoding, (0.01, 0.5)).codec().reconstruct(x)
        scale = torch.tensor([0.01, 0.5])[:, None]
        assert torch.equal(found, (x / scale).to(dtype).float() * scale)


def test_fp8_saturates_beyond_its_range() -> None:
    x = head(1000.0, -1000.0, 448.0, dim=64)
    assert Float8(1, 64, "e4m3", (1.0,)).codec().reconstruct(x)[0, 0, :3].tolist() == [448.0, -448.0, 448.0]


def test_mxfp4_scale_is_the_power_of_two_below_the_peak_over_four() -> None:
    codec = BlockFloat4(1, 64, 32, "e8m0").codec()
    _, scales = codec.encode(head(7.9, dim=64))
    assert (scales - 127.0).tolist() == [[0.0, -127.0]]
    _, scales = codec.encode(head(8.0, dim=64))
    assert float(scales[0, 0]) - 127 == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_elements_round_to_the_nearest_e2m1_number_and_ties_to_even(sign: int) -> None:
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    given = {**{number: number for number in E2M1}, **ties, 0.26: 0.5, 2.49: 2.0, 5.01: 6.0, 7.9: 6.0}
    x = sign * head(*given, dim=64)
    found = BlockFloat4(1, 64, 32, "e8m0").codec().reconstruct(x)
    assert found[0, 0, : len(given)].tolist() == [sign * each for each in given.values()]


def test_nvfp4_maps_a_blocks_peak_to_six_times_an_e4m3_scale() -> None:
    codec = BlockFloat4(1, 32, 16, "e4m3", tensor_scale=0.25).codec()
    x = head(3.0, 1.0, dim=32)
    codes, scales = codec.encode(x)
    assert scales.view(torch.float8_e4m3fn).float().tolist() == [[2.0, 0.0]]  # 3 / (6 * 0.25)
    assert codec.decode((codes, scales))[0, 0, :2].tolist() == [3.0, 1.0]


@pytest.mark.parametrize(("block", "scale", "bits"), [(32, "e8m0", 4.25), (16, "e4m3", 4.5)])
def test_bits_are_the_published_ones(block: int, scale: str, bits: float) -> None:
    assert BlockFloat4(2, 128, block, scale).bits_per_token / 256 == bits
    assert BlockFloat4(2, 128, block, scale).codec().bytes_per_token / 256 * 8 == bits


def test_scales_of_blocks_are_independent() -> None:
    x = torch.ones(1, 1, 64)
    x[..., 32:] *= 768.0
    found = BlockFloat4(1, 64, 32, "e8m0").codec().reconstruct(x)
    assert found[0, 0, 0] == 1.0
    assert found[0, 0, 32] == 768.0


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="e8m0 or e4m3, not fp16"):
        BlockFloat4(1, 64, 32, "fp16")
    with pytest.raises(ValueError, match="positive and finite"):
        BlockFloat4(1, 64, 16, "e4m3", 0.0)
    with pytest.raises(ValueError, match="e4m3 or e5m2, not e3m4"):
        Float8(1, 64, "e3m4", (1.0,))
    with pytest.raises(ValueError, match="2 scales for 1 KV heads"):
        Float8(1, 64, "e4m3", (1.0, 1.0))
