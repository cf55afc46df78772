"""Peers: other libraries' caches are measured as they are, and what they read and hold is proven, not believed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_module
from transformers.cache_utils import DynamicCache

from kvbench.application import store_configuration
from kvbench.configuration import CacheConfig
from kvbench.corpora import Corpus
from kvbench.errors import ConfigurationError, EngagementError
from kvbench.peer_cache import PeerCache, layer_bytes
from kvbench.peer_session import PeerSession
from kvbench.peers import HQQ, QuantizedCachePeer, Quanto
from kvbench.registry import load_registry
from kvbench.run import run
from kvbench.sweep import register_sweep_plugins
from kvbench.tasks.latency import Latency
from kvbench.tasks.logit_error import LogitError

from .tiny_models import tiny_model, tokens

CHUNK = 16


@pytest.fixture(params=["hqq", "quanto"])
def peer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., QuantizedCachePeer]:
    """Makes a peer of small groups and a short residual; skipped where its library is not installed."""
    quantizer = {"hqq": HQQ, "quanto": Quanto}[request.param]
    pytest.importorskip(quantizer.module)
    if request.param == "quanto":
        from optimum.quanto.library.extensions.extension import Extension

        # The library compiles its own when it is first used, which takes minutes.
        monkeypatch.setattr(Extension, "lib", SimpleNamespace(unpack=unpack))
    return lambda **options: quantizer(**{"group": 16, "residual": 8, **options})


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` bits out of bytes, as optimum-quanto packs them: the lowest bits of all bytes first."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])


def session(quantizer: QuantizedCachePeer, **options: object) -> PeerSession:
    loaded = tiny_model("three")
    config = CacheConfig(**{"prefill_chunk": CHUNK, **options})  # type: ignore[arg-type]
    return PeerSession(loaded, quantizer, quantizer.fit(None, loaded.geometry), Corpus("none", "", ""), config)


def test_a_peers_layers_say_what_stored_them_and_what_was_read(peer: Callable[..., QuantizedCachePeer]) -> None:
    of = session(peer())
    of.token_losses(tokens(40))
    assert of.path == "peer"
    for record in of.engagement:
        assert record.key_format == "peer"
        # the second chunk read the first quantized; whether the third reads the second so is the library's choice
        assert record.packed_tokens_read in (16 + 16, 16 + 32)
        assert record.backend.startswith(of.quantizer.library)  # type: ignore[attr-defined]
        assert "QuantizedLayer of transformers" in (record.note or "")


def test_scores_are_the_librarys_and_fewer_bits_are_worse(peer: Callable[..., QuantizedCachePeer]) -> None:
    loaded, text = tiny_model("three"), tokens(64)
    with torch.no_grad():
        logits = loaded.model(text[None]).logits[0, :-1]
    unquantized = -torch.log_softmax(logits.double(), -1).gather(1, text[1:, None])[:, 0]
    losses = {bits: session(peer(k_bits=bits)).token_losses(text) for bits in (2, 4)}
    moved = {bits: float((loss - unquantized).abs().mean()) for bits, loss in losses.items()}
    assert 0 < moved[4] < moved[2]
    assert torch.allclose(losses[2][: CHUNK - 1], unquantized[: CHUNK - 1], atol=1e-4)  # the first chunk is exact


def test_memory_is_what_the_librarys_tensors_take(peer: Callable[..., QuantizedCachePeer]) -> None:
    of = session(peer(k_bits=4))
    of.token_losses(tokens(CHUNK + 3))
    size = of.compression
    assert size is not None
    numbers = sum(layer.kv_heads * layer.head_dim for layer in of.loaded.geometry.layers)  # a token, keys or values
    coded = 4 + 2 * 32 / 16  # bits: codes, and a scale and a zero point in the model's float32 for 16 numbers
    waiting = 3 * 32  # tokens short of the residual wait as the model made them
    assert size.effective_bits_k == size.effective_bits_v == (CHUNK * coded + waiting) / (CHUNK + 3)
    assert size.bytes_allocated == 2 * numbers * (CHUNK * coded + waiting) / 8
    assert (size.code_bits_k, size.tokens) == (4, CHUNK + 3)


def test_a_text_of_one_chunk_is_refused_since_it_reads_nothing_quantized(
    peer: Callable[..., QuantizedCachePeer],
) -> None:
    with pytest.raises(EngagementError, match=r"layer 0: attention read 0 tokens .*\n.*choose a cache.prefill_chunk"):
        session(peer(), prefill_chunk=512).token_losses(tokens(40))


def test_a_library_that_stores_full_precision_is_refused(peer: Callable[..., QuantizedCachePeer]) -> None:
    of = session(peer())
    cache = PeerCache(DynamicCache, of.format, of.loaded.geometry)
    cache.layers = [type(DynamicCache(config=of.loaded.model.config).layers[0])() for _ in of.format.key]
    x = torch.randn(1, of.format.key[0].kv_heads, 8, of.format.key[0].head_dim)
    for layer in range(len(cache.layers)):
        cache.update(x, x, layer)
        cache.update(x, x, layer)
    with pytest.raises(EngagementError, match="layer 0"):
        of.note(cache)


def test_logit_errors_are_those_of_what_the_library_gives_back(peer: Callable[..., QuantizedCachePeer]) -> None:
    errors = []
    for bits in (2, 4):
        quantizer = peer(k_bits=bits)
        loaded = tiny_model("three")
        corpus = Corpus("text", "", "The quick brown fox jumps over the lazy dog. " * 20)
        of = PeerSession(loaded, quantizer, quantizer.fit(None, loaded.geometry), corpus, CacheConfig())
        errors.append(LogitError(tokens=64, window=32).run(of).metrics["mean"])
        assert min(record.packed_tokens_read for record in of.engagement) > 0
    assert 0 < errors[1] < errors[0]


def test_prompts_are_scored_again_after_answers(peer: Callable[..., QuantizedCachePeer]) -> None:
    of = session(peer())
    text = tokens(40)
    first = of.loglikelihood(text[:30], text[30:])
    with of.reading() as reader:
        reader.read([text[:30]])
        reader.generate(5, frozenset())
        [scored] = reader.score([text[30:]])
    assert -float(scored.losses.sum()) == pytest.approx(first[0])


@pytest.mark.parametrize(("option", "value"), [("n_sink", 4), ("recent_window", 8), ("excluded_layers", [0])], ids=str)
def test_options_of_kvbenchs_cache_are_refused(
    peer: Callable[..., QuantizedCachePeer], option: str, value: object
) -> None:
    with pytest.raises(ConfigurationError, match=rf"cache.{option}=.* is not for quantizer=.*, which brings its own"):
        session(peer(), **{option: value}).new_cache()


def test_latency_of_another_librarys_cache_is_refused(peer: Callable[..., QuantizedCachePeer]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"task.latency times kvbench's own cache; quantizer=\w+ brings another"
    ):
        Latency().run(session(peer()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Quanto(k_bits=3), r"quantizer.k_bits=3 is not allowed: optimum-quanto has 2, 4"),
        (lambda: HQQ(k_bits=4, v_bits=2), r"quantizer.v_bits=2 is not allowed beside k_bits=4"),
        (lambda: HQQ(axis=-1), r"quantizer.axis=-1 is not allowed: choose 0 or 1"),
        (lambda: HQQ(group=0), r"quantizer.group=0 is not allowed"),
    ],
)
def test_options_out_of_range_are_refused_by_name(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=reason):
        make()


def test_values_have_the_width_of_keys(peer: Callable[..., QuantizedCachePeer]) -> None:
    assert peer(k_bits=2).v_bits == 2
    assert peer(k_bits=2) == peer(k_bits=2, v_bits=2)


def test_a_group_that_does_not_fit_the_model_is_refused(peer: Callable[..., QuantizedCachePeer]) -> None:
    with pytest.raises(ConfigurationError, match=r"quantizer.group=24 does not divide the \d+ numbers of a token"):
        peer(group=24).fit(None, tiny_model("three").geometry)


@pytest.mark.parametrize(("quantizer", "package"), [(HQQ, "hqq"), (Quanto, "optimum-quanto")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, quantizer: type[QuantizedCachePeer], package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=rf"needs {package}, which is not installed: pip install 'kvbench\[pee"
    ):
        quantizer()


def test_a_storage_shared_by_two_tensors_counts_once() -> None:
    whole = torch.zeros(64)
    layer = SimpleNamespace(keys=whole[:32], _quantized_keys=(whole[32:], {"scale": torch.zeros(2)}), values=None)
    assert layer_bytes(layer) == (64 * 4 + 2 * 4, 0)


def test_a_run_says_peer_and_that_chunks_read_themselves_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hqq")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    registry = load_registry({})
    store_configuration(registry)
    register_sweep_plugins()
    options = ["model=random", "quantizer=hqq", "quantizer.group=16", "task=[perplexity]", "baselines=[fp16]"]
    options += ["task.perplexity.windows=1", "task.perplexity.window=64", "cache.prefill_chunk=16", "device=cpu"]
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        result = run(compose("config", options), tmp_path / "out", registry)
    assert result.status == "ok"
    assert result.cache is not None
    assert (result.tasks["perplexity"].path, result.cache.prefill) == ("peer", "exact")
    assert result.baselines["fp16"].tasks["perplexity"].path == "packed"
    assert result.cache.backend.startswith("hqq ")
