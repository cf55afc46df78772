"""The vocabulary of packed formats: frozen data that says what the bytes of a cached tensor mean.

A :class:`TensorFormat` describes one layer's keys or one layer's values, all KV heads together. It is plain data:
it can be hashed, compared, written to JSON and sent to another process, and two implementations that read the same
format must agree on every code. Nothing here imports torch.

Bits on the wire (``RotatedCodebook``), for one token of one KV head::

    x [head_dim]                              the vector as the model made it, less the centre at its position
    x_g = scales * (basis x)[group.dims]      one vector a group; most have neither scales nor basis: x[group.dims]
    n_g = |x_g|                               its Euclidean norm
    y_g = Pi_g x_g / n_g                      rotated unit vector; Pi_g orthogonal, given by group.rotation
    c_j = nearest level of y_g[j]             one code a coordinate, in the codebook of the coordinate's segment
    y'_g[j] = codebook.scale * levels[c_j]
    n'_g = n_g / |y'_g|                       norm correction: the decoded group has exactly the norm n_g
    x'_g = n'_g Pi_g^T y'_g                   what decoding returns, before scales, basis and centre are undone

A head's row is the codes of its groups in order, each code ``bits`` wide, least significant bit first, without gaps:
bit ``i`` of the row is bit ``i % 8`` of byte ``i // 8``. A row is padded with zero bits to a whole byte. A token's
codes are its heads' rows in order. Its norms are one number a group, groups in order, heads in order, each coded
by ``group.norm``.
"""

import dataclasses
import hashlib
import json
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from kvbench.kernels.codec import Codec

MAX_BITS = 8
MAX_LEVEL = 2047  # integers up to 2048 are exact in fp16, so a kernel may use levels as matrix operands


@dataclass(frozen=True)
class Codebook:
    """Reproduction levels of a b-bit code: ``scale * levels[code]``, levels ascending integers.

    Integer levels make every implementation agree exactly, and let kernels use them as integer or fp16 matrix
    operands. For instance ``Codebook(bits=2, levels=(-50, -15, 15, 50), scale=0.0302)``.
    """

    bits: int
    levels: tuple[int, ...]
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ValueError(f"a codebook has 1 to {MAX_BITS} bits, not {self.bits}")
        if len(self.levels) != 2**self.bits:
            raise ValueError(f"a {self.bits}-bit codebook has {2**self.bits} levels, not {len(self.levels)}")
        if any(b <= a for a, b in zip(self.levels, self.levels[1:], strict=False)):
            raise ValueError("codebook levels must be strictly ascending")
        if max(abs(level) for level in self.levels) > MAX_LEVEL:
            raise ValueError(f"codebook levels must not exceed {MAX_LEVEL} in magnitude")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"a codebook's scale must be positive and finite, not {self.scale}")


@dataclass(frozen=True)
class HaarRotation:
    """A Haar-random orthogonal matrix ``[dim, dim]``, named by its seed (see ``kernels.rotations.haar``)."""

    dim: int
    seed: int


@dataclass(frozen=True)
class Segment:
    """``count`` consecutive coordinates of a rotated group that share one codebook."""

    count: int
    codebook: Codebook

    @property
    def bits(self) -> int:
        return self.codebook.bits


@dataclass(frozen=True)
class Fp16Norm:
    """A group norm stored as ``float16(norm / scale)``; ``scale`` keeps huge norms inside fp16's range.

    Values past fp16's largest are stored as the largest, never as infinity.
    """

    scale: float = 1.0

    @property
    def bits(self) -> int:
        return 16


@dataclass(frozen=True)
class LogNorm:
    """A group norm stored in ``bits`` bits: code 0 is a zero norm, code ``c`` is ``2 ** (low + step * c)``.

    Norms outside the range take its nearest end. ``low`` and ``step`` are octaves, from the calibration's norms. A
    format codes all its norms this way, with one number of bits, or none. A token's norm codes are packed as its codes
    are: groups in order, heads in order, without gaps, padded to a whole byte.
    """

    low: float
    step: float
    bits: int = 8

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"a log norm has 2 to 8 bits, not {self.bits}")
        if not (math.isfinite(self.low) and math.isfinite(self.step) and self.step > 0):
            raise ValueError(f"a log norm needs a finite low and a positive step, not {self.low} and {self.step}")


