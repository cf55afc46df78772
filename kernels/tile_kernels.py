# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Triton kernels of decode attention over tile pages: prepare the query, attend in splits, merge.

One query token a sequence. What is computed, with logits in base 2 and ``G`` query heads a KV head::

    q' = rotation q, split into integers 256 * high + low          prepare_query
    logit[t] = norm_k[t] * sum_c levels_k[t, c] q'[c]              attend: int8 matrix product, codes are operand A
    p[t] = 2^(logit[t] + log2(norm_v[t]) - m)                      as integers 256 * high + low
    sum[c] = sum_t levels_v[c, t] p[t],  total = sum_t p[t] / norm_v[t]
    out = rotation_v^T merge(sum / total)                          merge

Folding the value's norm into the logit makes the integers of a page relative to the page's own largest product of
probability and norm, whatever the norms are, and costs nothing: the addition becomes part of a multiply-add, and so does
the mask. ``m`` follows a page's maximum but stays within 2^-12 of the running one, so that a page of small
probabilities keeps its precision.

Lengths are read on the device: a captured graph stays right as the cache grows. All heads of a layer run in one launch and
take their template, tables and offsets from ``ints`` (int32 ``[kv_heads, 16]``, columns below) and ``floats``.

Limits: head_dim 128, at most 16 query heads a KV head, NVIDIA GPUs with compute capability 8.0 or higher for the assembly
path (tuned on 9.0); the plain path runs in the interpreter. Tested: tests/kernels/test_triton_tiles.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_codes import load_words, plain_slab, slab1, slab2, slab4, unpack_words

# columns of ``ints``: template's number, key tables (4 bits: 2 words, 3 bits: 2, 2 bits: 1, 1 bit: 1), value table (2 words),
# then where the head's parts start in a page, in units of 128 bytes
TEMPLATE, KEY_TABLES, VALUE_TABLE, KEY_CODES, VALUE_CODES, KEY_NORMS, VALUE_NORM, INTS = 0, 1, 7, 9, 10, 11, 12, 16
# columns of ``floats``: log2 of the smallest norm and the step of each key run's log code, then the value's
KEY_LOW, KEY_STEP, VALUE_LOW, VALUE_STEP, FLOATS = 0, 3, 6, 7, 8

_TEMPLATE, _TABLES, _VALUE_TABLE = tl.constexpr(TEMPLATE), tl.constexpr(KEY_TABLES), tl.constexpr(VALUE_TABLE)
_KEY_CODES, _VALUE_CODES = tl.constexpr(KEY_CODES), tl.constexpr(VALUE_CODES)
_KEY_NORMS, _VALUE_NORM = tl.constexpr(KEY_NORMS), tl.constexpr(VALUE_NORM)
_KEY_LOW, _KEY_STEP = tl.constexpr(KEY_LOW), tl.constexpr(KEY_STEP)
_VALUE_LOW, _VALUE_STEP = tl.constexpr(VALUE_LOW), tl.constexpr(VALUE_STEP)

