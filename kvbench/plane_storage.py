"""Storage of one layer in planes of its formats' own codecs: any format, any device, read by the torch reference."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.block_storage import BlockStorage
from kvbench.errors import ConfigurationError
from kvbench.kernels.attention import Partial, attend_dense, attend_packed, merge
from kvbench.kernels.codec import Codec

if TYPE_CHECKING:
    from kvbench.visibility import Visibility

GROWTH = 1.5  # storage grows by this factor, so appending costs amortised constant time


def repeat_slots(storage: Tensor, present: int, total: int) -> None:
    """Fill ``storage [batch, slots, ...]`` from slot ``present`` to ``total`` by repeating the first ``present``."""
    while present < total:
        count = min(present, total - present)
        storage[:, present : present + count] = storage[:, :count]
        present += count


class Planes:
    """Planes ``[batch, capacity, width]`` of one codec."""

    def __init__(self, codec: Codec, batch: int, capacity: int, device: torch.device) -> None:
        self.codec = codec
        self.planes = [
            torch.zeros(batch, capacity, plane.width, dtype=plane.dtype, device=device) for plane in codec.planes
        ]

    @property
    def batch(self) -> int:
        return self.planes[0].shape[0]

    @property
    def capacity(self) -> int:
        return self.planes[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(plane.untyped_storage().nbytes() for plane in self.planes) + self.codec.constant_bytes

    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        capacity = max(tokens, int(self.capacity * GROWTH))
        for index, plane in enumerate(self.planes):
            grown = plane.new_zeros(plane.shape[0], capacity, plane.shape[2])
            grown[:, : plane.shape[1]] = plane
            self.planes[index] = grown

    def write(self, start: int, states: Tensor, positions: Tensor) -> None:
        for plane, encoded in zip(self.planes, self.codec.encode(states, positions), strict=True):
            plane[:, start : start + encoded.shape[1]] = encoded

    def read(self, length: int) -> tuple[Tensor, ...]:
        return tuple(plane[:, :length] for plane in self.planes)

    def crop(self, length: int) -> None:
        """Nothing to do: slots past the length in use are overwritten."""

    def select(self, rows: Tensor) -> None:
        self.planes = [plane.index_select(0, rows.to(plane.device)) for plane in self.planes]

    def move(self, device: torch.device | str) -> None:
        self.planes = [plane.to(device, non_blocking=True) for plane in self.planes]


def _planes(codec: Codec, batch: int, capacity: int, like: Tensor) -> Planes | BlockStorage:
    """Empty storage of a codec; ``like`` has the dtype and device of the states that will come."""
    if codec.block_tokens > 1:
        return BlockStorage(codec, batch, capacity, like)
    return Planes(codec, batch, capacity, like.device)


class PlaneStorage:
    """Keys and values of one layer, each in planes of its codec (see :class:`kvbench.layer_storage.LayerStorage`)."""

    backend, lossless = "reference", False

    def __init__(
        self, key: Codec, value: Codec, batch: int, capacity: int, keys: Tensor, values: Tensor, why: str
    ) -> None:
        self.why = why
        self.keys = _planes(key, batch, capacity, keys)
        self.values = _planes(value, batch, capacity, values)

    @property
    def batch(self) -> int:
        return self.keys.batch

    @property
    def nbytes(self) -> tuple[int, int]:
        return self.keys.nbytes, self.values.nbytes

    def reserve(self, tokens: int) -> None:
        for part in (self.keys, self.values):
            part.reserve(tokens)

    def write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for part, states, role in ((self.keys, keys, "keys"), (self.values, values, "values")):
            try:
                part.write(first, states, positions)
            except ValueError as error:
                raise ValueError(f"{role}: {error}") from error

    def attend(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        packed = attend_packed(
            queries,
            self.keys.codec,
            self.values.codec,
            self.keys.read(visibility.tokens),
            self.values.read(visibility.tokens),
            visibility.packed,
            scaling,
            visibility.starts,
        )
        return packed if own is None else merge([packed, attend_dense(queries, *own, visibility.own(), scaling)])

    def decode(self, tokens: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (part.codec.restore(part.read(tokens), positions) for part in (self.keys, self.values))
        return keys, values

    def defect(self) -> str | None:
        for part, role in ((self.keys, "keys"), (self.values, "values")):
            found = [(plane.dtype, plane.shape[2]) for plane in part.planes]
            if found != [(plane.dtype, plane.width) for plane in part.codec.planes]:
                return f"holds {role} of another size than its format's"
        return None

    def repeat(self, present: int, total: int) -> None:
        for part in (self.keys, self.values):
            if isinstance(part, BlockStorage):
                raise ConfigurationError(
                    "contents of a format that encodes blocks of tokens cannot be repeated: use fill=prefill."
                )
            for plane in part.planes:
                repeat_slots(plane, present, total)

    def crop(self, length: int) -> None:
        for part in (self.keys, self.values):
            part.crop(length)

    def select(self, rows: Tensor) -> None:
        for part in (self.keys, self.values):
            part.select(rows)

    def move(self, device: torch.device | str) -> None:
        for part in (self.keys, self.values):
            part.move(device)
