# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# (tuples grow in unrolled loops, which mypy does not follow)
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""What decode attention over bit-plane pages multiplies, in Triton: codes and norms of pages, the query's integers.

See :mod:`kvbench.kernels.bit_plane_kernels` for the arithmetic and :mod:`kvbench.kernels.bit_planes` for the layout.
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
from kvbench.kernels.tile_norms import key_norms, load_norms, value_log_norms
from kvbench.kernels.tile_operands import LARGEST, byte_operand, probability_columns

_DUAL, _WIDE = tl.constexpr(DUAL), tl.constexpr(WIDE)

# columns of ``ints``: where a head's parts start in a page, in units of 128 bytes; norms of the head's keys and of its
# values; of each of the values' planes ``before << 16 | coordinates``. After HEADER, with ``rows = 32 *
# slabs``: cells ``first plane << 8 | planes`` [4 slabs]; cells' table registers [4 slabs, 8] (two, two of a further
# codebook, which codes it is for, padding); key codebooks' places [4 slabs, 8]; key groups [rows]; values' table
# registers [rows, 2]; places [rows]; groups [rows]
PARTS, NORMS, VALUE_PLANES, HEADER = 0, 4, 8, 16
_VALUE_PLANES, _HEADER = tl.constexpr(VALUE_PLANES), tl.constexpr(HEADER)


@triton.constexpr_function
def slab_kind(slab, wide, dual, signed):
    """:meth:`kvbench.kernels.bit_planes.BitPlaneLayout.slab_kind`."""
    return WIDE if slab < wide else DUAL if slab < dual else SIGNED if slab < signed else NARROW


@triton.jit
def _bytes_apart(word):
    """The words ``[..., 4]``, unchanged, but no longer copies to the compiler.

    It moves a broadcast of all operands behind an elementwise operation, and the assembly would then see one element a
    lane where it makes four.
    """
    nothing = tl.arange(0, 4) >> 2  # zero, which only a later stage finds out
    return word + tl.reshape(nothing, (1,) * (len(word.shape) - 1) + (4,))


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
        words = words + (_bytes_apart(tl.broadcast_to(word, (32, 4, 4))),)
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
def load_keys(
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
def value_planes(tables, KIND: tl.constexpr):
    """Where each plane of the values is, and of how many coordinates: ``before << 16 | coordinates``."""
    planes = ()
    for j in tl.static_range(KIND):
        planes = planes + (tl.load(tables + _VALUE_PLANES + j),)
    return planes


@triton.jit
def value_words(base, planes, ROWS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
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
def load_values(words, planes, tables, levels, ROWS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
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
def prefetch(base, count):
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
def per_group(x, GROUPS: tl.constexpr, HEADS: tl.constexpr):
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
def combined(product):
    """int32 products of high and low columns ``[n, columns]`` -> float32 ``[n, columns / 2]``."""
    high, low = tl.split(tl.reshape(product, (product.shape[0], product.shape[1] // 2, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def products(high, low, operands, low_operands, CHUNK: tl.constexpr, SLABS: tl.constexpr, WIDE_SLABS: tl.constexpr):
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
def one_of(x, index, SIZE: tl.constexpr):
    """``x[index]`` of a tensor ``[SIZE]``."""
    return tl.sum(tl.where(tl.arange(0, SIZE) == index, x, 0.0), axis=0)


@triton.jit
def prepare_query(
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
        halves = halves + per_group(tl.reshape(even, (1, COLUMNS // 2)), GROUPS, HEADS)
    return operands, low_operands, unit / LARGEST, ratios, halves


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def plane_norms(base, plane, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A plane of norms from ``base`` on, as four floats a lane: log codes as ``x`` (kernels.tile_norms), or fp16."""
    if LOG:
        return load_norms((base + plane * 128).to(tl.pointer_type(tl.uint32)), LOG, ASSEMBLY)
    else:
        four = tl.load((base + plane * 256).to(tl.pointer_type(tl.uint64)) + tl.arange(0, 32))
        return _half(four, 0), _half(four, 16), _half(four, 32), _half(four, 48)


@triton.jit
def group_norms(base, last_norm, lows, steps, gains, GROUP: tl.constexpr, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A group's norms ``[128]``, times its ratio; those of a group that the head has not are some numbers."""
    norms = plane_norms(base, tl.minimum(last_norm, GROUP), LOG, ASSEMBLY)
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
def log_norms(n, low, step, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """log2 of the values' norms, four a lane; finite for zero norms too."""
    if LOG:
        return value_log_norms(n, low, step, LOG)
    else:
        return _log2(n[0], ASSEMBLY), _log2(n[1], ASSEMBLY), _log2(n[2], ASSEMBLY), _log2(n[3], ASSEMBLY)


@triton.jit
def weighted(a, b, p, HEADS: tl.constexpr, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """float32 ``[rows, HEADS]``: a page's values times the integers of ``p [128 tokens, HEADS]``."""
    columns = probability_columns(p, HEADS, ASSEMBLY)
    result = _used(combined(tl.dot(a, columns, out_dtype=tl.int32)), HEADS)
    if KIND == _WIDE:
        result += 0.0625 * _used(combined(tl.dot(b, columns, out_dtype=tl.int32)), HEADS)
    return result


@triton.jit
def _used(x, HEADS: tl.constexpr):
    """The columns of heads: of four heads' columns, half are there to fill the instruction."""
    if HEADS == 4:
        x, _ = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, 4)), (0, 2, 1)))
    return x
