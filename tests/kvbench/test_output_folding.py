"""A projection with the values' rotation folded in does to rotated outputs what the plain one does to outputs."""

import pytest
import torch

from kvbench.attention import packed_attention
from kvbench.calibrate import accumulate
from kvbench.calibration import Calibration
from kvbench.configuration import CacheConfig, ModelConfig
from kvbench.corpora import Corpus
from kvbench.decode_loop import DeviceLoop, HostLoop, decode_loop
from kvbench.models import load_model
from kvbench.quantizers.tqmse import TQMSE
from kvbench.session import Session

from .tiny_models import BASE, session, tokens

pytest.importorskip("triton")

ARCHITECTURE = {**BASE, "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 128}


def tiled(**options: str) -> Session:
    """A session on a model of one layer and one KV head, whose cache is in tile pages."""
    architecture = {**ARCHITECTURE, "num_key_value_heads": 1}
    loaded = load_model(ModelConfig(name="tiled", random=True, architecture=architecture, dtype="float32"), "cpu")
    quantizer = TQMSE(norm_bits=8)
    format = quantizer.fit(Calibration(accumulate(loaded, tokens(4, 16)), {}), loaded.geometry)
    return Session(loaded, quantizer, format, Corpus("none", "", ""), CacheConfig(**options), "triton")


def loop_of(of: Session, fold: bool) -> DeviceLoop | HostLoop:
    cache = of.new_cache()
    with packed_attention(of.loaded.model), torch.no_grad():
        *_, (_, logits) = of.stream(tokens(1, 3), cache)
    return decode_loop(of.loaded.model, cache, logits[:, -1].argmax(-1), fold=fold)


def test_a_folded_step_gives_the_logits_of_a_plain_one_and_leaves_the_weights_alone() -> None:
    of = tiled()
    weights = {name: parameter.clone() for name, parameter in of.loaded.model.named_parameters()}
    logits = []
    for fold in (False, True):
        loop = loop_of(of, fold)
        assert isinstance(loop, DeviceLoop)
        assert loop.folded == fold
        logits.append(loop.forward(loop.position))
    plain, folded = logits
    assert (folded - plain).norm() < 1e-3 * plain.norm()
    for name, parameter in of.loaded.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_a_token_read_exactly_is_not_rotated_so_that_nothing_is_folded() -> None:
    loop = loop_of(tiled(prefill="exact"), fold=True)
    assert not loop.folded


def test_other_storages_fold_nothing() -> None:
    of = session("three", TQMSE())
    of.backend = "triton"
    loop = loop_of(of, fold=True)
    assert isinstance(loop, DeviceLoop)
    assert not loop.folded
