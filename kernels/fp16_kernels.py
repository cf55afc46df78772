# mypy: allow-untyped-defs, allow-incomplete-defs
"""Decode attention over an fp16 or bf16 cache in Triton, split over tokens: the baseline written as well as we can.

FlashDecoding's structure: every block attends to a share of the tokens for all query heads of a KV head at once, a
second kernel merges. Any head_dim up to 256, up to 16 query heads a KV head.
"""

import triton
import triton.language as tl


@triton.jit
def attend(
    q,
    k,
    v,
    partial,
    lse,
    starts,
    stops,
    tokens,
    scale,
    group,
    kv_heads,
    batch_stride,
    head_stride,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (splits, batch * kv_heads): q ``[batch, kv_heads, group, DIM]``, k, v ``[batch, kv_heads, tokens, DIM]``.

    With SPAN sequence b attends to ``starts[b] <= t < stops[b]`` (int32), otherwise to ``tokens`` tokens. ``scale``
    includes log2(e). Writes normalised ``partial [batch, kv_heads, group, splits, DIM]`` and ``lse`` in base 2.
    """
    split, row, splits = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    sequence, kv_head = row // kv_heads, row % kv_heads
    if SPAN:
        start, stop = tl.load(starts + sequence), tl.load(stops + sequence)
    else:
        start, stop = 0, tokens
    share = tl.cdiv(tl.cdiv(stop - start, BLOCK), splits) * BLOCK
    first = start + split * share
    last = tl.minimum(first + share, stop)
    head, d, t = tl.arange(0, 16), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    inside = (head < group)[:, None] & (d < DIM)[None, :]
    query = tl.load(q + (row * group + head[:, None]) * DIM + d[None, :], mask=inside, other=0.0)
    k += sequence * batch_stride + kv_head * head_stride
    v += sequence * batch_stride + kv_head * head_stride
    peak = tl.full((16,), -1.0e30, tl.float32)
    total = tl.zeros((16,), tl.float32)
    sums = tl.zeros((16, WIDTH), tl.float32)
    for token in tl.range(first, last, BLOCK, num_stages=STAGES):
        at = (token + t)[:, None] * DIM + d[None, :]
        seen = (token + t < last)[:, None] & (d < DIM)[None, :]
        keys = tl.load(k + at, mask=seen, other=0.0)
        logits = tl.dot(query, tl.trans(keys)) * scale
        logits = tl.where((token + t < last)[None, :], logits, float("-inf"))
        now = tl.maximum(peak, tl.max(logits, axis=1))
        decay = tl.exp2(peak - now)
        p = tl.exp2(logits - now[:, None])
        total = total * decay + tl.sum(p, axis=1)
        peak = now
        values = tl.load(v + at, mask=seen, other=0.0)
        sums = tl.dot(p.to(values.dtype), values, acc=sums * decay[:, None])
    result = sums / tl.maximum(total, 1e-30)[:, None]
    base = (row * group + head) * splits + split
    tl.store(partial + base[:, None] * DIM + d[None, :], result.to(partial.dtype.element_ty), mask=inside)
    tl.store(lse + base, peak + tl.log2(tl.maximum(total, 1e-30)), mask=head < group)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def merge(
    partial,
    lse,
    out,
    splits,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (batch * q_heads,): merge the splits of one query head. SPLITS: a power of two not below ``splits``.

    With DEPENDENT it is launched before :func:`attend` has ended, and waits for it (programmatic dependent launch).
    """
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    parts = tl.load(lse + row * splits + split, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(parts - tl.max(parts, axis=0))
    inside = (split < splits)[:, None] & (d < DIM)[None, :]
    sums = tl.load(partial + (row * splits + split[:, None]) * DIM + d[None, :], mask=inside, other=0.0)
    mean = tl.sum(sums.to(tl.float32) * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + row * DIM + d, mean.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def append(
    key, value, keys, values, slots, kv_heads, batch_stride, head_stride, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Grid (batch * kv_heads, 2): put ``key, value [batch, kv_heads, DIM]`` into token ``slots[b]`` of k or v."""
    row = tl.program_id(0).to(tl.int64)
    sequence, kv_head, d = row // kv_heads, row % kv_heads, tl.arange(0, WIDTH)
    slot = tl.load(slots + sequence)
    target = sequence * batch_stride + kv_head * head_stride + slot.to(tl.int64) * DIM + d
    if tl.program_id(1) == 0:
        tl.store(keys + target, tl.load(key + row * DIM + d, mask=d < DIM), mask=d < DIM)
    else:
        tl.store(values + target, tl.load(value + row * DIM + d, mask=d < DIM), mask=d < DIM)
