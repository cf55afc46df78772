"""The attention function ``kvbench``: what transformers' models call so that they read the packed cache.

Registered with transformers under that name, together with a mask function, without which left padding would be
silently ignored. Registration happens in :func:`packed_attention` or :func:`register`, not at import.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvbench.errors import ModelError
from kvbench.kernels.attention import Partial, attend_dense, attend_packed, merge
from kvbench.packed_cache import PackedLayer, PackedStates

NAME = "kvbench"  # must not contain flash, sdpa or flex_attention: transformers matches on those words


def register() -> None:
    """Make ``attn_implementation="kvbench"`` known to transformers. Repeating it is harmless."""
    AttentionInterface.register(NAME, kvbench_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the context ``model`` attends through kvbench; afterwards its own attention is back."""
    register()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def kvbench_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query [batch, q_heads, queries, head_dim]`` over a packed layer.

    ``attention_mask`` is bool ``[batch, 1, queries, tokens]`` or None for plain causal. Layers that are dense by nature
    (sliding windows) or run without a cache arrive as tensors and go to PyTorch's own attention. Returns the output
    ``[batch, queries, q_heads, head_dim]`` in the query's dtype.
    """
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise ModelError(f"attention with {unsupported} is not supported by kvbench's packed attention.")
    if not isinstance(key, PackedStates):
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    batch, q_heads, count, dim = query.shape
    layer = key.layer
    heads = layer.key_format.kv_heads
    grouped = query.transpose(1, 2).reshape(batch, count, heads, q_heads // heads, dim)
    visibility = _Visibility(layer, attention_mask, count, query.device, batch)
    scale = dim**-0.5 if scaling is None else scaling
    layer.store(visibility.starts)
    layer.remember_sinks(key.new_keys, key.new_values, visibility.starts)
    merged = merge(_partials(grouped, key, visibility, scale))
    layer.remember_recent(key.new_keys, key.new_values)
    return merged.out.reshape(batch, count, q_heads, -1).to(query.dtype), None


class _Visibility:
    """Which tokens each query of a chunk may see, and which copy of them: packed, sink or recent.

    Slots count from 0, left padding included; the chunk's queries are the last ``count`` slots.
    """

    def __init__(self, layer: PackedLayer, mask: Tensor | None, count: int, device: torch.device, batch: int) -> None:
        self.layer, self.options, self.count = layer, layer.options, count
        self.first = layer.tokens - count
        self.slots = torch.arange(self.first, layer.tokens, device=device)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask == 0  # an additive mask: zero keeps, anything else is minus infinity in some dtype
        self.mask = None if mask is None else mask[:, 0, :, : layer.tokens]
        if self.mask is None:
            self.starts = torch.zeros(batch, dtype=torch.long, device=device)
        else:
            # the newest query sees every real token, so its first visible slot is the sequence's start
            self.starts = self.mask[:, -1].to(torch.uint8).argmax(-1).expand(batch)

    def allowed(self, start: int, stop: int) -> Tensor:
        """The model's own mask for slots ``start..stop``: bool ``[batch or 1, queries, stop - start]``."""
        if self.mask is not None:
            return self.mask[:, :, start:stop]
        return (torch.arange(start, stop, device=self.slots.device) <= self.slots[:, None])[None]

    def in_windows(self, start: int, stop: int) -> Tensor | None:
        """Slots that are read in full precision: bool, broadcastable to ``[batch, queries, stop - start]``."""
        slots = torch.arange(start, stop, device=self.slots.device)
        parts = []
        if self.options.n_sink:
            parts.append(self.sinks(slots))
        recent = self.recent(slots)
        if recent is not None:
            parts.append(recent[None])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else parts[0] | parts[1]

    def sinks(self, slots: Tensor) -> Tensor:
        """Which ``slots`` are among their sequence's first ``n_sink`` tokens, padding before them included.

        ``[batch, 1, slots]``.
        """
        return (slots[None] < (self.starts + self.options.n_sink)[:, None])[:, None]

    def recent(self, slots: Tensor) -> Tensor | None:
        """Which ``slots`` each query reads from the recent window or its own exact chunk: ``[queries, slots]``."""
        recent = None
        if self.options.recent_window:
            recent = slots[None] > self.slots[:, None] - self.options.recent_window
            recent &= slots[None] >= self.first - self.kept_recent
        if self.options.exact_prefill:
            chunk = (slots[None] >= self.first).expand(self.count, -1)
            recent = chunk if recent is None else recent | chunk
        return recent

    @property
    def kept_recent(self) -> int:
        """Tokens before the chunk that the recent window holds."""
        return 0 if self.layer.recent_keys is None else self.layer.recent_keys.shape[1]

    def packed(self, start: int, stop: int) -> Tensor:
        windows = self.in_windows(start, stop)
        allowed = self.allowed(start, stop)
        return allowed if windows is None else allowed & ~windows


def _partials(queries: Tensor, states: PackedStates, visibility: _Visibility, scale: float) -> list[Partial]:
    """Attention over packed tokens, recent window and own chunk, and sinks, each on its own."""
    layer = states.layer
    assert layer.keys_storage is not None and layer.values_storage is not None
    partials = [
        attend_packed(
            queries,
            layer.keys_storage.codec,
            layer.values_storage.codec,
            layer.keys_storage.read(layer.tokens),
            layer.values_storage.read(layer.tokens),
            visibility.packed,
            scale,
            visibility.starts,
        )
    ]
    layer.packed_tokens_read += layer.tokens
    if layer.options.recent_window or layer.options.exact_prefill:
        partials.append(_attend_recent(queries, states, visibility, scale))
    if layer.options.n_sink:
        partials.append(_attend_sinks(queries, states, visibility, scale))
    return partials


def _attend_recent(queries: Tensor, states: PackedStates, visibility: _Visibility, scale: float) -> Partial:
    layer = states.layer
    assert layer.recent_keys is not None and layer.recent_values is not None
    start = visibility.first - visibility.kept_recent
    slots = torch.arange(start, layer.tokens, device=queries.device)
    visible = visibility.allowed(start, layer.tokens)
    recent = visibility.recent(slots)
    if recent is not None:
        visible = visible & recent
    if layer.options.n_sink:  # a token that is both is read as a sink
        visible = visible & ~visibility.sinks(slots)
    keys = torch.cat([layer.recent_keys, states.new_keys], 1)
    values = torch.cat([layer.recent_values, states.new_values], 1)
    return attend_dense(queries, keys, values, visible, scale)


def _attend_sinks(queries: Tensor, states: PackedStates, visibility: _Visibility, scale: float) -> Partial:
    """Attention over the full-precision copies of each sequence's first real tokens."""
    layer = states.layer
    assert layer.sink_keys is not None and layer.sink_values is not None
    slots = visibility.starts[:, None] + torch.arange(layer.options.n_sink, device=queries.device)
    present = slots < layer.tokens
    allowed = visibility.allowed(0, layer.tokens).expand(len(slots), -1, -1)
    index = slots.clamp_max(layer.tokens - 1)[:, None].expand(-1, allowed.shape[1], -1)
    visible = allowed.gather(2, index) & present[:, None]
    return attend_dense(queries, layer.sink_keys, layer.sink_values, visible, scale)
