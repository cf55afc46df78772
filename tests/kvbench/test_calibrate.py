"""Calibration: what is captured is what feeds RoPE, statistics are right, stored ones are reused only when right."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

import kvbench.calibrate
from kvbench.calibrate import calibrate, sample_positions
from kvbench.calibration import Calibration
from kvbench.capture import capture_qkv, check_geometry, output_metrics
from kvbench.configuration import CorpusConfig, ModelConfig
from kvbench.corpora import Corpus, load_corpus, token_windows
from kvbench.errors import CorpusError, ModelError, NonFiniteError
from kvbench.geometry import LayerGeometry
from kvbench.models import LoadedModel, load_model

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
MIXED_LAYERS = ["sliding_attention", "full_attention"]
ARCHITECTURES = {
    "llama": {"model_type": "llama"},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "phi3": {"model_type": "phi3", "rope_parameters": HALF},
    "glm": {"model_type": "glm", "head_dim": 16, "rope_parameters": HALF},
    "mistral": {"model_type": "mistral", "head_dim": 24, "sliding_window": 16},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 16, "layer_types": MIXED_LAYERS},
    "cohere2": {"model_type": "cohere2", "head_dim": 16, "sliding_window": 16, "layer_types": MIXED_LAYERS},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "olmo2": {"model_type": "olmo2"},
    "gptj": {"model_type": "gptj", "num_key_value_heads": 4, "rotary_dim": 8},
}
# Older releases of transformers compute GPT-J's rotation inside its attention, where it cannot be left out.
GPTJ_SERVED = "position_embeddings" in inspect.signature(GPTJAttention.forward).parameters
SERVED = [name for name in ARCHITECTURES if name != "gptj" or GPTJ_SERVED]


def random_model(name: str) -> LoadedModel:
    """The tiny model, with norms and biases away from their neutral initial values, so that skipping one shows."""
    loaded = load_model(ModelConfig(name=name, random=True, architecture={**BASE, **ARCHITECTURES[name]}), "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.rand(parameter.shape, generator=generator)
    return loaded


def token_ids(batch: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(0, 300, (batch, tokens), generator=torch.Generator().manual_seed(2))


def projections(loaded: LoadedModel, layer: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v before RoPE from the weights themselves: the attention's input times its projections, then its norms."""
    module = next(
        m for n, m in loaded.model.named_modules() if n.endswith(("self_attn", "attn")) and m.layer_idx == layer
    )
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
        with_kwargs=True,
    )
    with torch.no_grad():
        loaded.model(ids, use_cache=False)
    handle.remove()
    shape = loaded.geometry.layers[layer]
    with torch.no_grad():
        if hasattr(module, "qkv_proj"):
            sizes = [shape.q_heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2]
            flat = list(module.qkv_proj(inputs[0]).split(sizes, dim=-1))
        else:
            flat = [module.q_proj(inputs[0]), module.k_proj(inputs[0]), module.v_proj(inputs[0])]
        whole_norm = loaded.model.config.model_type == "olmo2"  # normalizes all heads together
        if whole_norm:
            flat[0], flat[1] = module.q_norm(flat[0]), module.k_norm(flat[1])
        q, k, v = (x.unflatten(-1, (-1, shape.head_dim)) for x in flat)
        if hasattr(module, "q_norm") and not whole_norm:
            q, k = module.q_norm(q), module.k_norm(k)
    return q, k, v


