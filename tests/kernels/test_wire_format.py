"""The bytes mean what the format's text says: a second decoder, written from it, reads what the codec writes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels.formats import Fp16Norm, Group, HaarRotation, HeadFormat, RotatedCodebook, Segment
from kvbench.kernels.rotations import haar
from kvbench.quantizers.codebooks import codebook

from .second_decoder import decode, read_codes


@st.composite
def heads(draw: st.DrawFn, head_dim: int) -> HeadFormat:
    """A head whose dims, in any order, form groups of any even size, with one or two segments each."""
    dims = draw(st.permutations(range(head_dim)))
    groups = []
    while dims:
        size = 2 * draw(st.integers(1, len(dims) // 2))
        first, bits = draw(st.integers(0, size)), draw(st.integers(1, 7))
        counts = ((first, bits + 1), (size - first, bits))
        groups.append(
            Group(
                tuple(dims[:size]),
                HaarRotation(size, draw(st.integers(0, 5))),
                tuple(Segment(count, codebook(size, width)) for count, width in counts if count),
                Fp16Norm(draw(st.sampled_from([1.0, 4.0]))),
            )
        )
        dims = dims[size:]
    return HeadFormat(tuple(groups))


@st.composite
def tensor_formats(draw: st.DrawFn) -> RotatedCodebook:
    head_dim = draw(st.sampled_from([2, 6, 10, 16]))
    return RotatedCodebook(tuple(draw(st.lists(heads(head_dim), min_size=1, max_size=3))))


@given(tensor_formats(), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_second_decoder_agrees_with_the_codec(format: RotatedCodebook, seed: int) -> None:
    codec = format.codec()
    x = torch.randn(3, format.kv_heads, format.head_dim, generator=torch.Generator().manual_seed(seed))
    rows, norms = codec.encode(x)
    description = json.loads(json.dumps(format.describe()))
    read = np.stack([decode(description, bytes(r.tolist()), n.tolist()) for r, n in zip(rows, norms, strict=True)])
    np.testing.assert_allclose(codec.reconstruct(x), read, atol=2e-5)


@given(tensor_formats(), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_codes_are_the_nearest_levels_of_the_rotated_unit_vectors(format: RotatedCodebook, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((format.kv_heads, format.head_dim))
    (row,) = format.codec().encode(torch.tensor(x[None]))[0].tolist()
    for vector, head, groups in zip(x, format.heads, read_codes(format.describe(), bytes(row)), strict=True):
        for group, codes in zip(head.groups, groups, strict=True):
            part = vector[list(group.dims)]
            y = haar(group.rotation.dim, group.rotation.seed) @ part / np.linalg.norm(part)
            books = [segment.codebook for segment in group.segments for _ in range(segment.count)]
            for coordinate, code, book in zip(y, codes, books, strict=True):
                distance = np.abs(book.scale * np.array(book.levels) - coordinate)
                assert distance[code] <= distance.min() + 1e-6


@given(tensor_formats())
@settings(max_examples=60, deadline=None)
def test_no_bits_are_wasted_beyond_the_byte_at_a_rows_end(format: RotatedCodebook) -> None:
    codes, norms = format.codec().planes
    exact = sum(segment.count * segment.bits for head in format.heads for g in head.groups for segment in g.segments)
    assert format.code_bits == exact / (format.kv_heads * format.head_dim)
    assert 0 <= 8 * codes.width - exact < 8 * format.kv_heads
    assert codes.width == format.row_bytes
    assert 8 * norms.bytes_per_token == format.bits_per_token - exact


def test_a_byte_written_out_by_hand() -> None:
    """Two dims at 3 bits and two at 1: codes 5, 2 | 1, 0 are the bits 101 010 1 0, least significant first."""
    three, one = codebook(2, 3), codebook(2, 1)
    format = RotatedCodebook(
        (
            HeadFormat(
                (
                    Group((0, 1), HaarRotation(2, 0), (Segment(2, three),)),
                    Group((2, 3), HaarRotation(2, 0), (Segment(2, one),)),
                )
            ),
        )
    )
    row = torch.tensor([[0b01_010_101]], dtype=torch.uint8)
    norms = torch.tensor([[2.0, 3.0]], dtype=torch.float16)
    expected = [2 * three.scale * three.levels[5], 2 * three.scale * three.levels[2]]
    expected += [3 * one.scale * one.levels[1], 3 * one.scale * one.levels[0]]
    assert format.codec().decode((row, norms))[0, 0].tolist() == pytest.approx(expected, rel=1e-6)
