"""fp16, tqmse and blockgtq: the formats they make of a calibration, for every shape of attention."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.formats import CacheFormat, Dense, RotatedCodebook
from kvbench.quantizer import Quantizer
from kvbench.quantizers.bit_allocation import allocate_bits
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE

from .synthetic_calibration import calibration, geometry

SHAPES = {
    "64": geometry(64),
    "80": geometry(80),
    "96": geometry(96),
    "128": geometry(128),
    "256": geometry(256),
    "partial rotary": geometry(128, rotary_dim=64),
    "little rotary": geometry(64, rotary_dim=16),
    "interleaved": geometry(64, interleaved=True),
    "interleaved partial rotary": geometry(80, rotary_dim=32, interleaved=True),
    "no rotary": geometry(32, rotary_dim=0),
    "one KV head": geometry(64, kv_heads=1, group=7),
}
QUANTIZERS = [TQMSE, BlockGTQ]


def rotated(format: CacheFormat) -> list[RotatedCodebook]:
    tensors = [*format.key, *format.value]
    assert all(isinstance(tensor, RotatedCodebook) for tensor in tensors)
    return [tensor for tensor in tensors if isinstance(tensor, RotatedCodebook)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cls", QUANTIZERS)
@pytest.mark.parametrize(("k_bits", "v_bits"), [(3, 3), (2.5, 4), (1, 8), (8, 1), (7.5, 1.25)])
def test_code_bits_are_those_asked_for(
    cls: type[TQMSE | BlockGTQ], shape: ModelGeometry, k_bits: float, v_bits: float
) -> None:
    format = cls(k_bits=k_bits, v_bits=v_bits).fit(calibration(shape), shape)
    layer = shape.layers[0]
    if cls is TQMSE:
        key_bits = math.floor(layer.head_dim * k_bits)
    else:  # the budget is in bits a block, for the rotary part alone
        key_bits = 2 * math.floor(layer.rotary_dim / 2 * k_bits) + math.floor(len(layer.unrotated_dims) * k_bits)
    assert {tensor.code_bits for tensor in format.key} == {key_bits / layer.head_dim}
    assert {tensor.code_bits for tensor in format.value} == {math.floor(layer.head_dim * v_bits) / layer.head_dim}
    assert key_bits / layer.head_dim == pytest.approx(k_bits, abs=2 / layer.head_dim)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("cls", QUANTIZERS)
def test_fitted_format_serves_the_models_shape(cls: type[Quantizer], shape: ModelGeometry) -> None:
    format = cls().fit(calibration(shape), shape)
    assert format.layers == len(shape.layers)
    x = torch.randn(5, shape.layers[0].kv_heads, shape.layers[0].head_dim)
    for tensor in rotated(format):
        error = (tensor.codec().reconstruct(x) - x).square().sum() / x.square().sum()
        assert 0.001 < error < 0.2


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_block_gtq_keeps_the_dims_of_a_rope_block_together(shape: ModelGeometry) -> None:
    layer = shape.layers[0]
    format = BlockGTQ(k_bits=2.5).fit(calibration(shape), shape)
    for head in rotated(format)[0].heads:
        group_of = {dim: number for number, group in enumerate(head.groups) for dim in group.dims}
        widths = head.widths()
        for first, second in layer.blocks:
            assert group_of[first] == group_of[second]
            assert widths[first] == widths[second]
        of_rotary = {group_of[dim] for block in layer.blocks for dim in block}
        of_rest = {group_of[dim] for dim in layer.unrotated_dims}
        assert not of_rotary & of_rest
        assert len(of_rest) <= 1


def test_block_gtq_forms_one_group_a_width() -> None:
    shape = geometry(128)
    for head in rotated(BlockGTQ().fit(calibration(shape), shape))[0].heads:
        widths = [{segment.bits for segment in group.segments} for group in head.groups]
        assert all(len(each) == 1 for each in widths)
        assert len({each.pop() for each in widths}) == len(head.groups) > 2


def test_block_gtq_scores_blocks_by_the_mean_energy_of_queries_and_keys() -> None:
    shape = geometry(64)
    statistics = calibration(shape)
    format = BlockGTQ(k_bits=3).fit(statistics, shape)
    for tensor, layer, dims in zip(rotated(format), statistics.layers, shape.layers, strict=False):
        for number, head in enumerate(tensor.heads):
            energy = (layer.q.energy[number] + layer.k.energy[number]) / 2
            scores = [energy[first] + energy[second] for first, second in dims.blocks]
            assert tuple(head.widths()[first] for first, _ in dims.blocks) == allocate_bits(scores, 96)


def test_block_gtq_values_are_tq_mse() -> None:
    shape = geometry(64)
    block, uniform = (cls(k_bits=2, v_bits=4).fit(calibration(shape), shape) for cls in (BlockGTQ, TQMSE))
    assert block.value == uniform.value
    assert block.key != uniform.key


def test_block_gtq_honours_least_and_greatest_width() -> None:
    shape = geometry(128)
    format = BlockGTQ(k_bits=3, min_bits=2, max_bits=4).fit(calibration(shape), shape)
    widths = {width for tensor in format.key for head in tensor.heads for width in head.widths()}  # type: ignore[attr-defined]
    assert widths == {2, 3, 4}


def test_block_gtq_lowers_the_logit_error_where_energies_differ() -> None:
    """What it is for: at equal code bits, keys of uneven energy give logits of less error."""
    shape = geometry(64, kv_heads=1, group=1, layers=1)
    scale = torch.logspace(1, -1, 32).repeat(2)
    generator = torch.Generator().manual_seed(0)
    k, q = (torch.randn(400, 1, 64, generator=generator) * scale for _ in "kq")
    statistics = measured(k.numpy(), q.numpy(), shape)
    errors = []
    for cls in (BlockGTQ, TQMSE):
        key = cls(k_bits=3).fit(statistics, shape).key[0]
        errors.append(((key.codec().reconstruct(k) - k) * q).sum(-1).abs().mean().item())
    assert errors[0] < 0.5 * errors[1]


def measured(k: np.ndarray, q: np.ndarray, shape: ModelGeometry) -> Calibration:
    def of(x: np.ndarray) -> TensorStatistics:
        moment = np.einsum("thd,the->hde", x, x) / len(x)
        return TensorStatistics(x.mean(0), moment, x.min(0), x.max(0), x)

    return Calibration((LayerCalibration(of(q), of(k), of(k)),), {})


@pytest.mark.parametrize("cls", QUANTIZERS)
def test_norms_of_outlier_keys_stay_in_range(cls: type[Quantizer]) -> None:
    shape = geometry(64)
    format = cls().fit(calibration(shape, magnitude=1e6), shape)
    x = 1e6 * torch.randn(20, 2, 64)
    decoded = format.key[0].codec().reconstruct(x)
    assert torch.allclose(decoded.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)
    assert not torch.allclose(decoded, x, rtol=1e-3)


@pytest.mark.parametrize("cls", QUANTIZERS)
def test_heads_and_tensors_have_rotations_of_their_own(cls: type[Quantizer]) -> None:
    shape = geometry(64)
    format = cls().fit(calibration(shape, spread=0.0), shape)
    seeds = [head.groups[0].rotation.seed for tensor in (format.key[0], format.value[0]) for head in tensor.heads]  # type: ignore[attr-defined]
    assert len(set(seeds)) == 4


@pytest.mark.parametrize("cls", QUANTIZERS)
def test_another_seed_gives_other_rotations_and_the_same_widths(cls: type[TQMSE | BlockGTQ]) -> None:
    shape = geometry(64)
    one, two = (rotated(cls(seed=seed).fit(calibration(shape), shape)) for seed in (1, 2))
    assert one != two
    assert [head.widths() for tensor in one for head in tensor.heads] == [
        head.widths() for tensor in two for head in tensor.heads
    ]


@pytest.mark.parametrize(
    ("model", "stored"), [("float32", "float16"), ("float16", "float16"), ("bfloat16", "bfloat16")]
)
def test_fp16_keeps_the_models_own_half_precision(model: str, stored: str) -> None:
    layers = (LayerGeometry(4, 2, 64, 64), LayerGeometry(4, 1, 128, 128))
    format = Fp16().fit(None, ModelGeometry(layers, model))
    assert format.key == format.value == (Dense(2, 64, stored), Dense(1, 128, stored))


@pytest.mark.parametrize("cls", QUANTIZERS)
@pytest.mark.parametrize("option", ["k_bits", "v_bits"])
@pytest.mark.parametrize("bits", [0, 9, -1, 0.99, 8.01, float("nan"), float("inf")])
def test_bits_out_of_range_are_refused_by_name(cls: type[Quantizer], option: str, bits: float) -> None:
    with pytest.raises(ConfigurationError, match=f"quantizer.{option}=.*from 1 to 8"):
        cls(**{option: bits})


@pytest.mark.parametrize("cls", QUANTIZERS)
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_that_names_no_rotation_is_refused(cls: type[Quantizer], seed: int) -> None:
    with pytest.raises(ConfigurationError, match=r"quantizer\.seed=.* is not allowed"):
        cls(**{"seed": seed})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"min_bits": 0}, "1 <= min_bits <= max_bits <= 8"),
        ({"max_bits": 9}, "1 <= min_bits <= max_bits <= 8"),
        ({"min_bits": 5, "max_bits": 4}, "1 <= min_bits <= max_bits <= 8"),
        ({"k_bits": 3, "min_bits": 4}, "cannot be met"),
        ({"k_bits": 4.5, "max_bits": 4}, "cannot be met"),
    ],
)
def test_widths_that_contradict_the_average_are_refused(options: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        BlockGTQ(**options)  # type: ignore[arg-type]


def test_formats_are_the_same_in_every_process() -> None:
    shape = geometry(64, rotary_dim=32)
    here = [cls(k_bits=2.5).fit(calibration(shape), shape).digest() for cls in QUANTIZERS]
    program = (
        "from synthetic_calibration import calibration, geometry\n"
        "from kvbench.quantizers.blockgtq import BlockGTQ\n"
        "from kvbench.quantizers.tqmse import TQMSE\n"
        "shape = geometry(64, rotary_dim=32)\n"
        "print(*[cls(k_bits=2.5).fit(calibration(shape), shape).digest() for cls in (TQMSE, BlockGTQ)])\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert there.stdout.split() == here