@pytest.mark.parametrize("name", SERVED)
def test_captured_tensors_are_the_projections_before_rope(name: str) -> None:
    loaded, ids = random_model(name), token_ids()
    for layer, captured in enumerate(capture_qkv(loaded.model, ids)):
        for expected, found in zip(projections(loaded, layer, ids), captured, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", SERVED)
def test_the_output_metric_is_what_the_output_projection_makes_of_values(name: str) -> None:
    """A change of one KV head's values, seen by one query head alone, moves the output as the metric says."""
    loaded = random_model(name)
    for layer, metrics in enumerate(output_metrics(loaded.model, loaded.geometry, token_ids(1, 3))):
        assert metrics is not None
        module = next(
            m for n, m in loaded.model.named_modules() if n.endswith(("self_attn", "attn")) and m.layer_idx == layer
        )
        weight = (module.o_proj if hasattr(module, "o_proj") else module.out_proj).weight.detach().double()
        shape = loaded.geometry.layers[layer]
        change = torch.randn(shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(3)).double()
        for head in range(shape.kv_heads):
            moved = 0.0
            for query_head in range(head * shape.group_size, (head + 1) * shape.group_size):
                part = weight[:, query_head * shape.head_dim : (query_head + 1) * shape.head_dim]
                moved += float((part @ change[head]).square().sum())
            assert change[head].numpy() @ metrics[head] @ change[head].numpy() == pytest.approx(moved, rel=1e-5)


@pytest.mark.parametrize("name", SERVED)
def test_geometry_from_the_configuration_is_what_the_model_does(name: str) -> None:
    loaded = random_model(name)
    check_geometry(loaded.model, loaded.geometry, token_ids(1, 8))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("glm", {"interleaved": False}, "half-split pairs"),
        ("llama", {"interleaved": True}, "interleaved pairs"),
        ("llama", {"rotary_dim": 8}, "RoPE changes dims beyond its 8"),
        ("phi3", {"rotary_dim": 16}, "half-split pairs of 16 dims"),
        ("llama", {"kv_heads": 4}, "k has 2 heads of 16 dims, not 4 of 16"),
        ("qwen3", {"head_dim": 16}, "q has 4 heads of 32 dims, not 4 of 16"),
    ],
)
def test_a_wrong_geometry_is_noticed(name: str, change: dict, message: str) -> None:
    loaded = random_model(name)
    layers = tuple(dataclasses.replace(layer, **change) for layer in loaded.geometry.layers)
    with pytest.raises(ModelError, match=message):
        check_geometry(loaded.model, dataclasses.replace(loaded.geometry, layers=layers), token_ids(1, 8))


def test_a_missing_layer_is_noticed() -> None:
    loaded = random_model("llama")
    with pytest.raises(ModelError, match="ran 2 attention layers; its config describes 1"):
        check_geometry(
            loaded.model, dataclasses.replace(loaded.geometry, layers=loaded.geometry.layers[:1]), token_ids(1, 8)
        )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_capturing_leaves_the_model_as_it_was(name: str) -> None:
    loaded, ids = random_model(name), token_ids()
    with torch.no_grad():
        before = loaded.model(ids).logits
        capture_qkv(loaded.model, ids)
        after = loaded.model(ids).logits
    assert torch.equal(before, after)
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


def test_an_error_during_the_pass_leaves_the_model_as_it_was() -> None:
    loaded = random_model("llama")
    implementation = loaded.model.config._attn_implementation
    with pytest.raises(IndexError):
        capture_qkv(loaded.model, torch.full((1, 4), 10_000))  # no such token
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())
    assert loaded.model.config._attn_implementation == implementation


def test_an_architecture_outside_the_attention_interface_is_refused_by_name() -> None:
    loaded = load_model(ModelConfig(name="f", random=True, architecture={**BASE, "model_type": "falcon"}), "cpu")
    with pytest.raises(ModelError, match="FalconAttention"):
        capture_qkv(loaded.model, token_ids())


CORPUS = load_corpus(CorpusConfig("pydoc"))


def calibrated(loaded: LoadedModel, folder: Path, tokens: int = 256, window: int = 32) -> Calibration:
    return calibrate(loaded, CORPUS, tokens, window, folder)


