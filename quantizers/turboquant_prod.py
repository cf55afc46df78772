"""TurboQuant for inner products: one bit less for the vector, spent on an unbiased estimate of what is left."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.calibration import Calibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.comparator_formats import TurboQuantProd
from kvbench.kernels.formats import MAX_BITS, CacheFormat, Fp16Norm
from kvbench.quantizer import Quantizer
from kvbench.quantizers.integer import fp16_unit
from kvbench.quantizers.tqmse import uniform_format

VALUE_STREAM, PROJECTION_STREAM = 1000, 5000  # seeds of heads count from here, so that no two matrices are related


@dataclass(frozen=True)
class TurboQuantInnerProduct(Quantizer):
    """TurboQuant-prod (arXiv 2504.19874, algorithm 2): keys in b - 1 bits and one QJL bit of the residual; V is TQ-MSE.

    Logits are unbiased, at a larger variance than TQ-MSE's of b bits.
    """

    name: ClassVar[str] = "turboquant_prod"

    k_bits: float = field(default=3.0, metadata={"help": "bits a key coordinate, 2 to 8, the QJL bit included"})
    v_bits: float = field(default=3.0, metadata={"help": "bits a value coordinate, 1 to 8; fractions allowed"})
    seed: int = field(default=42, metadata={"help": "seed of rotations and projections"})

    def __post_init__(self) -> None:
        for option, least in (("k_bits", 2), ("v_bits", 1)):
            bits = getattr(self, option)
            if not least <= bits <= MAX_BITS:
                raise ConfigurationError(
                    f"quantizer.{option}={bits:g} is not allowed: choose a number from {least} to {MAX_BITS}."
                )
        if not 0 <= self.seed < 2**63 - PROJECTION_STREAM:
            raise ConfigurationError(f"quantizer.seed={self.seed} is not allowed: choose from 0 to 2^62.")

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        keys = []
        for layer in calibration.layers:
            mse = uniform_format(layer.k, self.k_bits - 1, self.seed)
            # a residual is shorter than its vector, whose norm is at most sqrt(head_dim) times its peak
            norm = Fp16Norm(fp16_unit(layer.k))
            keys.append(TurboQuantProd(mse, self.seed + PROJECTION_STREAM, norm))
        values = [uniform_format(layer.v, self.v_bits, self.seed + VALUE_STREAM) for layer in calibration.layers]
        return CacheFormat(key=tuple(keys), value=tuple(values))
