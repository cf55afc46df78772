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

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in storage, padding included."""
        return sum(plane.bytes_per_token for plane in self.planes)

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """Encode ``x [..., kv_heads, head_dim]`` (floating point); one tensor ``[..., width]`` a plane.

        Raises ValueError on NaN or infinity.
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

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode and decode ``x [..., kv_heads, head_dim]``: what the cache would hand back, float32."""
        y = self.decode(self.encode(x))
        return self.from_space(y.unsqueeze(-2)).squeeze(-2)
