# mypy: allow-untyped-defs, allow-incomplete-defs
"""A Triton kernel that reads memory and does nothing else: it measures the read ceiling."""

import triton
import triton.language as tl


@triton.jit
def read_all(source, sums, count, BLOCK: tl.constexpr):
    """Grid (blocks,): sum ``source`` int32 ``[count]`` in strides; ``count`` is a multiple of ``BLOCK``."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.int32)
    lane = tl.arange(0, BLOCK)
    for start in tl.range(block.to(tl.int64) * BLOCK, count, blocks * BLOCK, num_stages=1, loop_unroll_factor=4):
        total += tl.load(source + start + lane)
    tl.store(sums + block, tl.sum(total, axis=0))
