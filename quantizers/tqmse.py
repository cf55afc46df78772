"""TQ-MSE: TurboQuant's quantizer for mean squared error, one rotation and one norm a head."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.calibration import Calibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import (
    MAX_BITS,
    CacheFormat,
    Fp16Norm,
    Group,
    HaarRotation,
    HeadFormat,
    RotatedCodebook,
    Segment,
)
from kvbench.quantizer import Quantizer
from kvbench.quantizers.codebooks import codebook

KEY_STREAM, VALUE_STREAM = 0, 1000  # heads' rotations are numbered from here, so that keys and values differ


def check_bits(option: str, bits: float) -> None:
    """Raise ConfigurationError unless ``bits`` is a number from 1 to 8."""
    if not 1 <= bits <= MAX_BITS:  # NaN fails too
        raise ConfigurationError(
            f"quantizer.{option}={bits:g} is not allowed: choose a number from 1 to {MAX_BITS}, such as 3 or 2.5."
        )


def check_seed(seed: int) -> None:
    """Raise ConfigurationError for a seed that names no rotation."""
    if not 0 <= seed < 2**63:
        raise ConfigurationError(f"quantizer.seed={seed} is not allowed: choose a whole number from 0 to 2^63 - 1.")


def uniform_segments(dims: int, bits: float) -> tuple[Segment, ...]:
    """Segments of a rotated group of ``dims`` coordinates with ``floor(dims * bits)`` bits in all.

    A fractional average gives the first coordinates one bit more than the rest; after a random rotation all
    coordinates are alike.
    """
    low = math.floor(bits)
    wide = math.floor(dims * bits) - dims * low
    counts = ((wide, low + 1), (dims - wide, low))
    return tuple(Segment(count, codebook(dims, width)) for count, width in counts if count)


def norm_code(statistics: TensorStatistics, head: int, dims: tuple[int, ...]) -> Fp16Norm:
    """An fp16 norm whose scale leaves 64 times the calibration's largest possible norm of room."""
    extreme = np.maximum(np.abs(statistics.minimum[head]), np.abs(statistics.maximum[head]))[list(dims)]
    room = 64.0 * float(np.sqrt(np.sum(extreme**2)))
    return Fp16Norm(scale=2.0 ** max(0, math.ceil(math.log2(max(room, 1.0) / 65504.0))))


def uniform_head(statistics: TensorStatistics, head: int, bits: float, seed: int) -> HeadFormat:
    """A head as one group: all dims share a norm, a Haar rotation and a width."""
    dims = tuple(range(statistics.mean.shape[1]))
    rotation = HaarRotation(len(dims), seed + head)
    return HeadFormat((Group(dims, rotation, uniform_segments(len(dims), bits), norm_code(statistics, head, dims)),))


def uniform_format(statistics: TensorStatistics, bits: float, seed: int) -> RotatedCodebook:
    """TQ-MSE for one layer's keys or values."""
    heads = range(statistics.mean.shape[0])
    return RotatedCodebook(tuple(uniform_head(statistics, head, bits, seed) for head in heads))


@dataclass(frozen=True)
class TQMSE(Quantizer):
    """Uniform TurboQuant-MSE (arXiv 2504.19874): norm, random rotation, one Lloyd-Max code a coordinate.

    Keys and values alike. The calibration serves only to scale the norms into fp16's range.
    """

    name: ClassVar[str] = "tqmse"

    k_bits: float = field(default=3.0, metadata={"help": "bits a key coordinate, 1 to 8; fractions allowed"})
    v_bits: float = field(default=3.0, metadata={"help": "bits a value coordinate, 1 to 8; fractions allowed"})
    seed: int = field(default=42, metadata={"help": "seed of the rotations"})

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        check_seed(self.seed)

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        return CacheFormat(
            key=tuple(uniform_format(layer.k, self.k_bits, self.seed + KEY_STREAM) for layer in calibration.layers),
            value=tuple(uniform_format(layer.v, self.v_bits, self.seed + VALUE_STREAM) for layer in calibration.layers),
        )
