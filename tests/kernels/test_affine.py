"""The affine format: hand-computed codes, its declared error, rotation, and the honesty of its options."""

import pytest
import torch

from kvbench.kernels.comparator_formats import Affine
from kvbench.kernels.hadamard import random_hadamard, sylvester


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_codes_scale_and_zero_are_those_of_the_definition() -> None:
    codec = Affine(kv_heads=1, head_dim=4, bits=2).codec()
    codes, scales, zeros = codec.encode(torch.tensor([[[-1.0, 0.1, 0.9, 2.0]]]))
    assert (float(scales), float(zeros)) == (1.0, -1.0)
    assert codec.layout.unpack(codes).tolist() == [[0, 1, 2, 3]]
    assert codec.decode((codes, scales, zeros)).flatten().tolist() == [-1.0, 0.0, 1.0, 2.0]


def test_symmetric_codes_store_no_zero_point() -> None:
    format = Affine(kv_heads=1, head_dim=4, bits=2, symmetric=True)
    codec = format.codec()
    codes, scales = codec.encode(torch.tensor([[[-1.5, -0.4, 0.6, 1.4]]]))
    assert float(scales) == 1.0
    assert codec.decode((codes, scales)).flatten().tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert format.bits_per_token == 4 * 2 + 16


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [None, 32, 24])
def test_no_element_is_off_by_more_than_half_a_step(bits: int, group: int | None) -> None:
    x = 3 + vectors(50, 2, 80)
    codec = Affine(2, 80, bits, group).codec()
    _, scales, _ = planes = codec.encode(x)
    assert scales.shape == (50, 2 * (1 if group is None else -(-80 // group)))
    step = scales.float().unflatten(-1, (2, -1)).repeat_interleave(group or 80, -1)[..., :80]
    assert ((codec.decode(planes) - x).abs() <= 0.5 * step + 0.01).all()  # and the zero point's own rounding


def test_bytes_are_codes_scales_and_zeros_and_nothing_else() -> None:
    format = Affine(kv_heads=2, head_dim=80, bits=3, group=32)
    assert format.bits_per_token == 2 * (3 * 80 + 3 * 32)
    assert format.codec().bytes_per_token == 2 * (30 + 3 * 4)


def test_an_outlier_channel_costs_less_after_rotation() -> None:
    x = vectors(100, 1, 128)
    x[..., 5] *= 40
    plain, turned = (Affine(1, 128, 4, hadamard=seed).codec().reconstruct(x) for seed in (None, 1))
    others = [channel for channel in range(128) if channel != 5]
    errors = [(each - x)[..., others].square().mean() for each in (plain, turned)]
    assert errors[1] < 0.5 * errors[0]


def test_clipping_shrinks_the_range_that_codes_cover() -> None:
    x = vectors(10, 1, 64)
    decoded = Affine(1, 64, 4, clip=0.9).codec().reconstruct(x)
    assert torch.allclose(decoded.amax(-1), 0.9 * x.amax(-1), atol=0.01)
    assert torch.allclose(decoded.amin(-1), 0.9 * x.amin(-1), atol=0.01)


def test_numbers_beyond_fp16_keep_their_size_by_the_unit() -> None:
    x = 1e6 * vectors(10, 1, 64)
    assert torch.allclose(Affine(1, 64, 8, unit=1024.0).codec().reconstruct(x), x, atol=3e4)
    assert torch.isfinite(Affine(1, 64, 8).codec().reconstruct(x)).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_hadamard_matrices_are_orthogonal_and_spread_a_coordinate(dim: int) -> None:
    matrix = torch.from_numpy(random_hadamard(dim, 7).copy())
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    block = dim & -dim
    assert torch.allclose(matrix.abs().sum(0), torch.full((dim,), block**0.5, dtype=torch.float64))
    assert not (matrix == torch.from_numpy(random_hadamard(dim, 8).copy())).all()


def test_sylvester_needs_a_power_of_two() -> None:
    assert (2 * sylvester(4)).astype(int).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    with pytest.raises(ValueError, match="power of two, not 12"):
        sylvester(12)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"bits": 0}, "1 to 8 bits"), ({"bits": 4, "group": 0}, "1 to 64 dims"), ({"bits": 4, "clip": 1.5}, "clip")],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Affine(1, 64, **options)  # type: ignore[arg-type]
