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


def principal_axes(statistics: TensorStatistics, head: int) -> tuple[Array, Array]:
    """Variances in descending order ``[head_dim]`` and the axes ``[head_dim, head_dim]``, one a row, of one head."""
    mean = statistics.mean[head]
    covariance = statistics.second_moment[head] - np.outer(mean, mean)
    variances, axes = np.linalg.eigh(covariance)
    axes = axes[:, ::-1].T
    # an axis's sign is arbitrary: the largest component is made positive, so that platforms agree
    signs = np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])
    return np.maximum(variances[::-1], 0.0), axes * signs[:, None]


def principal_format(statistics: TensorStatistics, bits: float, seed: int, norm_bits: int) -> RotatedCodebook:
    """One layer's values: greedy widths over pairs of principal axes, one rotated group a width, the mean taken off."""
    heads = range(statistics.mean.shape[0])
    means = statistics.mean.astype(np.float32)
    return RotatedCodebook(
        tuple(_principal_head(statistics, head, bits, seed + head, norm_bits) for head in heads),
        Centre(tuple(tuple(float(value) for value in row) for row in means)),
    )


def _principal_head(statistics: TensorStatistics, head: int, bits: float, seed: int, norm_bits: int) -> HeadFormat:
    variances, axes = principal_axes(statistics, head)
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