@dataclass(frozen=True)
class Group:
    """Head dims that share a norm and a rotation.

    Example: two RoPE blocks of a 64-dim half-split head at 3 bits, ``dims=(0, 1, 32, 33)``.
    """

    dims: tuple[int, ...]
    rotation: HaarRotation
    segments: tuple[Segment, ...]
    norm: Fp16Norm | LogNorm = Fp16Norm()
    scales: tuple[float, ...] | None = None  # one a dim: where errors may be larger, where smaller

    def __post_init__(self) -> None:
        if sum(segment.count for segment in self.segments) != len(self.dims):
            raise ValueError(f"a group's segments must cover its {len(self.dims)} dims exactly")
        if self.rotation.dim != len(self.dims):
            raise ValueError(f"a group of {len(self.dims)} dims needs a rotation of that size")
        if self.scales is not None:
            if len(self.scales) != len(self.dims):
                raise ValueError(f"a group of {len(self.dims)} dims needs as many scales, not {len(self.scales)}")
            if not all(math.isfinite(scale) and scale > 0 for scale in self.scales):
                raise ValueError("a group's scales must be positive and finite")

    @property
    def code_bits(self) -> int:
        """Bits of codes a token takes in this group."""
        return sum(segment.count * segment.bits for segment in self.segments)


@dataclass(frozen=True)
class Basis:
    """A matrix ``[head_dim, head_dim]`` applied before grouping: float32, row by row, little-endian bytes; invertible.

    With it a group's "dims" are rows of the matrix, ``x_g = (basis x)[group.dims]``: principal axes, for instance.
    Decoding applies its inverse.
    """

    dim: int
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != 4 * self.dim**2:
            raise ValueError(f"a basis of {self.dim} dims needs {4 * self.dim**2} bytes, not {len(self.data)}")


@dataclass(frozen=True)
class HeadFormat:
    """One KV head: its groups partition the head's dims, or the axes of its ``basis`` where it has one."""

    groups: tuple[Group, ...]
    basis: Basis | None = None

    @property
    def head_dim(self) -> int:
        return sum(len(group.dims) for group in self.groups)

    @property
    def code_bits(self) -> int:
        """Bits of codes a token takes in this head."""
        return sum(group.code_bits for group in self.groups)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's row of codes: its bits padded to a whole byte."""
        return (self.code_bits + 7) // 8

    def widths(self) -> tuple[int, ...]:
        """Code width of every head dim's coordinate slot, in dim order ``[head_dim]``.

        Coordinates are rotated, so a width belongs to a dim only as far as its group does; where a group has one
        width, as Block-GTQ's have, that is exact.
        """
        widths = [0] * self.head_dim
        for group in self.groups:
            slots = [segment.bits for segment in group.segments for _ in range(segment.count)]
            for dim, bits in zip(group.dims, slots, strict=True):
                widths[dim] = bits
        return tuple(widths)


@dataclass(frozen=True)
class Centre:
    """A mean per KV head that is taken off before coding and comes back on reading.

    ``vectors`` is ``[kv_heads][head_dim]``. The dims of ``blocks`` turn with position as RoPE turns a key: block ``i``
    of the centre at position ``m`` is rotated by ``m * frequencies[i]`` radians. Other dims stay. With no blocks the
    centre is fixed, as values need it. Vectors are those of position 0 and carry any attention scaling of the model.

    With ``per_token`` it is taken off a head's vector only where that leaves less to code, ``sum of 4^-bits y^2`` over
    rotated coordinates y, and a bit a token and head says whether it was: bit ``h % 8`` of byte ``h // 8`` for head h.
    """

    vectors: tuple[tuple[float, ...], ...]
    blocks: tuple[tuple[int, int], ...] = ()
    frequencies: tuple[float, ...] = ()
    per_token: bool = False

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.frequencies):
            raise ValueError(f"{len(self.blocks)} turning blocks need as many frequencies, not {len(self.frequencies)}")


