"""Storage of one layer without quantization, laid out for the library's attention: the fp16 baseline on a GPU."""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvbench.kernels import fp16_attention
from kvbench.kernels.attention import Partial
from kvbench.plane_storage import repeat_slots

if TYPE_CHECKING:
    from kvbench.decode_step import Span
    from kvbench.visibility import Visibility

GROWTH = 1.5  # storage grows by this factor, so appending costs amortised constant time


class DenseStorage:
    """Keys and values ``[batch, kv_heads, capacity, head_dim]`` (see :class:`kvbench.layer_storage.LayerStorage`).

    ``attention`` names what :meth:`step` attends with. Entries of :data:`fp16_attention.TRITON_SHAPES` read lengths on
    the device, ``torch-math`` masks by them. Others of :data:`fp16_attention.IMPLEMENTATIONS` cannot: they read all of
    the capacity whatever is in use, which is right only when it is full, and good for timing a context of that length.
    """

    backend, why, lossless = "torch", "keys and values are stored as they are", True

    def __init__(self, batch: int, capacity: int, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(batch, states.shape[1], capacity, states.shape[3]) for states in (keys, values)
        )
        on_device = keys.is_cuda and "triton-128" in fp16_attention.available(keys.device)
        self.attention = "triton-128" if on_device else "torch-math"

    @property
    def batch(self) -> int:
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> tuple[int, int]:
        return self.keys.untyped_storage().nbytes(), self.values.untyped_storage().nbytes()

    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        more = max(tokens, int(self.capacity * GROWTH)) - self.capacity
        self.keys, self.values = (F.pad(part, (0, 0, 0, more)) for part in (self.keys, self.values))

    def write(self, first: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        for part, states in ((self.keys, keys), (self.values, values)):
            part[:, :, first : first + states.shape[1]] = states.transpose(1, 2)

    def append(self, key: Tensor, value: Tensor, at: "Span") -> None:
        if self.attention == "torch-math":
            rows, slots = torch.arange(self.batch, device=key.device), at.slots.long()
            self.keys[rows, :, slots], self.values[rows, :, slots] = key, value
        else:
            fp16_attention.append(key, value, self.keys, self.values, at.slots)

    def step(self, query: Tensor, key: Tensor, value: Tensor, at: "Span", scaling: float, exact: bool) -> Tensor:
        self.append(key, value, at)
        dim = query.shape[-1]
        if not math.isclose(scaling * math.sqrt(dim), 1.0):  # the implementations' own scale
            query = query * (scaling * math.sqrt(dim))
        if self.attention == "torch-math":
            slots = torch.arange(self.capacity, device=query.device)
            visible = (slots >= at.starts[:, None]) & (slots < at.stops[:, None])
            mask, queries = visible[:, None, None], query[:, :, None]
            return F.scaled_dot_product_attention(queries, self.keys, self.values, mask, enable_gqa=True)[:, :, 0]
        if self.attention in fp16_attention.TRITON_SHAPES:
            return fp16_attention.split_kv(self.attention, query, self.keys, self.values, (at.starts, at.stops))
        return fp16_attention.decode(self.attention, query, self.keys, self.values)

    def attend(
        self, queries: Tensor, visibility: "Visibility", scaling: float, own: tuple[Tensor, Tensor] | None
    ) -> Partial:
        """See the protocol; ``lse`` is not computed (NaN), since a lossless layer has no windows to merge with."""
        batch, count, heads, group, dim = queries.shape
        query = queries.reshape(batch, count, heads * group, dim).transpose(1, 2)
        if visibility.mask is None:
            out = self._causal(query, slice(None), 0, visibility.tokens, scaling)
        else:
            out = torch.zeros_like(query)
            for row, start in enumerate(visibility.starts.tolist()):
                skipped = max(0, start - visibility.first)  # queries that are padding themselves
                part = query[row : row + 1, :, skipped:]
                out[row, :, skipped:] = self._causal(part, slice(row, row + 1), start, visibility.tokens, scaling)[0]
        shaped = out.transpose(1, 2).reshape(batch, count, heads, group, -1)
        return Partial(shaped, torch.full(shaped.shape[:-1], torch.nan, device=query.device))

    def _causal(self, query: Tensor, rows: slice, start: int, stop: int, scaling: float) -> Tensor:
        """Causal attention of the last slots' queries ``[rows, q_heads, queries, dim]`` over ``start..stop``."""
        keys, values = self.keys[rows, :, start:stop], self.values[rows, :, start:stop]
        mask = causal_lower_right(query.shape[2], stop - start) if query.shape[2] > 1 else None
        return F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)

    def decode(self, tokens: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (part[:, :, :tokens].transpose(1, 2).float() for part in (self.keys, self.values))
        return keys, values

    def defect(self) -> str | None:
        return None

    def repeat(self, present: int, total: int) -> None:
        for part in (self.keys, self.values):
            repeat_slots(part.transpose(1, 2), present, total)

    def crop(self, length: int) -> None:
        """Nothing to do: slots past the length in use are overwritten."""

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = (part.index_select(0, rows.to(part.device)) for part in (self.keys, self.values))

    def move(self, device: torch.device | str) -> None:
        self.keys, self.values = (part.to(device, non_blocking=True) for part in (self.keys, self.values))
