"""The general decode kernel over the reference codec's rows, against the reference attention in torch."""

import os

import pytest
import torch
from torch import Tensor

from .packed_formats import tensor_format

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
pytest.importorskip("triton")

from kvbench.kernels.attention import Partial, attend_packed
from kvbench.kernels.formats import RotatedCodebook
from kvbench.kernels.row_attention import RowAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attend(key: RotatedCodebook, value: RotatedCodebook, lengths: list[int], starts: list[int], group: int):
    """(ours, reference) for random queries over random tokens: each an output and a log-sum-exp."""
    generator = torch.Generator().manual_seed(0)
    tokens, dim, heads = max(lengths), key.head_dim, key.kv_heads
    x = torch.randn(2, len(lengths), tokens, heads, dim, generator=generator)
    planes = [
        tuple(plane.to(DEVICE) for plane in format.codec().encode(part))
        for format, part in zip((key, value), x, strict=True)
    ]
    q = torch.randn(len(lengths), heads * group, dim, generator=generator).to(DEVICE) * 3
    bounds = [torch.tensor(bound, dtype=torch.int32, device=DEVICE) for bound in (starts, lengths)]
    ours = RowAttention(key, value, DEVICE, splits=3)(q, *planes, *bounds, dim**-0.5)
    slots = torch.arange(tokens, device=DEVICE)
    seen = (slots >= bounds[0][:, None]) & (slots < bounds[1][:, None])
    reference = attend_packed(
        q.reshape(len(lengths), 1, heads, group, dim),
        key.codec(DEVICE),
        value.codec(DEVICE),
        *planes,
        lambda start, stop: seen[:, None, start:stop],
        dim**-0.5,
    )
    return ours, (reference.out.reshape(q.shape), reference.lse.reshape(q.shape[:2]))


def assert_close(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    assert (ours[0] - reference[0]).norm() <= 1e-5 * reference[0].norm()
    assert (ours[1] - reference[1]).abs().max() <= 1e-4


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_any_head_dim_attends_like_the_reference(dim: int) -> None:
    widths = [5, 3, 3, 1] if dim % 32 == 0 else [3, 3, 2, 2]
    key, value = tensor_format([widths] * 2, unit=dim // 4), tensor_format([[3] * 4] * 2, unit=dim // 4, seed=9)
    assert_close(*attend(key, value, [45], [0], 3))


@pytest.mark.parametrize("bits", range(1, 9))
def test_any_code_width_attends_like_the_reference(bits: int) -> None:
    key, value = tensor_format([[bits] * 2], unit=32), tensor_format([[bits] * 2], unit=32, seed=9)
    assert_close(*attend(key, value, [33], [0], 1))


@pytest.mark.parametrize("log_norms", [True, False])
def test_every_head_has_an_allocation_of_its_own(log_norms: bool) -> None:
    key = tensor_format([[8, 4, 2, 1], [3, 3, 3, 3], [6, 5, 1, 1]], unit=16, log_norms=log_norms)
    value = tensor_format([[2] * 4] * 3, unit=16, seed=9, log_norms=log_norms)
    assert_close(*attend(key, value, [70, 33], [0, 5], 2))


@pytest.mark.parametrize("group", [1, 7, 16])
def test_any_group_of_query_heads_attends_like_the_reference(group: int) -> None:
    key, value = tensor_format([[3] * 4], unit=16), tensor_format([[3] * 4], unit=16, seed=9)
    assert_close(*attend(key, value, [20], [0], group))


def test_tokens_attended_elsewhere_are_merged_in() -> None:
    key, value = tensor_format([[3] * 4], unit=16), tensor_format([[3] * 4], unit=16, seed=9)
    x = torch.randn(2, 1, 60, 1, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    planes = [format.codec(DEVICE).encode(part) for format, part in zip((key, value), x, strict=True)]
    q = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    bound = lambda token: torch.tensor([token], dtype=torch.int32, device=DEVICE)  # noqa: E731
    attention = RowAttention(key, value, DEVICE)
    extra = Partial(*attention(q, *planes, bound(0), bound(25), 0.1))
    assert_close(
        attention(q, *planes, bound(25), bound(60), 0.1, extra), attention(q, *planes, bound(0), bound(60), 0.1)
    )


def test_a_sequence_without_tokens_has_no_output_and_no_mass() -> None:
    key, value = tensor_format([[3] * 4], unit=16), tensor_format([[3] * 4], unit=16, seed=9)
    planes = [format.codec(DEVICE).encode(torch.randn(1, 8, 1, 64, device=DEVICE)) for format in (key, value)]
    none = torch.full((1,), 8, dtype=torch.int32, device=DEVICE)
    out, lse = RowAttention(key, value, DEVICE)(torch.randn(1, 2, 64, device=DEVICE), *planes, none, none, 1.0)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
