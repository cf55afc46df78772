"""Timing steps changes nothing about them, and what a step must read is counted as it is."""

import torch

from kvbench.decode_timing import choose_attention, step_parts, timed_steps, weight_bytes
from kvbench.dense_storage import DenseStorage

from .test_decode_loop import device_loop, prompts
from .tiny_models import session, tiny_model


def test_every_step_is_timed_and_chooses_what_it_would_have() -> None:
    expected = device_loop(session("three"), prompts()).run(9)
    loop = device_loop(session("three"), prompts())
    times = timed_steps(loop, 6)
    assert len(times) == 6
    assert min(times) > 0
    assert torch.equal(loop.run(3), expected[:, 6:])


def test_taking_a_step_apart_touches_the_last_token_alone() -> None:
    loop = device_loop(session("three"), prompts())
    loop.run(4)
    before = [(layer.storage.keys.clone(), layer.tokens) for layer in loop.cache.packed_layers]  # type: ignore[union-attr]
    parts = step_parts(loop)
    assert min(parts.step, parts.attention, parts.append, parts.rest) > 0
    assert parts.attention > parts.append
    for layer, (keys, tokens) in zip(loop.cache.packed_layers, before, strict=True):
        assert isinstance(layer.storage, DenseStorage)
        assert layer.tokens == tokens
        changed = (layer.storage.keys != keys).any(-1).any(1).any(0).nonzero().flatten().tolist()
        assert set(changed) <= {tokens - 1}


def test_a_token_table_that_is_no_output_head_is_not_read_in_a_step() -> None:
    model = tiny_model("three").model
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is not table
    assert weight_bytes(model) == parameters - table.numel() * table.element_size()


def test_the_library_attention_of_a_cache_is_chosen_by_name_and_a_quantized_one_has_no_choice() -> None:
    loop = device_loop(session("three"), prompts())
    assert choose_attention(loop.cache, "auto") == "torch-math"
    assert choose_attention(session("three").new_cache(), "auto") is None
