"""Prefill attention over tile pages, against the reference codec's decoded values in float64."""

import os

import pytest
import torch
from torch import Tensor

from .packed_formats import tensor_format

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
pytest.importorskip("triton")

from kvbench.kernels.attention import Partial
from kvbench.kernels.tile_attention import decode_codes
from kvbench.kernels.tile_prefill import TilePrefill
from kvbench.kernels.tiles import SHARES, TileLayout, matrices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if DEVICE == "cuda" else torch.float32
SCALING = 0.06


def layout_of(templates: list[int], value_bits: int = 3, log_norms: bool = True) -> TileLayout:
    widths = [[int(digit) for digit in str(template)] for template in templates]
    key = tensor_format(widths, log_norms=log_norms)
    return TileLayout(key, tensor_format([[value_bits] * 4] * len(templates), seed=50, log_norms=log_norms))


class Sequences:
    """Packed random keys and values of a batch, and what they decode to: float64 ``[batch, tokens, kv_heads, 128]``."""

    def __init__(self, layout: TileLayout, batch: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        self.pages, decoded = layout.allocate(batch, tokens, "cpu"), []
        for row in range(batch):
            parts = []
            for format in (layout.key_format, layout.value_format):
                x = torch.randn(tokens, layout.kv_heads, 128, generator=generator)
                codec = format.codec()
                codes, norms = codec.encode(x)
                parts += [codec.layout.unpack(codes).reshape(x.shape), norms]
                turn = matrices(format)[1].double()
                rotated = decode_codes(codec, *parts[-2:])
                decoded.append(torch.einsum("hcd,thc->thd", turn, rotated))
            packed = layout.pack(*parts)
            self.pages[row, : len(packed)] = packed
        self.pages = self.pages.to(DEVICE)
        self.keys, self.values = torch.stack(decoded[::2]).to(DEVICE), torch.stack(decoded[1::2]).to(DEVICE)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def exact(q: Tensor, keys: Tensor, values: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of each sequence, in float64; NaN where a query sees no token."""
    queries, q_heads = q.shape[1:3]
    keys, values = (x.repeat_interleave(q_heads // x.shape[2], 2).double() for x in (keys, values))
    logits = torch.einsum("bqhd,bthd->bhqt", q.double(), keys) * SCALING
    slot = torch.arange(keys.shape[1], device=q.device)
    seen = (slot[None] <= slot[-queries:, None]) & (slot >= integers(starts)[:, None, None])
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    out = torch.einsum("bhqt,bthd->bqhd", logits.softmax(-1), values)
    return out, logits.logsumexp(-1).transpose(1, 2)


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    # decoded keys and values are rounded to fp16, and on a GPU queries and results too
    there = torch.isfinite(expected[1])
    out, reference = ours[0][there].double(), expected[0][there]
    assert (out - reference).norm() <= 1.2e-3 * reference.norm()
    assert (ours[1][there] - expected[1][there]).abs().max() <= 3e-3


@pytest.mark.parametrize("template", SHARES)
def test_every_template_is_attended_to_like_the_reference(template: int) -> None:
    layout = layout_of([template])
    cache, q = Sequences(layout, 1, 200), random(1, 60, 2, 128)
    ours = TilePrefill(layout, DEVICE)(q, cache.pages, integers([0]), 140, SCALING)
    assert_close(ours, exact(q, cache.keys, cache.values, [0]))


@pytest.mark.parametrize(("value_bits", "log_norms"), [(2, False), (4, True)])
def test_every_value_width_and_norm_code_is_attended_to_like_the_reference(value_bits: int, log_norms: bool) -> None:
    layout = layout_of([4332, 3333], value_bits, log_norms)
    cache, q = Sequences(layout, 1, 150), random(1, 30, 6, 128)
    ours = TilePrefill(layout, DEVICE)(q, cache.pages, integers([0]), 120, SCALING)
    assert_close(ours, exact(q, cache.keys, cache.values, [0]))


@pytest.mark.parametrize(("stop", "tokens"), [(0, 50), (1, 50), (128, 50), (300, 50), (200, 1)])
def test_a_chunk_sees_the_packed_past_and_its_own_tokens_in_full_precision(stop: int, tokens: int) -> None:
    layout = layout_of([3333])
    cache, q = Sequences(layout, 1, 400), random(1, tokens, 4, 128)
    own = random(1, tokens, 1, 128, seed=1), random(1, tokens, 1, 128, seed=2)
    ours = TilePrefill(layout, DEVICE, tile_tokens=128)(q, cache.pages, integers([0]), stop, SCALING, own)
    keys, values = (
        torch.cat([past[:, :stop], mine], 1) for past, mine in zip((cache.keys, cache.values), own, strict=True)
    )
    assert_close(ours, exact(q, keys, values, [0]))


@pytest.mark.parametrize("packed", [True, False])
def test_padding_is_seen_by_nobody(packed: bool) -> None:
    layout, starts = layout_of([3333]), [0, 131, 250, 300]
    cache, q = Sequences(layout, 4, 300), random(4, 100, 2, 128)
    own = None if packed else (cache.keys[:, 200:].to(DTYPE), cache.values[:, 200:].to(DTYPE))
    ours = TilePrefill(layout, DEVICE, tile_tokens=512)(q, cache.pages, integers(starts), 200, SCALING, own)
    assert torch.isfinite(ours[0]).all()
    assert_close(ours, exact(q, cache.keys, cache.values, starts))


def test_tokens_held_elsewhere_are_merged_in() -> None:
    layout = layout_of([3333])
    cache, q = Sequences(layout, 1, 260), random(1, 20, 2, 128)
    own = cache.keys[:, 240:].to(DTYPE), cache.values[:, 240:].to(DTYPE)
    logits = torch.einsum("bqhd,btd->bqht", q.double(), cache.keys[:, :50, 0]) * SCALING
    out = torch.einsum("bqht,btd->bqhd", logits.softmax(-1), cache.values[:, :50, 0])
    elsewhere = Partial(out.float(), logits.logsumexp(-1).float())
    prefill, start = TilePrefill(layout, DEVICE), integers([50])
    ours = prefill(q, cache.pages, start, 240, SCALING, own, extra=elsewhere)
    assert_close(ours, exact(q, cache.keys, cache.values, [0]))


def test_pages_that_are_too_few_are_refused() -> None:
    layout = layout_of([3333])
    q = random(1, 5, 2, 128)
    with pytest.raises(ValueError, match="pages hold 128 tokens a sequence, not 130"):
        TilePrefill(layout, DEVICE)(q, layout.allocate(1, 128, DEVICE), integers([0]), 125, SCALING)
