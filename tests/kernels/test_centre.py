"""The centre: what encoding takes off at a position is what a logit gets back there, however far out."""

import pytest
import torch
from torch import Tensor

from kvbench.kernels.attention import attend_dense, attend_packed
from kvbench.kernels.centre import CentreTerm
from kvbench.kernels.formats import Centre, Fp16Norm, Group, HaarRotation, HeadFormat, LogNorm, RotatedCodebook
from kvbench.quantizers.groups import uniform_segments

DIM, ROTARY = 16, 12
BLOCKS = tuple((i, i + ROTARY // 2) for i in range(ROTARY // 2))
FREQUENCIES = tuple(10000.0 ** (-2 * i / ROTARY) for i in range(ROTARY // 2))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def centre(turning: bool = True, length: float = 1.0, per_token: bool = False) -> Centre:
    vectors = tuple(tuple(row) for row in (length * gaussian(2, DIM, seed=3)).tolist())
    return Centre(vectors, BLOCKS, FREQUENCIES, per_token) if turning else Centre(vectors)


NORM = LogNorm(-6.0, 0.05)


def format_with(centre: Centre | None, bits: float = 3, norm: Fp16Norm | LogNorm = NORM) -> RotatedCodebook:
    group = Group(tuple(range(DIM)), HaarRotation(DIM, 1), uniform_segments(DIM, bits), norm)
    return RotatedCodebook((HeadFormat((group,)),) * 2, centre)


def turned(vector: Tensor, position: int) -> Tensor:
    """One key turned as RoPE turns it, pair by pair, in float64."""
    out = vector.double().clone()
    for (first, second), frequency in zip(BLOCKS, FREQUENCIES, strict=True):
        angle = torch.tensor(position * frequency, dtype=torch.float64)
        out[first] = vector[first] * angle.cos() - vector[second] * angle.sin()
        out[second] = vector[second] * angle.cos() + vector[first] * angle.sin()
    return out


@pytest.mark.parametrize("position", [0, 1, 1000, 500_000])
def test_the_centre_turns_as_a_key_does(position: int) -> None:
    found = CentreTerm(centre(), torch.device("cpu")).at(torch.tensor([position]))[0]
    for head, vector in enumerate(centre().vectors):
        assert torch.allclose(found[head].double(), turned(torch.tensor(vector), position), atol=1e-6)


@pytest.mark.parametrize("first", [[0, 0], [3, 700], [131_072, 500_000], [-5, 2]])
def test_the_tile_identity_equals_the_explicit_product(first: list[int]) -> None:
    term, queries = CentreTerm(centre(), torch.device("cpu")), gaussian(2, 3, 2, 4, DIM)
    starts = torch.tensor(first)
    found = term.logits(queries, starts, 50)
    explicit = term.at(starts[:, None] + torch.arange(50))
    expected = torch.einsum("bqhgd,bthd->bqhgt", queries.double(), explicit.double())
    assert torch.allclose(found.double(), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 120_000])
def test_packed_attention_equals_simulation_far_out(dtype: torch.dtype, offset: int) -> None:
    """Positions past 100 000: attention from packed bytes is attention over what they decode to."""
    key_codec, value_codec = format_with(centre()).codec(), format_with(centre(turning=False)).codec()
    keys, values = (gaussian(1, 300, 2, DIM, seed=seed).to(dtype) for seed in (1, 2))
    queries = gaussian(1, 5, 2, 3, DIM, seed=4).to(dtype)
    positions = torch.arange(300)[None] + offset
    planes = key_codec.encode(keys, positions), value_codec.encode(values, positions)
    found = attend_packed(
        queries, key_codec, value_codec, *planes, lambda start, stop: None, 0.25, torch.tensor([-offset]), tile=64
    )
    decoded = [codec.restore(plane, positions) for codec, plane in zip((key_codec, value_codec), planes, strict=True)]
    expected = attend_dense(queries, *decoded, None, 0.25)
    assert torch.allclose(found.out, expected.out, atol=1e-5)
    assert torch.allclose(found.lse, expected.lse, atol=1e-5)


def test_centring_helps_vectors_that_share_a_mean() -> None:
    format = format_with(centre(length=5))
    positions = torch.arange(200)
    x = gaussian(200, 2, DIM) + CentreTerm(centre(length=5), torch.device("cpu")).at(positions)
    errors = [
        (codec.reconstruct(x, positions) - x).square().mean().item()
        for codec in (format.codec(), format_with(None).codec())
    ]
    assert errors[0] < errors[1] / 10


@pytest.mark.parametrize("norm", [Fp16Norm(), NORM])
def test_a_token_far_from_the_mean_keeps_it_where_tokens_may_choose(norm: Fp16Norm | LogNorm) -> None:
    """Half the tokens lie about the mean, half about zero: each is coded as well as alone, and one bit says which."""
    positions = torch.arange(200) + 100_000
    about_mean = torch.arange(200) % 2 == 0
    x = gaussian(200, 2, DIM)
    x += CentreTerm(centre(length=5), torch.device("cpu")).at(positions) * about_mean[:, None, None]
    forcing, choosing = (format_with(centre(length=5, per_token=chosen), norm=norm) for chosen in (False, True))
    codec, always = choosing.codec(), forcing.codec()
    planes = codec.encode(x, positions)
    centred = codec.centred(planes)
    assert centred is not None
    assert torch.equal(centred, about_mean[:, None].expand(200, 2))
    chosen, forced = ((each.reconstruct(x, positions) - x).square().sum((1, 2)) for each in (codec, always))
    assert torch.equal(chosen[about_mean], forced[about_mean])
    assert chosen[~about_mean].mean() < forced[~about_mean].mean() / 5
    assert choosing.bits_per_token == forcing.bits_per_token + 2
    assert planes[2].shape == (200, 1)


def test_attention_adds_the_centre_to_those_logits_alone_whose_keys_lack_it() -> None:
    choosing = centre(length=5, per_token=True)
    key_codec, value_codec = format_with(choosing).codec(), format_with(None).codec()
    positions = torch.arange(150)[None]
    keys = gaussian(1, 150, 2, DIM)
    keys[:, ::3] += CentreTerm(choosing, torch.device("cpu")).at(positions[:, ::3])
    queries, values = gaussian(1, 4, 2, 3, DIM, seed=4), gaussian(1, 150, 2, DIM, seed=2)
    planes = key_codec.encode(keys, positions), value_codec.encode(values)
    found = attend_packed(queries, key_codec, value_codec, *planes, lambda start, stop: None, 0.25, tile=64)
    decoded = key_codec.restore(planes[0], positions), value_codec.restore(planes[1], positions)
    expected = attend_dense(queries, *decoded, None, 0.25)
    assert torch.allclose(found.out, expected.out, atol=1e-5)
    assert torch.allclose(found.lse, expected.lse, atol=1e-5)


def test_values_cannot_have_a_centre_that_turns() -> None:
    with pytest.raises(ValueError, match="turns with position"):
        format_with(centre()).codec().output_offset()


def test_the_centre_counts_once_whatever_the_tokens() -> None:
    assert format_with(centre()).codec().constant_bytes == 2 * DIM * 4
    assert format_with(None).codec().constant_bytes == 0


@pytest.mark.parametrize(
    ("vectors", "message"), [(((0.0,) * DIM,), "each of 2 KV heads"), (((0.0,) * 4,) * 2, "a vector of 16 dims")]
)
def test_a_centre_of_another_shape_is_refused(vectors: tuple[tuple[float, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        format_with(Centre(vectors))
    with pytest.raises(ValueError, match="as many frequencies"):
        Centre(vectors, BLOCKS, FREQUENCIES[:2])
