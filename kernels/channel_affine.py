"""Codecs that encode tokens a block at a time: :class:`ChannelAffine` and :class:`TokenBlocks`.

``ChannelAffine`` is the affine arithmetic of :mod:`kvbench.kernels.affine` along tokens: each channel of a head has a
scale, and a zero point unless symmetric, for every ``group`` consecutive tokens (KIVI's keys, arXiv 2402.02750). A
block's codes are its tokens' in order, each token's heads in order, packed without gaps.
"""

import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import ChannelAffine, TokenBlocks

FP16_MAX = 65504.0


class ChannelAffineCodec(Codec):
    """Planes a block: ``codes`` uint8, ``scales`` and, unless symmetric, ``zeros`` float16, one a group and channel."""

    def __init__(self, format: ChannelAffine, device: torch.device | str = "cpu") -> None:
        self.format, self.device = format, torch.device(device)
        self.kv_heads, self.head_dim, self.block_tokens = format.kv_heads, format.head_dim, format.block_tokens
        channels = self.kv_heads * self.head_dim
        self._groups = format.block_tokens // format.group
        self.layout = RowLayout([format.bits] * (channels * format.block_tokens), device=self.device)
        names = ("scales",) if format.symmetric else ("scales", "zeros")
        self.planes = (
            Plane("codes", torch.uint8, self.layout.row_bytes),
            *(Plane(name, torch.float16, channels * self._groups) for name in names),
        )
        self._top = 2**format.bits - 1

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        y = x.to(self.device, torch.float32).flatten(-2)
        y = y.unflatten(-2, (y.shape[-2] // self.block_tokens, self._groups, self.format.group))
        low, high = y.amin(-2), y.amax(-2)  # [..., blocks, groups, channels]
        if self.format.symmetric:
            stored = [self._halves(2 * torch.maximum(-low, high) / self._top)]
        else:
            zeros = self._halves(low)
            stored = [self._halves((high - zeros.float() * self.format.unit).clamp_min(0) / self._top), zeros]
        scale, zero = self._parameters(stored)
        steps = (y - zero) / torch.where(scale > 0, scale, torch.inf)
        codes = torch.round(steps).clamp(0, self._top).to(torch.uint8)
        return (self.layout.pack(codes.flatten(-3)), *(part.flatten(-2) for part in stored))

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, *stored = planes
        scale, zero = self._parameters([part.unflatten(-1, (self._groups, -1)) for part in stored])
        codes = self.layout.unpack(rows).unflatten(-1, (self._groups, self.format.group, -1))
        return (codes.float() * scale + zero).flatten(-4, -2).unflatten(-1, (self.kv_heads, self.head_dim))

    def _halves(self, numbers: Tensor) -> Tensor:
        """Float16 multiples of the unit; beyond float16's range its ends, never infinity."""
        return (numbers / self.format.unit).clamp(-FP16_MAX, FP16_MAX).half()

    def _parameters(self, stored: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scale and zero point, float32 ``[..., blocks, groups, 1, channels]``."""
        scale, *zeros = (part.float().unsqueeze(-2) * self.format.unit for part in stored)
        return scale, zeros[0] if zeros else scale * (-self._top / 2)


class TokenBlocksCodec(Codec):
    """The planes of a per-token codec, ``block_tokens`` tokens to a row."""

    def __init__(self, format: TokenBlocks, device: torch.device | str = "cpu") -> None:
        self.kv_heads, self.head_dim, self.block_tokens = format.kv_heads, format.head_dim, format.block_tokens
        self._tokens = format.tokens.codec(device)
        self.planes = tuple(
            Plane(plane.name, plane.dtype, plane.width * format.block_tokens) for plane in self._tokens.planes
        )

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        encoded = self._tokens.encode(x, positions)
        blocks = x.shape[-3] // self.block_tokens
        return tuple(part.unflatten(-2, (blocks, self.block_tokens)).flatten(-2) for part in encoded)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        return self._tokens.decode(
            tuple(plane.unflatten(-1, (self.block_tokens, -1)).flatten(-3, -2) for plane in planes)
        )
