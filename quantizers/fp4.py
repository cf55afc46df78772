"""Block-scaled 4-bit floating point, the formats that tensor cores read: MXFP4 and NVFP4."""

from dataclasses import dataclass
from typing import ClassVar

from kvbench.calibration import Calibration, TensorStatistics
from kvbench.geometry import ModelGeometry
from kvbench.kernels.comparator_formats import FLOAT4_LARGEST, FLOAT8_LARGEST, BlockFloat4
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.integer import peak

MX_BLOCK, NV_BLOCK = 32, 16
HEADROOM = 2.0  # times the calibration's largest block scale; e4m3 keeps its precision over a range of 2^14


@dataclass(frozen=True)
class MXFP4(Quantizer):
    """e2m1 in blocks of 32 dims with a power-of-two scale (OCP Microscaling Formats 1.0)."""

    name: ClassVar[str] = "mxfp4"
    needs_calibration: ClassVar[bool] = False

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        formats = tuple(BlockFloat4(layer.kv_heads, layer.head_dim, MX_BLOCK, "e8m0") for layer in geometry.layers)
        return CacheFormat(key=formats, value=formats)


@dataclass(frozen=True)
class NVFP4(Quantizer):
    """e2m1 in blocks of 16 dims with an e4m3 scale, and one calibrated float32 scale a tensor (NVIDIA Blackwell)."""

    name: ClassVar[str] = "nvfp4"

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        return CacheFormat(
            key=tuple(self._format(layer.k) for layer in calibration.layers),
            value=tuple(self._format(layer.v) for layer in calibration.layers),
        )

    def _format(self, statistics: TensorStatistics) -> BlockFloat4:
        largest = float(peak(statistics).max())
        scale = HEADROOM * largest / (FLOAT4_LARGEST * FLOAT8_LARGEST["e4m3"]) if largest > 0 else 1.0
        kv_heads, head_dim = statistics.mean.shape
        return BlockFloat4(kv_heads, head_dim, NV_BLOCK, "e4m3", scale)
