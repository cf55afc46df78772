"""Rows of codes: packing is inverse to unpacking whatever the widths, and wastes no bit but a row's padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels.bitpack import RowLayout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Widths, indices that start a byte, and rows of codes that fit them."""
    widths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=70))
    aligned = draw(st.lists(st.integers(0, len(widths) - 1), unique=True, max_size=5))
    row = st.tuples(*(st.integers(0, 2**width - 1) for width in widths)).map(list)
    return widths, aligned, draw(st.lists(row, min_size=1, max_size=3))


def _bytes(bits: list[int]) -> list[list[int]]:
    return [bits[start : start + 8] for start in range(0, len(bits), 8)]


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_unpacking_is_inverse_to_packing(case: tuple[list[int], list[int], list[list[int]]]) -> None:
    widths, aligned, rows = case
    layout = RowLayout(widths, aligned)
    codes = torch.tensor(rows, dtype=torch.uint8)
    assert torch.equal(layout.unpack(layout.pack(codes)), codes)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_bits_lie_where_the_format_says(case: tuple[list[int], list[int], list[list[int]]]) -> None:
    widths, aligned, rows = case
    packed = RowLayout(widths, aligned).pack(torch.tensor(rows, dtype=torch.uint8))
    for codes, row in zip(rows, packed.tolist(), strict=True):
        bits: list[int] = []
        for index, (code, width) in enumerate(zip(codes, widths, strict=True)):
            if index in aligned:
                bits += [0] * (-len(bits) % 8)
            bits += [code >> place & 1 for place in range(width)]
        bits += [0] * (-len(bits) % 8)
        assert row == [sum(bit << place for place, bit in enumerate(byte)) for byte in _bytes(bits)]


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 64, 80, 128, 257])
def test_codes_of_one_width_take_that_many_bits_each(width: int, count: int) -> None:
    assert RowLayout([width] * count).row_bytes == -(-width * count // 8)


def test_batch_dims_are_kept() -> None:
    layout = RowLayout([3] * 10)
    codes = torch.randint(0, 8, (2, 5, 10), dtype=torch.uint8)
    rows = layout.pack(codes)
    assert rows.shape == (2, 5, 4)
    assert torch.equal(rows[1, 3], layout.pack(codes[1, 3]))
    assert torch.equal(layout.unpack(rows), codes)


@pytest.mark.parametrize("width", [0, 9])
def test_widths_outside_1_to_8_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        RowLayout([3, width])
