"""The greedy allocator: spends exactly the budget, and no allocation does better."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import ConfigurationError
from kvbench.quantizers.bit_allocation import allocate_bits

from .golden_allocations import GOLDEN

SCORES = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


def error(scores: list[float], widths: tuple[int, ...]) -> float:
    return math.fsum(score * 4.0**-bits for score, bits in zip(scores, widths, strict=True))


@given(st.lists(SCORES, min_size=1, max_size=5), st.integers(1, 2), st.integers(2, 4), st.data())
@settings(max_examples=150, deadline=None)
def test_no_allocation_of_the_same_budget_has_less_error(
    scores: list[float], least: int, most: int, data: st.DataObject
) -> None:
    budget = data.draw(st.integers(least * len(scores), most * len(scores)))
    widths = allocate_bits(scores, budget, least, most)
    every = itertools.product(range(least, most + 1), repeat=len(scores))
    best = min(error(scores, other) for other in every if sum(other) == budget)
    assert sum(widths) == budget
    assert all(least <= bits <= most for bits in widths)
    assert error(scores, widths) <= best * (1 + 1e-12)


@given(st.lists(SCORES, min_size=1, max_size=128), st.data())
@settings(max_examples=50, deadline=None)
def test_budget_is_spent_exactly_within_the_bounds(scores: list[float], data: st.DataObject) -> None:
    budget = data.draw(st.integers(len(scores), 8 * len(scores)))
    widths = allocate_bits(scores, budget)
    assert sum(widths) == budget
    assert all(1 <= bits <= 8 for bits in widths)


@pytest.mark.parametrize(("scores", "expected"), GOLDEN, ids=lambda value: "")
def test_official_allocations_are_reproduced(scores: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert allocate_bits(scores, 96) == expected


def test_larger_score_never_gets_fewer_bits() -> None:
    scores = [2.0**-i for i in range(32)]
    widths = allocate_bits(scores, 96)
    assert list(widths) == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_ties_go_to_the_first_block() -> None:
    assert allocate_bits([1.0] * 4, 6) == (2, 2, 1, 1)
    assert allocate_bits([0.0] * 3, 4) == (2, 1, 1)


def test_scaling_all_scores_changes_nothing() -> None:
    scores = [3.0, 0.2, 11.0, 0.7, 1.9]
    assert allocate_bits(scores, 15) == allocate_bits([score * 2.0**40 for score in scores], 15)


@pytest.mark.parametrize("budget", [0, 3, 33])
def test_budget_that_no_allocation_meets_is_refused(budget: int) -> None:
    with pytest.raises(ConfigurationError, match=f"1 to 8 bits to 4 blocks spends exactly {budget} bits"):
        allocate_bits([1.0] * 4, budget)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_scores_that_are_no_energies_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        allocate_bits([1.0, bad], 6)
