"""Projections read as one product give what they give apart, and the model is as it was afterwards."""

from itertools import product

import pytest
import torch
from torch import nn

from kvbench.errors import ModelError
from kvbench.merged_projections import merge_projections


class Block(nn.Module):
    """A module as transformers' MLPs are, which says in which order it reads its projections."""

    def __init__(self, order: tuple[str, str] = ("gate_proj", "up_proj"), bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 4, bias=bias), nn.Linear(8, 6, bias=bias)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = {name: getattr(self, name)(x) for name in self.order}
        return torch.cat([parts["gate_proj"], parts["up_proj"]], -1)


@pytest.mark.parametrize(("bias", "compiled"), product([False, True], [False, True]))
def test_merged_projections_give_what_they_give_apart_and_hold_no_weight_twice(bias: bool, compiled: bool) -> None:
    block, x = Block(bias=bias), torch.randn(3, 8)
    with torch.no_grad():
        expected = block(x)
        weights = {name: parameter.clone() for name, parameter in block.named_parameters()}
        merging = merge_projections(block)
        with merging.projections():
            assert not isinstance(block.gate_proj, nn.Linear)
            run = torch.compile(block, fullgraph=True, backend="eager") if compiled else block
            found = [run(x) for _ in range(2)]
    assert all((each - expected).abs().max() < 1e-6 for each in found)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in block.named_parameters())
    assert block.gate_proj.weight.untyped_storage().data_ptr() == block.up_proj.weight.untyped_storage().data_ptr()
    assert merge_projections(block) is merging


def test_weights_that_were_cast_since_are_merged_anew() -> None:
    block, x = Block(), torch.randn(3, 8, dtype=torch.float64)
    merge_projections(block)
    block.double()
    with torch.no_grad(), merge_projections(block).projections():
        found = block(x)
    assert found.dtype == torch.float64
    assert (found - block(x)).abs().max() < 1e-12


def test_a_module_that_reads_another_projection_first_is_told() -> None:
    block = Block(order=("up_proj", "gate_proj"))
    with merge_projections(block).projections(), pytest.raises(ModelError, match="up_proj before"):
        block(torch.randn(1, 8))


def test_projections_with_hooks_or_of_other_kinds_stay_apart() -> None:
    hooked, mixed = Block(), Block()
    hooked.up_proj.register_forward_hook(lambda *_: None)
    mixed.up_proj = nn.Linear(8, 6, bias=True)
    assert not merge_projections(hooked).replaced
    assert not merge_projections(mixed).replaced
