"""Folding the values' rotation into the model's output projection, which spares a launch a layer in decode steps.

Packed values are rotated, so the output of attention is rotated back: ``out = M^T out'``. The output projection ``W``
comes next, and ``W M^T`` does both at once. The product is rounded to the weights' dtype, so that a folded step agrees
with one that is not within rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.capture import attention_modules
from kvbench.decode_step import Span, StepStorage
from kvbench.kernels.tiles import DIM, matrices
from kvbench.tile_storage import TileStorage


class FoldedTiles:
    """Steps over tile pages that leave their output in the values' rotated space."""

    def __init__(self, tiles: TileStorage) -> None:
        self.tiles = tiles

    @property
    def capacity(self) -> int:
        return self.tiles.capacity

    def reserve(self, tokens: int) -> None:
        self.tiles.reserve(tokens)

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        self.tiles.append(key, value, at)

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        if exact:
            raise ValueError("a token read exactly is not rotated: its output cannot be folded")
        new = self.tiles.new_token(key, value, at)
        return self.tiles.kernels.attend_rotated(query, self.tiles.pages, at.starts, at.stops, scaling, new=new)[0]


@dataclass(frozen=True)
class Folding:
    """Storages of a model's layers for folded steps, and each folded projection with the weights it then has."""

    storages: Sequence[StepStorage]
    projections: Sequence[tuple[nn.Linear, Tensor]]

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Within the context the projections have their folded weights."""
        kept = [projection.weight.data for projection, _ in self.projections]
        for projection, folded in self.projections:
            projection.weight.data = folded
        try:
            yield
        finally:
            for (projection, _), weight in zip(self.projections, kept, strict=True):
                projection.weight.data = weight


def fold_outputs(model: Any, storages: Sequence[StepStorage]) -> Folding:
    """Fold what can be folded: layers in tile pages whose attention ends in a linear ``o_proj``. Others stay."""
    folded: list[StepStorage] = []
    projections = []
    for module, storage in zip(attention_modules(model), storages, strict=True):
        projection = getattr(module, "o_proj", None)
        if isinstance(storage, TileStorage) and isinstance(projection, nn.Linear):
            projections.append((projection, folded_weight(projection.weight, storage)))
            folded.append(FoldedTiles(storage))
        else:
            folded.append(storage)
    return Folding(folded, projections)


def folded_weight(weight: Tensor, storage: TileStorage) -> Tensor:
    """``weight [hidden, q_heads * 128]`` times each head's rotation of values, in its dtype."""
    turn = matrices(storage.layout.value_format)[1].to(weight.device)  # [kv_heads, coordinate, dim]
    blocks = weight.detach().float().view(len(weight), len(turn), -1, DIM)  # [hidden, kv_heads, group, dim]
    return torch.einsum("nhgd,hcd->nhgc", blocks, turn).reshape(weight.shape).to(weight.dtype)