def test_statistics_are_those_of_all_tokens_with_query_heads_as_samples(tmp_path: Path) -> None:
    loaded = random_model("qwen3")
    calibration = calibrated(loaded, tmp_path)
    windows = token_windows(CORPUS.calibration, loaded.tokenizer, 256, 32)
    shape = loaded.geometry.layers[1]
    q, k, v = (tensor.double().numpy() for tensor in capture_qkv(loaded.model, windows)[1])
    layer = calibration.layers[1]
    for head in range(shape.kv_heads):
        group = slice(head * shape.group_size, (head + 1) * shape.group_size)
        for statistics, samples in (
            (layer.q, q[:, :, group].reshape(-1, shape.head_dim)),
            (layer.k, k[:, :, head].reshape(-1, shape.head_dim)),
            (layer.v, v[:, :, head].reshape(-1, shape.head_dim)),
        ):
            np.testing.assert_allclose(statistics.mean[head], samples.mean(0), rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(
                statistics.second_moment[head], samples.T @ samples / len(samples), rtol=1e-5, atol=1e-7
            )
            np.testing.assert_allclose(statistics.minimum[head], samples.min(0), rtol=1e-5)
            np.testing.assert_allclose(statistics.maximum[head], samples.max(0), rtol=1e-5)


def test_block_energy_is_the_mean_square_of_a_blocks_two_dims(tmp_path: Path) -> None:
    loaded = random_model("glm")
    windows = token_windows(CORPUS.calibration, loaded.tokenizer, 256, 32)
    k = capture_qkv(loaded.model, windows)[0].k.double().numpy()
    energy = calibrated(loaded, tmp_path).layers[0].k.block_energy(loaded.geometry.layers[0])
    assert energy.shape == (2, 4)
    np.testing.assert_allclose(energy[1, 2], (k[:, :, 1, 4] ** 2 + k[:, :, 1, 5] ** 2).mean(), rtol=1e-5)


def test_statistics_do_not_depend_on_how_windows_are_batched(tmp_path: Path) -> None:
    loaded = random_model("llama")
    calibration = calibrate(loaded, CORPUS, 4096, 256, tmp_path)  # two forwards
    windows = token_windows(CORPUS.calibration, loaded.tokenizer, 4096, 256)
    v = torch.cat([capture_qkv(loaded.model, window[None])[1].v for window in windows]).double()
    np.testing.assert_allclose(calibration.layers[1].v.mean, v.mean((0, 1)).numpy(), rtol=1e-4, atol=1e-7)


def test_samples_are_evenly_spaced_tokens_and_query_heads_take_turns(tmp_path: Path) -> None:
    loaded = random_model("llama")
    calibration = calibrate(loaded, CORPUS, 1024, 128, tmp_path)
    captured = capture_qkv(loaded.model, token_windows(CORPUS.calibration, loaded.tokenizer, 1024, 128))[0]
    k, q = captured.k.flatten(0, 1).numpy(), captured.q.flatten(0, 1).unflatten(1, (2, 2)).numpy()
    np.testing.assert_allclose(calibration.layers[0].k.sample, k[::4], rtol=1e-4, atol=1e-6)
    expected = np.stack([q[4 * t, :, t % 2] for t in range(256)])
    np.testing.assert_allclose(calibration.layers[0].q.sample, expected, rtol=1e-4, atol=1e-6)


def test_sample_positions_cover_all_tokens() -> None:
    assert sample_positions(3) == [0, 1, 2]
    assert (len(sample_positions(1000)), sample_positions(1000)[0], sample_positions(1000)[-1]) == (256, 0, 996)


def test_nan_is_refused_by_the_name_of_tensor_and_layer(tmp_path: Path) -> None:
    loaded = random_model("llama")
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="values of layer 1"):
        calibrated(loaded, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="too short"):
        calibrate(random_model("llama"), Corpus("files", "short", "other"), 256, 32, tmp_path)


def stored(folder: Path) -> Path:
    (path,) = folder.rglob("*.safetensors")
    return path


