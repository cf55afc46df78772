# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment,misc"
# (tuples grow in unrolled loops, which mypy does not follow)
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Encoding straight into tile pages, in Triton: rotate, norm, code, correct the norm, pack.

:func:`prefill` encodes whole pages, :func:`append` one token a sequence; keys and values of all heads in one launch.
Words of a value page hold codes of several tokens, so those of a page that is not filled in one go are read, changed
where the new tokens are and written; no two blocks of a launch touch the same words.

**Rotation.** Tensor cores multiply fp16 numbers, exactly. A vector in fp16 is one factor as it is; others are scaled by
a power of two to fp16's range, and float32 ones split in two. The matrix is the sum of two fp16 matrices (22 bits).

**Codes.** Codebooks are symmetric: a coordinate's magnitude is compared with the positive thresholds, times the
vector's length, and its sign turns the code over. What the comparisons select is an *entry*, the pattern of the
positive code in its low byte and the square of its level above: the sum of a slab's entries is also the sum of squares.

**Packing.** Coordinates come in an order (:func:`coordinate`) that leaves the eight codes of a key word in one thread's
registers; they are shifted to the nibbles of one word a slab, and a plane's word is put together from the slabs'.

What it computes is :meth:`kvbench.kernels.rotated_codebook.RotatedCodebookCodec.encode`; sums are taken in another
order, so a coordinate within rounding of a threshold may get the neighbouring code. Vectors with numbers that are not
finite raise a flag in memory and encode as zero. Tested: tests/kernels/test_triton_encode.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_centre_kernels import centre_at, centre_vectors, page_centres

FP16_MAX = tl.constexpr(65504.0)
CODE_BITS = tl.constexpr(0x6400)  # fp16's 1024, whose low mantissa bits are an integer
CODE_BIAS = tl.constexpr(1024.0)
_FLIP, _WIDE, _RUN = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)  # columns of ``entries`` after the entries


@triton.jit
def coordinate(n):
    """The coordinate in column ``n`` of a rotated tile: its bits are n[6:4], n[2:1], n[3], n[0].

    A lane of the tensor core's result owns the columns that differ in n[6:3] and n[0].
    """
    return (n & 0x71) | ((n & 6) << 1) | ((n & 8) >> 2)


@triton.jit
def _rotate(raw, high, low):
    """``raw [rows, 128]`` times the matrix ``high + low [128, 128]``, and each row's scale, to be multiplied back."""
    if raw.dtype == tl.float16:
        y = tl.dot(raw, low)
        return tl.dot(raw, high, y), tl.full((raw.shape[0],), 1.0, tl.float32)
    else:
        x = raw.to(tl.float32)
        exponent = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 15), 254)
        x *= ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # the largest is now below 2^15
        first = x.to(tl.float16)
        y = tl.dot(first, low)
        if raw.dtype == tl.float32:
            y = tl.dot((x - first.to(tl.float32)).to(tl.float16), high, y)
        return tl.dot(first, high, y), ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quarters(y, COLUMNS: tl.constexpr):
    """``[128, 4 * COLUMNS]`` -> its four quarters ``[128, COLUMNS]``."""
    pairs = tl.permute(tl.reshape(y, (128, 2, 2, COLUMNS)), (0, 3, 2, 1))  # row, column, quarter[0], quarter[1]
    front, back = tl.split(pairs)
    a, b = tl.split(front)
    c, d = tl.split(back)
    return a, b, c, d


@triton.jit
def _whole(a, b, c, d):
    """The inverse of :func:`_quarters`."""
    pairs = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (128, 128))


@triton.jit
def _entries(y, length, thresholds, entries, WIDE: tl.constexpr):
    """The entry of every coordinate ``y [rows, columns]`` of vectors with ``length [rows]``."""
    size = tl.abs(y)
    found = tl.zeros(y.shape, tl.int32) + tl.load(entries)
    for k in tl.static_range(7 if WIDE else 3):
        found = tl.where(size > (length * tl.load(thresholds + k))[:, None], tl.load(entries + k + 1), found)
    return found


