"""Bit-plane pages and their decode attention in Triton, against the reference codec's decoded values.

Without a GPU the plain path runs in Triton's interpreter; with one the same tests run the assembly path, and the two
unpackers are compared code by code.
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

from kvbench.kernels import bit_plane_operands
from kvbench.kernels.attention import Partial
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_plane_packing import BitPlanePacking
from kvbench.kernels.bit_planes import NARROW, SIGNED, WIDE, BitPlaneLayout, split_levels
from kvbench.kernels.formats import (
    Codebook,
    Group,
    HaarRotation,
    HeadFormat,
    LogNorm,
    RotatedCodebook,
    Segment,
)
from kvbench.kernels.tiles import UnsupportedLayout
from kvbench.quantizers.codebooks import codebook

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")

# widths of a head's 64 RoPE blocks, as the allocator gives them: every block its own
EXACT = [6] * 2 + [5] * 5 + [4] * 16 + [3] * 20 + [2] * 15 + [1] * 6


def values_of(heads: int, dim: int = 128, bits: int = 3) -> RotatedCodebook:
    return tensor_format([[bits] * 2] * heads, unit=dim // 2, seed=9)


class Filled:
    """Pages of random keys and values on the device, and what the reference decodes of them in float64."""

    def __init__(self, key: RotatedCodebook, value: RotatedCodebook, lengths: list[int], seed: int = 0) -> None:
        self.layout = BitPlaneLayout(key, value)
        generator, tokens = torch.Generator().manual_seed(seed), max(lengths)
        x = torch.randn(2, len(lengths), tokens, key.kv_heads, key.head_dim, generator=generator)
        if tokens > 3:
            x[0, :, tokens // 2], x[1, :, tokens // 3] = 0, 0  # a zero key and a zero value
        packing = BitPlanePacking(self.layout, "cpu")
        pages = self.layout.allocate(len(lengths), tokens, "cpu")
        slots = torch.arange(tokens).expand(len(lengths), -1)
        self.decoded = []
        for part, states in ((packing.keys, x[0]), (packing.values, x[1])):
            planes = part.codec.encode(states)
            part.store(pages, planes, slots)
            self.decoded.append(part.codec.from_space(part.codec.decode(planes)[..., None, :])[..., 0, :].double())
        self.pages = pages.to(DEVICE)

    def expect(self, q: Tensor, starts: Tensor, stops: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention of ``q [batch, q_heads, head_dim]`` to the decoded keys and values, in float64."""
        keys, values = (part.to(DEVICE) for part in self.decoded)
        queries = q.double().unflatten(1, (self.layout.kv_heads, -1))
        logits = torch.einsum("bhgd,bthd->bhgt", queries, keys) * scaling
        slots = torch.arange(keys.shape[1], device=DEVICE)
        seen = (slots >= starts[:, None]) & (slots < stops[:, None])
        logits.masked_fill_(~seen[:, None, None], -torch.inf)
        lse = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None])
        return torch.einsum("bhgt,bthd->bhgd", weights, values).flatten(1, 2), lse.flatten(1)


def attend(
    key: RotatedCodebook, value: RotatedCodebook, lengths: list[int], group: int, starts: list[int] | None = None
):
    """(ours, expected) for random queries over random pages: each an output and a log-sum-exp."""
    filled = Filled(key, value, lengths)
    shape = (len(lengths), key.kv_heads * group, key.head_dim)
    q = (torch.randn(shape, generator=torch.Generator().manual_seed(9)) * 3).to(DEVICE)
    bounds = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (starts or [0] * len(lengths), lengths)]
    arguments = (*bounds, key.head_dim**-0.5)
    ours = BitPlaneAttention(filled.layout, DEVICE, splits=2)(q, filled.pages, *arguments)
    return ours, filled.expect(q, *arguments)


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    # 15 bits of query and probabilities: a codebook or a norm that is off by one step misses this by far
    assert (ours[0] - expected[0]).norm() <= 3e-4 * expected[0].norm()
    assert (ours[1] - expected[1]).abs().max() <= 2e-3


