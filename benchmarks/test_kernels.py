"""The kernels under pytest-benchmark: ``pytest benchmarks --benchmark-only``; without it they are skipped.

The buffers, the CUDA graph and the formats are those of ``kvbench bench kernels``, which is what results are made with;
here they are for comparing one change with the commit before (``--benchmark-autosave``, ``--benchmark-compare``). A
round on a GPU is a replay of a graph of ``extra_info["calls"]`` calls. Without a GPU the torch reference is timed.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from kvbench.bench import ALLOCATIONS, DIM, GEOMETRIES, Shape, layout_for, random_pages
from kvbench.kernels.attention import attend_packed
from kvbench.kernels.fp16_attention import available, decode
from kvbench.kernels.measure import copies, replayed
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.kernels.tile_attention import TileAttention
from kvbench.kernels.tile_encode import TileEncoder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
SHAPES = [Shape(geometry, batch, context) for geometry in GEOMETRIES for batch in (1, 8) for context in (4096, 131072)]
SCALING = DIM**-0.5

Calls = Sequence[Callable[[], object]]


def timed(benchmark: BenchmarkFixture, calls: Calls, nbytes: int) -> None:
    """Time ``calls`` which each read ``nbytes`` of their own."""
    benchmark.extra_info["bytes"] = nbytes
    if DEVICE == "cpu":
        benchmark.pedantic(calls[0], rounds=5, warmup_rounds=1)
        return
    replay, count = replayed(calls)
    benchmark.extra_info["calls"] = count

    def work() -> None:
        replay()
        torch.cuda.synchronize()

    benchmark.pedantic(work, rounds=15, warmup_rounds=2)


def name(shape: Shape) -> str:
    return f"{shape.geometry}-b{shape.batch}-{shape.context // 1024}k"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_packed_decode_attention(benchmark: BenchmarkFixture, allocation: str, shape: Shape) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    layout = layout_for(allocation, shape.kv_heads)
    attention = TileAttention(layout, DEVICE)
    nbytes = shape.batch * -(-shape.context // 128) * layout.page_bytes
    starts = torch.zeros(shape.batch, dtype=torch.int32, device=DEVICE)
    stops = torch.full_like(starts, shape.context)
    sets = [
        (
            torch.randn(shape.batch, shape.q_heads, DIM, device=DEVICE, dtype=torch.float16, generator=generator),
            random_pages(layout, shape.batch, shape.context, DEVICE, generator),
        )
        for _ in range(copies(nbytes, DEVICE))
    ]
    timed(benchmark, [lambda q=q, p=p: attention(q, p, starts, stops, SCALING) for q, p in sets], nbytes)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("implementation", [name for name in available(DEVICE) if name != "torch-math"])
def test_fp16_decode_attention(benchmark: BenchmarkFixture, implementation: str, shape: Shape) -> None:
    new = lambda heads, *rest: torch.randn(shape.batch, heads, *rest, DIM, device=DEVICE, dtype=torch.float16)  # noqa: E731
    sets = [
        (new(shape.q_heads), new(shape.kv_heads, shape.context), new(shape.kv_heads, shape.context))
        for _ in range(copies(shape.fp16_bytes, DEVICE))
    ]
    timed(benchmark, [lambda s=s: decode(implementation, *s) for s in sets], shape.fp16_bytes)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("tokens", [1, 16384])
def test_encoding(benchmark: BenchmarkFixture, tokens: int, allocation: str, geometry: str) -> None:
    layout = layout_for(allocation, GEOMETRIES[geometry][1])
    encoder = TileEncoder(layout, DEVICE)
    pages = layout.allocate(1, tokens + 128, DEVICE)
    firsts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x = torch.randn(8, 1, tokens, layout.kv_heads, DIM, device=DEVICE, dtype=torch.float16)
    sets = list(zip(x[0::2], x[1::2], strict=True))
    timed(benchmark, [lambda k=k, v=v: encoder(k, v, pages, firsts) for k, v in sets], 2 * x[0].nbytes)


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_reference_decode_attention(benchmark: BenchmarkFixture, allocation: str) -> None:
    q_heads, kv_heads = GEOMETRIES["qwen2.5-3b"]
    layout, tokens = layout_for(allocation, kv_heads), 2048
    codecs = [RotatedCodebookCodec(format, DEVICE) for format in (layout.key_format, layout.value_format)]
    planes = [codec.encode(torch.randn(1, tokens, kv_heads, DIM, device=DEVICE)) for codec in codecs]
    query = torch.randn(1, 1, kv_heads, q_heads // kv_heads, DIM, device=DEVICE)
    calls = [lambda: attend_packed(query, *codecs, *planes, lambda start, stop: None, SCALING)]
    timed(benchmark, calls, int(tokens * layout.bytes_per_token))
