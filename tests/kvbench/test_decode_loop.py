"""Decoding in steps on the device gives the tokens that decoding through the host gives."""

import pytest
import torch
from torch import Tensor

from kvbench.attention import packed_attention
from kvbench.bit_plane_storage import BitPlaneStorage
from kvbench.decode_loop import DeviceLoop, HostLoop, Sampling, decode_loop, model_step
from kvbench.decode_step import StepCache, current
from kvbench.dense_storage import DenseStorage
from kvbench.errors import ConfigurationError, EngagementError
from kvbench.packed_cache import PackedCache
from kvbench.quantizers.blockgtq import BlockGTQ
from kvbench.quantizers.cblockgtq import CenteredBlockGTQ
from kvbench.session import Session
from kvbench.tile_storage import TileStorage

from .tiny_models import session, tokens

GEOMETRIES = ["three", "biases (qwen2)", "interleaved, partial rotary (glm)"]


def filled(of: Session, prompts: list[Tensor]) -> tuple[PackedCache, Tensor]:
    """A cache that has read the prompts, and the token that follows each."""
    ids, mask = of.left_pad(prompts)
    cache = of.new_cache()
    with packed_attention(of.loaded.model), torch.no_grad():
        *_, (_, logits) = of.stream(ids, cache, mask)
    return cache, logits[:, -1].argmax(-1)


def dense(cache: PackedCache, capacity: int) -> PackedCache:
    """The same contents in the storage that fp16 has on a GPU, which steps on any device."""
    for layer in cache.packed_layers:
        keys, values = layer.decode()
        storage = DenseStorage(len(keys), capacity, keys.transpose(1, 2), values.transpose(1, 2))
        storage.write(0, keys, values, torch.zeros(0))
        layer.storage = storage
    return cache


def device_loop(of: Session, prompts: list[Tensor], capacity: int = 64, **options: object) -> DeviceLoop:
    cache, following = filled(of, prompts)
    loop = decode_loop(of.loaded.model, dense(cache, capacity), following, **options)  # type: ignore[arg-type]
    assert isinstance(loop, DeviceLoop)
    return loop


