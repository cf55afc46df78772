# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (tuples grow in unrolled loops, which mypy does not follow)
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
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

from kvbench.kernels.bit_codes import (
    key_rows,
    look_up_memory,
    look_up_registers,
    plain_keys,
    plain_values,
    planes_of,
    value_rows,
)
from kvbench.kernels.bit_planes import DUAL, NARROW, SIGNED, WIDE
from kvbench.kernels.tile_norms import key_norms, load_norms, token_rows, value_log_norms
from kvbench.kernels.tile_operands import LARGEST, byte_operand, probability_columns
from kvbench.kernels.tile_pages import EARLY, LATE, LOG_LARGEST, NEVER, SLACK

_SIGNED, _DUAL, _WIDE = tl.constexpr(SIGNED), tl.constexpr(DUAL), tl.constexpr(WIDE)

# columns of ``ints``: where a head's parts start in a page, in units of 128 bytes; norms of the head's keys and of its
# values; of each of the values' planes ``before << 16 | coordinates``. After HEADER, with ``rows = 32 *
# slabs``: cells ``first plane << 8 | planes`` [4 slabs]; cells' table registers [4 slabs, 8] (two, two of a further
# codebook, which codes it is for, padding); key codebooks' places [4 slabs, 8]; key groups [rows]; values' table
# registers [rows, 2]; places [rows]; groups [rows]
PARTS, NORMS, VALUE_PLANES, HEADER = 0, 4, 8, 16
_NORMS, _VALUE_PLANES, _HEADER = tl.constexpr(NORMS), tl.constexpr(VALUE_PLANES), tl.constexpr(HEADER)


@triton.constexpr_function
def slab_kind(slab, wide, dual, signed):
    """:meth:`kvbench.kernels.bit_planes.BitPlaneLayout.slab_kind`."""
    return WIDE if slab < wide else DUAL if slab < dual else SIGNED if slab < signed else NARROW


@triton.jit
def _words(pointer, mask):
    return tl.load(pointer, mask=mask, other=0).to(tl.int32, bitcast=True)


@triton.jit
def _key_words(base, first, planes, r, PLANES: tl.constexpr):
    """A slab's plane words, each copied to four bytes' places: tuple of int32 ``[32, 4, 4]``."""
    pointer = (base + first * 128 + r * 4).to(tl.pointer_type(tl.uint32))
    words = ()
    for j in tl.static_range(PLANES):
        word = tl.reshape(_words(pointer + 32 * j, planes > j), (32, 4, 1))
        words = words + (tl.broadcast_to(word, (32, 4, 4)),)
    return words


@triton.jit
def _copied(x, SHAPE: tl.constexpr):
    """A number a lane ``[128]`` as the assembly takes it: each copied to four bytes' places."""
    return tl.broadcast_to(tl.reshape(x, (SHAPE[0], SHAPE[1], 1)), SHAPE)


