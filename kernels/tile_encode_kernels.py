# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Encoding straight into tile pages, in Triton: norm, rotate, code, correct the norm, pack.

A block encodes the new tokens of one page (BLOCK 128), or up to 16 tokens of it (BLOCK 16, for appending one token),
of one head of one sequence's keys or values. Words of a value page hold codes of several tokens, so they are read,
changed where the new tokens are and written; no two blocks of a launch touch the same words.

What it computes is :meth:`kvbench.kernels.rotated_codebook.RotatedCodebookCodec.encode` in float32; sums are taken in
another order, so a coordinate within rounding of a threshold may get the neighbouring code. Numbers that are not
finite raise a flag in memory and encode as zero. Tested: tests/kernels/test_triton_encode.py.
"""

import triton
import triton.language as tl

FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _place(column_bits, place, INDEX: tl.constexpr):
    """The shift of bit INDEX of codes in the columns (half of a slab, unit), and their word, -1 where there is none."""
    half, unit = column_bits
    shift = 4 * (4 * half + unit) + (place & 3)
    if INDEX == 3:  # a sign: see kernels.tiles._shifts
        shift = 8 * unit + tl.where(half == 0, 7, 3)
    return shift, tl.where(place >= 0, place >> 2, -1)


@triton.jit
def _stored(corrected, low, step, unit, LOG: tl.constexpr):
    """A norm as stored: a log code, or fp16 in the group's unit."""
    if LOG:
        code = tl.floor(tl.div_rn(tl.log2(tl.maximum(corrected, 1e-37)) - low, step) + 0.5)
        return tl.where(corrected > 0, tl.minimum(tl.maximum(code, 1.0), 255.0), 0.0).to(tl.uint8)
    else:
        return tl.minimum(tl.div_rn(corrected, unit), FP16_MAX).to(tl.float16)


