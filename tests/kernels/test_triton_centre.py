"""The centre of keys in tile pages, in Triton, against the reference codec in float64.

Without a GPU the plain path runs in Triton's interpreter. A negative origin stands for a position far beyond the slots.
"""

import dataclasses
import os

import pytest
import torch
from torch import Tensor

from .packed_formats import tensor_format

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
pytest.importorskip("triton")

import triton
import triton.language as tl

from kvbench.kernels.formats import Centre, RotatedCodebook
from kvbench.kernels.tile_attention import NewToken, TileAttention, reference_attention
from kvbench.kernels.tile_centre import TileCentre
from kvbench.kernels.tile_centre_kernels import cos_sin
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_prefill import TilePrefill
from kvbench.kernels.tiles import TileLayout, UnsupportedLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALING = 128**-0.5
FREQUENCIES = tuple(500_000.0 ** (-i / 64) for i in range(64))
ROTATE_HALF = tuple((i, i + 64) for i in range(64))
PARTLY_TURNING = tuple((2 * i, 2 * i + 1) for i in range(24))  # interleaved; dims from 48 on stay


def centre(heads: int, blocks: tuple[tuple[int, int], ...] = ROTATE_HALF, size: float = 1.5) -> Centre:
    mu = torch.randn(heads, 128, generator=torch.Generator().manual_seed(5)) * size
    return Centre(tuple(map(tuple, mu.tolist())), blocks, FREQUENCIES[: len(blocks)])


def balanced(format: RotatedCodebook) -> RotatedCodebook:
    """The format with every group's dims scaled before its rotation."""
    scale = torch.rand(128, generator=torch.Generator().manual_seed(6)).add(0.5).tolist()
    heads = []
    for head in format.heads:
        groups = [dataclasses.replace(g, scales=tuple(scale[dim] for dim in g.dims)) for g in head.groups]
        heads.append(dataclasses.replace(head, groups=tuple(groups)))
    return dataclasses.replace(format, heads=tuple(heads))


