"""What the launches of decode attention over packed pages have in common, whatever the pages' layout."""

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

MAX_GROUP = 16  # query heads a KV head
LOG2_E = math.log2(math.e)
MERGE = {"CHUNK": 32, "STAGES": 4}  # its reads are latency, not bandwidth
FEW = 264  # blocks of a query head's quarter each up to which they are spread out, and not taken together


class PageLayout(Protocol):
    """What is asked of a layout of pages, whichever it is."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    def allocate(self, batch: int, tokens: int, device: torch.device | str) -> Tensor: ...


def padded_group(group: int) -> int:
    """Query heads a KV head as the kernels pad them: 4, 8 or 16."""
    return max(4, 1 << (group - 1).bit_length())


class PageAttention(ABC):
    """How work is spread over the device, and what may be given. Subclasses launch the kernels of their layout.

    On a CUDA device with ``assembly`` (the default there) codes are unpacked by inline PTX, otherwise in plain Triton,
    which also runs in Triton's interpreter. ``splits`` is the number of blocks a sequence and head are spread over; by
    default enough to fill the device. It is fixed by the batch and not by the lengths, so that a graph can be replayed.
    """

    def __init__(
        self, layout: PageLayout, device: torch.device | str, assembly: bool | None = None, splits: int | None = None
    ) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.assembly = self.device.type == "cuda" if assembly is None else assembly
        self.splits = splits

    @abstractmethod
    def occupancy(self, group: int) -> tuple[int, int]:
        """Blocks a multiprocessor and registers a thread for ``group`` query heads a KV head."""

    def splits_for(self, batch: int, pages: int, group: int) -> int:
        """Blocks that a sequence and head of ``pages`` pages are spread over."""
        if self.splits is not None:
            return self.splits
        if self.device.type != "cuda":
            return min(pages, 4)
        blocks = self._multiprocessors() * self.occupancy(group)[0]
        share = -(-pages // max(1, blocks // (batch * self.layout.kv_heads)))  # pages a block
        return -(-pages // share)

    def dependent(self, blocks: int, group: int) -> int:
        """When the merge of so many blocks' work may start: see :mod:`kvbench.kernels.tile_kernels`."""
        from kvbench.kernels.split_kernels import EARLY, LATE

        if self.device.type != "cuda":
            return 0
        room = (self.occupancy(group)[0] - 1) * self._multiprocessors()
        return int((EARLY if blocks <= room else LATE).value)

    def group_of(self, q: Tensor, pages: Tensor) -> int:
        """Query heads a KV head of ``q [batch, q_heads, head_dim]``. Raises ValueError where q or pages do not fit."""
        layout, (_, q_heads, dim) = self.layout, q.shape
        group, rest = divmod(q_heads, layout.kv_heads)
        if dim != layout.head_dim or rest or not 1 <= group <= MAX_GROUP:
            heads = f"up to {MAX_GROUP} x {layout.kv_heads} heads"
            raise ValueError(f"q must be [batch, {heads}, {layout.head_dim}], not {list(q.shape)}")
        if pages.dtype != torch.uint8 or pages.stride(-1) != 1 or pages.stride(1) != layout.page_bytes:
            raise ValueError(f"pages must be uint8 [batch, pages, {layout.page_bytes}], contiguous by page")
        return group

    def _multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count
