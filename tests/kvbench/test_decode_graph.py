"""On a GPU: steps captured in a CUDA graph choose the tokens that uncaptured ones do, and memory stays as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvbench.attention import packed_attention
from kvbench.calibrate import accumulate
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig, ModelConfig
from kvbench.corpora import Corpus
from kvbench.decode_loop import DeviceLoop, Sampling, decode_loop
from kvbench.models import LoadedModel, is_available, load_model
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.fp16 import Fp16
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 32768,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QUANTIZERS = [TQMSE(norm_bits=8), BlockGTQ(), Fp16()]  # tiles, rows, the library


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    config = ModelConfig(name="small", random=True, architecture=ARCHITECTURE, dtype="float16")
    return load_model(config, "cuda")


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def session(loaded: LoadedModel, quantizer: Quantizer) -> Session:
    statistics = Calibration(accumulate(loaded, ids(8, 64)), {})
    format = quantizer.fit(statistics if quantizer.needs_calibration else None, loaded.geometry)
    return Session(loaded, quantizer, format, Corpus("none", "", ""), CacheConfig())


def loop_of(of: Session, capacity: int = 0, **options: object) -> DeviceLoop:
    tokens, mask = of.left_pad([ids(count, seed=count) for count in (20, 150, 77)])
    cache = of.new_cache()
    cache.expect(capacity)
    with packed_attention(of.loaded.model), torch.no_grad():
        *_, (_, logits) = of.stream(tokens, cache, mask)
    loop = decode_loop(of.loaded.model, cache, logits[:, -1].argmax(-1), **options)  # type: ignore[arg-type]
    assert isinstance(loop, DeviceLoop)
    return loop


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda each: each.name)
def test_a_graph_chooses_the_tokens_of_uncaptured_steps_and_is_captured_again_as_the_cache_grows(
    loaded: LoadedModel, quantizer: Quantizer
) -> None:
    of = session(loaded, quantizer)
    assert torch.equal(loop_of(of, graph=True).run(256), loop_of(of, capacity=512, graph=False).run(256))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda each: each.name)
def test_steps_on_the_device_choose_the_tokens_of_generate(loaded: LoadedModel, quantizer: Quantizer) -> None:
    of = session(loaded, quantizer)
    prompts = [ids(count, seed=count) for count in (20, 150, 77)]
    expected = torch.stack(of.generate(prompts, 24))
    loop = loop_of(of)
    assert torch.equal(torch.cat([loop.tokens[:, None].clone(), loop.run(23)], 1).cpu(), expected)
    assert {record.backend for record in of.engagement} == {"torch" if quantizer.name == "fp16" else "triton"}


@pytest.mark.parametrize("quantizer", [BlockGTQ(), Fp16()], ids=lambda each: each.name)
def test_on_a_real_model_a_graph_chooses_the_tokens_of_uncaptured_steps(
    model_config: Callable[[str], ModelConfig], quantizer: Quantizer
) -> None:
    config = model_config("smollm2-135m")
    if not is_available(config):
        pytest.skip("SmolLM2 is not in kvbench's cache folder")
    of = session(load_model(config, "cuda"), quantizer)
    assert torch.equal(loop_of(of, graph=True).run(256), loop_of(of, capacity=512, graph=False).run(256))


def test_folded_outputs_are_captured_too_and_the_weights_come_back(loaded: LoadedModel) -> None:
    of = session(loaded, TQMSE(norm_bits=8))
    before = loaded.model.model.layers[0].self_attn.o_proj.weight.clone()
    captured, uncaptured = loop_of(of, fold=True), loop_of(of, capacity=512, graph=False, fold=True)
    assert captured.folded
    assert torch.equal(captured.run(256), uncaptured.run(256))
    assert torch.equal(loaded.model.model.layers[0].self_attn.o_proj.weight, before)


def test_a_compiled_step_is_captured_too(loaded: LoadedModel) -> None:
    of = session(loaded, TQMSE(norm_bits=8))
    plain, compiled = loop_of(of).run(16), loop_of(of, compile="default").run(16)
    assert (plain == compiled).float().mean() > 0.5  # fused arithmetic rounds otherwise, so that near ties may turn


def test_sampled_steps_differ_from_replay_to_replay(loaded: LoadedModel) -> None:
    loop = loop_of(session(loaded, TQMSE(norm_bits=8)), sampling=Sampling(temperature=5.0))
    assert len(loop.run(64)[0].unique()) > 16


def test_memory_does_not_grow_over_ten_thousand_steps(loaded: LoadedModel) -> None:
    loop = loop_of(session(loaded, TQMSE(norm_bits=8)), capacity=12000)
    loop.run(100)
    before = torch.cuda.memory_allocated()
    loop.run(10000)
    assert torch.cuda.memory_allocated() == before
