# mypy: allow-untyped-defs, allow-incomplete-defs
"""Decode attention over the reference codec's rows, in Triton: any widths, any groups, any even head_dim up to 256.

Every coordinate looks up its own place in the row, its codebook and its norm, so that no format is refused. That is
the point of this kernel and also its price: it is several times slower than the tiles'
(:mod:`kvbench.kernels.tile_kernels`), and far faster than decoding in torch. Tested: tests/kernels/test_triton_rows.py.
"""

import triton
import triton.language as tl


@triton.jit
def _decode(
    codes, norms, tables, token, inside, TABLE: tl.constexpr, LOG: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr
):
    """Decoded coordinates float32 ``[tokens, WIDTH]``, zero past DIM.

    ``tables``: int32 ``[DIM, 6]`` (bit of the code in the row, width, bit or index of the norm, norm bits, and two
    unused), float32 ``[DIM, 2]`` (norm unit, or low and step), float32 levels ``[DIM, TABLE]``; then bytes a row of
    codes and of norms.
    """
    ints, floats, levels, code_stride, norm_stride = tables
    c = tl.arange(0, WIDTH)
    live = c < DIM
    bit = tl.load(ints + c * 4, mask=live, other=0)
    width = tl.load(ints + c * 4 + 1, mask=live, other=1)
    mask = inside[:, None] & live[None, :]
    at = codes + token[:, None].to(tl.int64) * code_stride + (bit >> 3)[None, :]
    crosses = ((bit & 7) + width) > 8
    low = tl.load(at, mask=mask, other=0).to(tl.int32)
    high = tl.load(at + 1, mask=mask & crosses[None, :], other=0).to(tl.int32)
    code = ((low | (high << 8)) >> (bit & 7)[None, :]) & ((1 << width) - 1)[None, :]
    level = tl.load(levels + c[None, :] * TABLE + code, mask=mask, other=0.0)
    place = tl.load(ints + c * 4 + 2, mask=live, other=0)
    first = tl.load(floats + c * 2, mask=live, other=0.0)
    if LOG:
        bits = tl.load(ints + c * 4 + 3, mask=live, other=1)
        at = norms + token[:, None].to(tl.int64) * norm_stride + (place >> 3)[None, :]
        low = tl.load(at, mask=mask, other=0).to(tl.int32)
        crosses = ((place & 7) + bits) > 8
        high = tl.load(at + 1, mask=mask & crosses[None, :], other=0).to(tl.int32)
        stored = ((low | (high << 8)) >> (place & 7)[None, :]) & ((1 << bits) - 1)[None, :]
        step = tl.load(floats + c * 2 + 1, mask=live, other=0.0)
        norm = tl.exp2(first[None, :] + step[None, :] * stored.to(tl.float32))
        return tl.where(stored > 0, norm * level, 0.0)
    halves = norms.to(tl.pointer_type(tl.float16)) + token[:, None].to(tl.int64) * norm_stride + place[None, :]
    return tl.load(halves, mask=mask, other=0.0).to(tl.float32) * first[None, :] * level


@triton.jit
def attend(
    q,
    key_codes,
    key_norms,
    key_ints,
    key_floats,
    key_levels,
    value_codes,
    value_norms,
    value_ints,
    value_floats,
    value_levels,
    starts,
    stops,
    partial,
    partial_lse,
    scaling,
    group,
    kv_heads,
    key_code_stride,
    key_norm_stride,
    value_code_stride,
    value_norm_stride,
    key_code_batch,
    key_norm_batch,
    value_code_batch,
    value_norm_batch,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_TABLE: tl.constexpr,
    VALUE_TABLE: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
):
    """Grid (splits, batch * kv_heads): a split of one sequence's tokens for one KV head.

    q float32 ``[batch * kv_heads, group, DIM]`` in the key's space; planes and strides as
    :mod:`kvbench.kernels.codec` lays them out, strides in elements; tables a head as of :func:`_decode`; starts,
    stops int32 ``[batch]``. Writes ``partial`` float32 ``[batch * kv_heads, group, splits, DIM]`` in the value's
    space, and natural ``partial_lse`` likewise.
    """
    split, row, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence, head = (row // kv_heads).to(tl.int64), row % kv_heads
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    share = ((stop - start + splits - 1) // splits + BLOCK - 1) // BLOCK * BLOCK
    first = start + split * share
    last = tl.minimum(first + share, stop)
    g, c, t = tl.arange(0, 16), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    live = (g < group)[:, None] & (c < DIM)[None, :]
    query = tl.load(q + (row.to(tl.int64) * group + g[:, None]) * DIM + c[None, :], mask=live, other=0.0) * scaling
    keys = (
        key_ints + head * DIM * 4,
        key_floats + head * DIM * 2,
        key_levels + head * DIM * KEY_TABLE,
        key_code_stride,
        key_norm_stride,
    )
    values = (
        value_ints + head * DIM * 4,
        value_floats + head * DIM * 2,
        value_levels + head * DIM * VALUE_TABLE,
        value_code_stride,
        value_norm_stride,
    )
    key_codes += sequence * key_code_batch
    key_norms += sequence * key_norm_batch
    value_codes += sequence * value_code_batch
    value_norms += sequence * value_norm_batch
    peak = tl.full((16,), -1.0e30, tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, WIDTH), tl.float32)
    for block in tl.range(first, last, BLOCK, num_stages=1):
        token = block + t
        inside = token < last
        k = _decode(key_codes, key_norms, keys, token, inside, KEY_TABLE, KEY_LOG, WIDTH, DIM)
        logit = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        logit = tl.where(inside[None, :], logit, float("-inf"))
        now = tl.maximum(peak, tl.max(logit, axis=1))
        decay = tl.exp(peak - now)
        p = tl.exp(logit - now[:, None])
        total = total * decay + tl.sum(p, axis=1)
        peak = now
        v = _decode(value_codes, value_norms, values, token, inside, VALUE_TABLE, VALUE_LOG, WIDTH, DIM)
        sums = sums * decay[:, None] + tl.dot(p, v, input_precision="tf32x3")
    base = (row.to(tl.int64) * group + g) * splits + split
    result = sums / tl.maximum(total, 1e-30)[:, None]
    tl.store(partial + base[:, None] * DIM + c[None, :], result, mask=live)
    lse = tl.where(total > 0, peak + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(partial_lse + base, lse, mask=g < group)
