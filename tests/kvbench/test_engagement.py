"""FIELD-CASES 17: a quantized run that in fact read full precision cannot be had, and the refusal names the layer."""

from collections.abc import Callable

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from kvbench.attention import cache_argument
from kvbench.cache_options import CacheOptions
from kvbench.errors import ConfigurationError, EngagementError, NonFiniteError
from kvbench.job import check_backend
from kvbench.kernels.formats import Dense
from kvbench.packed_cache import PackedCache, PackedLayer
from kvbench.plane_storage import PlaneStorage
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.session import Session

from .tiny_models import session, tiny_model, tokens


def test_every_layer_reports_format_backend_and_tokens_read() -> None:
    of = session("three", BlockGTQ(), prefill_chunk=10)
    of.token_losses(tokens(25))
    assert [record.layer for record in of.engagement] == [0, 1]
    for record in of.engagement:
        assert (record.key_format, record.value_format) == ("rotated_codebook", "rotated_codebook")
        assert record.packed_tokens_read == 10 + 20 + 25  # three chunks, each reading all packed so far
        assert record.backend == "reference"


def test_sliding_layers_are_reported_dense() -> None:
    """FIELD-CASES 5."""
    of = session("sliding and full (gemma3)", BlockGTQ())
    of.token_losses(tokens(20))
    assert of.engagement[0].note == "sliding window, kept dense"
    assert of.engagement[1].key_format == "rotated_codebook"
    assert of.engagement[1].packed_tokens_read > 0


def test_excluded_layers_are_reported() -> None:
    of = session("three", BlockGTQ(), excluded_layers=[1])
    of.token_losses(tokens(20))
    assert of.engagement[0].note is None
    assert of.engagement[1].note == "excluded by cache.excluded_layers"
    assert of.engagement[1].key_format == "dense"


Sabotage = Callable[[PackedCache], object]


def sabotaged(of: Session, before: Sabotage = id, after: Sabotage = id) -> None:
    """Twelve tokens through a cache that is tampered with before or after they come."""
    with of.engage() as cache:
        before(cache)
        for _ in of.stream(tokens(1, 12), cache):
            pass
        after(cache)


def test_a_layer_that_keeps_full_precision_is_refused() -> None:
    def keep_full_precision(cache: PackedCache) -> None:
        cache.layers[1] = DynamicLayer()

    with pytest.raises(EngagementError, match="layer 1 kept full precision"):
        sabotaged(session("three", BlockGTQ()), before=keep_full_precision)


def test_a_layer_with_another_format_is_refused() -> None:
    def store_fp16(cache: PackedCache) -> None:
        shape = cache.geometry.layers[0]
        dense = Dense(shape.kv_heads, shape.head_dim)
        cache.layers[0] = PackedLayer(0, dense, dense, CacheOptions())

    with pytest.raises(EngagementError, match="layer 0 stored dense keys"):
        sabotaged(session("three", BlockGTQ()), before=store_fp16)


def test_a_layer_whose_planes_are_wider_than_declared_is_refused() -> None:
    def widen(cache: PackedCache) -> None:
        storage = cache.packed_layers[1].storage
        assert isinstance(storage, PlaneStorage)
        storage.values.planes[0] = storage.values.planes[0].repeat(1, 1, 4)

    with pytest.raises(EngagementError, match="layer 1 holds values of another size"):
        sabotaged(session("three", BlockGTQ()), after=widen)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_swapped_back_is_refused_at_its_first_layer(implementation: str) -> None:
    of = session("three", BlockGTQ())
    with pytest.raises(EngagementError, match="layer 0: packed keys and values reached an attention function other"):
        sabotaged(of, before=lambda cache: of.loaded.model.set_attn_implementation(implementation))


def test_a_cache_that_was_never_read_is_refused() -> None:
    of = session("three", BlockGTQ())
    with pytest.raises(EngagementError, match="layer 0 stored no keys and values"), of.engage():
        of.loaded.model(tokens(1, 12))


def test_the_models_own_attention_is_back_afterwards() -> None:
    of = session("three", BlockGTQ())
    before = of.loaded.model.config._attn_implementation
    of.token_losses(tokens(12))
    assert of.loaded.model.config._attn_implementation == before


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_in_a_layer_fails_by_name(poison: float) -> None:
    """FIELD-CASES 9: nothing non-finite is stored."""
    of = session("three", BlockGTQ())
    layer, states = of.new_cache().packed_layers[1], torch.randn(1, 2, 3, 64)
    layer.update(states, states)
    broken = states.clone()
    broken[0, 1, 2, 5] = poison
    layer.update(states, broken)
    with pytest.raises(NonFiniteError, match="layer 1: values"):
        layer.store()


def test_outlier_channels_overflow_nothing() -> None:
    """FIELD-CASES 9: keys hundreds of times larger than values, in a few channels, decode to finite near-copies."""
    of = session("three", BlockGTQ())
    layer, states = of.new_cache().packed_layers[0], torch.randn(1, 2, 50, 64)
    states[..., [3, 35]] *= 2e4
    layer.update(states, states)
    keys, values = layer.decode()
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()
    expected = states.transpose(1, 2)
    assert ((keys - expected).norm() / expected.norm()) < 0.3


def test_single_pass_scores_read_the_packed_cache() -> None:
    """FIELD-CASES 22: one forward without generation already reads quantized keys and values."""
    ids = tokens(40)
    exact = session("three").token_losses(ids)
    quantized = session("three", BlockGTQ(k_bits=2, v_bits=2)).token_losses(ids)
    assert (exact - quantized).abs().max() > 1e-2
    own = tiny_model("three").model(ids[None], labels=ids[None]).loss
    assert exact.mean() == pytest.approx(own.item(), rel=1e-5)


def test_the_unused_cache_argument_is_what_this_transformers_calls_it() -> None:
    model = tiny_model("three").model
    of = session("three", BlockGTQ())
    with of.engage() as cache:
        model(tokens(1, 5), use_cache=True, **{cache_argument(model): cache})
        assert cache.get_seq_length() == 5


def test_a_backend_that_is_none_is_refused_with_those_there_are() -> None:
    assert check_backend("triton") == "triton"
    with pytest.raises(ConfigurationError, match="backend=cuda is not available: choose auto, reference, triton"):
        check_backend("cuda")
