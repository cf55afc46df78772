"""Codec of :class:`Float8`: e4m3 or e5m2 (arXiv 2209.05433) with one fixed scale a head, as serving stacks have it."""

import torch
from torch import Tensor

from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import FLOAT8_LARGEST, Float8

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float8Codec(Codec):
    """Plane: ``codes``, the bytes of the float8 numbers."""

    def __init__(self, format: Float8, device: torch.device | str = "cpu") -> None:
        self.kv_heads, self.head_dim = format.kv_heads, format.head_dim
        self.device = torch.device(device)
        self.planes = (Plane("codes", torch.uint8, self.kv_heads * self.head_dim),)
        self._dtype, self._largest = DTYPES[format.encoding], FLOAT8_LARGEST[format.encoding]
        self._scales = torch.tensor(format.scales, device=self.device)[:, None]

    @property
    def constant_bytes(self) -> int:
        return self._scales.nbytes

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        # a cast beyond the range gives NaN, not the range's end
        scaled = (x.to(self.device, torch.float32) / self._scales).clamp(-self._largest, self._largest)
        return (scaled.to(self._dtype).view(torch.uint8).flatten(-2),)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        numbers = planes[0].contiguous().view(self._dtype).float()
        return numbers.unflatten(-1, (self.kv_heads, self.head_dim)) * self._scales
