"""Writing tokens into bit-plane pages and reading them back, in torch: bits are gathered and scattered by tables.

A token's bits are changed in place whatever stood there, by adding the difference to each word; so a page may be
written token by token or all at once, and nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.bit_planes import LANES, SIGNED, BitPlaneLayout
from kvbench.kernels.rotated_codebook import RotatedCodebookCodec
from kvbench.kernels.tiles import PAGE, SIGN, stored_patterns

CHUNK = 512  # tokens whose bits are spread out at once


@dataclass(frozen=True)
class _Places:
    """Where a token's code bits go in a page, for one tensor: a list over all code bits of all heads.

    Bit ``i`` of the list is bit ``bits[i]`` of the code of coordinate ``columns[i]`` (heads in order), after patterns
    are put in place of codes; it goes to word ``words[t, i]`` of a page, bit ``shifts[t, i]``, for token ``t``.
    ``patterns [coordinates, 256]`` is the stored pattern of every code.
    """

    columns: np.ndarray
    bits: np.ndarray
    words: np.ndarray
    shifts: np.ndarray
    patterns: np.ndarray


def _shift(bit: int, sign: bool, u: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The bit of a word that holds bit ``bit`` of code ``(u, n)``."""
    return 8 * (n % 4) + 7 - 2 * u - n // 4 if sign else (4 * n + u + bit % 4) % 32


def _collect(parts: Sequence[tuple[int, int, np.ndarray, np.ndarray]], patterns: np.ndarray) -> _Places:
    columns, bits, words, shifts = zip(*parts, strict=True)
    return _Places(np.array(columns), np.array(bits), np.stack(words, 1), np.stack(shifts, 1), patterns)


def _patterns(heads: int, dim: int) -> np.ndarray:
    return np.tile(np.arange(256, dtype=np.uint8), (heads * dim, 1))


def _signed(patterns: np.ndarray, column: int) -> None:
    patterns[column, :16] = stored_patterns(4)


def _key_places(layout: BitPlaneLayout) -> _Places:
    token = np.arange(PAGE)
    r, u = 8 * (token >> 4 & 3) + (token & 7), 2 * (token >> 6) + (token >> 3 & 1)
    parts, patterns = [], _patterns(layout.kv_heads, layout.head_dim)
    for head, cells in enumerate(layout.cells):
        start = int(layout.offsets[head, 0]) // 4
        for at, cell in enumerate(cells):
            first = start + int(layout.cell_planes[head, at, 0]) * LANES
            for n, member in enumerate(cell.members):
                column = head * layout.head_dim + member.index
                signed = layout.signed_at(at, member)
                if signed:
                    _signed(patterns, column)
                for bit in range(member.bits):
                    shift = _shift(bit, signed and 1 << bit == SIGN, u, np.array(n))
                    parts.append((column, bit, first + bit * LANES + r, shift))
    return _collect(parts, patterns)


