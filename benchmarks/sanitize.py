"""Launch every Triton kernel once on small shapes, for tools that watch a program's memory: ``make sanitize``.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python benchmarks/sanitize.py

Without its caching, PyTorch allocates each tensor on its own, so that a step past the end of one is seen. What is
computed is the tests' concern; here only that it is finite. Without a GPU the program runs in Triton's interpreter
(``TRITON_INTERPRET=1``), which shows that it works and no more.
"""

import torch
from torch import Tensor

from kvbench.bench import layout_for
from kvbench.bench_general import exact_layout
from kvbench.kernels import fp16_attention
from kvbench.kernels.attention import Partial
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_plane_packing import BitPlanePacking
from kvbench.kernels.read_kernel import read_all
from kvbench.kernels.tile_attention import NewToken, TileAttention
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_prefill import TilePrefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, Q_HEADS, DIM = 4, 8, 128
LENGTHS = (131, 5)  # tokens of two sequences: a full page and a bit, less than a page
TOKENS, SCALING = max(LENGTHS), DIM**-0.5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float16)


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def check(name: str, *results: Tensor) -> None:
    """Wait for what was launched and say so. Raises RuntimeError where a result is not finite."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if not all(torch.isfinite(result).all() for result in results):
        raise RuntimeError(f"{name} gave numbers that are not finite")
    print(f"{name}: done", flush=True)


def run_tiles(allocation: str) -> None:
    """Encode, append, attend with and without the output's rotation, merge further tokens, and prefill."""
    layout = layout_for(allocation, KV_HEADS)
    pages = layout.allocate(len(LENGTHS), TOKENS + 1, DEVICE)
    encoder, states = TileEncoder(layout, DEVICE), [random(2, TOKENS, KV_HEADS, DIM) for _ in range(2)]
    starts, stops = integers(3, 0), integers(*LENGTHS)
    encoder(*states, pages, integers(0, 0))
    token = [x[:, :1] for x in states]
    encoder(*token, pages, stops)
    check(f"{allocation}: encoding", pages)
    q = random(2, Q_HEADS, DIM)
    for rotate in (True, False):
        attention = TileAttention(layout, DEVICE, splits=2, rotate_output=rotate)
        extra = Partial(*attention(q, pages, starts, stops, SCALING))
        new = NewToken(encoder, *token, stops)
        results = attention(q, pages, starts, stops + 1, SCALING, extra, new)
        check(f"{allocation}: decode attention, rotate_output={rotate}", extra.out, extra.lse, *results)
    queries, prefill = random(2, 3, Q_HEADS, DIM), TilePrefill(layout, DEVICE)
    own = tuple(random(2, 3, KV_HEADS, DIM) for _ in range(2))
    check(f"{allocation}: prefill attention", *prefill(queries, pages, integers(3, 0), TOKENS, SCALING, own))


def run_bit_planes() -> None:
    """Store with the reference and attend, with and without further tokens to merge."""
    layout = exact_layout(KV_HEADS)
    pages, packing = layout.allocate(len(LENGTHS), TOKENS, DEVICE), BitPlanePacking(layout, DEVICE)
    slots = torch.arange(TOKENS, device=DEVICE).expand(len(LENGTHS), -1)
    for part in (packing.keys, packing.values):
        part.store(pages, part.codec.encode(random(2, TOKENS, KV_HEADS, DIM)), slots)
    attention, q = BitPlaneAttention(layout, DEVICE, splits=2), random(2, Q_HEADS, DIM)
    arguments = (pages, integers(3, 0), integers(*LENGTHS), SCALING)
    extra = Partial(*attention(q, *arguments))
    check("bit planes: decode attention", extra.out, extra.lse, *attention(q, *arguments, extra))


def run_fp16() -> None:
    """Append and attend, to all tokens and to spans."""
    k, v = random(2, 2, KV_HEADS, TOKENS, DIM)
    q, key, value = random(2, Q_HEADS, DIM), random(2, KV_HEADS, DIM), random(2, KV_HEADS, DIM)
    fp16_attention.append(key, value, k, v, integers(TOKENS - 1, 0))
    for shape in fp16_attention.TRITON_SHAPES:
        whole = fp16_attention.split_kv(shape, q, k, v)
        part = fp16_attention.split_kv(shape, q, k, v, (integers(3, 0), integers(*LENGTHS)))
        check(f"fp16: {shape}", whole, part)


def run_read() -> None:
    """Read, as the ceiling of the benchmarks is measured."""
    source, sums = integers(*[1] * 256), integers(0, 0)
    read_all[(2,)](source, sums, len(source), BLOCK=64)
    check("read", sums)


def main() -> None:
    torch.manual_seed(0)
    for allocation in ("blockgtq-k3v3", "cblockgtq-k2v2", "tqmse-k4v4"):
        run_tiles(allocation)
    run_bit_planes()
    run_fp16()
    run_read()


if __name__ == "__main__":
    main()
