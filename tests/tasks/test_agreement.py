"""Agreement: whole against itself, counted token by token, and less with fewer bits."""

import pytest

from kvbench.errors import ConfigurationError
from kvbench.quantizers.tqmse import TQMSE
from kvbench.task import TaskResult
from kvbench.tasks.agreement import Agreement, agreed_prefix
from tests.tasks.sessions import Identity, session

SMALL = {"prompts": 6, "prompt_tokens": 24, "new_tokens": 16}
SHARP = "llama, sharp attention"


def measured(task: Agreement, bits: int | None = None) -> TaskResult:
    return task.run(session(Identity() if bits is None else TQMSE(k_bits=bits, v_bits=bits), SHARP))


def test_the_agreed_prefix_ends_at_the_first_other_token() -> None:
    assert agreed_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert agreed_prefix([1, 2], [1, 2]) == 2
    assert agreed_prefix([5], [6]) == 0


def test_a_cache_that_changes_nothing_agrees_whole() -> None:
    metrics = measured(Agreement(**SMALL)).metrics
    assert (metrics["agreement"], metrics["agreed_prefix"], metrics["identical"]) == (1.0, 16.0, 1.0)


def test_one_bit_agrees_less_than_eight() -> None:
    coarse, fine = measured(Agreement(**SMALL), 1), measured(Agreement(**SMALL), 8)
    assert coarse.metrics["agreement"] < fine.metrics["agreement"]
    assert coarse.metrics["agreed_prefix"] < fine.metrics["agreed_prefix"]
    assert coarse.metrics["identical"] < 1
    assert coarse.n == len(coarse.samples["agreement"]) == 6
    assert coarse.path == "packed"


def test_prompts_read_apart_agree_as_much_as_together() -> None:
    together, apart = measured(Agreement(**SMALL), 3), measured(Agreement(**SMALL, batch_size=4), 3)
    assert together.samples == apart.samples


@pytest.mark.parametrize("option", ["prompts", "prompt_tokens", "new_tokens", "batch_size"])
def test_impossible_amounts_are_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"task\.agreement\.{option}"):
        Agreement(**{option: 0})
