"""The centre of keys in tile pages: what kernels read to take it off and to put it back into logits.

The centre at position m is ``mu[d] cos(m t_d) + across[d] sin(m t_d)``, where dim d turns with its RoPE block's
frequency ``t_d`` and ``across`` is mu turned by 90 degrees in every block (see :mod:`kvbench.kernels.centre`). Dims
that do not turn are paired to blocks of frequency zero, so that there are always 64.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.formats import RotatedCodebook
from kvbench.kernels.tiles import DIM, PAGE, matrices

BLOCKS, HALF_PAGE = DIM // 2, PAGE // 2


@dataclass(frozen=True)
class Waves:
    """What depends on the frequencies alone and is shared by the layers of a model.

    ``frequencies`` float64 ``[64]`` in radians a position; ``dims`` int32 ``[2, 64]``, the dims of every block.
    ``turns`` int64 ``[64]`` and ``dim_turns [128]``: the frequencies of blocks and of dims in units of 2^-64 turns.
    ``half`` float32 ``[2, 64]``: cos and sin of 64 positions' angle. ``table`` float16 ``[64 positions, 64 blocks, 2]``
    and ``dim_table`` float32 ``[2, 128 positions, 128 dims]``: cos and sin of the angles within half a page, and within
    a page.
    """

    frequencies: Tensor
    dims: Tensor
    turns: Tensor
    dim_turns: Tensor
    half: Tensor
    table: Tensor
    dim_table: Tensor


@lru_cache(maxsize=16)
def _waves(blocks: tuple[tuple[int, int], ...], frequencies: tuple[float, ...], device: torch.device) -> Waves:
    still = [dim for dim in range(DIM) if all(dim not in block for block in blocks)]
    pairs = np.array([*blocks, *zip(still[::2], still[1::2], strict=True)], np.int32)
    radians = np.array([*frequencies] + [0.0] * (BLOCKS - len(frequencies)))
    turns = np.array([round(f / math.tau % 1.0 * 2**64) % 2**64 for f in radians.tolist()], np.uint64).view(np.int64)
    block_of = np.zeros(DIM, np.int64)
    block_of[pairs] = np.arange(BLOCKS)[:, None]
    table = _cos_sin(np.arange(PAGE)[:, None] * radians)
    arrays = (
        radians,
        pairs.T,
        turns,
        turns[block_of],
        _cos_sin(HALF_PAGE * radians).astype(np.float32),
        table[:, :HALF_PAGE].transpose(1, 2, 0).astype(np.float16),
        table[..., block_of].astype(np.float32),
    )
    return Waves(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


def _cos_sin(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)])


class TileCentre:
    """The centre of one layer's keys on one device: ``vectors`` float32 ``[kv_heads, 2, 128]`` (mu, across)."""

    def __init__(self, format: RotatedCodebook, device: torch.device) -> None:
        centre = format.centre
        assert centre is not None
        self.waves = _waves(centre.blocks, centre.frequencies, device)
        mu = torch.tensor(centre.vectors, dtype=torch.float32)
        first, second = self.waves.dims.long().cpu()
        across = torch.empty_like(mu)
        across[:, first], across[:, second] = -mu[:, second], mu[:, first]
        self.vectors = torch.stack([mu, across], 1).to(device)
        written = matrices(format)[0].double()
        parts = torch.einsum("hkd,hcd->hkdc", self.vectors.double().cpu(), written)
        self._coordinates = (parts[:, :, first] + parts[:, :, second]).flatten(1, 2).float().to(device)

    @staticmethod
    @lru_cache(maxsize=256)  # encoding, decode and prefill attention of a layer share it
    def of(format: RotatedCodebook, device: torch.device) -> "TileCentre | None":
        """The centre of a format that has one."""
        return TileCentre(format, device) if format.centre else None

    def coordinates(self, positions: Tensor) -> Tensor:
        """The centre at ``positions [...]`` as keys are coded: rotated, float32 ``[..., kv_heads, 128]``."""
        angles = positions[..., None].double() * self.waves.frequencies
        waves = torch.cat([angles.cos(), angles.sin()], -1).float()
        return torch.einsum("...k,hkc->...hc", waves, self._coordinates)

    def encoding(self, origins: Tensor) -> tuple[Tensor, ...]:
        """What encoding reads; ``origins`` int32 ``[batch]``: the slot of each sequence's position 0."""
        return origins, self.waves.dim_turns, self.vectors, self.waves.dim_table

    def reading(self, q: Tensor, origins: Tensor) -> tuple[Tensor | int, ...]:
        """What decode attention of ``q [batch, q_heads, 128]`` reads."""
        w = self.waves
        return q, q.stride(0), q.stride(1), origins, w.dims, self.vectors, w.turns, w.half, w.table
