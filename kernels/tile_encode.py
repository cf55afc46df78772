"""Encoding keys and values straight into tile pages on the device: prefill and append."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.formats import Codebook, Fp16Norm, RotatedCodebook
from kvbench.kernels.tile_centre import TileCentre
from kvbench.kernels.tiles import DIM, PAGE, SLABS, UNIT, HeadTile, TileLayout, matrices, slab_bits, stored_patterns

PREFILL = {"num_warps": 8, "num_stages": 1, "maxnreg": 128}
APPEND = {"num_warps": 4}
BLOCKS_PER_MULTIPROCESSOR = 2  # their rotations fill its shared memory
NEVER = 2.0  # a threshold that no coordinate of a unit vector passes
FP16_TOP = 14  # the rotations' largest entries lie below 2^14, so that fp16 holds them and their rounding


@dataclass(frozen=True)
class _Tables:
    """All heads of the keys, then of the values; shapes in :func:`kvbench.kernels.tile_encode_kernels.prefill`."""

    rotations: Tensor
    backs: Tensor
    thresholds: Tensor
    entries: Tensor
    shares: Tensor
    norms: Tensor
    offsets: Tensor

    def all(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


def _coordinates() -> np.ndarray:
    """The coordinate in every column of a rotated tile (:func:`kvbench.kernels.tile_encode_kernels.coordinate`)."""
    n = np.arange(DIM)
    return (n & 0x71) | ((n & 6) << 1) | ((n & 8) >> 2)


def _rotations(format: RotatedCodebook) -> tuple[np.ndarray, np.ndarray]:
    """``[kv_heads, 2, dim, column]`` float16 whose sum is each head's matrix times a power of two, and its inverse."""
    turned = matrices(format)[0].double().numpy().transpose(0, 2, 1)[..., _coordinates()]
    scales = np.exp2(FP16_TOP - np.ceil(np.log2(np.abs(turned).max((1, 2)))))
    exact = turned * scales[:, None, None]
    high = exact.astype(np.float16)
    return np.stack([high, (exact - high).astype(np.float16)], 1), (1 / scales).astype(np.float32)


def _fill_slabs(thresholds: np.ndarray, entries: np.ndarray, book: Codebook, run: int) -> None:
    """Rows of slabs with one codebook, ``thresholds [slabs, 8]`` and ``entries [slabs, 16]``."""
    middle, patterns = len(book.levels) // 2, stored_patterns(book.bits)
    values = np.float32(book.scale) * np.array(book.levels[middle:], np.float32)
    thresholds[:, : middle - 1] = (values[1:] + values[:-1]) / np.float32(2)
    entries[:, :middle] = [patterns[middle + m] | level**2 << 8 for m, level in enumerate(book.levels[middle:])]
    # what turns the pattern of a positive code into that of its negative: the same for all magnitudes
    entries[:, 8:11] = patterns[middle] ^ patterns[middle - 1], book.bits == 4, run


def _shares(template: int) -> np.ndarray:
    """For each word and slab ``[4, 4, 3]``: which bits of the slab's nibbles the word takes, moved left and right."""
    shares = np.zeros((4, SLABS, 3), np.int64)
    for slab in range(SLABS):
        for index, (word, bit) in enumerate(slab_bits(template, slab)):
            shares[word, slab, 0] |= 0x11111111 << index
            shares[word, slab, 1:] = max(bit - index, 0), max(index - bit, 0)
    return shares.astype(np.uint32).view(np.int32)


def _tables(layout: TileLayout, device: torch.device) -> _Tables:
    tiles: list[HeadTile] = [*layout.key, *layout.value]
    heads = len(tiles)
    thresholds, entries = np.full((heads, SLABS, 8), NEVER, np.float32), np.zeros((heads, SLABS, 16), np.int32)
    norms = np.ones((heads, 3, 4), np.float32)
    for head, tile in enumerate(tiles):
        for run, ((start, count), group, book) in enumerate(zip(tile.runs, tile.groups, tile.codebooks, strict=True)):
            mine = slice(start, start + count)
            _fill_slabs(thresholds[head, mine], entries[head, mine], book, run)
            norms[head, run, 3] = book.scale
            if isinstance(group.norm, Fp16Norm):
                norms[head, run, 2] = group.norm.scale
            else:
                norms[head, run, :2] = group.norm.low, group.norm.step
    pairs = [_rotations(format) for format in (layout.key_format, layout.value_format)]
    rotations, backs = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    shares = np.stack([_shares(tile.template) for tile in tiles])
    offsets = layout.offsets[: layout.kv_heads] // UNIT
    offsets = np.concatenate([offsets[:, [0, 2]], offsets[:, [1, 3]]]).astype(np.int32)
    arrays = (rotations, backs, thresholds, entries, shares, norms, offsets)
    return _Tables(*(torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays))