def _value_places(layout: BitPlaneLayout) -> _Places:
    token = np.arange(PAGE)
    u, x = token >> 4 & 3, 4 * (token & 7) + 2 * (token >> 6) + (token >> 3 & 1)
    q, n = x >> 2 & 3, (x & 3) + 4 * (x >> 4)
    parts, patterns = [], _patterns(layout.kv_heads, layout.head_dim)
    lane_rows = layout.lane_rows
    for head, values in enumerate(layout.values):
        start = int(layout.offsets[head, 1]) // 4
        for at, value in enumerate(values):
            signed = value.bits == 4 and layout.value_kind == SIGNED
            column = head * layout.head_dim + value.index
            if signed:
                _signed(patterns, column)
            for bit in range(value.bits):
                plane = start + int(layout.value_planes[head, bit, 0]) * 4
                word = plane + (at // lane_rows * 4 + q) * lane_rows + at % lane_rows
                parts.append((column, bit, word, _shift(bit, signed and 1 << bit == SIGN, u, n)))
    return _collect(parts, patterns)


def _norm_elements() -> np.ndarray:
    """The element of a norm's plane that is each token's ``[128]``: a lane's four tokens are neighbours."""
    token = np.arange(PAGE)
    return 32 * (token >> 4 & 3) + 4 * (token & 7) + 2 * (token >> 6) + (token >> 3 & 1)


def _plain(dtype: torch.dtype) -> torch.dtype:
    """Integers in place of halves: codes that look like signalling NaNs must not be quieted in passing."""
    return torch.int16 if dtype == torch.float16 else dtype


class _Part:
    """Keys or values of pages ``[batch, pages, page_bytes]``: codes and norms in, codes and norms out."""

    def __init__(self, places: _Places, norms: Sequence[int], codec: RotatedCodebookCodec, page_bytes: int) -> None:
        self.codec, self._page_bytes = codec, page_bytes
        tensor = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(codec.device)  # noqa: E731
        self._columns, self._bits = tensor(places.columns), tensor(places.bits.astype(np.uint8))
        self._words, self._shifts = tensor(places.words.astype(np.int64)), tensor(places.shifts.astype(np.int32))
        self._patterns = tensor(places.patterns)
        self._codes = tensor(np.argsort(places.patterns, axis=1, kind="stable").astype(np.uint8))
        self._column = torch.arange(places.patterns.shape[0], device=codec.device)
        width = codec.norm_dtype.itemsize
        elements = _norm_elements()[:, None] + np.array(norms)[None] // width
        self._norms = tensor(elements.astype(np.int64))

    def store(self, pages: Tensor, planes: tuple[Tensor, ...], slots: Tensor) -> None:
        """Write the codec's ``planes [batch, tokens, width]`` into ``slots [batch, tokens]`` int64."""
        for start in range(0, slots.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            self._store(pages, tuple(plane[:, part] for plane in planes), slots[:, part])

    def _store(self, pages: Tensor, planes: tuple[Tensor, ...], slots: Tensor) -> None:
        batch, token = slots.shape[0], slots % PAGE
        page = torch.div(slots, PAGE, rounding_mode="floor") * self._page_bytes
        patterns = self._patterns[self._column, self.codec.layout.unpack(planes[0]).long()]
        bits = (patterns.index_select(-1, self._columns) >> self._bits) & 1
        words, shifts = pages.view(torch.int32).view(batch, -1), self._shifts[token]
        at = (page[..., None] // 4 + self._words[token]).flatten(1)
        old = (words.gather(1, at).view_as(shifts) >> shifts) & 1
        words.scatter_add_(1, at, ((bits.to(torch.int32) - old) << shifts).flatten(1))
        norms = self.codec.unpack_norms(planes[1])
        at = page[..., None] // norms.element_size() + self._norms[token]
        plain = _plain(norms.dtype)
        pages.view(plain).view(batch, -1).scatter_(1, at.flatten(1), norms.contiguous().view(plain).flatten(1))

    def load(self, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first ``tokens`` slots as the codec's planes ``[batch, tokens, width]``."""
        slots = torch.arange(tokens, device=pages.device).split(CHUNK)
        codes, norms = zip(*(self._load(pages, part) for part in slots), strict=True)
        return torch.cat(codes, 1), torch.cat(norms, 1)

    def _load(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        batch, token = pages.shape[0], slots % PAGE
        page = slots // PAGE * self._page_bytes
        words = pages.view(torch.int32).view(batch, -1)[:, page[:, None] // 4 + self._words[token]]
        bits = ((words >> self._shifts[token]) & 1).to(torch.uint8) << self._bits
        patterns = bits.new_zeros(*bits.shape[:2], len(self._column))
        patterns.index_add_(2, self._columns, bits)
        codes = self._codes[self._column, patterns.long()]
        dtype = self.codec.norm_dtype
        at = page[:, None] // dtype.itemsize + self._norms[token]
        norms = pages.view(_plain(dtype)).view(batch, -1)[:, at].view(dtype)
        return self.codec.layout.pack(codes), self.codec.pack_norms(norms)


class BitPlanePacking:
    """What writes and reads pages of one layout on one device, keys and values."""

    def __init__(self, layout: BitPlaneLayout, device: torch.device | str) -> None:
        codecs = (RotatedCodebookCodec(layout.key_format, device), RotatedCodebookCodec(layout.value_format, device))
        places = (_key_places(layout), _value_places(layout))
        self.keys, self.values = (
            _Part(place, norms, codec, layout.page_bytes)
            for place, norms, codec in zip(places, layout.norm_planes, codecs, strict=True)
        )
