"""What rotated groups are made of: segments of codes, norm codes, and the checks of the options that choose them."""

import math

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import ConfigurationError
from kvbench.kernels.formats import MAX_BITS, Fp16Norm, LogNorm, Segment
from kvbench.quantizers.codebooks import codebook

Array = NDArray[np.float64]

KEY_STREAM, VALUE_STREAM = 0, 1000  # heads' rotations are numbered from here, so that keys and values differ
NORM_BITS = (16, 8, 6)
FP16_MAX, FP16_ROOM = 65504.0, 64.0
LOG_ROOM = 0.5  # octaves of a log-coded norm's range beyond the calibration's smallest and largest


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


def check_norm_bits(norm_bits: int) -> None:
    """Raise ConfigurationError for a norm width that there is no code for."""
    if norm_bits not in NORM_BITS:
        raise ConfigurationError(
            f"quantizer.norm_bits={norm_bits} is not allowed: choose 16 (fp16), 8 or 6 (logarithmic)."
        )


def uniform_segments(dims: int, bits: float) -> tuple[Segment, ...]:
    """Segments of a rotated group of ``dims`` coordinates with ``floor(dims * bits)`` bits in all.

    A fractional average gives the first coordinates one bit more than the rest; after a random rotation all
    coordinates are alike.
    """
    low = math.floor(bits)
    wide = math.floor(dims * bits) - dims * low
    counts = ((wide, low + 1), (dims - wide, low))
    return tuple(Segment(count, codebook(dims, width)) for count, width in counts if count)


def norm_code(sample: Array, bits: int) -> Fp16Norm | LogNorm:
    """How a group's norms are stored, from the group's vectors ``[tokens, dims]`` of the calibration's sample.

    16 bits: fp16, scaled where 64 times the largest norm would not fit. Fewer: a logarithmic code over the sample's
    range and half an octave on either side; code 0 stays for the zero vector.
    """
    norms = np.linalg.norm(sample, axis=1)
    largest = float(norms.max(initial=0.0))
    if bits == 16:
        return Fp16Norm(scale=2.0 ** max(0, math.ceil(math.log2(max(FP16_ROOM * largest, 1.0) / FP16_MAX))))
    positive = norms[norms > 0]
    low, high = (math.log2(positive.min()), math.log2(largest)) if len(positive) else (0.0, 0.0)
    low, high = low - LOG_ROOM, high + LOG_ROOM
    # float32 numbers: the last bits of a platform's logarithm do not reach the format
    step = float(np.float32((high - low) / (2**bits - 2)))
    return LogNorm(low=float(np.float32(low - step)), step=step, bits=bits)
