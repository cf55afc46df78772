# mypy: allow-untyped-defs, allow-incomplete-defs

"""The inner loop of decode attention over tile pages, in Triton: what happens to one head's share of the pages.

With logits in base 2 and ``G`` query heads a KV head::

    logit[t] = norm_k[t] * sum_c levels_k[t, c] q'[c]              int8 matrix product; codes are operand A, and the
                                                                   rotated query q' is integers 256 * high + low
    p[t] = 2^(logit[t] + log2(norm_v[t]) - m)                      as integers 256 * high + low
    sum[c] = sum_t levels_v[c, t] p[t]                             int8 matrix product; codes are operand A
    total = sum_t p[t] / norm_v[t]

Folding the value's norm into the logit makes the integers of a page relative to the page's own largest product of
probability and norm, whatever the norms are, and costs nothing: the addition becomes part of a multiply-add, and so
does the mask. ``m`` follows a page's maximum but stays within 2^-12 of the running one, so that a page of small
probabilities keeps its precision.

A head takes its template, tables and offsets from ``ints`` (int32 ``[kv_heads, 16]``, columns below) and ``floats``.
One loop is compiled for each template, so that a head pays for its own alone. The kernels that are launched are in
:mod:`kvbench.kernels.tile_kernels`.
"""

import triton
import triton.language as tl

from kvbench.kernels.split_kernels import LATE, NEVER, lane_sums
from kvbench.kernels.tile_centre_kernels import centre_logits, centre_query
from kvbench.kernels.tile_codes import load_words, unpack_words
from kvbench.kernels.tile_norms import key_norms, load_norms, masked_rows, token_rows, value_log_norms
from kvbench.kernels.tile_operands import (
    LARGEST,
    byte_operand,
    combine,
    load_run,
    load_tile,
    multiply,
    per_head,
    probability_columns,
)

# columns of ``ints``: template's number, key tables (4 bits: 2 words, 3 bits: 2, 2 bits: 1, 1 bit: 1), value table (2
# words), then where the head's parts start in a page, in units of 128 bytes
TEMPLATE, KEY_TABLES, VALUE_TABLE, KEY_CODES, VALUE_CODES, KEY_NORMS, VALUE_NORM, INTS = 0, 1, 7, 9, 10, 11, 12, 16
# columns of ``floats``: log2 of the smallest norm and the step of each key run's log code, then the value's, then each
# key run's codebook scale times norm unit, and its half level
KEY_LOW, KEY_STEP, VALUE_LOW, VALUE_STEP, KEY_SCALE, KEY_OFFSET, FLOATS = 0, 3, 6, 7, 8, 11, 16

_TEMPLATE, _TABLES, _VALUE_TABLE = tl.constexpr(TEMPLATE), tl.constexpr(KEY_TABLES), tl.constexpr(VALUE_TABLE)
_KEY_CODES, _VALUE_CODES = tl.constexpr(KEY_CODES), tl.constexpr(VALUE_CODES)
_KEY_NORMS, _VALUE_NORM = tl.constexpr(KEY_NORMS), tl.constexpr(VALUE_NORM)
_KEY_LOW, _KEY_STEP = tl.constexpr(KEY_LOW), tl.constexpr(KEY_STEP)
_VALUE_LOW, _VALUE_STEP = tl.constexpr(VALUE_LOW), tl.constexpr(VALUE_STEP)
_KEY_SCALE, _KEY_OFFSET = tl.constexpr(KEY_SCALE), tl.constexpr(KEY_OFFSET)

LOG_LARGEST = tl.constexpr(14.988684686772166)
SLACK = tl.constexpr(12.0)  # octaves a page's reference may stay below the running maximum


@triton.jit
def load_tables(head_ints):
    """A head's key tables as the assembly wants them: 4 bits (2 registers), 3 bits (2), 2 bits, 1 bit."""
    t = head_ints + _TABLES
    return tl.load(t), tl.load(t + 1), tl.load(t + 2), tl.load(t + 3), tl.load(t + 4), tl.load(t + 5)


