"""Randomised Hadamard matrices: cheap orthogonal rotations that spread outliers over all coordinates."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def sylvester(dim: int) -> NDArray[np.float64]:
    """The orthogonal Hadamard matrix of Sylvester's construction, ``[dim, dim]``; ``dim`` must be a power of two."""
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"Sylvester's construction needs a power of two, not {dim}")
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(dim), dtype=np.float64)


@lru_cache(maxsize=256)
def random_hadamard(dim: int, seed: int) -> NDArray[np.float64]:
    """An orthogonal matrix ``[dim, dim]``, read-only: random signs, then Hadamard blocks of the largest power of two in
    ``dim`` (for 80 dims five blocks of 16).

    A function of ``(dim, seed)`` alone, the same on every platform: signs are bits of the Philox generator.
    """
    block = dim & -dim
    signs = np.where(np.random.Philox(key=seed).random_raw(dim) >> np.uint64(63), 1.0, -1.0)
    matrix = np.asarray(np.kron(np.eye(dim // block), sylvester(block)) * signs, dtype=np.float64)
    matrix.setflags(write=False)
    return matrix
