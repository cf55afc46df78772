"""Integers per token and head: the simplest quantizer there is, and what most serving stacks mean by int8 KV cache."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.calibration import Calibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.comparator_formats import Affine
from kvbench.kernels.formats import MAX_BITS, CacheFormat
from kvbench.quantizer import Quantizer

FP16_MAX = 65504.0
ROOM = 64.0  # times the calibration's largest number before fp16 scales saturate


def check_whole_bits(option: str, bits: int, least: int = 1, most: int = MAX_BITS) -> None:
    """Raise ConfigurationError unless ``bits`` is a whole number from ``least`` to ``most``."""
    if not least <= bits <= most:
        raise ConfigurationError(
            f"quantizer.{option}={bits} is not allowed: choose a whole number of bits from {least} to {most}."
        )


def check_group(option: str, group: int) -> None:
    """Raise ConfigurationError for a group that holds nothing."""
    if group < 0:
        raise ConfigurationError(f"quantizer.{option}={group} is not allowed: choose a number of dims, or 0 for all.")


def peak(statistics: TensorStatistics) -> np.ndarray:
    """The largest magnitude that RoPE can make of a head's calibration tokens, ``[kv_heads]``.

    Statistics are of tensors before RoPE, which turns pairs of dims: at most ``sqrt(2)`` times the larger of two.
    """
    extreme = np.maximum(np.abs(statistics.minimum), np.abs(statistics.maximum)).max(-1)
    return np.asarray(math.sqrt(2.0) * extreme)


def fp16_unit(statistics: TensorStatistics) -> float:
    """The power of two whose fp16 multiples reach ``ROOM`` times the peak; 1 for all but extreme models."""
    return float(2.0 ** max(0, math.ceil(math.log2(max(ROOM * float(peak(statistics).max()), 1.0) / FP16_MAX))))


@dataclass(frozen=True)
class Integer(Quantizer):
    """Asymmetric integers, one scale and zero point a token and head (or a group of its dims); round to nearest."""

    name: ClassVar[str] = "int"

    k_bits: int = field(default=4, metadata={"help": "bits a key element, 1 to 8"})
    v_bits: int = field(default=4, metadata={"help": "bits a value element, 1 to 8"})
    group: int = field(default=0, metadata={"help": "dims that share a scale; 0: all of a head"})

    def __post_init__(self) -> None:
        check_whole_bits("k_bits", self.k_bits)
        check_whole_bits("v_bits", self.v_bits)
        check_group("group", self.group)

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        formats = [
            [
                Affine(
                    shape.kv_heads,
                    shape.head_dim,
                    bits,
                    group=min(self.group, shape.head_dim) or None,
                    unit=fp16_unit(statistics),
                )
                for bits, statistics in ((self.k_bits, layer.k), (self.v_bits, layer.v))
            ]
            for layer, shape in zip(calibration.layers, geometry.layers, strict=True)
        ]
        return CacheFormat(key=tuple(key for key, _ in formats), value=tuple(value for _, value in formats))
