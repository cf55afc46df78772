# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (tuples grow in unrolled loops, which mypy does not follow)
"""Decode attention over bit-plane pages, in Triton: any widths, any groups, any head_dim up to 256.

:func:`rotate` the query, :func:`attend` in splits, :func:`merge`, :func:`rotate` the output. The arithmetic is that of
:mod:`kvbench.kernels.tile_pages`: levels are signed bytes, operand A of int8 matrix products; the query and the
probabilities are integers ``256 * high + low``, two columns of operand B. Three things differ:

- A norm belongs to a group, and a group's coordinates are anywhere. The query has columns of its own for every group,
  zero outside it, COLUMNS at a time; a logit is the sum of the groups' products, each times its norm.
- The first WIDE slabs of keys are levels ``high + low / 16``; their low bytes are further rows of the product.
- Values with several norms a head are multiplied once a group, by probabilities that carry the group's norm.

Each kernel starts before the one it depends on has ended where DEPENDENT, as the tiles' do. Lengths are read on the
device. The assembly path needs an NVIDIA GPU of compute capability 9.0; the plain one runs in the interpreter. Tested:
tests/kernels/test_triton_bit_planes.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.bit_plane_operands import (
    HEADER,
    NORMS,
    combined,
    group_norms,
    load_keys,
    load_values,
    log_norms,
    one_of,
    per_group,
    plane_norms,
    prefetch,
    prepare_query,
    products,
    value_planes,
    value_words,
    weighted,
)
from kvbench.kernels.bit_planes import SIGNED
from kvbench.kernels.split_kernels import (
    EARLY,
    LATE,
    NEVER,
    bounds,
    lane_sums,
    merge_splits,
    merged_with,
    natural,
    share_of,
)
from kvbench.kernels.tile_norms import key_norms, masked_rows, token_rows
from kvbench.kernels.tile_pages import LOG_LARGEST, SLACK

_SIGNED, _NORMS, _HEADER = tl.constexpr(SIGNED), tl.constexpr(NORMS), tl.constexpr(HEADER)


@triton.jit
def rotate(
    source,
    source_lse,
    matrix,
    extra,
    extra_lse,
    target,
    target_lse,
    group,
    kv_heads,
    batch_stride,
    head_stride,
    target_heads,
    IN: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    LSE: tl.constexpr,
    EXTRA: tl.constexpr,
    FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group / BLOCK, OUT / 32): 32 products of BLOCK query heads' vectors with a matrix's rows.

    ``source [batch, kv_heads * group, IN]``; ``matrix`` float32 ``[kv_heads, OUT, IN]``; ``target [batch * kv_heads,
    target_heads, OUT]``. With LSE the vectors are outputs, normalised over the tokens of ``source_lse`` (natural), and
    with EXTRA merged with those over other tokens. FIRST: nothing to wait for.
    """
    if DEPENDENT and FIRST:
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(2)
    sequence, head = row // kv_heads, row % kv_heads
    g = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, o = tl.arange(0, IN_WIDTH), part * 32 + tl.arange(0, 32)
    mine, live = (g < group)[:, None], (o < OUT)[None, :]
    at = head.to(tl.int64) * (OUT * IN) + o[:, None] * IN + i[None, :]
    turn = tl.load(matrix + at, mask=(o < OUT)[:, None] & (i < IN)[None, :], other=0.0)
    if DEPENDENT and not FIRST:
        tl.extra.cuda.gdc_wait()
    start = source + sequence.to(tl.int64) * batch_stride + (head * group + g[:, None]).to(tl.int64) * head_stride
    x = tl.load(start + i[None, :], mask=mine & (i < IN)[None, :], other=0.0).to(tl.float32)
    if BLOCK == 1:  # noqa: SIM108
        y = tl.sum(turn * x, axis=1)[None, :]
    else:
        y = tl.dot(x, tl.trans(turn), input_precision="tf32x3")
    to = (row * target_heads + g).to(tl.int64)
    if LSE:
        log_total = tl.load(source_lse + to, mask=g < group, other=float("-inf"))
        if EXTRA:
            other = tl.load(extra_lse + to, mask=g < group, other=float("-inf"))
            there = tl.load(extra + to[:, None] * OUT + o[None, :], mask=mine & live, other=0.0).to(tl.float32)
            y, log_total = merged_with(y, log_total, there, other)
        tl.store(target_lse + to, log_total, mask=(g < group) & (part == 0))
    tl.store(target + to[:, None] * OUT + o[None, :], y.to(target.dtype.element_ty), mask=mine & live)


