"""KVQuant: levels where the numbers are, channels scaled by what RoPE makes of keys, outliers kept apart."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from kvbench.calibration import Calibration, Rotary
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry
from kvbench.kernels.comparator_formats import NonUniform
from kvbench.quantizers.k_means import weighted_k_means
from kvbench.quantizers.kvquant import KVQuant, turned_sample
from kvbench.testing import model_geometry, synthetic_calibration

SHAPE = model_geometry(64)
CALIBRATION = synthetic_calibration(SHAPE)


def key(quantizer: KVQuant, calibration: Calibration = CALIBRATION) -> NonUniform:
    format = quantizer.fit(calibration, SHAPE).key[0]
    assert isinstance(format, NonUniform)
    return format


def test_levels_go_where_the_weight_is() -> None:
    numbers = np.array([-0.8, -0.8, 0.1, 0.1, 0.7, 0.9])
    assert weighted_k_means(numbers, np.ones(6), 3) == pytest.approx((-0.8, 0.1, 0.8), abs=1e-4)
    assert weighted_k_means(numbers, np.array([1, 1, 1, 1, 3, 1]), 3)[2] == pytest.approx(0.75, abs=1e-4)


def test_levels_of_a_gaussian_are_those_of_lloyd_and_max() -> None:
    """The published optimum for 2 bits: +-0.4528 and +-1.510 standard deviations."""
    numbers = np.random.default_rng(0).standard_normal(200_000)
    assert weighted_k_means(numbers, np.ones(len(numbers)), 4) == pytest.approx(
        (-1.51, -0.4528, 0.4528, 1.51), abs=0.02
    )


@pytest.mark.parametrize("numbers", [np.zeros(5), np.array([0.5]), np.array([0.0, 1.0])])
def test_levels_rise_even_where_there_are_fewer_numbers(numbers: np.ndarray) -> None:
    levels = weighted_k_means(numbers, np.zeros(len(numbers)), 8)
    assert len(levels) == 8
    assert all(low < high for low, high in itertools.pairwise(levels))


def test_fitted_levels_have_less_error_than_even_ones() -> None:
    fitted = key(KVQuant(k_bits=3, outliers=0.0))
    even = dataclasses.replace(fitted, levels=tuple(np.linspace(-1, 1, 17)[1::2].tolist()))
    x = torch.from_numpy(turned_sample(CALIBRATION.layers[0], SHAPE.layers[0], 4096)).float()
    errors = [float((each.codec().reconstruct(x) - x).square().sum()) for each in (fitted, even)]
    assert errors[0] < 0.9 * errors[1]


def test_bytes_are_codes_and_outliers_and_for_values_a_range_a_token() -> None:
    format = KVQuant(k_bits=3, v_bits=2, outliers=0.02).fit(CALIBRATION, SHAPE)
    count = round(0.02 * 128)
    assert 8 * format.key[0].codec().bytes_per_token == 3 * 128 + count * (8 + 16)
    assert 8 * format.value[0].codec().bytes_per_token == 2 * 128 + count * (8 + 16) + 32
    assert format.key[0].bits_per_token == 8 * format.key[0].codec().bytes_per_token


def test_places_of_wide_models_take_two_bytes() -> None:
    wide = model_geometry(128, kv_heads=8, group_size=1, layers=1)
    value = KVQuant(v_bits=2).fit(synthetic_calibration(wide), wide).value[0]
    assert value.bits_per_token == 2 * 1024 + 10 * 32 + 32
    x = torch.randn(5, 8, 128, generator=torch.Generator().manual_seed(0))
    x[:, 7, 127] = 50.0
    assert torch.equal(value.codec().reconstruct(x)[:, 7, 127], x[:, 7, 127])


@pytest.mark.parametrize("role", ["key", "value"])
def test_outliers_come_back_in_full_precision_and_spare_the_rest(role: str) -> None:
    (format, *_) = getattr(KVQuant(k_bits=3, v_bits=3, outliers=0.02).fit(CALIBRATION, SHAPE), role)
    (without, *_) = getattr(KVQuant(k_bits=3, v_bits=3, outliers=0.0).fit(CALIBRATION, SHAPE), role)
    statistics = CALIBRATION.layers[0].k if role == "key" else CALIBRATION.layers[0].v
    x = torch.from_numpy(statistics.sample).clone()
    x[:, 1, 7] = 1000.0
    kept, lost = (each.codec().reconstruct(x) for each in (format, without))
    assert torch.equal(kept[:, 1, 7], x[:, 1, 7])
    others = torch.arange(64) != 7
    errors = [float((each - x)[:, 1, others].square().sum()) for each in (kept, lost)]
    assert errors[0] < errors[1]
    assert errors[0] < 0.2 * float(x[:, 1, others].square().sum())


def test_a_key_is_turned_as_rope_turns_it() -> None:
    shape = LayerGeometry(2, 1, 4, 4)
    layer = synthetic_calibration(model_geometry(4, kv_heads=1, group_size=2, layers=1)).layers[0]
    still = dataclasses.replace(layer, rotary=Rotary((0.0, 0.0)))
    turning = dataclasses.replace(layer, rotary=Rotary((math.pi / 2, 0.0), scaling=2.0))
    before, after = turned_sample(still, shape, 4), turned_sample(turning, shape, 4)
    quarters = np.floor(np.arange(len(before)) * (5**0.5 - 1) / 2 % 1 * 4).astype(int)
    assert set(quarters) == {0, 1, 2, 3}
    once = quarters == 1
    assert after[once, 0, 0] == pytest.approx(-2 * before[once, 0, 2])
    assert after[once, 0, 2] == pytest.approx(2 * before[once, 0, 0])
    assert after[:, 0, [1, 3]] == pytest.approx(2 * before[:, 0, [1, 3]])


def test_levels_of_keys_follow_the_queries_that_meet_them() -> None:
    """Channels that strong queries meet decide where the levels are."""
    layer = CALIBRATION.layers[0]
    moment = layer.q.second_moment.copy()
    moment[:, [0, 32], [0, 32]] *= 1e6  # the dims of block 0
    loud = dataclasses.replace(layer, q=dataclasses.replace(layer.q, second_moment=moment))
    plain, led = (key(KVQuant(k_bits=2), Calibration((each, each), {})) for each in (layer, loud))
    assert plain.ranges == led.ranges
    assert plain.levels != led.levels
    x = torch.from_numpy(turned_sample(layer, SHAPE.layers[0], 4096)).float()
    errors = [(each.codec().reconstruct(x) - x)[..., [0, 32]].square().sum() for each in (plain, led)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: KVQuant(k_bits=9), r"quantizer.k_bits=9 is not allowed"),
        (lambda: KVQuant(outliers=0.6), r"quantizer.outliers=0.6 is not allowed: choose a fraction from 0 to 0.5"),
        (lambda: KVQuant(outliers=float("nan")), r"quantizer.outliers=nan"),
        (lambda: KVQuant(span=0), r"quantizer.span=0 is not allowed"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=reason):
        make()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"levels": (0.0, 1.0, 2.0)}, "2, 4, ... or 256 levels, not 3"),
        ({"levels": (1.0, 0.0)}, "levels must rise"),
        ({"outliers": 128}, "128 outliers among 128 numbers"),
        ({"ranges": (((0.0, 1.0),) * 64,)}, "for each of 2 KV heads of 64 dims"),
        ({"ranges": (((0.0, 0.0),) * 64,) * 2}, "must be positive"),
    ],
)
def test_a_format_that_means_nothing_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(NonUniform(2, 64, (-1.0, 1.0), 2), **changes)  # type: ignore[arg-type]
