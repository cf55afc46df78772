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

    Bit ``i`` of the list is bit ``bits[i]`` of the code of coordinate ``columns[i]`` (heads in order), as stored; for
    token ``t`` it goes to word ``words[i] + token_words[t]`` of a page, bit ``(shifts[i] + token_shifts[signs[i], t]) %
    32``; ``signs[i]`` is 1 of a sign's bit, else 0. ``signed [coordinates]``: 1 where a code is magnitude and sign.
    """

    columns: np.ndarray
    bits: np.ndarray
    words: np.ndarray
    shifts: np.ndarray
    signs: np.ndarray
    signed: np.ndarray
    token_words: np.ndarray
    token_shifts: np.ndarray


def _code_shift(n: int | np.ndarray, sign: bool) -> int | np.ndarray:
    """Code ``n``'s part of the bit of a word; the set's part is u, and -2 u of a sign."""
    return 8 * (n % 4) + 7 - n // 4 if sign else 4 * n


def _key_places(layout: BitPlaneLayout) -> _Places:
    token = np.arange(PAGE)
    r, u = 8 * (token >> 4 & 3) + (token & 7), 2 * (token >> 6) + (token >> 3 & 1)
    parts, signed = [], np.zeros(layout.kv_heads * layout.head_dim, np.int64)
    for head, cells in enumerate(layout.cells):
        start = int(layout.offsets[head, 0]) // 4
        for at, cell in enumerate(cells):
            first = start + int(layout.cell_planes[head, at, 0]) * LANES
            for n, member in enumerate(cell.members):
                column = head * layout.head_dim + member.index
                signed[column] = layout.signed_at(at, member)
                for bit in range(member.bits):
                    sign = bool(signed[column]) and 1 << bit == SIGN
                    shift = _code_shift(n, sign) + (0 if sign else bit % 4)
                    parts.append((column, bit, first + bit * LANES, shift, int(sign)))
    columns, bits, words, shifts, signs = np.array(parts).T
    return _Places(columns, bits, words, shifts, signs, signed, r, np.stack([u, -2 * u]))


def _value_places(layout: BitPlaneLayout) -> _Places:
    token = np.arange(PAGE)
    u, x = token >> 4 & 3, 4 * (token & 7) + 2 * (token >> 6) + (token >> 3 & 1)
    q, n = x >> 2 & 3, (x & 3) + 4 * (x >> 4)
    parts, signed = [], np.zeros(layout.kv_heads * layout.head_dim, np.int64)
    lane_rows = layout.lane_rows
    for head, values in enumerate(layout.values):
        start = int(layout.offsets[head, 1]) // 4
        for at, value in enumerate(values):
            column = head * layout.head_dim + value.index
            signed[column] = value.bits == 4 and layout.value_kind == SIGNED
            for bit in range(value.bits):
                sign = bool(signed[column]) and 1 << bit == SIGN
                word = start + int(layout.value_planes[head, bit, 0]) * 4
                word += at // lane_rows * 4 * lane_rows + at % lane_rows
                parts.append((column, bit, word, 0 if sign else bit % 4, int(sign)))
    columns, bits, words, shifts, signs = np.array(parts).T
    token_shifts = np.stack([_code_shift(n, False) + u, _code_shift(n, True) - 2 * u])
    return _Places(columns, bits, words, shifts, signs, signed, q * lane_rows, token_shifts)


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
        tensor = lambda array, dtype: torch.from_numpy(np.array(array, dtype)).to(codec.device)  # noqa: E731
        self._columns, self._bits = tensor(places.columns, np.int64), tensor(places.bits, np.uint8)
        self._words, self._token_words = tensor(places.words, np.int64), tensor(places.token_words, np.int64)
        self._shifts, self._signs = tensor(places.shifts, np.int32), tensor(places.signs, np.int64)
        self._token_shifts = tensor(places.token_shifts, np.int32)
        patterns = np.tile(np.arange(256), (2, 1))
        patterns[1, :16] = stored_patterns(4)
        self._signed, self._patterns = tensor(places.signed, np.int64), tensor(patterns, np.uint8)
        self._codes = tensor(np.argsort(patterns, axis=1), np.uint8)
        width = codec.norm_dtype.itemsize
        self._norms, self._token_norms = tensor(norms, np.int64) // width, tensor(_norm_elements(), np.int64)

    def _places(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The words ``[..., bits]`` of a sequence that hold the codes of ``slots [...]``, the bits in them, int32, and
        the elements ``[..., norms]`` that are their norms."""
        token, page = slots % PAGE, torch.div(slots, PAGE, rounding_mode="floor") * self._page_bytes
        words = (page // 4 + self._token_words[token])[..., None] + self._words
        shifts = (self._shifts + self._token_shifts[self._signs, token[..., None]]) & 31
        norms = (page // self.codec.norm_dtype.itemsize + self._token_norms[token])[..., None] + self._norms
        return words, shifts, norms

    def store(self, pages: Tensor, planes: tuple[Tensor, ...], slots: Tensor) -> None:
        """Write the codec's ``planes [batch, tokens, width]`` into ``slots [batch, tokens]`` int64."""
        for start in range(0, slots.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            self._store(pages, tuple(plane[:, part] for plane in planes), slots[:, part])

    def _store(self, pages: Tensor, planes: tuple[Tensor, ...], slots: Tensor) -> None:
        batch = slots.shape[0]
        at, shifts, elements = self._places(slots)
        patterns = self._patterns[self._signed, self.codec.layout.unpack(planes[0]).long()]
        bits = (patterns.index_select(-1, self._columns) >> self._bits) & 1
        words = pages.view(torch.int32).view(batch, -1)
        old = (words.gather(1, at.flatten(1)).view_as(shifts) >> shifts) & 1
        words.scatter_add_(1, at.flatten(1), ((bits.to(torch.int32) - old) << shifts).flatten(1))
        norms = self.codec.unpack_norms(planes[1]).contiguous().view(_plain(self.codec.norm_dtype))
        pages.view(norms.dtype).view(batch, -1).scatter_(1, elements.flatten(1), norms.flatten(1))

    def load(self, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first ``tokens`` slots as the codec's planes ``[batch, tokens, width]``."""
        slots = torch.arange(tokens, device=pages.device).split(CHUNK)
        codes, norms = zip(*(self._load(pages, part) for part in slots), strict=True)
        return torch.cat(codes, 1), torch.cat(norms, 1)

    def _load(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        batch, dtype = pages.shape[0], self.codec.norm_dtype
        at, shifts, elements = self._places(slots)
        bits = ((pages.view(torch.int32).view(batch, -1)[:, at] >> shifts) & 1).to(torch.uint8) << self._bits
        patterns = bits.new_zeros(*bits.shape[:2], len(self._signed))
        patterns.index_add_(2, self._columns, bits)
        codes = self._codes[self._signed, patterns.long()]
        norms = pages.view(_plain(dtype)).view(batch, -1)[:, elements].view(dtype)
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
