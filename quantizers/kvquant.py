"""KVQuant: levels fitted to the data, keys scaled by channel, values by token, and outliers kept apart."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.calibration import Calibration, LayerCalibration, TensorStatistics
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.comparator_formats import NonUniform
from kvbench.kernels.formats import CacheFormat
from kvbench.quantizer import Quantizer
from kvbench.quantizers.groups import Array
from kvbench.quantizers.integer import check_whole_bits, fp16_unit
from kvbench.quantizers.k_means import weighted_k_means

POSITIONS_A_TOKEN = 4  # that a sampled key is turned to: enough for quantiles of its channels
GOLDEN = (5**0.5 - 1) / 2  # multiples of it modulo 1 spread evenly, however many there are


@dataclass(frozen=True)
class KVQuant(Quantizer):
    """Non-uniform levels with outliers apart (KVQuant, arXiv 2401.18079): keys per channel, values per token.

    Levels are fitted per layer by k-means, weighted by what an error does: a key's by the energy of the queries that
    meet its channel, where the paper has gradients; a value's by its token's range. Each token keeps a fixed number of
    outliers, its farthest, with their places. Published keys are coded before RoPE; a cache is given them after it, so
    channels are scaled for what RoPE makes of the calibration at positions up to ``span``. The paper also keeps the
    first token in full precision: ``cache.n_sink=1``.
    """

    name: ClassVar[str] = "kvquant"

    k_bits: int = field(default=3, metadata={"help": "bits a key element, 1 to 8"})
    v_bits: int = field(default=3, metadata={"help": "bits a value element, 1 to 8"})
    outliers: float = field(default=0.01, metadata={"help": "fraction of a token's numbers kept in fp16"})
    span: int = field(default=4096, metadata={"help": "positions that keys' channels are scaled for"})

    def __post_init__(self) -> None:
        check_whole_bits("k_bits", self.k_bits)
        check_whole_bits("v_bits", self.v_bits)
        if not 0 <= self.outliers <= 0.5:
            raise ConfigurationError(
                f"quantizer.outliers={self.outliers:g} is not allowed: choose a fraction from 0 to 0.5, such as 0.01."
            )
        if self.span < 1:
            raise ConfigurationError(
                f"quantizer.span={self.span} is not allowed: choose a number of positions, such as 4096."
            )

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        assert calibration is not None
        layers = list(zip(calibration.layers, geometry.layers, strict=True))
        return CacheFormat(
            key=tuple(self._keys(layer, shape) for layer, shape in layers),
            value=tuple(self._values(layer.v, shape) for layer, shape in layers),
        )

    def _count(self, shape: LayerGeometry) -> int:
        """Outliers a token: the fraction of its numbers, rounded, and at least one where a fraction is asked for."""
        return max(1, round(self.outliers * shape.kv_heads * shape.head_dim)) if self.outliers else 0

    def _keys(self, layer: LayerCalibration, shape: LayerGeometry) -> NonUniform:
        keys = turned_sample(layer, shape, self.span)
        low, high = np.quantile(keys, [self.outliers / 2, 1 - self.outliers / 2], axis=0)
        # float32 numbers: the last bits of a platform's sines do not reach the format
        middle, width = (((high + sign * low) / 2).astype(np.float32).astype(np.float64) for sign in (1, -1))
        width = np.where(width > 0, width, 1.0)
        weights = np.square(width) * channel_energy(layer.q, shape)
        inside = np.abs(keys - middle) <= width
        levels = weighted_k_means(
            ((keys - middle) / width)[inside], np.broadcast_to(weights, keys.shape)[inside], 1 << self.k_bits
        )
        pairs = np.stack([middle, width], axis=-1).tolist()
        ranges = tuple(tuple((float(m), float(w)) for m, w in head) for head in pairs)
        return NonUniform(shape.kv_heads, shape.head_dim, levels, self._count(shape), ranges, fp16_unit(layer.k))

    def _values(self, statistics: TensorStatistics, shape: LayerGeometry) -> NonUniform:
        count = self._count(shape)
        x = statistics.sample.astype(np.float64).reshape(len(statistics.sample), -1)
        distance = np.abs(x - x.mean(axis=1, keepdims=True))
        kept = np.take_along_axis(x, np.argsort(distance, axis=1, kind="stable")[:, : x.shape[1] - count], axis=1)
        low, high = kept.min(axis=1, keepdims=True), kept.max(axis=1, keepdims=True)
        width = np.where(high > low, (high - low) / 2, 1.0)
        inside = (kept - (low + high) / 2) / width
        levels = weighted_k_means(
            inside.ravel(), np.broadcast_to(np.square(width), kept.shape).ravel(), 1 << self.v_bits
        )
        return NonUniform(shape.kv_heads, shape.head_dim, levels, count, unit=fp16_unit(statistics))


def turned_sample(layer: LayerCalibration, shape: LayerGeometry, span: int) -> Array:
    """Keys of the calibration's sample as RoPE turns them at positions below ``span``, ``[n, kv_heads, head_dim]``."""
    keys = np.repeat(layer.k.sample.astype(np.float64), POSITIONS_A_TOKEN, axis=0)
    if layer.rotary is None or not shape.rotary_dim:
        return keys
    positions = np.floor(np.arange(len(keys)) * GOLDEN % 1 * span)
    angles = positions[:, None] * np.array(layer.rotary.frequencies)
    cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = np.array(shape.blocks, dtype=np.int64).T
    turned = keys.copy()
    turned[..., first] = keys[..., first] * cosines - keys[..., second] * sines
    turned[..., second] = keys[..., first] * sines + keys[..., second] * cosines
    return layer.rotary.scaling * turned


def channel_energy(statistics: TensorStatistics, shape: LayerGeometry) -> Array:
    """``E[q_d^2]`` per dim after RoPE, ``[kv_heads, head_dim]``: the two dims of a block share what it has."""
    energy = statistics.energy
    if shape.rotary_dim:
        first, second = np.array(shape.blocks, dtype=np.int64).T
        energy[:, first] = energy[:, second] = (energy[:, first] + energy[:, second]) / 2
    return energy
