"""Bootstrap intervals: they cover, they pair, and they are the same each time."""

import numpy as np
import pytest

from kvbench.statistics import block_means, bootstrap_mean, paired_difference


def test_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        interval = bootstrap_mean(generator.normal(3.0, 1.0, 60).tolist())
        covered += interval.low <= 3.0 <= interval.high
    assert 86 <= covered <= 100


def test_pairing_removes_what_both_share() -> None:
    generator = np.random.default_rng(2)
    shared = generator.normal(0, 100, 50)
    first = shared + 1 + generator.normal(0, 0.1, 50)
    difference = paired_difference(first.tolist(), shared.tolist())
    assert difference.low > 0.9
    assert difference.high < 1.1


def test_the_same_samples_give_the_same_interval() -> None:
    samples = np.random.default_rng(3).normal(size=40).tolist()
    assert bootstrap_mean(samples) == bootstrap_mean(samples)


def test_blocks_cover_every_value_once() -> None:
    assert block_means([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 6.0, 9.0]


def test_unequal_samples_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="3 and 2"):
        paired_difference([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="no samples"):
        bootstrap_mean([])
