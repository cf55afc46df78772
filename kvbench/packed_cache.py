"""The packed cache: a transformers ``Cache`` whose layers hold encoded bytes and nothing else but small windows.

Every token is encoded when it arrives, before attention reads. Beside the packed storage a layer keeps full-precision
copies of the first ``n_sink`` real tokens and of the last ``recent_window`` tokens where these options ask for them;
attention reads the copies instead of the packed tokens there. All of it is counted in
:meth:`PackedLayer.bytes_allocated`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from kvbench.cache_options import CacheOptions
from kvbench.errors import ConfigurationError, EngagementError, NonFiniteError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat, Dense, TensorFormat
from kvbench.layer_storage import LayerStorage, new_storage

FIRST_CAPACITY = 64


class PackedStates:
    """What :meth:`PackedLayer.update` hands to the attention function in place of a key or value tensor.

    Any attention function but kvbench's own fails on it, by the layer's number: nothing can read a packed cache as
    if it were a tensor.
    """

    def __init__(self, layer: "PackedLayer", keys: Tensor, values: Tensor) -> None:
        self.layer = layer
        self.new_keys, self.new_values = keys, values  # [batch, tokens, kv_heads, head_dim], full precision

    def __getattr__(self, name: str) -> Any:
        raise EngagementError(
            f"layer {self.__dict__['layer'].index}: packed keys and values reached an attention function other than "
            f"kvbench's (it asked for '.{name}'). Load the model with attn_implementation='kvbench', or run it inside "
            "kvbench.attention.packed_attention(model)."
        )


class PackedLayer(CacheLayerMixin):
    """One layer's cache. ``tokens`` counts the slots in use, left padding included."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self, index: int, key: TensorFormat, value: TensorFormat, options: CacheOptions, group: int = 1
    ) -> None:
        super().__init__()
        self.index, self.key_format, self.value_format, self.options = index, key, value, options
        self.group = group  # query heads a KV head
        self.tokens = 0
        self.expected_tokens = 0  # storage starts at this size where it is known beforehand
        self.packed_tokens_read = 0
        self.storage: LayerStorage | None = None
        # full-precision copies [batch, tokens, kv_heads, head_dim]; sinks fill up as real tokens arrive
        self.sink_keys: Tensor | None = None
        self.sink_values: Tensor | None = None
        self.recent_keys: Tensor | None = None
        self.recent_values: Tensor | None = None
        self._waiting: PackedStates | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, dim = key_states.shape
        self.device, self.dtype = key_states.device, key_states.dtype
        for format, states, role in ((self.key_format, key_states, "key"), (self.value_format, value_states, "value")):
            if (format.kv_heads, format.head_dim) != (states.shape[1], states.shape[3]):
                raise ConfigurationError(
                    f"layer {self.index}: the {role} format is for {format.kv_heads} KV heads of {format.head_dim} "
                    f"dims, the model has {states.shape[1]} of {states.shape[3]}. Fit the quantizer to this model."
                )
        capacity = self.options.capacity or self.expected_tokens or FIRST_CAPACITY
        self.storage = new_storage(self, batch, capacity, key_states, value_states)
        if self.options.n_sink:
            self.sink_keys = key_states.new_zeros(batch, self.options.n_sink, heads, dim)
            self.sink_values = value_states.new_zeros(batch, self.options.n_sink, *value_states.shape[1::2])
        self.recent_keys = key_states.new_zeros(batch, 0, heads, dim)
        self.recent_values = value_states.new_zeros(batch, 0, *value_states.shape[1::2])
        self.starts = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take in ``[batch, kv_heads, tokens, head_dim]`` after RoPE; the handle is for kvbench's attention alone.

        The attention function knows where each sequence starts and calls :meth:`store` with it before it reads.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.store()
        keys, values = key_states.transpose(1, 2), value_states.transpose(1, 2)
        grown = self.tokens + keys.shape[1]
        if self.options.capacity is not None and grown > self.options.capacity:
            raise ConfigurationError(
                f"layer {self.index}: {grown} tokens do not fit a cache of fixed capacity {self.options.capacity}. "
                "Use a larger capacity, or none to let it grow."
            )
        self.tokens = grown
        self._waiting = PackedStates(self, keys, values)
        return self._waiting, self._waiting

    def store(self, starts: Tensor | None = None) -> None:
        """Encode what :meth:`update` took in last, unless that is done.

        ``starts [batch]`` is the slot of each sequence's position 0, where left padding ends; zeros where None.
        """
        if self._waiting is None:
            return
        assert self.storage is not None
        states, self._waiting = self._waiting, None
        if starts is not None:
            self.starts = starts
        first = self.tokens - states.new_keys.shape[1]
        positions = torch.arange(first, self.tokens, device=self.device) - self.starts[:, None]
        self.storage.reserve(self.tokens)
        try:
            self.storage.write(first, states.new_keys, states.new_values, positions)
        except ValueError as error:
            raise NonFiniteError(f"layer {self.index}: {error}.") from error

    def remember_sinks(self, keys: Tensor, values: Tensor, starts: Tensor) -> None:
        """Keep full-precision copies of each sequence's first real tokens among the newest ones.

        ``keys``, ``values`` ``[batch, tokens, kv_heads, head_dim]``; ``starts [batch]``: each sequence's first real
        slot, which only the attention function knows.
        """
        if self.sink_keys is None or self.sink_values is None:
            return
        slots = torch.arange(self.tokens - keys.shape[1], self.tokens, device=keys.device)
        order = slots[None] - starts[:, None]  # a slot's number among its sequence's real tokens
        rows, columns = torch.nonzero((order >= 0) & (order < self.options.n_sink), as_tuple=True)
        self.sink_keys[rows, order[rows, columns]] = keys[rows, columns]
        self.sink_values[rows, order[rows, columns]] = values[rows, columns]

    def remember_recent(self, keys: Tensor, values: Tensor) -> None:
        """Keep full-precision copies of the last ``recent_window`` tokens, these newest ones included."""
        if self.options.recent_window:
            assert self.recent_keys is not None and self.recent_values is not None
            keep = self.options.recent_window
            self.recent_keys = torch.cat([self.recent_keys, keys], 1)[:, -keep:].clone()
            self.recent_values = torch.cat([self.recent_values, values], 1)[:, -keep:].clone()

    def decode(self) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values as packed storage gives them back, ``[batch, tokens, kv_heads, head_dim]``."""
        self.store()
        assert self.storage is not None
        self.packed_tokens_read += self.tokens
        positions = torch.arange(self.tokens, device=self.device) - self.starts[:, None]
        return self.storage.decode(self.tokens, positions)

    @property
    def backend(self) -> str:
        """What reads the layer's storage; "none" of an empty layer."""
        return self.storage.backend if self.storage else "none"

    def repeat(self, tokens: int) -> None:
        """Go up to ``tokens`` slots by repeating the keys and values that are there, a multiple of 128 slots."""
        self.store()
        if self.storage is None or (self.window_tensors and self.options != CacheOptions(backend=self.options.backend)):
            raise ConfigurationError("only a filled cache without windows can repeat its contents: use fill=prefill.")
        self.storage.reserve(tokens)
        self.storage.repeat(self.tokens, tokens)
        self.tokens = tokens

    @property
    def window_tensors(self) -> list[Tensor]:
        tensors = (self.sink_keys, self.sink_values, self.recent_keys, self.recent_values)
        return [tensor for tensor in tensors if tensor is not None]

    def bytes_allocated(self) -> tuple[int, int]:
        """Bytes of the tensors that hold keys and values: codes, norms, padding, spare capacity, windows."""
        self.store()
        if self.storage is None:
            return 0, 0
        windows = sum(tensor.untyped_storage().nbytes() for tensor in self.window_tensors) // 2
        keys, values = self.storage.nbytes
        return keys + windows, values + windows

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        return self.options.capacity or -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, packed and full precision alike (transformers' convention)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative count, not {tokens_to_remove}")
        removed = min(-tokens_to_remove, self.tokens)
        if removed == 0:
            return
        self.store()
        self.tokens -= removed
        if self.storage is not None:
            self.storage.crop(self.tokens)
        if self.options.recent_window:
            assert self.recent_keys is not None and self.recent_values is not None
            kept = max(0, self.recent_keys.shape[1] - removed)
            self.recent_keys, self.recent_values = self.recent_keys[:, :kept], self.recent_values[:, :kept]

    def reset(self) -> None:
        self.tokens = 0
        self._waiting = None
        self.is_initialized = False
        self.storage = None
        self.sink_keys = self.sink_values = None
        self.recent_keys = self.recent_values = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.storage is not None:
            self.batch_select_indices(torch.arange(self.storage.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices [new batch]``, in that order, repeats allowed."""
        self.store()
        if self.storage is None:
            return
        self.storage.select(indices)
        self.starts = self.starts.index_select(0, indices.to(self.device))
        for name in ("sink_keys", "sink_values", "recent_keys", "recent_values"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, indices.to(tensor.device)))

    def offload(self) -> None:
        self._move("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        if self.storage is not None:
            self.storage.move(device)


class PackedCache(Cache):
    """A transformers cache of :class:`PackedLayer` for a :class:`CacheFormat`.

    Sliding-window layers stay dense in transformers' own layer and are reported so; ``excluded_layers`` are kept in the
    model's dtype. Use with ``model.generate(..., past_key_values=PackedCache(...))`` on a model whose attention is
    kvbench's (:func:`kvbench.attention.packed_attention`).
    """

    def __init__(
        self,
        format: CacheFormat,
        geometry: ModelGeometry,
        options: CacheOptions | None = None,
        excluded_layers: Sequence[int] = (),
    ) -> None:
        options = options or CacheOptions()
        outside = [layer for layer in excluded_layers if not 0 <= layer < format.layers]
        if outside:
            raise ConfigurationError(
                f"cache.excluded_layers names layer {outside[0]}, but the model has layers 0 to {format.layers - 1}."
            )
        self.format, self.geometry, self.options = format, geometry, options
        self.excluded_layers = frozenset(excluded_layers)
        super().__init__(layers=[self._layer(index) for index in range(format.layers)])

    def _layer(self, index: int) -> CacheLayerMixin:
        shape = self.geometry.layers[index]
        if shape.sliding_window is not None:
            return DynamicSlidingWindowLayer(sliding_window=shape.sliding_window)
        if index in self.excluded_layers:
            dense = Dense(shape.kv_heads, shape.head_dim, self.geometry.dtype)
            return PackedLayer(index, dense, dense, self.options, shape.group_size)
        return PackedLayer(index, self.format.key[index], self.format.value[index], self.options, shape.group_size)

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that kvbench stores, in order."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    def forget_reads(self) -> None:
        """Count the packed tokens that attention reads from nought again."""
        for layer in self.packed_layers:
            layer.packed_tokens_read = 0

    def expect(self, tokens: int) -> None:
        """Let an empty cache start with room for ``tokens`` tokens, so that it need not grow to hold them."""
        for layer in self.packed_layers:
            layer.expected_tokens = tokens

    def repeat(self, tokens: int) -> None:
        """Go up to ``tokens`` slots by repeating keys and values that are there: contents for timing, not for scores.

        Raises ConfigurationError where a layer cannot.
        """
        for layer in self.layers:
            if not isinstance(layer, PackedLayer):
                raise ConfigurationError("a cache with sliding windows cannot repeat its contents: use fill=prefill.")
            layer.repeat(tokens)

    def bytes_allocated(self) -> tuple[int, int]:
        """Bytes of all tensors that hold keys and values, every layer's, dense ones included."""
        keys = values = 0
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer_keys, layer_values = layer.bytes_allocated()
                keys, values = keys + layer_keys, values + layer_values
            elif isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None:
                keys += layer.keys.untyped_storage().nbytes()
                values += layer.values.untyped_storage().nbytes()
        return keys, values
