"""Encoding into tile pages in Triton, against the reference codec and the layout's own packing."""

import os

import pytest
import torch
from torch import Tensor

from .packed_formats import tensor_format

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
pytest.importorskip("triton")

from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tiles import TileLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def layout_of(keys: list[list[int]], value_bits: int, log_norms: bool) -> TileLayout:
    key = tensor_format(keys, log_norms=log_norms)
    return TileLayout(key, tensor_format([[value_bits] * 4] * len(keys), seed=50, log_norms=log_norms))


def vectors(batch: int, tokens: int, heads: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, tokens, heads, 128, generator=generator) * 3).to(dtype).to(DEVICE)


def reference(layout: TileLayout, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Codes and stored norms of one sequence's keys and values by the reference codec."""
    parts = []
    for format, x in ((layout.key_format, keys), (layout.value_format, values)):
        codec = format.codec()
        codes, norms = codec.encode(x.float().cpu())
        parts += [codec.layout.unpack(codes).reshape(*x.shape), norms]
    return tuple(parts)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    """Codes and norms agree but for ties: at most one code in ten thousand, by one step."""
    for a, b in zip(ours, theirs, strict=True):
        off = (a.cpu().float() - b.float()).abs()
        if a.dtype == torch.float16:
            off = off / b.float().abs().clamp_min(1e-3)
            assert off.max() < 2e-3
        else:
            assert off.max() <= 1
            assert (off > 0).float().mean() <= 1e-4


@pytest.mark.parametrize("log_norms", [True, False])
@pytest.mark.parametrize(
    ("keys", "value_bits"), [([[3] * 4, [4, 3, 3, 2]], 3), ([[4, 2, 1, 1]], 2), ([[4] * 4], 4), ([[4, 4, 3, 1]], 3)]
)
def test_prefill_writes_the_reference_codes_and_norms(keys: list[list[int]], value_bits: int, log_norms: bool) -> None:
    layout = layout_of(keys, value_bits, log_norms)
    pages = layout.allocate(1, 150, DEVICE)
    k, v = vectors(1, 150, len(keys)), vectors(1, 150, len(keys), seed=1)
    k[0, 5], v[0, 6] = 0, 0
    TileEncoder(layout, DEVICE)(k, v, pages, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert_same(layout.unpack(pages[0].cpu(), 150), reference(layout, k[0], v[0]))


def test_a_second_chunk_starts_anywhere_in_a_page_and_leaves_the_first_alone() -> None:
    layout = layout_of([[4, 3, 3, 2]], 3, True)
    pages = layout.allocate(2, 200, DEVICE)
    k, v = vectors(2, 180, 1), vectors(2, 180, 1, seed=1)
    encoder = TileEncoder(layout, DEVICE)
    firsts = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE)
    encoder(k[:, :77], v[:, :77], pages, firsts)
    encoder(k[:, 77:], v[:, 77:], pages, firsts + 77)
    for row, first in enumerate((0, 20)):
        ours = tuple(part[first:] for part in layout.unpack(pages[row].cpu(), first + 180))
        assert_same(ours, reference(layout, k[row], v[row]))


@pytest.mark.parametrize("slot", [0, 15, 16, 127, 128])
def test_appending_a_token_changes_its_slot_alone(slot: int) -> None:
    layout = layout_of([[3] * 4], 3, True)
    pages = torch.randint(0, 256, (1, 2, layout.page_bytes), dtype=torch.uint8, device=DEVICE)
    before = layout.unpack(pages[0].cpu(), 256)
    k, v = vectors(1, 1, 1), vectors(1, 1, 1, seed=1)
    TileEncoder(layout, DEVICE)(k, v, pages, torch.tensor([slot], dtype=torch.int32, device=DEVICE))
    after = layout.unpack(pages[0].cpu(), 256)
    assert_same(tuple(part[slot : slot + 1] for part in after), reference(layout, k[0], v[0]))
    others = torch.arange(256) != slot
    assert all(torch.equal(a[others], b[others]) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_encoded_as_their_exact_values(dtype: torch.dtype) -> None:
    layout = layout_of([[3] * 4], 3, True)
    pages = layout.allocate(1, 40, DEVICE)
    k, v = vectors(1, 40, 1, dtype), vectors(1, 40, 1, dtype, seed=1)
    TileEncoder(layout, DEVICE)(k, v, pages, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    assert_same(layout.unpack(pages[0].cpu(), 40), reference(layout, k[0], v[0]))


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_raises_the_flag_and_spreads_nowhere(bad: float) -> None:
    layout = layout_of([[3] * 4], 3, True)
    encoder = TileEncoder(layout, DEVICE)
    pages, clean = layout.allocate(1, 10, DEVICE), layout.allocate(1, 10, DEVICE)
    k, v = vectors(1, 10, 1), vectors(1, 10, 1, seed=1)
    firsts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    encoder(k, v, clean, firsts)
    assert int(encoder.flag) == 0
    broken = k.clone()
    broken[0, 4, 0, 7] = bad
    encoder(broken, v, pages, firsts)
    assert int(encoder.flag) == 1
    others = torch.arange(10) != 4
    ours, theirs = layout.unpack(pages[0].cpu(), 10), layout.unpack(clean[0].cpu(), 10)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("keys", "value_bits"), [([[3] * 4, [4, 3, 3, 2]], 3), ([[4] * 4], 4), ([[4, 4, 3, 1]], 2)])
@pytest.mark.parametrize("log_norms", [True, False])
def test_appended_tokens_have_the_codes_of_a_prompt(keys: list[list[int]], value_bits: int, log_norms: bool) -> None:
    layout = layout_of(keys, value_bits, log_norms)
    k, v = vectors(2, 3, len(keys), torch.float16), vectors(2, 3, len(keys), torch.float16, seed=1)
    pages, encoder = layout.allocate(2, 300, DEVICE), TileEncoder(layout, DEVICE)
    firsts = torch.tensor([126, 7], dtype=torch.int32, device=DEVICE)
    for token in range(3):
        encoder(k[:, token : token + 1], v[:, token : token + 1], pages, firsts + token)
    for row, first in enumerate((126, 7)):
        ours = tuple(part[first:] for part in layout.unpack(pages[row].cpu(), first + 3))
        assert_same(ours, reference(layout, k[row], v[row]))


def test_layers_of_any_mixed_allocation_share_compiled_kernels() -> None:
    layers = ([[4, 3, 3, 2]], [[4, 4, 2, 2], [3, 3, 3, 3]], [[4, 4, 3, 1], [4, 3, 3, 2]] * 4)
    variants = [TileEncoder(layout_of(keys, 3, True), DEVICE).variant for keys in layers]
    assert all(variant == variants[0] for variant in variants)


@gpu
def test_a_prompt_has_the_reference_codes_but_for_a_few_ties_in_a_million() -> None:
    layout = layout_of([[3] * 4, [4, 3, 3, 2]], 3, True)
    k, v = vectors(1, 4000, 2, torch.bfloat16), vectors(1, 4000, 2, torch.bfloat16, seed=1)
    pages = layout.allocate(1, 4000, DEVICE)
    TileEncoder(layout, DEVICE)(k, v, pages, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    ours, theirs = layout.unpack(pages[0].cpu(), 4000), reference(layout, k[0], v[0])
    assert all(((a.int() - b.int()).abs() > 0).float().mean() <= 1e-5 for a, b in zip(ours, theirs, strict=True))


@gpu
def test_pages_past_2_to_the_31_bytes_are_written_where_they_belong() -> None:
    layout = layout_of([[3] * 4], 3, True)
    first = 128 * (2**31 // layout.page_bytes + 3) + 5
    pages = layout.allocate(1, first + 300, DEVICE)
    k, v = vectors(1, 200, 1), vectors(1, 200, 1, seed=1)
    firsts, encoder = torch.tensor([first], dtype=torch.int32, device=DEVICE), TileEncoder(layout, DEVICE)
    encoder(k[:, :199], v[:, :199], pages, firsts)
    encoder(k[:, 199:], v[:, 199:], pages, firsts + 199)
    ours = tuple(part[5:205] for part in layout.unpack(pages[0, first // 128 :].cpu(), 256))
    assert_same(ours, reference(layout, k[0], v[0]))
    assert not pages[0, : first // 128].any()