@triton.jit
def merge(
    partial,
    partial_lse,
    starts,
    stops,
    out,
    lse,
    kv_heads,
    splits,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group, ROWS / 32): 32 rows of one query head's output, merged over the splits.

    ``partial`` float32 ``[batch * kv_heads, HEADS, splits, ROWS]`` and ``partial_lse`` base 2; ``out`` float32 ``[batch
    * kv_heads, group, ROWS]``, ``lse`` natural. SPLITS: a power of two not below ``splits``.
    """
    row, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = part * 32 + tl.arange(0, 32)
    _begin, count, _start, _stop = bounds(starts, stops, row // kv_heads)
    share = share_of(count, splits)
    used = (count + share - 1) // share
    base = (row * HEADS + g).to(tl.int64) * splits
    partial += base * ROWS
    partial_lse += base
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    sums, total, peak = merge_splits(partial, partial_lse, used, d, ROWS, SPLITS, CHUNK, STAGES)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.sum(sums, axis=0) / tl.maximum(total, 1e-30)
    target = row * tl.num_programs(1) + g
    tl.store(out + target.to(tl.int64) * ROWS + d, result)
    if part == 0:
        tl.store(lse + target, natural(total, peak))


@triton.jit
def attend(
    query,
    group,
    scaling,
    pages,
    ints,
    floats,
    levels,
    starts,
    stops,
    partial,
    partial_lse,
    kv_heads,
    page_bytes,
    batch_stride,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLABS: tl.constexpr,
    WIDE_SLABS: tl.constexpr,
    DUAL_SLABS: tl.constexpr,
    SIGNED_SLABS: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    HALF_GROUPS: tl.constexpr,
    VALUE_GROUPS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    TABLE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (splits, batch * kv_heads): a split of one sequence's pages for one KV head.

    query float32 ``[batch * kv_heads, HEADS, 32 * SLABS]``, rotated, in operand order; ``scaling`` includes log2(e);
    pages uint8; ints, floats and levels: tables a head (:mod:`kvbench.kernels.bit_plane_attention`);
    starts, stops int32 ``[batch]``: the tokens attended; partial and partial_lse as of :func:`merge`.
    """
    ROWS: tl.constexpr = 32 * SLABS
    GROUPS: tl.constexpr = COLUMNS // (2 * HEADS)
    CHUNKS: tl.constexpr = (KEY_GROUPS + GROUPS - 1) // GROUPS
    if DEPENDENT == EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split, line, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence, head = line // kv_heads, line % kv_heads
    begin, count, start, stop = bounds(starts, stops, sequence)
    share = share_of(count, splits)
    first = begin + split * share
    last = tl.minimum(first + share, begin + count)
    if first < last:
        pages += sequence.to(tl.int64) * batch_stride
        tables = ints + head * (_HEADER + 36 * SLABS + 6 * ROWS)
        ranges = floats + head * (2 * ROWS + 2 * KEY_GROUPS + 2 * VALUE_GROUPS)
        offset_of, value_offset_of = ranges, ranges + ROWS
        key_range, value_range = ranges + 2 * ROWS, ranges + 2 * ROWS + 2 * KEY_GROUPS
        key_levels, value_levels = levels + head * (2 * TABLE), levels + head * (2 * TABLE) + TABLE
        group_of = tables + _HEADER + 36 * SLABS + ROWS
        key_at, value_at = tl.load(tables) * 128, tl.load(tables + 1) * 128
        key_norm_at, value_norm_at = tl.load(tables + 2) * 128, tl.load(tables + 3) * 128
        value_tables, planes = group_of + ROWS, value_planes(tables, VALUE_KIND)
        g, row = tl.arange(0, HEADS), tl.arange(0, ROWS)
        value_low, value_step = tl.load(value_range), tl.load(value_range + 1)
        head_bytes = value_norm_at + (128 if VALUE_LOG else 256) - key_at
        last_norm, last_value_norm = tl.load(tables + _NORMS) - 1, tl.load(tables + _NORMS + 1) - 1
        value_group = tl.load(value_tables + 3 * ROWS + row)
        query += line.to(tl.int64) * (HEADS * ROWS)
        if DEPENDENT:  # everything above is constant; the query comes from the kernel before
            tl.extra.cuda.gdc_wait()
        operands, low_operands, scale, ratios, halves = prepare_query(
            query, group_of, offset_of, group, scaling, HEADS, COLUMNS, CHUNKS, SLABS, WIDE_SLABS
        )
        lows, steps, gains = (), (), ()
        for index in tl.static_range(KEY_GROUPS):
            gain = one_of(ratios[index // GROUPS], index % GROUPS, GROUPS)
            gains = gains + (gain,)
            lows = lows + (tl.load(key_range + 2 * index) + tl.log2(gain),)
            steps = steps + (tl.load(key_range + 2 * index + 1),)
        lane = tl.arange(0, 32)
        token = (lane >> 3) * 16 + (lane & 7)
        extent = (stop - start).to(tl.uint32)
        running = tl.full((HEADS,), NEVER, tl.float32)
        reference = tl.full((HEADS,), NEVER, tl.float32)
        total = tl.zeros((4, 8, HEADS), tl.float32)
        weight = tl.zeros((4, 8, HEADS), tl.float32)
        sums = tl.zeros((ROWS, HEADS), tl.float32)
        for page in tl.range(first, last, num_stages=1):
            base = pages + page_bytes.to(tl.int64) * page
            if ASSEMBLY:  # an unknown 0 also keeps the compiler from counting up a pointer for every load
                ahead = pages + page_bytes.to(tl.int64) * tl.minimum(page + 1, last - 1) + key_at
                base += prefetch(ahead, head_bytes) * 128
            here = page * 128 + token - start
            value_norms = base + value_norm_at
            packed = value_words(base + value_at, planes, ROWS, VALUE_KIND, ASSEMBLY)
            high, low = load_keys(
                base + key_at, tables, key_levels, SLABS, WIDE_SLABS, DUAL_SLABS, SIGNED_SLABS, ASSEMBLY
            )
            logit = tl.zeros((128, HEADS), tl.float32)
            for chunk in tl.static_range(CHUNKS):
                product = products(high, low, operands, low_operands, chunk, SLABS, WIDE_SLABS)
                every = combined(product)
                each = per_group(every, GROUPS, HEADS)
                for index in tl.static_range(GROUPS):
                    if chunk * GROUPS + index < KEY_GROUPS:
                        some = each[index]
                        if chunk * GROUPS + index < HALF_GROUPS:
                            some += halves[chunk * GROUPS + index]
                        norm = group_norms(
                            base + key_norm_at,
                            last_norm,
                            lows,
                            steps,
                            gains,
                            chunk * GROUPS + index,
                            KEY_LOG,
                            ASSEMBLY,
                        )
                        logit += some * norm[:, None]
            logit = logit * scale[None, :]
            if VALUE_GROUPS == 1:
                n = plane_norms(value_norms, 0, VALUE_LOG, ASSEMBLY)
                e = log_norms(n, value_low, value_step, VALUE_LOG, ASSEMBLY)
            else:
                zero = tl.zeros((32,), tl.float32)
                e = (zero, zero, zero, zero)
            logit += masked_rows(e, here, extent)[:, None]
            peak = tl.max(logit, axis=0)
            running = tl.maximum(running, peak)
            now = tl.maximum(peak, running - SLACK)
            decay = tl.exp2(reference - now)
            reference = now
            p = tl.exp2(logit - (now - LOG_LARGEST)[None, :])
            sums = sums * decay[None, :]
            total = total * decay[None, None, :]
            a, b = load_values(packed, planes, value_tables, value_levels, ROWS, VALUE_KIND, ASSEMBLY)
            if VALUE_GROUPS == 1:
                inverse = token_rows(tl.exp2(-e[0]), tl.exp2(-e[1]), tl.exp2(-e[2]), tl.exp2(-e[3]))
                total += lane_sums(p * inverse[:, None], HEADS)
                if VALUE_KIND == _SIGNED:
                    weight = weight * decay[None, None, :] + lane_sums(p, HEADS)
                sums += weighted(a, b, p, HEADS, VALUE_KIND, ASSEMBLY)
            else:
                total += lane_sums(p, HEADS)
                for index in tl.static_range(VALUE_GROUPS):
                    n = plane_norms(value_norms, tl.minimum(last_value_norm, index), VALUE_LOG, ASSEMBLY)
                    own = value_range + 2 * index
                    norm = key_norms(n, tl.load(own), tl.load(own + 1), 1.0, VALUE_LOG)
                    most = tl.maximum(tl.max(norm, axis=0), 1e-30)
                    part = weighted(a, b, p * (norm / most)[:, None], HEADS, VALUE_KIND, ASSEMBLY)
                    sums += tl.where((value_group == index)[:, None], part * most, 0.0)
        if DEPENDENT == LATE:
            tl.extra.cuda.gdc_launch_dependents()
        all_total = tl.sum(tl.sum(total, axis=0), axis=0)
        if VALUE_KIND == _SIGNED:
            sums += tl.load(value_offset_of + row)[:, None] * tl.sum(tl.sum(weight, axis=0), axis=0)[None, :]
        result = sums * (1.0 / tl.maximum(all_total, 1e-37))[None, :]
        to = (line.to(tl.int64) * HEADS + g) * splits + split
        tl.store(partial + to[None, :] * ROWS + row[:, None], result)
        log_total = reference - LOG_LARGEST + tl.log2(tl.maximum(all_total, 1e-37))
        tl.store(partial_lse + to, tl.where(all_total > 0, log_total, float("-inf")))
