"""Storage of one layer in bit-plane pages: any widths, encoded by the reference, read by a Triton kernel a token."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.decode_step import Span, own_token
from kvbench.kernels.attention import Partial, attend_dense, attend_packed, merge
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_plane_packing import BitPlanePacking
from kvbench.kernels.bit_planes import BitPlaneLayout
from kvbench.page_storage import PageStorage

if TYPE_CHECKING:
    from kvbench.visibility import Visibility


class BitPlaneKernels:
    """What reads and writes pages of one layout on one device."""

    def __init__(self, layout: BitPlaneLayout, device: torch.device) -> None:
        self.attend, self.packing = BitPlaneAttention(layout, device), BitPlanePacking(layout, device)


@lru_cache(maxsize=256)  # caches come and go; a layer's tables stay the same
def _kernels(layout: BitPlaneLayout, device: torch.device) -> BitPlaneKernels:
    return BitPlaneKernels(layout, device)


class BitPlaneStorage(PageStorage):
    """Pages ``[batch, pages, page_bytes]`` of one layer (see :class:`kvbench.layer_storage.LayerStorage`).

    For formats that tiles cannot hold. Slots are those of :class:`kvbench.tile_storage.TileStorage`. The reference
    encodes, and attends chunks of several tokens; decode steps need no host
    (:class:`kvbench.decode_step.StepStorage`).
    """

    layout: BitPlaneLayout

    def __init__(self, layout: BitPlaneLayout, batch: int, capacity: int, device: torch.device, why: str) -> None:
        super().__init__(layout, batch, capacity, device, f"{why}; encoding and prefill by the reference")
        self.kernels = _kernels(layout, device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the pages, keys' part and values' part, and of what the formats themselves take."""
        total = self.pages.untyped_storage().nbytes()
        keys = total // self.layout.page_bytes * self.layout.key_bytes
        parts = self.kernels.packing
        return keys + parts.keys.codec.constant_bytes, total - keys + parts.values.codec.constant_bytes

    def write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        slots = torch.arange(first, first + keys.shape[1], device=self.pages.device).expand(self.batch, -1)
        parts = self.kernels.packing
        for part, states, role in ((parts.keys, keys, "keys"), (parts.values, values, "values")):
            try:
                part.store(self.pages, part.codec.encode(states), slots)
            except ValueError as error:
                raise ValueError(f"{role}: {error}") from error

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        slots, parts = at.slots.long()[:, None], self.kernels.packing
        for part, states in ((parts.keys, key), (parts.values, value)):
            encoded, finite = part.codec.encode_unchecked(states[:, None])
            self._finite.logical_and_(finite)
            part.store(self.pages, encoded, slots)

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        self.append(key, value, at)
        own = own_token(query, key, value, scaling) if exact else None
        return self.kernels.attend(query, self.pages, at.starts, at.slots if exact else at.stops, scaling, own)[0]

    def attend(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        if queries.shape[1] == 1:
            query = queries[:, 0].flatten(1, 2)
            out, lse = self.kernels.attend(query, self.pages, *visibility.packed_span(), scaling)
            packed = Partial(out.view_as(queries).float(), lse.view(queries.shape[:-1]))
        else:
            keys, values = self.kernels.packing.keys, self.kernels.packing.values
            planes = keys.load(self.pages, visibility.tokens), values.load(self.pages, visibility.tokens)
            codecs = keys.codec, values.codec
            packed = attend_packed(queries, *codecs, *planes, visibility.packed, scaling, visibility.starts)
        return packed if own is None else merge([packed, attend_dense(queries, *own, visibility.own(), scaling)])

    def decode(self, tokens: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            part.codec.restore(part.load(self.pages, tokens), positions)
            for part in (self.kernels.packing.keys, self.kernels.packing.values)
        )
        return keys, values

    def saw_numbers_not_finite(self) -> bool:
        if self._finite:
            return False
        self._finite.fill_(True)
        return True