LARGEST = tl.constexpr(32512.0)  # 127 * 256: the largest integer whose high and low parts are signed bytes
LOG_LARGEST = tl.constexpr(14.988684686772166)
BYTE_MAGIC = tl.constexpr(8388608.0)  # 2^23: a float's low mantissa bits are then an integer
SPLIT_MAGIC = tl.constexpr(8388736.0)  # 2^23 + 128: byte 1 is the high part, byte 0 is 128 + the low part
NO_NORM = tl.constexpr(60.0)  # a zero norm counts as this many octaves below the smallest
SLACK = tl.constexpr(12.0)  # octaves a page's reference may stay below the running maximum
NEVER = tl.constexpr(-1.0e30)

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
def prepare_query(
    q,
    rotation,
    coordinate_scale,
    coordinate_run,
    coordinate_offset,
    query,
    query_scale,
    query_offset,
    group,
    scaling,
    q_batch_stride,
    q_head_stride,
    kv_heads,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, HEADS): rotate one query head, scale it by its codebooks, split it into signed bytes.

    q ``[batch, kv_heads * group, 128]``; rotation float32 ``[kv_heads, coordinate, dim]``; per coordinate ``[kv_heads, 128]``:
    scale (codebook and norm unit) and offset (of half levels), float32, and its run, int32. ``scaling`` includes log2(e).
    Writes what :func:`attend` takes. Each run has a scale of its own: its coordinates are alike, other runs' are not.
    """
    row, g = tl.program_id(0), tl.program_id(1)
    sequence, head = row // kv_heads, row % kv_heads
    c = tl.arange(0, 128)
    turn = tl.load(rotation + head * 16384 + c[:, None] * 128 + c[None, :])
    source = q + sequence.to(tl.int64) * q_batch_stride + (head * group + g) * q_head_stride
    x = tl.load(source + c, mask=c < tl.where(g < group, 128, 0), other=0.0).to(tl.float32)
    y = tl.sum(turn * x[None, :], axis=1) * tl.load(coordinate_scale + head * 128 + c)
    run = tl.load(coordinate_run + head * 128 + c)
    half = tl.load(coordinate_offset + head * 128 + c)
    step = tl.zeros((128,), tl.float32)
    for r in tl.static_range(3):
        largest = tl.max(tl.where(run == r, tl.abs(y), 0.0), axis=0)
        step = tl.where(run == r, tl.maximum(largest, 1e-30) / LARGEST, step)
    integer = tl.floor(y / step + 0.5)
    high = tl.floor((integer + 128.0) * 0.00390625)
    target = query + (row * HEADS + g).to(tl.int64) * 256
    tl.store(target + c, high.to(tl.int8))
    tl.store(target + 128 + c, (integer - 256.0 * high).to(tl.int8))
    for r in tl.static_range(3):
        unit = tl.max(tl.where(run == r, step, 0.0), axis=0) * scaling
        at = (row * 3 + r) * HEADS + g
        tl.store(query_scale + at, unit)
        tl.store(query_offset + at, unit * tl.sum(tl.where(run == r, integer * half, 0.0), axis=0))
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


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
def token_rows(a, b, c, d):
    """Values of a lane's four tokens ``[32]`` each, (token[6], token[3]) = 00, 01, 10, 11 -> all tokens ``[128]``."""
    x = tl.join(tl.join(a, c), tl.join(b, d))  # lane, token[6], token[3]
    x = tl.permute(tl.reshape(x, (4, 8, 2, 2)), (2, 0, 3, 1))
    return tl.reshape(x, (128,))


