"""Formats of the methods that people compare with: integers, small floats, codebooks with outliers, TurboQuant-prod.

Frozen data like :mod:`kvbench.kernels.formats`, and like it free of torch. What the bytes mean is said where each codec
is: :mod:`~kvbench.kernels.affine`, :mod:`~kvbench.kernels.float8`, :mod:`~kvbench.kernels.block_float4`,
:mod:`~kvbench.kernels.turboquant_prod`, :mod:`~kvbench.kernels.channel_affine`, :mod:`~kvbench.kernels.nonuniform`.
"""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.kernels.formats import MAX_BITS, Fp16Norm, RotatedCodebook, TensorFormat

if TYPE_CHECKING:
    import torch

    from kvbench.kernels.codec import Codec

FLOAT8_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
FLOAT4_LARGEST = 6.0


@dataclass(frozen=True)
class Affine(TensorFormat):
    """Integers per token and group of ``group`` dims (None: the head's dims together).

    For instance ``Affine(kv_heads=8, head_dim=128, bits=4, group=32)``. ``hadamard`` seeds the rotation, None for none.
    """

    kv_heads: int
    head_dim: int
    bits: int
    group: int | None = None
    symmetric: bool = False
    clip: float = 1.0
    hadamard: int | None = None
    unit: float = 1.0
    kind: ClassVar[str] = "affine"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"an affine format has 1 to {MAX_BITS} bits, not {self.bits}")
        if self.group is not None and not 1 <= self.group <= self.head_dim:
            raise ValueError(f"a group has 1 to {self.head_dim} dims, not {self.group}")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip is a fraction of the range, above 0 and at most 1, not {self.clip}")

    @property
    def groups(self) -> int:
        """Groups a head; the last one is shorter where the group does not divide the head_dim."""
        return -(-self.head_dim // (self.group or self.head_dim))

    @property
    def code_bits(self) -> float:
        return float(self.bits)

    @property
    def bits_per_token(self) -> float:
        stored = 16 if self.symmetric else 32
        return self.kv_heads * (self.bits * self.head_dim + stored * self.groups)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.affine import AffineCodec

        return AffineCodec(self, device)


@dataclass(frozen=True)
class Float8(TensorFormat):
    """``x`` of head h is stored as ``float8(x / scales[h])``; numbers beyond the range take its end."""

    kv_heads: int
    head_dim: int
    encoding: str
    scales: tuple[float, ...]
    kind: ClassVar[str] = "float8"

    def __post_init__(self) -> None:
        if self.encoding not in FLOAT8_LARGEST:
            raise ValueError(f"an 8-bit float is {' or '.join(FLOAT8_LARGEST)}, not {self.encoding}")
        if len(self.scales) != self.kv_heads:
            raise ValueError(f"{len(self.scales)} scales for {self.kv_heads} KV heads")

    @property
    def code_bits(self) -> float:
        return 8.0

    @property
    def bits_per_token(self) -> float:
        return 8.0 * self.kv_heads * self.head_dim

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.float8 import Float8Codec

        return Float8Codec(self, device)


@dataclass(frozen=True)
class BlockFloat4(TensorFormat):
    """4-bit floats in blocks of ``block`` dims; ``scale`` is ``"e8m0"`` (MXFP4) or ``"e4m3"`` (NVFP4).

    ``tensor_scale`` is the unit of e4m3 scales; e8m0 has none.
    """

    kv_heads: int
    head_dim: int
    block: int
    scale: str
    tensor_scale: float = 1.0
    kind: ClassVar[str] = "block_float4"

    def __post_init__(self) -> None:
        if self.scale not in ("e8m0", "e4m3"):
            raise ValueError(f"a block's scale is e8m0 or e4m3, not {self.scale}")
        if not (math.isfinite(self.tensor_scale) and self.tensor_scale > 0):
            raise ValueError(f"a tensor's scale must be positive and finite, not {self.tensor_scale}")

    @property
    def blocks(self) -> int:
        """Blocks a head."""
        return -(-self.head_dim // self.block)

    @property
    def code_bits(self) -> float:
        return 4.0

    @property
    def bits_per_token(self) -> float:
        return self.kv_heads * (4.0 * self.head_dim + 8.0 * self.blocks)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.block_float4 import BlockFloat4Codec

        return BlockFloat4Codec(self, device)


@dataclass(frozen=True)
class TurboQuantProd(TensorFormat):
    """``mse`` with b - 1 bits, and the signs of ``head_dim`` Gaussian projections of what it leaves.

    ``seed`` gives S of KV head h as ``gaussian(seed + h, ...)``; the residual's norm is stored by ``norm``.
    """

    mse: RotatedCodebook
    seed: int
    norm: Fp16Norm
    kind: ClassVar[str] = "turboquant_prod"

    @property
    def kv_heads(self) -> int:
        return self.mse.kv_heads

    @property
    def head_dim(self) -> int:
        return self.mse.head_dim

    @property
    def code_bits(self) -> float:
        return self.mse.code_bits + 1

    @property
    def bits_per_token(self) -> float:
        return self.mse.bits_per_token + self.kv_heads * (self.head_dim + self.norm.bits)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.turboquant_prod import TurboQuantProdCodec

        return TurboQuantProdCodec(self, device)


@dataclass(frozen=True)
class ChannelAffine(TensorFormat):
    """Integers with a scale and a zero point per channel and ``group`` consecutive tokens, encoded a block at a time.

    Tokens that do not fill a block of ``block_tokens`` yet stay in full precision. For instance
    ``ChannelAffine(kv_heads=8, head_dim=128, bits=2, group=32, block_tokens=128)``.
    """

    kv_heads: int
    head_dim: int
    bits: int
    group: int
    block_tokens: int
    symmetric: bool = False
    unit: float = 1.0
    kind: ClassVar[str] = "channel_affine"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"an affine format has 1 to {MAX_BITS} bits, not {self.bits}")
        if self.group < 1 or self.block_tokens < 2 or self.block_tokens % self.group:
            raise ValueError(
                f"a block of at least 2 tokens is a whole number of groups, not {self.block_tokens} of {self.group}"
            )

    @property
    def code_bits(self) -> float:
        return float(self.bits)

    @property
    def bits_per_token(self) -> float:
        return self.kv_heads * self.head_dim * (self.bits + (16 if self.symmetric else 32) / self.group)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.channel_affine import ChannelAffineCodec

        return ChannelAffineCodec(self, device)


@dataclass(frozen=True)
class TokenBlocks(TensorFormat):
    """Tokens in the format ``tokens``, encoded when they fill a block of ``block_tokens``.

    Until then they stay in full precision. ``tokens`` has no rotation: its space must be the model's own.
    """

    tokens: Affine
    block_tokens: int
    kind: ClassVar[str] = "token_blocks"

    def __post_init__(self) -> None:
        if self.tokens.hadamard is not None or self.block_tokens < 2:
            raise ValueError("blocks of tokens hold at least 2, in a format without a rotation")

    @property
    def kv_heads(self) -> int:
        return self.tokens.kv_heads

    @property
    def head_dim(self) -> int:
        return self.tokens.head_dim

    @property
    def code_bits(self) -> float:
        return self.tokens.code_bits

    @property
    def bits_per_token(self) -> float:
        return self.tokens.bits_per_token

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.channel_affine import TokenBlocksCodec

        return TokenBlocksCodec(self, device)


@dataclass(frozen=True)
class NonUniform(TensorFormat):
    """Codes into one table of ``levels``, and a token's ``outliers`` farthest numbers apart, in float16.

    ``levels`` are 2^b rising numbers, mostly within -1 .. 1. With ``ranges`` ``[kv_heads][head_dim]`` of (middle, half
    width) they are scaled by channel, and nothing but codes and outliers is stored; without, by the token's own range,
    which is stored. ``unit`` is that of stored float16 numbers.
    """

    kv_heads: int
    head_dim: int
    levels: tuple[float, ...]
    outliers: int
    ranges: tuple[tuple[tuple[float, float], ...], ...] | None = None
    unit: float = 1.0
    kind: ClassVar[str] = "nonuniform"

    def __post_init__(self) -> None:
        if len(self.levels) != 1 << self.bits or not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"a table has 2, 4, ... or {1 << MAX_BITS} levels, not {len(self.levels)}")
        if any(low >= high for low, high in itertools.pairwise(self.levels)):
            raise ValueError("levels must rise")
        if not 0 <= self.outliers < self.kv_heads * self.head_dim:
            raise ValueError(f"{self.outliers} outliers among {self.kv_heads * self.head_dim} numbers of a token")
        if self.ranges is not None and [len(head) for head in self.ranges] != [self.head_dim] * self.kv_heads:
            raise ValueError(f"ranges are needed for each of {self.kv_heads} KV heads of {self.head_dim} dims")
        if self.ranges is not None and not all(width > 0 for head in self.ranges for _, width in head):
            raise ValueError("half widths of ranges must be positive")

    @property
    def bits(self) -> int:
        """Bits a code."""
        return (len(self.levels) - 1).bit_length()

    @property
    def index_bits(self) -> int:
        """Bits that say which number of a token an outlier is."""
        return 8 if self.kv_heads * self.head_dim <= 256 else 16

    @property
    def code_bits(self) -> float:
        return float(self.bits)

    @property
    def bits_per_token(self) -> float:
        stored = 32 if self.ranges is None else 0
        return self.kv_heads * self.head_dim * self.bits + self.outliers * (self.index_bits + 16) + stored

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.nonuniform import NonUniformCodec

        return NonUniformCodec(self, device)