def prompts() -> list[Tensor]:
    return [tokens(count, seed=count) for count in (5, 17, 9)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_steps_on_the_device_choose_the_tokens_that_generate_chooses(geometry: str) -> None:
    of = session(geometry)
    expected = torch.stack(of.generate(prompts(), 13))
    loop = device_loop(of, prompts())
    first = loop.tokens[:, None].clone()
    assert torch.equal(torch.cat([first, loop.run(12)], 1), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_step_with_merged_projections_gives_the_logits_of_a_plain_one(geometry: str) -> None:
    plain, merged = (device_loop(session(geometry), prompts(), merge=merge) for merge in (False, True))
    assert (plain.merged, merged.merged) == (False, True)
    expected = plain.forward(plain.position)
    assert (merged.forward(merged.position) - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(plain.run(12), merged.run(12))


def test_a_loop_goes_on_where_it_stopped_and_grows_its_cache() -> None:
    whole = device_loop(session("three"), prompts(), capacity=64).run(30)
    loop = device_loop(session("three"), prompts(), capacity=20)
    assert torch.equal(torch.cat([loop.run(2), loop.run(11), loop.run(17)], 1), whole)
    assert loop.cache.packed_layers[0].tokens == 17 + 30
    assert min(storage.capacity for storage in loop.position.storages) >= 47


def test_a_fixed_capacity_is_told_before_a_step_would_pass_it() -> None:
    loop = device_loop(session("three"), prompts())
    loop.cache.options = type(loop.cache.options)(capacity=20)
    loop.run(3)
    with pytest.raises(ConfigurationError, match="21 tokens do not fit a cache of fixed capacity 20"):
        loop.run(1)


def test_a_quantized_cache_on_a_cpu_steps_through_the_host_and_says_why() -> None:
    of = session("three", BlockGTQ())
    expected = torch.stack(of.generate(prompts(), 8))
    cache, following = filled(of, prompts())
    loop = decode_loop(of.loaded.model, cache, following)
    assert isinstance(loop, HostLoop)
    assert "no Triton kernel runs on cpu" in loop.why
    assert torch.equal(torch.cat([following[:, None], loop.run(7)], 1), expected)


@pytest.mark.parametrize("prefill", ["quantized", "exact"])
def test_steps_over_bit_planes_choose_the_tokens_of_the_reference(prefill: str) -> None:
    """Codes at head_dim 64, which tiles do not hold, read by the general kernel; prefill in generate's own chunks."""
    pytest.importorskip("triton")
    of, few = session("three", BlockGTQ(), prefill=prefill, prefill_chunk=4), [tokens(3, seed=3), tokens(5, seed=5)]
    expected = torch.stack(of.generate(few, 4))
    of.backend = "triton"
    cache, following = filled(of, few)
    assert isinstance(cache.packed_layers[0].storage, BitPlaneStorage)
    loop = decode_loop(of.loaded.model, cache, following)
    assert isinstance(loop, DeviceLoop)
    assert torch.equal(torch.cat([following[:, None], loop.run(3)], 1), expected)


def test_steps_over_tiles_less_a_centre_choose_the_tokens_of_the_reference() -> None:
    pytest.importorskip("triton")
    of = session("nine, head_dim 128", CenteredBlockGTQ(align=16))
    few = [tokens(2, seed=2), tokens(5, seed=5)]
    expected = torch.stack(of.generate(few, 3))
    of.backend = "triton"
    cache, following = filled(of, few)
    storage = cache.packed_layers[0].storage
    assert isinstance(storage, TileStorage)
    assert storage.layout.key_format.centre is not None
    loop = decode_loop(of.loaded.model, cache, following)
    assert isinstance(loop, DeviceLoop)
    assert torch.equal(torch.cat([following[:, None], loop.run(2)], 1), expected)


@pytest.mark.parametrize("options", [{"n_sink": 2}, {"recent_window": 4}], ids=str)
def test_windows_step_through_the_host(options: dict[str, int]) -> None:
    of = session("three", BlockGTQ(), **options)
    loop = decode_loop(of.loaded.model, *filled(of, prompts()))
    assert isinstance(loop, HostLoop)
    assert loop.run(3).shape == (3, 3)


def test_steps_that_did_not_run_are_told() -> None:
    loop = device_loop(session("three"), prompts())
    loop._replay = lambda: None
    with pytest.raises(EngagementError, match="a step did not run"):
        loop.run(2)


@pytest.mark.parametrize("merge", [False, True])
def test_the_models_whole_step_traces_as_one_graph(merge: bool) -> None:
    of = session("biases (qwen2)")
    loop = device_loop(of, prompts(), merge=merge)
    compiled = torch.compile(model_step(of.loaded.model), fullgraph=True, backend="eager", dynamic=False)
    arguments = (loop.tokens[:, None], loop._positions)
    with packed_attention(of.loaded.model), torch.no_grad(), current(loop.position):
        expected = model_step(of.loaded.model)(*arguments, StepCache(2))
        with loop._merging.projections():
            found = [compiled(*arguments, StepCache(2)) for _ in range(2)]
    assert all(torch.allclose(each, expected, atol=1e-5) for each in found)


def test_an_unknown_way_to_compile_is_refused_with_the_known_ones() -> None:
    of = session("three")
    with pytest.raises(ConfigurationError, match="none, default, tuned, max-autotune"):
        decode_loop(of.loaded.model, *filled(of, prompts()), compile="fast")


def test_sampling_at_temperature_zero_is_greedy() -> None:
    assert Sampling().choose(torch.tensor([[0.0, 3.0, 1.0]])).tolist() == [1]


def test_sampling_draws_from_the_distribution_it_names() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, 4)
    drawn = Sampling(temperature=2.0).choose(logits)
    expected = (logits[0] / 2).softmax(-1)
    assert torch.allclose(drawn.bincount(minlength=4) / 20000, expected, atol=0.015)


@pytest.mark.parametrize(
    ("options", "allowed"), [({"top_k": 2}, {1, 2}), ({"top_p": 0.9}, {1, 2}), ({"top_p": 0.1}, {1})]
)
def test_candidates_are_cut_as_asked(options: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.5, -1.0]]).expand(500, 4)
    assert set(Sampling(temperature=1.0, **options).choose(logits).tolist()) == allowed  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_impossible_sampling_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="not possible"):
        Sampling(**options)  # type: ignore[arg-type]
