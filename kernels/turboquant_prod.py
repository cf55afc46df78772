"""Codec of :class:`TurboQuantProd` (arXiv 2504.19874, algorithm 2): an MSE code and one bit of the residual.

The residual ``r`` that the MSE code leaves, in the code's rotated space, is stored as the signs of ``S r`` and its
norm; ``S [head_dim, head_dim]`` is Gaussian. ``sqrt(pi / 2) / head_dim * |r| * S^T sign(S r)`` is an unbiased estimate
of r in every inner product (QJL, arXiv 2406.03482), so that decoding adds it to what the MSE code gives, and attention
needs nothing of its own. As a vector the estimate is far from r: the error of the sum is larger than without it.
"""

import math

import torch
from torch import Tensor

from kvbench.kernels.bitpack import RowLayout
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.comparator_formats import TurboQuantProd
from kvbench.kernels.rotated_codebook import Fp16NormCoder
from kvbench.kernels.rotations import gaussian


class TurboQuantProdCodec(Codec):
    """Planes: those of the MSE code, ``signs`` uint8 (packed) and ``residuals`` float16 norms, one a head."""

    def __init__(self, format: TurboQuantProd, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.kv_heads, self.head_dim = heads, dim = format.kv_heads, format.head_dim
        self._mse = format.mse.codec(device)
        self._layout = RowLayout([1] * heads * dim, aligned=range(0, heads * dim, dim), device=self.device)
        self._norms = Fp16NormCoder([format.norm] * heads, self.device)
        self.planes = (
            *self._mse.planes,
            Plane("signs", torch.uint8, self._layout.row_bytes),
            Plane("residuals", self._norms.dtype, heads),
        )
        draws = [torch.from_numpy(gaussian(format.seed + head, dim * dim)).view(dim, dim) for head in range(heads)]
        self._projection = torch.stack(draws).to(self.device, torch.float32)

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        coded = self._mse.encode(x)
        rotated = self._mse.to_space(x.to(self.device).unsqueeze(-2)).squeeze(-2)
        residual = rotated - self._mse.decode(coded)
        projected = torch.einsum("hcd,...hd->...hc", self._projection, residual)
        signs = (projected >= 0).to(torch.uint8).flatten(-2)
        return (*coded, self._layout.pack(signs), self._norms.encode(residual.norm(dim=-1)))

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        *coded, rows, stored = planes
        bits = self._layout.unpack(rows).unflatten(-1, (self.kv_heads, self.head_dim))
        norms = self._norms.decode(stored) * (math.sqrt(math.pi / 2) / self.head_dim)
        estimate = torch.einsum("hcd,...hc->...hd", self._projection, 2.0 * bits - 1.0)
        return self._mse.decode(tuple(coded)) + estimate * norms.unsqueeze(-1)

    def to_space(self, q: Tensor) -> Tensor:
        return self._mse.to_space(q)

    def from_space(self, out: Tensor) -> Tensor:
        return self._mse.from_space(out)
