"""What the method promises, beside the contract that all quantizers keep."""

import pytest
import torch
from kvbench_hadamard.codec import hadamard_transform
from kvbench_hadamard.format import HadamardIntegers
from kvbench_hadamard.quantizer import Hadamard

from kvbench.api import ConfigurationError
from kvbench.testing import model_geometry, quantizer_conformance

test_conformance = quantizer_conformance(Hadamard, head_dims=(64, 128, 256))


def test_the_transform_is_its_own_inverse() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard_transform(hadamard_transform(x)), x, atol=1e-5)
    assert torch.allclose(hadamard_transform(torch.eye(4))[1], torch.tensor([0.5, -0.5, 0.5, -0.5]))


def test_an_outlier_channel_is_spread_over_all_coordinates() -> None:
    x = torch.zeros(1, 1, 64)
    x[..., 7] = 8.0
    codec = HadamardIntegers(1, 64, 4, seed=0).codec()
    assert torch.allclose(codec.to_space(x).abs(), torch.ones(64))
    assert torch.allclose(codec.reconstruct(x), x, atol=0.05)


def test_a_head_dim_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="power of two; this model has 80"):
        Hadamard().fit(None, model_geometry(80))


def test_bits_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"quantizer\.k_bits=9 is not allowed"):
        Hadamard(k_bits=9)
