"""Reference codec of the dense format: a cast."""

import torch
from torch import Tensor

from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.formats import Dense


class DenseCodec(Codec):
    """Stores ``[..., kv_heads, head_dim]`` as fp16 or bf16, ``kv_heads * head_dim`` elements a token."""

    def __init__(self, format: Dense, device: torch.device | str = "cpu") -> None:
        self.kv_heads, self.head_dim = format.kv_heads, format.head_dim
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, format.dtype)
        self.planes = (Plane("values", self.dtype, self.kv_heads * self.head_dim),)

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        stored = x.to(self.dtype)
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"a value of magnitude {x.abs().max():.4g} does not fit {self.dtype}; use a bfloat16 model"
            )
        return (stored.flatten(-2),)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        return planes[0].float().unflatten(-1, (self.kv_heads, self.head_dim))
