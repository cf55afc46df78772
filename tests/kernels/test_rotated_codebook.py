"""The reference codec: how close it comes, what it keeps exactly, what it refuses."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.formats import Fp16Norm, Group, HaarRotation, HeadFormat, RotatedCodebook, Segment
from kvbench.quantizers.codebooks import codebook, coordinate_law

FP16_RELATIVE = 2.0**-11  # half a unit in the last place of a float16


def uniform(head_dim: int, bits: int, kv_heads: int = 2, scale: float = 1.0) -> RotatedCodebook:
    """Every head one group of one width."""
    segments = (Segment(head_dim, codebook(head_dim, bits)),)
    dims = tuple(range(head_dim))
    return RotatedCodebook(
        tuple(
            HeadFormat((Group(dims, HaarRotation(head_dim, head), segments, Fp16Norm(scale)),))
            for head in range(kv_heads)
        )
    )


def grouped() -> RotatedCodebook:
    """Two heads of 16 dims with different groups, widths and orders of dims."""
    first = (
        Group((0, 1, 8, 9), HaarRotation(4, 1), (Segment(4, codebook(4, 5)),)),
        Group((2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15), HaarRotation(12, 2), (Segment(12, codebook(12, 2)),)),
    )
    second = (
        Group(
            tuple(range(15, -1, -1)), HaarRotation(16, 3), (Segment(5, codebook(16, 4)), Segment(11, codebook(16, 3)))
        ),
    )
    return RotatedCodebook((HeadFormat(first), HeadFormat(second)))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_error_on_gaussian_vectors_is_the_codebooks_distortion(head_dim: int, bits: int) -> None:
    """D of the energy, less the error along the vector (a head_dim-th of it), which keeping the norm takes away.

    That is for many dims. Levels that are centroids give E[u . y'] = E|y'|^2 = 1 - D, so a unit y' is at
    2 - 2 sqrt(1 - D).
    """
    x = gaussian(2000, 2, head_dim)
    error = (uniform(head_dim, bits).codec().reconstruct(x) - x).square().sum(-1) / x.square().sum(-1)
    book = codebook(head_dim, bits)
    positive = torch.tensor(book.levels[len(book.levels) // 2 :], dtype=torch.float64) * book.scale
    distortion = coordinate_law(head_dim).distortion(positive.numpy())
    expected = 2 - 2 * (1 - distortion) ** 0.5 - distortion / head_dim
    assert error.mean().item() == pytest.approx(expected, rel=0.03)


def test_every_groups_norm_is_kept_to_half_precision() -> None:
    format = grouped()
    x = gaussian(50, 2, 16)
    decoded = format.codec().reconstruct(x)
    for number, head in enumerate(format.heads):
        for group in head.groups:
            before, after = (tensor[:, number, list(group.dims)].norm(dim=-1) for tensor in (x, decoded))
            assert torch.allclose(after, before, rtol=1.1 * FP16_RELATIVE, atol=0)


def test_zero_vectors_come_back_zero() -> None:
    x = gaussian(3, 2, 16)
    x[1] = 0
    x[2, 0, [0, 1, 8, 9]] = 0  # one group alone
    decoded = grouped().codec().reconstruct(x)
    assert torch.equal(decoded[1], torch.zeros(2, 16))
    assert torch.equal(decoded[2, 0, [0, 1, 8, 9]], torch.zeros(4))
    assert decoded.isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-3, 1e-2, 1.0, 1e2, 1e3])
def test_codes_do_not_depend_on_magnitude(magnitude: float) -> None:
    codec = uniform(16, 3).codec()
    x = gaussian(20, 2, 16)
    assert torch.equal(codec.encode(x * magnitude)[0], codec.encode(x)[0])
    assert torch.allclose(codec.reconstruct(x * magnitude) / magnitude, codec.reconstruct(x), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1e6, 1e15])
def test_scale_keeps_huge_norms_in_range(magnitude: float) -> None:
    x = gaussian(20, 2, 16)
    decoded = uniform(16, 6, scale=magnitude).codec().reconstruct(x * magnitude) / magnitude
    assert torch.allclose(decoded, uniform(16, 6).codec().reconstruct(x), rtol=2e-3, atol=1e-5)


def test_norm_past_the_formats_range_saturates() -> None:
    codec = uniform(16, 3).codec()
    _, norms = codec.encode(gaussian(20, 2, 16) * 1e9)
    assert norms.unique().tolist() == [65504.0]
    assert codec.reconstruct(gaussian(20, 2, 16) * 1e9).isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-6, 1e-30, 1e-44])
def test_tiny_vectors_stay_tiny(magnitude: float) -> None:
    """Their norms are fp16's smallest numbers, so only the order of magnitude is kept."""
    decoded = uniform(16, 3).codec().reconstruct(gaussian(20, 2, 16) * magnitude)
    assert decoded.isfinite().all()
    assert decoded.norm(dim=-1).max() <= max(8 * magnitude, 2.0**-24)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    x = gaussian(3, 2, 16)
    x[2, 1, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        grouped().codec().encode(x)


def test_vector_whose_norm_overflows_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="overflows float32"):
        grouped().codec().encode(gaussian(3, 2, 16) * 1e30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_of_any_float_type_is_encoded_as_its_float32_value(dtype: torch.dtype) -> None:
    codec = grouped().codec()
    x = gaussian(10, 2, 16).to(dtype)
    for from_dtype, from_float in zip(codec.encode(x), codec.encode(x.float()), strict=True):
        assert torch.equal(from_dtype, from_float)


def test_planes_are_what_the_codec_announces() -> None:
    codec = grouped().codec()
    encoded = codec.encode(gaussian(4, 7, 2, 16))
    assert [(tensor.dtype, tensor.shape) for tensor in encoded] == [
        (plane.dtype, (4, 7, plane.width)) for plane in codec.planes
    ]
    assert codec.bytes_per_token == sum(tensor[0, 0].numel() * tensor.element_size() for tensor in encoded)


def test_leading_dims_do_not_matter() -> None:
    codec = grouped().codec()
    x = gaussian(4, 3, 2, 16)
    batched = codec.decode(codec.encode(x))
    one_by_one = torch.stack([torch.stack([codec.decode(codec.encode(token)) for token in row]) for row in x])
    assert torch.allclose(batched, one_by_one, atol=1e-6)


def test_empty_batch_encodes_to_empty_planes() -> None:
    codec = grouped().codec()
    assert codec.decode(codec.encode(torch.zeros(0, 2, 16))).shape == (0, 2, 16)


def test_moving_into_the_space_and_out_of_it_is_inverse() -> None:
    codec = grouped().codec()
    q = gaussian(5, 2, 3, 16)
    assert torch.allclose(codec.from_space(codec.to_space(q)), q, atol=1e-5)


def test_attention_in_the_codecs_space_is_attention_on_reconstructed_tensors() -> None:
    key_codec, value_codec = grouped().codec(), uniform(16, 3).codec()
    keys, values, q = gaussian(30, 2, 16), gaussian(30, 2, 16, seed=1), gaussian(5, 2, 3, 16, seed=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("nhgd,thd->nhgt", q, k).softmax(-1)
        return torch.einsum("nhgt,thd->nhgd", weights, v)

    coordinates = [codec.decode(codec.encode(x)) for codec, x in ((key_codec, keys), (value_codec, values))]
    inside = value_codec.from_space(attend(key_codec.to_space(q), *coordinates))
    outside = attend(q, key_codec.reconstruct(keys), value_codec.reconstruct(values))
    assert torch.allclose(inside, outside, atol=1e-5)
    assert not torch.allclose(inside, attend(q, keys, values), atol=1e-2)
