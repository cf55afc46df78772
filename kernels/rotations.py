"""Haar-random orthogonal matrices that are the same on every platform.

LAPACK's QR and numpy's vectorised sums differ in their last bits from one processor to another, which is enough to
move a code across a threshold. Here every step is an elementwise IEEE operation or a sum in a fixed order, and the
Gaussian draws are rounded to a grid coarse enough to hide the last bit of the platform's logarithm and cosine.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

GRID = 2.0**24  # draws are multiples of 2^-24: far finer than sampling noise, far coarser than a libm's last bit


def gaussian(seed: int, count: int) -> NDArray[np.float64]:
    """``count`` standard normal draws (Box-Muller over Philox), rounded to multiples of ``1 / GRID``."""
    pairs = (count + 1) // 2
    raw = np.random.Philox(key=seed).random_raw(2 * pairs)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
    angle = 2.0 * np.pi * uniform[pairs:]
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return np.round(draws * GRID) / GRID


def _ordered_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the first axis by halving: the same order, and so the same bits, whatever the vector width."""
    while len(terms) > 1:
        half = len(terms) // 2
        folded = terms[:half] + terms[half : 2 * half]
        terms = np.concatenate([folded, terms[2 * half :]]) if len(terms) % 2 else folded
    return terms[0]


@lru_cache(maxsize=4096)
def haar(dim: int, seed: int) -> NDArray[np.float64]:
    """A Haar-distributed orthogonal matrix ``[dim, dim]``, float64, read-only, a function of ``(dim, seed)`` alone.

    Householder QR of a Gaussian matrix with the signs of R's diagonal folded into Q, which makes Q Haar-distributed
    (Mezzadri, "How to generate random matrices from the classical compact groups", 2007).
    """
    if dim < 1:
        raise ValueError(f"a rotation needs at least one dim, not {dim}")
    r = gaussian(seed, dim * dim).reshape(dim, dim)
    q = np.eye(dim)
    for column in range(dim):
        x = r[column:, column].copy()
        norm = np.sqrt(_ordered_sum(x * x))
        sign = 1.0 if x[0] >= 0 else -1.0
        v = x.copy()
        v[0] += sign * norm
        vv = _ordered_sum(v * v)
        if vv > 0:
            factor = 2.0 / vv
            block = r[column:, column:]
            block -= (factor * v)[:, None] * _ordered_sum(v[:, None] * block)[None, :]
            tail = q[:, column:]
            tail -= _ordered_sum(v[:, None] * tail.T)[:, None] * (factor * v)[None, :]
    signs = np.where(np.diagonal(r) >= 0, 1.0, -1.0)
    q = q * signs[None, :]
    q.setflags(write=False)
    return q
