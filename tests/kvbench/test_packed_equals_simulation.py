"""What attention computes from packed bytes is what it would compute from dequantized tensors, layer by layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kvbench.attention
from kvbench.calibrate import calibrate
from kvbench.configuration import CacheConfig, CorpusConfig
from kvbench.corpora import load_corpus
from kvbench.models import LoadedModel
from kvbench.packed_cache import PackedStates
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session

EPS = torch.finfo(torch.float32).eps


def simulated(query: Tensor, states: PackedStates, scaling: float) -> tuple[Tensor, float]:
    """Causal attention over quantized and dequantized keys and values in float64, and the largest logit."""
    layer = states.layer
    keys = layer.key_format.codec().reconstruct(states.new_keys).double().transpose(1, 2)
    values = layer.value_format.codec().reconstruct(states.new_values).double().transpose(1, 2)
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    out = scaled_dot_product_attention(query.double(), keys, values, is_causal=True, scale=scaling)
    return out.transpose(1, 2), float((query.double() @ keys.mT).abs().max() * scaling)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("quantizer", [TQMSE, BlockGTQ])
def test_every_layer_of_smollm2(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch, quantizer: Callable[..., Quantizer], bits: int
) -> None:
    corpus = load_corpus(CorpusConfig(name="pydoc"))
    chosen = quantizer(k_bits=bits, v_bits=bits)
    format = chosen.fit(calibrate(smollm2, corpus, 2048, 256), smollm2.geometry)
    of = Session(smollm2, chosen, format, corpus, CacheConfig(prefill_chunk=0))
    packed_attention = kvbench.attention.kvbench_attention
    checked: list[int] = []

    def compare(
        module: Any, query: Tensor, key: PackedStates, value: Any, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = packed_attention(module, query, key, value, mask, scaling=scaling, **kwargs)
        expected, largest = simulated(query, key, scaling)
        # a logit of magnitude L is off by a few eps * L after a sum of head_dim terms, and so, relatively, is a weight
        bound = 8 * EPS * (largest + query.shape[-1] ** 0.5)
        assert (out - expected).norm() / expected.norm() < bound, f"layer {key.layer.index}"
        checked.append(key.layer.index)
        return out, None

    monkeypatch.setattr(kvbench.attention, "kvbench_attention", compare)
    of.token_losses(of.windows(128)[0])
    assert checked == list(range(30))


@pytest.mark.slow
def test_fp16_storage_gives_transformers_own_tokens(smollm2: LoadedModel) -> None:
    """200 greedy tokens on the real model, prefilled in chunks, against transformers' own cache."""
    from kvbench.quantizers.fp16 import Fp16

    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Explain what a list comprehension is, with three examples."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"][0]
    corpus = load_corpus(CorpusConfig(name="pydoc"))
    format = Fp16().fit(None, smollm2.geometry)
    of = Session(smollm2, Fp16(), format, corpus, CacheConfig(prefill_chunk=16))
    found = of.generate([prompt], max_new_tokens=200, min_new_tokens=200)[0]
    expected = smollm2.model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=200,
        min_new_tokens=200,
        pad_token_id=of.padding_token,
    )
    assert len(found) == 200
    assert found.tolist() == expected[0, len(prompt) :].tolist()
