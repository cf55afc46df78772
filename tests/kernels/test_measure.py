"""The one timer: what it runs, and what it returns."""

import pytest

from kvbench.kernels.measure import copies, measure


def test_every_sample_is_a_positive_time_of_one_call() -> None:
    samples = measure([lambda: sum(range(1000))], "cpu", samples=5)
    assert len(samples) == 5
    assert all(sample > 0 for sample in samples)


def test_calls_take_turns_so_that_their_buffers_do() -> None:
    seen: list[int] = []
    measure([lambda: seen.append(0), lambda: seen.append(1)], "cpu", samples=4, warm_up=2)
    assert seen == [0, 1, 0, 1, 0, 1]


def test_what_a_call_raises_comes_through() -> None:
    def broken() -> None:
        raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError, match="broken"):
        measure([broken], "cpu")


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one call"):
        measure([], "cpu")


def test_a_cpu_needs_no_rotation_of_buffers() -> None:
    assert copies(1 << 20, "cpu") == 1