def log_norms(format: RotatedCodebook, bits: int) -> RotatedCodebook:
    """The format with log norms of ``bits`` bits over 8 octaves."""
    norm = LogNorm(-4.0, 8.0 / 2**bits, bits)
    heads = (
        dataclasses.replace(head, groups=tuple(dataclasses.replace(group, norm=norm) for group in head.groups))
        for head in format.heads
    )
    return dataclasses.replace(format, heads=tuple(heads))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (tensor_format([EXACT] * 2, unit=2), values_of(2)),
        (tensor_format([[5, 3, 2, 1]], unit=20), tensor_format([[4, 3, 2, 2]], unit=20, seed=9)),
        (log_norms(tensor_format([[8, 7, 4, 2]], unit=16), 6), log_norms(values_of(1, 64, 4), 6)),
        (tensor_format([[4, 3, 3, 2]], unit=64), values_of(1, 256, 5)),
    ],
    ids=["exact", "80", "64 log", "256"],
)
def test_pages_give_back_what_is_stored_whatever_was_there(key: RotatedCodebook, value: RotatedCodebook) -> None:
    layout = BitPlaneLayout(key, value)
    packing, pages = BitPlanePacking(layout, "cpu"), layout.allocate(2, 150, "cpu")
    generator = torch.Generator().manual_seed(1)
    pages.random_(0, 256, generator=generator)  # fp16 norms that are no numbers among them
    slots, stored = torch.arange(150).expand(2, -1), []
    for part in (packing.keys, packing.values):
        planes = part.codec.encode(torch.randn(2, 150, key.kv_heads, key.head_dim, generator=generator))
        part.store(pages, planes, slots)
        stored.append((part, planes))
    for part, planes in stored:
        assert all(torch.equal(*pair) for pair in zip(part.load(pages, 150), planes, strict=True))


def test_a_token_is_stored_without_touching_its_neighbours() -> None:
    layout = BitPlaneLayout(tensor_format([EXACT], unit=2), values_of(1))
    part, pages = BitPlanePacking(layout, "cpu").keys, layout.allocate(1, 256, "cpu")
    planes = part.codec.encode(torch.randn(1, 256, 1, 128, generator=torch.Generator().manual_seed(2)))
    before = part.load(pages, 256)
    for slot in (130, 7, 255, 129, 7):
        token = tuple(plane[:, slot : slot + 1] for plane in planes)
        part.store(pages, token, torch.tensor([[slot]]))
    for found, plane, empty in zip(part.load(pages, 256), planes, before, strict=True):
        assert all(torch.equal(found[:, slot], plane[:, slot]) for slot in (7, 129, 130, 255))
        assert torch.equal(found[:, 8:129], empty[:, 8:129])


def test_an_exact_allocation_costs_a_few_percent_of_padding() -> None:
    key, value = tensor_format([EXACT] * 2, unit=2), values_of(2)
    exact = (key.bits_per_token + value.bits_per_token) / 8
    assert exact <= BitPlaneLayout(key, value).bytes_per_token <= 1.03 * exact


