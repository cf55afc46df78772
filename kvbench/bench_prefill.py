"""Prefill benchmarks: attention over packed pages and a chunk against FlashAttention-2, and its peak memory.

A prompt is attended to in chunks, as a model does it: a chunk's queries see the packed tokens before it and the chunk
itself, in full precision (``exact``) or as packed (``quantized``). The baseline is one causal call of PyTorch's
FlashAttention-2 over the whole prompt, in fp16. Encoding is timed apart (:func:`kvbench.bench.time_encode`).
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.kernels.measure import measure
from kvbench.kernels.tile_attention import decode_codes
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_prefill import TilePrefill
from kvbench.kernels.tiles import DIM, TileLayout, matrices

SCALING = DIM**-0.5


def _random(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(seed))


def flash(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal FlashAttention-2 of ``q [batch, tokens, q_heads, 128]`` over keys and values of as many tokens."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True, scale=SCALING)
    return out.transpose(1, 2)


def in_chunks(
    prefill: TilePrefill, q: Tensor, pages: Tensor, own: tuple[Tensor, Tensor] | None, chunk: int
) -> Callable[[], None]:
    """A call that attends a whole prompt ``q [1, tokens, q_heads, 128]`` chunk by chunk; ``own`` None: as packed."""
    starts = torch.zeros(1, dtype=torch.int32, device=q.device)

    def attend() -> None:
        for first in range(0, q.shape[1], chunk):
            part = slice(first, first + chunk)
            mine = None if own is None else (own[0][:, part], own[1][:, part])
            prefill(q[:, part], pages, starts, first, SCALING, mine)

    return attend


def time_prefill_attention(
    layout: TileLayout, q_heads: int, device: str, tokens: int = 32768, chunk: int = 4096
) -> dict[str, float]:
    """Attention of a prompt of ``tokens`` in one layer, in milliseconds: FlashAttention-2, and over pages in chunks."""
    q = _random(device, 1, tokens, q_heads, DIM)
    keys, values = (_random(device, 1, tokens, layout.kv_heads, DIM, seed=seed) for seed in (1, 2))
    pages = layout.allocate(1, tokens, device)
    TileEncoder(layout, device)(keys, values, pages, torch.zeros(1, dtype=torch.int32, device=device))
    prefill = TilePrefill(layout, device)
    calls = {
        "flash_ms": lambda: flash(q, keys, values),
        "exact_ms": in_chunks(prefill, q, pages, (keys, values), chunk),
        "quantized_ms": in_chunks(prefill, q, pages, None, chunk),
    }
    times = {name: statistics.median(measure([call], device, samples=3, graph=False)) for name, call in calls.items()}
    return {"tokens": tokens, "chunk": chunk, **{name: 1e3 * value for name, value in times.items()}}


def prefill_peak(
    layout: TileLayout, q_heads: int, device: str, tokens: int = 524288, chunk: int = 8192
) -> dict[str, float]:
    """A whole prefill of one layer, chunk by chunk, encoding included: seconds, and the memory it took at its peak.

    ``beyond_packed_bytes`` is the peak less the pages: the chunk's queries, keys, values and output, and all scratch.
    """
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    pages = layout.allocate(1, tokens, device)
    encoder, prefill = TileEncoder(layout, device), TilePrefill(layout, device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for first in range(0, tokens, chunk):
        q = _random(device, 1, chunk, q_heads, DIM, seed=first)
        own = tuple(_random(device, 1, chunk, layout.kv_heads, DIM, seed=first + part) for part in (1, 2))
        encoder(own[0], own[1], pages, starts + first)
        prefill(q, pages, starts, first, SCALING, (own[0], own[1]))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - base
    return {
        "tokens": tokens,
        "chunk": chunk,
        "seconds": time.perf_counter() - begin,
        "packed_bytes": pages.nbytes,
        "beyond_packed_bytes": peak - pages.nbytes,
    }


def check_prefill_accuracy(layout: TileLayout, q_heads: int, device: str, tokens: int = 3000) -> dict[str, float]:
    """Relative errors, against float64 on the reference's decoded values, of packed prefill attention and of
    FlashAttention-2 in fp16 on the same values."""
    inputs = [_random(device, 1, tokens, layout.kv_heads, DIM, seed=seed) for seed in (1, 2)]
    q = _random(device, 1, tokens, q_heads, DIM)
    pages, starts = layout.allocate(1, tokens, device), torch.zeros(1, dtype=torch.int32, device=device)
    TileEncoder(layout, device)(inputs[0], inputs[1], pages, starts)
    parts = layout.unpack(pages[0], tokens)
    decoded = []
    for format, codes, norms in zip((layout.key_format, layout.value_format), parts[::2], parts[1::2], strict=True):
        codec = format.codec(device)
        x = torch.einsum("hcd,thc->thd", matrices(format)[1].to(device).double(), decode_codes(codec, codes, norms))
        centre = codec.centre(torch.arange(tokens, device=device))
        decoded.append(x[None] if centre is None else (x + centre)[None])
    queries = q.double().unflatten(2, (layout.kv_heads, -1))
    logits = torch.einsum("bqhgd,bthd->bhgqt", queries, decoded[0]) * SCALING
    logits = logits.masked_fill(torch.ones(tokens, tokens, device=device).triu(1).bool(), -torch.inf)
    exact = torch.einsum("bhgqt,bthd->bqhgd", logits.softmax(-1), decoded[1]).flatten(2, 3)
    out, lse = TilePrefill(layout, device, tile_tokens=1024)(q, pages, starts, 0, SCALING)
    half = flash(q, decoded[0].half(), decoded[1].half())
    exact_lse = logits.logsumexp(-1).permute(0, 3, 1, 2).flatten(2, 3)
    return {
        "packed_error": float((out - exact).norm() / exact.norm()),
        "fp16_error": float((half - exact).norm() / exact.norm()),
        "lse_error": float((lse - exact_lse).abs().max()),
    }
