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
def _store_keys(target, token_stride, value, plane, norms, run, LOG: tl.constexpr):
    """A slab of keys: rows are tokens."""
    token = tl.arange(0, 128)
    scale = _norms(plane + run * (128 if LOG else 256), token, norms + run * 3, LOG)
    at = token[:, None] * token_stride + tl.arange(0, 32)[None, :]
    tl.store(target + at, (value * scale[:, None]).to(tl.float16))


@triton.jit
def _store_values(target, token_stride, value, plane, norms, SLAB: tl.constexpr, LOG: tl.constexpr):
    """A slab of values: rows are coordinates, columns tokens with their bits moved."""
    column = tl.arange(0, 32)
    token = (column & 1) * 8 + ((column >> 1) & 1) * 64 + (column >> 2) + SLAB * 16
    scale = _norms(plane, token, norms, LOG)
    at = token[None, :] * token_stride + tl.arange(0, 128)[:, None]
    tl.store(target + at, (value * scale[None, :]).to(tl.float16))


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
    table = head * 2 + kind
    token_stride = kv_heads * 128
    target = (sequence * tokens + page * 128) * token_stride + head * 128
    norms += table * 9
    for slab in tl.static_range(4):
        value = plain_slab(codes, places + table * 16, levels + table * 64, slab)
        if kind == 0:
            run = tl.load(runs + table * 4 + slab)
            _store_keys(keys + target + slab * 32, token_stride, value, plane, norms, run, KEY_LOG)
        else:
            _store_values(values + target, token_stride, value, plane, norms, slab, VALUE_LOG)
