"""The tile layout: packed pages shaped after the tensor core, for fast decode attention at head_dim 128.

A page holds 128 tokens of every KV head of a layer: for each head its key codes, value codes, key norms and value
norms, one after the other at offsets that are the same in every page::

    page   = | head 0: key codes | value codes | key norms | value norms | head 1: ... |
    codes  = planes of 128 lanes x 16 bytes; as many planes as the tensor has bits (2, 3 or 4)
    norms  = a plane a group: 128 bytes (log code) or 256 bytes (fp16)

A tensor's page is a matrix of 128 rows by 128 columns. Key rows are tokens and columns coordinates; value rows are
coordinates and columns tokens, so that codes run along the dimension the matrix product sums over. Columns come in four
*slabs* of 32; a slab has one code width. A lane owns 4 rows x 32 columns (8 columns a slab), which is exactly what it
feeds to a warpgroup's int8 matrix instruction, and stores them in 32-bit words, one a plane, for each of its rows::

    lane = 32 * row[5:4] + 4 * row[2:0] + column[3:2]         16 bytes at 16 * lane: one 16-byte load
    word = 2 * row[6] + row[3]                                the lane's four rows, 4 bytes each
    nibble = 4 * column[4] + column[1:0]                      the slab's eight codes; slab = column[6:5]

How the four slabs' bits share a nibble of each word is the *template*, named by the slabs' widths (``SHARES``): every
template fills its words to the last bit. A 4-bit code is stored as magnitude and sign (see :func:`stored_patterns`).

A value page's column is its token's number with the bits moved, so that the probabilities a lane computes for its
four rows are neighbours: ``column[6:5], [4:2], [1], [0] = token[5:4], [2:0], [6], [3]``.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.formats import Codebook, Group, HeadFormat, RotatedCodebook
from kvbench.kernels.rotated_codebook import head_matrices, head_segments

PAGE = 128  # tokens a page
DIM = 128  # the head_dim this layout serves
SLABS, SLAB = 4, 32
PLANE_BYTES = PAGE * DIM // 8  # one bit a code
UNIT = 128  # offsets within a page are multiples of this many bytes

SHARES = {
    3333: ("aaad", "bbbd", "cccd"),
    4332: ("aaaa", "bbbd", "cccd"),
    4422: ("aaaa", "bbbb", "ccdd"),
    4431: ("aaaa", "bbbb", "cccd"),
    2222: ("aabb", "ccdd"),
    3221: ("aaad", "bbcc"),
    3311: ("aaac", "bbbd"),
    4211: ("aaaa", "bbcd"),
    4444: ("aaaa", "bbbb", "cccc", "dddd"),
}
"""Who owns each bit of a nibble (lowest first) in each word: slabs are a, b, c, d. For instance in template 4332 slab d
has its low bit in the nibbles of word 1 and its high bit in those of word 2."""

SIGN = 8  # pattern bit of a 4-bit code's sign


class UnsupportedLayout(ValueError):
    """The tile layout cannot hold this format; the message says why. Another path must serve it."""


def slab_bits(template: int, slab: int) -> list[tuple[int, int]]:
    """Where a slab's code bits are, lowest first: ``(word, bit of the nibble)``."""
    owner = "abcd"[slab]
    words = SHARES[template]
    return [(word, bit) for word, owners in enumerate(words) for bit, name in enumerate(owners) if name == owner]


def code_places(template: int) -> list[list[int]]:
    """:func:`slab_bits` as the kernels read it: ``[4 slabs, 4 bits]`` of ``4 * word + bit``, -1 where there is none."""
    places = [[4 * word + bit for word, bit in slab_bits(template, slab)] for slab in range(SLABS)]
    return [slab + [-1] * (4 - len(slab)) for slab in places]


def stored_patterns(width: int) -> list[int]:
    """The bit pattern that stands for each code of a slab.

    Codes of 1 to 3 bits stand for themselves. A 4-bit code of a symmetric codebook is a magnitude in three bits,
    which a byte permutation can look up, and the sign: code 8 + m is ``m``, code 7 - m is ``8 | m``.
    """
    if width < 4:
        return list(range(2**width))
    return [code - 8 if code >= 8 else SIGN | (7 - code) for code in range(16)]


