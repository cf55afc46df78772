"""Projections of one input read as one matrix product: two launches a layer less in attention, one less in the MLP.

The product of one token with a small matrix is mostly the wait for its first bytes: keys' and values' projections take
as long as the queries', many times their size. Rows of the merged product are the same sums over the same weights,
taken in an order that the library chooses for the larger shape, so that results agree within rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvbench.errors import ModelError

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that transformers' modules apply to one input, under the names they have there; the first comes first."""


class _Merged(nn.Module):
    """Takes the place of the first projection: computes all, and keeps the others' results until they are asked for."""

    def __init__(self, names: tuple[str, ...], projections: list[nn.Linear]) -> None:
        super().__init__()
        self.names = names
        self.sizes = [projection.out_features for projection in projections]
        self.weight = _joined([projection.weight for projection in projections])
        biases = [projection.bias for projection in projections]
        self.bias = None if biases[0] is None else _joined(biases)
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        parts = functional.linear(x, self.weight, self.bias).split(self.sizes, -1)
        for name, part in zip(self.names[1:], parts[1:], strict=True):
            self.kept[name] = part
        return parts[0]


class _Kept(nn.Module):
    """Takes the place of another projection."""

    def __init__(self, name: str, merged: _Merged) -> None:
        super().__init__()
        self.name, self.kept = name, merged.kept

    def forward(self, x: Tensor) -> Tensor:
        if self.name not in self.kept:
            raise ModelError(f"the model applies {self.name} before the projection it is merged with: use merge=false.")
        return self.kept.pop(self.name)


def _joined(parts: list[Any]) -> Tensor:
    """Parameters one under another in one tensor, of which they become views: no weight is held twice."""
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole


@dataclass(frozen=True)
class Merging:
    """What takes the place of which module: (parent, name, stand-in)."""

    replaced: tuple[tuple[nn.Module, str, nn.Module], ...] = ()

    @property
    def current(self) -> bool:
        """Whether the model's projections are still views of what was merged."""
        return all(
            getattr(parent, name).weight.data_ptr() == stand_in.weight.data_ptr()
            for parent, name, stand_in in self.replaced
            if isinstance(stand_in, _Merged)
        )

    @contextmanager
    def projections(self) -> Iterator[None]:
        """Within the context the model's projections are merged."""
        own = [getattr(parent, name) for parent, name, _ in self.replaced]
        for parent, name, stand_in in self.replaced:
            setattr(parent, name, stand_in)
        try:
            yield
        finally:
            for (parent, name, _), module in zip(self.replaced, own, strict=True):
                setattr(parent, name, module)


def merge_projections(model: nn.Module) -> Merging:
    """Merge what can be merged: plain linear layers without hooks, all with a bias or none.

    Kept with the model, and made anew where its weights are others since: moved, cast, or replaced.
    """
    kept: Merging | None = model.__dict__.get("_kvbench_merging")
    if kept is None or not kept.current:
        replaced: list[tuple[nn.Module, str, nn.Module]] = []
        for parent in model.modules():
            for names in TOGETHER:
                projections = [getattr(parent, name, None) for name in names]
                if _alike(projections):
                    merged = _Merged(names, projections)  # type: ignore[arg-type]
                    replaced.append((parent, names[0], merged))
                    replaced += [(parent, name, _Kept(name, merged)) for name in names[1:]]
        kept = model.__dict__["_kvbench_merging"] = Merging(tuple(replaced))
    return kept


def _alike(projections: list[Any]) -> bool:
    """Whether these are linear layers and nothing else, of one input's size, dtype and device."""
    if not all(
        type(each) is nn.Linear and not (each._forward_hooks or each._forward_pre_hooks) for each in projections
    ):
        return False
    kinds = {(each.in_features, each.bias is None, each.weight.dtype, each.weight.device) for each in projections}
    return len(kinds) == 1
