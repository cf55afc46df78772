"""The bit-plane layout: packed pages of any ``RotatedCodebook``, every coordinate at its own width of 1 to 8 bits.

A page holds 128 tokens of every KV head of a layer, each head's parts at offsets that are the same in every page::

    page = | head 0: key codes | value codes | key norms | value norms | head 1: ... |

Codes are stored bit by bit: a word of 32 bits holds one bit of 32 codes, so that a code of ``b`` bits takes ``b`` words
of its 32 and widths may change anywhere. Words are shaped after the tensor core's int8 operand in registers (see
:mod:`kvbench.kernels.tiles`): a word's codes are four sets ``u`` of eight, ``n``, and a set is what one lane feeds to
one step of the matrix product. ``lane = 4 * r + q`` of 128::

    keys     a cell is 8 coordinates (n); cells 4 i + q of slab i are lane q's
             r counts tokens: token = 16 r[4:3] + r[2:0] + 8 u[0] + 64 u[1]
             a cell's planes follow each other, 32 words (r) each; its width is its widest code
    values   coordinates come ``rows / 32`` (k) a lane, widest first: row = 64 k[.:1] + 16 r[4:3] + 8 k[0] + r[2:0]
             token = 16 u + x[4:2] + 8 x[0] + 64 x[1] with x = 4 q + n, or 16 + 4 q + n - 4 from n = 4 on
             a plane is the words (r, q, k) of the coordinates that have that bit

Bit ``j`` of a code is at bit ``(4 n + u + j % 4) % 32`` of its plane's word, where a few selections bit by bit gather a
set's codes into the nibbles of a word (:mod:`kvbench.kernels.bit_codes`). A 4-bit code of a symmetric codebook with odd
levels is a magnitude and a sign where it is looked up in registers; its sign is at bit ``8 (n % 4) + 7 - 2 u - n / 4``.

Cells are of one codebook each as far as they go. What is left over of the codebooks shares cells. Cells of more than
two codebooks are looked up in memory, as codes of more than 4 bits are; these come first, then cells of two codebooks,
then 4-bit cells, then the rest.

What is padded: a cell's narrower codes to its width, values' coordinates to full lanes, norms to whole bytes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.formats import Codebook, HeadFormat, RotatedCodebook
from kvbench.kernels.rotated_codebook import head_segments
from kvbench.kernels.tiles import PAGE, UnsupportedLayout, byte_levels

MAX_DIM = 256
MAX_GROUPS = 16  # norms a head
CELL = 8  # coordinates of a key that share their planes
LANES = 32  # r: lanes of a quarter q
UNIT = 128  # offsets of a head's parts are multiples of this many bytes
# how a slab of keys, or all values, are looked up: in registers, codes of up to 3 bits and of 4; cells of two such
# codebooks; in memory
NARROW, SIGNED, DUAL, WIDE = 3, 4, 5, 8


def registers(codebook: Codebook) -> bool:
    """Whether a codebook can be looked up in registers: up to 4 bits, levels that fit signed bytes."""
    try:
        byte_levels(codebook)
    except UnsupportedLayout:
        return False
    return True


def split_levels(codebook: Codebook) -> tuple[list[int], list[int], float]:
    """A codebook as ``value(code) = scale * (high[code] + low[code] / 16)``, exactly: signed bytes and a scale."""
    if registers(codebook):
        levels, scale, offset = byte_levels(codebook)
        return levels, [int(16 * offset)] * len(levels), scale
    return [level >> 4 for level in codebook.levels], [level & 15 for level in codebook.levels], 16 * codebook.scale


@dataclass(frozen=True)
class Coordinate:
    """One coordinate of a head, in storage order of the reference codec: which it is, its codebook and its group."""

    index: int
    codebook: Codebook
    group: int

    @property
    def bits(self) -> int:
        return self.codebook.bits


def coordinates(head: HeadFormat) -> list[Coordinate]:
    """A head's coordinates in storage order."""
    groups = [index for index, group in enumerate(head.groups) for _ in group.dims]
    segments = head_segments(head)
    return [
        Coordinate(index, segment.codebook, group)
        for index, (segment, group) in enumerate(zip(segments, groups, strict=True))
    ]


