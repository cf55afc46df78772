"""What is known of a model's queries, keys and values: moments, extrema and a sample, per layer and KV head.

All statistics are of tensors *before* RoPE and after any q/k norm, as the model's attention computes them. Arrays are
numpy, float64 for moments and float32 for samples, so that quantizers need no torch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.geometry import LayerGeometry

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one layer's queries, keys or values over the calibration tokens.

    For queries every query head of a KV head's group is a sample of its own. ``mean``, ``minimum``, ``maximum`` are
    ``[kv_heads, head_dim]``; ``second_moment`` is ``E[x x^T]``, ``[kv_heads, head_dim, head_dim]``; ``sample`` is
    ``[tokens, kv_heads, head_dim]``, evenly spaced tokens (for queries, token t's head is number t modulo the group).
    """

    mean: Array
    second_moment: Array
    minimum: Array
    maximum: Array
    sample: NDArray[np.float32]

    @property
    def energy(self) -> Array:
        """``E[x_d^2]`` per dim, ``[kv_heads, head_dim]``."""
        return np.diagonal(self.second_moment, axis1=1, axis2=2).copy()

    def block_energy(self, geometry: LayerGeometry) -> Array:
        """``E|x_i|^2`` per RoPE block, ``[kv_heads, rotary_dim / 2]``. RoPE does not change it."""
        blocks = np.array(geometry.blocks, dtype=np.int64).reshape(-1, 2)
        return self.energy[:, blocks].sum(axis=-1)


@dataclass(frozen=True)
class Rotary:
    """How one layer's RoPE turns, from the model's own rotary module.

    Block i turns by ``frequencies[i]`` radians a position; rotated queries and keys are ``scaling`` times as long
    (YaRN). ``type`` is transformers' rope_type; ``changes_with_length`` tells frequencies that depend on the length.
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0
    type: str = "default"

    @property
    def changes_with_length(self) -> bool:
        return self.type in ("dynamic", "longrope")


@dataclass(frozen=True)
class LayerCalibration:
    """One attention layer: statistics of queries, keys and values, its RoPE, and its output's metric on values.

    ``output [kv_heads, head_dim, head_dim]`` is the sum of ``W^T W`` over the parts W of the output projection that
    read the KV head's group; None where it is not known.
    """

    q: TensorStatistics
    k: TensorStatistics
    v: TensorStatistics
    rotary: Rotary | None = None
    output: Array | None = None


@dataclass(frozen=True)
class Calibration:
    """All layers, and what they were computed from.

    ``source`` holds the model's fingerprint, the corpus's hash, the number of tokens and the window length; two
    calibrations with the same source are the same.
    """

    layers: tuple[LayerCalibration, ...]
    source: dict[str, str | int]
