"""What a format's implementation offers: planes of per-token storage, encode into them, decode out of them.

A codec may work in a space of its own. Rotated formats decode to *rotated* coordinates, and attention moves the query
into that space and the output back out of it, so that no cached vector is ever un-rotated:

    logits = q . x' = to_space(q) . decode(planes)        output = from_space(sum_t p_t decode(planes)_t)
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plane:
    """One array of per-token storage: ``width`` elements of ``dtype`` a token."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


class Codec(ABC):
    """Encodes vectors ``[..., kv_heads, head_dim]`` of one layer into planes ``[..., width]``, and back."""

    kv_heads: int
    head_dim: int
    planes: tuple[Plane, ...]
    block_tokens: int = 1
    """Tokens that are encoded together. Above 1, ``encode`` takes ``[..., tokens, kv_heads, head_dim]`` with a multiple
    of it as tokens, planes are ``[..., tokens / block_tokens, width]``, and the codec's space is the model's."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes in storage, padding included."""
        row = sum(plane.bytes_per_token for plane in self.planes)
        return row if self.block_tokens == 1 else row / self.block_tokens

    @property
    def constant_bytes(self) -> int:
        """Bytes that the format itself takes, once for the layer whatever the number of tokens (centres, bases)."""
        return 0

    @abstractmethod
    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """Encode ``x [..., kv_heads, head_dim]`` (floating point); one tensor ``[..., width]`` a plane.

        ``positions [...]`` int64 is each vector's position in its sequence, from 0 where None; only formats with a
        centre that turns with RoPE look at it. Raises ValueError on NaN or infinity.
        """

    @abstractmethod
    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        """Decode planes to float32 ``[..., kv_heads, head_dim]`` in the codec's own space."""

    def to_space(self, q: Tensor) -> Tensor:
        """Move queries ``[..., kv_heads, group, head_dim]`` into the codec's space (float32)."""
        return q.float()

    def from_space(self, out: Tensor) -> Tensor:
        """Move outputs ``[..., kv_heads, group, head_dim]`` out of the codec's space (float32)."""
        return out.float()

    def centre(self, positions: Tensor) -> Tensor | None:
        """What encoding took off at ``positions [...]`` and decoding leaves off, ``[..., kv_heads, head_dim]``, not in
        the codec's space; None of a format that takes nothing off.
        """
        return None

    def centred(self, planes: tuple[Tensor, ...]) -> Tensor | None:
        """Which vectors the centre was taken off, bool ``[..., kv_heads]``; None where it is all of them, or none."""
        return None

    def output_offset(self) -> Tensor | None:
        """What normalised sums of decoded values lack because encoding took it off each: ``[kv_heads, head_dim]``.

        Softmax weights sum to one, so a fixed mean comes back whole. Raises ValueError for a centre that turns.
        """
        return None

    def centre_logits(self, queries: Tensor, first: Tensor, count: int) -> Tensor | None:
        """Products of ``queries [batch, queries, kv_heads, group, head_dim]``, not in the codec's space, with the
        centre at positions ``first[b] .. first[b] + count - 1``: ``[batch, queries, kv_heads, group, count]``, or None.
        """
        return None

    def restore(self, planes: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Decode to float32 ``[..., kv_heads, head_dim]`` as the model made it; ``positions [...]``."""
        x = self.from_space(self.decode(planes).unsqueeze(-2)).squeeze(-2)
        centre, centred = self.centre(positions), self.centred(planes)
        if centre is None:
            return x
        return x + centre if centred is None else x + centre * centred[..., None]

    def reconstruct(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Encode and decode ``x [..., kv_heads, head_dim]``: what the cache would hand back, float32."""
        if positions is None:
            positions = torch.zeros(x.shape[:-2], dtype=torch.long, device=x.device)
        return self.restore(self.encode(x, positions), positions)
