"""The quantizer: options, and the formats they make."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.api import CacheFormat, Calibration, ConfigurationError, ModelGeometry, Quantizer
from kvbench_hadamard.format import HadamardIntegers


@dataclass(frozen=True)
class Hadamard(Quantizer):
    """Random Hadamard rotation, then symmetric integers with one scale a token and head."""

    name: ClassVar[str] = "hadamard"
    needs_calibration: ClassVar[bool] = False

    k_bits: int = field(default=4, metadata={"help": "bits a key coordinate, 1 to 8"})
    v_bits: int = field(default=4, metadata={"help": "bits a value coordinate, 1 to 8"})
    seed: int = field(default=0, metadata={"help": "seed of the signs"})

    def __post_init__(self) -> None:
        for option in ("k_bits", "v_bits"):
            if not 1 <= getattr(self, option) <= 8:
                raise ConfigurationError(
                    f"quantizer.{option}={getattr(self, option)} is not allowed: choose a whole number from 1 to 8."
                )

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        for layer in geometry.layers:
            if layer.head_dim & (layer.head_dim - 1):
                raise ConfigurationError(
                    f"quantizer 'hadamard' needs a head_dim that is a power of two; this model has {layer.head_dim}."
                )
        return CacheFormat(key=self._formats(geometry, self.k_bits), value=self._formats(geometry, self.v_bits))

    def _formats(self, geometry: ModelGeometry, bits: int) -> tuple[HadamardIntegers, ...]:
        return tuple(HadamardIntegers(layer.kv_heads, layer.head_dim, bits, self.seed) for layer in geometry.layers)
