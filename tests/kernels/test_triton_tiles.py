"""The tile layout and its decode attention in Triton, against the torch reference.

Without a GPU the plain path runs in Triton's interpreter; with one the same tests run the
assembly path, and the two unpackers are compared code by code.
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

from kvbench.kernels import tile_codes
from kvbench.kernels.attention import Partial
from kvbench.kernels.formats import Fp16Norm, Group, HaarRotation, HeadFormat, RotatedCodebook, Segment
from kvbench.kernels.tile_attention import NewToken, TileAttention, reference_attention
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_operands import split_bytes
from kvbench.kernels.tiles import SHARES, TileLayout, UnsupportedLayout, pack_codes, unpack_codes
from kvbench.quantizers.codebooks import codebook

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def widths(template: int) -> list[int]:
    return [int(digit) for digit in str(template)]


def layout_of(templates: list[int], value_bits: int = 3, log_norms: bool = True) -> TileLayout:
    key = tensor_format([widths(template) for template in templates], log_norms=log_norms)
    value = tensor_format([[value_bits] * 4] * len(templates), seed=50, log_norms=log_norms)
    return TileLayout(key, value)


def random_codes(templates: list[int], tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    heads = [
        torch.cat([torch.randint(0, 2**bits, (tokens, 32), generator=generator) for bits in widths(template)], -1)
        for template in templates
    ]
    return torch.stack(heads, 1).to(torch.uint8)


def encoded(layout: TileLayout, lengths: list[int], seed: int = 0) -> Tensor:
    """Pages of random keys and values, a zero key and a zero value among them."""
    generator = torch.Generator().manual_seed(seed)
    pages = layout.allocate(len(lengths), max(lengths), "cpu")
    for row, length in enumerate(lengths):
        parts = []
        for format, zero in ((layout.key_format, length // 2), (layout.value_format, length // 3)):
            x = torch.randn(length, layout.kv_heads, 128, generator=generator)
            if length > 3:
                x[zero] = 0
            codec = format.codec()
            codes, norms = codec.encode(x)
            parts += [codec.layout.unpack(codes).reshape(length, layout.kv_heads, 128), norms]
        packed = layout.pack(*parts)
        pages[row, : len(packed)] = packed
    return pages.to(DEVICE)


def attend(layout: TileLayout, lengths: list[int], group: int, starts: list[int] | None = None, splits: int = 2):
    """(ours, reference) for random queries over random pages: each an output and a log-sum-exp."""
    pages = encoded(layout, lengths)
    q = (
        torch.randn(len(lengths), layout.kv_heads * group, 128, generator=torch.Generator().manual_seed(9)).to(DEVICE)
        * 3
    )
    bounds = [
        torch.tensor(bound, dtype=torch.int32, device=DEVICE) for bound in (starts or [0] * len(lengths), lengths)
    ]
    ours = TileAttention(layout, DEVICE, splits=splits)(q, pages, *bounds, 128**-0.5)
    return ours, reference_attention(q, layout, pages, *bounds, 128**-0.5)


def assert_close(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    # twice the rounding of an fp16 result: a codebook or a norm that is off by one step misses this by far
    assert (ours[0] - reference[0]).norm() <= 6e-4 * reference[0].norm()
    assert (ours[1] - reference[1]).abs().max() <= 1e-3


@pytest.mark.parametrize("template", SHARES)
def test_planes_give_back_the_codes_they_were_packed_from(template: int) -> None:
    codes = random_codes([template], 256)[:, 0].reshape(2, 128, 128)
    planes = pack_codes(codes, template)
    assert planes.shape == (2, 128 * 128 * sum(widths(template)) // 4 // 8)
    assert torch.equal(unpack_codes(planes, template), codes)


@pytest.mark.parametrize("log_norms", [True, False])
def test_pages_give_back_codes_and_norms_of_every_head(log_norms: bool) -> None:
    templates = [4332, 3333, 4431]
    layout = layout_of(templates, value_bits=4, log_norms=log_norms)
    generator = torch.Generator().manual_seed(1)
    norms = [torch.randint(0, 200, (300, n), generator=generator, dtype=torch.uint8) for n in (7, 3)]
    if not log_norms:
        norms = [norm.half() for norm in norms]
    parts = (random_codes(templates, 300), norms[0], random_codes([4444] * 3, 300, seed=2), norms[1])
    pages = layout.pack(*parts)
    assert pages.shape == (3, layout.page_bytes)
    assert all(torch.equal(back, part) for back, part in zip(layout.unpack(pages, 300), parts, strict=True))


def test_three_bit_pages_with_log_norms_are_five_times_smaller_than_fp16() -> None:
    layout = layout_of([4332, 4332])
    assert layout.bytes_per_token == 2 * (48 + 48 + 3 + 1)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ([[5, 3, 2, 2]], [[3] * 4], "5322"),
        ([[3] * 4], [[4, 3, 3, 2]], "several widths"),
        ([[3] * 4, [2] * 4], [[3] * 4] * 2, "key bits"),
    ],
)
def test_formats_that_tiles_cannot_hold_are_refused_with_the_reason(key: list, value: list, reason: str) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        TileLayout(tensor_format(key), tensor_format(value))


def test_codebooks_that_signed_bytes_cannot_hold_are_refused_with_the_reason() -> None:
    lopsided = dataclasses.replace(codebook(128, 2), levels=(-50, -15, 15, 51))
    head = HeadFormat((Group(tuple(range(128)), HaarRotation(128, 0), (Segment(128, lopsided),), Fp16Norm()),))
    with pytest.raises(UnsupportedLayout, match="2-bit codebook is not symmetric"):
        TileLayout(RotatedCodebook((head,)), tensor_format([[2] * 4]))


@pytest.mark.parametrize("template", SHARES)
def test_every_template_attends_like_the_reference(template: int) -> None:
    assert_close(*attend(layout_of([template]), [140], 4))


@pytest.mark.parametrize("value_bits", [2, 3, 4])
@pytest.mark.parametrize("log_norms", [True, False])
def test_every_value_width_and_norm_code_attends_like_the_reference(value_bits: int, log_norms: bool) -> None:
    assert_close(*attend(layout_of([3333], value_bits, log_norms), [130], 2))


@pytest.mark.parametrize("group", [1, 3, 5, 8, 9, 16])
def test_any_group_of_query_heads_attends_like_the_reference(group: int) -> None:
    assert_close(*attend(layout_of([3333]), [40], group))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_pages_need_not_be_full(length: int) -> None:
    assert_close(*attend(layout_of([3333]), [length], 4, splits=3))


def test_heads_of_one_launch_have_templates_of_their_own() -> None:
    assert_close(*attend(layout_of([4431, 3333, 4422, 4332]), [100], 2))


def test_layers_of_any_allocation_and_number_of_heads_share_one_compiled_kernel() -> None:
    layers = ([3333], [4332, 4422], [4431, 3333, 4332, 4422] * 2)
    variants = [TileAttention(layout_of(templates), DEVICE).variant(group) for templates in layers for group in (5, 8)]
    assert all(variant == variants[0] for variant in variants)


def test_sequences_of_a_batch_have_lengths_and_padding_of_their_own() -> None:
    assert_close(*attend(layout_of([3333]), [300, 131, 40], 2, starts=[0, 129, 7]))


def test_a_sequence_without_tokens_has_no_output_and_no_mass() -> None:
    layout = layout_of([3333])
    pages, q = encoded(layout, [100]), torch.randn(1, 2, 128, device=DEVICE)
    none = torch.full((1,), 100, dtype=torch.int32, device=DEVICE)
    out, lse = TileAttention(layout, DEVICE)(q, pages, none, none, 1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


def test_tokens_attended_elsewhere_are_merged_in() -> None:
    layout = layout_of([3333])
    pages = encoded(layout, [200])
    q = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    bound = lambda token: torch.tensor([token], dtype=torch.int32, device=DEVICE)  # noqa: E731
    attention = TileAttention(layout, DEVICE)
    extra = Partial(*attention(q, pages, bound(0), bound(50), 0.1))
    whole = attention(q, pages, bound(50), bound(200), 0.1, extra)
    assert_close(whole, reference_attention(q, layout, pages, bound(0), bound(200), 0.1))


@pytest.mark.parametrize("group", [1, 7])
def test_a_token_stored_on_the_way_leaves_the_pages_and_the_output_of_storing_it_first(group: int) -> None:
    layout = layout_of([4332, 3333])
    before = encoded(layout, [130, 70])
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 1, 2, 128, generator=generator).to(DEVICE) for _ in range(2))
    q = torch.randn(2, 2 * group, 128, generator=generator).to(DEVICE)
    starts, slots = (torch.tensor(at, dtype=torch.int32, device=DEVICE) for at in ([3, 0], [128, 66]))
    encoder, attention = TileEncoder(layout, DEVICE), TileAttention(layout, DEVICE, splits=2)
    apart, together = before.clone(), before.clone()
    encoder(keys, values, apart, slots)
    expected = attention(q, apart, starts, slots + 1, 128**-0.5)
    new = NewToken(encoder, keys, values, slots)
    found = attention(q, together, starts, slots + 1, 128**-0.5, new=new)
    assert not torch.equal(before, apart)
    assert torch.equal(apart, together)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@gpu
def test_a_captured_graph_follows_lengths_that_change_on_the_device() -> None:
    layout = layout_of([4332, 3333])
    pages, q = encoded(layout, [700]), torch.randn(1, 4, 128, device=DEVICE)
    starts, stops = (torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (0, 100))
    attention = TileAttention(layout, DEVICE)
    attention(q, pages, starts, stops, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, pages, starts, stops, 0.1)
    stops.fill_(613)
    graph.replay()
    assert_close(captured, reference_attention(q, layout, pages, starts, stops, 0.1))


@triton.jit
def dump_assembly(planes, tables, out, WORDS: tl.constexpr, TEMPLATE: tl.constexpr):
    at = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    t = (
        tl.load(tables),
        tl.load(tables + 1),
        tl.load(tables + 2),
        tl.load(tables + 3),
        tl.load(tables + 4),
        tl.load(tables + 5),
    )
    tile = tile_codes.slab4(tile_codes.unpack_words(tile_codes.load_words(planes, at, WORDS), t, TEMPLATE))
    tl.store(out + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :], tile)


@triton.jit
def dump_plain(planes, places, levels, out):
    words = planes.to(tl.pointer_type(tl.uint32))
    for slab in tl.static_range(4):
        tile = tile_codes.plain_slab(words, places, levels, slab)
        tl.store(out + tl.arange(0, 128)[:, None] * 128 + slab * 32 + tl.arange(0, 32)[None, :], tile)


@pytest.mark.parametrize("template", SHARES)
def test_both_unpackers_give_every_code_the_level_of_the_codebook(template: int) -> None:
    layout = layout_of([template])
    codes = random_codes([template], 128)[:, 0]
    planes = pack_codes(codes[None], template).to(DEVICE)
    tables = TileAttention(layout, DEVICE).tables
    tile = layout.key[0]
    expected = torch.zeros(128, 128, dtype=torch.int8)
    for (start, count), book in zip(tile.runs, tile.codebooks, strict=True):
        columns = slice(32 * start, 32 * (start + count))
        # as half levels for 4 bits, blown up to fill a byte below: see kernels.tiles.byte_levels
        factor = 1 if book.bits == 4 else 127 // max(book.levels)
        levels = [(level - 1) // 2 if book.bits == 4 else level * factor for level in book.levels]
        expected[:, columns] = torch.tensor(levels, dtype=torch.int8)[codes[:, columns].long()]
    out = torch.zeros(128, 128, dtype=torch.int8, device=DEVICE)
    dump_plain[(1,)](planes, tables.places, tables.levels, out)
    assert torch.equal(out.cpu(), expected)
    if DEVICE == "cuda":
        out.zero_()
        dump_assembly[(1,)](planes, tables.ints[0, 1:].contiguous(), out, len(SHARES[template]), template)
        assert torch.equal(out.cpu(), expected)


@triton.jit
def dump_split(x, high, low, ASSEMBLY: tl.constexpr):
    at = tl.arange(0, 1024)
    a, b = split_bytes(tl.load(x + at), ASSEMBLY)
    tl.store(high + at, a)
    tl.store(low + at, b)


def test_probabilities_split_into_two_signed_bytes_without_loss() -> None:
    x = torch.cat([torch.linspace(0, 32512, 1020), torch.tensor([0.4, 127.0, 128.0, 32511.6])]).to(DEVICE)
    high, low = torch.empty(2, 1024, dtype=torch.int8, device=DEVICE)
    dump_split[(1,)](x, high, low, DEVICE == "cuda")
    assert torch.equal(256 * high.int() + low.int(), torch.round(x).int())
