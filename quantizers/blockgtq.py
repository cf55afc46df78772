"""Block-GTQ: TQ-MSE over groups of RoPE blocks, with more bits where queries and keys have more energy."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.calibration import Calibration, LayerCalibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.formats import MAX_BITS, CacheFormat, Group, HaarRotation, HeadFormat, RotatedCodebook
from kvbench.quantizer import Quantizer
from kvbench.quantizers.bit_allocation import allocate_bits
from kvbench.quantizers.tqmse import (
    KEY_STREAM,
    VALUE_STREAM,
    check_bits,
    check_seed,
    norm_code,
    uniform_format,
    uniform_segments,
)


@dataclass(frozen=True)
class BlockGTQ(Quantizer):
    """RoPE-aware bit allocation (arXiv 2606.24033): greedy widths per RoPE block, one group a width; V is TQ-MSE.

    Blocks are scored by ``(E|q_i|^2 + E|k_i|^2) / 2`` per layer and KV head. Dims outside the rotary part form a group
    of their own at the average.
    """

    name: ClassVar[str] = "blockgtq"

    k_bits: float = field(default=3.0, metadata={"help": "average bits a key coordinate; fractions allowed"})
    v_bits: float = field(default=3.0, metadata={"help": "bits a value coordinate, 1 to 8; fractions allowed"})
    min_bits: int = field(default=1, metadata={"help": "least width of a block"})
    max_bits: int = field(default=8, metadata={"help": "greatest width of a block"})
    seed: int = field(default=42, metadata={"help": "seed of the rotations"})

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        check_seed(self.seed)
        if not 1 <= self.min_bits <= self.max_bits <= MAX_BITS:
            raise ConfigurationError(
                f"quantizer.min_bits={self.min_bits} and max_bits={self.max_bits} are not allowed: "
                f"they must satisfy 1 <= min_bits <= max_bits <= {MAX_BITS}."
            )
        if not self.min_bits <= self.k_bits <= self.max_bits:
            raise ConfigurationError(
                f"quantizer.k_bits={self.k_bits:g} cannot be met by blocks of {self.min_bits} to {self.max_bits} bits: "
                "choose an average between min_bits and max_bits."
            )

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        layers = list(zip(calibration.layers, geometry.layers, strict=True))
        return CacheFormat(
            key=tuple(self._key_format(layer, shape) for layer, shape in layers),
            value=tuple(uniform_format(layer.v, self.v_bits, self.seed + VALUE_STREAM) for layer, _ in layers),
        )

    def _key_format(self, layer: LayerCalibration, geometry: LayerGeometry) -> RotatedCodebook:
        scores = (layer.q.block_energy(geometry) + layer.k.block_energy(geometry)) / 2
        heads = range(geometry.kv_heads)
        return RotatedCodebook(tuple(self._head(layer, geometry, head, scores[head].tolist()) for head in heads))

    def _head(self, layer: LayerCalibration, geometry: LayerGeometry, head: int, scores: list[float]) -> HeadFormat:
        rest = geometry.unrotated_dims
        budget = math.floor(len(scores) * self.k_bits)
        widths = allocate_bits(scores, budget, self.min_bits, self.max_bits) if scores else ()
        members: dict[int, list[int]] = {}
        for block, bits in zip(geometry.blocks, widths, strict=True):
            members.setdefault(bits, []).extend(block)
        groups: list[tuple[tuple[int, ...], float]] = [
            (tuple(members[bits]), bits) for bits in sorted(members, reverse=True)
        ]
        if rest:
            groups.append((rest, self.k_bits))
        seed = self.seed + KEY_STREAM + head
        return HeadFormat(
            tuple(
                Group(
                    dims,
                    HaarRotation(len(dims), seed),
                    uniform_segments(len(dims), bits),
                    norm_code(layer.k, head, dims),
                )
                for dims, bits in groups
            )
        )
