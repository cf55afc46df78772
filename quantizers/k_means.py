"""K-means on a line: the levels that code numbers with the least weighted squared error."""

import numpy as np

from kvbench.quantizers.groups import Array

STEPS = 200
RESOLUTION = 2.0**-14  # levels are multiples of it: the last bits of a platform's sums do not reach a format


def weighted_k_means(numbers: Array, weights: Array, count: int) -> tuple[float, ...]:
    """``count`` rising levels for ``numbers`` within about -1 .. 1, by Lloyd's iteration from even quantiles of weight.

    ``weights`` are not negative, one a number. Levels that no number takes lie between their neighbours. Deterministic.
    """
    order = np.argsort(numbers, kind="stable")
    x, w = numbers[order], weights[order]
    if not w.sum() > 0:
        w = np.ones_like(x)
    mass, moment = (np.concatenate([[0.0], np.cumsum(each)]) for each in (w, w * x))
    quantiles = (np.arange(count) + 0.5) / count
    levels = x[np.minimum(np.searchsorted(mass[1:], quantiles * mass[-1]), len(x) - 1)] if len(x) else np.zeros(count)
    for _ in range(STEPS):
        ends = np.concatenate([[0], np.searchsorted(x, (levels[1:] + levels[:-1]) / 2), [len(x)]])
        inside = np.diff(mass[ends])
        moved = np.where(inside > 0, np.diff(moment[ends]) / np.where(inside > 0, inside, 1.0), levels)
        if np.abs(moved - levels).max() < RESOLUTION / 4:
            break
        levels = moved
    return tuple(float(level) for level in _apart(levels))


def _apart(levels: Array) -> Array:
    """Multiples of RESOLUTION in rising order, each at least one above the one before."""
    steps = np.round(np.sort(levels) / RESOLUTION)
    ahead = np.arange(len(steps))
    return np.asarray((np.maximum.accumulate(steps - ahead) + ahead) * RESOLUTION)
