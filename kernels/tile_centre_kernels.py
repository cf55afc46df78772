# mypy: allow-untyped-defs, allow-incomplete-defs
"""The centre of keys, in Triton: taken off in encoding, added to a page's logits in decode attention.

**Angles.** A frequency is an integer, in units of 2^-64 turns. Its product with a position wraps around as an angle
does and is exact, however far out; its upper half is the angle.

**Logits.** A query's block of two numbers and the centre's give ``(along, across)``, and its part of the logit at angle
a is ``along cos a + across sin a``. The pairs are turned to the first page that is read, then from half a page to the
next. The logits of the half's 64 tokens are a product with the table of cosines and sines of the angles within it, the
same for all: rows are tokens, and a query head has a column for each half of the page. All this takes the query as it
came, before any rotation, and so starts before the rotated one is there.

Tables: :mod:`kvbench.kernels.tile_centre`. Tested: tests/kernels/test_triton_centre.py.
"""

import triton
import triton.language as tl

RADIANS = tl.constexpr(1.4629180792671596e-09)  # in 2^-32 turns
LIMIT = tl.constexpr(32752.0)  # of a block's part of a logit, so that fp16 holds it at any angle


@triton.jit
def cos_sin(turns, position):
    """cos and sin of the angles of ``position`` (an integer) with ``turns`` int64, 2^-64 turns a position.

    A quarter of a turn is taken off as integers, and Taylor's series do for what is left, at most 45 degrees.
    """
    angle = ((turns * position) >> 32).to(tl.int32)
    quarter = ((angle >> 29) + 1) >> 1
    x = (angle - (quarter << 30)).to(tl.float32) * RADIANS
    y = x * x
    sin = x * (1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880)))))
    cos = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320))))
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) != 0, -cos, cos), tl.where((quarter & 2) != 0, -sin, sin)


@triton.jit
def centre_at(turns, mu, across, position):
    """The centre ``[128]`` at a position, and what a page's table of sines is multiplied by where it is the page's
    first: the centre a quarter of a turn on."""
    cos, sin = cos_sin(turns, position)
    return mu * cos + across * sin, across * cos - mu * sin


@triton.jit
def centre_vectors(centre, sequence, head, there):
    """What encoding a head's keys reads: the slot of position 0, and per dim turns, mu and across ``[128]``; the latter
    two are zero unless ``there``."""
    d = tl.arange(0, 128)
    vectors, mine = centre[2] + head * 256 + d, there & (d >= 0)
    mu, across = tl.load(vectors, mask=mine, other=0.0), tl.load(vectors + 128, mask=mine, other=0.0)
    return tl.load(centre[0] + sequence), tl.load(centre[1] + d), mu, across


@triton.jit
def page_centres(centre, sequence, head, page):
    """The centre of a head's keys at each token of a page, float32 ``[128, 128 dims]``."""
    origin, turns, mu, across = centre_vectors(centre, sequence, head, True)
    straight, turned = centre_at(turns, mu, across, page * 128 - origin)
    t = tl.arange(0, 128)
    waves = centre[3] + t[:, None] * 128 + t[None, :]
    return tl.load(waves) * straight[None, :] + tl.load(waves + 16384) * turned[None, :]


@triton.jit
def _fourth(centre, group, scaling, first_page, PART: tl.constexpr, HEADS: tl.constexpr):
    """``(along, across)`` float32 ``[HEADS, 16]`` of every fourth block from PART on: see :func:`centre_query`."""
    q, head_stride, origin, dims, vectors, turns, _half, _table = centre
    j, g = tl.arange(0, 16)[None, :] * 4 + PART, tl.arange(0, HEADS)[:, None]
    first, second, step = tl.load(dims + j), tl.load(dims + 64 + j), tl.load(turns + j)
    source, mine = q + g * head_stride, (g < group) & (j >= 0)
    q0 = tl.load(source + first, mask=mine, other=0.0).to(tl.float32)
    q1 = tl.load(source + second, mask=mine, other=0.0).to(tl.float32)
    mu0, mu1 = tl.load(vectors + first) * scaling, tl.load(vectors + second) * scaling
    along = tl.minimum(tl.maximum(q0 * mu0 + q1 * mu1, -LIMIT), LIMIT)
    across = tl.minimum(tl.maximum(q1 * mu0 - q0 * mu1, -LIMIT), LIMIT)
    cos, sin = cos_sin(step, first_page * 128 - origin)
    return turn(along, across, cos, sin)


@triton.jit
def centre_query(centre, group, scaling, first_page, HEADS: tl.constexpr):
    """``(along, across)`` float32 ``[HEADS, 64 blocks]`` of a head's queries at the first token of a page, scaled; and
    what does not change: the cos and sin of half a page's angle ``[1, 64]``, and the table float16 ``[64, 128]``.

    A thread gets four neighbouring blocks, and so eight neighbouring numbers of the matrix product's operand.
    """
    along0, across0 = _fourth(centre, group, scaling, first_page, 0, HEADS)
    along1, across1 = _fourth(centre, group, scaling, first_page, 1, HEADS)
    along2, across2 = _fourth(centre, group, scaling, first_page, 2, HEADS)
    along3, across3 = _fourth(centre, group, scaling, first_page, 3, HEADS)
    along = tl.reshape(tl.join(tl.join(along0, along2), tl.join(along1, along3)), (HEADS, 64))
    across = tl.reshape(tl.join(tl.join(across0, across2), tl.join(across1, across3)), (HEADS, 64))
    j = tl.arange(0, 64)
    half, table = centre[6] + j[None, :], centre[7] + j[:, None] * 128 + tl.arange(0, 128)[None, :]
    return along, across, (tl.load(half), tl.load(half + 64), tl.load(table))


@triton.jit
def turn(along, across, cos, sin):
    """Pairs turned by an angle."""
    return along * cos + across * sin, across * cos - along * sin


@triton.jit
def centre_logits(along, across, waves, HEADS: tl.constexpr):
    """The centre's part of a page's logits ``[128, HEADS]``, and the pairs at the next page."""
    half_cos, half_sin, table = waves
    middle_along, middle_across = turn(along, across, half_cos, half_sin)
    pairs = tl.join(tl.join(along, across), tl.join(middle_along, middle_across))  # head, block, which, half
    COLUMNS: tl.constexpr = 16 if HEADS == 4 else 2 * HEADS
    if HEADS == 4:  # half of sixteen columns are zero
        pairs = tl.permute(tl.join(pairs, tl.zeros_like(pairs)), (0, 4, 3, 1, 2))
    else:
        pairs = tl.permute(pairs, (0, 3, 1, 2))
    rows = tl.reshape(pairs, (COLUMNS, 128)).to(tl.float16)
    product = tl.dot(table, tl.trans(rows))
    if HEADS == 4:
        halves, _ = tl.split(tl.permute(tl.reshape(product, (64, 4, 2, 2)), (0, 1, 3, 2)))
    else:
        halves = tl.reshape(product, (64, HEADS, 2))
    logits = tl.reshape(tl.permute(halves, (2, 0, 1)), (128, HEADS))
    along, across = turn(middle_along, middle_across, half_cos, half_sin)
    return logits, along, across
