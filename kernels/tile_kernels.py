# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels that are launched for decode attention over tile pages; one query token a sequence.

:func:`rotate_query`, :func:`attend` in splits, :func:`merge`, and :func:`rotate_output` where the output's rotation is
not folded into the model's weights. Lengths are read on the device: a captured graph stays right as the cache grows.
All KV heads of a layer run in one launch.

With DEPENDENT each kernel starts before the one it depends on has ended (programmatic dependent launch) and waits for
it after reading what does not depend on it. Attention lets the merge start EARLY, at once, where the device has room
for both, else LATE, after its loop: merging blocks that come in early take the place of blocks that have work.

A block of the rotations serves BLOCK query heads of a KV head: one where there are few, which spreads them over the
device, all of them (16) where there are many, which reads a rotation once for all.

Limits: head_dim 128, at most 16 query heads a KV head, NVIDIA GPUs with compute capability 8.0 or higher for the
assembly path (tuned on 9.0); the plain path runs in the interpreter. Tested: tests/kernels/test_triton_tiles.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.split_kernels import EARLY, bounds, merge_splits, merged_with, natural, share_of
from kvbench.kernels.tile_pages import attend_pages


@triton.jit
def _rotated(x, turn, AXIS: tl.constexpr):
    """Rows ``x [BLOCK, n]`` times a matrix ``turn``, whose dimension AXIS is summed over, in float32."""
    if x.shape[0] == 1:
        return tl.sum(turn * (x if AXIS == 1 else tl.trans(x)), axis=AXIS)[None, :]
    return tl.dot(x, tl.trans(turn) if AXIS == 1 else turn, input_precision="tf32x3")


