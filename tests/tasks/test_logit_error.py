"""Logit error against a slow computation with explicit rotation matrices."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvbench.capture import capture_qkv
from kvbench.errors import ConfigurationError
from kvbench.geometry import LayerGeometry
from kvbench.quantizer import Quantizer
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.tqmse import TQMSE
from kvbench.tasks.logit_error import LogitError, offset_errors

from .sessions import ARCHITECTURES, Identity, model, session

SMALL = LogitError(tokens=24, window=12, offsets=7, max_offset=40)
Array = NDArray[np.float64]


def rotation(angles: Array, geometry: LayerGeometry) -> Array:
    """RoPE's matrix ``[head_dim, head_dim]`` for one angle a block."""
    matrix = np.eye(geometry.head_dim)
    for (first, second), angle in zip(geometry.blocks, angles, strict=True):
        matrix[first, first] = matrix[second, second] = np.cos(angle)
        matrix[first, second], matrix[second, first] = -np.sin(angle), np.sin(angle)
    return matrix


def frequencies(name: str, layer: int) -> Array:
    loaded = model(name)
    inverse = loaded.model.get_decoder().rotary_emb.inv_freq.double().numpy()
    return inverse if loaded.geometry.layers[layer].rotary_dim else inverse[:0]


def direct_error(quantizer: Quantizer, name: str, task: LogitError, layer: int) -> float:
    """The definition, token by token: keys are rotated to their positions, coded, and rotated back."""
    work = session(quantizer, name)
    geometry, codec = work.loaded.geometry.layers[layer], work.format.key[layer].codec()
    inverse = frequencies(name, layer)
    offsets = np.linspace(-task.max_offset, task.max_offset, task.offsets)
    turns = [rotation(offset * inverse, geometry) for offset in offsets]
    total, count = 0.0, 0
    for window in work.windows(task.tokens, task.window):
        captured = capture_qkv(work.loaded.model, window[None])[layer]
        queries, keys = captured.q[0].double().numpy(), captured.k[0].double().numpy()
        for position, (q, k) in enumerate(zip(queries, keys, strict=True)):
            here = rotation(position * inverse, geometry)
            decoded = codec.reconstruct(torch.tensor(k @ here.T)[None])[0].double().numpy() @ here
            for head in range(geometry.q_heads):
                e = (k - decoded)[head // geometry.group_size]
                total += sum(abs(q[head] @ turn @ e) for turn in turns)
                count += len(turns)
    return total / count


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("quantizer", [TQMSE(k_bits=2), BlockGTQ(k_bits=3)], ids=["tqmse", "blockgtq"])
def test_error_is_the_definitions(quantizer: Quantizer, name: str) -> None:
    result = SMALL.run(session(quantizer, name))
    expected = [direct_error(quantizer, name, SMALL, layer) for layer in range(2)]
    assert result.metrics["per_layer"] == pytest.approx(expected, rel=2e-3)  # a code on a threshold may differ
    assert min(expected) > 0


@pytest.mark.parametrize("angle", [0.0, 0.3, -1.2, 400.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_offsets_turn_the_key_forward(angle: float, interleaved: bool) -> None:
    geometry = LayerGeometry(2, 1, 8, 4, interleaved)
    generator = torch.Generator().manual_seed(1)
    q, e = torch.randn(1, 2, 8, generator=generator), torch.randn(1, 1, 8, generator=generator)
    angles = torch.tensor([[angle, angle / 10]], dtype=torch.float64)
    turned = rotation(angles[0].numpy(), geometry) @ e[0, 0].double().numpy()
    expected = sum(abs(q[0, head].double().numpy() @ turned) for head in range(2))
    assert offset_errors(q, e, angles, geometry).tolist() == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_identity_has_no_error(name: str) -> None:
    """Float32 rounding of a rotation and its inverse apart."""
    assert max(SMALL.run(session(Identity(), name)).metrics["per_layer"]) < 1e-5


def test_error_falls_with_every_bit() -> None:
    errors = [SMALL.run(session(TQMSE(k_bits=bits))).metrics["mean"] for bits in (2, 3, 4, 6)]
    assert all(after < 0.7 * before for before, after in itertools.pairwise(errors))


def test_values_bits_do_not_matter_to_keys() -> None:
    coarse, fine = (SMALL.run(session(TQMSE(v_bits=bits))).metrics for bits in (1, 8))
    assert coarse == fine
    assert coarse["mean"] > 0.01


def test_mean_is_over_layers_and_a_layers_over_its_heads() -> None:
    metrics = SMALL.run(session(TQMSE())).metrics
    assert min(metrics["per_layer"]) > 0.01
    assert metrics["per_layer"] == pytest.approx([np.mean(heads) for heads in metrics["per_head"]])
    assert metrics["mean"] == pytest.approx(np.mean(metrics["per_layer"]))
    assert [len(heads) for heads in metrics["per_head"]] == [2, 2]


def test_more_windows_than_go_at_once_are_all_counted() -> None:
    """The mean over two halves of the text is the mean over the whole."""
    task = LogitError(tokens=72, window=12, offsets=3, max_offset=5)
    work = session(TQMSE())
    whole = task.run(work)
    assert whole.n == 72
    windows = work.windows(72, 12)
    parts = []
    for part in (windows[:2], windows[2:]):
        piece = session(TQMSE())
        piece.windows = lambda tokens, window, part=part: part  # type: ignore[method-assign,misc]
        parts.append(LogitError(tokens=part.numel(), window=12, offsets=3, max_offset=5).run(piece).metrics["mean"])
    assert min(parts) > 0.01
    assert whole.metrics["mean"] == pytest.approx((2 * parts[0] + 4 * parts[1]) / 6, rel=1e-4)


def test_result_says_that_keys_came_from_packed_storage() -> None:
    work = session(TQMSE())
    assert SMALL.run(work).path == "packed"
    assert [record.key_format for record in work.engagement] == ["rotated_codebook"] * 2
    assert all(record.packed_tokens_read > 0 for record in work.engagement)


def test_excluded_layer_has_no_error_and_is_named() -> None:
    work = session(TQMSE(), excluded_layers=[1])
    per_layer = SMALL.run(work).metrics["per_layer"]
    assert per_layer[0] > 1e-2 > 1e-5 > per_layer[1]
    assert [record.note for record in work.engagement] == [None, "excluded by cache.excluded_layers"]


@pytest.mark.parametrize(
    "options",
    [
        {"tokens": 0},
        {"tokens": -256},
        {"window": 0},
        {"tokens": 100, "window": 64},
        {"offsets": 0},
        {"max_offset": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"task\.logit_error"):
        LogitError(**options)
