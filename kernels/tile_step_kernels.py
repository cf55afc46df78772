# mypy: allow-untyped-defs, allow-incomplete-defs
"""The first launch of a decode step over tile pages, in Triton: the new token is stored and the query is rotated.

Neither needs the other and each is one round trip to memory, so they share a launch: some blocks do what those of
:func:`kvbench.kernels.tile_encode_kernels.append` do, the others what those of
:func:`kvbench.kernels.tile_kernels.rotate_query` do. Attention waits for both.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_encode_kernels import append_token
from kvbench.kernels.tile_kernels import rotate_heads


@triton.jit
def append_and_rotate(
    keys,
    values,
    rotations,
    backs,
    thresholds,
    entries,
    shares,
    norms,
    offsets,
    pages,
    firsts,
    flag,
    centre,
    kv_heads,
    page_bytes,
    batch_stride,
    key_strides,
    value_strides,
    q,
    rotation,
    query,
    group,
    q_batch_stride,
    q_head_stride,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    RUNS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    ANY_WIDE: tl.constexpr,
    CENTRE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (2 * kv_heads + kv_heads * (group / BLOCK) * 4, batch); arguments as of the two kernels."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    block, sequence = tl.program_id(0), tl.program_id(1)
    if block < 2 * kv_heads:
        append_token(
            block,
            sequence,
            (keys, values, rotations, backs, thresholds, entries, shares, norms, offsets, pages, firsts, flag, centre),
            (kv_heads, page_bytes, batch_stride, key_strides, value_strides),
            KEY_WORDS,
            VALUE_WORDS,
            RUNS,
            KEY_LOG,
            VALUE_LOG,
            ANY_WIDE,
            CENTRE,
            DEPENDENT,
        )
    else:
        block -= 2 * kv_heads
        parts = tl.cdiv(group, BLOCK) * 4  # of a KV head
        row = sequence * kv_heads + block // parts
        io = (q, rotation, query, group, q_batch_stride, q_head_stride)
        rotate_heads(row, block % parts // 4 * BLOCK, block % 4, io, kv_heads, HEADS, BLOCK)