@triton.jit
def _code(word, SHIFT: tl.constexpr):
    """A byte of a word as a float."""
    return (((word >> SHIFT) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - BYTE_MAGIC


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_norms(pointer, LOG: tl.constexpr):
    """A norm plane as four floats a lane: log codes, or fp16 norms."""
    lane = tl.arange(0, 32)
    word = tl.load(pointer + lane)
    if LOG:
        return _code(word, 0), _code(word, 8), _code(word, 16), _code(word, 24)
    else:
        high = tl.load(pointer + 32 + lane)
        return _half(word, 0), _half(word, 16), _half(high, 0), _half(high, 16)


@triton.jit
def _norm(code, low, step):
    return tl.exp2(low + step * code) * tl.minimum(code, 1.0)


@triton.jit
def key_norms(n, low, step, LOG: tl.constexpr):
    """Norms ``[128]``, one a token. fp16 norms are in the query's scale already."""
    if LOG:
        return token_rows(
            _norm(n[0], low, step), _norm(n[1], low, step), _norm(n[2], low, step), _norm(n[3], low, step)
        )
    else:
        return token_rows(n[0], n[1], n[2], n[3])


@triton.jit
def _log_norm(code, low, step, LOG: tl.constexpr):
    if LOG:
        return (low - NO_NORM) + step * code + tl.minimum(code, 1.0) * NO_NORM
    else:
        return tl.log2(tl.maximum(code, 2.9e-11))  # zero counts as 2^-35, below the smallest fp16


@triton.jit
def value_log_norms(n, low, step, LOG: tl.constexpr):
    """log2 of the values' norms, four a lane; finite for zero norms too."""
    return (
        _log_norm(n[0], low, step, LOG),
        _log_norm(n[1], low, step, LOG),
        _log_norm(n[2], low, step, LOG),
        _log_norm(n[3], low, step, LOG),
    )


@triton.jit
def load_tables(head_ints):
    """A head's key tables as the assembly wants them: 4 bits (2 registers), 3 bits (2), 2 bits, 1 bit."""
    t = head_ints + _TABLES
    return tl.load(t), tl.load(t + 1), tl.load(t + 2), tl.load(t + 3), tl.load(t + 4), tl.load(t + 5)


@triton.jit
def load_query(query, FIRST: tl.constexpr, SLABS: tl.constexpr, COLUMNS: tl.constexpr):
    """A run's slabs of the query, int8 ``[32 * SLABS, COLUMNS]``; column ``2 g`` is head g's high part, ``2 g + 1`` its low."""
    column = tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, 32 * SLABS)[:, None]
    return tl.load(query + column * 128 + 32 * FIRST + row)


@triton.jit
def combine(product, HEADS: tl.constexpr):
    """int32 ``[128, 2 * HEADS]`` high and low products -> float32 ``[128, HEADS]``."""
    high, low = tl.split(tl.reshape(product, (128, HEADS, 2)))
    return (high * 256 + low).to(tl.float32)


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


@triton.jit
def _attend_split(
    query,
    query_scale,
    query_offset,
    pages,
    head_ints,
    head_floats,
    places,
    levels,
    out,
    lse,
    page_bytes,
    first,
    last,
    start,
    stop,
    HEADS: tl.constexpr,
    TEMPLATE: tl.constexpr,
    R0: tl.constexpr,
    R1: tl.constexpr,
    R2: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_TEMPLATE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Pages ``first..last`` of one sequence and head; runs of R0, R1, R2 slabs have a norm and a query scale each."""
    COLUMNS: tl.constexpr = 2 * HEADS
    head = tl.arange(0, HEADS)
    row = tl.arange(0, 128)
    lane = tl.arange(0, 32)
    at = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tables = load_tables(head_ints)
    v0, v1 = tl.load(head_ints + _VALUE_TABLE), tl.load(head_ints + _VALUE_TABLE + 1)
    value_tables = (v0, v1, v0, v1, v0, v0)
    key_at = tl.load(head_ints + _KEY_CODES) * 128
    value_at = tl.load(head_ints + _VALUE_CODES) * 128
    key_norm_at = tl.load(head_ints + _KEY_NORMS) * 128
    value_norm_at = tl.load(head_ints + _VALUE_NORM) * 128
    NORM_BYTES: tl.constexpr = 128 if KEY_LOG else 256
    q0 = load_query(query, 0, R0, COLUMNS)
    s0, o0 = tl.load(query_scale + head), tl.load(query_offset + head)
    low0, step0 = tl.load(head_floats + _KEY_LOW), tl.load(head_floats + _KEY_STEP)
    if R1 > 0:
        q1 = load_query(query, R0, R1, COLUMNS)
        s1, o1 = tl.load(query_scale + HEADS + head), tl.load(query_offset + HEADS + head)
        low1, step1 = tl.load(head_floats + _KEY_LOW + 1), tl.load(head_floats + _KEY_STEP + 1)
    if R2 > 0:
        q2 = load_query(query, R0 + R1, R2, COLUMNS)
        s2, o2 = tl.load(query_scale + 2 * HEADS + head), tl.load(query_offset + 2 * HEADS + head)
        low2, step2 = tl.load(head_floats + _KEY_LOW + 2), tl.load(head_floats + _KEY_STEP + 2)
    value_low, value_step = tl.load(head_floats + _VALUE_LOW), tl.load(head_floats + _VALUE_STEP)
    # a lane's tokens within a page: token[5:4] and token[2:0] here, token[6] and token[3] added below
    token = (lane >> 3) * 16 + (lane & 7)

    running = tl.full((HEADS,), NEVER, tl.float32)
    reference = tl.full((HEADS,), NEVER, tl.float32)
    total = tl.zeros((4, 8, HEADS), tl.float32)
    weight = tl.zeros((4, 8, HEADS), tl.float32)
    sums = tl.zeros((128, HEADS), tl.float32)
    for page in tl.range(first, last, num_stages=STAGES):
        base = pages + page_bytes.to(tl.int64) * page
        norm_base = (base + key_norm_at).to(tl.pointer_type(tl.uint32))
        keys = load_tile(base + key_at, places, levels, at, tables, WORDS, TEMPLATE, ASSEMBLY)
        if ASSEMBLY:
            value_words = load_words(base + value_at, at, VALUE_WORDS)
        n0 = load_norms(norm_base, KEY_LOG)
        vn = load_norms((base + value_norm_at).to(tl.pointer_type(tl.uint32)), VALUE_LOG)

        e = value_log_norms(vn, value_low, value_step, VALUE_LOG)
        here = page * 128 + token - start
        span = (stop - start).to(tl.uint32)
        # unsigned: tokens before the start wrap around and are masked too
        m0 = tl.where(here.to(tl.uint32) < span, e[0], float("-inf"))
        m1 = tl.where((here + 8).to(tl.uint32) < span, e[1], float("-inf"))
        m2 = tl.where((here + 64).to(tl.uint32) < span, e[2], float("-inf"))
        m3 = tl.where((here + 72).to(tl.uint32) < span, e[3], float("-inf"))
        bias = token_rows(m0, m1, m2, m3)
        inverse = token_rows(tl.exp2(-e[0]), tl.exp2(-e[1]), tl.exp2(-e[2]), tl.exp2(-e[3]))

        f = combine(multiply(keys, q0, 0, R0, ASSEMBLY), HEADS)
        logit = (f * s0[None, :] + o0[None, :]) * key_norms(n0, low0, step0, KEY_LOG)[:, None] + bias[:, None]
        if R1 > 0:
            n1 = load_norms(norm_base + NORM_BYTES // 4, KEY_LOG)
            f = combine(multiply(keys, q1, R0, R1, ASSEMBLY), HEADS)
            logit += (f * s1[None, :] + o1[None, :]) * key_norms(n1, low1, step1, KEY_LOG)[:, None]
        if R2 > 0:
            n2 = load_norms(norm_base + 2 * NORM_BYTES // 4, KEY_LOG)
            f = combine(multiply(keys, q2, R0 + R1, R2, ASSEMBLY), HEADS)
            logit += (f * s2[None, :] + o2[None, :]) * key_norms(n2, low2, step2, KEY_LOG)[:, None]

        peak = tl.max(logit, axis=0)
        running = tl.maximum(running, peak)
        now = tl.maximum(peak, running - SLACK)
        decay = tl.exp2(reference - now)
        reference = now
        p = tl.exp2(logit - (now - LOG_LARGEST)[None, :])
        # a lane sums its own four tokens; lanes are summed once, after the loop
        mass = tl.reshape(p * inverse[:, None], (2, 4, 2, 8, HEADS))
        total = total * decay[None, None, :] + tl.sum(tl.sum(mass, axis=2), axis=0)
        if VALUE_TEMPLATE == 4444:
            mass = tl.reshape(p, (2, 4, 2, 8, HEADS))
            weight = weight * decay[None, None, :] + tl.sum(tl.sum(mass, axis=2), axis=0)
        high, low = split_bytes(p, ASSEMBLY)
        pair = tl.reshape(tl.join(high, low), (2, 4, 2, 8, COLUMNS))  # token[6], [5:4], [3], [2:0]
        columns = tl.reshape(tl.permute(pair, (1, 3, 0, 2, 4)), (128, COLUMNS))
        if ASSEMBLY:
            values = unpack_words(value_words, value_tables, VALUE_TEMPLATE)
        else:
            values = load_tile(
                base + value_at, places + 16, levels + 64, at, value_tables, VALUE_WORDS, VALUE_TEMPLATE, ASSEMBLY
            )
        product = combine(multiply(values, columns, 0, 4, ASSEMBLY), HEADS)
        sums = sums * decay[None, :] + product

    all_total = tl.sum(tl.sum(total, axis=0), axis=0)
    if VALUE_TEMPLATE == 4444:
        sums += 0.5 * tl.sum(tl.sum(weight, axis=0), axis=0)[None, :]
    # in units of 1/128 of a level: fp16 then holds any sum of fp16 norms
    result = sums * (0.0078125 / tl.maximum(all_total, 1e-37))[None, :]
    tl.store(out + head[None, :] * tl.num_programs(0) * 128 + row[:, None], result.to(tl.float16))
    tl.store(
        lse + head * tl.num_programs(0),
        tl.where(all_total > 0, reference - LOG_LARGEST + tl.log2(tl.maximum(all_total, 1e-37)), float("-inf")),
    )


@triton.jit
def attend(
    query,
    query_scale,
    query_offset,
    pages,
    ints,
    floats,
    places,
    levels,
    starts,
    stops,
    out,
    lse,
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

    query int8 ``[batch * kv_heads, 2 * HEADS, 128]``; query_scale, query_offset float32 ``[batch * kv_heads, 3, HEADS]``;
    pages uint8; starts, stops int32 ``[batch]``: the tokens attended; out float16 ``[batch * kv_heads, HEADS, splits, 128]``;
    lse float32 ``[batch * kv_heads, HEADS, splits]``, base 2.
    """
    split = tl.program_id(0)
    row = tl.program_id(1)
    sequence, head = row // kv_heads, row % kv_heads
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    begin = start // 128
    count = tl.maximum((stop + 127) // 128 - begin, 0)
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = begin + split * share
    last = tl.minimum(first + share, begin + count)
    if first < last:
        row64 = row.to(tl.int64)
        query += row64 * 2 * HEADS * 128
        query_scale += row64 * 3 * HEADS
        query_offset += row64 * 3 * HEADS
        pages += sequence.to(tl.int64) * batch_stride
        head_ints = ints + head * 16
        head_floats = floats + head * 8
        head_places = places + head * 32
        head_levels = levels + head * 128
        out += (row64 * HEADS * tl.num_programs(0) + split) * 128
        lse += row64 * HEADS * tl.num_programs(0) + split
        number = tl.load(head_ints + _TEMPLATE)
        if DEPENDENT:
            tl.extra.cuda.gdc_wait()
        # the runs of equal width of each template, in slabs; one loop each, so that a head pays for its own template alone
        if WORDS == 4:
            _attend_split(
                query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                page_bytes, first, last, start, stop, HEADS, 4444, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
            )  # fmt: skip
        elif WORDS == 3:
            if number == 3333:
                _attend_split(
                    query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                    page_bytes, first, last, start, stop, HEADS, 3333, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                    KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
                )  # fmt: skip
            elif number == 4332:
                _attend_split(
                    query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                    page_bytes, first, last, start, stop, HEADS, 4332, 1, 2, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                    KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
                )  # fmt: skip
            elif number == 4422:
                _attend_split(
                    query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                    page_bytes, first, last, start, stop, HEADS, 4422, 2, 2, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                    KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
                )  # fmt: skip
            else:
                _attend_split(
                    query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                    page_bytes, first, last, start, stop, HEADS, 4431, 2, 1, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                    KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
                )  # fmt: skip
        elif number == 2222:
            _attend_split(
                query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                page_bytes, first, last, start, stop, HEADS, 2222, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
            )  # fmt: skip
        elif number == 3221:
            _attend_split(
                query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                page_bytes, first, last, start, stop, HEADS, 3221, 1, 2, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
            )  # fmt: skip
        elif number == 3311:
            _attend_split(
                query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                page_bytes, first, last, start, stop, HEADS, 3311, 2, 2, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
            )  # fmt: skip
        else:
            _attend_split(
                query, query_scale, query_offset, pages, head_ints, head_floats, head_places, head_levels, out, lse,
                page_bytes, first, last, start, stop, HEADS, 4211, 1, 1, 2, WORDS, VALUE_TEMPLATE, VALUE_WORDS,
                KEY_LOG, VALUE_LOG, STAGES, ASSEMBLY,
            )  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


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
    group,
    splits,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    EXTRA: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * kv_heads, group): merge one query head's splits, un-rotate, merge with tokens attended elsewhere.

    ``extra [batch, kv_heads * group, 128]`` and ``extra_lse [batch, kv_heads * group]`` (natural, float32) are a partial
    attention over other tokens, in the model's space. Writes ``out`` like ``extra`` and its ``lse``, natural. SPLITS: a power
    of two not below ``splits``.
    """
    row, g = tl.program_id(0), tl.program_id(1)
    sequence, head = row // kv_heads, row % kv_heads
    c = tl.arange(0, 128)
    # constants first: with a dependent launch they arrive while the splits are still running
    turn = tl.load(rotation + head * 16384 + c[:, None] * 128 + c[None, :])
    scale = tl.load(value_scale + head) * 128.0
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    count = tl.maximum((stop + 127) // 128 - start // 128, 0)
    share = tl.maximum((count + splits - 1) // splits, 1)
    used = (count + share - 1) // share
    target = (sequence * kv_heads + head) * group + g
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    split = tl.arange(0, SPLITS)
    base = (row * HEADS + g).to(tl.int64) * splits
    parts = tl.load(partial_lse + base + split, mask=split < used, other=float("-inf"))
    peak = tl.maximum(tl.max(parts, axis=0), NEVER)
    weights = tl.exp2(parts - peak)
    total = tl.sum(weights, axis=0)
    sums = tl.load(partial + (base + split[:, None]) * 128 + c[None, :], mask=(split < used)[:, None], other=0.0)
    mean = tl.sum(sums.to(tl.float32) * weights[:, None], axis=0) * (scale / tl.maximum(total, 1e-30))
    result = tl.sum(turn * mean[:, None], axis=0)
    log_total = tl.where(total > 0, (peak + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453, float("-inf"))
    if EXTRA:
        other = tl.load(extra_lse + target)
        top = tl.maximum(tl.maximum(log_total, other), NEVER)
        mine, others = tl.exp(log_total - top), tl.exp(other - top)
        both = tl.maximum(mine + others, 1e-30)
        result = (result * mine + tl.load(extra + target.to(tl.int64) * 128 + c).to(tl.float32) * others) / both
        log_total = tl.where(mine + others > 0, top + tl.log(both), float("-inf"))
    tl.store(out + target.to(tl.int64) * 128 + c, result.to(out.dtype.element_ty))
    tl.store(lse + target, log_total)
