"""Codebooks against facts: published distortions, closed forms, and the two conditions of optimality."""

import itertools

import numpy as np
import pytest

from kvbench.quantizers.codebooks import codebook, coordinate_law, lloyd_max

INTEGER_COST = {1: 1e-9, 2: 1e-4, 3: 2e-4, 4: 1e-3, 5: 3e-4, 6: 6e-4, 7: 2e-3, 8: 6e-3}  # of the distortion


def centroid(dim: int, low: float, high: float) -> float:
    """Mean of a unit vector's coordinate between two non-negative values, by Gauss-Legendre quadrature.

    In the angle, whose density sin^(dim - 2) has no singularity.
    """
    start, stop = np.arccos(high), np.arccos(low)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    angle = start + (stop - start) * (nodes + 1) / 2
    density = weights * np.sin(angle) ** (dim - 2) * (stop - start) / 2
    return (density * np.cos(angle)).sum() / density.sum()


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)])
def test_large_groups_have_the_gaussian_distortion(bits: int, expected: float) -> None:
    """Max's table of 1960, whose last value is 0.2 percent low: quadrature gives 0.002505."""
    assert coordinate_law(100_000).distortion(np.array(lloyd_max(100_000, bits))) == pytest.approx(expected, rel=3e-3)


def test_one_bit_in_two_dims_has_the_arcsine_laws_distortion() -> None:
    """|cos| of a uniform angle has mean 2 / pi, so 2 (1/2 - 4 / pi^2)."""
    assert lloyd_max(2, 1) == pytest.approx((2 / np.pi,), rel=1e-9)
    assert coordinate_law(2).distortion(np.array(lloyd_max(2, 1))) == pytest.approx(1 - 8 / np.pi**2, rel=1e-7)


@pytest.mark.parametrize("bits", range(1, 9))
def test_three_dims_are_uniform_so_levels_are_evenly_spaced(bits: int) -> None:
    """Archimedes: a sphere's coordinate is uniform on [-1, 1]; cells of 2 / 2^b, distortion 3 (2 / 2^b)^2 / 12."""
    count = 2 ** (bits - 1)
    assert lloyd_max(3, bits) == pytest.approx([(i + 0.5) / count for i in range(count)], abs=2e-6)
    assert coordinate_law(3).distortion(np.array(lloyd_max(3, bits))) == pytest.approx(4.0**-bits, rel=1e-4)


@pytest.mark.parametrize("dim", [2, 4, 12, 64, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_every_level_is_the_centroid_of_its_nearest_neighbour_cell(dim: int, bits: int) -> None:
    levels = np.array(lloyd_max(dim, bits))
    edges = [0.0, *((levels[1:] + levels[:-1]) / 2), 1.0]
    centroids = [centroid(dim, low, high) for low, high in itertools.pairwise(edges)]
    np.testing.assert_allclose(levels, centroids, rtol=2e-6)


@pytest.mark.parametrize(("dim", "bits"), [(2, 3), (8, 2), (64, 3), (64, 6)])
def test_no_small_change_of_a_level_lowers_the_distortion(dim: int, bits: int) -> None:
    levels, law = np.array(lloyd_max(dim, bits)), coordinate_law(dim)
    best = law.distortion(levels)
    for index in range(len(levels)):
        for factor in (0.97, 1.03):
            moved = levels.copy()
            moved[index] *= factor
            assert law.distortion(moved) > best


@pytest.mark.parametrize("dim", [2, 6, 64])
def test_distortion_is_the_error_of_coding_random_unit_vectors(dim: int) -> None:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((200_000 // dim, dim))
    t = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).ravel()
    book = codebook(dim, 3)
    levels = np.array(book.levels) * book.scale
    nearest = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, t)]
    assert dim * np.mean((t - nearest) ** 2) == pytest.approx(coordinate_law(dim).distortion(levels[4:]), rel=0.01)


def test_exact_law_beats_the_gaussian_limit_in_small_groups() -> None:
    """Why codebooks depend on the group's size: the limit's 3-bit levels cost a 4-dim group over a tenth."""
    law, count = coordinate_law(4), 100_000
    gaussian = np.array(lloyd_max(count, 3)) * np.sqrt(count / 4)
    assert law.distortion(gaussian) > 1.1 * law.distortion(np.array(lloyd_max(4, 3)))


@pytest.mark.parametrize("smallest", range(2, 257, 32))
def test_integer_codebooks_of_every_even_group_size_exist_and_cost_little(smallest: int) -> None:
    for dim in range(smallest, min(smallest + 32, 257), 2):
        law = coordinate_law(dim)
        for bits, cost in INTEGER_COST.items():
            book = codebook(dim, bits)
            levels = np.array(book.levels)
            rounded = law.distortion(levels[len(levels) // 2 :] * book.scale)
            assert book.bits == bits
            assert np.array_equal(levels, -levels[::-1])
            assert rounded <= law.distortion(np.array(lloyd_max(dim, bits))) * (1 + cost), (dim, bits)


@pytest.mark.parametrize("dim", [2, 34, 128])
def test_levels_fit_what_kernels_hold_them_in(dim: int) -> None:
    assert all(max(codebook(dim, bits).levels) <= 127 for bits in (1, 2, 3))
    assert all(level % 2 and abs(level) <= 255 for level in codebook(dim, 4).levels)


def test_scale_is_a_float32_number_so_that_platforms_agree() -> None:
    scale = codebook(64, 3).scale
    assert scale == float(np.float32(scale))


@pytest.mark.parametrize("dim", [0, 1])
def test_groups_of_less_than_two_dims_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="at least 2 dims"):
        codebook(dim, 3)
