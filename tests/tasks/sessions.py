"""Sessions on tiny random models, and a quantizer that changes nothing."""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from kvbench.calibrate import calibrate
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig, CorpusConfig, ModelConfig
from kvbench.corpora import Corpus, load_corpus
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat, Dense
from kvbench.models import LoadedModel, load_model
from kvbench.quantizer import Quantizer
from kvbench.session import Session

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, sharp attention": {"model_type": "llama", "initializer_range": 0.3},
    "llama with YaRN": {"model_type": "llama", "rope_parameters": YARN},
    "interleaved partial rotary": {"model_type": "glm", "head_dim": 16, "rope_parameters": HALF},
    "a layer without RoPE": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
}


@dataclass(frozen=True)
class Identity(Quantizer):
    """Keeps every bit: what a quality test must not take for a quantizer."""

    name: ClassVar[str] = "identity"
    needs_calibration: ClassVar[bool] = False

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        layers = tuple(Dense(layer.kv_heads, layer.head_dim, "float32") for layer in geometry.layers)
        return CacheFormat(layers, layers)


@cache
def model(name: str = "llama") -> LoadedModel:
    architecture = {**BASE, **ARCHITECTURES[name]}
    return load_model(ModelConfig(name=name, random=True, architecture=architecture), "cpu")


@cache
def corpus() -> Corpus:
    return load_corpus(CorpusConfig("pydoc"))


@cache
def statistics(name: str) -> Calibration:
    return calibrate(model(name), corpus(), 128, 32)


def session(quantizer: Quantizer, name: str = "llama", **cache_options: Any) -> Session:
    """``quantizer`` fitted to the architecture ``name``, on Python's documentation, a token a byte."""
    loaded = model(name)
    fitted = quantizer.fit(statistics(name) if quantizer.needs_calibration else None, loaded.geometry)
    return Session(loaded, quantizer, fitted, corpus(), CacheConfig(**cache_options))
