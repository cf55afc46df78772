# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""Norms of a page's tokens, in Triton: loading them, and bringing them to the rows of the matrix product."""

import triton
import triton.language as tl

BYTE_MAGIC = tl.constexpr(8388608.0)  # 2^23: a float's low mantissa bits are then an integer
NO_NORM = tl.constexpr(60.0)  # a zero norm counts as this many octaves below the smallest


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
def key_norms(n, low, step, ratio, LOG: tl.constexpr):
    """Norms ``[128]``, one a token, times ``ratio``, which ``low`` includes. fp16's unit is in the query's scale."""
    if LOG:
        return token_rows(
            _norm(n[0], low, step), _norm(n[1], low, step), _norm(n[2], low, step), _norm(n[3], low, step)
        )
    else:
        return token_rows(n[0] * ratio, n[1] * ratio, n[2] * ratio, n[3] * ratio)


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