@triton.jit
def _in_nibble(pattern, half, unit, WIDE: tl.constexpr):
    """Patterns moved to their nibble ``4 * half + unit`` of a word; signs of wide codes: see kernels.tiles._shifts."""
    word = (pattern & 7) << (16 * half + 4 * unit)
    if WIDE:
        word |= (pattern >> 3) << (8 * unit + tl.where(half == 0, 7, 3))
    return word


@triton.jit
def _key_slab_of(y, length, thresholds, entries, WIDE: tl.constexpr):
    found = _entries(y, length, thresholds, entries, WIDE)
    pattern = (found & 15) ^ tl.where(y > 0, 0, tl.load(entries + _FLIP))
    n = tl.arange(0, 32)
    words = _in_nibble(pattern, (n >> 4)[None, :], (((n >> 2) & 2) | (n & 1))[None, :], WIDE)
    words = tl.sum(tl.sum(tl.reshape(words, (128, 4, 4, 2)), axis=3), axis=1)
    return words, (tl.sum(found, axis=1) >> 8).to(tl.float32)


@triton.jit
def _key_slab(y, length, thresholds, entries, ANY_WIDE: tl.constexpr):
    """A slab of keys ``[128, 32]``: its codes in the nibbles of a word a lane ``[128, 4]``, and the sums of squared
    levels ``[128]``."""
    if ANY_WIDE:
        if tl.load(entries + _WIDE) == 1:
            words, squares = _key_slab_of(y, length, thresholds, entries, True)
        else:
            words, squares = _key_slab_of(y, length, thresholds, entries, False)
    else:
        words, squares = _key_slab_of(y, length, thresholds, entries, False)
    return words, squares


@triton.jit
def _share(pointer):
    """What a slab gives to a word: the bits of its nibbles, and how far they move left and right."""
    return (
        tl.load(pointer).to(tl.uint32, bitcast=True),
        tl.load(pointer + 1).to(tl.uint32, bitcast=True),
        tl.load(pointer + 2).to(tl.uint32, bitcast=True),
    )


@triton.jit
def _part(nibbles, share):
    """A slab's nibbles -> its bits of a word."""
    return (((nibbles.to(tl.uint32, bitcast=True) & share[0]) << share[1]) >> share[2]).to(tl.int32, bitcast=True)


@triton.jit
def _word(nibbles, shares):
    """The four slabs' nibbles -> a plane's words."""
    front = _part(nibbles[0], _share(shares)) | _part(nibbles[1], _share(shares + 3))
    return front | _part(nibbles[2], _share(shares + 6)) | _part(nibbles[3], _share(shares + 9))


@triton.jit
def _norm_code(pointer):
    """What a run's norm is coded with: low, step, unit, and its codebook's scale."""
    return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)


@triton.jit
def _stored(length, squares, code, LOG: tl.constexpr):
    """A norm as stored, corrected for the length of the coded vector, whose squared levels sum to ``squares``."""
    low, step, unit, scale = code
    corrected = length / tl.maximum(tl.sqrt(squares) * scale, 1e-30)
    if LOG:
        steps = tl.floor((tl.log2(tl.maximum(corrected, 1e-37)) - low) / step + 0.5)
        return tl.where(corrected > 0, tl.minimum(tl.maximum(steps, 1.0), 255.0), 0.0).to(tl.uint8)
    else:
        return tl.minimum(corrected / unit, FP16_MAX).to(tl.float16)


@triton.jit
def _store_norms(plane, slot, stored, mask, LOG: tl.constexpr):
    """See :func:`kvbench.kernels.tiles.pack_norms`."""
    lane = ((slot >> 4) & 3) * 8 + (slot & 7)
    high, middle = (slot >> 6) & 1, (slot >> 3) & 1
    if LOG:
        tl.store(plane + lane * 4 + high * 2 + middle, stored, mask=mask)
    else:
        tl.store(plane.to(tl.pointer_type(tl.float16)) + high * 64 + lane * 2 + middle, stored, mask=mask)