class TensorFormat(ABC):
    """How one layer's keys or values are stored: ``kv_heads`` vectors of ``head_dim`` a token."""

    kind: ClassVar[str]

    if TYPE_CHECKING:  # subclasses have these as fields or as properties

        @property
        def kv_heads(self) -> int: ...

        @property
        def head_dim(self) -> int: ...

    @property
    @abstractmethod
    def code_bits(self) -> float:
        """Mean bits a stored element, codes only: what papers call "b bits"."""

    @property
    @abstractmethod
    def bits_per_token(self) -> float:
        """All bits a token takes in this layer (codes, norms, scales), without padding: the analytical size."""

    @abstractmethod
    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        """The implementation in torch that encodes and decodes this format on ``device``."""

    def describe(self) -> dict[str, Any]:
        """The format as plain JSON data, complete enough to decode with."""
        return {"kind": self.kind, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def digest(self) -> str:
        """SHA-256 of :meth:`describe`: two formats with the same digest mean the same bytes."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True, default=bytes.hex).encode()).hexdigest()


@dataclass(frozen=True)
class RotatedCodebook(TensorFormat):
    """Norm, rotation and codebook per group of dims: TQ-MSE, Block-GTQ and their kin (see the module's text)."""

    heads: tuple[HeadFormat, ...]
    centre: Centre | None = None
    kind: ClassVar[str] = "rotated_codebook"

    def __post_init__(self) -> None:
        dims = {head.head_dim for head in self.heads}
        if len(dims) != 1:
            raise ValueError(f"all KV heads of a layer must have one head_dim, not {sorted(dims)}")
        for head in self.heads:
            if sorted(dim for group in head.groups for dim in group.dims) != list(range(self.head_dim)):
                raise ValueError("a head's groups must partition its dims")
        if self.centre and [len(vector) for vector in self.centre.vectors] != [self.head_dim] * self.kv_heads:
            raise ValueError(f"a centre needs a vector of {self.head_dim} dims for each of {self.kv_heads} KV heads")

    @property
    def kv_heads(self) -> int:
        return len(self.heads)

    @property
    def head_dim(self) -> int:
        return self.heads[0].head_dim

    @property
    def code_bits(self) -> float:
        return sum(head.code_bits for head in self.heads) / (self.kv_heads * self.head_dim)

    @property
    def bits_per_token(self) -> float:
        norms = sum(group.norm.bits for head in self.heads for group in head.groups)
        flags = self.kv_heads if self.centre and self.centre.per_token else 0
        return sum(head.code_bits for head in self.heads) + norms + flags

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of codes a token stores, all heads together, padding included."""
        return sum(head.row_bytes for head in self.heads)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.rotated_codebook import RotatedCodebookCodec

        return RotatedCodebookCodec(self, device)


@dataclass(frozen=True)
class Dense(TensorFormat):
    """Plain floating point: ``dtype`` is ``"float16"``, ``"bfloat16"`` or ``"float32"``. The fp16 baseline."""

    kv_heads: int
    head_dim: int
    dtype: str = "float16"
    kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16", "float32"):
            raise ValueError(f"a dense format stores float16, bfloat16 or float32, not {self.dtype}")

    @property
    def code_bits(self) -> float:
        return 32.0 if self.dtype == "float32" else 16.0

    @property
    def bits_per_token(self) -> float:
        return self.code_bits * self.kv_heads * self.head_dim

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench.kernels.dense import DenseCodec

        return DenseCodec(self, device)


@dataclass(frozen=True)
class CacheFormat:
    """A whole model's cache: one key format and one value format a layer."""

    key: tuple[TensorFormat, ...]
    value: tuple[TensorFormat, ...]

    def __post_init__(self) -> None:
        if len(self.key) != len(self.value):
            raise ValueError(f"{len(self.key)} key formats but {len(self.value)} value formats")

    @property
    def layers(self) -> int:
        return len(self.key)

    def digest(self) -> str:
        """SHA-256 over all layers' formats."""
        parts = [layer.digest() for layer in (*self.key, *self.value)]
        return hashlib.sha256("".join(parts).encode()).hexdigest()
