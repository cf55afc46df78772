"""Timing decode steps: every step on its own, which fp16 attention is fastest, and what a step is made of."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.decode_loop import DeviceLoop, HostLoop
from kvbench.decode_step import Span, Step
from kvbench.dense_storage import DenseStorage
from kvbench.kernels import fp16_attention
from kvbench.kernels.measure import measure, read_bandwidth
from kvbench.packed_cache import PackedCache

if TYPE_CHECKING:
    from kvbench.session import Session


def timed_steps(loop: DeviceLoop | HostLoop, steps: int) -> list[float]:
    """Seconds that each of ``steps`` steps took: by events on a CUDA device, which steps do not wait for."""
    marks: list[Any] = []
    if not loop.tokens.is_cuda:
        loop.run(steps, lambda: marks.append(time.perf_counter()))
        marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)]

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    loop.run(steps, mark, after_steps=mark)
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def choose_attention(cache: PackedCache, name: str) -> str | None:
    """Let unquantized layers attend by ``name`` in steps, or by the fastest (``"auto"``); the name taken.

    The fastest is measured on the layers' own tensors over all of their capacity. None where no layer has a choice.
    """
    storages = [layer.storage for layer in cache.packed_layers if isinstance(layer.storage, DenseStorage)]
    if not storages:
        return None
    if name == "auto":
        shape = cache.geometry.layers[cache.packed_layers[0].index]
        first = storages[0].keys
        query = torch.randn(len(first), shape.q_heads, first.shape[-1], dtype=first.dtype, device=first.device)
        name, _ = fp16_attention.fastest([(query, storage.keys, storage.values) for storage in storages])
    fp16_attention.check_name(name)
    for storage in storages:
        storage.attention = name
    return name


def read_rate(session: "Session") -> float:
    """Bytes a second that the session's GPU reads at most, measured once a run."""
    if "read rate" not in session.memo:
        session.memo["read rate"] = read_bandwidth(session.device, 1 << 30)
    return float(session.memo["read rate"])


def floor_ms(session: "Session", cache: PackedCache) -> float:
    """Milliseconds that reading a step's weights and the allocated cache once takes at the measured read rate."""
    nbytes = weight_bytes(session.loaded.model) + sum(cache.bytes_allocated())
    return 1e3 * nbytes / read_rate(session)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all, but for an embedding that is no output head too and gives one row."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    weight = embedding.weight
    return total if tied else total - weight.numel() * weight.element_size()


@dataclass(frozen=True)
class StepParts:
    """Milliseconds of a whole step and of its parts, each captured in a graph of its own and timed by its median.

    ``attention``: every layer's attention, its new token's encoding and storing included, of which ``append`` is the
    latter alone. ``rest``: the model without it. ``gaps``: what the step takes
    beyond the two.
    """

    step: float
    attention: float
    append: float
    rest: float
    gaps: float


class _Nothing:
    """Storage whose step does nothing but to give the query back."""

    capacity = 0

    def reserve(self, tokens: int) -> None:
        """There is nothing to make room for."""

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        """There is nowhere to store anything."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        return query.clone()


def step_parts(loop: DeviceLoop) -> StepParts:
    """Take a step apart, in the slot of the last token, whose key and value are lost: decode nothing after it."""
    layers = loop.cache.packed_layers
    geometry, batch, step = loop.cache.geometry, len(loop.tokens), loop.position
    for counter in (step.at.slots, step.at.stops):
        counter.sub_(1)  # the slot of the last token that was decoded, so that no capacity is needed
    inputs = []
    for layer in layers:
        shape = geometry.layers[layer.index]
        new = lambda heads, dim=shape.head_dim: torch.randn(  # noqa: E731
            batch, heads, dim, dtype=loop.model.dtype, device=loop.tokens.device
        )
        inputs.append((new(shape.q_heads), new(shape.kv_heads), new(shape.kv_heads), shape.head_dim**-0.5))

    def attend() -> None:
        for storage, (query, key, value, scaling) in zip(step.storages, inputs, strict=True):
            storage.step(query, key, value, step.at, scaling, step.exact)

    def append() -> None:
        for storage, (_, key, value, _) in zip(step.storages, inputs, strict=True):
            storage.append(key, value, step.at)

    def rest() -> None:
        loop.forward(Step([_Nothing()] * len(layers), step.at))

    def whole() -> None:
        loop.forward(step)

    took = {part: _milliseconds(part, loop.tokens.device) for part in (whole, attend, append, rest)}
    for counter in (step.at.slots, step.at.stops):
        counter.add_(1)
    return StepParts(took[whole], took[attend], took[append], took[rest], took[whole] - took[attend] - took[rest])


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    with torch.no_grad():
        return 1e3 * statistics.median(measure([call], device, samples=5, warm_up=2))