def byte_levels(codebook: Codebook) -> tuple[list[int], float, float]:
    """The codebook as signed bytes: ``value(code) = scale * (levels[code] + offset)``, ``offset`` 0 or 1/2.

    Levels must be symmetric. Those of up to 3 bits are scaled up to fill a byte, which keeps the scales of different
    widths alike. 4-bit levels must be odd: half of them, rounded down, is a signed byte, and the missing half is the
    offset.
    """
    largest = max(abs(level) for level in codebook.levels)
    if any(a != -b for a, b in zip(codebook.levels, reversed(codebook.levels), strict=True)):
        raise UnsupportedLayout(f"a {codebook.bits}-bit codebook is not symmetric")
    if codebook.bits <= 3 and largest <= 127:
        factor = 127 // largest
        return [level * factor for level in codebook.levels], codebook.scale / factor, 0.0
    if codebook.bits == 4 and all(level % 2 for level in codebook.levels) and largest <= 255:
        return [(level - 1) // 2 for level in codebook.levels], 2 * codebook.scale, 0.5
    raise UnsupportedLayout(f"a {codebook.bits}-bit codebook with levels up to {largest} does not fit signed bytes")


@dataclass(frozen=True)
class HeadTile:
    """One head of one tensor: its template, and per run of equal slabs the codebook and the norm."""

    template: int
    runs: tuple[tuple[int, int], ...]  # first slab, slabs
    groups: tuple[Group, ...]  # one a run
    codebooks: tuple[Codebook, ...]  # one a run

    @staticmethod
    def of(head: HeadFormat) -> "HeadTile":
        segments = head_segments(head)
        if len(segments) != DIM:
            raise UnsupportedLayout(f"head_dim is {len(segments)}; tiles hold {DIM}")
        slabs = [segments[start : start + SLAB] for start in range(0, DIM, SLAB)]
        if any(part.codebook != slab[0].codebook for slab in slabs for part in slab):
            raise UnsupportedLayout(f"code widths change within {SLAB} coordinates; tiles need one a slab")
        template = int("".join(str(slab[0].bits) for slab in slabs))
        if template not in SHARES:
            raise UnsupportedLayout(f"slab widths {template} are not among {', '.join(map(str, SHARES))}")
        owners = [group for group in head.groups for _ in group.dims][::SLAB]
        starts = [slab for slab in range(SLABS) if slab == 0 or slabs[slab][0].bits != slabs[slab - 1][0].bits]
        runs = tuple((start, stop - start) for start, stop in zip(starts, [*starts[1:], SLABS], strict=True))
        groups = tuple(owners[start] for start, _ in runs)
        if any(
            owners[slab] is not groups[run] for run, (start, n) in enumerate(runs) for slab in range(start, start + n)
        ):
            raise UnsupportedLayout("groups of equal width have norms of their own; tiles have one norm a width")
        if len(runs) != len(head.groups):
            raise UnsupportedLayout("a group mixes code widths; tiles have one norm a width")
        codebooks = tuple(slabs[start][0].codebook for start, _ in runs)
        for codebook in codebooks:
            byte_levels(codebook)  # refuses those that kernels cannot look up
        return HeadTile(template, runs, groups, codebooks)

    @property
    def words(self) -> int:
        """Planes of 32-bit words."""
        return len(SHARES[self.template])


def _one(kind: str, values: set[int]) -> int:
    if len(values) != 1:
        raise UnsupportedLayout(f"the heads of a layer differ in {kind}: {sorted(values)}")
    return values.pop()


class TileLayout:
    """Pages of one layer's keys and values: offsets, packing, unpacking. UnsupportedLayout says where tiles do not fit.

    ``page_bytes`` bytes hold 128 tokens of all heads: nothing is padded, except that norms of a page are whole planes.
    """

    head_dim = DIM

    def __init__(self, key: RotatedCodebook, value: RotatedCodebook) -> None:
        if key.kv_heads != value.kv_heads:
            raise UnsupportedLayout("keys and values differ in KV heads")
        if value.centre:
            raise UnsupportedLayout("values have a centre, which tiles do not add to the output")
        if key.centre and key.centre.per_token:
            raise UnsupportedLayout("keys have a centre chosen token by token, whose bits tiles do not hold")
        self.kv_heads = key.kv_heads
        self.key_format, self.value_format = key, value
        self.key = [HeadTile.of(head) for head in key.heads]
        self.value = [HeadTile.of(head) for head in value.heads]
        if any(len(tile.runs) > 1 for tile in self.value):
            raise UnsupportedLayout("values have several widths; tiles hold one")
        self.key_words = _one("key bits", {tile.words for tile in self.key})
        self.value_words = _one("value bits", {tile.words for tile in self.value})
        self.key_norm_bits = _one("key norm bits", {group.norm.bits for tile in self.key for group in tile.groups})
        self.value_norm_bits = _one("value norm bits", {tile.groups[0].norm.bits for tile in self.value})
        for bits in (self.key_norm_bits, self.value_norm_bits):
            if bits not in (8, 16):
                raise UnsupportedLayout(f"norms of {bits} bits; tiles hold 8 or 16")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Byte offsets in a page, ``[kv_heads, 4]``: key codes, value codes, key norms, value norms."""
        rows, at = [], 0
        for tile in self.key:
            row = []
            for size in self._sizes(tile):
                row.append(at)
                at += size
            rows.append(row)
        return np.array([*rows, [at] * 4])

    def _sizes(self, tile: HeadTile) -> tuple[int, int, int, int]:
        return (
            self.key_words * PLANE_BYTES,
            self.value_words * PLANE_BYTES,
            len(tile.runs) * PAGE * self.key_norm_bits // 8,
            PAGE * self.value_norm_bits // 8,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all heads."""
        return int(self.offsets[self.kv_heads, 0])

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes in full pages, all heads, keys and values, codes and norms."""
        return self.page_bytes / PAGE

    def allocate(self, batch: int, tokens: int, device: torch.device | str) -> Tensor:
        """Zeroed pages ``[batch, pages, page_bytes]`` uint8 for ``tokens`` tokens a sequence.

        Zeroed because kernels read the norms of slots that hold no token yet, and any norm must be finite.
        """
        return torch.zeros(batch, -(-tokens // PAGE), self.page_bytes, dtype=torch.uint8, device=device)

    def pack(self, key_codes: Tensor, key_norms: Tensor, value_codes: Tensor, value_norms: Tensor) -> Tensor:
        """Pages ``[pages, page_bytes]`` from codes uint8 ``[tokens, kv_heads, 128]`` and norms ``[tokens, norms]``.

        Codes are in storage order, as the reference codec makes them; norms as stored: float16, or uint8 for log codes.
        The last page's free slots are zero.
        """
        tokens = key_codes.shape[0]
        pages = self.allocate(1, tokens, key_codes.device)[0]
        free = pages.shape[0] * PAGE - tokens
        key_codes, key_norms, value_codes, value_norms = (
            torch.cat([part, part.new_zeros(free, *part.shape[1:])]).unflatten(0, (-1, PAGE))
            for part in (key_codes, key_norms, value_codes, value_norms)
        )
        norm = 0
        for head, tile in enumerate(self.key):
            key_at, value_at, key_norm_at, value_norm_at = self.offsets[head].tolist()
            _put(pages, key_at, pack_codes(key_codes[:, :, head], tile.template))
            columns = value_codes[:, token_of_column(pages.device), head].transpose(1, 2)
            _put(pages, value_at, pack_codes(columns, self.value[head].template))
            for run in range(len(tile.runs)):
                plane = pack_norms(key_norms[..., norm])
                _put(pages, key_norm_at + run * plane.shape[1], plane)
                norm += 1
            _put(pages, value_norm_at, pack_norms(value_norms[..., head]))
        return pages

    def unpack(self, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The inverse of :meth:`pack` for the first ``tokens`` tokens of ``pages [pages, page_bytes]``."""
        keys, key_norms, values, value_norms = [], [], [], []
        order = torch.argsort(token_of_column(pages.device))
        for head, tile in enumerate(self.key):
            key_at, value_at, key_norm_at, value_norm_at = self.offsets[head].tolist()
            keys.append(unpack_codes(_get(pages, key_at, self.key_words * PLANE_BYTES), tile.template))
            columns = unpack_codes(_get(pages, value_at, self.value_words * PLANE_BYTES), self.value[head].template)
            values.append(columns[:, :, order].transpose(1, 2))
            size = PAGE * self.key_norm_bits // 8
            key_norms += [unpack_norms(_get(pages, key_norm_at + run * size, size)) for run in range(len(tile.runs))]
            value_norms.append(unpack_norms(_get(pages, value_norm_at, PAGE * self.value_norm_bits // 8)))
        stacks = (
            torch.stack(keys, 2),
            torch.stack(key_norms, -1),
            torch.stack(values, 2),
            torch.stack(value_norms, -1),
        )
        key_codes, key_stored, value_codes, value_stored = (part.flatten(0, 1)[:tokens] for part in stacks)
        return key_codes, key_stored, value_codes, value_stored


def _put(pages: Tensor, at: int, part: Tensor) -> None:
    pages[:, at : at + part.shape[1]] = part


def _get(pages: Tensor, at: int, size: int) -> Tensor:
    return pages[:, at : at + size]


def token_of_column(device: torch.device | str = "cpu") -> Tensor:
    """The token in each column of a value page, ``[128]``."""
    column = torch.arange(PAGE, device=device)
    low, high = column & 3, column >> 2
    return (low & 1) * 8 + (low >> 1) * 64 + (high & 7) + (high >> 3) * 16


def _lanes(rows: Tensor) -> Tensor:
    """``[pages, row 128, slab, 4, column[3:2] 4, ...]``-like rows in lane order: see the module's text."""
    pages = rows.shape[0]
    parts = rows.reshape(pages, 2, 4, 2, 8, 4)  # row[6], row[5:4], row[3], row[2:0], column[3:2]
    return parts.permute(0, 2, 4, 5, 1, 3).reshape(pages, PAGE, 4)  # lane, word


def _rows(lanes: Tensor) -> Tensor:
    pages = lanes.shape[0]
    parts = lanes.reshape(pages, 4, 8, 4, 2, 2)
    return parts.permute(0, 4, 1, 5, 2, 3).reshape(pages, PAGE, 4)


def pack_codes(codes: Tensor, template: int) -> Tensor:
    """Codes uint8 ``[pages, row, column]`` -> planes ``[pages, bytes]`` uint8."""
    split = codes.to(torch.int64).unflatten(-1, (SLABS, 2, 4, 4))  # slab, column[4], column[3:2], column[1:0]
    words = [codes.new_zeros(*codes.shape[:2], 4, dtype=torch.int64) for _ in SHARES[template]]
    for slab in range(SLABS):
        bits = slab_bits(template, slab)
        patterns = torch.tensor(stored_patterns(len(bits)), device=codes.device)[split[:, :, slab]]
        for index, (word, bit) in enumerate(bits):
            shifts = _shifts(len(bits), index, bit, codes.device)
            words[word] |= (((patterns >> index) & 1) << shifts).sum((2, 4))
    stacked = torch.stack([_lanes(word) for word in words], 1)
    octets = torch.stack([(stacked >> shift) & 0xFF for shift in (0, 8, 16, 24)], -1)
    return octets.to(torch.uint8).flatten(1)


def unpack_codes(planes: Tensor, template: int) -> Tensor:
    """The inverse of :func:`pack_codes`: ``[pages, bytes]`` -> codes uint8 ``[pages, row, column]``."""
    octets = planes.to(torch.int64).unflatten(-1, (len(SHARES[template]), PAGE, 4, 4))
    stacked = sum(octets[..., index] << (8 * index) for index in range(4))
    assert isinstance(stacked, Tensor)
    words = [_rows(stacked[:, word]) for word in range(len(SHARES[template]))]
    slabs = []
    for slab in range(SLABS):
        bits = slab_bits(template, slab)
        pattern = torch.zeros(*words[0].shape[:2], 2, 4, 4, dtype=torch.int64, device=planes.device)
        for index, (word, bit) in enumerate(bits):
            shifts = _shifts(len(bits), index, bit, planes.device)
            pattern |= ((words[word][:, :, None, :, None] >> shifts) & 1) << index
        code_of = np.argsort(stored_patterns(len(bits)))
        slabs.append(torch.from_numpy(code_of).to(planes.device)[pattern].flatten(2))
    return torch.cat(slabs, -1).to(torch.uint8)


def _shifts(width: int, index: int, bit: int, device: torch.device | str) -> Tensor:
    """Bit of a word that holds bit ``index`` of a slab's codes: ``[column[4] 2, 1, column[1:0] 4]``.

    Signs of 4-bit codes are placed so that one byte permutation spreads four of them: at the top bit of byte
    ``column[1:0]`` for the first half of a slab, at bit 3 of that byte for the second.
    """
    half = torch.arange(2, device=device)[:, None, None]
    unit = torch.arange(4, device=device)[None, None, :]
    if width == 4 and index == 3:
        return 8 * unit + torch.where(half == 0, 7, 3)
    return 4 * (4 * half + unit) + bit


def pack_norms(norms: Tensor) -> Tensor:
    """A group's stored norms ``[pages, 128]`` (float16 or uint8) -> bytes ``[pages, 128 or 256]``.

    Order: bytes of tokens (fp16: halves of ``token[6]``) that differ in ``token[6]`` and ``token[3]`` are one lane's.
    """
    parts = norms.reshape(-1, 2, 4, 2, 8)  # token[6], token[5:4], token[3], token[2:0]
    if norms.dtype == torch.uint8:
        return parts.permute(0, 2, 4, 1, 3).reshape(-1, PAGE)
    return parts.permute(0, 1, 2, 4, 3).reshape(-1, PAGE).contiguous().view(torch.uint8)


def unpack_norms(plane: Tensor) -> Tensor:
    """The inverse of :func:`pack_norms`."""
    if plane.shape[1] == PAGE:
        return plane.reshape(-1, 4, 8, 2, 2).permute(0, 3, 1, 4, 2).reshape(-1, PAGE)
    halves = plane.contiguous().view(torch.float16)
    return halves.reshape(-1, 2, 4, 8, 2).permute(0, 1, 2, 4, 3).reshape(-1, PAGE)


def matrices(format: RotatedCodebook) -> tuple[Tensor, Tensor]:
    """What encoding multiplies vectors by, and what queries are multiplied by (transposed, outputs).

    Both float32 ``[kv_heads, coordinate, dim]``; see :func:`kvbench.kernels.rotated_codebook.head_matrices`.
    """
    written, read = zip(*(head_matrices(head) for head in format.heads), strict=True)
    return torch.from_numpy(np.stack(written)).float(), torch.from_numpy(np.stack(read)).float()
