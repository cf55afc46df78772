# mypy: allow-untyped-defs, allow-incomplete-defs
"""Splits of a sequence's pages, in Triton: who reads which pages, and bringing partial results together.

A split's partial result is normalised over its own tokens and comes with their log-sum-exp in base 2.
"""

import triton
import triton.language as tl

NEVER = tl.constexpr(-1.0e30)
EARLY, LATE = tl.constexpr(1), tl.constexpr(2)  # DEPENDENT: when the merge may start


@triton.jit
def bounds(starts, stops, sequence):
    """A sequence's first page, its pages, and the tokens attended."""
    start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    begin = start // 128
    return begin, tl.maximum((stop + 127) // 128 - begin, 0), start, stop


@triton.jit
def share_of(count, splits):
    """Pages a split."""
    return tl.maximum((count + splits - 1) // splits, 1)


@triton.jit
def merge_splits(
    partial, partial_lse, used, d, WIDTH: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):
    """Columns ``d [32]`` of one query head's partial results ``[used, WIDTH]``: their sums ``[CHUNK, 32]``, to be added
    up and divided by the total; that total; and the largest log-sum-exp, which it is relative to."""
    split = tl.arange(0, SPLITS)
    parts = tl.load(partial_lse + split, mask=split < used, other=float("-inf"))
    peak = tl.maximum(tl.max(parts, axis=0), NEVER)
    total = tl.sum(tl.exp2(parts - peak), axis=0)
    sums = tl.zeros((CHUNK, 32), tl.float32)
    for first in tl.range(0, used, CHUNK, num_stages=STAGES):
        at = first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(partial_lse + at, mask=at < used, other=float("-inf")) - peak)
        some = tl.load(partial + at[:, None] * WIDTH + d[None, :], mask=(at < used)[:, None], other=0.0)
        sums += some.to(tl.float32) * weight[:, None]
    return sums, total, peak


@triton.jit
def merged_with(result, log_total, there, other):
    """Outputs ``result [n, columns]`` with natural log-sum-exps ``log_total [n]``, merged with other tokens'."""
    top = tl.maximum(tl.maximum(log_total, other), NEVER)
    ours, others = tl.exp(log_total - top), tl.exp(other - top)
    both = tl.maximum(ours + others, 1e-30)
    result = (result * ours[:, None] + there * others[:, None]) / both[:, None]
    return result, tl.where(ours + others > 0, top + tl.log(both), float("-inf"))


@triton.jit
def natural(total, peak):
    """The natural log-sum-exp of a total relative to a peak in base 2; minus infinity of nothing."""
    log_total = (peak + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453
    return tl.where(total > 0, log_total, float("-inf"))


@triton.jit
def lane_sums(x, HEADS: tl.constexpr):
    """``[128 tokens, HEADS]`` -> ``[4, 8, HEADS]``: the sums of each lane's four tokens."""
    return tl.sum(tl.sum(tl.reshape(x, (2, 4, 2, 8, HEADS)), axis=2), axis=0)
