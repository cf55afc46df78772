"""The methods people compare with: they store what their papers say, and behave as published."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.comparator_formats import TurboQuantProd
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.fp4 import MXFP4, NVFP4
from kvbench.quantizers.fp8 import Fp8
from kvbench.quantizers.integer import Integer
from kvbench.quantizers.quarot import QuaRot
from kvbench.quantizers.tqmse import TQMSE
from kvbench.quantizers.turboquant_prod import TurboQuantInnerProduct

from .synthetic_calibration import calibration, geometry

SHAPE = geometry(128, layers=1)


def fitted(quantizer: Quantizer, of: ModelGeometry = SHAPE, magnitude: float = 1.0) -> CacheFormat:
    return quantizer.fit(calibration(of, magnitude=magnitude, spread=0.0), of)


def error(quantizer: Quantizer, x: Tensor) -> float:
    decoded = fitted(quantizer).key[0].codec().reconstruct(x)
    return float((decoded - x).square().sum() / x.square().sum())


def gaussian(tokens: int = 400, seed: int = 0) -> Tensor:
    return torch.randn(tokens, 2, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("quantizer", "bits"),
    [
        (Integer(k_bits=4), 4 + 32 / 128),
        (Integer(k_bits=2, group=32), 2 + 4 * 32 / 128),
        (Integer(k_bits=8), 8 + 32 / 128),
        (QuaRot(k_bits=4), 4 + 32 / 128),
        (Fp8(), 8),
        (MXFP4(), 4.25),
        (NVFP4(), 4.5),
        (TurboQuantInnerProduct(k_bits=3), 3 + 32 / 128),
    ],
    ids=str,
)
def test_bytes_stored_are_those_published(quantizer: Quantizer, bits: float) -> None:
    key = fitted(quantizer).key[0]
    assert key.bits_per_token / (2 * 128) == bits
    assert 8 * key.codec().bytes_per_token / (2 * 128) == bits


def test_errors_fall_in_the_order_of_precision() -> None:
    x = gaussian()
    ordered = [Integer(k_bits=2), Integer(k_bits=4), Fp8(encoding="e5m2"), Fp8(), Integer(k_bits=8)]
    errors = [error(quantizer, x) for quantizer in ordered]
    assert errors == sorted(errors, reverse=True)
    assert error(NVFP4(), x) < error(MXFP4(), x)


def test_e4m3_has_the_rounding_error_of_three_mantissa_bits() -> None:
    """Uniform within each binade: relative steps of 2^-3, so a mean squared relative error near 2^-6 / 12 / 2."""
    assert error(Fp8(), gaussian()) == pytest.approx(2**-6 / 24, rel=0.25)


def test_rotation_makes_four_bits_survive_an_outlier_channel() -> None:
    x = gaussian()
    x[..., 3] *= 30
    rest = [dim for dim in range(128) if dim != 3]
    plain, turned = (fitted(each).key[0].codec().reconstruct(x) for each in (Integer(k_bits=4), QuaRot(k_bits=4)))
    assert (turned - x)[..., rest].norm() < 0.7 * (plain - x)[..., rest].norm()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_prod_has_unbiased_logits_and_tqmse_has_not(bits: int) -> None:
    """Theorem 2 of the paper, over many seeds; TQ-MSE with one norm correction less would shrink them."""
    shape = geometry(64, kv_heads=1, layers=1)
    statistics = calibration(shape, spread=0.0)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    q = x / x.norm()
    estimates = [
        float(
            (
                q * TurboQuantInnerProduct(k_bits=bits, seed=seed).fit(statistics, shape).key[0].codec().reconstruct(x)
            ).sum()
        )
        for seed in range(60)
    ]
    standard_error = np.std(estimates) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - float(x.norm())) < 4 * standard_error


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_prod_has_more_error_than_tqmse_at_equal_bits(bits: int) -> None:
    x, q = gaussian(), gaussian(seed=1)
    errors = []
    for quantizer in (TurboQuantInnerProduct(k_bits=bits), TQMSE(k_bits=bits)):
        decoded = fitted(quantizer).key[0].codec().reconstruct(x)
        errors.append(float(((decoded - x) * q).sum(-1).square().mean()))
    assert errors[0] > 1.3 * errors[1]


def test_turboquant_prod_projections_are_unrelated_to_its_rotations() -> None:
    key = fitted(TurboQuantInnerProduct()).key[0]
    assert isinstance(key, TurboQuantProd)
    rotations = {group.rotation.seed for head in key.mse.heads for group in head.groups}
    assert rotations.isdisjoint({key.seed + head for head in range(key.kv_heads)})


@pytest.mark.parametrize("quantizer", [Integer(k_bits=8, v_bits=8), QuaRot(k_bits=8), Fp8(), NVFP4()], ids=str)
def test_keys_of_extreme_models_stay_in_range(quantizer: Quantizer) -> None:
    x = 1e6 * gaussian(20)
    decoded = fitted(quantizer, magnitude=1e6).key[0].codec().reconstruct(x)
    assert float((decoded - x).norm() / x.norm()) < 0.2


def test_scales_of_fp8_hold_what_rope_makes_of_the_calibration() -> None:
    """A pair (a, b) before RoPE can become (sqrt(a^2 + b^2), 0)."""
    x = np.ones((4, 1, 64), np.float32)
    tensor = TensorStatistics(x.mean(0), np.einsum("thd,the->hde", x, x) / 4, x.min(0), x.max(0), x)
    shape = geometry(64, kv_heads=1, layers=1)
    key = Fp8().fit(Calibration((LayerCalibration(tensor, tensor, tensor),), {}), shape).key[0]
    turned = torch.full((1, 1, 64), math.sqrt(2.0))
    assert torch.allclose(key.codec().reconstruct(turned), turned, rtol=2**-4)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Integer(k_bits=0), r"quantizer.k_bits=0 is not allowed: choose a whole number of bits from 1 to 8"),
        (lambda: Integer(v_bits=9), r"quantizer.v_bits=9"),
        (lambda: Integer(group=-1), r"quantizer.group=-1"),
        (lambda: QuaRot(clip=0), r"quantizer.clip=0 is not allowed"),
        (lambda: QuaRot(seed=-1), r"quantizer.seed=-1"),
        (lambda: Fp8(encoding="e3m4"), "choose e4m3 or e5m2"),
        (lambda: TurboQuantInnerProduct(k_bits=1), r"quantizer.k_bits=1 is not allowed: choose a number from 2 to 8"),
        (lambda: TurboQuantInnerProduct(seed=-1), r"quantizer.seed=-1"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=reason):
        make()
