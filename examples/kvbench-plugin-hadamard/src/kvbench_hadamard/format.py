"""The format: frozen data that defines what the bytes mean. It imports no torch, so that ``--help`` stays quick."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.api import TensorFormat

if TYPE_CHECKING:
    import torch

    from kvbench.api import Codec

SCALE_BITS = 16  # bfloat16: any float32 vector's scale is in its range


@dataclass(frozen=True)
class HadamardIntegers(TensorFormat):
    """For a token's vector x of one head: ``y = H (signs * x)``, a scale ``2 max|y| / (2^bits - 1)``, and codes.

    ``H`` is Sylvester's Hadamard matrix over sqrt(head_dim); the signs are the top bits of numpy's Philox generator
    with key ``seed``. Code c stands for ``(c - (2^bits - 1) / 2) * scale``.
    """

    kv_heads: int
    head_dim: int
    bits: int
    seed: int
    kind: ClassVar[str] = "hadamard_integers"

    @property
    def code_bits(self) -> float:
        return float(self.bits)

    @property
    def bits_per_token(self) -> float:
        return self.kv_heads * (self.head_dim * self.bits + SCALE_BITS)

    def codec(self, device: "torch.device | str" = "cpu") -> "Codec":
        from kvbench_hadamard.codec import HadamardIntegersCodec

        return HadamardIntegersCodec(self, device)
