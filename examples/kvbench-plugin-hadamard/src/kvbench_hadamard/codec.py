"""The format's implementation: what is stored for a token, and how it is read back."""

import numpy as np
import torch
from torch import Tensor

from kvbench.api import Codec, Plane, RowLayout
from kvbench_hadamard.format import HadamardIntegers


def hadamard_transform(x: Tensor) -> Tensor:
    """``H x`` along the last axis, ``H`` orthogonal and symmetric: log2(n) rounds of sums and differences."""
    size = x.shape[-1]
    step = 1
    while step < size:
        pairs = x.unflatten(-1, (size // (2 * step), 2, step))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        step *= 2
    return x / size**0.5


class HadamardIntegersCodec(Codec):
    """Planes: ``codes`` uint8, packed head by head, and ``scales`` bfloat16, one a head.

    Its space is the rotated one: decoding leaves vectors rotated, and attention rotates its queries instead.
    """

    def __init__(self, format: HadamardIntegers, device: torch.device | str = "cpu") -> None:
        self.kv_heads, self.head_dim = heads, dim = format.kv_heads, format.head_dim
        self._layout = RowLayout([format.bits] * heads * dim, aligned=range(0, heads * dim, dim), device=device)
        self.planes = (Plane("codes", torch.uint8, self._layout.row_bytes), Plane("scales", torch.bfloat16, heads))
        bits = np.random.Philox(key=format.seed).random_raw(dim) >> np.uint64(63)
        self._signs = torch.tensor(np.where(bits, 1.0, -1.0), dtype=torch.float32, device=device)
        self._top = 2**format.bits - 1

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        y = self.to_space(x)
        if not torch.isfinite(y).all():
            raise ValueError("rotating overflows float32")
        scales = (2 * y.abs().amax(-1) / self._top).to(torch.bfloat16)
        steps = y / torch.where(scales > 0, scales.float(), torch.inf).unsqueeze(-1)
        codes = torch.round(steps + self._top / 2).clamp(0, self._top).to(torch.uint8)
        return self._layout.pack(codes.flatten(-2)), scales

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        rows, scales = planes
        codes = self._layout.unpack(rows).unflatten(-1, (self.kv_heads, self.head_dim))
        return (codes.float() - self._top / 2) * scales.float().unsqueeze(-1)

    def to_space(self, q: Tensor) -> Tensor:
        return hadamard_transform(q.float() * self._signs)

    def from_space(self, out: Tensor) -> Tensor:
        return hadamard_transform(out.float()) * self._signs
