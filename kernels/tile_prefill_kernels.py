# mypy: allow-untyped-defs, allow-incomplete-defs
"""Decoding tile pages into dense fp16 keys and values, in Triton, a bounded number of tokens at a time.

Keys and values stay in their rotated spaces; prefill attention rotates its queries and output instead. The plain
unpacker serves: a chunk of thousands of queries reads each decoded token that often, so that decoding takes a few
percent of the time. Tested: tests/kernels/test_triton_prefill.py.
"""

import triton
import triton.language as tl

from kvbench.kernels.tile_codes import plain_slab


@triton.jit
def _norms(plane, token, table, LOG: tl.constexpr):
    """The norms of a page's tokens; ``table``: low, step, unit (see :func:`kvbench.kernels.tiles.pack_norms`)."""
    lane = ((token >> 4) & 3) * 8 + (token & 7)
    high, middle = (token >> 6) & 1, (token >> 3) & 1
    if LOG:
        code = tl.load(plane + lane * 4 + high * 2 + middle).to(tl.float32)
        return tl.where(code > 0, tl.exp2(tl.load(table) + tl.load(table + 1) * code), 0.0)
    else:  # noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
        stored = tl.load(plane.to(tl.pointer_type(tl.float16)) + high * 64 + lane * 2 + middle)
        return stored.to(tl.float32) * tl.load(table + 2)


@triton.jit
def decode_pages(
    pages,
    first_page,
    page_bytes,
    batch_stride,
    offsets,
    places,
    levels,
    runs,
    norms,
    keys,
    values,
    tokens,
    kv_heads,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
):
    """Grid (pages, 2 * kv_heads, batch): the keys (even columns) or values (odd) of one page and head.

    ``keys`` and ``values`` float16 ``[batch, tokens, kv_heads, 128]``, whose token 0 is the first of page
    ``first_page``. Per head: offsets int32 ``[4]`` (key codes, value codes, key norms, value norms; units of 128
    bytes); and for keys and for values: places int32 ``[2, 4 slabs, 4 bits]``, levels float32 ``[2, 4 slabs, 16]``
    (what each stored pattern stands for), runs int32 ``[2, 4 slabs]``, norms float32 ``[2, 3 runs, 3]``.
    """
    page, head, sequence = tl.program_id(0), tl.program_id(1) // 2, tl.program_id(2).to(tl.int64)
    kind = tl.program_id(1) % 2
    base = pages + sequence * batch_stride + page_bytes.to(tl.int64) * (first_page + page)
    codes = (base + tl.load(offsets + head * 4 + kind) * 128).to(tl.pointer_type(tl.uint32))
    plane = base + tl.load(offsets + head * 4 + 2 + kind) * 128
    row, column = tl.arange(0, 128), tl.arange(0, 32)
    table = head * 2 + kind
    at = (sequence * tokens + page * 128) * kv_heads * 128 + head * 128
    for slab in tl.static_range(4):
        value = plain_slab(codes, places + table * 16, levels + table * 64, slab)
        if kind == 0:  # rows are tokens
            run = tl.load(runs + table * 4 + slab)
            entry = norms + (table * 3 + run) * 3
            scale = _norms(plane + run * tl.where(KEY_LOG, 128, 256), row, entry, KEY_LOG)
            target = keys + at + row[:, None] * (kv_heads * 128) + slab * 32 + column[None, :]
            tl.store(target, (value * scale[:, None]).to(tl.float16))
        else:  # rows are coordinates, columns are tokens with their bits moved
            token = (column & 1) * 8 + ((column >> 1) & 1) * 64 + (column >> 2) + slab * 16
            scale = _norms(plane, token, norms + table * 9, VALUE_LOG)
            target = values + at + token[None, :] * (kv_heads * 128) + row[:, None]
            tl.store(target, (value * scale[None, :]).to(tl.float16))