@triton.jit
def encode(
    x,
    rotation,
    thresholds,
    levels,
    slabs,
    norms,
    places,
    offsets,
    pages,
    firsts,
    flag,
    tokens,
    page_bytes,
    batch_stride,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    VALUE: tl.constexpr,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    RUNS: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks, kv_heads, batch): tokens ``firsts[b] + i`` for ``x [batch, tokens, kv_heads, 128]``.

    Per head: rotation float32 ``[coordinate, dim]``; thresholds and levels float32 ``[4 slabs, 16]``; slabs float32
    ``[4, 3]`` (codebook scale, run, width); norms float32 ``[3 runs, 3]`` (low, step, unit); places int32 ``[4 slabs,
    4 bits]``; offsets int32 ``[2]``: codes and norms in a page, in units of 128 bytes. ``flag`` int32 ``[1]`` is set
    where a number is not finite.
    """
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(firsts + sequence)
    t = tl.arange(0, BLOCK)
    c = tl.arange(0, 128)
    base = (first // BLOCK + block) * BLOCK
    index = base + t - first
    new = (index >= 0) & (index < tokens)
    page, slot = base // 128, base % 128 + t
    source = x + sequence.to(tl.int64) * x_batch_stride + head * x_head_stride
    raw = tl.load(
        source + index[:, None].to(tl.int64) * x_token_stride + c[None, :],
        mask=new[:, None] & (c >= 0)[None, :],
        other=0.0,
    ).to(tl.float32)
    finite = tl.abs(raw) < float("inf")
    if tl.min(finite.to(tl.int32)) == 0:
        tl.store(flag, 1)
    raw = tl.where(finite, raw, 0.0)
    turn = tl.load(rotation + head * 16384 + c[:, None] + c[None, :] * 128)
    y = tl.dot(raw, turn, input_precision=PRECISION)

    slab = head * 4 + (c >> 5)
    run = tl.load(slabs + slab * 3 + 1).to(tl.int32)
    scale = tl.load(slabs + slab * 3)
    width = tl.load(slabs + slab * 3 + 2)
    norm = tl.zeros((BLOCK, 128), tl.float32)
    unit = y
    for r in tl.static_range(RUNS):
        mine = (run == r)[None, :]
        length = tl.sqrt_rn(tl.sum(tl.where(mine, y * y, 0.0), axis=1))
        norm = tl.where(mine, length[:, None], norm)
        unit = tl.where(mine, y * tl.div_rn(1.0, tl.maximum(length, 1e-30))[:, None], unit)
    code = tl.zeros((BLOCK, 128), tl.int32)
    level = tl.zeros((BLOCK, 128), tl.float32) + tl.load(levels + slab * 16)[None, :]
    for k in tl.static_range(CODES - 1):
        above = unit > tl.load(thresholds + slab * 16 + k)[None, :]
        rise = tl.load(levels + slab * 16 + k + 1) - tl.load(levels + slab * 16 + k)
        code += above.to(tl.int32)
        level += tl.where(above, rise[None, :], 0.0)
    value = level * scale[None, :]

    at = pages + sequence.to(tl.int64) * batch_stride + page_bytes.to(tl.int64) * page
    norm_at = at + tl.load(offsets + head * 2 + 1) * 128
    quad = ((slot >> 4) & 3) * 8 + (slot & 7)
    high, middle = (slot >> 6) & 1, (slot >> 3) & 1
    runs = tl.max(run) + 1
    for r in tl.static_range(RUNS):
        mine = (run == r)[None, :]
        whole = tl.max(tl.where(mine, norm, 0.0), axis=1)
        length = tl.sqrt_rn(tl.sum(tl.where(mine, value * value, 0.0), axis=1))
        entry = norms + head * 9 + r * 3
        stored = _stored(
            tl.div_rn(whole, tl.maximum(length, 1e-30)), tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), LOG
        )
        keep = new & (slot < tl.where(r < runs, 128, 0))
        if LOG:
            tl.store(norm_at + r * 128 + quad * 4 + high * 2 + middle, stored, mask=keep)
        else:
            plane = (norm_at + r * 256).to(tl.pointer_type(tl.float16))
            tl.store(plane + high * 64 + quad * 2 + middle, stored, mask=keep)

    signed = tl.where(code >= 8, code - 8, 15 - code)  # 8 | (7 - code): magnitude and sign
    pattern = tl.where((width == 4)[None, :], signed, code)
    words = (at + tl.load(offsets + head * 2) * 128).to(tl.pointer_type(tl.int32))
    if VALUE:
        _store_value_words(words, pattern, places + head * 16, slot, new, WORDS, BLOCK)
    else:
        _store_key_words(words, pattern, places + head * 16, slot, new, WORDS, BLOCK)


@triton.jit
def _store_key_words(words, pattern, places, slot, new, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows are tokens: every word belongs to one token."""
    c = tl.arange(0, 128)
    column = ((c >> 4) & 1, c & 3)
    lane = ((slot >> 4) & 3) * 32 + (slot & 7) * 4
    at = lane[:, None] * 4 + tl.arange(0, 4)[None, :] * 4 + (((slot >> 6) & 1) * 2 + ((slot >> 3) & 1))[:, None]
    for word in tl.static_range(WORDS):
        bits = tl.zeros((BLOCK, 128), tl.int32)
        for b in tl.static_range(4):
            shift, holder = _place(column, tl.load(places + (c >> 5) * 4 + b), b)
            bits += tl.where((holder == word)[None, :], ((pattern >> b) & 1) << shift[None, :], 0)
        lanes = tl.sum(tl.sum(tl.reshape(bits, (BLOCK, 8, 4, 4)), axis=3), axis=1)
        tl.store(words + word * 512 + at, lanes, mask=new[:, None] & (lanes == lanes))


@triton.jit
def _store_value_words(words, pattern, places, slot, new, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows are coordinates: a word holds tokens that are here and tokens that are not."""
    row = tl.arange(0, 128)
    column = ((slot >> 2) & 1, ((slot >> 6) & 1) * 2 + ((slot >> 3) & 1))
    lane = ((row >> 4) & 3) * 32 + (row & 7) * 4
    at = lane * 4 + ((row >> 6) & 1) * 2 + ((row >> 3) & 1)
    pointers = words + at[None, :] + tl.arange(0, 4)[:, None] * 4
    for word in tl.static_range(WORDS):
        bits = tl.zeros((BLOCK, 128), tl.int32)
        taken = tl.zeros((BLOCK,), tl.int32)
        for b in tl.static_range(4):
            shift, holder = _place(column, tl.load(places + ((slot >> 4) & 3) * 4 + b), b)
            here = (holder == word) & new
            bits += tl.where(here[:, None], ((pattern >> b) & 1) << shift[:, None], 0)
            one = tl.full((BLOCK,), 1, tl.int32)
            taken += tl.where(here, one << shift, 0)
        # blocks start at a multiple of their size, so a token's lane is its place modulo 4
        fresh = tl.sum(tl.reshape(bits, (BLOCK // 4, 4, 128)), axis=0)
        mask = tl.sum(tl.reshape(taken, (BLOCK // 4, 4)), axis=0)[:, None]
        touched = (mask != 0) & (row >= 0)[None, :]
        old = tl.load(pointers + word * 512, mask=touched, other=0)
        tl.store(pointers + word * 512, (old & ~mask) | fresh, mask=touched)
