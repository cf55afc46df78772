"""Where one layer's keys and values are kept: what every storage offers, and which one a layer gets."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvbench.dense_storage import DenseStorage
from kvbench.errors import ConfigurationError
from kvbench.kernels.attention import Partial
from kvbench.kernels.bit_planes import BitPlaneLayout
from kvbench.kernels.dispatch import choose
from kvbench.kernels.formats import Dense
from kvbench.kernels.tiles import TileLayout
from kvbench.plane_storage import PlaneStorage
from kvbench.plugin_codec import layer_codec
from kvbench.visibility import Visibility

if TYPE_CHECKING:
    from kvbench.packed_cache import PackedLayer


class LayerStorage(Protocol):
    """Keys and values of one layer, ``batch`` sequences of slots; a slot holds a token or left padding.

    ``backend`` names what reads it in results (``"triton"``, ``"reference"``, ``"torch"``), ``why`` says in a clause
    why it is that one.
    """

    @property
    def backend(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def batch(self) -> int: ...

    @property
    def nbytes(self) -> tuple[int, int]:
        """Allocated bytes of keys and of values."""

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` slots a sequence."""

    def write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Encode ``keys, values [batch, tokens, kv_heads, head_dim]`` into slots from ``first`` on.

        ``positions [batch, tokens]`` int64 are negative in padding. Raises ValueError on NaN or infinity where that is
        known at once; storage that does not wait for the device tells it by :meth:`defect`.
        """

    @property
    def lossless(self) -> bool:
        """Whether what is stored is what was given, so that full-precision copies need not be read."""

    def attend(
        self, queries: Tensor, visibility: Visibility, scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        """Attention of ``queries [batch, queries, kv_heads, group, head_dim]`` over what they read from here.

        ``own``: the chunk's own keys and values ``[batch, queries, kv_heads, head_dim]`` where they are read in full
        precision and not from here.
        """

    def decode(self, tokens: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``tokens`` slots as stored, float32 ``[batch, tokens, kv_heads, head_dim]``."""

    def defect(self) -> str | None:
        """What is wrong with the stored bytes, as the end of a sentence about the layer; None where nothing is."""

    def repeat(self, present: int, total: int) -> None:
        """Fill the slots ``present .. total - 1`` by repeating the first ``present``, a multiple of 128."""

    def crop(self, length: int) -> None:
        """Forget all slots from ``length`` on."""

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in that order, repeats allowed."""

    def move(self, device: torch.device | str) -> None:
        """Move to a device."""


def new_storage(layer: "PackedLayer", batch: int, capacity: int, keys: Tensor, values: Tensor) -> LayerStorage:
    """Empty storage of ``capacity`` slots for a layer; ``keys`` and ``values`` are like the states that will come.

    Raises ConfigurationError where the layer's ``options.backend`` cannot serve its formats.
    """
    device, backend = keys.device, layer.options.backend
    if isinstance(layer.key_format, Dense) and isinstance(layer.value_format, Dense):
        plain = {layer.key_format.dtype, layer.value_format.dtype} == {str(keys.dtype).removeprefix("torch.")}
        if device.type == "cuda" and plain and backend != "reference":
            return DenseStorage(batch, capacity, keys, values)
        if backend == "triton":
            backend = "auto"  # there is nothing to decode
    try:
        choice = choose(layer.key_format, layer.value_format, device, layer.group, backend)
    except ConfigurationError as error:
        raise ConfigurationError(f"layer {layer.index}: {error}") from error
    if isinstance(choice.layout, TileLayout):
        from kvbench.tile_storage import TileStorage

        return TileStorage(choice.layout, batch, capacity, device, choice.why)
    if isinstance(choice.layout, BitPlaneLayout):
        from kvbench.bit_plane_storage import BitPlaneStorage

        return BitPlaneStorage(choice.layout, batch, capacity, device, choice.why)
    key = layer_codec(layer.key_format, device, layer.index, "keys")
    value = layer_codec(layer.value_format, device, layer.index, "values")
    return PlaneStorage(key, value, batch, capacity, keys, values, choice.why)
