"""Codec of :class:`NonUniform`: codes into a table of levels, and a token's farthest numbers in float16 beside them.

A token's numbers ``x_j``, all KV heads together, are brought into the table's range by a middle m and a half width w::

    y_j = (x_j - m_j) / w_j       with m_j, w_j of channel j by the format, or
    y_j = (x_j - m) / w           with m, w of the token without its outliers, stored as float16 multiples of ``unit``
    c_j = the nearest level to y_j;      x'_j = m + w levels[c_j]

Outliers are the ``outliers`` numbers with the largest ``|y_j|`` by channel, or those farthest from the token's mean;
their place (uint8 or int16) and value (float16 multiple of ``unit``) are stored, and decoding puts them where codes
were. Codes are packed without gaps, least significant bit first, a token's row padded to a whole byte.
"""

import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import NonUniform

FP16_MAX = 65504.0


class NonUniformCodec(Codec):
    """Planes: ``codes`` uint8; ``places`` and float16 ``outliers``, if any; float16 ``ranges`` (m, w), unless fixed."""

    def __init__(self, format: NonUniform, device: torch.device | str = "cpu") -> None:
        self.format, self.device = format, torch.device(device)
        self.kv_heads, self.head_dim = format.kv_heads, format.head_dim
        self.layout = RowLayout([format.bits] * (self.kv_heads * self.head_dim), device=self.device)
        places = torch.uint8 if format.index_bits == 8 else torch.int16
        planes = [Plane("codes", torch.uint8, self.layout.row_bytes)]
        if format.outliers:
            planes += [Plane("places", places, format.outliers), Plane("outliers", torch.float16, format.outliers)]
        if format.ranges is None:
            planes.append(Plane("ranges", torch.float16, 2))
        self.planes = tuple(planes)
        self._levels = torch.tensor(format.levels, dtype=torch.float32, device=self.device)
        self._edges = (self._levels[1:] + self._levels[:-1]) / 2
        self._fixed: tuple[Tensor, Tensor] | None = None
        if format.ranges is not None:
            ranges = torch.tensor(format.ranges, dtype=torch.float32, device=self.device).flatten(0, 1)
            self._fixed = (ranges[:, 0].contiguous(), ranges[:, 1].contiguous())

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        y = x.to(self.device, torch.float32).flatten(-2)
        stored: list[Tensor] = []
        places = self._outliers(y)
        if self.format.outliers:
            stored = [places.to(self.planes[1].dtype), self._halves(y.gather(-1, places))]
        if self._fixed is None:
            ranges = self._token_range(y, places)
            stored.append(ranges)
            middle, width = self._parameters(ranges)
        else:
            middle, width = self._fixed
        steps = (y - middle) / torch.where(width > 0, width, torch.inf)
        codes = torch.bucketize(steps, self._edges).to(torch.uint8)
        return (self.layout.pack(codes), *stored)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, *stored = planes
        middle, width = self._fixed if self._fixed is not None else self._parameters(stored.pop())
        y = middle + width * self._levels[self.layout.unpack(rows).long()]
        if stored:
            places, outliers = stored
            y.scatter_(-1, places.long(), outliers.float() * self.format.unit)
        return y.unflatten(-1, (self.kv_heads, self.head_dim))

    def _outliers(self, y: Tensor) -> Tensor:
        """Places of a token's outliers among its numbers, int64 ``[..., outliers]``."""
        if self._fixed is None:
            # divided first: a sum of finite float32 numbers may be infinite
            distance = (y / 2 - (y / (2 * y.shape[-1])).sum(-1, keepdim=True)).abs()
        else:
            middle, width = self._fixed
            distance = ((y - middle) / width).abs()
        return distance.topk(self.format.outliers, dim=-1).indices

    def _token_range(self, y: Tensor, places: Tensor) -> Tensor:
        """Middle and half width of a token's numbers without its outliers, float16 ``[..., 2]``."""
        low = y.scatter(-1, places, torch.inf).amin(-1)
        high = y.scatter(-1, places, -torch.inf).amax(-1)
        middle = self._halves(low / 2 + high / 2)
        # from the middle as it is stored, so that both ends stay within the table's range
        stored = middle.float() * self.format.unit
        return torch.stack([middle, self._halves(torch.maximum(high - stored, stored - low))], dim=-1)

    def _halves(self, numbers: Tensor) -> Tensor:
        """Float16 multiples of the unit; beyond float16's range its ends, never infinity."""
        return (numbers / self.format.unit).clamp(-FP16_MAX, FP16_MAX).half()

    def _parameters(self, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """Middle and half width as they are stored, float32 ``[..., 1]``."""
        middle, width = (ranges.float() * self.format.unit).split(1, dim=-1)
        return middle, width