@triton.jit
def rotate_heads(row, first, quarter, io, kv_heads, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """What a block of :func:`rotate_query` does with query heads ``first .. first + BLOCK``; ``io``: its arguments from
    ``q`` on."""
    q, rotation, query, group, q_batch_stride, q_head_stride = io
    sequence, head = row // kv_heads, row % kv_heads
    g = first + tl.arange(0, BLOCK)
    d, c = tl.arange(0, 128), quarter * 32 + tl.arange(0, 32)
    turn = tl.load(rotation + head * 16384 + c[:, None] * 128 + d[None, :])
    mine = (g < group)[:, None]
    source = q + sequence.to(tl.int64) * q_batch_stride + (head * group + g[:, None]).to(tl.int64) * q_head_stride
    x = tl.load(source + d[None, :], mask=mine & (d >= 0)[None, :], other=0.0).to(tl.float32)
    target = query + (row * HEADS + g[:, None]).to(tl.int64) * 128
    tl.store(target + c[None, :], _rotated(x, turn, 1), mask=mine & (c >= 0)[None, :])


@triton.jit
def rotate_query(
    q,
    rotation,
    query,
    group,
    q_batch_stride,
    q_head_stride,
    kv_heads,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group / BLOCK, 4): 32 rotated coordinates of BLOCK query heads.

    q ``[batch, kv_heads * group, 128]``; rotation float32 ``[kv_heads, coordinate, dim]``; query float32 ``[batch *
    kv_heads, HEADS, 128]``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    io = (q, rotation, query, group, q_batch_stride, q_head_stride)
    rotate_heads(tl.program_id(0), tl.program_id(1) * BLOCK, tl.program_id(2), io, kv_heads, HEADS, BLOCK)


@triton.jit
def attend(
    query,
    group,
    scaling,
    pages,
    ints,
    floats,
    places,
    levels,
    starts,
    stops,
    partial,
    partial_lse,
    kv_heads,
    page_bytes,
    batch_stride,
    centre,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_TEMPLATE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Grid (splits, batch * kv_heads): a split of one sequence's pages for one KV head.

    query float32 ``[batch * kv_heads, HEADS, 128]``, rotated; ``scaling`` includes log2(e); pages uint8; starts,
    stops int32 ``[batch]``: the tokens attended; partial float16 ``[batch * kv_heads, HEADS, splits, 128]``;
    partial_lse float32 ``[batch * kv_heads, HEADS, splits]``, base 2. ``centre``, with CENTRE: q as it came ``[batch,
    kv_heads * group, 128]`` and its strides, origins int32 ``[batch]`` (the slot of position 0), and the tables of
    :meth:`kvbench.kernels.tile_centre.TileCentre.reading`.
    """
    if DEPENDENT == EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence, head = row // kv_heads, row % kv_heads
    begin, count, start, stop = bounds(starts, stops, sequence)
    share = share_of(count, splits)
    first = begin + split * share
    last = tl.minimum(first + share, begin + count)
    pages += sequence.to(tl.int64) * batch_stride
    if first < last:
        row64 = row.to(tl.int64) * HEADS
        io = (
            query + row64 * 128,
            group,
            scaling,
            pages,
            ints + head * 16,
            floats + head * 16,
            places + head * 32,
            levels + head * 128,
            partial + (row64 * splits + split) * 128,
            partial_lse + row64 * splits + split,
            splits,
            page_bytes,
        )
        ours = centre
        if CENTRE:
            q, q_batch_stride, q_head_stride, origins, dims, vectors, turns, half, table = centre
            q += sequence.to(tl.int64) * q_batch_stride + (head * group).to(tl.int64) * q_head_stride
            origin = tl.load(origins + sequence)
            ours = (q, q_head_stride, origin, dims, vectors + head * 256, turns, half, table)
        attend_pages(
            io,
            (first, last, start, stop),
            ours,
            HEADS,
            WORDS,
            VALUE_TEMPLATE,
            VALUE_WORDS,
            KEY_LOG,
            VALUE_LOG,
            STAGES,
            ASSEMBLY,
            DEPENDENT,
            CENTRE,
        )


@triton.jit
def _finish(result, log_total, extra, extra_lse, out, lse, target, d, mine, first, EXTRA: tl.constexpr):
    """Merge outputs ``result [BLOCK, columns d]`` of query heads ``target`` with tokens attended elsewhere, and store
    them; ``first``: whether this block is the one that stores the log-sum-exp."""
    at = target[:, None] * 128 + d[None, :]
    inside = mine[:, None] & (d >= 0)[None, :]
    if EXTRA:
        other = tl.load(extra_lse + target, mask=mine, other=float("-inf"))
        there = tl.load(extra + at, mask=inside, other=0.0).to(tl.float32)
        result, log_total = merged_with(result, log_total, there, other)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + target, log_total, mask=mine & first)


@triton.jit
def merge(
    partial,
    partial_lse,
    value_scale,
    starts,
    stops,
    extra,
    extra_lse,
    out,
    lse,
    kv_heads,
    splits,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    EXTRA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group, 4): a quarter of one query head's output, merged over the splits.

    ``out [batch, kv_heads * group, 128]`` stays in the values' rotated space; ``lse`` is natural. ``extra`` and
    ``extra_lse``, of the same shapes (float32 the latter), are a partial attention over other tokens. SPLITS: a power
    of two not below ``splits``.
    """
    row, g, quarter = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, head = row // kv_heads, row % kv_heads
    d = quarter * 32 + tl.arange(0, 32)
    # constants first: with a dependent launch they arrive while the splits are still running
    scale = tl.load(value_scale + head) * 128.0
    _begin, count, _start, _stop = bounds(starts, stops, sequence)
    share = share_of(count, splits)
    used = (count + share - 1) // share
    base = (row * HEADS + g).to(tl.int64) * splits
    partial += base * 128
    partial_lse += base
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    sums, total, peak = merge_splits(partial, partial_lse, used, d, 128, SPLITS, CHUNK, STAGES)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.sum(sums, axis=0) * (scale / tl.maximum(total, 1e-30))
    log_total = natural(total, peak)
    one = tl.zeros((1,), tl.int64)
    target = one + row * tl.num_programs(1) + g
    _finish(
        result[None, :],
        one.to(tl.float32) + log_total,
        extra,
        extra_lse,
        out,
        lse,
        target,
        d,
        one == 0,
        quarter == 0,
        EXTRA,
    )


@triton.jit
def rotate_output(
    merged,
    merged_lse,
    rotation,
    extra,
    extra_lse,
    out,
    lse,
    kv_heads,
    group,
    BLOCK: tl.constexpr,
    EXTRA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group / BLOCK, 4): a quarter of BLOCK query heads' outputs, out of the rotated space.

    ``merged`` float32 and ``merged_lse`` as :func:`merge` writes them; rotation float32 ``[kv_heads, coordinate,
    dim]``; ``extra``, ``out`` and their log-sum-exps as of :func:`merge`, but not in the rotated space.
    """
    row, quarter = tl.program_id(0), tl.program_id(2)
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mine = g < group
    c, d = tl.arange(0, 128), quarter * 32 + tl.arange(0, 32)
    turn = tl.load(rotation + (row % kv_heads) * 16384 + c[:, None] * 128 + d[None, :])
    target = (row * group + g).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    x = tl.load(merged + target[:, None] * 128 + c[None, :], mask=mine[:, None] & (c >= 0)[None, :], other=0.0)
    log_total = tl.load(merged_lse + target, mask=mine, other=float("-inf"))
    _finish(_rotated(x, turn, 0), log_total, extra, extra_lse, out, lse, target, d, mine, quarter == 0, EXTRA)
