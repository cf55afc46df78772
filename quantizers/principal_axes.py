"""Values along their principal axes: per head, the mean off, coordinates of like variance coded alike.

Costs nothing at decode: softmax weights sum to one, so the mean comes back whole after the softmax, and the axes fold
into the rotation that brings the output out of the format's space.
"""

import math

import numpy as np

from kvbench.calibration import TensorStatistics
from kvbench.kernels.formats import Basis, Centre, Group, HaarRotation, HeadFormat, RotatedCodebook
from kvbench.quantizers.bit_allocation import allocate_bits
from kvbench.quantizers.groups import Array, norm_code, uniform_segments

PAIR = 2  # axes are allotted bits in pairs, since a rotated group needs two dims
METRIC_FLOOR = 1e-4  # of a metric's mean eigenvalue: what outputs hardly see must still decode


def principal_axes(statistics: TensorStatistics, head: int, metric: Array | None = None) -> tuple[Array, Array]:
    """Variances in descending order ``[head_dim]`` and the axes ``[head_dim, head_dim]``, one a row, of one head.

    With a ``metric [head_dim, head_dim]`` that weighs errors e by ``e^T metric e``, the axes are those of the vectors
    brought to the space where errors weigh alike, by the metric's square root, and the rows hold both.
    """
    mean = statistics.mean[head]
    covariance = statistics.second_moment[head] - np.outer(mean, mean)
    root = np.eye(len(mean)) if metric is None else square_root(metric)
    variances, axes = np.linalg.eigh(root @ covariance @ root)
    axes = axes[:, ::-1].T
    # an axis's sign is arbitrary: the largest component is made positive, so that platforms agree
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    return np.maximum(variances[::-1], 0.0), (axes * signs[:, None]) @ root


def square_root(metric: Array) -> Array:
    """The symmetric square root of a metric, scaled to a mean eigenvalue of one; kept invertible by a floor."""
    values, vectors = np.linalg.eigh(metric)
    values = np.maximum(values / values.mean(), METRIC_FLOOR)
    return (vectors * np.sqrt(values)) @ vectors.T


def principal_format(
    statistics: TensorStatistics, bits: float, seed: int, norm_bits: int, metrics: Array | None = None
) -> RotatedCodebook:
    """One layer's values: greedy widths over pairs of principal axes, one rotated group a width, the mean taken off.

    ``metrics [kv_heads, head_dim, head_dim]`` weigh errors; alike in all directions where None.
    """
    means = statistics.mean.astype(np.float32)
    return RotatedCodebook(
        tuple(
            _principal_head(statistics, head, bits, seed + head, norm_bits, None if metrics is None else metrics[head])
            for head in range(len(means))
        ),
        Centre(tuple(tuple(float(value) for value in row) for row in means)),
    )


def _principal_head(
    statistics: TensorStatistics, head: int, bits: float, seed: int, norm_bits: int, metric: Array | None
) -> HeadFormat:
    variances, axes = principal_axes(statistics, head, metric)
    pairs = variances.reshape(-1, PAIR).sum(axis=1)
    widths = allocate_bits(pairs.tolist(), math.floor(len(pairs) * bits))
    sample = (statistics.sample[:, head].astype(np.float64) - statistics.mean[head]) @ axes.T
    members: dict[int, list[int]] = {}
    for pair, width in enumerate(widths):
        members.setdefault(width, []).extend((PAIR * pair, PAIR * pair + 1))
    groups = tuple(
        Group(
            tuple(dims),
            HaarRotation(len(dims), seed),
            uniform_segments(len(dims), width),
            norm_code(sample[:, dims], norm_bits),
        )
        for width, dims in sorted(members.items(), reverse=True)
    )
    return HeadFormat(groups, Basis(len(axes), axes.astype("<f4").tobytes()))