class TileEncoder:
    """Writes keys and values ``[batch, tokens, kv_heads, 128]`` into pages ``[batch, pages, page_bytes]``.

    Positions are read on the device, so that appending can be captured in a graph. ``flag`` (int32 ``[1]``) becomes 1
    when an input was not finite; whoever may synchronise reads it and reports.
    """

    def __init__(self, layout: TileLayout, device: torch.device | str) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._tables = _tables(layout, self.device)
        self._centre = TileCentre.of(layout.key_format, self.device)

    def __call__(
        self, keys: Tensor, values: Tensor, pages: Tensor, firsts: Tensor, origins: Tensor | None = None
    ) -> None:
        """Encode token ``i`` of sequence ``b`` into slot ``firsts[b] + i`` (int32, on the device).

        ``keys`` and ``values`` are fp16, bf16 or fp32. Slots around the new ones keep their contents. The pages must
        reach. ``origins`` (int32 ``[batch]``, on the device): the slot of each sequence's position 0, where keys have a
        centre; zeros where None.
        """
        from kvbench.kernels import tile_encode_kernels as k

        batch, tokens = keys.shape[:2]
        arguments, constants = self.arguments(keys, values, pages, firsts, origins)
        heads = 2 * self.layout.kv_heads
        if tokens == 1:
            on_gpu = self.device.type == "cuda"
            k.append[(heads, batch)](*arguments, **constants, PREFETCH=on_gpu, **APPEND)
            return
        count = -(-tokens // PAGE) + 1  # tokens may straddle one page more than they fill
        share = self._share(count * heads * batch)
        grid = (-(-count // share), heads, batch)
        k.prefill[grid](tokens, share, *arguments, **constants, **PREFILL)

    def arguments(
        self, keys: Tensor, values: Tensor, pages: Tensor, firsts: Tensor, origins: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, int]]:
        """What a launch that stores these tokens is given: arguments, and constants that are compiled in."""
        layout = self.layout
        for x in (keys, values):
            if x.shape != (*keys.shape[:2], layout.kv_heads, DIM):
                raise ValueError(f"expected [batch, tokens, {layout.kv_heads}, {DIM}], not {list(x.shape)}")
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        sizes = (layout.kv_heads, layout.page_bytes, pages.stride(0), keys.stride()[:3], values.stride()[:3])
        centre = None
        if self._centre is not None:
            centre = self._centre.encoding(torch.zeros_like(firsts) if origins is None else origins)
        return (keys, values, *self._tables.all(), pages, firsts, self.flag, centre, *sizes), self.variant

    @cached_property
    def variant(self) -> dict[str, int]:
        """The compile-time constants: two layers that agree in them share compiled kernels."""
        layout = self.layout
        return {
            "KEY_WORDS": layout.key_words,
            "VALUE_WORDS": layout.value_words,
            "RUNS": 1 if all(len(tile.runs) == 1 for tile in layout.key) else 3,
            "KEY_LOG": layout.key_norm_bits == 8,
            "VALUE_LOG": layout.value_norm_bits == 8,
            "ANY_WIDE": any(book.bits == 4 for tile in layout.key for book in tile.codebooks),
            "CENTRE": layout.key_format.centre is not None,
        }

    def _share(self, work: int) -> int:
        """Pages a block encodes, one after the other, with ``work`` pages of all heads and sequences to do."""
        if self.device.type != "cuda":
            return 2
        blocks = torch.cuda.get_device_properties(self.device).multi_processor_count * BLOCKS_PER_MULTIPROCESSOR
        return -(-work // blocks)
