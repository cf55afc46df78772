# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Norms of a page's tokens, in Triton: loading them, and bringing them to the rows of the matrix product.

A log code comes out of its word as ``x = 1 + code / CODE_UNIT``, and the norm is ``2^(low + step x)``: ``low`` and
``step`` here are of ``x`` and not of the code (see :func:`kvbench.kernels.tile_attention.norm_code`).
"""

import triton
import triton.language as tl

NO_NORM = tl.constexpr(60.0)  # a zero norm counts as this many octaves below the smallest


@triton.jit
def token_rows(a, b, c, d):
    """Values of a lane's four tokens ``[32]`` each, (token[6], token[3]) = 00, 01, 10, 11 -> all tokens ``[128]``."""
    x = tl.join(tl.join(a, c), tl.join(b, d))  # lane, token[6], token[3]
    x = tl.permute(tl.reshape(x, (4, 8, 2, 2)), (2, 0, 3, 1))
    return tl.reshape(x, (128,))


CODES_PTX = tl.constexpr(" ".join(f"prmt.b32 ${byte}, $4, 0x3F800000, 0x76{byte}4;" for byte in range(4)))
INTS = tl.constexpr((tl.int32,) * 4)


@triton.jit
def _plain_code(word, BYTE: tl.constexpr):
    return (((word >> (8 * BYTE)) & 255) << 8) | 0x3F800000


@triton.jit
def _codes(word, ASSEMBLY: tl.constexpr):
    """The bytes of a word as floats ``1 + byte / CODE_UNIT``: bits moved, no conversion."""
    if ASSEMBLY:  # a byte permutation each; the compiler takes two instructions
        a, b, c, d = tl.inline_asm_elementwise(CODES_PTX, "=r,=r,=r,=r,r", [word], dtype=INTS, is_pure=True, pack=1)
    else:
        a, b, c, d = _plain_code(word, 0), _plain_code(word, 1), _plain_code(word, 2), _plain_code(word, 3)
    return (
        a.to(tl.float32, bitcast=True),
        b.to(tl.float32, bitcast=True),
        c.to(tl.float32, bitcast=True),
        d.to(tl.float32, bitcast=True),
    )


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_norms(pointer, LOG: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A norm plane as four floats a lane: log codes as ``x``, or fp16 norms."""
    lane = tl.arange(0, 32)
    word = tl.load(pointer + lane)
    if LOG:
        return _codes(word, ASSEMBLY)
    else:
        high = tl.load(pointer + 32 + lane)
        return _half(word, 0), _half(word, 16), _half(high, 0), _half(high, 16)


@triton.jit
def _norm(x, low, step):
    return tl.where(x > 1.0, tl.exp2(low + step * x), 0.0)


@triton.jit
def key_norms(n, low, step, ratio, LOG: tl.constexpr):
    """Norms ``[128]``, one a token, times ``ratio``, which ``low`` includes. fp16's unit is in the query's scale."""
    if LOG:
        return token_rows(
            _norm(n[0], low, step), _norm(n[1], low, step), _norm(n[2], low, step), _norm(n[3], low, step)
        )
    else:
        return token_rows(n[0] * ratio, n[1] * ratio, n[2] * ratio, n[3] * ratio)


@triton.jit
def _log_norm(x, low, step, LOG: tl.constexpr):
    if LOG:
        return tl.where(x > 1.0, low + step * x, (low + step) - NO_NORM)
    else:
        return tl.log2(tl.maximum(x, 2.9e-11))  # zero counts as 2^-35, below the smallest fp16


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
def masked_rows(e, here, extent):
    """Logarithms ``e`` of four norms a lane -> ``[128]`` in row order, minus infinity of tokens that are not attended:
    those whose distance ``here`` from the first attended (a lane's first token's) is not below ``extent`` (uint32)."""
    # unsigned: tokens before the start wrap around and are masked too
    m0 = tl.where(here.to(tl.uint32) < extent, e[0], float("-inf"))
    m1 = tl.where((here + 8).to(tl.uint32) < extent, e[1], float("-inf"))
    m2 = tl.where((here + 64).to(tl.uint32) < extent, e[2], float("-inf"))
    m3 = tl.where((here + 72).to(tl.uint32) < extent, e[3], float("-inf"))
    return token_rows(m0, m1, m2, m3)
