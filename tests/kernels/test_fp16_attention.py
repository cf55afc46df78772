"""The fp16 baselines: all compute attention, and the choice among them is measured and named."""

import pytest
import torch

from kvbench.errors import ConfigurationError
from kvbench.kernels import fp16_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(group: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2 * group, 64, generator=generator)
    k, v = torch.randn(2, 2, 2, 300, 64, generator=generator)
    return tuple(x.half().to(DEVICE) for x in (q, k, v))  # type: ignore[return-value]


@pytest.mark.parametrize("name", fp16_attention.available(DEVICE))
@pytest.mark.parametrize("group", [1, 3, 4])
def test_every_implementation_computes_grouped_attention(name: str, group: int) -> None:
    q, k, v = tensors(group)
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    weights = torch.softmax(torch.einsum("bhd,bhtd->bht", q.double(), keys) / 8, -1)
    expected = torch.einsum("bht,bhtd->bhd", weights, values)
    out = fp16_attention.decode(name, q, k, v)
    assert (out - expected).norm() <= 2e-3 * expected.norm()


def test_the_fastest_is_one_that_was_measured() -> None:
    name, times = fp16_attention.fastest([tensors()])
    assert set(times) <= set(fp16_attention.available(DEVICE))
    assert name in times


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="torch-flash"):
        fp16_attention.decode("torch-flush", *tensors())


@pytest.mark.parametrize("shape", list(fp16_attention.TRITON_SHAPES))
@pytest.mark.parametrize("group", [1, 3])
def test_the_triton_kernel_reads_each_sequence_where_the_device_says(shape: str, group: int) -> None:
    pytest.importorskip("triton")
    q, k, v = tensors(group)
    starts, stops = (torch.tensor(at, dtype=torch.int32, device=DEVICE) for at in ([0, 37], [300, 165]))
    out = fp16_attention.split_kv(shape, q, k, v, (starts, stops))
    for row, (start, stop) in enumerate([(0, 300), (37, 165)]):
        part = (q[row : row + 1], k[row : row + 1, :, start:stop], v[row : row + 1, :, start:stop])
        expected = fp16_attention.decode("torch-math", *part)
        assert (out[row : row + 1] - expected).norm() <= 3e-3 * expected.norm()


def test_a_token_is_put_where_the_device_says_and_nowhere_else() -> None:
    pytest.importorskip("triton")
    _, k, v = tensors()
    before = k.clone(), v.clone()
    key, value = torch.randn(2, 2, 2, 64, dtype=torch.float16, device=DEVICE)
    fp16_attention.append(key, value, k, v, torch.tensor([5, 299], dtype=torch.int32, device=DEVICE))
    for found, token, old in zip((k, v), (key, value), before, strict=True):
        old[0, :, 5], old[1, :, 299] = token[0], token[1]
        assert torch.equal(found, old)
