"""Proof of engagement: what every layer of a cache really stored and read, and the refusal where it was not packed."""

from kvbench.bit_plane_storage import BitPlaneStorage
from kvbench.errors import EngagementError
from kvbench.packed_cache import PackedCache, PackedLayer
from kvbench.plane_storage import PlaneStorage
from kvbench.results import LayerEngagement

REFUSED = "The run is refused: its scores would not be the quantizer's."


def prove_engagement(cache: PackedCache) -> list[LayerEngagement]:
    """One record a layer of a cache that has been used.

    Raises EngagementError, naming the layer, where a layer that should be packed is another kind of layer, has another
    format, holds planes of another size than its format says, or was read less often than the rest.
    """
    packed = cache.packed_layers
    expected = max((layer.packed_tokens_read for layer in packed), default=0)
    return [_prove_layer(cache, index, layer, expected) for index, layer in enumerate(cache.layers)]


def _prove_layer(cache: PackedCache, index: int, layer: object, expected: int) -> LayerEngagement:
    if cache.geometry.layers[index].sliding_window is not None:
        return LayerEngagement(
            layer=index, key_format="dense", value_format="dense", backend="torch", note="sliding window, kept dense"
        )
    if not isinstance(layer, PackedLayer):
        raise EngagementError(
            f"layer {index} kept full precision ({type(layer).__name__}), not the packed format. {REFUSED}"
        )
    excluded = index in cache.excluded_layers
    if not excluded and (layer.key_format, layer.value_format) != (cache.format.key[index], cache.format.value[index]):
        raise EngagementError(
            f"layer {index} stored {layer.key_format.kind} keys and {layer.value_format.kind} values in a format other "
            f"than the quantizer's. {REFUSED}"
        )
    if layer.storage is None:
        raise EngagementError(f"layer {index} stored no keys and values. {REFUSED}")
    if (defect := layer.storage.defect()) is not None:
        raise EngagementError(f"layer {index} {defect}. {REFUSED}")
    if expected == 0 or layer.packed_tokens_read != expected:
        raise EngagementError(
            f"layer {index}: attention read {layer.packed_tokens_read} packed tokens where other layers read "
            f"{expected}. {REFUSED}"
        )
    return LayerEngagement(
        layer=index,
        key_format=layer.key_format.kind,
        value_format=layer.value_format.kind,
        packed_tokens_read=layer.packed_tokens_read,
        backend=layer.storage.backend,
        note="excluded by cache.excluded_layers" if excluded else _fallback(layer),
    )


def _fallback(layer: PackedLayer) -> str | None:
    """Why a layer on a GPU has not the fastest kernels."""
    assert layer.storage is not None
    slower = isinstance(layer.storage, PlaneStorage | BitPlaneStorage) and layer.device.type == "cuda"
    return layer.storage.why if slower else None
