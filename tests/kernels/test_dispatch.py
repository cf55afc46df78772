"""Which implementation serves a layer."""

import dataclasses
import os

import pytest
import torch

from .packed_formats import tensor_format

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported
pytest.importorskip("triton")

from kvbench.errors import ConfigurationError
from kvbench.kernels.dispatch import choose
from kvbench.kernels.formats import Centre, Dense, Group, HaarRotation, HeadFormat, RotatedCodebook, Segment
from kvbench.quantizers.codebooks import codebook

ALIGNED, MIXED = tensor_format([[4, 3, 3, 2]]), tensor_format([[5, 3, 3, 1]])
VALUE = tensor_format([[3] * 4], seed=9)


TURNING = Centre(((0.5,) * 128,), ((0, 64),), (0.1,))
CHOSEN = dataclasses.replace(TURNING, per_token=True)


def pairs(count: int) -> HeadFormat:
    """A head of ``count`` groups of two dims."""
    return HeadFormat(
        tuple(Group((i, i + count), HaarRotation(2, i), (Segment(2, codebook(2, 3)),)) for i in range(count))
    )


def test_a_cpu_gets_the_reference_and_is_told_why() -> None:
    choice = choose(ALIGNED, VALUE, "cpu", group=4)
    assert (choice.kind, choice.backend) == ("reference", "reference")
    assert "cpu" in choice.why


def test_a_cuda_device_gets_tiles_where_the_widths_allow() -> None:
    choice = choose(ALIGNED, VALUE, "cuda", group=4)
    assert (choice.kind, choice.backend) == ("tiles", "triton")
    assert choice.layout is not None


def test_a_cuda_device_gets_the_general_kernel_for_any_other_allocation() -> None:
    choice = choose(MIXED, VALUE, "cuda", group=4)
    assert (choice.kind, choice.backend) == ("bit_planes", "triton")
    assert "5331" in choice.why


def test_tiles_serve_keys_with_a_centre() -> None:
    assert choose(dataclasses.replace(ALIGNED, centre=TURNING), VALUE, "cuda", group=4).kind == "tiles"


def test_the_reference_can_be_forced() -> None:
    assert choose(ALIGNED, VALUE, "cuda", group=4, backend="reference").kind == "reference"


def test_triton_can_be_forced_onto_the_interpreter() -> None:
    assert choose(ALIGNED, VALUE, "cpu", group=4, backend="triton").kind == "tiles"


@pytest.mark.parametrize(
    ("key", "group", "reason"),
    [
        (Dense(1, 128), 4, "dense"),
        (ALIGNED, 17, "17 query heads"),
        (tensor_format([[3] * 4], unit=128), 4, "head_dim 512"),
        (RotatedCodebook((pairs(17),)), 4, "17 norms a head"),
        (dataclasses.replace(ALIGNED, centre=CHOSEN), 4, "chosen token by token"),
        (dataclasses.replace(MIXED, centre=TURNING), 4, "5331"),
    ],
)
def test_forcing_triton_where_it_cannot_serve_says_why(key, group: int, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        choose(key, VALUE, "cuda", group=group, backend="triton")
    assert choose(key, VALUE, "cuda", group=group).kind == "reference"


def test_an_unknown_backend_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match="auto, triton or reference"):
        choose(ALIGNED, VALUE, "cpu", group=4, backend="cuda")
