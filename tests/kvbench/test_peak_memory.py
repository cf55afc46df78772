"""FIELD-CASES 19: the peak of prefill is measured, and told apart from the cache's own bytes."""

import sys

import pytest
import torch

from kvbench.peak_memory import PeakMemory
from kvbench.quantizers.blockgtq import BlockGTQ

from .tiny_models import session, tokens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak resident size is Linux's")
MEGABYTES = 200
CPU = torch.device("cpu")


def test_memory_that_came_and_went_is_in_the_peak() -> None:
    peak = PeakMemory(CPU)
    block = torch.ones(MEGABYTES * 250_000)  # of four bytes each
    del block
    found = peak.bytes()
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    assert found == pytest.approx(MEGABYTES * 1e6, rel=0.2)


def test_what_was_there_before_is_not() -> None:
    block = torch.ones(MEGABYTES * 250_000)
    found = PeakMemory(CPU).bytes()
    del block
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    assert found < MEGABYTES * 1e5


def test_a_session_tells_the_peak_of_reading_text_beside_the_caches_bytes() -> None:
    of = session("three", BlockGTQ(), prefill_chunk=512)
    with of.engage(512) as cache:
        for _ in of.stream(tokens(8, 512), cache):
            pass
    if of.prefill_peak_bytes is None:
        pytest.skip("this system does not let a process reset its peak")
    scores = 8 * 6 * 512 * 512 * 4  # of one layer, [batch, query heads, queries, tokens] in float32
    assert of.compression is not None
    assert of.prefill_peak_bytes > scores / 2 > of.compression.bytes_allocated
