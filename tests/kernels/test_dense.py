"""The dense format: a cast that keeps what fits and refuses what does not."""

import pytest
import torch

from kvbench.kernels.formats import Dense


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_values_of_the_formats_own_type_come_back_exactly(dtype: str) -> None:
    x = torch.randn(4, 3, 2, 8).to(getattr(torch, dtype))
    assert torch.equal(Dense(2, 8, dtype).codec().reconstruct(x), x.float())


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 16), ("bfloat16", 16), ("float32", 32)])
def test_bits_are_those_of_the_type(dtype: str, bits: int) -> None:
    format = Dense(2, 8, dtype)
    assert format.code_bits == bits
    assert format.bits_per_token == 8 * format.codec().bytes_per_token == bits * 16


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        Dense(1, 2, "bfloat16").codec().encode(torch.tensor([[[1.0, bad]]]))


def test_value_past_float16_is_refused_not_stored_as_infinity() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Dense(1, 2, "float16").codec().encode(torch.tensor([[[1.0, 1e6]]]))
