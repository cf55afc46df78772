"""TQ-MSE: TurboQuant's quantizer for mean squared error, one rotation and one norm a head."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.formats import CacheFormat, Centre, Group, HaarRotation, HeadFormat, RotatedCodebook
from kvbench.quantizer import Quantizer
from kvbench.quantizers.centring import check_center, key_centre
from kvbench.quantizers.groups import (
    KEY_STREAM,
    VALUE_STREAM,
    Array,
    check_bits,
    check_norm_bits,
    check_seed,
    norm_code,
    uniform_segments,
)


def uniform_format(
    statistics: TensorStatistics,
    bits: float,
    seed: int,
    norm_bits: int = 16,
    centre: Centre | None = None,
    mean: Array | None = None,
) -> RotatedCodebook:
    """TQ-MSE for one layer's keys or values; ``mean [kv_heads, head_dim]`` is what ``centre`` takes off before RoPE."""
    heads, head_dim = statistics.mean.shape
    sample = statistics.sample.astype(np.float64) - (0.0 if mean is None else mean)
    dims, segments = tuple(range(head_dim)), uniform_segments(head_dim, bits)
    return RotatedCodebook(
        tuple(
            HeadFormat(
                (Group(dims, HaarRotation(head_dim, seed + head), segments, norm_code(sample[:, head], norm_bits)),)
            )
            for head in range(heads)
        ),
        centre,
    )


@dataclass(frozen=True)
class TQMSE(Quantizer):
    """Uniform TurboQuant-MSE (arXiv 2504.19874): norm, random rotation, one Lloyd-Max code a coordinate.

    Keys and values alike. As published it needs no data; here the calibration gives the norms' range, and the mean of
    keys where ``center`` takes it off, which the paper does not do.
    """

    name: ClassVar[str] = "tqmse"

    k_bits: float = field(default=3.0, metadata={"help": "bits a key coordinate, 1 to 8; fractions allowed"})
    v_bits: float = field(default=3.0, metadata={"help": "bits a value coordinate, 1 to 8; fractions allowed"})
    center: str = field(default="none", metadata={"help": "mean of keys taken off: none, all, or of r RoPE blocks"})
    norm_bits: int = field(default=16, metadata={"help": "bits a norm: 16 (fp16), 8 or 6 (logarithmic)"})
    seed: int = field(default=42, metadata={"help": "seed of the rotations"})

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        check_center(self.center)
        check_norm_bits(self.norm_bits)
        check_seed(self.seed)

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        layers = list(zip(calibration.layers, geometry.layers, strict=True))
        seed = self.seed + VALUE_STREAM
        return CacheFormat(
            key=tuple(self._key_format(layer, shape) for layer, shape in layers),
            value=tuple(uniform_format(layer.v, self.v_bits, seed, self.norm_bits) for layer, _ in layers),
        )

    def _key_format(self, layer: LayerCalibration, geometry: LayerGeometry) -> RotatedCodebook:
        centre, mean = key_centre(layer, geometry, self.center)
        return uniform_format(layer.k, self.k_bits, self.seed + KEY_STREAM, self.norm_bits, centre, mean)
