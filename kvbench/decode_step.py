"""One decode step as the model sees it: a cache without lengths on the host, and the operator that reads it.

The model's layers get :class:`StepCache` in place of a :class:`~kvbench.packed_cache.PackedCache`. Where sequences
start and stop stands in tensors on the device, so that a step is the same launches each time, and the attention is one
operator with a fake implementation, so that ``torch.compile(fullgraph=True)`` traces the whole model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvbench.kernels.attention import Partial


@dataclass(frozen=True)
class Span:
    """Where a step is in each sequence: int32 ``[batch]`` on the device.

    The new token goes into slot ``slots[b]``; it sees the slots ``starts[b] <= t < stops[b]``, its own the last.
    """

    starts: Tensor
    slots: Tensor
    stops: Tensor


class StepStorage(Protocol):
    """Storage that a step can write and read without the host."""

    @property
    def capacity(self) -> int:
        """Slots a sequence."""

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` slots a sequence."""

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        """Store a token's ``key, value [batch, kv_heads, head_dim]``. Must not wait for the device."""

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        """Store a token and attend ``query [batch, q_heads, head_dim]`` to all tokens up to it; the output like it.

        ``exact``: the token's own key and value are read as given, not as stored. Must not wait for the device.
        """


@dataclass(frozen=True)
class Step:
    """What the operator reads: every layer's storage, where the step is, and how its own token is read."""

    storages: Sequence[StepStorage]
    at: Span
    exact: bool = False


def own_token(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Partial:
    """The attention of a token to itself alone: shapes as of :meth:`StepStorage.step`, ``lse [batch, q_heads]``."""
    grouped = query.unflatten(1, (key.shape[1], -1)).float()
    logits = (grouped * key[:, :, None].float()).sum(-1) * scaling
    return Partial(value.repeat_interleave(grouped.shape[2], 1), logits.flatten(1))


class StepStates:
    """A layer's new keys and values ``[batch, kv_heads, 1, head_dim]``, on their way to :func:`attend_step`."""

    def __init__(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values


class StepLayer(CacheLayerMixin):
    """Hands over new keys and values; positions are given to the model, and lengths are not the host's business."""

    is_sliding = False
    is_croppable = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: storage is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = StepStates(self.index, key_states, value_states)
        return states, states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StepCache(Cache):
    """What the model takes for its cache during a step of ``layers`` layers."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[StepLayer(index) for index in range(layers)])


_current: list[Step] = []  # the step that runs now: an operator cannot be given Python objects


@contextmanager
def current(step: Step) -> Iterator[None]:
    """Within the context the operator reads ``step``."""
    operator()
    _current.append(step)
    try:
        yield
    finally:
        _current.pop()


@cache
def operator() -> Any:
    """The operator ``kvbench::decode_attention``, registered with torch the first time."""

    @torch.library.custom_op("kvbench::decode_attention", mutates_args=())
    def decode_attention(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
        step = _current[-1]
        return step.storages[layer].step(query, key, value, step.at, scaling, step.exact)

    @decode_attention.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
        return query.new_empty(query.shape)

    return decode_attention


def attend_step(query: Tensor, states: StepStates, scaling: float) -> Tensor:
    """Store ``states`` and attend ``query [batch, q_heads, 1, head_dim]``; output ``[batch, 1, q_heads, head_dim]``.

    The storage that the operator writes is its layer's alone and is read by nothing else, so torch need not know of it.
    """
    keys, values = states.keys[:, :, 0], states.values[:, :, 0]
    out: Tensor = torch.ops.kvbench.decode_attention(query[:, :, 0], keys, values, states.layer, scaling)
    return out[:, None]
