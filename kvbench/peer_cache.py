"""A peer's cache seen from outside: what attention read from it, and what its layers really hold.

Only what every transformers cache layer has is relied on (``update``, ``keys``, ``get_seq_length``); tensors are found
by walking a layer's attributes, whatever a library put there.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.cache_options import CacheOptions
from kvbench.engagement import REFUSED
from kvbench.errors import EngagementError
from kvbench.geometry import ModelGeometry
from kvbench.kernels.formats import CacheFormat
from kvbench.packed_cache import PackedCache
from kvbench.peers import PeerFormat
from kvbench.results import Compression, LayerEngagement


class PeerCache(PackedCache):
    """A session's cache whose layers are another library's; ``make`` gives an empty cache of that library.

    Keys and values go through transformers' own ``update``; what comes back goes to attention as it is.
    """

    def __init__(self, make: Callable[[], Cache], format: CacheFormat, geometry: ModelGeometry) -> None:
        self.make, self.format, self.geometry = make, format, geometry
        self.options, self.excluded_layers = CacheOptions(exact_prefill=True), frozenset()
        self.batch = 0
        self.quantized_tokens_read = [0] * format.layers
        Cache.__init__(self, layers=make().layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store and return as the library does, and count the quantized tokens among what is returned."""
        before = self.quantized_tokens(layer_idx)
        self.batch = key_states.shape[0]
        returned: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.quantized_tokens_read[layer_idx] += before
        return returned

    def quantized_tokens(self, layer: int) -> int:
        """Tokens that a layer holds quantized: those it holds but for the ones that wait in full precision."""
        waiting = getattr(self.layers[layer], "keys", None)
        held = int(self.get_seq_length(layer))
        return held - (waiting.shape[-2] if waiting is not None and waiting.dim() == 4 else 0)

    def reset(self) -> None:
        self.layers = self.make().layers

    def forget_reads(self) -> None:
        self.quantized_tokens_read = [0] * len(self.layers)

    def reread(self, layer: int, states: Tensor) -> Tensor:
        """Keys ``[batch, kv_heads, tokens, head_dim]`` as a fresh layer gives them back after storing them."""
        self.layers[layer] = self.make().layers[layer]
        self.update(states, states, layer)
        keys, _ = self.update(states[:, :, -1:], states[:, :, -1:], layer)
        return keys[:, :, :-1]

    def bytes_allocated(self) -> tuple[int, int]:
        sizes = [layer_bytes(layer) for layer in self.layers]
        return sum(keys for keys, _ in sizes), sum(values for _, values in sizes)


def tensors(holder: Any) -> Iterator[Tensor]:
    """All plain tensors that an object holds, inside containers and tensor subclasses too."""
    if isinstance(holder, Tensor):
        if hasattr(holder, "__tensor_flatten__"):
            for name in holder.__tensor_flatten__()[0]:
                yield from tensors(getattr(holder, name))
        else:
            yield holder
    elif isinstance(holder, dict):
        for part in holder.values():
            yield from tensors(part)
    elif isinstance(holder, list | tuple):
        for part in holder:
            yield from tensors(part)


def layer_bytes(layer: Any) -> tuple[int, int]:
    """Bytes of the storage behind a cache layer's tensors: those of attributes named after values, and all others."""
    sizes: dict[int, tuple[bool, int]] = {}
    for name, holder in vars(layer).items():
        for tensor in tensors(holder):
            storage = tensor.untyped_storage()
            sizes.setdefault(storage.data_ptr(), ("value" in name, storage.nbytes()))
    values = sum(size for of_values, size in sizes.values() if of_values)
    return sum(size for _, size in sizes.values()) - values, values


def prove_peer(cache: PeerCache) -> list[LayerEngagement]:
    """One record a layer of a peer's cache that has been used.

    Raises EngagementError, naming the layer, where attention read no quantized token, or another number than in other
    layers, or where a layer holds no fewer bytes than 16 bits an element.
    """
    expected = max(cache.quantized_tokens_read, default=0)
    return [_prove_layer(cache, index, expected) for index in range(len(cache.layers))]


def _prove_layer(cache: PeerCache, index: int, expected: int) -> LayerEngagement:
    format = cache.format.key[index]
    assert isinstance(format, PeerFormat)
    read, quantized = cache.quantized_tokens_read[index], cache.quantized_tokens(index)
    if expected == 0 or read != expected:
        raise EngagementError(
            f"layer {index}: attention read {read} tokens that {format.library} had quantized, where other layers read "
            f"{expected}. {REFUSED}\nThe first chunk of a text comes back in full precision: choose a "
            "cache.prefill_chunk below the length of the text, such as 128."
        )
    layer = cache.layers[index]
    waiting = sum(tensor.nbytes for name in ("keys", "values") for tensor in tensors(getattr(layer, name, None)))
    dense = 2 * 2 * cache.batch * quantized * format.kv_heads * format.head_dim
    if quantized == 0 or sum(layer_bytes(layer)) - waiting >= dense:
        raise EngagementError(f"layer {index} of {format.library}'s cache holds as much as 16 bits take. {REFUSED}")
    return LayerEngagement(
        layer=index,
        key_format=format.kind,
        value_format=format.kind,
        packed_tokens_read=read,
        backend=f"{format.library} {format.version}",
        note=f"stored by {type(layer).__name__} of transformers",
    )


def peer_compression(cache: PeerCache) -> Compression | None:
    """The compression of a peer's cache as it stands, by the bytes it holds; None of an empty one."""
    tokens = cache.get_seq_length() * cache.batch
    if not tokens:
        return None
    formats = (cache.format.key, cache.format.value)
    elements = [sum(tokens * layer.kv_heads * layer.head_dim for layer in side) for side in formats]
    codes = [sum(tokens * layer.kv_heads * layer.head_dim * layer.code_bits for layer in side) for side in formats]
    held = cache.bytes_allocated()
    return Compression(
        code_bits_k=codes[0] / elements[0],
        code_bits_v=codes[1] / elements[1],
        effective_bits_k=8 * held[0] / elements[0],
        effective_bits_v=8 * held[1] / elements[1],
        bytes_allocated=sum(held),
        bytes_analytical=sum(tokens * layer.bits_per_token / 8 for side in formats for layer in side),
        bytes_fp16=2 * sum(elements),
        ratio=2 * sum(elements) / sum(held),
        tokens=tokens,
    )
