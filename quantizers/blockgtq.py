"""Block-GTQ: TQ-MSE over groups of RoPE blocks, with more bits where queries and keys have more energy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvbench.calibration import Calibration, LayerCalibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry, ModelGeometry
from kvbench.kernels.formats import MAX_BITS, CacheFormat, Group, HaarRotation, HeadFormat, RotatedCodebook
from kvbench.quantizer import Quantizer
from kvbench.quantizers.bit_allocation import allocate_bits
from kvbench.quantizers.centring import check_center, key_centre, nearer, residual_energy
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
from kvbench.quantizers.principal_axes import principal_format
from kvbench.quantizers.tqmse import uniform_format

SCORES = ("energy", "product")
VALUES = ("tqmse", "pca", "pca_wo")


def shared_widths(
    scores: Sequence[float], average: float, align: int = 1, min_bits: int = 1, max_bits: int = 8
) -> tuple[int, ...]:
    """Widths of blocks, one for every ``align`` blocks that follow one another in order of score, at the average given.

    With ``align=1`` every block has its own. Bits that no whole set of blocks can take are not spent. Raises
    ConfigurationError where ``align`` does not divide the number of blocks.
    """
    if align < 1 or len(scores) % align:
        raise ConfigurationError(
            f"quantizer.align={align} is not allowed: choose a divisor of the {len(scores)} RoPE blocks of a head."
        )
    order = np.argsort(-np.asarray(scores), kind="stable").reshape(-1, align)
    sums = np.asarray(scores)[order].sum(axis=1)
    budget = math.floor(math.floor(len(scores) * average) / align)
    widths = [0] * len(scores)
    for members, bits in zip(order, allocate_bits(sums.tolist(), budget, min_bits, max_bits), strict=True):
        for block in members:
            widths[block] = bits
    return tuple(widths)


def balancing_scales(queries: Array, keys: Array) -> Array:
    """Scales of blocks, ``[kv_heads, blocks]``, from the energies of their queries and of what is coded of their keys.

    A rotated group spreads its error evenly over its scaled coordinates. Scaled by w, block i has the share
    ``a_i / w_i^2`` of the squared logit error, of a total proportional to ``sum(c_i w_i^2)``; the product of the two
    sums is least where ``w_i^4 = a_i / c_i`` (Cauchy and Schwarz). RoPE turns within a block, so a scale a block
    commutes with it, and it folds into the query's rotation: it costs nothing.
    """
    if not queries.size:  # a layer without RoPE has no blocks
        return np.ones_like(queries)
    floor = 1e-9 * np.maximum(queries.max(axis=1, keepdims=True), keys.max(axis=1, keepdims=True)) + 1e-30
    logarithms = np.log(np.maximum(queries, floor) / np.maximum(keys, floor)) / 4
    logarithms -= logarithms.mean(axis=1, keepdims=True)
    return np.exp(logarithms).astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class BlockGTQ(Quantizer):
    """RoPE-aware bit allocation (arXiv 2606.24033): greedy widths per RoPE block, one group a width; V is TQ-MSE.

    As published, blocks are scored by energy, ``(E|q_i|^2 + E|k_i|^2) / 2`` per layer and KV head, norms are fp16 and
    nothing is taken off; the other values of ``score``, ``center``, ``norm_bits``, ``balance``, ``align`` and ``v`` are
    kvbench's.
    Dims outside the rotary part form a group of their own at the average.
    """

    name: ClassVar[str] = "blockgtq"

    k_bits: float = field(default=3.0, metadata={"help": "average bits a key coordinate; fractions allowed"})
    v_bits: float = field(default=3.0, metadata={"help": "bits a value coordinate, 1 to 8; fractions allowed"})
    min_bits: int = field(default=1, metadata={"help": "least width of a block"})
    max_bits: int = field(default=8, metadata={"help": "greatest width of a block"})
    score: str = field(default="energy", metadata={"help": "energy (the paper's) or product, E|q_i|^2 E|k_i|^2"})
    center: str = field(default="none", metadata={"help": "mean of keys taken off: none, all, or of r RoPE blocks"})
    center_flag: bool = field(
        default=False, metadata={"help": "take the mean off a key only where that helps; a bit a token and head"}
    )
    norm_bits: int = field(default=16, metadata={"help": "bits a norm: 16 (fp16), 8 or 6 (logarithmic)"})
    balance: bool = field(
        default=False, metadata={"help": "scale a group's blocks so that errors fall on weak queries"}
    )
    align: int = field(default=1, metadata={"help": "RoPE blocks that share a width, in order of score"})
    v: str = field(
        default="tqmse",
        metadata={"help": "values: tqmse, pca (principal axes, mean off), pca_wo (errors weighed by the output)"},
    )
    seed: int = field(default=42, metadata={"help": "seed of the rotations"})

    def __post_init__(self) -> None:
        check_bits("k_bits", self.k_bits)
        check_bits("v_bits", self.v_bits)
        check_center(self.center)
        if self.center_flag and self.center in ("none", "0"):
            raise ConfigurationError("quantizer.center_flag=true needs a mean to take off: set quantizer.center=all.")
        check_norm_bits(self.norm_bits)
        check_seed(self.seed)
        for option, allowed in (("score", SCORES), ("v", VALUES)):
            if getattr(self, option) not in allowed:
                raise ConfigurationError(
                    f"quantizer.{option}={getattr(self, option)} is not allowed: choose {' or '.join(allowed)}."
                )
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
            value=tuple(self._value_format(layer) for layer, _ in layers),
        )

    def _value_format(self, layer: LayerCalibration) -> RotatedCodebook:
        seed = self.seed + VALUE_STREAM
        if self.v == "tqmse":
            return uniform_format(layer.v, self.v_bits, seed, self.norm_bits)
        if self.v == "pca_wo" and layer.output is None:
            raise ConfigurationError(
                "quantizer.v=pca_wo needs the output projection, which was not found in this model. "
                "Choose quantizer.v=pca or tqmse."
            )
        return principal_format(
            layer.v, self.v_bits, seed, self.norm_bits, layer.output if self.v == "pca_wo" else None
        )

    def _key_format(self, layer: LayerCalibration, geometry: LayerGeometry) -> RotatedCodebook:
        centre, mean = key_centre(layer, geometry, self.center, self.center_flag)
        queries, keys = layer.q.block_energy(geometry), residual_energy(layer, geometry, mean)
        scores = queries * keys if self.score == "product" else (queries + keys) / 2
        scales = balancing_scales(queries, keys) if self.balance else np.ones_like(queries)
        sample = layer.k.sample.astype(np.float64)
        heads = tuple(
            self._head(geometry, head, scores[head], scales[head], sample[:, head], mean[head])
            for head in range(geometry.kv_heads)
        )
        return RotatedCodebook(heads, centre)

    def _head(
        self, geometry: LayerGeometry, head: int, scores: Array, block_scales: Array, sample: Array, mean: Array
    ) -> HeadFormat:
        scales = np.ones(geometry.head_dim)
        scales[np.array(geometry.blocks, dtype=np.int64).ravel()] = np.repeat(block_scales, 2)
        members: dict[int, list[int]] = {}
        if len(scores):
            widths = shared_widths(scores.tolist(), self.k_bits, self.align, self.min_bits, self.max_bits)
            for block, bits in zip(geometry.blocks, widths, strict=True):
                members.setdefault(bits, []).extend(block)
        groups: list[tuple[tuple[int, ...], float]] = [
            (tuple(members[bits]), bits) for bits in sorted(members, reverse=True)
        ]
        if geometry.unrotated_dims:
            groups.append((geometry.unrotated_dims, self.k_bits))
        coded = (sample - mean) * scales
        if self.center_flag:
            weights = np.empty(geometry.head_dim)
            for dims, average in groups:
                weights[list(dims)] = 4.0**-average
            coded = nearer(coded, sample * scales, weights)
        seed = self.seed + KEY_STREAM + head
        return HeadFormat(
            tuple(
                Group(
                    dims,
                    HaarRotation(len(dims), seed),
                    uniform_segments(len(dims), bits),
                    norm_code(coded[:, dims], self.norm_bits),
                    tuple(float(scales[dim]) for dim in dims) if self.balance else None,
                )
                for dims, bits in groups
            )
        )
