"""8-bit floating point with fixed scales: the compressed cache of most serving stacks."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.calibration import Calibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.comparator_formats import FLOAT8_LARGEST, Float8
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.integer import peak


@dataclass(frozen=True)
class Fp8(Quantizer):
    """float8 e4m3 or e5m2 (arXiv 2209.05433), one calibrated scale a KV head; numbers beyond the range saturate."""

    name: ClassVar[str] = "fp8"

    encoding: str = field(default="e4m3", metadata={"help": "e4m3 or e5m2"})

    def __post_init__(self) -> None:
        if self.encoding not in FLOAT8_LARGEST:
            raise ConfigurationError(
                f"quantizer.encoding={self.encoding} is not allowed: choose {' or '.join(FLOAT8_LARGEST)}."
            )

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        return CacheFormat(
            key=tuple(self._format(layer.k) for layer in calibration.layers),
            value=tuple(self._format(layer.v) for layer in calibration.layers),
        )

    def _format(self, statistics: TensorStatistics) -> Float8:
        top = FLOAT8_LARGEST[self.encoding]
        scales = tuple(float(each) / top if each > 0 else 1.0 for each in peak(statistics))
        kv_heads, head_dim = statistics.mean.shape
        return Float8(kv_heads, head_dim, self.encoding, scales)
