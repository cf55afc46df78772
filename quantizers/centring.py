"""Taking the mean of keys off before coding: which RoPE blocks, and what is left to code.

The mean of keys before RoPE is large in a few blocks, the slow ones above all, and a query sees it as a bias that
depends on position alone. What it does to a logit is computed exactly (``kvbench.kernels.centre``), so codes need not
carry it.
"""

import numpy as np
from numpy.typing import NDArray

from kvbench.calibration import LayerCalibration
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry
from kvbench.kernels.formats import Centre

Array = NDArray[np.float64]


def check_center(center: str) -> None:
    """Raise ConfigurationError unless ``center`` is all, none, or a number of blocks."""
    if center not in ("all", "none") and not center.isdecimal():
        raise ConfigurationError(
            f"quantizer.center={center} is not allowed: choose all, none, or a number of RoPE blocks such as 8."
        )


def key_centre(
    layer: LayerCalibration, geometry: LayerGeometry, center: str, per_token: bool = False
) -> tuple[Centre | None, Array]:
    """The centre to take off one layer's keys, and the mean it takes off before RoPE, ``[kv_heads, head_dim]``.

    ``center="all"`` takes every dim's mean; a number r takes that of the r blocks a head in which it moves logits most,
    those with the largest ``E|q_i|^2 |mu_i|^2``. ``per_token`` leaves it to each token whether. Raises
    ConfigurationError for RoPE whose frequencies change with the length, since what encoding takes off must be what
    reading puts back.
    """
    if center == "none" or center == "0":
        return None, np.zeros_like(layer.k.mean)
    if layer.rotary is None or layer.rotary.changes_with_length:
        kind = layer.rotary.type if layer.rotary else "unknown"
        raise ConfigurationError(
            f"quantizer.center={center} needs fixed RoPE frequencies, but this model's ({kind}) change with the "
            "length. Use quantizer.center=none."
        )
    mean = layer.k.mean.copy()
    if center != "all":
        weight = layer.q.block_energy(geometry) * _block_square(mean, geometry)
        kept = np.argsort(-weight, axis=1, kind="stable")[:, : int(center)]
        mask = np.zeros_like(mean)
        blocks = np.array(geometry.blocks)
        for head, chosen in enumerate(kept):
            mask[head, blocks[chosen].ravel()] = 1.0
        mean *= mask
    scaled = (mean * layer.rotary.scaling).astype(np.float32)
    centre = Centre(
        vectors=tuple(tuple(float(value) for value in row) for row in scaled),
        blocks=geometry.blocks,
        frequencies=layer.rotary.frequencies,
        per_token=per_token,
    )
    return centre, mean


def _block_square(vectors: Array, geometry: LayerGeometry) -> Array:
    """``|x_i|^2`` per RoPE block, ``[kv_heads, blocks]``."""
    blocks = np.array(geometry.blocks, dtype=np.int64).reshape(-1, 2)
    return np.square(vectors)[:, blocks].sum(axis=-1)


def residual_energy(layer: LayerCalibration, geometry: LayerGeometry, mean: Array) -> Array:
    """``E|k_i - mu_i|^2`` per RoPE block for the mean that is taken off, ``[kv_heads, blocks]``."""
    taken = 2 * mean * layer.k.mean - np.square(mean)  # E(k - mu)^2 = E k^2 - 2 mu E k + mu^2
    blocks = np.array(geometry.blocks, dtype=np.int64).reshape(-1, 2)
    return np.maximum(layer.k.block_energy(geometry) - taken[:, blocks].sum(axis=-1), 0.0)


def nearer(centred: Array, plain: Array, weights: Array) -> Array:
    """Of vectors ``[tokens, head_dim]`` with the mean off and with it, each token's that has less to code.

    ``weights [head_dim]`` are of squares; as :class:`Centre` says, ``4^-bits``.
    """
    taken = np.square(centred) @ weights <= np.square(plain) @ weights
    return np.where(taken[:, None], centred, plain)
