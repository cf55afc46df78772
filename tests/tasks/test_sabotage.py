"""What would happen if a quantizer did nothing: every verdict a run gives must tell it from one that works."""

import pytest

from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session
from kvbench.tasks.logit_error import LogitError
from kvbench.tasks.perplexity import Perplexity

from .sessions import Identity, session

WORKING = [TQMSE(k_bits=3, v_bits=3), BlockGTQ(k_bits=3, v_bits=3)]


def measured(quantizer: Quantizer) -> tuple[Session, float, float]:
    work = session(quantizer)
    error = LogitError(tokens=64, window=32).run(work).metrics["mean"]
    return work, error, Perplexity(windows=1, window=96).run(work).metrics["perplexity"]


@pytest.mark.parametrize("quantizer", WORKING, ids=lambda quantizer: quantizer.name)
def test_verdicts_tell_a_working_quantizer_from_one_that_returns_dense(quantizer: Quantizer) -> None:
    work, error, perplexity = measured(quantizer)
    idle, no_error, untouched = measured(Identity())
    assert error > 1000 * no_error
    assert abs(perplexity / untouched - 1) > 1e-5
    assert work.compression is not None and idle.compression is not None
    assert work.compression.ratio > 2 > 1 > idle.compression.ratio
    assert {record.key_format for record in work.engagement} == {"rotated_codebook"}
    assert {record.key_format for record in idle.engagement} == {"dense"}