@triton.jit
def _row_word(row):
    """The word of a page's row that belongs to the first of the row's four lanes, within a plane."""
    return ((row >> 4) & 3) * 128 + (row & 7) * 16 + ((row >> 6) & 1) * 2 + ((row >> 3) & 1)


@triton.jit
def _raise(flag, bad):
    """Set the flag where a vector is ``bad``."""
    tl.store(flag + tl.zeros(bad.shape, tl.int32), 1, mask=bad)


@triton.jit
def _of_run(parts, runs, r):
    """The sum of the four slabs' ``parts`` over the slabs of run ``r``."""
    front = tl.where(runs[0] == r, parts[0], 0.0) + tl.where(runs[1] == r, parts[1], 0.0)
    return front + tl.where(runs[2] == r, parts[2], 0.0) + tl.where(runs[3] == r, parts[3], 0.0)


@triton.jit
def _encode_keys(y, back, slot, new, table, at, flag, WORDS, RUNS, LOG, ANY_WIDE):
    """Rotated keys ``y [128, 128]`` of a page's tokens into the page at ``at`` where ``new``. ``back``: the rows'
    scale. ``table``: this head's thresholds, entries, shares, norms, offsets."""
    thresholds, entries, shares, norms, offsets = table
    slabs = _quarters(y, 32)
    runs, sums, words, squares = (), (), (), ()
    for slab in tl.static_range(4):
        runs = runs + (tl.load(entries + slab * 16 + _RUN),)
        sums = sums + (tl.sum(slabs[slab] * slabs[slab], axis=1),)
    finite = tl.sqrt(sums[0] + sums[1] + sums[2] + sums[3]) * back < float("inf")
    lengths = ()
    for r in tl.static_range(RUNS):
        lengths = lengths + (tl.sqrt(_of_run(sums, runs, r)),)
    for slab in tl.static_range(4):
        length = lengths[0]
        for r in tl.static_range(1, RUNS):
            length = tl.where(runs[slab] == r, lengths[r], length)
        word, square = _key_slab(slabs[slab], length, thresholds + slab * 8, entries + slab * 16, ANY_WIDE)
        words, squares = words + (word,), squares + (square,)

    # stores last: nothing is loaded or computed past one that might alias
    planes, stored = (), ()
    for word in tl.static_range(WORDS):
        planes = planes + (_word(words, shares + word * 12),)
    for r in tl.static_range(RUNS):
        true = tl.where(finite, lengths[r] * back, 0.0)
        stored = stored + (_stored(true, _of_run(squares, runs, r), _norm_code(norms + 4 * r), LOG),)
    plane = at + tl.load(offsets + 1) * 128
    target = (at + tl.load(offsets) * 128).to(tl.pointer_type(tl.int32))
    target += _row_word(slot)[:, None] + tl.arange(0, 4)[None, :] * 4
    for word in tl.static_range(WORDS):
        tl.store(target + word * 512, planes[word], mask=new[:, None])
    for r in tl.static_range(RUNS):
        _store_norms(plane + r * (128 if LOG else 256), slot, stored[r], new & (runs[3] >= r), LOG)
    _raise(flag, new & (finite == 0))


@triton.jit
def _nibble_of(slot):
    """A value page's column of a token: half of a slab and unit, see kernels.tiles."""
    return (slot >> 2) & 1, ((slot >> 6) & 1) * 2 + ((slot >> 3) & 1)


