"""Past 100 000 tokens: a whole model attends to packed keys and values as to dequantized ones, the centre included."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench.attention
from kvbench.calibrate import accumulate, with_model_facts
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig, ModelConfig
from kvbench.corpora import Corpus
from kvbench.models import LoadedModel, load_model
from kvbench.packed_cache import PackedCache, PackedLayer, PackedStates
from kvbench.quantizer import Quantizer
from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
from kvbench.rope import layer_frequencies, turn
from kvbench.session import Session

from .tiny_models import BASE, tokens

FAR, NEW = 100_000, 24
CHOOSING = "centred where tokens choose, values along axes"
QUANTIZERS: dict[str, Quantizer] = {
    "centred": CenteredBlockGTQ(),
    CHOOSING: CenteredBlockGTQ(center_flag=True, v="pca_wo"),
}


@cache
def model(dtype: str) -> LoadedModel:
    """Two layers of head_dim 64 whose keys have a large mean, that of their bias."""
    architecture = {**BASE, "model_type": "qwen2", "num_key_value_heads": 1, "max_position_embeddings": 2 * FAR}
    loaded = load_model(ModelConfig(name="far", random=True, architecture=architecture, dtype=dtype), "cpu")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias += 3 * torch.randn(bias.shape, generator=generator)
    return loaded


def session(quantizer: Quantizer, dtype: str) -> Session:
    loaded = model(dtype)
    calibration = with_model_facts(Calibration(accumulate(loaded, tokens(8, 32, seed=5)), {}), loaded)
    format = quantizer.fit(calibration, loaded.geometry)
    return Session(loaded, quantizer, format, Corpus("none", "", ""), CacheConfig(prefill_chunk=0))


@cache
def earlier(dtype: str, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, FAR, kv_heads, head_dim]`` of one layer as if the model had read FAR tokens."""
    loaded = model(dtype)
    shape = loaded.geometry.layers[layer]
    generator = torch.Generator().manual_seed(layer)
    keys, values = (torch.randn(1, FAR, shape.kv_heads, shape.head_dim, generator=generator) for _ in "kv")
    keys += loaded.model.model.layers[layer].self_attn.k_proj.bias.detach().float().reshape(shape.kv_heads, -1)
    frequencies, scaling = layer_frequencies(loaded.model, layer, shape)
    angles = torch.arange(FAR, dtype=torch.float64)[:, None, None] * frequencies
    dtype_of = loaded.model.dtype
    return (scaling * turn(keys, angles, shape)).to(dtype_of), values.to(dtype_of)


def filled(of: Session, dtype: str) -> PackedCache:
    """A cache that has read FAR tokens."""
    made = of.new_cache()
    made.expect(FAR + NEW)
    for index, layer in enumerate(made.packed_layers):
        keys, values = earlier(dtype, index)
        layer.update(keys.transpose(1, 2), values.transpose(1, 2))
        layer.store()
    return made


def simulated(query: Tensor, layer: PackedLayer, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, float]:
    """Causal attention of the newest tokens over all, quantized and dequantized, in float64, and the largest logit."""
    positions = torch.arange(layer.tokens)[None]
    decoded, weighed = (
        format.codec().reconstruct(states, positions).double().transpose(1, 2)
        for format, states in ((layer.key_format, keys), (layer.value_format, values))
    )
    logits = query.double() @ decoded.mT * scaling
    largest = float(logits.abs().max())
    later = torch.ones_like(logits, dtype=torch.bool).triu(layer.tokens - query.shape[2] + 1)
    return (logits.masked_fill_(later, -torch.inf).softmax(-1) @ weighed).transpose(1, 2), largest


@pytest.mark.parametrize(("name", "dtype"), [("centred", "float32"), ("centred", "bfloat16"), (CHOOSING, "bfloat16")])
def test_packed_attention_is_attention_over_dequantized_tensors(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = session(QUANTIZERS[name], dtype)
    made = filled(of, dtype)
    packed_attention = kvbench.attention.kvbench_attention
    checked: list[int] = []

    def compare(
        module: Any, query: Tensor, key: PackedStates, value: Any, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = packed_attention(module, query, key, value, mask, scaling=scaling, **kwargs)
        layer = key.layer
        keys, values = (
            torch.cat(part, 1) for part in zip(earlier(dtype, layer.index), (key.new_keys, key.new_values), strict=True)
        )
        expected, largest = simulated(query, layer, keys, values, scaling)
        # a logit of magnitude L is off by a few eps * L after a sum of head_dim terms, and so, relatively, is a weight
        bound = 8 * torch.finfo(torch.float32).eps * (largest + query.shape[-1] ** 0.5)
        if query.dtype != torch.float32:
            bound += torch.finfo(query.dtype).eps  # the output is rounded to it
        assert (out - expected).norm() / expected.norm() < bound, f"layer {layer.index}"
        centre = layer.key_format.codec().centre(torch.arange(FAR, FAR + NEW)[None])
        assert centre is not None
        # the mean that is taken off is where the model itself turned it: anywhere else, more would be left
        assert (key.new_keys - centre).norm() < 0.75 * key.new_keys.norm()
        checked.append(layer.index)
        return out, None

    monkeypatch.setattr(kvbench.attention, "kvbench_attention", compare)
    with kvbench.attention.packed_attention(of.loaded.model), torch.no_grad():
        for _ in of.stream(tokens(1, NEW), made):
            pass
    assert made.get_seq_length() == FAR + NEW
    assert checked == [0, 1]
