"""Reference codec of :class:`RotatedCodebook` in torch: every head and group of a layer at once.

All groups of a head are rotated by one block-diagonal matrix ``[head_dim, head_dim]`` whose rows are coordinates in
storage order and whose columns are head dims, so permuting into groups and rotating is one product a head.
Arithmetic is float32. A coordinate exactly between two levels takes the lower code.
"""

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.centre import CentreTerm
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.formats import Codebook, Fp16Norm, Group, HeadFormat, LogNorm, RotatedCodebook, Segment
from kvbench.kernels.rotations import haar

FP16_MAX = 65504.0


def head_rotation(head: HeadFormat) -> np.ndarray:
    """The head's rotation, orthogonal, float64 ``[coordinate, dim]``: permutation, then each group's."""
    matrix = np.zeros((head.head_dim, head.head_dim))
    start = 0
    for group in head.groups:
        stop = start + len(group.dims)
        matrix[start:stop, list(group.dims)] = haar(group.rotation.dim, group.rotation.seed)
        start = stop
    return matrix


def head_scales(head: HeadFormat) -> np.ndarray:
    """What each row of the head's basis, or each dim, is multiplied by before rotation, float64 ``[head_dim]``."""
    scales = np.ones(head.head_dim)
    for group in head.groups:
        if group.scales is not None:
            scales[list(group.dims)] = group.scales
    return scales


def head_matrices(head: HeadFormat) -> tuple[np.ndarray, np.ndarray]:
    """The matrices ``[coordinate, dim]`` that encoding multiplies vectors by, and queries are multiplied by.

    The second is the first's inverse transposed, so that products of queries and vectors stay what they are, and its
    transpose brings decoded coordinates back. They are equal where the head has neither scales nor basis.
    """
    scales, rotation = head_scales(head), head_rotation(head)
    if head.basis is None:
        return rotation * scales, rotation / scales
    basis = np.frombuffer(head.basis.data, dtype="<f4").reshape(rotation.shape).astype(np.float64)
    return rotation @ (scales[:, None] * basis), rotation @ (np.linalg.inv(basis).T / scales[:, None])


def head_segments(head: HeadFormat) -> list[Segment]:
    """The segment of every coordinate, in storage order."""
    return [segment for group in head.groups for segment in group.segments for _ in range(segment.count)]