@triton.jit
def _value_codes(y, length, thresholds, entries, WIDE: tl.constexpr):
    """32 coordinates of a page's values ``[128, 32]``: patterns as fp16 numbers, plus ``CODE_BIAS``, and the sums of
    squared levels ``[128]``."""
    found = _entries(y, length, thresholds, entries, WIDE)
    bits = (found & 15) ^ tl.where(y > 0, CODE_BITS, CODE_BITS ^ tl.load(entries + _FLIP))
    return bits.to(tl.int16).to(tl.float16, bitcast=True), tl.sum(found, axis=1) >> 8


@triton.jit
def _nibble_weights():
    """``[128 tokens, 32]`` float16: what a token's code weighs in each half (four nibbles) of the nibbles of each slab
    and lane; columns are slab (two bits), lane (two), half."""
    token, column = tl.arange(0, 128)[:, None], tl.arange(0, 32)[None, :]
    half, unit = _nibble_of(token)
    mine = (((token >> 4) & 3) == (column >> 3)) & ((token & 3) == ((column >> 1) & 3)) & (half == (column & 1))
    return tl.where(mine, 1 << (4 * unit), 0).to(tl.float16)


@triton.jit
def _signs_apart(nibbles):
    """Nibbles of wide codes -> the signs where kernels.tiles._shifts wants them."""
    signs = nibbles.to(tl.uint32, bitcast=True)
    front, back = signs & 0x8888, (signs >> 16) & 0x8888
    front, back = (front | (front << 8)) & 0x880088, (back | (back << 8)) & 0x880088
    front, back = (front | (front << 4)) & 0x8080808, (back | (back << 4)) & 0x8080808
    return (signs & 0x77777777 | (front << 4) | back).to(tl.int32, bitcast=True)


@triton.jit
def _value_nibbles(codes, WIDE: tl.constexpr):
    """The codes of a page's values ``[128 tokens, 128]`` in the nibbles of a word for each slab: four times
    ``[128, 4 lanes]``.

    Transposing and packing is a matrix product: sums of four codes times powers of 16 are exact in float32, and come
    out with a word's parts in one thread.
    """
    halves = tl.dot(tl.trans(codes), _nibble_weights()) - CODE_BIAS * 4369.0  # 0x1111
    halves = tl.reshape(halves.to(tl.int32), (128, 4, 4, 2))
    words = tl.sum(halves << (tl.arange(0, 2) * 16)[None, None, None, :], axis=3)
    if WIDE:
        words = _signs_apart(words)
    return _quarters(words, 4)


@triton.jit
def _encode_values(y, back, slot, new, whole, table, at, flag, WORDS: tl.constexpr, LOG: tl.constexpr):
    """Rotated values ``y [128, 128]`` of a page's tokens into the page at ``at`` where ``new``: everywhere if
    ``whole``."""
    WIDE: tl.constexpr = WORDS == 4
    thresholds, entries, shares, norms, offsets = table
    length = tl.sqrt(tl.sum(y * y, axis=1))
    finite = length * back < float("inf")
    a, b, c, d = _quarters(y, 32)
    a, square_a = _value_codes(a, length, thresholds, entries, WIDE)
    b, square_b = _value_codes(b, length, thresholds, entries, WIDE)
    c, square_c = _value_codes(c, length, thresholds, entries, WIDE)
    d, square_d = _value_codes(d, length, thresholds, entries, WIDE)
    true, squares = tl.where(finite, length * back, 0.0), (square_a + square_b + square_c + square_d).to(tl.float32)
    stored = _stored(true, squares, _norm_code(norms), LOG)
    nibbles = _value_nibbles(_whole(a, b, c, d), WIDE)
    planes = ()
    for word in tl.static_range(WORDS):
        planes = planes + (_word(nibbles, shares + word * 12),)

    _store_norms(at + tl.load(offsets + 1) * 128, slot, stored, new, LOG)
    _raise(flag, new & (finite == 0))
    target = (at + tl.load(offsets) * 128).to(tl.pointer_type(tl.int32))
    target += _row_word(coordinate(slot))[:, None] + tl.arange(0, 4)[None, :] * 4
    if whole:
        for word in tl.static_range(WORDS):
            tl.store(target + word * 512, planes[word])
    else:
        half, unit = _nibble_of(slot)
        taken = tl.reshape(_in_nibble(tl.where(new, 15, 0), half, unit, WIDE), (2, 4, 2, 2, 4))
        taken = tl.sum(tl.sum(tl.sum(taken, axis=2), axis=2), axis=0)  # slab, lane
        for word in tl.static_range(WORDS):
            mask = tl.sum(_part(taken, _share(shares + word * 12 + tl.arange(0, 4)[:, None] * 3)), axis=0)
            mask = tl.broadcast_to(mask[None, :], (128, 4))
            old = tl.load(target + word * 512, mask=mask != 0, other=0)
            tl.store(target + word * 512, (old & ~mask) | (planes[word] & mask), mask=mask != 0)


