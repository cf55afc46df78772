"""The shipped model configurations agree with what is publicly known of the models."""

from collections.abc import Callable
from pathlib import Path

import pytest

import kvbench.conf
from kvbench.configuration import ModelConfig
from kvbench.errors import ModelError
from kvbench.geometry import LayerGeometry
from kvbench.model_geometry import model_geometry
from kvbench.models import build_config

Shipped = Callable[[str], ModelConfig]
FOLDER = Path(next(iter(kvbench.conf.__path__))) / "model"

# layers, q_heads, kv_heads, head_dim, rotary_dim, interleaved, rope_theta
FACTS = {
    "smollm2-135m": (30, 9, 3, 64, 64, False, 1e5),
    "random": (2, 4, 2, 32, 32, False, 1e4),
    "qwen2.5-3b": (36, 16, 2, 128, 128, False, 1e6),
    "qwen2.5-3b-instruct": (36, 16, 2, 128, 128, False, 1e6),
    "qwen2.5-14b-instruct": (48, 40, 8, 128, 128, False, 1e6),
    "qwen3-8b": (36, 32, 8, 128, 128, False, 1e6),
    "qwen3-30b-a3b": (48, 32, 4, 128, 128, False, 1e6),
    "llama3.1-8b": (32, 32, 8, 128, 128, False, 5e5),
    "deepseek-r1-distill-llama-8b": (32, 32, 8, 128, 128, False, 5e5),
    "deepseek-r1-distill-qwen-7b": (28, 28, 4, 128, 128, False, 1e4),
    "mistral-nemo-instruct-2407": (40, 32, 8, 128, 128, False, 1e6),
    "glm-4-9b": (40, 32, 2, 128, 64, True, 1e4),
}
REFUSED = {"deepseek-v2-lite": "latent"}
WITHOUT_ARCHITECTURE = {"local"}

# parameters in billions, from the model cards; an architecture that is wrong anywhere misses them
SIZES = {
    "smollm2-135m": 0.1345,
    "qwen2.5-3b": 3.09,
    "qwen2.5-14b-instruct": 14.77,
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53,
    "llama3.1-8b": 8.03,
    "deepseek-r1-distill-qwen-7b": 7.62,
    "mistral-nemo-instruct-2407": 12.25,
    "glm-4-9b": 9.40,
}


def test_every_shipped_configuration_is_covered_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == FACTS.keys() | REFUSED.keys() | WITHOUT_ARCHITECTURE


@pytest.mark.parametrize("name", sorted(FACTS.keys() | REFUSED.keys() | WITHOUT_ARCHITECTURE))
def test_the_name_in_results_is_the_name_on_the_command_line(model_config: Shipped, name: str) -> None:
    assert model_config(name).name == name


@pytest.mark.parametrize("name", FACTS)
def test_geometry_is_the_known_one(model_config: Shipped, name: str) -> None:
    layers, q_heads, kv_heads, head_dim, rotary_dim, interleaved, _ = FACTS[name]
    geometry = model_geometry(build_config(model_config(name)))
    assert geometry.layers == (LayerGeometry(q_heads, kv_heads, head_dim, rotary_dim, interleaved),) * layers


@pytest.mark.parametrize("name", FACTS)
def test_rope_base_reaches_the_transformers_configuration(model_config: Shipped, name: str) -> None:
    assert build_config(model_config(name)).rope_parameters["rope_theta"] == FACTS[name][-1]


@pytest.mark.parametrize("name", REFUSED)
def test_geometry_that_cannot_be_served_is_refused_with_the_reason(model_config: Shipped, name: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[name]):
        model_geometry(build_config(model_config(name)))


@pytest.mark.parametrize("name", SIZES)
def test_parameter_count_is_the_published_one(model_config: Shipped, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(model_config(name)))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(SIZES[name], rel=2e-3)
