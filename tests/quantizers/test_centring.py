"""Centered Block-GTQ and its options on a real model's statistics and on made ones."""

import dataclasses

import numpy as np
import pytest
import torch

from kvbench.calibration import Rotary, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.kernels.formats import Basis, Fp16Norm, LogNorm, RotatedCodebook
from kvbench.quantizers.blockgtq import BlockGTQ, balancing_scales, shared_widths
from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
from kvbench.quantizers.centring import key_centre, residual_energy
from kvbench.quantizers.principal_axes import principal_axes
from kvbench.quantizers.tqmse import TQMSE

from .synthetic_calibration import calibration, geometry


def with_rotary(of, type: str = "default"):  # type: ignore[no-untyped-def]
    """That synthetic calibration with the frequencies of a RoPE of that type."""
    made = calibration(of)
    layers = []
    for layer, shape in zip(made.layers, of.layers, strict=True):
        frequencies = tuple(10000.0 ** (-2 * i / shape.rotary_dim) for i in range(shape.rotary_dim // 2))
        layers.append(dataclasses.replace(layer, rotary=Rotary(frequencies, 1.5, type)))
    return dataclasses.replace(made, layers=tuple(layers))


def test_the_centre_is_the_scaled_mean_of_keys() -> None:
    of = geometry(64, 64)
    layer = with_rotary(of).layers[0]
    centre, mean = key_centre(layer, of.layers[0], "all")
    assert centre is not None
    assert np.allclose(centre.vectors, layer.k.mean * 1.5, rtol=1e-6)
    assert np.array_equal(mean, layer.k.mean)
    assert centre.blocks == of.layers[0].blocks


def test_a_number_takes_the_blocks_that_move_logits_most() -> None:
    of = geometry(64, 64)
    layer = with_rotary(of).layers[0]
    _, mean = key_centre(layer, of.layers[0], "5")
    blocks = np.array(of.layers[0].blocks)
    weight = layer.q.block_energy(of.layers[0]) * (layer.k.mean**2)[:, blocks].sum(-1)
    for head in range(len(mean)):
        kept = {block for block in range(32) if np.any(mean[head, blocks[block]])}
        assert kept == set(np.argsort(-weight[head])[:5])


def test_residual_energy_is_the_variance_where_the_mean_is_off() -> None:
    of = geometry(64, 64)
    layer = with_rotary(of).layers[0]
    variance = layer.k.energy - layer.k.mean**2
    blocks = np.array(of.layers[0].blocks)
    assert np.allclose(residual_energy(layer, of.layers[0], layer.k.mean), variance[:, blocks].sum(-1))
    assert np.allclose(
        residual_energy(layer, of.layers[0], np.zeros_like(layer.k.mean)), layer.k.block_energy(of.layers[0])
    )


@pytest.mark.parametrize("type", ["dynamic", "longrope"])
def test_frequencies_that_change_with_length_are_refused(type: str) -> None:
    """FIELD-CASES 11."""
    of = geometry(64, 64)
    with pytest.raises(ConfigurationError, match=f"{type}.*center=none"):
        CenteredBlockGTQ().fit(with_rotary(of, type), of)
    CenteredBlockGTQ(center="none").fit(with_rotary(of, type), of)


def test_without_its_changes_it_is_block_gtq() -> None:
    of = geometry(64, 64)
    plain = CenteredBlockGTQ(score="energy", center="none", norm_bits=16, balance=False).fit(with_rotary(of), of)
    assert plain.digest() == BlockGTQ().fit(with_rotary(of), of).digest()
    assert plain.digest() != CenteredBlockGTQ().fit(with_rotary(of), of).digest()


@pytest.mark.parametrize(("norm_bits", "kind"), [(16, Fp16Norm), (8, LogNorm), (6, LogNorm)])
def test_norms_take_the_bits_asked_for(norm_bits: int, kind: type) -> None:
    of = geometry(64, 64)
    for format in (BlockGTQ(norm_bits=norm_bits), TQMSE(norm_bits=norm_bits)):
        for tensor in (*(fitted := format.fit(with_rotary(of), of)).key, *fitted.value):
            assert isinstance(tensor, RotatedCodebook)
            assert {type(group.norm) for head in tensor.heads for group in head.groups} == {kind}
            assert {group.norm.bits for head in tensor.heads for group in head.groups} == {norm_bits}


def test_aligned_widths_are_shared_in_order_of_score() -> None:
    scores = [1.0, 100.0, 2.0, 90.0, 3.0, 80.0, 4.0, 70.0]
    widths = shared_widths(scores, 3, align=4)
    assert {widths[i] for i in (1, 3, 5, 7)} == {max(widths)}
    assert {widths[i] for i in (0, 2, 4, 6)} == {min(widths)}
    assert sum(widths) == 24
    with pytest.raises(ConfigurationError, match="divisor of the 8"):
        shared_widths(scores, 3, align=3)


def test_values_by_principal_axes_spend_their_bits_where_the_variance_is() -> None:
    of = geometry(64, 64)
    made = with_rotary(of)
    format = CenteredBlockGTQ(v="pca", v_bits=2).fit(made, of).value[0]
    assert isinstance(format, RotatedCodebook)
    assert format.code_bits == 2.0
    variances, axes = principal_axes(made.layers[0].v, 0)
    assert np.allclose(axes @ axes.T, np.eye(64), atol=1e-9)
    assert np.all(np.diff(variances) <= 1e-12)
    head = format.heads[0]
    assert isinstance(head.basis, Basis)
    widest = head.groups[0]
    assert min(variances[list(widest.dims)]) >= max(variances[list(head.groups[-1].dims)])
    assert format.centre is not None
    assert format.centre.blocks == ()


def test_axes_weighed_by_the_output_put_errors_where_it_does_not_look() -> None:
    """At equal bits the output sees less error with the weights than without, and values decode all the same."""
    of = geometry(64, 64, layers=1)
    generator = np.random.default_rng(5)
    x = generator.normal(size=(512, 2, 64)) * np.exp(generator.normal(size=(2, 64)))
    values = TensorStatistics(
        x.mean(0), np.einsum("thd,the->hde", x, x) / len(x), x.min(0), x.max(0), x.astype(np.float32)
    )
    projection = generator.normal(size=(2, 64, 64)) * np.geomspace(3.0, 0.1, 64)
    metrics = np.einsum("hod,hoe->hde", projection, projection)
    made = with_rotary(of)
    made = dataclasses.replace(made, layers=(dataclasses.replace(made.layers[0], v=values, output=metrics),))
    errors = {}
    for v in ("pca", "pca_wo"):
        codec = CenteredBlockGTQ(v=v, v_bits=3).fit(made, of).value[0].codec()
        error = codec.reconstruct(torch.from_numpy(values.sample)).double().numpy() - x
        assert np.square(error).sum() < 0.25 * np.square(x).sum()
        errors[v] = np.einsum("thd,hde,the->", error, metrics, error)
    assert errors["pca_wo"] < 0.7 * errors["pca"]


def test_weighing_by_the_output_needs_its_projection() -> None:
    of = geometry(64, 64)
    with pytest.raises(ConfigurationError, match="v=pca or tqmse"):
        CenteredBlockGTQ(v="pca_wo").fit(with_rotary(of), of)


def test_a_flag_lets_tokens_keep_the_mean_and_widens_the_norms_range_to_both() -> None:
    of = geometry(64, 64)
    made = with_rotary(of)
    plain, flagged = (CenteredBlockGTQ(center_flag=flag).fit(made, of).key[0] for flag in (False, True))
    assert isinstance(flagged, RotatedCodebook)
    assert flagged.centre is not None
    assert flagged.centre.per_token
    assert flagged.bits_per_token == plain.bits_per_token + flagged.kv_heads
    with pytest.raises(ConfigurationError, match="center=all"):
        BlockGTQ(center_flag=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"center": "most"}, "center=most"),
        ({"score": "sum"}, "energy or product"),
        ({"v": "int8"}, "tqmse or pca"),
        ({"norm_bits": 7}, "norm_bits=7"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CenteredBlockGTQ(**options)  # type: ignore[arg-type]


def test_balancing_evens_out_what_blocks_do_to_logits() -> None:
    """The product of the two sums is no larger than with any other scales: least at ``w^4 = a / c``."""
    generator = np.random.default_rng(0)
    queries, keys = generator.gamma(0.5, size=(2, 32)), generator.gamma(0.5, size=(2, 32))
    squares = np.square(balancing_scales(queries, keys))
    balanced = (queries / squares).sum(1) * (keys * squares).sum(1)
    assert np.allclose(balanced, np.square(np.sqrt(queries * keys).sum(1)))
    assert np.all(balanced < queries.sum(1) * keys.sum(1))


def test_scales_do_not_change_what_is_attended() -> None:
    """Products with queries, and what decoding gives back, are those of the unscaled vectors, to coding error."""
    of = geometry(64, 64)
    codec = BlockGTQ(k_bits=8, balance=True, norm_bits=16).fit(with_rotary(of), of).key[0].codec()
    x, q = torch.randn(20, 2, 64), torch.randn(20, 2, 3, 64)
    planes = codec.encode(x)
    products = torch.einsum("nhgd,nhd->nhg", codec.to_space(q), codec.decode(planes))
    expected = torch.einsum("nhgd,nhd->nhg", q, codec.reconstruct(x))
    assert torch.allclose(products, expected, atol=1e-4)
    assert (codec.reconstruct(x) - x).norm() / x.norm() < 0.05
