"""What storage in packed pages has in common, whatever the pages' layout: one buffer of keys and values a layer."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvbench.kernels.page_attention import PageLayout
from kvbench.kernels.tiles import PAGE
from kvbench.plane_storage import GROWTH, repeat_slots


class PageStorage(ABC):
    """Pages ``[batch, pages, page_bytes]`` uint8 of one layer (see :class:`kvbench.layer_storage.LayerStorage`).

    Slot ``t`` of a sequence, left padding included, is token ``t % 128`` of its page ``t // 128``.
    """

    backend, lossless = "triton", False

    def __init__(self, layout: PageLayout, batch: int, capacity: int, device: torch.device, why: str) -> None:
        self.layout, self.why = layout, why
        self.pages = layout.allocate(batch, capacity, device)

    @property
    def batch(self) -> int:
        return self.pages.shape[0]

    @property
    def capacity(self) -> int:
        return self.pages.shape[1] * PAGE

    def reserve(self, tokens: int) -> None:
        if tokens <= self.capacity:
            return
        grown = self.layout.allocate(self.batch, max(tokens, int(self.capacity * GROWTH)), self.pages.device)
        grown[:, : self.pages.shape[1]] = self.pages
        self.pages = grown

    @abstractmethod
    def saw_numbers_not_finite(self) -> bool:
        """Whether NaN or infinity was given since the last question, which waits for the device."""

    def defect(self) -> str | None:
        if self.pages.shape[2] != self.layout.page_bytes or self.pages.dtype != torch.uint8:
            return "holds pages of another size than its format's"
        return "was given keys or values with NaN or infinity" if self.saw_numbers_not_finite() else None

    def repeat(self, present: int, total: int) -> None:
        repeat_slots(self.pages, present // PAGE, -(-total // PAGE))

    def crop(self, length: int) -> None:  # noqa: B027 - there is nothing to do, for any layout
        """Nothing to do: slots past the length in use are overwritten."""

    def select(self, rows: Tensor) -> None:
        self.pages = self.pages.index_select(0, rows.to(self.pages.device))

    def move(self, device: torch.device | str) -> None:
        self.pages = self.pages.to(device, non_blocking=True)