@triton.jit
def _read(
    base,
    here,
    extent,
    layout,
    places,
    levels,
    at,
    tables,
    value_range,
    WORDS: tl.constexpr,
    TEMPLATE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    R1: tl.constexpr,
    R2: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One page: key codes, the values' words (or where they are), the key norms of each run as loaded, and of the
    tokens ``here`` (a lane's first, from the first attended) the values' inverse norms and the logits' bias."""
    NORM_WORDS: tl.constexpr = 32 if KEY_LOG else 64
    norm_base = (base + layout[2]).to(tl.pointer_type(tl.uint32))
    keys = load_tile(base + layout[0], places, levels, at, tables, WORDS, TEMPLATE, ASSEMBLY)
    value_words = load_words(base + layout[1], at, VALUE_WORDS) if ASSEMBLY else base + layout[1]
    n0 = load_norms(norm_base, KEY_LOG, ASSEMBLY)
    n1, n2 = n0, n0
    if R1 > 0:
        n1 = load_norms(norm_base + NORM_WORDS, KEY_LOG, ASSEMBLY)
    if R2 > 0:
        n2 = load_norms(norm_base + 2 * NORM_WORDS, KEY_LOG, ASSEMBLY)
    vn = load_norms((base + layout[3]).to(tl.pointer_type(tl.uint32)), VALUE_LOG, ASSEMBLY)
    e = value_log_norms(vn, value_range[0], value_range[1], VALUE_LOG)
    bias = masked_rows(e, here, extent)
    inverse = token_rows(tl.exp2(-e[0]), tl.exp2(-e[1]), tl.exp2(-e[2]), tl.exp2(-e[3]))
    return keys, value_words, (n0, n1, n2), inverse, bias


@triton.jit
def _logits(
    keys,
    norms,
    query,
    runs,
    bias,
    R0: tl.constexpr,
    R1: tl.constexpr,
    R2: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    KEY_LOG: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Base-2 logits ``[128, HEADS]`` of a page, the values' norms included; ``runs``: low, step, ratio of each."""
    logit = combine(multiply(keys, query[0], 0, R0, ASSEMBLY), HEADS)
    if HALF:
        logit += query[4][None, :]
    logit = logit * key_norms(norms[0], runs[0][0], runs[0][1], 1.0, KEY_LOG)[:, None]
    if R1 > 0:
        run = combine(multiply(keys, query[1], R0, R1, ASSEMBLY), HEADS)
        logit += run * key_norms(norms[1], runs[1][0], runs[1][1], runs[1][2], KEY_LOG)[:, None]
    if R2 > 0:
        run = combine(multiply(keys, query[2], R0 + R1, R2, ASSEMBLY), HEADS)
        logit += run * key_norms(norms[2], runs[2][0], runs[2][1], runs[2][2], KEY_LOG)[:, None]
    return logit * query[3][None, :] + bias[:, None]


@triton.jit
def _weighted(
    words,
    p,
    places,
    levels,
    at,
    tables,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    TEMPLATE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """int32 ``[128 coordinates, columns]``: a page's values times the integers of ``p [128 tokens, HEADS]``."""
    columns = probability_columns(p, HEADS, ASSEMBLY)
    if ASSEMBLY:
        values = unpack_words(words, tables, TEMPLATE)
    else:
        values = load_tile(words, places, levels, at, tables, WORDS, TEMPLATE, ASSEMBLY)
    return multiply(values, columns, 0, 4, ASSEMBLY)


@triton.jit
def _attend_template(
    head,
    span,
    centre,
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
    DEPENDENT: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """:func:`attend_pages` for a head whose runs of R0, R1, R2 slabs have a norm and a query scale each."""
    query, group, scaling, pages, head_ints, head_floats, places, levels, out, lse, splits, page_bytes = head
    first, last, start, stop = span
    g = tl.arange(0, HEADS)
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
    key_scale = head_floats + _KEY_SCALE
    scale0, low0, step0 = tl.load(key_scale), tl.load(head_floats + _KEY_LOW), tl.load(head_floats + _KEY_STEP)
    half_level = tl.load(head_floats + _KEY_OFFSET)
    if R1 > 0:
        scale1 = tl.load(key_scale + 1)
    if R2 > 0:
        scale2 = tl.load(key_scale + 2)
    value_low, value_step = tl.load(head_floats + _VALUE_LOW), tl.load(head_floats + _VALUE_STEP)
    if CENTRE:
        along, across, waves = centre
    if DEPENDENT:  # everything above is there; the rotated query comes from the kernel before
        tl.extra.cuda.gdc_wait()
    # A run's integers have a step of their own, for its coordinates are alike and other runs' are not. The steps of two
    # runs have one ratio for all query heads, which then belongs to the run's norms: one scale a head is left.
    y0, peak0 = load_run(query, group, scale0 * scaling, 0, R0, HEADS)
    if R1 > 0:
        y1, peak1 = load_run(query, group, scale1 * scaling, R0, R1, HEADS)
    if R2 > 0:
        y2, peak2 = load_run(query, group, scale2 * scaling, R0 + R1, R2, HEADS)
    unit = tl.maximum(peak0, 1e-30)
    if R1 > 0:
        unit = tl.maximum(unit, peak1 * 0.001)  # a run that is all but zero must not set the measure
    if R2 > 0:
        unit = tl.maximum(unit, peak2 * 0.001)
    unit = unit / LARGEST
    q0, integers = byte_operand(y0, unit)
    scale = per_head(unit, HEADS)
    HALF: tl.constexpr = TEMPLATE >= 4000  # 4-bit codes stand for half levels; they are always the first run
    offset, q1, q2, low1, low2 = scale, q0, q0, low0, low0
    step1, step2, ratio1, ratio2 = step0, step0, 1.0, 1.0
    if HALF:
        offset = per_head(tl.sum(integers, axis=0), HEADS) * half_level
    if R1 > 0:
        low1, step1 = tl.load(head_floats + _KEY_LOW + 1), tl.load(head_floats + _KEY_STEP + 1)
        ratio1 = tl.maximum(tl.max(peak1 / unit, axis=0) / LARGEST, 1e-30)
        q1, _1 = byte_operand(y1, unit * ratio1)
        low1 += tl.log2(ratio1)
    if R2 > 0:
        low2, step2 = tl.load(head_floats + _KEY_LOW + 2), tl.load(head_floats + _KEY_STEP + 2)
        ratio2 = tl.maximum(tl.max(peak2 / unit, axis=0) / LARGEST, 1e-30)
        q2, _2 = byte_operand(y2, unit * ratio2)
        low2 += tl.log2(ratio2)
    # a lane's tokens within a page: token[5:4] and token[2:0] here, token[6] and token[3] added below
    token = (lane >> 3) * 16 + (lane & 7)

    layout = (key_at, value_at, key_norm_at, value_norm_at)
    value_range = (value_low, value_step)
    query_parts = (q0, q1, q2, scale, offset)
    runs = ((low0, step0, 1.0), (low1, step1, ratio1), (low2, step2, ratio2))
    running = tl.full((HEADS,), NEVER, tl.float32)
    reference = tl.full((HEADS,), NEVER, tl.float32)
    total = tl.zeros((4, 8, HEADS), tl.float32)
    weight = tl.zeros((4, 8, HEADS), tl.float32)
    sums = tl.zeros((128, HEADS), tl.float32)
    extent = (stop - start).to(tl.uint32)
    for page in tl.range(first, last, num_stages=STAGES):
        here = page * 128 + token - start
        keys, value_words, norms, inverse, bias = _read(
            pages + page_bytes.to(tl.int64) * page,
            here,
            extent,
            layout,
            places,
            levels,
            at,
            tables,
            value_range,
            WORDS,
            TEMPLATE,
            VALUE_WORDS,
            R1,
            R2,
            KEY_LOG,
            VALUE_LOG,
            ASSEMBLY,
        )
        logit = _logits(keys, norms, query_parts, runs, bias, R0, R1, R2, HEADS, HALF, KEY_LOG, ASSEMBLY)
        if CENTRE:
            more, along, across = centre_logits(along, across, waves, HEADS)
            logit += more
        peak = tl.max(logit, axis=0)
        running = tl.maximum(running, peak)
        now = tl.maximum(peak, running - SLACK)
        decay = tl.exp2(reference - now)
        reference = now
        p = tl.exp2(logit - (now - LOG_LARGEST)[None, :])
        # a lane sums its own four tokens; lanes are summed once, after the loop
        total = total * decay[None, None, :] + lane_sums(p * inverse[:, None], HEADS)
        if VALUE_TEMPLATE == 4444:
            weight = weight * decay[None, None, :] + lane_sums(p, HEADS)
        product = _weighted(
            value_words, p, places + 16, levels + 64, at, value_tables, HEADS, VALUE_WORDS, VALUE_TEMPLATE, ASSEMBLY
        )
        sums = sums * decay[None, :] + combine(product, HEADS)

    if DEPENDENT == LATE:
        tl.extra.cuda.gdc_launch_dependents()
    all_total = tl.sum(tl.sum(total, axis=0), axis=0)
    if VALUE_TEMPLATE == 4444:
        sums += 0.5 * tl.sum(tl.sum(weight, axis=0), axis=0)[None, :]
    # in units of 1/128 of a level: fp16 then holds any sum of fp16 norms
    result = sums * (0.0078125 / tl.maximum(all_total, 1e-37))[None, :]
    tl.store(out + g[None, :] * splits * 128 + row[:, None], result.to(tl.float16))
    tl.store(
        lse + g * splits,
        tl.where(all_total > 0, reference - LOG_LARGEST + tl.log2(tl.maximum(all_total, 1e-37)), float("-inf")),
    )


@triton.jit
def attend_pages(
    head,
    span,
    centre,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUE_TEMPLATE: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    KEY_LOG: tl.constexpr,
    VALUE_LOG: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Attend one head's queries to pages ``first..last`` of a sequence, tokens ``start..stop``.

    ``head``: query float32 ``[group, 128]`` (rotated), group, scaling (with log2(e)), the sequence's pages, the
    head's rows of ints, floats, places and levels, where its partial output float16 ``[HEADS, splits, 128]`` and
    log-sum-exp float32 ``[HEADS, splits]`` (base 2) go, splits, page_bytes. ``span``: first, last, start, stop.
    ``centre``, with CENTRE: the queries ``[group, 128]`` as they came and their stride, the slot of position 0, and of
    the tables of :mod:`kvbench.kernels.tile_centre` dims, the head's vectors, turns, half and table.
    """
    template = tl.load(head[4] + _TEMPLATE)
    if CENTRE:  # here and not with each template, which would make the compiler's work on loads several times longer
        centre = centre_query(centre, head[1], head[2], span[0], HEADS)
    # the numbers after a template are the slabs in its runs of equal width
    if WORDS == 4:
        _attend_template(
            head, span, centre, HEADS, 4444, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
            STAGES, ASSEMBLY, DEPENDENT, CENTRE,
        )  # fmt: skip
    elif WORDS == 3:
        if template == 3333:
            _attend_template(
                head, span, centre, HEADS, 3333, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
                STAGES, ASSEMBLY, DEPENDENT, CENTRE,
            )  # fmt: skip
        elif template == 4332:
            _attend_template(
                head, span, centre, HEADS, 4332, 1, 2, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
                STAGES, ASSEMBLY, DEPENDENT, CENTRE,
            )  # fmt: skip
        elif template == 4422:
            _attend_template(
                head, span, centre, HEADS, 4422, 2, 2, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
                STAGES, ASSEMBLY, DEPENDENT, CENTRE,
            )  # fmt: skip
        else:
            _attend_template(
                head, span, centre, HEADS, 4431, 2, 1, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
                STAGES, ASSEMBLY, DEPENDENT, CENTRE,
            )  # fmt: skip
    elif template == 2222:
        _attend_template(
            head, span, centre, HEADS, 2222, 4, 0, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
            STAGES, ASSEMBLY, DEPENDENT, CENTRE,
        )  # fmt: skip
    elif template == 3221:
        _attend_template(
            head, span, centre, HEADS, 3221, 1, 2, 1, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
            STAGES, ASSEMBLY, DEPENDENT, CENTRE,
        )  # fmt: skip
    elif template == 3311:
        _attend_template(
            head, span, centre, HEADS, 3311, 2, 2, 0, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
            STAGES, ASSEMBLY, DEPENDENT, CENTRE,
        )  # fmt: skip
    else:
        _attend_template(
            head, span, centre, HEADS, 4211, 1, 1, 2, WORDS, VALUE_TEMPLATE, VALUE_WORDS, KEY_LOG, VALUE_LOG,
            STAGES, ASSEMBLY, DEPENDENT, CENTRE,
        )  # fmt: skip
