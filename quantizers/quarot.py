"""QuaRot's cache: a Hadamard rotation, then clipped integers."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.calibration import Calibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.comparator_formats import Affine
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.integer import check_group, check_whole_bits, fp16_unit


@dataclass(frozen=True)
class QuaRot(Quantizer):
    """Hadamard rotation and asymmetric integers per token and head (QuaRot, arXiv 2404.00456, section 4).

    Keys are rotated after RoPE, with random signs as everywhere in kvbench; head_dims that are not powers of two are
    rotated in blocks. The range is clipped to 0.95 of itself, as published. Weights and activations stay as they are.
    """

    name: ClassVar[str] = "quarot"

    k_bits: int = field(default=4, metadata={"help": "bits a key coordinate, 1 to 8"})
    v_bits: int = field(default=4, metadata={"help": "bits a value coordinate, 1 to 8"})
    group: int = field(default=0, metadata={"help": "coordinates that share a scale; 0: all of a head"})
    clip: float = field(default=0.95, metadata={"help": "fraction of the range that codes cover"})
    seed: int = field(default=42, metadata={"help": "seed of the signs"})

    def __post_init__(self) -> None:
        check_whole_bits("k_bits", self.k_bits)
        check_whole_bits("v_bits", self.v_bits)
        check_group("group", self.group)
        if not 0 < self.clip <= 1:
            raise ConfigurationError(
                f"quantizer.clip={self.clip:g} is not allowed: choose a fraction above 0 and at most 1, such as 0.95."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"quantizer.seed={self.seed} is not allowed: choose from 0 to 2^63 - 1.")

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        layers = list(zip(calibration.layers, geometry.layers, strict=True))
        return CacheFormat(
            key=tuple(self._format(shape, self.k_bits, layer.k, self.seed) for layer, shape in layers),
            value=tuple(self._format(shape, self.v_bits, layer.v, self.seed + 1) for layer, shape in layers),
        )

    def _format(self, shape: LayerGeometry, bits: int, statistics: TensorStatistics, seed: int) -> Affine:
        group = min(self.group, shape.head_dim) or None
        return Affine(
            shape.kv_heads, shape.head_dim, bits, group, clip=self.clip, hadamard=seed, unit=fp16_unit(statistics)
        )
