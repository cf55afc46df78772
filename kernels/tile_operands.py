# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Operands of the int8 matrix products, in Triton: codes from a page, and numbers split into two signed bytes.

The query and the probabilities are integers ``256 * high + low`` up to 32512; a head has a column for each part.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_codes import load_words, plain_slab, slab1, slab2, slab4, unpack_words

LARGEST = tl.constexpr(32512.0)  # 127 * 256: the largest integer whose high and low parts are signed bytes
ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds
SPLIT_MAGIC = tl.constexpr(8388736.0)  # 2^23 + 128: byte 1 is the high part, byte 0 is 128 + the low part

SPLIT_PTX = tl.constexpr("""{
.reg .b32 a, b, c, d, e, f;
add.f32 a, $2, 0f4B000080;
add.f32 b, $3, 0f4B000080;
add.f32 c, $4, 0f4B000080;
add.f32 d, $5, 0f4B000080;
prmt.b32 e, a, b, 0x5140;
prmt.b32 f, c, d, 0x5140;
prmt.b32 $0, e, f, 0x7632;
prmt.b32 e, e, f, 0x5410;
xor.b32 $1, e, 0x80808080;
}""")


@triton.jit
def split_bytes(x, ASSEMBLY: tl.constexpr):
    """Non-negative floats up to 32512 -> int8 (high, low) with ``x = 256 * high + low`` after rounding."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            SPLIT_PTX, "=r,=r,r,r,r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        bits = (x + SPLIT_MAGIC).to(tl.int32, bitcast=True)
        return ((bits >> 8) & 127).to(tl.int8), ((bits & 255) - 128).to(tl.int8)


@triton.jit
def byte_columns(high, low, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """``[ROWS, HEADS]`` twice -> ``[ROWS, columns]``: column ``2 g`` is head g's high part, ``2 g + 1`` its low.

    At least 16 columns, for want of which Triton leaves the warpgroup instructions: 4 heads fill half of them.
    """
    pair = tl.join(high, low)
    if HEADS == 4:
        pair = tl.permute(tl.join(pair, tl.zeros((ROWS, 4, 2), high.dtype)), (0, 3, 1, 2))
        return tl.reshape(pair, (ROWS, 16))
    else:
        return tl.reshape(pair, (ROWS, 2 * HEADS))


@triton.jit
def per_head(x, HEADS: tl.constexpr):
    """A value a column -> a value a head: the columns of a head's high part."""
    if HEADS == 4:
        x, _ = tl.split(tl.permute(tl.reshape(x, (2, 8)), (1, 0)))
    even, _ = tl.split(tl.reshape(x, (HEADS, 2)))
    return even


@triton.jit
def load_run(query, group, scale, FIRST: tl.constexpr, SLABS: tl.constexpr, HEADS: tl.constexpr):
    """A run's slabs of the rotated query ``[32 * SLABS, columns]`` (a head's values in both its columns, so that the
    operand needs no rearrangement), times the run's scale, and the largest magnitude in each column."""
    column = tl.arange(0, 16 if HEADS == 4 else 2 * HEADS)[None, :]
    at = 32 * FIRST + tl.arange(0, 32 * SLABS)[:, None]
    y = tl.load(query + (column >> 1) * 128 + at, mask=column < 2 * group, other=0.0) * scale
    return y, tl.max(tl.abs(y), axis=0)


@triton.jit
def byte_operand(y, step):
    """A run's slabs as integers of ``step [columns]``: int8, high part in even columns and low part in odd; and the
    integers."""
    column = tl.arange(0, y.shape[1])[None, :]
    integer = (y * (1.0 / step)[None, :] + ROUND_MAGIC) - ROUND_MAGIC
    high = (integer * 0.00390625 + 0.001953125 + ROUND_MAGIC) - ROUND_MAGIC
    return tl.where((column & 1) == 0, high, integer - 256.0 * high).to(tl.int8), integer


@triton.jit
def combine(product, HEADS: tl.constexpr):
    """int32 ``[128, columns]`` high and low products -> float32 ``[128, HEADS]``."""
    if HEADS == 4:
        used, _ = tl.split(tl.permute(tl.reshape(product, (128, 2, 4, 2)), (0, 2, 3, 1)))
        high, low = tl.split(used)
    else:
        high, low = tl.split(tl.reshape(product, (128, HEADS, 2)))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def probability_columns(p, HEADS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Scaled probabilities ``[128 tokens, HEADS]`` -> int8 ``[128, columns]``, tokens in the order of a value page."""
    high, low = split_bytes(p, ASSEMBLY)
    columns = byte_columns(high, low, 128, HEADS)
    COLUMNS: tl.constexpr = 16 if HEADS == 4 else 2 * HEADS
    columns = tl.reshape(columns, (2, 4, 2, 8, COLUMNS))  # token[6], [5:4], [3], [2:0]
    return tl.reshape(tl.permute(columns, (1, 3, 0, 2, 4)), (128, COLUMNS))


@triton.jit
def load_tile(pointer, places, levels, at, tables, WORDS: tl.constexpr, TEMPLATE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A page's codes as eight int8 tiles ``[128, 16]`` (assembly) or four slabs ``[128, 32]`` (plain)."""
    if ASSEMBLY:
        return unpack_words(load_words(pointer, at, WORDS), tables, TEMPLATE)
    else:
        words = pointer.to(tl.pointer_type(tl.uint32))
        return (
            plain_slab(words, places, levels, 0),
            plain_slab(words, places, levels, 1),
            plain_slab(words, places, levels, 2),
            plain_slab(words, places, levels, 3),
        )


@triton.jit
def multiply(tile, b, FIRST: tl.constexpr, SLABS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """``SLABS`` slabs of a tile, from ``FIRST``, times ``b`` int8 ``[32 * SLABS, columns]`` -> int32."""
    if ASSEMBLY:
        o: tl.constexpr = 2 * FIRST
        if SLABS == 4:
            a = slab4(tile)
        elif SLABS == 2:
            a = slab2(tile[o], tile[o + 1], tile[o + 2], tile[o + 3])
        else:
            a = slab1(tile[o], tile[o + 1])
        return tl.dot(a, b, out_dtype=tl.int32)
    elif SLABS == 4:
        even, odd = tl.join(tile[0], tile[2]), tl.join(tile[1], tile[3])
        a = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (128, 128))
        return tl.dot(a, b, out_dtype=tl.int32)
    elif SLABS == 2:
        a = tl.reshape(tl.permute(tl.join(tile[FIRST], tile[FIRST + 1]), (0, 2, 1)), (128, 64))
        return tl.dot(a, b, out_dtype=tl.int32)
    else:
        return tl.dot(tile[FIRST], b, out_dtype=tl.int32)
