"""Centered Block-GTQ: kvbench's own quantizer. The derivation is in docs/centered-block-gtq.md."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.quantizers.blockgtq import BlockGTQ


@dataclass(frozen=True)
class CenteredBlockGTQ(BlockGTQ):
    """Block-GTQ with the mean of keys off, blocks scored and scaled by what they do to logits, and 8-bit norms.

    The mean before RoPE is a bias of the logits that depends on position alone and is computed exactly; what is left
    has far less energy. Blocks are scored by ``E|q_i|^2 E|k_i - mu_i|^2``, the weight of a block's error in the
    expected squared logit error, and scaled within a group so that errors fall where queries are weak. Recommended
    with ``cache.n_sink=4``: the first tokens are far from the mean.
    """

    name: ClassVar[str] = "cblockgtq"

    score: str = field(default="product", metadata={"help": "product, E|q_i|^2 E|k_i|^2, or energy (Block-GTQ's)"})
    center: str = field(default="all", metadata={"help": "mean of keys taken off: all, none, or of r RoPE blocks"})
    balance: bool = field(default=True, metadata={"help": "scale a group's blocks so that errors fall on weak queries"})
    norm_bits: int = field(default=8, metadata={"help": "bits a norm: 8 or 6 (logarithmic), or 16 (fp16)"})
