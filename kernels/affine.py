"""Codec of :class:`Affine`: b-bit integers with a scale, and mostly a zero point, per token and group of dims.

For one token of one KV head, after an optional Hadamard rotation of the head's dims::

    y = H x                                   H from kernels.hadamard, or the identity
    low, high = clip * min(y_g), clip * max(y_g)     over each group g of consecutive coordinates
    z, s = low, (high - z) / (2^b - 1)        stored as float16 multiples of ``unit``, z first
    c_j = round((y_j - z) / s)                kept within 0 .. 2^b - 1
    y'_j = z + s c_j

Symmetric: no zero point is stored, ``z = -s (2^b - 1) / 2`` with ``s = 2 clip max|y_g| / (2^b - 1)``. Codes are packed
as in :mod:`kvbench.kernels.formats`: a head's row least significant bit first, padded to a whole byte.
"""

import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import Affine
from kvbench.kernels.hadamard import random_hadamard

FP16_MAX = 65504.0


class AffineCodec(Codec):
    """Planes: ``codes`` uint8 (packed), ``scales`` float16 and, unless symmetric, ``zeros`` float16, one a group."""

    def __init__(self, format: Affine, device: torch.device | str = "cpu") -> None:
        self.format, self.device = format, torch.device(device)
        self.kv_heads, self.head_dim = heads, dim = format.kv_heads, format.head_dim
        self.layout = RowLayout([format.bits] * heads * dim, aligned=range(0, heads * dim, dim), device=self.device)
        planes = [Plane("codes", torch.uint8, self.layout.row_bytes)]
        names = ("scales",) if format.symmetric else ("scales", "zeros")
        self.planes = (*planes, *(Plane(name, torch.float16, heads * format.groups) for name in names))
        self._top = 2**format.bits - 1
        size = format.group or dim
        # a short last group repeats its last coordinate, which changes neither its minimum nor its maximum
        members = torch.arange(format.groups * size).clamp_max(dim - 1).view(format.groups, size)
        self._members = members.to(self.device)
        self._group_of = torch.arange(dim, device=self.device) // size
        self._rotation: Tensor | None = None
        if format.hadamard is not None:
            matrix = torch.from_numpy(random_hadamard(dim, format.hadamard).copy())
            self._rotation = matrix.to(self.device, torch.float32)

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        y = self.to_space(x.to(self.device))
        grouped = y[..., self._members]
        low, high = self.format.clip * grouped.amin(-1), self.format.clip * grouped.amax(-1)
        if self.format.symmetric:
            stored = [self._halves(2 * torch.maximum(-low, high) / self._top)]
        else:
            zeros = self._halves(low)
            stored = [self._halves((high - zeros.float() * self.format.unit).clamp_min(0) / self._top), zeros]
        scale, zero = self._parameters(stored)
        steps = (y - zero) / torch.where(scale > 0, scale, torch.inf)
        codes = torch.round(steps).clamp(0, self._top).to(torch.uint8)
        return (self.layout.pack(codes.flatten(-2)), *(part.flatten(-2) for part in stored))

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, *stored = planes
        scale, zero = self._parameters([part.unflatten(-1, (self.kv_heads, self.format.groups)) for part in stored])
        codes = self.layout.unpack(rows).unflatten(-1, (self.kv_heads, self.head_dim))
        return codes.float() * scale + zero

    def to_space(self, q: Tensor) -> Tensor:
        return q.float() if self._rotation is None else q.float() @ self._rotation.T

    def from_space(self, out: Tensor) -> Tensor:
        return out.float() if self._rotation is None else out.float() @ self._rotation

    def _halves(self, numbers: Tensor) -> Tensor:
        """Float16 multiples of the unit; beyond float16's range its ends, never infinity."""
        return (numbers / self.format.unit).clamp(-FP16_MAX, FP16_MAX).half()

    def _parameters(self, stored: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scale and zero point of every coordinate, float32 ``[..., kv_heads, head_dim]``."""
        scale, *zeros = (part.float().index_select(-1, self._group_of) * self.format.unit for part in stored)
        return scale, zeros[0] if zeros else scale * (-self._top / 2)