@triton.jit
def _table(thresholds, entries, shares, norms, offsets, head):
    """One head's rows of the tables."""
    return thresholds + head * 32, entries + head * 64, shares + head * 48, norms + head * 12, offsets + head * 2


@triton.jit
def _rotated_page(source, stride, page, bounds, high, low, centre, row, CENTRE: tl.constexpr):
    """The vectors of a page's tokens, less their centre, rotated ``[128, 128]``, their scales, and which tokens are
    new."""
    first, tokens = bounds
    t = tl.arange(0, 128)
    index = page * 128 + t - first
    new = (index >= 0) & (index < tokens)
    x = tl.load(source + index[:, None].to(tl.int64) * stride + t[None, :], mask=new[:, None], other=0.0)
    if CENTRE:
        x = x.to(tl.float32) - page_centres(centre, row[0], row[1], page)
    y, scale = _rotate(x, high, low)
    return y, scale, new


@triton.jit
def prefill(
    tokens,
    share,
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
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    RUNS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    ANY_WIDE: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Grid (blocks, 2 * kv_heads, batch): ``share`` pages of one head's keys (first half of the heads) or values.

    keys, values ``[batch, tokens, kv_heads, 128]``, strides (batch, token, head); token ``i`` goes to slot
    ``firsts[b] + i``. Per head of the keys, then of the values: rotations float16 ``[2 terms, 128 dims, 128 columns]``;
    backs float32, the rotation's scale to be multiplied back; thresholds float32 ``[4 slabs, 8]``; entries int32
    ``[4 slabs, 16]`` (8 entries, flip, wide, run); shares int32 ``[4 words, 4 slabs, 3]`` (mask, left, right); norms
    float32 ``[3 runs, 4]`` (low, step, unit, codebook's scale); offsets int32 ``[2]``: codes and norms in a page, in
    units of 128 bytes. ``flag`` int32 ``[1]`` is set where a number is not finite. ``centre``, with CENTRE: what is
    taken off keys, see :meth:`kvbench.kernels.tile_centre.TileCentre.encoding`.
    """
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(firsts + sequence)
    start = first // 128 + block * share
    stop = tl.minimum(start + share, (first + tokens + 127) // 128)
    table = _table(thresholds, entries, shares, norms, offsets, head)
    t = tl.arange(0, 128)
    square = t[:, None] * 128 + t[None, :]
    high, low = tl.load(rotations + head * 32768 + square), tl.load(rotations + head * 32768 + 16384 + square)
    back = tl.load(backs + head)
    pages += sequence.to(tl.int64) * batch_stride
    bounds = (first, tokens)
    if head < kv_heads:
        source = keys + sequence.to(tl.int64) * key_strides[0] + head.to(tl.int64) * key_strides[2]
        for page in range(start, stop):
            y, scale, new = _rotated_page(
                source, key_strides[1], page, bounds, high, low, centre, (sequence, head), CENTRE
            )
            at = pages + page_bytes.to(tl.int64) * page
            _encode_keys(y, scale * back, t, new, table, at, flag, KEY_WORDS, RUNS, KEY_LOG, ANY_WIDE)
    else:
        source = values + sequence.to(tl.int64) * value_strides[0] + (head - kv_heads).to(tl.int64) * value_strides[2]
        for page in range(start, stop):
            y, scale, new = _rotated_page(
                source, value_strides[1], page, bounds, high, low, centre, (sequence, head), False
            )
            at = pages + page_bytes.to(tl.int64) * page
            whole = (page * 128 >= first) & (page * 128 + 128 <= first + tokens)
            _encode_values(y, scale * back, t, new, whole, table, at, flag, VALUE_WORDS, VALUE_LOG)


@triton.jit
def _prefetch(pointers):
    """Ask for the lines of ``pointers`` to come to the L2 cache; takes no registers and waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def append_token(
    head,
    sequence,
    io,
    sizes,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    RUNS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    ANY_WIDE: tl.constexpr,
    CENTRE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """What a block of :func:`append` does; ``io`` and ``sizes`` are its arguments from ``keys`` and ``kv_heads``."""
    keys, values, rotations, backs, thresholds, entries, shares, norms, offsets, pages, firsts, flag, centre = io
    kv_heads, page_bytes, batch_stride, key_strides, value_strides = sizes
    WIDE: tl.constexpr = ANY_WIDE or VALUE_WORDS == 4
    if PREFETCH:  # registers hold a part of the rotation at a time, and the parts would come one after the other
        _prefetch(rotations + head * 32768 + tl.arange(0, 512) * 64)
    n = tl.arange(0, 128)
    slab = n >> 5
    thresholds, entries, shares, norms, offsets = _table(thresholds, entries, shares, norms, offsets, head)
    last_run = entries + 48 + _RUN
    thresholds += slab * 8
    entries += slab * 16
    # everything is asked for at once: round trips to memory are most of the time
    position = tl.load(firsts + sequence)
    if CENTRE:
        origin, turns, mu, across = centre_vectors(centre, sequence, head, head < kv_heads)
    code_offset, norm_offset, back = tl.load(offsets), tl.load(offsets + 1), tl.load(backs + head)
    if head < kv_heads:
        source = keys + sequence.to(tl.int64) * key_strides[0] + head.to(tl.int64) * key_strides[2]
    else:
        source = values + sequence.to(tl.int64) * value_strides[0] + (head - kv_heads).to(tl.int64) * value_strides[2]
    x = tl.load(source + n).to(tl.float32)
    square = rotations + head * 32768 + n[:, None] * 128 + n[None, :]
    turn = tl.load(square).to(tl.float32) + tl.load(square + 16384).to(tl.float32)
    flip, run, runs = tl.load(entries + _FLIP), tl.load(entries + _RUN), tl.load(last_run) + 1
    bounds, choices = (), (tl.load(entries),)
    for k in tl.static_range(7 if WIDE else 3):
        bounds = bounds + (tl.load(thresholds + k),)
        choices = choices + (tl.load(entries + k + 1),)
    codes = ()
    for r in tl.static_range(RUNS):
        codes = codes + (_norm_code(norms + 4 * r),)
    slot = position % 128
    at = pages + sequence.to(tl.int64) * batch_stride + page_bytes.to(tl.int64) * (position // 128)
    words = (at + code_offset * 128).to(tl.pointer_type(tl.int32))
    target = words + _row_word(coordinate(n)) + (slot & 3) * 4  # a value's
    key_shares, value_shares, old = (), (), ()
    for word in tl.static_range(KEY_WORDS):
        key_shares = key_shares + (_share(shares + word * 12 + tl.arange(0, 4)[:, None] * 3),)
    for word in tl.static_range(VALUE_WORDS):
        value_shares = value_shares + (_share(shares + word * 12 + ((slot >> 4) & 3) * 3),)
        old = old + (tl.load(target + word * 512, mask=(n >= 0) & (head >= kv_heads), other=0),)

    if CENTRE:
        x -= centre_at(turns, mu, across, position - origin)[0]
    y = tl.sum(turn * x[:, None], axis=0)
    size, squares = tl.abs(y), y * y
    finite = tl.sqrt(tl.sum(squares, axis=0)) * back < float("inf")
    tl.store(flag, 1, mask=finite == 0)
    back = tl.where(finite, back, 0.0)
    length, lengths = tl.zeros((128,), tl.float32), ()
    for r in tl.static_range(RUNS):
        lengths = lengths + (tl.sqrt(tl.sum(tl.where(run == r, squares, 0.0), axis=0)),)
        length = tl.where(run == r, lengths[r], length)
    found = choices[0]
    for k in tl.static_range(7 if WIDE else 3):
        found = tl.where(size > length * bounds[k], choices[k + 1], found)
    pattern = (found & 15) ^ tl.where(y > 0, 0, flip)

    for r in tl.static_range(RUNS):
        levels = tl.sum(tl.where(run == r, found >> 8, 0), axis=0).to(tl.float32)
        true = tl.where(finite, lengths[r] * back, 0.0)
        if head < kv_heads:
            plane = at + norm_offset * 128 + r * (128 if KEY_LOG else 256)
            _store_norms(plane, slot, _stored(true, levels, codes[r], KEY_LOG), r < runs, KEY_LOG)
        elif r == 0:
            plane = at + norm_offset * 128
            _store_norms(plane, slot, _stored(true, levels, codes[0], VALUE_LOG), r < runs, VALUE_LOG)

    if head < kv_heads:
        _store_key_words(words + _row_word(slot), pattern, key_shares, KEY_WORDS, WIDE)
    else:
        _store_value_words(target, pattern, slot, value_shares, old, VALUE_WORDS, WIDE)


@triton.jit
def _store_key_words(target, pattern, shares, WORDS: tl.constexpr, WIDE: tl.constexpr):
    """One token's words, a lane each."""
    n = tl.arange(0, 128)
    nibbles = _in_nibble(pattern, (n >> 4) & 1, ((n >> 2) & 2) | (n & 1), WIDE)
    nibbles = tl.sum(tl.sum(tl.reshape(nibbles, (4, 4, 4, 2)), axis=3), axis=1)  # slab, lane
    for word in tl.static_range(WORDS):
        tl.store(target + tl.arange(0, 4) * 4 + word * 512, tl.sum(_part(nibbles, shares[word]), axis=0))


@triton.jit
def _store_value_words(target, pattern, slot, shares, old, WORDS: tl.constexpr, WIDE: tl.constexpr):
    """One token's nibbles of ``old`` words, a coordinate each."""
    half, unit = _nibble_of(slot)
    nibbles, taken = _in_nibble(pattern, half, unit, WIDE), _in_nibble(slot * 0 + 15, half, unit, WIDE)
    for word in tl.static_range(WORDS):
        mask = _part(taken, shares[word])
        tl.store(target + word * 512, (old[word] & ~mask) | _part(nibbles, shares[word]))


@triton.jit
def append(
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
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    RUNS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    ANY_WIDE: tl.constexpr,
    CENTRE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Grid (2 * kv_heads, batch): one head's key or value of one token, into slot ``firsts[b]``.

    Arguments as in :func:`prefill`. There is one vector and so no matrix product: sums are taken in float32.
    """
    append_token(
        tl.program_id(0),
        tl.program_id(1),
        (keys, values, rotations, backs, thresholds, entries, shares, norms, offsets, pages, firsts, flag, centre),
        (kv_heads, page_bytes, batch_stride, key_strides, value_strides),
        KEY_WORDS,
        VALUE_WORDS,
        RUNS,
        KEY_LOG,
        VALUE_LOG,
        ANY_WIDE,
        CENTRE,
        PREFETCH,
    )
