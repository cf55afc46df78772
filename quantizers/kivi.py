"""KIVI: keys per channel, values per token, and a residual in full precision."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.calibration import Calibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.comparator_formats import Affine, ChannelAffine, TokenBlocks
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.integer import check_whole_bits, fp16_unit


@dataclass(frozen=True)
class Kivi(Quantizer):
    """Asymmetric integers, keys per channel over groups of tokens, values per token over groups of dims.

    KIVI (arXiv 2402.02750): tokens stay in full precision until ``residual`` of them are there, and are then coded
    together. As published values leave one by one, each when it is ``residual`` tokens old; here they leave with their
    keys, so that the values' residual is half as long on average. ``scale_only`` stores no zero points.
    """

    name: ClassVar[str] = "kivi"

    k_bits: int = field(default=2, metadata={"help": "bits a key element, 1 to 8"})
    v_bits: int = field(default=2, metadata={"help": "bits a value element, 1 to 8"})
    group: int = field(default=32, metadata={"help": "tokens (keys) or dims (values) that share a scale"})
    residual: int = field(default=128, metadata={"help": "tokens coded together: a multiple of group"})
    scale_only: bool = field(default=False, metadata={"help": "symmetric: scales without zero points"})

    def __post_init__(self) -> None:
        check_whole_bits("k_bits", self.k_bits)
        check_whole_bits("v_bits", self.v_bits)
        if self.group < 1:
            raise ConfigurationError(
                f"quantizer.group={self.group} is not allowed: choose a number of tokens, such as 32."
            )
        if self.residual < 2 or self.residual % self.group:
            raise ConfigurationError(
                f"quantizer.residual={self.residual} is not allowed: choose a multiple of "
                f"group={self.group}, at least 2."
            )

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        layers = list(zip(calibration.layers, geometry.layers, strict=True))
        return CacheFormat(
            key=tuple(self._keys(shape, fp16_unit(layer.k)) for layer, shape in layers),
            value=tuple(self._values(shape, fp16_unit(layer.v)) for layer, shape in layers),
        )

    def _keys(self, shape: LayerGeometry, unit: float) -> ChannelAffine:
        return ChannelAffine(
            shape.kv_heads, shape.head_dim, self.k_bits, self.group, self.residual, self.scale_only, unit
        )

    def _values(self, shape: LayerGeometry, unit: float) -> TokenBlocks:
        group = min(self.group, shape.head_dim)
        tokens = Affine(shape.kv_heads, shape.head_dim, self.v_bits, group, symmetric=self.scale_only, unit=unit)
        return TokenBlocks(tokens, self.residual)
