"""Storage of one layer in the reference's planes, of which a Triton kernel reads what a single token attends to."""

from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvbench.decode_step import Span, own_token
from kvbench.kernels.attention import Partial, attend_dense, merge
from kvbench.kernels.formats import RotatedCodebook
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.kernels.row_attention import RowAttention
from kvbench.plane_storage import Planes, PlaneStorage

if TYPE_CHECKING:
    from kvbench.visibility import Visibility


@lru_cache(maxsize=256)  # caches come and go; a layer's tables stay the same
def _attention(key: RotatedCodebook, value: RotatedCodebook, device: torch.device) -> RowAttention:
    return RowAttention(key, value, device)


class RowStorage(PlaneStorage):
    """For formats that tiles cannot hold. The reference encodes, and attends chunks of several tokens.

    Decode steps need no host (:class:`kvbench.decode_step.StepStorage`).
    """

    backend = "triton"

    def __init__(
        self, key: RotatedCodebook, value: RotatedCodebook, batch: int, capacity: int, keys: Tensor, why: str
    ) -> None:
        self.attention = _attention(key, value, keys.device)
        codecs = self.attention.key_codec, self.attention.value_codec
        super().__init__(*codecs, batch, capacity, keys, keys, f"{why}; encoding and prefill by the reference")
        self._finite = torch.ones((), dtype=torch.bool, device=keys.device)

    @property
    def capacity(self) -> int:
        return self._parts[0].capacity

    @property
    def _parts(self) -> tuple[Planes, Planes]:
        return cast(Planes, self.keys), cast(Planes, self.values)

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        rows, slots = torch.arange(self.batch, device=key.device), at.slots.long()
        for part, states in zip(self._parts, (key, value), strict=True):
            encoded, finite = cast(RotatedCodebookCodec, part.codec).encode_unchecked(states)
            self._finite.logical_and_(finite)
            for plane, row in zip(part.planes, encoded, strict=True):
                plane[rows, slots] = row

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        self.append(key, value, at)
        keys, values = (tuple(part.planes) for part in self._parts)
        own = own_token(query, key, value, scaling) if exact else None
        return self.attention(query, keys, values, at.starts, at.slots if exact else at.stops, scaling, own)[0]

    def defect(self) -> str | None:
        if not self._finite:
            self._finite.fill_(True)
            return "was given keys or values with NaN or infinity"
        return super().defect()

    def attend(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        if queries.shape[1] > 1:
            return super().attend(queries, visibility, scaling, own)
        planes = self.keys.read(visibility.tokens), self.values.read(visibility.tokens)
        out, lse = self.attention(queries[:, 0].flatten(1, 2), *planes, *visibility.packed_span(), scaling)
        packed = Partial(out.view_as(queries).float(), lse.view(queries.shape[:-1]))
        return packed if own is None else merge([packed, attend_dense(queries, *own, visibility.own(), scaling)])