def assert_same(first: Calibration, second: Calibration) -> None:
    assert first.source == second.source
    for a, b in zip(first.layers, second.layers, strict=True):
        for tensor in ("q", "k", "v"):
            for field in ("mean", "second_moment", "minimum", "maximum", "sample"):
                x, y = getattr(getattr(a, tensor), field), getattr(getattr(b, tensor), field)
                assert x.dtype == y.dtype
                assert np.array_equal(x, y)


class ComputedAnewError(Exception):
    """Raised in place of a calibration pass."""


@pytest.fixture
def no_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make every further calibration pass raise ComputedAnewError."""

    def refuse(*args: object) -> None:
        raise ComputedAnewError

    return lambda: monkeypatch.setattr(kvbench.calibrate, "accumulate", refuse)


def test_a_stored_calibration_is_reused_unchanged(tmp_path: Path, no_pass: Callable[[], None]) -> None:
    loaded = random_model("llama")
    first = calibrated(loaded, tmp_path)
    no_pass()
    assert_same(calibrated(loaded, tmp_path), first)


@pytest.mark.parametrize("change", ["model", "text", "tokens", "window"])
def test_a_calibration_of_anything_else_is_not_reused(tmp_path: Path, no_pass: Callable[[], None], change: str) -> None:
    loaded = random_model("llama")
    calibrated(loaded, tmp_path)
    no_pass()
    corpus, tokens, window = CORPUS, 256, 32
    if change == "model":
        loaded = dataclasses.replace(loaded, fingerprint="another")
    elif change == "text":
        corpus = Corpus("files", CORPUS.evaluation, CORPUS.calibration)
    elif change == "tokens":
        tokens = 512
    else:
        window = 64
    with pytest.raises(ComputedAnewError):
        calibrate(loaded, corpus, tokens, window, tmp_path)


def test_each_layer_carries_the_models_rotary_frequencies(tmp_path: Path) -> None:
    """FIELD-CASES 11: RoPE scaling is the model's own."""
    rotary = calibrated(random_model("llama-yarn"), tmp_path).layers[1].rotary
    module = random_model("llama-yarn").model.model.rotary_emb
    assert rotary is not None
    assert rotary.frequencies == tuple(module.inv_freq.double().tolist())
    assert rotary.scaling == module.attention_scaling != 1.0
    assert rotary.type == "yarn"


@pytest.mark.parametrize("damage", ["truncated", "one byte flipped", "empty", "of another source"])
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage: str) -> None:
    loaded = random_model("llama")
    first = calibrated(loaded, tmp_path)
    path = stored(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "one byte flipped":
        content[-100] ^= 0x40
        path.write_bytes(content)
    else:
        other = tmp_path / "other"
        calibrate(loaded, CORPUS, 512, 32, other)
        path.write_bytes(stored(other).read_bytes())
        stored(other).unlink()
    damaged = path.read_bytes()
    assert_same(calibrated(loaded, tmp_path), first)
    assert path.read_bytes() != damaged


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "calibrations").write_text("a file where the folder should be")
    assert len(calibrated(random_model("llama"), tmp_path).layers) == 2


def test_no_temporary_file_stays_behind(tmp_path: Path) -> None:
    calibrated(random_model("llama"), tmp_path)
    assert [path.name for path in (tmp_path / "calibrations").iterdir()] == [stored(tmp_path).name]


@pytest.mark.slow
def test_smollm2_is_captured_as_its_weights_say(smollm2: LoadedModel) -> None:
    ids = token_windows(CORPUS.calibration, smollm2.tokenizer, 64, 32)
    captured = capture_qkv(smollm2.model, ids)
    assert smollm2.geometry.layers == (LayerGeometry(9, 3, 64, 64),) * 30
    for layer in (0, 17, 29):
        for expected, found in zip(projections(smollm2, layer, ids), captured[layer], strict=True):
            torch.testing.assert_close(found, expected)
