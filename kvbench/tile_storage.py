"""Storage of one layer in tile pages: written and read by Triton kernels, keys and values in one buffer."""

from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvbench.decode_step import Span, own_token
from kvbench.kernels.attention import Partial, attend_dense, attend_packed, merge
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.kernels.tile_attention import NewToken, TileAttention
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_prefill import TilePrefill
from kvbench.kernels.tiles import TileLayout
from kvbench.page_storage import PageStorage

if TYPE_CHECKING:
    from kvbench.visibility import Visibility


class TileKernels:
    """What reads and writes pages of one layout on one device: kernels' tables and the reference's codecs."""

    def __init__(self, layout: TileLayout, device: torch.device) -> None:
        self.layout = layout
        self.encode, self.attend = TileEncoder(layout, device), TileAttention(layout, device)
        self.attend_rotated = copy(self.attend)  # with the same tables
        self.attend_rotated.rotate_output = False
        self.prefill = TilePrefill(layout, device)
        self.key_codec = cast(RotatedCodebookCodec, layout.key_format.codec(device))
        self.value_codec = cast(RotatedCodebookCodec, layout.value_format.codec(device))


@lru_cache(maxsize=256)  # caches come and go; a layer's tables stay the same
def _kernels(layout: TileLayout, device: torch.device) -> TileKernels:
    return TileKernels(layout, device)


class TileStorage(PageStorage):
    """Pages ``[batch, pages, page_bytes]`` of one layer (see :class:`kvbench.layer_storage.LayerStorage`).

    Slot ``t`` of a sequence, left padding included, is token ``t % 128`` of its page ``t // 128``. Numbers that are not
    finite raise a flag on the device; :meth:`defect` reads it. Decode steps need no host
    (:class:`kvbench.decode_step.StepStorage`).
    """

    layout: TileLayout

    def __init__(self, layout: TileLayout, batch: int, capacity: int, device: torch.device, why: str) -> None:
        super().__init__(layout, batch, capacity, device, why)
        self.kernels = _kernels(layout, device)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the pages and of the formats' constants, keys' part and values' part."""
        total = self.pages.untyped_storage().nbytes()
        key_codes, value_codes, key_norms, value_norms = self.layout.offsets[: self.layout.kv_heads].T
        of_keys = int((value_codes - key_codes + value_norms - key_norms).sum())
        keys = total // self.layout.page_bytes * of_keys
        constants = self.kernels.key_codec.constant_bytes, self.kernels.value_codec.constant_bytes
        return keys + constants[0], total - keys + constants[1]

    def write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        firsts = torch.full((self.batch,), first, dtype=torch.int32, device=self.pages.device)
        self.kernels.encode(keys, values, self.pages, firsts, (first - positions[:, 0]).to(torch.int32))

    def append(self, key: Tensor, value: Tensor, at: Span) -> None:
        self.kernels.encode(key[:, None], value[:, None], self.pages, at.slots, at.starts)

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: Span, scaling: float, exact: bool) -> Tensor:
        own = own_token(query, key, value, scaling) if exact else None
        stops, new = at.slots if exact else at.stops, self.new_token(key, value, at)
        return self.kernels.attend(query, self.pages, at.starts, stops, scaling, own, new)[0]

    def new_token(self, key: Tensor, value: Tensor, at: Span) -> NewToken:
        """A step's token, for attention to store."""
        return NewToken(self.kernels.encode, key[:, None], value[:, None], at.slots, at.starts)

    def attend(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        if queries.shape[1] == 1:
            return self._attend_token(queries, visibility, scaling, own)
        if visibility.options.recent_window:  # every query reads another span of packed tokens: the reference's work
            codecs, planes = (self.kernels.key_codec, self.kernels.value_codec), self._planes(visibility.tokens)
            return attend_packed(queries, *codecs, *planes, visibility.packed, scaling, visibility.starts)
        starts, _ = visibility.packed_span()
        origins = visibility.starts.to(torch.int32)
        query = queries.flatten(2, 3).contiguous()
        out, lse = self.kernels.prefill(query, self.pages, starts, visibility.first, scaling, own, origins=origins)
        return Partial(out.view_as(queries).float(), lse.view(queries.shape[:-1]))

    def _attend_token(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        starts, stops = visibility.packed_span()
        origins = visibility.starts.to(torch.int32)
        query = queries[:, 0].flatten(1, 2)
        out, lse = self.kernels.attend(query, self.pages, starts, stops, scaling, origins=origins)
        packed = Partial(out.view_as(queries).float(), lse.view(queries.shape[:-1]))
        return packed if own is None else merge([packed, attend_dense(queries, *own, visibility.own(), scaling)])

    def _planes(self, tokens: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The first ``tokens`` slots as the reference codecs' planes ``[batch, tokens, width]``."""
        parts = [self.layout.unpack(row, tokens) for row in self.pages]
        key_codes, key_norms, value_codes, value_norms = (torch.stack(part) for part in zip(*parts, strict=True))
        return (
            (self.kernels.key_codec.layout.pack(key_codes.flatten(-2)), key_norms),
            (self.kernels.value_codec.layout.pack(value_codes.flatten(-2)), value_norms),
        )

    def decode(self, tokens: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._planes(tokens)
        return self.kernels.key_codec.restore(keys, positions), self.kernels.value_codec.restore(values, positions)

    def saw_numbers_not_finite(self) -> bool:
        if not bool(self.kernels.encode.flag):
            return False
        self.kernels.encode.flag.zero_()
        return True
