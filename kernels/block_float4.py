"""Codec of :class:`BlockFloat4`: 4-bit floats in blocks of consecutive dims that share a scale (MXFP4, NVFP4).

Elements are e2m1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even mantissa. MXFP4 (OCP Microscaling
Formats 1.0): blocks of 32, the scale a power of two, ``2^(floor(log2 max|x|) - 2)``, stored as e8m0. NVFP4 (NVIDIA
Blackwell): blocks of 16, the scale ``max|x| / 6`` as e4m3 of a fixed float32 scale a tensor. A block at the end of a
head is shorter where the block does not divide the head_dim.
"""

from itertools import pairwise

import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import BlockFloat4

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_EXPONENT = 2  # of 6.0
E8M0_BIAS, E8M0_TOP = 127, 254  # 255 is NaN
E4M3_MAX = 448.0
SIGN = 8  # bit of a code


def _thresholds() -> Tensor:
    """What a magnitude must exceed to take each next level; where a tie goes up, the number just below the tie."""
    ties = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
    even = torch.tensor(ties)
    just_below = torch.nextafter(even, torch.zeros_like(even))
    upward = torch.tensor([index % 2 == 1 for index in range(len(ties))])
    return torch.where(upward, just_below, even)


class BlockFloat4Codec(Codec):
    """Planes: ``codes`` uint8 (two to a byte) and ``scales`` uint8, one a block."""

    def __init__(self, format: BlockFloat4, device: torch.device | str = "cpu") -> None:
        self.format, self.device = format, torch.device(device)
        self.kv_heads, self.head_dim = heads, dim = format.kv_heads, format.head_dim
        self.layout = RowLayout([4] * heads * dim, aligned=range(0, heads * dim, dim), device=self.device)
        self.planes = (
            Plane("codes", torch.uint8, self.layout.row_bytes),
            Plane("scales", torch.uint8, heads * format.blocks),
        )
        members = torch.arange(format.blocks * format.block).clamp_max(dim - 1).view(format.blocks, format.block)
        self._members = members.to(self.device)
        self._block_of = torch.arange(dim, device=self.device) // format.block
        self._thresholds = _thresholds().to(self.device)
        self._levels = torch.tensor([*MAGNITUDES, *(-level for level in MAGNITUDES)], device=self.device)

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        y = x.to(self.device, torch.float32)
        scales = self._encode_scales(y[..., self._members].abs().amax(-1))
        scale = self._decode_scales(scales)
        scaled = y / torch.where(scale > 0, scale, torch.inf)
        codes = torch.searchsorted(self._thresholds, scaled.abs().contiguous())
        codes = codes.to(torch.uint8) + SIGN * (scaled < 0).to(torch.uint8)
        return self.layout.pack(codes.flatten(-2)), scales.flatten(-2)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, scales = planes
        codes = self.layout.unpack(rows).unflatten(-1, (self.kv_heads, self.head_dim))
        return self._levels[codes.long()] * self._decode_scales(
            scales.unflatten(-1, (self.kv_heads, self.format.blocks))
        )

    def _encode_scales(self, peaks: Tensor) -> Tensor:
        """Stored scales uint8 ``[..., blocks]`` for blocks whose largest magnitudes are ``peaks``."""
        if self.format.scale == "e8m0":
            exponent = torch.frexp(peaks).exponent - 1 - LARGEST_EXPONENT
            exponent = torch.where(peaks > 0, exponent, -E8M0_BIAS)
            return (exponent + E8M0_BIAS).clamp(0, E8M0_TOP).to(torch.uint8)
        wanted = peaks / (MAGNITUDES[-1] * self.format.tensor_scale)
        return wanted.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

    def _decode_scales(self, stored: Tensor) -> Tensor:
        """The scale of every coordinate, float32 ``[..., head_dim]``."""
        if self.format.scale == "e8m0":
            scale = torch.exp2(stored.float() - E8M0_BIAS)
        else:
            scale = stored.contiguous().view(torch.float8_e4m3fn).float() * self.format.tensor_scale
        return scale.index_select(-1, self._block_of)