@dataclass(frozen=True)
class Cell:
    """Up to 8 coordinates of a key that share their planes."""

    members: tuple[Coordinate, ...]

    @property
    def bits(self) -> int:
        return max((member.bits for member in self.members), default=0)

    @property
    def kind(self) -> int:
        """How it must be looked up."""
        books = {member.codebook for member in self.members}
        if len(books) > 2 or not all(registers(book) for book in books):
            return WIDE
        if len(books) == 2:
            return DUAL
        return SIGNED if self.bits == 4 else NARROW


def key_cells(head: HeadFormat) -> list[Cell]:
    """A head's cells: wide ones first, then dual, signed, and narrow ones, each by descending width."""
    by_book: dict[Codebook, list[Coordinate]] = {}
    for coordinate in coordinates(head):
        by_book.setdefault(coordinate.codebook, []).append(coordinate)
    full = [
        part[start : start + CELL] for part in by_book.values() for start in range(0, len(part) // CELL * CELL, CELL)
    ]
    rest = sorted((c for part in by_book.values() for c in part[len(part) // CELL * CELL :]), key=lambda c: -c.bits)
    shared = [rest[start : start + CELL] for start in range(0, len(rest), CELL)]
    return sorted((Cell(tuple(part)) for part in full + shared), key=lambda cell: (-cell.kind, -cell.bits))


def value_rows(head: HeadFormat) -> list[Coordinate]:
    """A head's coordinates of values, widest first."""
    return sorted(coordinates(head), key=lambda coordinate: -coordinate.bits)


def _few(count: int, slabs: int) -> int:
    """``count`` rounded up to one of few numbers, so that layers share compiled kernels."""
    return next(some for some in (0, 1, 2, slabs) if some >= count)


class BitPlaneLayout:
    """Pages of one layer's keys and values: where everything is, packing, unpacking, storing.

    Raises :class:`~kvbench.kernels.tiles.UnsupportedLayout` for a centre, past head_dim 256 and past 16 norms a head.

    ``slabs`` of 32 key coordinates, of which the first ``wide`` are looked up in memory, those up to ``dual`` have
    cells of two codebooks, and those up to ``signed`` codes of 4 bits; ``rows`` of values, looked up as ``value_kind``
    (NARROW, SIGNED or WIDE).
    """

    def __init__(self, key: RotatedCodebook, value: RotatedCodebook) -> None:
        if (key.kv_heads, key.head_dim) != (value.kv_heads, value.head_dim):
            raise UnsupportedLayout("keys and values differ in KV heads or head_dim")
        if key.centre or value.centre:
            raise UnsupportedLayout("bit planes have no centre term")
        if key.head_dim > MAX_DIM:
            raise UnsupportedLayout(f"head_dim {key.head_dim} is past {MAX_DIM}")
        self.key_format, self.value_format = key, value
        self.kv_heads, self.head_dim = key.kv_heads, key.head_dim
        self.key_groups = max(len(head.groups) for head in key.heads)
        self.value_groups = max(len(head.groups) for head in value.heads)
        if max(self.key_groups, self.value_groups) > MAX_GROUPS:
            raise UnsupportedLayout(f"{max(self.key_groups, self.value_groups)} norms a head are past {MAX_GROUPS}")
        self.cells = [key_cells(head) for head in key.heads]
        self.values = [value_rows(head) for head in value.heads]
        self.rows = max(64, 1 << (self.head_dim - 1).bit_length())
        self.slabs = self.rows // 32
        last = lambda kind: max(  # noqa: E731
            (1 + at // 4 for cells in self.cells for at, cell in enumerate(cells) if cell.kind >= kind), default=0
        )
        self.wide, self.dual, self.signed = (_few(last(kind), self.slabs) for kind in (WIDE, DUAL, SIGNED))
        self.value_kind = self._value_kind()

    def _value_kind(self) -> int:
        books = {coordinate.codebook for values in self.values for coordinate in values}
        if self.value_groups > 1 or not all(registers(book) for book in books):
            return WIDE
        return SIGNED if any(book.bits == 4 for book in books) else NARROW

    @property
    def lane_rows(self) -> int:
        """Coordinates of values a lane."""
        return self.rows // LANES

    @cached_property
    def norm_order(self) -> list[list[int]]:
        """The groups of each head's keys in the order of their norms in a page: those with half levels first."""
        return [sorted(range(len(head.groups)), key=lambda g: g not in half) for head, half in self._half_groups]

    @property
    def half_groups(self) -> int:
        """Groups a head, at most, with 4-bit codes that stand for half levels: the first."""
        return max(len(half) for _, half in self._half_groups)

    @property
    def _half_groups(self) -> list[tuple[HeadFormat, set[int]]]:
        halves = [
            {member.group for at, cell in enumerate(cells) for member in cell.members if self.signed_at(at, member)}
            for cells in self.cells
        ]
        return list(zip(self.key_format.heads, halves, strict=True))

    def signed_at(self, cell: int, member: Coordinate) -> bool:
        """Whether a coordinate of a cell is stored as magnitude and sign."""
        return member.bits == 4 and self.slab_kind(cell // 4) in (SIGNED, DUAL)

    def slab_kind(self, slab: int) -> int:
        """How a slab of keys is looked up."""
        if slab < self.wide:
            return WIDE
        return DUAL if slab < self.dual else SIGNED if slab < self.signed else NARROW

    @cached_property
    def cell_planes(self) -> np.ndarray:
        """``[kv_heads, 4 * slabs, 2]``: a cell's first plane among its head's, and its planes; none past the last."""
        table = np.zeros((self.kv_heads, 4 * self.slabs, 2), np.int32)
        for head, cells in enumerate(self.cells):
            bits = np.array([cell.bits for cell in cells])
            table[head, : len(cells), 0], table[head, : len(cells), 1] = np.cumsum(bits) - bits, bits
        return table

    @cached_property
    def value_planes(self) -> np.ndarray:
        """``[kv_heads, 8, 2]``: the coordinates in all planes before, and in each plane, padded to full lanes."""
        table = np.zeros((self.kv_heads, 8, 2), np.int32)
        for head, values in enumerate(self.values):
            counts = np.array([sum(value.bits > plane for value in values) for plane in range(8)])
            counts = -(-counts // self.lane_rows) * self.lane_rows
            table[head, :, 0], table[head, :, 1] = np.cumsum(counts) - counts, counts
        return table

    @cached_property
    def norm_bytes(self) -> tuple[int, int]:
        """Bytes of a plane of key norms and of value norms: 128 (log codes) or 256 (fp16)."""
        log = [format.heads[0].groups[0].norm.bits <= 8 for format in (self.key_format, self.value_format)]
        return (PAGE if log[0] else 2 * PAGE), (PAGE if log[1] else 2 * PAGE)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Byte offsets in a page ``[kv_heads + 1, 4]``: key codes, value codes, key norms, value norms; the end."""
        sizes = [
            (
                int(self.cell_planes[head, :, 1].sum()) * LANES * 4,
                -(-int(self.value_planes[head, :, 1].sum()) * 16 // UNIT) * UNIT,
                len(self.key_format.heads[head].groups) * self.norm_bytes[0],
                len(self.value_format.heads[head].groups) * self.norm_bytes[1],
            )
            for head in range(self.kv_heads)
        ]
        ends = np.cumsum(np.array(sizes).reshape(-1))
        starts = np.concatenate([[0], ends[:-1]]).reshape(self.kv_heads, 4)
        return np.concatenate([starts, np.full((1, 4), ends[-1])])

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all heads."""
        return int(self.offsets[self.kv_heads, 0])

    @property
    def key_bytes(self) -> int:
        """Bytes of a page that are keys', codes and norms."""
        parts = self.offsets[: self.kv_heads]
        return int((parts[:, 1] - parts[:, 0] + parts[:, 3] - parts[:, 2]).sum())

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes in full pages, all heads, keys and values, codes and norms, padding included."""
        return self.page_bytes / PAGE

    def allocate(self, batch: int, tokens: int, device: torch.device | str) -> Tensor:
        """Zeroed pages ``[batch, pages, page_bytes]`` uint8 for ``tokens`` tokens a sequence.

        Zeroed because kernels read the norms of slots that hold no token yet, and any norm must be finite.
        """
        return torch.zeros(batch, -(-tokens // PAGE), self.page_bytes, dtype=torch.uint8, device=device)

    @cached_property
    def norm_planes(self) -> tuple[list[int], list[int]]:
        """Where each norm's plane starts in a page, in the codecs' order: keys, values."""
        keys, values = [], []
        for head, offsets in enumerate(self.offsets[: self.kv_heads]):
            order = self.norm_order[head]
            keys += [int(offsets[2]) + order.index(group) * self.norm_bytes[0] for group in range(len(order))]
            count = len(self.value_format.heads[head].groups)
            values += [int(offsets[3]) + group * self.norm_bytes[1] for group in range(count)]
        return keys, values