def test_levels_split_into_two_signed_bytes_without_loss() -> None:
    books = [codebook(32, bits) for bits in range(1, 9)]
    for book in [*books, Codebook(2, (-2047, -3, 5, 2047), 1.0), Codebook(4, tuple(range(16)), 0.5)]:
        high, low, scale = split_levels(book)
        assert all(-128 <= part < 128 for part in (*high, *low))
        exact = [book.scale * level for level in book.levels]
        assert [scale * (a + b / 16) for a, b in zip(high, low, strict=True)] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (tensor_format([[3] * 4], unit=128), tensor_format([[3] * 4], unit=128), "head_dim 512"),
        (tensor_format([[3] * 4]), tensor_format([[3] * 4] * 2), "differ in KV heads"),
    ],
)
def test_formats_that_no_page_holds_are_refused_with_the_reason(key, value, reason: str) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        BitPlaneLayout(key, value)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_head_dim_attends_like_the_reference(dim: int) -> None:
    widths = [5] * 2 + [4] * 5 + [3] * 6 + [2] * (dim // 2 - 13)
    assert_close(*attend(tensor_format([widths], unit=2), values_of(1, dim), [45], 3))


@pytest.mark.parametrize("bits", range(1, 9))
def test_any_code_width_attends_like_the_reference(bits: int) -> None:
    assert_close(*attend(tensor_format([[bits] * 2], unit=32), values_of(1, 64, bits), [33], 1))


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
def test_any_group_of_query_heads_attends_like_the_reference(group: int) -> None:
    assert_close(*attend(tensor_format([EXACT], unit=2), values_of(1), [40], group))


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
def test_pages_need_not_be_full(length: int) -> None:
    assert_close(*attend(tensor_format([[5, 3, 2, 2]], unit=16), values_of(1, 64), [length], 4))


def test_every_head_has_an_allocation_of_its_own() -> None:
    key = tensor_format([[8, 4, 2, 1], [3, 3, 3, 3], [6, 5, 1, 1]], unit=16)
    value = tensor_format([[4] * 4, [3, 2, 2, 2], [1] * 4], unit=16, seed=9)
    assert_close(*attend(key, value, [70], 2))


def test_sequences_of_a_batch_have_lengths_and_padding_of_their_own() -> None:
    key = tensor_format([EXACT] * 2, unit=2)
    assert_close(*attend(key, values_of(2), [200, 131, 40], 2, starts=[0, 129, 7]))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_log_norms_of_any_width_attend_like_the_reference(bits: int) -> None:
    key, value = log_norms(tensor_format([[5, 3, 2, 2]], unit=16), bits), log_norms(values_of(1, 64), bits)
    assert_close(*attend(key, value, [140], 2))


@pytest.mark.parametrize("log", [True, False])
def test_values_with_several_norms_attend_like_the_reference(log: bool) -> None:
    key, value = values_of(2, 64, 4), tensor_format([[5, 3, 2, 1], [3] * 4], unit=16, seed=9, log_norms=log)
    assert_close(*attend(log_norms(key, 8) if log else key, value, [140], 3))


def test_codebooks_need_not_be_symmetric() -> None:
    lopsided = Codebook(4, tuple(level + 3 for level in range(-200, 200, 25)), 0.001)
    head = HeadFormat((Group(tuple(range(64)), HaarRotation(64, 0), (Segment(64, lopsided),)),))
    assert_close(*attend(RotatedCodebook((head,)), RotatedCodebook((head,)), [33], 2))


def test_tokens_attended_elsewhere_are_merged_in() -> None:
    filled = Filled(tensor_format([EXACT], unit=2), values_of(1), [200])
    q = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    bound = lambda token: torch.tensor([token], dtype=torch.int32, device=DEVICE)  # noqa: E731
    attention = BitPlaneAttention(filled.layout, DEVICE)
    extra = Partial(*attention(q, filled.pages, bound(0), bound(50), 0.1))
    whole = attention(q, filled.pages, bound(50), bound(200), 0.1, extra)
    assert_close(whole, filled.expect(q, bound(0), bound(200), 0.1))


def test_a_sequence_without_tokens_has_no_output_and_no_mass() -> None:
    filled = Filled(tensor_format([[5, 3]], unit=32), values_of(1, 64), [100])
    none = torch.full((1,), 100, dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 2, 64, device=DEVICE)
    out, lse = BitPlaneAttention(filled.layout, DEVICE)(q, filled.pages, none, none, 1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()


def test_heads_and_the_order_of_widths_share_one_compiled_kernel() -> None:
    layers = ([EXACT], [EXACT[::-1]] * 2, [[*EXACT[1:], 5], EXACT] * 4)
    variants = [
        BitPlaneAttention(BitPlaneLayout(tensor_format(list(heads), unit=2), values_of(len(heads))), "cpu").variant(8)
        for heads in layers
    ]
    assert all(variant == variants[0] for variant in variants)


@gpu
def test_a_captured_graph_follows_lengths_that_change_on_the_device() -> None:
    filled = Filled(tensor_format([EXACT] * 2, unit=2), values_of(2), [700])
    q = torch.randn(1, 4, 128, device=DEVICE)
    starts, stops = (torch.tensor([value], dtype=torch.int32, device=DEVICE) for value in (0, 100))
    attention = BitPlaneAttention(filled.layout, DEVICE)
    attention(q, filled.pages, starts, stops, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, filled.pages, starts, stops, 0.1)
    stops.fill_(613)
    graph.replay()
    assert_close(captured, filled.expect(q, starts, stops, 0.1))


@triton.jit
def dump(
    page, ints, levels, key_high, key_low, value_high, value_low, SLABS: tl.constexpr, WIDE_SLABS: tl.constexpr,
    DUAL_SLABS: tl.constexpr, SIGNED_SLABS: tl.constexpr, VALUE_KIND: tl.constexpr, TABLE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    key_at, value_at = tl.load(ints) * 128, tl.load(ints + 1) * 128
    token, column = tl.arange(0, 128)[:, None], tl.arange(0, 32)[None, :]
    ROWS: tl.constexpr = 32 * SLABS
    high, low = bit_plane_operands.load_keys(
        page + key_at, ints, levels, SLABS, WIDE_SLABS, DUAL_SLABS, SIGNED_SLABS, ASSEMBLY
    )
    for slab in tl.static_range(SLABS):
        tl.store(key_high + token * ROWS + 32 * slab + column, high[slab])
        if slab < WIDE_SLABS:
            tl.store(key_low + token * ROWS + 32 * slab + column, low[slab])
    planes = bit_plane_operands.value_planes(ints, VALUE_KIND)
    words = bit_plane_operands.value_words(page + value_at, planes, ROWS, VALUE_KIND, ASSEMBLY)
    tables = ints + bit_plane_operands._HEADER + 36 * SLABS + 2 * ROWS
    a, b = bit_plane_operands.load_values(words, planes, tables, levels + TABLE, ROWS, VALUE_KIND, ASSEMBLY)
    at = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(value_high + at, a)
    if VALUE_KIND == 8:
        tl.store(value_low + at, b)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ([8, 7, 6, 5] * 16, 3),
        (EXACT, 4),
        ([4, 3, 2, 1] * 16, 6),
        ([2] * 63 + [1], 1),
        ([3] * 31 + [4] * 33, 2),
    ],
    ids=["wide", "exact", "four", "two", "dual"],
)
def test_both_unpackers_give_every_code_the_level_of_the_codebook(key: list[int], value: int) -> None:
    filled = Filled(tensor_format([key], unit=2), values_of(1, 128, value), [128])
    layout = filled.layout
    tables = BitPlaneAttention(layout, DEVICE).tables
    kinds = {"SLABS": layout.slabs, "WIDE_SLABS": layout.wide, "DUAL_SLABS": layout.dual, "SIGNED_SLABS": layout.signed}
    found = []
    for assembly in (False, True) if DEVICE == "cuda" else (False,):
        out = torch.zeros(4, 128, 128, dtype=torch.int8, device=DEVICE)
        dump[(1,)](filled.pages[0, 0], tables.ints[0], tables.levels[0], *out, **kinds, VALUE_KIND=layout.value_kind,
                   TABLE=tables.table, ASSEMBLY=assembly)  # fmt: skip
        found.append(out)
    assert all(torch.equal(out, found[0]) for out in found)
    assert layout.value_kind in (NARROW, SIGNED, WIDE)
    assert found[0][0].any()
    assert found[0][2].any()