@triton.jit
def _four(pointer, q):
    """Four neighbouring numbers a lane, of a table with 8 of them a cell: one 16-byte load."""
    x = tl.load(pointer + 8 * q[:, None] + tl.arange(0, 4)[None, :])
    even, odd = tl.split(tl.permute(tl.reshape(x, (128, 2, 2)), (0, 1, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _key_slab(
    base,
    tables,
    levels,
    SLAB: tl.constexpr,
    SLABS: tl.constexpr,
    WIDE_SLABS: tl.constexpr,
    DUAL_SLABS: tl.constexpr,
    SIGNED_SLABS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """A slab of a page's keys: high bytes ``[128 tokens, 32]``, and low bytes (of use in a wide slab)."""
    KIND: tl.constexpr = slab_kind(SLAB, WIDE_SLABS, DUAL_SLABS, SIGNED_SLABS)
    cells = tables + _HEADER
    table = cells + 4 * SLABS  # registers, 8 a cell
    bases = table + 32 * SLABS
    if ASSEMBLY:
        lane = tl.arange(0, 128)
        q, r = lane & 3, lane >> 2
        SHAPE: tl.constexpr = (32, 4, 4)
        cell = tl.load(cells + 4 * SLAB + q)
        words = _key_words(base, cell >> 8, cell & 255, r, planes_of(KIND))
        if KIND == _WIDE:
            a, b, c, d = _four(bases + 32 * SLAB, q)
            e, f, g, h = _four(bases + 32 * SLAB + 4, q)
            places = (
                _copied(a - a, SHAPE), _copied(b - a, SHAPE), _copied(c - a, SHAPE), _copied(d - a, SHAPE),
                _copied(e - a, SHAPE), _copied(f - a, SHAPE), _copied(g - a, SHAPE), _copied(h - a, SHAPE),
            )  # fmt: skip
            start = _copied((levels + a).to(tl.int64), SHAPE)
            o = look_up_memory(words, places, start, 8)
            return key_rows(o, 0), key_rows(o, 8)
        else:
            a, b, c, d = _four(table + 32 * SLAB, q)
            registers = (_copied(a, SHAPE), _copied(b, SHAPE))
            if KIND == _DUAL:
                e, f, _g, _h = _four(table + 32 * SLAB + 4, q)
                registers = registers + (_copied(c, SHAPE), _copied(d, SHAPE), _copied(e, SHAPE), _copied(f, SHAPE))
            o = look_up_registers(words, registers, KIND)
            rows = key_rows(o, 0)
            return rows, rows
    else:
        return plain_keys(base.to(tl.pointer_type(tl.uint32)), cells, bases, levels, SLAB, KIND)


@triton.jit
def _keys(
    base,
    tables,
    levels,
    SLABS: tl.constexpr,
    WIDE_SLABS: tl.constexpr,
    DUAL_SLABS: tl.constexpr,
    SIGNED_SLABS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """A page's keys: high bytes of every slab, and low bytes of the wide ones."""
    high, low = (), ()
    for slab in tl.static_range(SLABS):
        a, b = _key_slab(base, tables, levels, slab, SLABS, WIDE_SLABS, DUAL_SLABS, SIGNED_SLABS, ASSEMBLY)
        high = high + (a,)
        if slab < WIDE_SLABS:
            low = low + (b,)
    return high, low


@triton.jit
def _side_by_side(a, b):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _value_planes(tables, KIND: tl.constexpr):
    """Where each plane of the values is, and of how many coordinates: ``before << 16 | coordinates``."""
    planes = ()
    for j in tl.static_range(KIND):
        planes = planes + (tl.load(tables + _VALUE_PLANES + j),)
    return planes


@triton.jit
def _value_words(base, planes, ROWS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A page's plane words of values, int32 ``[32, rows / 8]`` each (assembly), or where they are (plain)."""
    if ASSEMBLY:
        r, i = tl.arange(0, 32)[:, None], tl.arange(0, ROWS // 8)[None, :]
        words = ()
        for j in tl.static_range(KIND):
            pointer = (base + (planes[j] >> 16) * 16).to(tl.pointer_type(tl.uint32))
            present = (r * (ROWS // 32) < (planes[j] & 0xFFFF)) & (i >= 0)
            words = words + (_words(pointer + r * (ROWS // 8) + i, present),)
        return words
    else:
        return base.to(tl.pointer_type(tl.uint32))


@triton.jit
def _copied_rows(x, SHAPE: tl.constexpr):
    """A number a word or a row of a lane as the assembly takes it: each copied to four bytes' places."""
    N: tl.constexpr = x.shape[1] // SHAPE[2]
    return tl.broadcast_to(tl.reshape(x, (32, N, SHAPE[2], 1)), SHAPE)


@triton.jit
def _values(words, planes, tables, levels, ROWS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A page's values: high and low bytes ``[rows, 128 tokens]``; ``tables``: from the values' registers on."""
    LANE_ROWS: tl.constexpr = ROWS // 32
    if ASSEMBLY:
        r, k = tl.arange(0, 32)[:, None], tl.arange(0, LANE_ROWS)[None, :]
        SHAPE: tl.constexpr = (32, 4, LANE_ROWS, 4)
        w = ()
        for j in tl.static_range(KIND):
            w = w + (_copied_rows(words[j], SHAPE),)
        if KIND == _WIDE:
            at = 64 * (k >> 1) + 16 * (r >> 3) + 8 * (k & 1) + (r & 7)
            table = _copied_rows((levels + tl.load(tables + 2 * ROWS + at)).to(tl.int64), SHAPE)
            o = look_up_memory(w, (), table, 0)
            return value_rows(o, 0, LANE_ROWS), value_rows(o, 8, LANE_ROWS)
        else:
            pair = tl.load(tables.to(tl.pointer_type(tl.int64)) + (r * LANE_ROWS + k))
            low, high = _copied_rows(pair.to(tl.int32), SHAPE), _copied_rows((pair >> 32).to(tl.int32), SHAPE)
            rows = value_rows(look_up_registers(w, (low, high), KIND), 0, LANE_ROWS)
            return rows, rows
    else:
        return plain_values(words, planes, tables + 2 * ROWS, levels, KIND, LANE_ROWS)


PREFETCH_PTX = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@triton.jit
def _prefetch(base, count):
    """Start bringing ``count`` bytes (a multiple of 16) from ``base`` on into the L2 cache; returns 0, to be used.

    Nothing else orders it, and nothing waits for it: as a volatile instruction it would keep loads of tables in the
    loop.
    """
    return tl.inline_asm_elementwise(
        PREFETCH_PTX, "=r,l,r", [base.to(tl.int64), count], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _query_columns(
    query, group_of, group, scaling, CHUNK: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows ``FIRST .. FIRST + COUNT`` of the rotated query in the columns of a chunk's groups ``[COUNT, COLUMNS]``.

    Column: group, then query head, then a column for the high and one for the low part of its integers.
    """
    column, row = tl.arange(0, COLUMNS), FIRST + tl.arange(0, COUNT)
    head, mine = (column >> 1) % HEADS, CHUNK * (COLUMNS // (2 * HEADS)) + (column >> 1) // HEADS
    inside = (tl.load(group_of + row)[:, None] == mine[None, :]) & (head < group)[None, :]
    return tl.load(query + head[None, :] * ROWS + row[:, None], mask=inside, other=0.0) * scaling


@triton.jit
def _per_group(x, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """``[n, GROUPS * HEADS]`` -> a tuple of GROUPS tiles ``[n, HEADS]``."""
    N: tl.constexpr = x.shape[0]
    if GROUPS == 1:
        return (tl.reshape(x, (N, HEADS)),)
    elif GROUPS == 2:
        a, b = tl.split(tl.permute(tl.reshape(x, (N, 2, HEADS)), (0, 2, 1)))
        return a, b
    else:
        even, odd = tl.split(tl.permute(tl.reshape(x, (N, 2, 2, HEADS)), (0, 3, 1, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d


@triton.jit
def _combined(product):
    """int32 products of high and low columns ``[n, columns]`` -> float32 ``[n, columns / 2]``."""
    high, low = tl.split(tl.reshape(product, (product.shape[0], product.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def _products(high, low, operands, low_operands, CHUNK: tl.constexpr, SLABS: tl.constexpr, WIDE_SLABS: tl.constexpr):
    """A chunk's column products ``[128, COLUMNS]`` int32 of a page's keys."""
    BLOCKS: tl.constexpr = 1 if SLABS < 8 else 2
    if SLABS == 2:
        product = tl.dot(_side_by_side(high[0], high[1]), operands[CHUNK], out_dtype=tl.int32)
    else:
        left = _side_by_side(_side_by_side(high[0], high[1]), _side_by_side(high[2], high[3]))
        product = tl.dot(left, operands[CHUNK * BLOCKS], out_dtype=tl.int32)
    if SLABS == 8:
        left = _side_by_side(_side_by_side(high[4], high[5]), _side_by_side(high[6], high[7]))
        product = tl.dot(left, operands[CHUNK * BLOCKS + 1], acc=product, out_dtype=tl.int32)
    for slab in tl.static_range(WIDE_SLABS):
        product = tl.dot(low[slab], low_operands[CHUNK * WIDE_SLABS + slab], acc=product, out_dtype=tl.int32)
    return product


@triton.jit
def _one_of(x, index, SIZE: tl.constexpr):
    """``x[index]`` of a tensor ``[SIZE]``."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, x, 0.0), axis=0)


@triton.jit
def _prepare_query(
    query, group_of, offset_of, group, scaling, HEADS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
    SLABS: tl.constexpr, WIDE_SLABS: tl.constexpr,
):  # fmt: skip
    """The query's integers: operands a chunk, low operands of its wide slabs, a step a query head ``[HEADS]``, and of
    each chunk the groups' ratios ``[GROUPS]``, and what 4-bit codes' half levels add to each group ``[1, HEADS]``.

    A group's integers have a step of their own. The steps of two groups have one ratio for all query heads, which then
    belongs to the group's norms: one step a head is left.
    """
    ROWS: tl.constexpr = 32 * SLABS
    GROUPS: tl.constexpr = COLUMNS // (2 * HEADS)
    BLOCKS: tl.constexpr = 1 if SLABS < 8 else 2
    BLOCK: tl.constexpr = ROWS // BLOCKS
    peaks = ()
    unit = tl.full((HEADS,), 1e-20, tl.float32)  # small enough to be nothing, large enough to divide by
    for chunk in tl.static_range(CHUNKS):
        peak = tl.zeros((COLUMNS,), tl.float32)
        for block in tl.static_range(BLOCKS):
            y = _query_columns(query, group_of, group, scaling, chunk, block * BLOCK, BLOCK, HEADS, COLUMNS, ROWS)
            peak = tl.maximum(peak, tl.max(tl.abs(y), axis=0))
        each = tl.reshape(tl.max(tl.reshape(peak, (COLUMNS // 2, 2)), axis=1), (GROUPS, HEADS))
        unit = tl.maximum(unit, tl.max(each, axis=0))
        peaks = peaks + (each,)
    operands, low_operands, ratios, halves = (), (), (), ()
    for chunk in tl.static_range(CHUNKS):
        ratio = tl.maximum(tl.max(peaks[chunk] / unit[None, :], axis=1), 1e-6)
        step = ratio[:, None] * (unit / LARGEST)[None, :]
        step = tl.reshape(tl.broadcast_to(tl.reshape(step, (GROUPS, HEADS, 1)), (GROUPS, HEADS, 2)), (COLUMNS,))
        half = tl.zeros((COLUMNS,), tl.float32)
        for block in tl.static_range(BLOCKS):
            y = _query_columns(query, group_of, group, scaling, chunk, block * BLOCK, BLOCK, HEADS, COLUMNS, ROWS)
            operand, integer = byte_operand(y, step)
            operands = operands + (operand,)
            offset = tl.load(offset_of + block * BLOCK + tl.arange(0, BLOCK))
            half += tl.sum(integer * offset[:, None], axis=0)
        for slab in tl.static_range(WIDE_SLABS):
            y = _query_columns(query, group_of, group, scaling, chunk, 32 * slab, 32, HEADS, COLUMNS, ROWS)
            operand, _integer = byte_operand(y * 0.0625, step)
            low_operands = low_operands + (operand,)
        even, _odd = tl.split(tl.reshape(half, (COLUMNS // 2, 2)))
        ratios = ratios + (ratio,)
        halves = halves + _per_group(tl.reshape(even, (1, COLUMNS // 2)), GROUPS, HEADS)
    return operands, low_operands, unit / LARGEST, ratios, halves


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
            top = tl.maximum(tl.maximum(log_total, other), NEVER)
            ours, others = tl.exp(log_total - top), tl.exp(other - top)
            both = tl.maximum(ours + others, 1e-30)
            there = tl.load(extra + to[:, None] * OUT + o[None, :], mask=mine & live, other=0.0).to(tl.float32)
            y = (y * ours[:, None] + there * others[:, None]) / both[:, None]
            log_total = tl.where(ours + others > 0, top + tl.log(both), float("-inf"))
        tl.store(target_lse + to, log_total, mask=(g < group) & (part == 0))
    tl.store(target + to[:, None] * OUT + o[None, :], y.to(target.dtype.element_ty), mask=mine & live)


@triton.jit
def _bounds(starts, stops, sequence):
    """A sequence's first page, its pages, and the tokens attended."""
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    begin = start // 128
    return begin, tl.maximum((stop + 127) // 128 - begin, 0), start, stop


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
    _begin, count, _start, _stop = _bounds(starts, stops, row // kv_heads)
    share = tl.maximum((count + splits - 1) // splits, 1)
    used = (count + share - 1) // share
    base = (row * HEADS + g).to(tl.int64) * splits
    partial += base * ROWS
    partial_lse += base
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    split = tl.arange(0, SPLITS)
    parts = tl.load(partial_lse + split, mask=split < used, other=float("-inf"))
    peak = tl.maximum(tl.max(parts, axis=0), NEVER)
    total = tl.sum(tl.exp2(parts - peak), axis=0)
    sums = tl.zeros((CHUNK, 32), tl.float32)
    for first in tl.range(0, used, CHUNK, num_stages=STAGES):
        at = first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(partial_lse + at, mask=at < used, other=float("-inf")) - peak)
        some = tl.load(partial + at[:, None] * ROWS + d[None, :], mask=(at < used)[:, None], other=0.0)
        sums += some * weight[:, None]
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.sum(sums, axis=0) / tl.maximum(total, 1e-30)
    log_total = (peak + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453
    target = row * tl.num_programs(1) + g
    tl.store(out + target.to(tl.int64) * ROWS + d, result)
    if part == 0:
        tl.store(lse + target, tl.where(total > 0, log_total, float("-inf")))


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
    begin, count, start, stop = _bounds(starts, stops, sequence)
    share = tl.maximum((count + splits - 1) // splits, 1)
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
        value_tables, planes = group_of + ROWS, _value_planes(tables, VALUE_KIND)
        g, row = tl.arange(0, HEADS), tl.arange(0, ROWS)
        value_low, value_step = tl.load(value_range), tl.load(value_range + 1)
        head_bytes = value_norm_at + (128 if VALUE_LOG else 256) - key_at
        last_norm, last_value_norm = tl.load(tables + _NORMS) - 1, tl.load(tables + _NORMS + 1) - 1
        value_group = tl.load(value_tables + 3 * ROWS + row)
        query += line.to(tl.int64) * (HEADS * ROWS)
        if DEPENDENT:  # everything above is constant; the query comes from the kernel before
            tl.extra.cuda.gdc_wait()
        operands, low_operands, scale, ratios, halves = _prepare_query(
            query, group_of, offset_of, group, scaling, HEADS, COLUMNS, CHUNKS, SLABS, WIDE_SLABS
        )
        lows, steps, gains = (), (), ()
        for index in tl.static_range(KEY_GROUPS):
            gain = _one_of(ratios[index // GROUPS], index % GROUPS, GROUPS)
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
                base += _prefetch(ahead, head_bytes) * 128
            here = page * 128 + token - start
            value_norms = base + value_norm_at
            value_words = _value_words(base + value_at, planes, ROWS, VALUE_KIND, ASSEMBLY)
            high, low = _keys(base + key_at, tables, key_levels, SLABS, WIDE_SLABS, DUAL_SLABS, SIGNED_SLABS, ASSEMBLY)
            logit = tl.zeros((128, HEADS), tl.float32)
            for chunk in tl.static_range(CHUNKS):
                product = _products(high, low, operands, low_operands, chunk, SLABS, WIDE_SLABS)
                every = _combined(product)
                each = _per_group(every, GROUPS, HEADS)
                for index in tl.static_range(GROUPS):
                    if chunk * GROUPS + index < KEY_GROUPS:
                        some = each[index]
                        if chunk * GROUPS + index < HALF_GROUPS:
                            some += halves[chunk * GROUPS + index]
                        norm = _group_norms(
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
                n = _plane_norms(value_norms, 0, VALUE_LOG, ASSEMBLY)
                e = _log_norms(n, value_low, value_step, VALUE_LOG, ASSEMBLY)
            else:
                zero = tl.zeros((32,), tl.float32)
                e = (zero, zero, zero, zero)
            # unsigned: tokens before the start wrap around and are masked too
            m0 = tl.where(here.to(tl.uint32) < extent, e[0], float("-inf"))
            m1 = tl.where((here + 8).to(tl.uint32) < extent, e[1], float("-inf"))
            m2 = tl.where((here + 64).to(tl.uint32) < extent, e[2], float("-inf"))
            m3 = tl.where((here + 72).to(tl.uint32) < extent, e[3], float("-inf"))
            logit += token_rows(m0, m1, m2, m3)[:, None]
            peak = tl.max(logit, axis=0)
            running = tl.maximum(running, peak)
            now = tl.maximum(peak, running - SLACK)
            decay = tl.exp2(reference - now)
            reference = now
            p = tl.exp2(logit - (now - LOG_LARGEST)[None, :])
            sums = sums * decay[None, :]
            total = total * decay[None, None, :]
            a, b = _values(value_words, planes, value_tables, value_levels, ROWS, VALUE_KIND, ASSEMBLY)
            if VALUE_GROUPS == 1:
                inverse = token_rows(tl.exp2(-e[0]), tl.exp2(-e[1]), tl.exp2(-e[2]), tl.exp2(-e[3]))
                total += _lane_sums(p * inverse[:, None], HEADS)
                if VALUE_KIND == _SIGNED:
                    weight = weight * decay[None, None, :] + _lane_sums(p, HEADS)
                sums += _weighted(a, b, p, HEADS, VALUE_KIND, ASSEMBLY)
            else:
                total += _lane_sums(p, HEADS)
                for index in tl.static_range(VALUE_GROUPS):
                    n = _plane_norms(value_norms, tl.minimum(last_value_norm, index), VALUE_LOG, ASSEMBLY)
                    own = value_range + 2 * index
                    norm = key_norms(n, tl.load(own), tl.load(own + 1), 1.0, VALUE_LOG)
                    most = tl.maximum(tl.max(norm, axis=0), 1e-30)
                    part = _weighted(a, b, p * (norm / most)[:, None], HEADS, VALUE_KIND, ASSEMBLY)
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


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _plane_norms(base, plane, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A plane of norms from ``base`` on, as four floats a lane: log codes as ``x`` (kernels.tile_norms), or fp16."""
    if LOG:
        return load_norms((base + plane * 128).to(tl.pointer_type(tl.uint32)), LOG, ASSEMBLY)
    else:
        four = tl.load((base + plane * 256).to(tl.pointer_type(tl.uint64)) + tl.arange(0, 32))
        return _half(four, 0), _half(four, 16), _half(four, 32), _half(four, 48)


@triton.jit
def _group_norms(base, last_norm, lows, steps, gains, GROUP: tl.constexpr, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A group's norms ``[128]``, times its ratio; those of a group that the head has not are some numbers."""
    norms = _plane_norms(base, tl.minimum(last_norm, GROUP), LOG, ASSEMBLY)
    return key_norms(norms, lows[GROUP], steps[GROUP], gains[GROUP], LOG)


@triton.jit
def _log2(x, ASSEMBLY: tl.constexpr):
    """log2 of a norm, to about 2^-22 in assembly; zero counts as 2^-35, below the smallest fp16."""
    x = tl.maximum(x, 2.9e-11)
    if ASSEMBLY:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _log_norms(n, low, step, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """log2 of the values' norms, four a lane; finite for zero norms too."""
    if LOG:
        return value_log_norms(n, low, step, LOG)
    else:
        return _log2(n[0], ASSEMBLY), _log2(n[1], ASSEMBLY), _log2(n[2], ASSEMBLY), _log2(n[3], ASSEMBLY)


@triton.jit
def _lane_sums(x, HEADS: tl.constexpr):
    """``[128 tokens, HEADS]`` -> ``[4, 8, HEADS]``: the sums of each lane's four tokens."""
    return tl.sum(tl.sum(tl.reshape(x, (2, 4, 2, 8, HEADS)), axis=2), axis=0)


@triton.jit
def _weighted(a, b, p, HEADS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """float32 ``[rows, HEADS]``: a page's values times the integers of ``p [128 tokens, HEADS]``."""
    columns = probability_columns(p, HEADS, ASSEMBLY)
    result = _used(_combined(tl.dot(a, columns, out_dtype=tl.int32)), HEADS)
    if KIND == _WIDE:
        result += 0.0625 * _used(_combined(tl.dot(b, columns, out_dtype=tl.int32)), HEADS)
    return result


@triton.jit
def _used(x, HEADS: tl.constexpr):
    """The columns of heads: of four heads' columns, half are there to fill the instruction."""
    if HEADS == 4:
        x, _ = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 4)), (0, 2, 1)))
    return x
