"""Fidelity: zero against itself, right in value, and larger with fewer bits."""

import dataclasses

import pytest
import torch

from kvbench.calibrate import accumulate
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig
from kvbench.corpora import Corpus
from kvbench.errors import ConfigurationError
from kvbench.models import LoadedModel
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.session import Session
from kvbench.task import TaskResult
from kvbench.tasks.fidelity import Fidelity, divergence

TEXT = "A quick brown fox jumps over a lazy dog, and then it sleeps until noon. " * 20


def measured(loaded: LoadedModel, quantizer: Quantizer) -> TaskResult:
    corpus = Corpus("text", TEXT, TEXT)
    ids = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
    calibration = Calibration(accumulate(loaded, ids), {})
    session = Session(loaded, quantizer, quantizer.fit(calibration, loaded.geometry), corpus, CacheConfig())
    return Fidelity(windows=2, window=96).run(session)


def test_divergence_of_two_known_distributions() -> None:
    reference, other = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    assert divergence(reference, other).item() == pytest.approx(0.25 * torch.tensor(2.0).log().item())
    assert divergence(reference, reference + 3.0).item() == pytest.approx(0.0, abs=1e-12)


def test_half_precision_storage_barely_moves_the_distribution(tiny: LoadedModel) -> None:
    result = measured(tiny, Fp16())
    assert 0 <= result.metrics["kl"] < 1e-6
    assert result.metrics["top1_agreement"] > 0.95
    assert result.n == 192
    assert result.path == "packed"


def test_fewer_bits_diverge_more(tiny: LoadedModel) -> None:
    by_bits = [measured(tiny, BlockGTQ(k_bits=bits, v_bits=bits)).metrics["kl"] for bits in (1, 2, 4, 6)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_bits[0] > 10 * by_bits[2] > 0


def test_samples_are_blocks_of_tokens_and_average_to_the_metric(tiny: LoadedModel) -> None:
    result = measured(tiny, BlockGTQ())
    assert len(result.samples["kl"]) == 192 / result.metrics["block"]
    assert sum(result.samples["kl"]) / len(result.samples["kl"]) == pytest.approx(result.metrics["kl"])
    mean, low, high = result.metrics["kl_interval"]
    assert low < mean < high


@pytest.mark.parametrize("options", [{"windows": 0}, {"window": 0}])
def test_impossible_amounts_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.fidelity"):
        dataclasses.replace(Fidelity(), **options)
