# mypy: allow-untyped-defs, allow-incomplete-defs
"""The Triton kernels that are launched for decode attention over tile pages; one query token a sequence.

Three launches: :func:`rotate_query`, :func:`attend` in splits, :func:`merge`. Lengths are read on the device: a
captured graph stays right as the cache grows. All KV heads of a layer run in one launch.

With DEPENDENT each kernel starts before the one it depends on has ended (programmatic dependent launch) and waits for
it after reading what does not depend on it. That pays where the device is nearly empty; in a full one, blocks that
come in early take the place of blocks that have work, and come in several to a multiprocessor.

Limits: head_dim 128, at most 16 query heads a KV head, NVIDIA GPUs with compute capability 8.0 or higher for the
assembly path (tuned on 9.0); the plain path runs in the interpreter. Tested: tests/kernels/test_triton_tiles.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_pages import NEVER, attend_pages

_KEY_CODES = tl.constexpr(9)  # the column of ``ints`` where a head's part of a page begins


@triton.jit
def _span(starts, stops, sequence, splits):
    """A sequence's bounds: its first page, pages, pages a split, and the tokens attended."""
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    begin = start // 128
    count = tl.maximum((stop + 127) // 128 - begin, 0)
    return begin, count, tl.maximum((count + splits - 1) // splits, 1), start, stop


@triton.jit
def _finish(result, log_total, extra, extra_lse, out, lse, quarter, EXTRA: tl.constexpr):
    """Merge a quarter of an output with tokens attended elsewhere, and store it."""
    d = quarter * 32 + tl.arange(0, 32)
    if EXTRA:
        other = tl.load(extra_lse)
        top = tl.maximum(tl.maximum(log_total, other), NEVER)
        mine, others = tl.exp(log_total - top), tl.exp(other - top)
        both = tl.maximum(mine + others, 1e-30)
        result = (result * mine + tl.load(extra + d).to(tl.float32) * others) / both
        log_total = tl.where(mine + others > 0, top + tl.log(both), float("-inf"))
    tl.store(out + d, result.to(out.dtype.element_ty))
    if quarter == 0:
        tl.store(lse, log_total)


@triton.jit
def prefetch(pointer, WORDS: tl.constexpr):
    """Ask the L2 cache for a head's part of a page: its ``WORDS`` planes of codes and the first two of norms."""
    line = pointer + tl.minimum(tl.arange(0, 128) * 128, WORDS * 2048 + 128)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


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
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group, 4): 32 rotated coordinates of one query head.

    q ``[batch, kv_heads * group, 128]``; rotation float32 ``[kv_heads, coordinate, dim]``; query float32 ``[batch *
    kv_heads, HEADS, 128]``.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    row, g, quarter = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, head = row // kv_heads, row % kv_heads
    d, c = tl.arange(0, 128), quarter * 32 + tl.arange(0, 32)
    turn = tl.load(rotation + head * 16384 + c[:, None] * 128 + d[None, :])
    x = tl.load(q + sequence.to(tl.int64) * q_batch_stride + (head * group + g) * q_head_stride + d).to(tl.float32)
    tl.store(query + (row * HEADS + g).to(tl.int64) * 128 + c, tl.sum(turn * x[None, :], axis=1))


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
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_TEMPLATE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (splits, batch * kv_heads): a split of one sequence's pages for one KV head.

    query float32 ``[batch * kv_heads, HEADS, 128]``, rotated; ``scaling`` includes log2(e); pages uint8; starts,
    stops int32 ``[batch]``: the tokens attended; partial float16 ``[batch * kv_heads, HEADS, splits, 128]``;
    partial_lse float32 ``[batch * kv_heads, HEADS, splits]``, base 2.
    """
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence, head = row // kv_heads, row % kv_heads
    begin, count, share, start, stop = _span(starts, stops, sequence, splits)
    first = begin + split * share
    last = tl.minimum(first + share, begin + count)
    pages += sequence.to(tl.int64) * batch_stride
    if ASSEMBLY and DEPENDENT and first < last:  # bring the first pages near while the query is rotated
        ahead = pages + tl.load(ints + head * 16 + _KEY_CODES) * 128
        prefetch(ahead + page_bytes.to(tl.int64) * first, WORDS + VALUE_WORDS)
        prefetch(ahead + page_bytes.to(tl.int64) * tl.minimum(first + 1, last - 1), WORDS + VALUE_WORDS)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
        attend_pages(
            io,
            (first, last, start, stop),
            HEADS,
            WORDS,
            VALUE_TEMPLATE,
            VALUE_WORDS,
            KEY_LOG,
            VALUE_LOG,
            STAGES,
            ASSEMBLY,
        )


@triton.jit
def merge(
    partial,
    partial_lse,
    rotation,
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
    ROTATE: tl.constexpr,
    EXTRA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group, 4): a quarter of one query head's output, merged over the splits and un-rotated.

    ``extra [batch, kv_heads * group, 128]`` and ``extra_lse [batch, kv_heads * group]`` (natural, float32) are a
    partial attention over other tokens, in the space of the output. Writes ``out`` like ``extra`` and its natural
    ``lse``. SPLITS: a power of two not below ``splits``. Without ROTATE the output stays in the values' rotated space.
    """
    row, g, quarter = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, head = row // kv_heads, row % kv_heads
    d = quarter * 32 + tl.arange(0, 32)
    # constants first: with a dependent launch they arrive while the splits are still running
    if ROTATE:
        c = tl.arange(0, 128)  # every quarter merges all coordinates, which the L2 cache has at hand
        turn = tl.load(rotation + head * 16384 + c[:, None] * 128 + d[None, :])
        sums = tl.zeros((CHUNK, 128), tl.float32)
    else:
        c = d
        sums = tl.zeros((CHUNK, 32), tl.float32)
    scale = tl.load(value_scale + head) * 128.0
    _begin, count, share, _start, _stop = _span(starts, stops, sequence, splits)
    used = (count + share - 1) // share
    base = (row * HEADS + g).to(tl.int64) * splits
    partial += base * 128
    partial_lse += base
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    split = tl.arange(0, SPLITS)
    parts = tl.load(partial_lse + split, mask=split < used, other=float("-inf"))
    peak = tl.maximum(tl.max(parts, axis=0), NEVER)
    total = tl.sum(tl.exp2(parts - peak), axis=0)
    for first in tl.range(0, used, CHUNK, num_stages=STAGES):
        at = first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(partial_lse + at, mask=at < used, other=float("-inf")) - peak)
        some = tl.load(partial + at[:, None] * 128 + c[None, :], mask=(at < used)[:, None], other=0.0)
        sums += some.to(tl.float32) * weight[:, None]
    result = tl.sum(sums, axis=0) * (scale / tl.maximum(total, 1e-30))
    if ROTATE:
        result = tl.sum(turn * result[:, None], axis=0)
    log_total = (peak + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453
    log_total = tl.where(total > 0, log_total, float("-inf"))
    target = (row * tl.num_programs(1) + g).to(tl.int64)
    _finish(
        result, log_total, extra + target * 128, extra_lse + target, out + target * 128, lse + target, quarter, EXTRA
    )
