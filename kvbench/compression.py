"""How small a cache is: from the bytes of the tensors it allocated, beside what bit counts alone would say."""

from transformers.cache_utils import CacheLayerMixin

from kvbench.packed_cache import PackedCache, PackedLayer
from kvbench.results import Compression


def measure_compression(cache: PackedCache) -> Compression | None:
    """The compression of a cache as it stands, all layers and sequences; None of an empty one.

    Layers that stay dense (sliding windows, exclusions) count with what they hold, against 16 bits an element of the
    same tokens.
    """
    elements_k = elements_v = tokens = 0
    code_k = code_v = analytical = 0.0
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            if layer.storage is None:
                return None
            slots = layer.tokens * layer.storage.batch
            tokens = max(tokens, slots)
            key, value = layer.key_format, layer.value_format
            elements_k += slots * key.kv_heads * key.head_dim
            elements_v += slots * value.kv_heads * value.head_dim
            code_k += slots * key.code_bits * key.kv_heads * key.head_dim
            code_v += slots * value.code_bits * value.kv_heads * value.head_dim
            windows = sum(tensor.numel() * tensor.element_size() for tensor in layer.window_tensors)
            analytical += slots * (key.bits_per_token + value.bits_per_token) / 8 + windows
        elif isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None:
            elements_k += layer.keys.numel()
            elements_v += layer.values.numel()
            code_k += layer.keys.numel() * layer.keys.element_size() * 8
            code_v += layer.values.numel() * layer.values.element_size() * 8
            analytical += (layer.keys.numel() + layer.values.numel()) * layer.keys.element_size()
    if not elements_k or not elements_v:
        return None
    bytes_k, bytes_v = cache.bytes_allocated()
    bytes_fp16 = 2 * (elements_k + elements_v)
    return Compression(
        code_bits_k=code_k / elements_k,
        code_bits_v=code_v / elements_v,
        effective_bits_k=8 * bytes_k / elements_k,
        effective_bits_v=8 * bytes_v / elements_v,
        bytes_allocated=bytes_k + bytes_v,
        bytes_analytical=analytical,
        bytes_fp16=bytes_fp16,
        ratio=bytes_fp16 / (bytes_k + bytes_v),
        tokens=tokens,
    )