def layout_of(
    templates: list[int], log_norms: bool = True, blocks: tuple[tuple[int, int], ...] = ROTATE_HALF
) -> TileLayout:
    key = tensor_format([[int(digit) for digit in str(template)] for template in templates], log_norms=log_norms)
    key = dataclasses.replace(balanced(key), centre=centre(len(templates), blocks))
    return TileLayout(key, tensor_format([[3] * 4] * len(templates), seed=50, log_norms=log_norms))


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def states(
    layout: TileLayout, batch: int, tokens: int, origins: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys around their centre and values, ``[batch, tokens, kv_heads, 128]``, of slots from 0 on."""
    term = layout.key_format.codec().centre
    positions = torch.arange(tokens) - torch.tensor(origins)[:, None]
    found = term(positions)
    assert found is not None
    keys = random(batch, tokens, layout.kv_heads, 128, seed=1) + found.to(DEVICE)
    return keys.to(dtype), random(batch, tokens, layout.kv_heads, 128, seed=2, dtype=dtype)


def pages_of(layout: TileLayout, lengths: list[int], origins: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    pages = layout.allocate(len(lengths), max(lengths), DEVICE)
    keys, values = states(layout, len(lengths), max(lengths), origins, dtype)
    TileEncoder(layout, DEVICE)(keys, values, pages, integers([0] * len(lengths)), integers(origins))
    return pages


def reference_parts(layout: TileLayout, keys: Tensor, values: Tensor, origin: int) -> tuple[Tensor, ...]:
    positions = torch.arange(keys.shape[0]) - origin
    parts = []
    for format, x in ((layout.key_format, keys), (layout.value_format, values)):
        codec = format.codec()
        codes, norms = codec.encode(x.float().cpu(), positions)
        parts += [codec.layout.unpack(codes).reshape(*x.shape), norms]
    return tuple(parts)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Codes and norms agree but for ties: at most two codes in ten thousand, by one step."""
    for a, b in zip(ours, theirs, strict=True):
        off = (a.cpu().float() - b.float()).abs()
        if a.dtype == torch.float16:
            assert (off / b.float().abs().clamp_min(1e-3)).max() < 2e-3
        else:
            assert off.max() <= 1
            assert (off > 0).float().mean() <= 2e-4


def assert_attends(
    layout: TileLayout,
    lengths: list[int],
    group: int,
    starts: list[int] | None = None,
    origins: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    splits: int = 2,
) -> None:
    starts = starts or [0] * len(lengths)
    origins = starts if origins is None else origins
    pages = pages_of(layout, lengths, origins)
    q = random(len(lengths), layout.kv_heads * group, 128, seed=9, dtype=dtype)
    bounds = integers(starts), integers(lengths)
    ours = TileAttention(layout, DEVICE, splits=splits)(q, pages, *bounds, SCALING, origins=integers(origins))
    expected = reference_attention(q.double(), layout, pages, *bounds, SCALING, integers(origins))
    rounding = {torch.float32: 6e-4, torch.float16: 9e-4, torch.bfloat16: 4e-3}[dtype]
    assert (ours[0] - expected[0]).norm() <= rounding * expected[0].norm()
    assert (ours[1] - expected[1]).abs().max() <= 2e-3


@triton.jit
def dump_angles(turns, positions, out):
    at = tl.arange(0, 64)
    cos, sin = cos_sin(tl.load(turns + at), tl.load(positions + tl.program_id(0)))
    tl.store(out + tl.program_id(0) * 128 + at, cos)
    tl.store(out + tl.program_id(0) * 128 + 64 + at, sin)


def test_angles_are_exact_a_million_positions_out() -> None:
    positions = [0, 1, -77, 100_003, 524_287, 1_048_577, -1_000_003]
    layout = layout_of([3333])
    waves = TileCentre(layout.key_format, torch.device(DEVICE)).waves
    out = torch.zeros(len(positions), 2, 64, device=DEVICE)
    dump_angles[(len(positions),)](waves.turns, integers(positions), out)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(FREQUENCIES, dtype=torch.float64)
    assert (out.cpu() - torch.stack([angles.cos(), angles.sin()], 1)).abs().max() < 3e-7


@pytest.mark.parametrize("template", [3333, 4332, 4422, 2222])
def test_every_run_of_widths_attends_like_the_reference(template: int) -> None:
    assert_attends(layout_of([template], log_norms=template != 4422), [140], 4)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_pages_need_not_be_full(length: int) -> None:
    assert_attends(layout_of([3333]), [length], 2, splits=3)


@pytest.mark.parametrize("group", [1, 7, 8, 16])
def test_any_group_of_query_heads_attends_like_the_reference(group: int) -> None:
    assert_attends(layout_of([4332, 3333]), [130], group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_queries_of_half_precision_attend_like_the_reference(dtype: torch.dtype) -> None:
    assert_attends(layout_of([3333]), [200], 4, dtype=dtype)


def test_sequences_of_a_batch_count_positions_from_where_their_padding_ends() -> None:
    assert_attends(layout_of([3333]), [300, 131, 40], 2, starts=[0, 129, 7])


def test_the_first_token_attended_need_not_be_at_position_zero() -> None:
    assert_attends(layout_of([3333]), [300, 140], 2, starts=[9, 133], origins=[5, 129])


def test_positions_past_a_hundred_thousand_are_as_exact_as_the_first() -> None:
    assert_attends(layout_of([4332]), [300], 2, starts=[0], origins=[-400_123])


def test_dims_that_do_not_turn_add_a_constant() -> None:
    assert_attends(layout_of([3333], blocks=PARTLY_TURNING), [200], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_prompt_is_encoded_less_its_centre(dtype: torch.dtype) -> None:
    layout, origins = layout_of([4332, 3333]), [0, 37]
    keys, values = states(layout, 2, 150, origins, dtype)
    pages = layout.allocate(2, 150, DEVICE)
    TileEncoder(layout, DEVICE)(keys, values, pages, integers([0, 0]), integers(origins))
    for row, origin in enumerate(origins):
        expected = reference_parts(layout, keys[row], values[row], origin)
        assert_same(layout.unpack(pages[row].cpu(), 150), expected)


def test_an_appended_token_has_the_codes_of_its_position() -> None:
    layout, origins = layout_of([4332, 3333]), [3, -200_000]
    keys, values = states(layout, 2, 131, origins, torch.float16)
    pages, encoder = layout.allocate(2, 131, DEVICE), TileEncoder(layout, DEVICE)
    for slot in range(127, 131):
        mine = slice(slot, slot + 1)
        encoder(keys[:, mine], values[:, mine], pages, integers([slot, slot]), integers(origins))
    for row, origin in enumerate(origins):
        expected = reference_parts(layout, keys[row], values[row], origin)
        ours = layout.unpack(pages[row].cpu(), 131)
        assert_same(tuple(part[127:] for part in ours), tuple(part[127:] for part in expected))


def test_a_token_stored_on_the_way_is_stored_and_read_like_one_stored_first() -> None:
    layout, origins = layout_of([4332, 3333]), integers([3, 0])
    before = pages_of(layout, [130, 70], [3, 0])
    keys, values, q = random(2, 1, 2, 128, seed=3), random(2, 1, 2, 128, seed=4), random(2, 8, 128, seed=5)
    slots = integers([128, 66])
    encoder, attention = TileEncoder(layout, DEVICE), TileAttention(layout, DEVICE, splits=2)
    apart, together = before.clone(), before.clone()
    encoder(keys, values, apart, slots, origins)
    expected = attention(q, apart, origins, slots + 1, SCALING)
    new = NewToken(encoder, keys, values, slots, origins)
    found = attention(q, together, origins, slots + 1, SCALING, new=new)
    assert not torch.equal(before, apart)
    assert torch.equal(apart, together)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("own", [False, True])
def test_a_chunk_sees_the_packed_past_with_its_centre(own: bool) -> None:
    layout, starts, origins, tokens, stop = layout_of([4332]), [0, 40], [-150_000, 30], 30, 200
    pages = pages_of(layout, [stop + tokens] * 2, origins)
    q = random(2, tokens, 2, 128, seed=9, dtype=torch.float16)
    mine = (
        random(2, tokens, 1, 128, seed=10, dtype=torch.float16),
        random(2, tokens, 1, 128, seed=11, dtype=torch.float16),
    )
    prefill = TilePrefill(layout, DEVICE, tile_tokens=256)
    out, lse = prefill(q, pages, integers(starts), stop, SCALING, mine if own else None, origins=integers(origins))
    if own:  # the first query sees the packed past and its own token
        packed = reference_attention(
            q[:, 0].double(), layout, pages, integers(starts), integers([stop] * 2), SCALING, integers(origins)
        )
        logit = torch.einsum("bhd,bd->bh", q[:, 0].double(), mine[0][:, 0, 0].double()) * SCALING
        total = torch.logaddexp(packed[1], logit)
        values = mine[1][:, 0].double()
        expected = packed[0] * (packed[1] - total).exp()[..., None] + values * (logit - total).exp()[..., None]
        rows = [(0, expected, total)]
    else:
        rows = []
        for index in (0, tokens - 1):
            stops = integers([stop + index + 1] * 2)
            found = reference_attention(
                q[:, index].double(), layout, pages, integers(starts), stops, SCALING, integers(origins)
            )
            rows.append((index, *found))
    for index, expected, total in rows:
        assert (out[:, index] - expected).norm() <= 2e-3 * expected.norm()
        assert (lse[:, index] - total).abs().max() <= 4e-3


def test_layers_with_a_centre_share_compiled_kernels() -> None:
    layouts = [layout_of([4332, 4422]), layout_of([4431, 3333] * 4)]
    assert len({tuple(TileAttention(layout, DEVICE).variant(8).items()) for layout in layouts}) == 1
    assert len({tuple(TileEncoder(layout, DEVICE).variant.items()) for layout in layouts}) == 1


def test_centres_that_tiles_do_not_add_are_refused_with_the_reason() -> None:
    plain = tensor_format([[3] * 4])
    chosen = dataclasses.replace(plain, centre=dataclasses.replace(centre(1), per_token=True))
    with pytest.raises(UnsupportedLayout, match="token by token"):
        TileLayout(chosen, plain)
    with pytest.raises(UnsupportedLayout, match="values have a centre"):
        TileLayout(plain, dataclasses.replace(plain, centre=Centre(centre(1).vectors)))
