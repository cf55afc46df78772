"""Confidence intervals of means, and of paired differences between two quantizers on the same samples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and the bounds of its 95 percent bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(samples: Sequence[float] | NDArray[np.float64], seed: int = 0) -> Interval:
    """The mean of ``samples`` with a percentile bootstrap interval (Efron, 1979); samples are drawn with replacement.

    Neighbouring tokens are not independent: pass means over blocks of tokens, not tokens. With one sample the
    interval is the mean itself. Deterministic. Raises ValueError without samples.
    """
    values = np.asarray(samples, dtype=np.float64)
    if not len(values):
        raise ValueError("no samples to average")
    generator = np.random.default_rng(seed)
    means = np.array([values[generator.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean of ``first - second`` sample by sample, with its interval. Raises ValueError on different lengths."""
    if len(first) != len(second):
        raise ValueError(f"paired samples must be as many on both sides, not {len(first)} and {len(second)}")
    return bootstrap_mean(np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64))


def block_means(values: Sequence[float], block: int) -> list[float]:
    """Means of consecutive blocks of ``block`` values; a shorter last block counts as one."""
    return [float(np.mean(values[start : start + block])) for start in range(0, len(values), block)]


def summary(name: str, samples: Sequence[float]) -> dict[str, float | list[float]]:
    """Mean, standard error and interval of ``samples`` as metrics ``name``, ``<name>_stderr``, ``<name>_interval``."""
    interval = bootstrap_mean(samples)
    spread = float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
    return {
        name: interval.mean,
        f"{name}_stderr": spread / len(samples) ** 0.5,
        f"{name}_interval": list(interval),
    }
