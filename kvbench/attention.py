"""The attention function ``kvbench``: what transformers' models call so that they read the packed cache.

Registered with transformers under that name, together with a mask function, without which left padding would be
silently ignored. Registration happens in :func:`packed_attention` or :func:`register`, not at import.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvbench.decode_step import StepStates, attend_step
from kvbench.errors import ModelError
from kvbench.kernels.attention import Partial, attend_dense, merge
from kvbench.packed_cache import PackedStates
from kvbench.visibility import Visibility

NAME = "kvbench"  # must not contain flash, sdpa or flex_attention: transformers matches on those words


def register() -> None:
    """Make ``attn_implementation="kvbench"`` known to transformers. Repeating it is harmless."""
    AttentionInterface.register(NAME, kvbench_attention)
    AttentionMaskInterface.register(NAME, kvbench_mask)


def cache_argument(model: Any) -> str:
    """What ``model.forward`` calls its cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def kvbench_mask(*, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
    """The mask that transformers builds for an attention, or None where it is plain causal.

    A mask of a chunk of a long prompt is larger than the packed cache. Arguments are transformers'.
    """
    plain = options.get("attention_mask") is None and options.get("mask_function") is causal_mask_function
    if plain and options.get("allow_is_causal_skip", True):
        return None
    return sdpa_mask(q_length=q_length, kv_length=kv_length, **options)


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
    if isinstance(key, StepStates):
        return attend_step(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    if not isinstance(key, PackedStates):
        if attention_mask is None and 1 < query.shape[2] < key.shape[2]:
            attention_mask = _last_rows(query.shape[2], key.shape[2], query.device)
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    batch, q_heads, count, dim = query.shape
    layer = key.layer
    heads = layer.key_format.kv_heads
    grouped = query.transpose(1, 2).reshape(batch, count, heads, q_heads // heads, dim)
    kept_recent = 0 if layer.recent_keys is None else layer.recent_keys.shape[1]
    visibility = Visibility(layer.options, attention_mask, batch, count, layer.tokens, kept_recent, query.device)
    scale = dim**-0.5 if scaling is None else scaling
    layer.store(visibility.starts)
    layer.remember_sinks(key.new_keys, key.new_values, visibility.starts)
    merged = merge(_partials(grouped, key, visibility, scale))
    layer.remember_recent(key.new_keys, key.new_values)
    return merged.out.reshape(batch, count, q_heads, -1).to(query.dtype), None


def _last_rows(queries: int, tokens: int, device: torch.device) -> Tensor:
    """The causal mask of the last ``queries`` of ``tokens`` slots, bool ``[1, 1, queries, tokens]``."""
    slots = torch.arange(tokens, device=device)
    return (slots <= slots[-queries:, None])[None, None]


def _partials(queries: Tensor, states: PackedStates, visibility: Visibility, scale: float) -> list[Partial]:
    """Attention over packed tokens (and the chunk itself, where that is exact), recent window, and sinks."""
    layer, options = states.layer, states.layer.options
    assert layer.storage is not None
    own = (states.new_keys, states.new_values) if options.exact_prefill and not options.recent_window else None
    partials = [layer.storage.attend(queries, visibility, scale, own)]
    layer.packed_tokens_read += layer.tokens
    if layer.storage.lossless:  # copies would be read for nothing
        return partials
    if options.recent_window:
        partials.append(_attend_recent(queries, states, visibility, scale))
    if options.n_sink:
        partials.append(_attend_sinks(queries, states, visibility, scale))
    return partials


def _attend_recent(queries: Tensor, states: PackedStates, visibility: Visibility, scale: float) -> Partial:
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


def _attend_sinks(queries: Tensor, states: PackedStates, visibility: Visibility, scale: float) -> Partial:
    """Attention over the full-precision copies of each sequence's first real tokens."""
    layer = states.layer
    assert layer.sink_keys is not None and layer.sink_values is not None
    slots = visibility.starts[:, None] + torch.arange(layer.options.n_sink, device=queries.device)
    present = slots < layer.tokens
    allowed = visibility.allowed(0, layer.tokens).expand(len(slots), -1, -1)
    index = slots.clamp_max(layer.tokens - 1)[:, None].expand(-1, allowed.shape[1], -1)
    visible = allowed.gather(2, index) & present[:, None]
    return attend_dense(queries, layer.sink_keys, layer.sink_values, visible, scale)
