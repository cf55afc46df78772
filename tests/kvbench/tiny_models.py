"""Tiny random-weight models of many geometries, sharp enough in their attention that a wrong mask shows."""

import dataclasses
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvbench.calibrate import accumulate, with_model_facts
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig, ModelConfig
from kvbench.corpora import Corpus
from kvbench.kernels.formats import CacheFormat, Dense
from kvbench.models import LoadedModel, load_model
from kvbench.quantizer import Quantizer
from kvbench.session import Session

HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "one query head a KV head": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2},
    "three": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2},
    "six, head_dim 80": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 80},
    "eight, head_dim 96": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 96},
    "nine, head_dim 128": {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 1, "head_dim": 128},
    "head_dim 256": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256},
    "biases (qwen2)": {"model_type": "qwen2"},
    "q/k norm (qwen3)": {"model_type": "qwen3"},
    "fused, partial rotary (phi3)": {"model_type": "phi3", "head_dim": 64, "rope_parameters": HALF_ROTARY},
    "interleaved, partial rotary (glm)": {"model_type": "glm", "rope_parameters": HALF_ROTARY},
    "sliding and full (gemma3)": {"model_type": "gemma3_text", **SLIDING},
}

BASE: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@lru_cache(maxsize=32)
def tiny_model(geometry: str = "three", dtype: str = "float32") -> LoadedModel:
    """The model of that geometry; head_dim 64 and two layers unless it says otherwise."""
    architecture = {**BASE, **GEOMETRIES[geometry]}
    if architecture["model_type"] == "phi3":  # has no field of its own for it
        architecture["hidden_size"] = architecture.pop("head_dim") * architecture["num_attention_heads"]
    return load_model(ModelConfig(name=geometry, random=True, architecture=architecture, dtype=dtype), "cpu")


@lru_cache(maxsize=32)
def calibration(geometry: str, dtype: str = "float32") -> Calibration:
    """Statistics of that model over random tokens."""
    loaded = tiny_model(geometry, dtype)
    return with_model_facts(Calibration(accumulate(loaded, tokens(8, 32, seed=5)), {}), loaded)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Random token ids."""
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def dense_format(loaded: LoadedModel, dtype: str = "float32") -> CacheFormat:
    """Storage without quantization: what remains is the cache's and the attention's own arithmetic."""
    layers = tuple(Dense(shape.kv_heads, shape.head_dim, dtype) for shape in loaded.geometry.layers)
    return CacheFormat(layers, layers)


class Unquantized(Quantizer):
    """Stands for no quantizer, in sessions whose format is given."""

    name = "unquantized"

    def fit(self, calibration: Calibration | None, geometry: Any) -> CacheFormat:
        raise NotImplementedError  # sessions of tests bring their format


def session(geometry: str = "three", quantizer: Quantizer | None = None, **options: Any) -> Session:
    """A session on that tiny model: of the quantizer, or of float32 storage without one; ``options`` of the cache."""
    loaded = tiny_model(geometry)
    format = quantizer.fit(calibration(geometry), loaded.geometry) if quantizer else dense_format(loaded)
    cache = dataclasses.replace(CacheConfig(), **options)
    return Session(loaded, quantizer or Unquantized(), format, Corpus("none", "", ""), cache)
