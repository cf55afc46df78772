"""Turning by the model's own frequencies is what the model's rotary embedding does."""

import sys

import pytest
import torch

from kvbench.errors import ModelError
from kvbench.geometry import LayerGeometry
from kvbench.rope import layer_frequencies, rotary_module, turn

from ..tasks.sessions import ARCHITECTURES, model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_turning_by_positions_equals_the_models_rope(name: str) -> None:
    """Up to the attention scaling of YaRN, which multiplies the model's cosines and sines and is reported apart."""
    loaded = model(name)
    geometry = loaded.geometry.layers[0]
    x = torch.randn(1, 2, 9, geometry.head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_module(loaded.model)(x, torch.arange(9)[None])
    source = sys.modules[type(loaded.model).__module__]
    expected, _ = source.apply_rotary_pos_emb(x, x, cos, sin)
    frequencies, scaling = layer_frequencies(loaded.model, 0, geometry)
    turned = turn(x, torch.arange(9, dtype=torch.float64)[:, None] * frequencies, geometry)
    turned[..., : geometry.rotary_dim] *= scaling
    assert torch.allclose(turned, expected, atol=1e-5)


def test_layer_without_rope_has_no_frequencies() -> None:
    loaded = model("a layer without RoPE")
    counts = [
        len(layer_frequencies(loaded.model, layer, shape)[0]) for layer, shape in enumerate(loaded.geometry.layers)
    ]
    assert counts == [8, 0]


def test_yarn_reports_its_attention_scaling() -> None:
    loaded = model("llama with YaRN")
    assert layer_frequencies(loaded.model, 0, loaded.geometry.layers[0])[1] == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_is_inverse_even_far_out(interleaved: bool) -> None:
    geometry = LayerGeometry(1, 1, 10, 6, interleaved)
    x = torch.randn(4, 10)
    angles = 500_000 * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    turned = turn(x, angles, geometry)
    assert torch.allclose(turn(turned, -angles, geometry), x, atol=1e-6)
    assert torch.equal(turned[:, 6:], x[:, 6:])
    assert not torch.allclose(turned[:, :6], x[:, :6], atol=0.1)


def test_angles_far_out_are_exact() -> None:
    """A float32 angle is off by 0.03 at position 500 000; a turn is not."""
    geometry = LayerGeometry(1, 1, 2, 2)
    angle = torch.tensor([500_000.3], dtype=torch.float64)
    assert turn(torch.tensor([[1.0, 0.0]]), angle, geometry)[0].tolist() == pytest.approx(
        [angle.cos().item(), angle.sin().item()], abs=1e-7
    )


def test_model_without_rotary_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear has no rotary embedding"):
        rotary_module(torch.nn.Linear(1, 1))
