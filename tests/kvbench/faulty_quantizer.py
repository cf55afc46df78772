"""A plugin's own format, right or broken in one chosen way: bytes per token and head, with a scale."""

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.calibration import Calibration
from kvbench.geometry import ModelGeometry
from kvbench.kernels.codec import Codec, Plane
from kvbench.kernels.formats import CacheFormat, TensorFormat
from kvbench.quantizer import Quantizer

HIDDEN: dict[int, Tensor] = {}  # what the fault "global" keeps beside its planes


@dataclass(frozen=True)
class Bytes(TensorFormat):
    """A signed byte an element and a float32 scale a token and head; ``fault`` names what is wrong."""

    kv_heads: int
    head_dim: int
    fault: str
    salt: float = 0.0
    kind: ClassVar[str] = "bytes"

    @property
    def code_bits(self) -> float:
        return 8.0

    @property
    def bits_per_token(self) -> float:
        scales = {"hides scales": 0, "claims too much": 640}.get(self.fault, 32)
        return self.kv_heads * (8 * self.head_dim + scales)

    def codec(self, device: torch.device | str = "cpu") -> Codec:
        return BytesCodec(self)


class BytesCodec(Codec):
    def __init__(self, format: Bytes) -> None:
        self.kv_heads, self.head_dim, self.fault = format.kv_heads, format.head_dim, format.fault
        self.kept: Tensor | None = None
        self.planes = (
            Plane("codes", torch.int8, self.kv_heads * self.head_dim),
            Plane("scales", torch.float32, self.kv_heads),
        )

    def encode(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.fault != "stores NaN" and not torch.isfinite(x).all():
            raise ValueError("cannot encode NaN or infinity")
        if self.fault == "changes its input":
            x.mul_(0.5)
        y = x.float()
        scale = y.abs().amax(-1) / 127
        if self.fault == "scale of the batch" and x.dim() > 3:
            scale = scale.amax(0, keepdim=True).expand_as(scale)
        if self.fault == "scale of the call":
            scale = torch.full_like(scale, float(scale.amax()) if scale.numel() else 1.0)
        if self.fault == "half-precision scale":
            scale = scale.half().float()
        codes = torch.round(y / (scale if self.fault == "divides by zero" else scale.clamp_min(1e-38))[..., None])
        if self.fault == "divides by zero":
            scale = torch.where(scale > 0, scale, torch.nan)
        stored = codes.nan_to_num(0.0).clamp(-127, 127).to(torch.int8).flatten(-2)
        if self.fault == "keeps the tensor":
            self.kept = y
        if self.fault == "global":
            HIDDEN[hash(tuple(stored.flatten()[:64].tolist()))] = y
        if self.fault == "wrong shape":
            stored = stored[..., :1]
        if self.fault == "wrong dtype":
            stored = stored.to(torch.int16)
        return (stored,) if self.fault == "missing plane" else (stored, scale)

    def decode(self, planes: tuple[Tensor, ...]) -> Tensor:
        codes, scale = planes
        x = codes.float().unflatten(-1, (self.kv_heads, self.head_dim)) * scale[..., None]
        if self.fault == "keeps the tensor" and self.kept is not None and self.kept.shape == x.shape:
            return self.kept
        if self.fault == "global":
            return HIDDEN.get(hash(tuple(codes.flatten()[:64].tolist())), torch.zeros_like(x))
        if self.fault == "double":
            return x.double()
        if self.fault == "noise":
            return torch.randn(x.shape, generator=torch.Generator().manual_seed(99)) * x.std()
        if self.fault == "raises":
            raise RuntimeError("no luck")
        if self.fault == "decodes NaN":
            return x * torch.nan
        if self.fault == "NaN in long caches" and x.numel() and x.shape[-3] > 30 and x.dim() > 3:
            return x * torch.nan
        return x

    def to_space(self, q: Tensor) -> Tensor:
        return 1.5 * q.float() if self.fault == "wrong space" else q.float()


@dataclass(frozen=True)
class Faulty(Quantizer):
    """Bytes with a fault of choice; none by default."""

    name: ClassVar[str] = "faulty"
    needs_calibration: ClassVar[bool] = False

    fault: str = ""

    def fit(self, calibration: Calibration | None, geometry: ModelGeometry) -> CacheFormat:
        answer: Any = None
        if self.fault == "returns a list":
            return [answer]  # type: ignore[return-value]
        if self.fault == "crashes" or (self.fault == "crashes at 80" and geometry.head_dim == 80):
            raise IndexError("list index out of range")
        if self.fault == "one layer":
            geometry = ModelGeometry(geometry.layers[:1])
        wider = 2 if self.fault == "another head_dim" else 1
        salt = {
            "random": random.random(),
            "hash": float(hash("a name") % 1000),
            "not data": math.nan,
        }.get(self.fault, 0.0)
        formats = tuple(Bytes(layer.kv_heads, wider * layer.head_dim, self.fault, salt) for layer in geometry.layers)
        return CacheFormat(formats, formats)
