"""Haar rotations: orthogonal, Haar-distributed, and the same bytes on every platform."""

import hashlib

import numpy as np
import pytest

from kvbench.kernels.rotations import haar

PINNED = {  # SHA-256 of the matrix as little-endian float32, rows first
    (2, 0): "abb09192e76797297b71421ecbe9c4858a75a0d3e2efea42c63d89b32a02593b",
    (6, 42): "4203eb309c1196a6b6c16a372fc326bc88795dd4a839c13689a506c86ae5ceb0",
    (16, 1): "8ebb5225a64ba1f0bf91c2375f8dacddd41ef87fb8c340aead65c8136f7a7271",
    (64, 42): "ff0d02400a5db3b61805f6304cd0352d4716c20a89589bd6d166028fba8d8a24",
    (80, 43): "b899d8aa5371908da96e1465ae4b132c8e7411a0d83053f77b7b06b5cd21574a",
    (128, 1042): "bc2697dd092b1475043b128eef0a12d8d5720f5ca8033df0de5a2cf4fa6b35bf",
    (256, 7): "b4c4365c3d7507c70ea347fb7014ceb3f0bc2577aeebb7815a9a52df18b1c695",
}


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 64, 80, 128, 256])
def test_rotation_is_orthogonal(dim: int) -> None:
    q = haar(dim, 7)
    np.testing.assert_allclose(q @ q.T, np.eye(dim), atol=1e-12)


@pytest.mark.parametrize(("dim", "seed"), PINNED)
def test_bytes_are_those_of_every_other_platform(dim: int, seed: int) -> None:
    assert hashlib.sha256(haar(dim, seed).astype("<f4").tobytes()).hexdigest() == PINNED[dim, seed]


def test_seeds_give_different_rotations() -> None:
    assert len({haar(8, seed).tobytes() for seed in range(50)}) == 50


def test_shared_matrix_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        haar(4, 0)[0, 0] = 1.0


def test_entries_have_the_moments_of_a_unit_vectors_coordinates() -> None:
    """Over Haar, an entry of a 4 x 4 rotation has mean 0, variance 1/4 and fourth moment 3 / (4 * 6)."""
    samples = np.stack([haar.__wrapped__(4, seed) for seed in range(2000)])
    deviation = 1 / np.sqrt(len(samples))  # of a mean over 2000 draws, in units of an entry's spread
    assert np.abs(samples.mean(0)).max() < 5 * deviation / 2
    assert np.abs((samples**2).mean(0) - 1 / 4).max() < 5 * deviation * 0.25
    assert np.abs((samples**4).mean(0) - 1 / 8).max() < 5 * deviation * 0.25


def test_every_column_is_uniform_on_the_circle() -> None:
    """Without the sign convention of Mezzadri's correction, Householder QR puts the first column on one side."""
    samples = np.stack([haar.__wrapped__(2, seed) for seed in range(2000)])
    for column in range(2):
        angle = np.arctan2(samples[:, 1, column], samples[:, 0, column])
        counts, _ = np.histogram(angle, bins=8, range=(-np.pi, np.pi))
        chi_squared = ((counts - 250) ** 2 / 250).sum()
        assert chi_squared < 24.3  # 7 degrees of freedom, one in a thousand


def test_both_orientations_occur_equally_often() -> None:
    negative = sum(np.linalg.det(haar.__wrapped__(3, seed)) < 0 for seed in range(1000))
    assert 420 < negative < 580


def test_dim_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one dim"):
        haar(0, 0)
