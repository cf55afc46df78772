"""Reading numbers from results and writing them for people."""

import math

import pytest

from kvbench.reports.scores import Score, bits_by_use, finite, number, percent

from .example_results import compression


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2.40649, "2.406"),
        (27.4, "27.40"),
        (0.0021, "0.002100"),
        (0.0, "0.000"),
        (12345.6, "12,346"),
        (3e12, "3.000e+12"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_changes_carry_their_sign() -> None:
    assert [percent(change) for change in (-0.436, 0.1, None)] == ["-43.6 %", "+10.0 %", "–"]


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1.0]])
def test_what_is_not_a_finite_number_is_no_score(value: object) -> None:
    assert finite(value) is None


def test_change_needs_a_reference_that_is_not_zero() -> None:
    assert Score("ok", 2.0).change_from(Score("ok", 0.0)) is None
    assert Score("ok", 2.0).change_from(Score("ok", 4.0)) == pytest.approx(-0.5)


def test_bits_by_use_sum_to_the_allocated_bytes() -> None:
    size = compression(2, 4, norms=0.25, padding=0.5)
    use = bits_by_use(size)
    assert (use.codes, use.norms) == pytest.approx((3, 0.25))
    assert use.total == pytest.approx(16 * size.bytes_allocated / size.bytes_fp16)
