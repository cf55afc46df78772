"""Encoding keys and values straight into tile pages on the device: prefill and append."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.formats import Fp16Norm
from kvbench.kernels.tiles import DIM, PAGE, SLABS, UNIT, HeadTile, TileLayout, code_places, matrices

APPEND_BLOCK = 16  # the smallest matrix product Triton has


@dataclass(frozen=True)
class _Tables:
    """One tensor's heads; shapes in :func:`kvbench.kernels.tile_encode_kernels.encode`."""

    rotation: Tensor
    thresholds: Tensor
    levels: Tensor
    slabs: Tensor
    norms: Tensor
    places: Tensor
    offsets: Tensor


def _tables(tiles: list[HeadTile], rotation: Tensor, offsets: np.ndarray, device: torch.device) -> _Tables:
    heads = len(tiles)
    thresholds = np.full((heads, SLABS, 16), np.inf, np.float32)
    levels, slabs = np.zeros((heads, SLABS, 16), np.float32), np.zeros((heads, SLABS, 3), np.float32)
    norms = np.ones((heads, 3, 3), np.float32)
    for head, tile in enumerate(tiles):
        for run, ((start, count), group, book) in enumerate(zip(tile.runs, tile.groups, tile.codebooks, strict=True)):
            mine = slice(start, start + count)
            values = np.float32(book.scale) * np.array(book.levels, np.float32)
            thresholds[head, mine, : len(values) - 1] = (values[1:] + values[:-1]) / np.float32(2)
            levels[head, mine, : len(values)] = book.levels
            slabs[head, mine] = (book.scale, run, book.bits)
            if isinstance(group.norm, Fp16Norm):
                norms[head, run, 2] = group.norm.scale
            else:
                norms[head, run, :2] = group.norm.low, group.norm.step
    places = np.array([code_places(tile.template) for tile in tiles], np.int32)
    arrays = (thresholds, levels, slabs, norms, places, np.ascontiguousarray(offsets // UNIT, np.int32))
    return _Tables(rotation.to(device).contiguous(), *(torch.from_numpy(array).to(device) for array in arrays))


class TileEncoder:
    """Writes keys and values ``[batch, tokens, kv_heads, 128]`` into pages ``[batch, pages, page_bytes]``.

    Positions are read on the device, so that appending can be captured in a graph. ``flag`` (int32 ``[1]``) becomes 1
    when an input was not finite; whoever may synchronise reads it and reports.
    """

    def __init__(self, layout: TileLayout, device: torch.device | str) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        key_rotation, value_rotation = matrices(layout.key_format)[0], matrices(layout.value_format)[0]
        offsets = layout.offsets[: layout.kv_heads]
        self._key = _tables(layout.key, key_rotation, offsets[:, [0, 2]], self.device)
        self._value = _tables(layout.value, value_rotation, offsets[:, [1, 3]], self.device)

    def __call__(self, keys: Tensor, values: Tensor, pages: Tensor, firsts: Tensor) -> None:
        """Encode token ``i`` of sequence ``b`` into slot ``firsts[b] + i`` (int32, on the device).

        ``keys`` and ``values`` are fp16, bf16 or fp32. Slots around the new ones keep their contents. The pages must
        reach.
        """
        self._encode(keys, self._key, pages, firsts, value=False)
        self._encode(values, self._value, pages, firsts, value=True)

    def _encode(self, x: Tensor, tables: _Tables, pages: Tensor, firsts: Tensor, value: bool) -> None:
        from kvbench.kernels.tile_encode_kernels import encode

        layout = self.layout
        batch, tokens, heads, dim = x.shape
        if (heads, dim) != (layout.kv_heads, DIM):
            raise ValueError(f"expected [batch, tokens, {layout.kv_heads}, {DIM}], not {list(x.shape)}")
        x = x if x.stride(-1) == 1 else x.contiguous()
        block = APPEND_BLOCK if tokens == 1 else PAGE
        # tokens may straddle one page more than they fill
        grid = (1 if tokens == 1 else -(-tokens // PAGE) + 1, heads, batch)
        bits = layout.value_norm_bits if value else layout.key_norm_bits
        tiles = layout.value if value else layout.key
        encode[grid](
            x, tables.rotation, tables.thresholds, tables.levels, tables.slabs, tables.norms, tables.places,
            tables.offsets, pages, firsts, self.flag, tokens, layout.page_bytes, pages.stride(0), x.stride(0),
            x.stride(1), x.stride(2), VALUE=value, WORDS=layout.value_words if value else layout.key_words,
            CODES=max(2**book.bits for tile in tiles for book in tile.codebooks),
            RUNS=max(len(tile.runs) for tile in tiles), LOG=bits == 8, BLOCK=block,
            PRECISION="tf32x3", num_warps=8 if block == APPEND_BLOCK else 16,
        )  # fmt: skip
