"""The baseline: keys and values as the model made them, in 16 bits."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.calibration import Calibration
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat, Dense
from kvbench.quantizer import Quantizer


@dataclass(frozen=True)
class Fp16(Quantizer):
    """Uncompressed 16-bit cache: bfloat16 for bfloat16 models, float16 otherwise."""

    name: ClassVar[str] = "fp16"
    needs_calibration: ClassVar[bool] = False

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        dtype = "bfloat16" if geometry.dtype == "bfloat16" else "float16"
        formats = tuple(Dense(layer.kv_heads, layer.head_dim, dtype) for layer in geometry.layers)
        return CacheFormat(key=formats, value=formats)