class Fp16NormCoder:
    """Stores norms ``[n, groups]`` as float16 multiples of each group's scale."""

    dtype = torch.float16

    def __init__(self, codes: list[Fp16Norm], device: torch.device) -> None:
        self._scale = torch.tensor([code.scale for code in codes], device=device)
        self.width = len(codes)

    def encode(self, norms: Tensor) -> Tensor:
        return (norms / self._scale).clamp_max(FP16_MAX).to(self.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        return stored.float() * self._scale

    def pack(self, codes: Tensor) -> Tensor:
        return codes

    def unpack(self, stored: Tensor) -> Tensor:
        return stored


class LogNormCoder:
    """Stores norms ``[n, groups]`` as packed codes ``[n, bytes]``, steps of each group's logarithmic scale."""

    dtype = torch.uint8

    def __init__(self, codes: list[LogNorm], device: torch.device) -> None:
        self._low = torch.tensor([code.low for code in codes], device=device)
        self._step = torch.tensor([code.step for code in codes], device=device)
        self._layout = RowLayout([code.bits for code in codes], device=device)
        self._largest = 2 ** codes[0].bits - 1
        self.width = self._layout.row_bytes

    def encode(self, norms: Tensor) -> Tensor:
        steps = torch.round((torch.log2(norms) - self._low) / self._step).clamp(1, self._largest)
        return self.pack(torch.where(norms > 0, steps, 0).to(self.dtype))

    def decode(self, stored: Tensor) -> Tensor:
        codes = self.unpack(stored)
        return torch.where(codes > 0, torch.exp2(self._low + self._step * codes), 0.0)

    def pack(self, codes: Tensor) -> Tensor:
        return self._layout.pack(codes)

    def unpack(self, stored: Tensor) -> Tensor:
        return self._layout.unpack(stored)


def norm_coder(groups: list[Group], device: torch.device) -> Fp16NormCoder | LogNormCoder:
    """The coder of all norms of a tensor, which must be of one kind."""
    norms = [group.norm for group in groups]
    if all(isinstance(norm, LogNorm) for norm in norms) and len({norm.bits for norm in norms}) == 1:
        return LogNormCoder([norm for norm in norms if isinstance(norm, LogNorm)], device)
    if all(isinstance(norm, Fp16Norm) for norm in norms):
        return Fp16NormCoder([norm for norm in norms if isinstance(norm, Fp16Norm)], device)
    raise ValueError("a format's norms must be all fp16, or all log codes of one number of bits")


class RotatedCodebookCodec(Codec):
    """Planes: ``codes`` uint8 (packed rows of all heads) and ``norms``, float16 or uint8 log codes (one a group).

    Where the centre is taken off token by token, a plane ``centred`` of a bit a head says whether it was.
    """

    def __init__(self, format: RotatedCodebook, device: torch.device | str = "cpu") -> None:
        self.kv_heads, self.head_dim = format.kv_heads, format.head_dim
        self.device = torch.device(device)
        segments = [segment for head in format.heads for segment in head_segments(head)]
        widths = [segment.bits for segment in segments]
        starts = range(0, self.kv_heads * self.head_dim, self.head_dim)
        self.layout = RowLayout(widths, aligned=starts, device=self.device)
        groups = [group for head in format.heads for group in head.groups]
        self._norms = norm_coder(groups, self.device)
        self._flags = RowLayout([1] * self.kv_heads, device=self.device)
        self._chooses = format.centre is not None and format.centre.per_token
        self.planes = (
            Plane("codes", torch.uint8, self.layout.row_bytes),
            Plane("norms", self._norms.dtype, self._norms.width),
            *([Plane("centred", torch.uint8, self._flags.row_bytes)] if self._chooses else []),
        )
        written, read = zip(*(head_matrices(head) for head in format.heads), strict=True)
        self._write = torch.from_numpy(np.stack(written)).to(self.device, torch.float32)
        skewed = any(head.basis or group.scales for head in format.heads for group in head.groups)
        self._read = torch.from_numpy(np.stack(read)).to(self.device, torch.float32) if skewed else self._write
        bits = torch.tensor(widths, dtype=torch.float32, device=self.device)
        self._error_weights = torch.exp2(-2 * bits).reshape(self.kv_heads, self.head_dim)
        group_of = [index for index, group in enumerate(groups) for _ in group.dims]
        self._group_of = torch.tensor(group_of, device=self.device)
        self._groups = len(groups)
        self._centre = CentreTerm(format.centre, self.device) if format.centre else None
        self._constants = sum(len(head.basis.data) for head in format.heads if head.basis)
        self._constants += sum(4 * len(group.scales) for group in groups if group.scales)
        books = list(dict.fromkeys(segment.codebook for segment in segments))
        number = {book: index for index, book in enumerate(books)}
        self._book_of = torch.tensor([number[segment.codebook] for segment in segments], device=self.device)
        self._levels, self._thresholds = self._tables(books)

    def _tables(self, books: list[Codebook]) -> tuple[Tensor, Tensor]:
        """Levels ``[codebooks, 2^b]`` and the midpoints between them, padded with infinity to one length."""
        longest = max(len(book.levels) for book in books)
        levels = np.full((len(books), longest), np.inf, dtype=np.float32)
        for row, book in zip(levels, books, strict=True):
            exact = np.array(book.levels, dtype=np.float32)
            row[: len(exact)] = np.float32(book.scale) * exact
        thresholds = (levels[:, 1:] + levels[:, :-1]) / np.float32(2)
        return torch.from_numpy(levels).to(self.device), torch.from_numpy(thresholds).to(self.device)

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        encoded, norms = self._encode(x, positions)
        if not torch.isfinite(norms).all():
            raise ValueError(f"a vector with elements up to {x.abs().max():.4g} has a norm that overflows float32")
        return encoded

    def encode_unchecked(self, x: Tensor, positions: Tensor | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """:meth:`encode` without waiting for the device: the planes, and whether all was finite, bool ``[]``."""
        encoded, norms = self._encode(x, positions)
        return encoded, torch.isfinite(norms).all()  # a vector with NaN or infinity has such a norm

    def _encode(self, x: Tensor, positions: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
        """The planes, and the norms ``[n, groups]`` of what was encoded."""
        lead = x.shape[:-2]
        flags: tuple[Tensor, ...] = ()
        if self._centre is None:
            rotated = self._rotate(x)
        else:
            at = torch.zeros(lead, dtype=torch.long, device=x.device) if positions is None else positions
            rotated = self._rotate(x.float() - self._centre.at(at))
            if self._chooses:
                plain = self._rotate(x)
                taken = self._error(rotated) <= self._error(plain)
                rotated = torch.where(taken[..., None], rotated, plain)
                flags = (self._flags.pack(taken.to(torch.uint8)),)
        rotated = rotated.flatten(-2)
        norms = self._group_norms(rotated)
        unit = rotated / norms.clamp_min(torch.finfo(torch.float32).tiny)[:, self._group_of]
        codes = torch.searchsorted(self._thresholds[self._book_of], unit.T.contiguous()).to(torch.uint8).T
        corrected = norms / self._group_norms(self._values(codes))
        encoded = (self.layout.pack(codes), self._norms.encode(corrected), *flags)
        return tuple(part.reshape(*lead, part.shape[-1]) for part in encoded), norms

    @property
    def norm_dtype(self) -> torch.dtype:
        """The type of a norm as stored: float16, or uint8 for a log code."""
        return self._norms.dtype

    def unpack_norms(self, stored: Tensor) -> Tensor:
        """The plane of norms ``[..., width]`` as an element a norm ``[..., norms]``, log codes unpacked."""
        return self._norms.unpack(stored)

    def pack_norms(self, norms: Tensor) -> Tensor:
        """The inverse of :meth:`unpack_norms`."""
        return self._norms.pack(norms)

    @property
    def constant_bytes(self) -> int:
        return self._constants + (self._centre.nbytes if self._centre else 0)

    def centre(self, positions: Tensor) -> Tensor | None:
        return self._centre.at(positions) if self._centre else None

    def centred(self, planes: tuple[Tensor, ...]) -> Tensor | None:
        return self._flags.unpack(planes[2]).bool() if self._chooses else None

    def output_offset(self) -> Tensor | None:
        if self._chooses:
            raise ValueError("values cannot have a centre that is taken off token by token")
        return self._centre.fixed_vectors() if self._centre else None

    def centre_logits(self, queries: Tensor, first: Tensor, count: int) -> Tensor | None:
        return self._centre.logits(queries, first, count) if self._centre else None

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, stored = planes[:2]
        norms = self._norms.decode(stored)
        values = self._values(self.layout.unpack(rows)) * norms.index_select(-1, self._group_of)
        return values.unflatten(-1, (self.kv_heads, self.head_dim))

    def to_space(self, q: Tensor) -> Tensor:
        return torch.einsum("hcd,...hgd->...hgc", self._read, q.float())

    def from_space(self, out: Tensor) -> Tensor:
        return torch.einsum("hcd,...hgc->...hgd", self._read, out.float())

    def _rotate(self, x: Tensor) -> Tensor:
        """Vectors ``[..., kv_heads, head_dim]`` as coordinates ``[n, kv_heads, head_dim]``."""
        x = x.reshape(-1, self.kv_heads, self.head_dim)
        return torch.einsum("hcd,nhd->nhc", self._write, x.to(self.device, torch.float32))

    def _error(self, coordinates: Tensor) -> Tensor:
        """The squared error of coding ``coordinates [n, kv_heads, head_dim]``, up to a factor: ``[n, kv_heads]``."""
        return (coordinates.square() * self._error_weights).sum(-1)

    def _group_norms(self, coordinates: Tensor) -> Tensor:
        """Norm of every group: ``[n, coordinates] -> [n, groups]``."""
        squares = coordinates.new_zeros(coordinates.shape[0], self._groups)
        return squares.index_add_(1, self._group_of, coordinates.square()).sqrt_()

    def _values(self, codes: Tensor) -> Tensor:
        """The levels that codes ``[..., coordinates]`` stand for, float32."""
        flat = codes.reshape(-1, codes.shape[-1]).T.long()
        return self._levels[self._book_of].gather(1, flat).T.reshape(codes.shape)
