"""Rows of b-bit codes: the bit layout that :mod:`kvbench.kernels.formats` describes, in torch.

A row holds ``len(widths)`` codes; code ``j`` takes ``widths[j]`` bits, least significant first, right after code
``j - 1``, except that ``align`` marks codes that start on a whole byte (the first code of every head's row).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels.formats import MAX_BITS


class RowLayout:
    """Packs ``uint8`` codes ``[..., codes]`` into bytes ``[..., row_bytes]`` and back.

    ``widths[j]`` is code j's width in bits (1 to 8); ``aligned`` lists the indices of codes that start a new byte.
    """

    def __init__(self, widths: Sequence[int], aligned: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        if any(not 1 <= width <= MAX_BITS for width in widths):
            raise ValueError(f"code widths must be 1 to {MAX_BITS} bits")
        starts = set(aligned)
        offsets: list[int] = []
        bit = 0
        for index, width in enumerate(widths):
            if index in starts:
                bit = (bit + 7) // 8 * 8
            offsets.append(bit)
            bit += width
        self.row_bytes = (bit + 7) // 8
        offset = torch.tensor(offsets, dtype=torch.long, device=device)
        self._byte = offset >> 3
        # a code of at most 8 bits touches at most two bytes; the last row byte's neighbour is a scratch byte
        self._shift = (offset & 7).to(torch.int32)
        self._mask = (1 << torch.tensor(list(widths), dtype=torch.int32, device=device)) - 1

    def pack(self, codes: Tensor) -> Tensor:
        """``codes [..., codes]`` uint8, each below ``2 ** width`` -> ``[..., row_bytes]`` uint8."""
        spread = codes.to(torch.int32) << self._shift
        row = torch.zeros(*codes.shape[:-1], self.row_bytes + 1, dtype=torch.uint8, device=codes.device)
        # codes never share a bit, so adding bytes is or-ing them
        row.index_add_(-1, self._byte, (spread & 0xFF).to(torch.uint8))
        row.index_add_(-1, self._byte + 1, (spread >> 8).to(torch.uint8))
        return row[..., : self.row_bytes].contiguous()

    def unpack(self, rows: Tensor) -> Tensor:
        """``rows [..., row_bytes]`` uint8 -> codes ``[..., codes]`` uint8."""
        padded = torch.nn.functional.pad(rows, (0, 1))
        low = padded.index_select(-1, self._byte).to(torch.int32)
        high = padded.index_select(-1, self._byte + 1).to(torch.int32)
        return (((low | (high << 8)) >> self._shift) & self._mask).to(torch.uint8)
