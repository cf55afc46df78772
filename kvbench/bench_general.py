"""The general kernel in the kernel benchmark: Block-GTQ's exact allocation, a width for every RoPE block."""

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels import fp16_attention
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_plane_packing import BitPlanePacking
from kvbench.kernels.bit_planes import BitPlaneLayout
from kvbench.kernels.formats import Group, HaarRotation, HeadFormat, RotatedCodebook, Segment
from kvbench.quantizers.bit_allocation import allocate_bits
from kvbench.quantizers.codebooks import codebook

EXACT = "blockgtq-k3v3-exact"
DIM, BITS, WIDEST = 128, 3, 6
OCTAVES = (7.0, 9.0, 8.0, 10.0)  # of energy between a head's strongest and weakest blocks, head after head


def block_widths(head: int) -> tuple[int, ...]:
    """Widths of a head's 64 RoPE blocks, 3 bits on average: the paper's allocator on energies that decay unevenly."""
    noise = np.random.Generator(np.random.Philox(key=head)).normal(scale=0.7, size=DIM // 2)
    octaves = noise - OCTAVES[head % len(OCTAVES)] * np.arange(DIM // 2) / (DIM // 2 - 1)
    return allocate_bits((2.0**octaves).tolist(), BITS * DIM // 2, max_bits=WIDEST)


def _head(members: dict[int, tuple[int, ...]], seed: int) -> HeadFormat:
    """A head with a group, a rotation and an fp16 norm a width."""
    return HeadFormat(
        tuple(
            Group(dims, HaarRotation(len(dims), seed), (Segment(len(dims), codebook(len(dims), bits)),))
            for bits, dims in sorted(members.items(), reverse=True)
        )
    )


def exact_layout(kv_heads: int) -> BitPlaneLayout:
    """A layer's pages: keys with a norm a width, values of 3 bits with one norm."""
    keys = []
    for head in range(kv_heads):
        members: dict[int, tuple[int, ...]] = {}
        for block, bits in enumerate(block_widths(head)):
            members[bits] = (*members.get(bits, ()), block, block + DIM // 2)
        keys.append(_head(members, 100 + head))
    values = tuple(_head({BITS: tuple(range(DIM))}, 900 + head) for head in range(kv_heads))
    return BitPlaneLayout(RotatedCodebook(tuple(keys)), RotatedCodebook(values))


def random_bit_planes(
    layout: BitPlaneLayout, batch: int, tokens: int, device: str, generator: torch.Generator
) -> Tensor:
    """Pages of random bits and norms near 1: every bit pattern is a valid code, and time does not depend on which."""
    pages = layout.allocate(batch, tokens, device)
    pages.random_(0, 256, generator=generator)
    norms = pages.view(torch.float16)
    for starts, size in zip(layout.norm_planes, layout.norm_bytes, strict=True):
        for start in starts:
            norms[:, :, start // 2 : (start + size) // 2].uniform_(0.5, 1.5, generator=generator)
    return pages


def check_general_accuracy(layout: BitPlaneLayout, q_heads: int, device: str, tokens: int) -> dict[str, float]:
    """Relative error of the general kernel and of fp16 attention on the same decoded values, against float64."""
    generator = torch.Generator(device).manual_seed(3)
    packing, start = BitPlanePacking(layout, device), 37
    pages = layout.allocate(1, tokens, device)
    slots = torch.arange(tokens, device=device)[None]
    decoded = []
    for part in (packing.keys, packing.values):
        x = torch.randn(1, tokens, layout.kv_heads, DIM, device=device, generator=generator) * 2
        planes = part.codec.encode(x)
        part.store(pages, planes, slots)
        decoded.append(part.codec.from_space(part.codec.decode(planes)[..., None, :])[:, start:, :, 0].transpose(1, 2))
    q = torch.randn(1, q_heads, DIM, device=device, dtype=torch.float16, generator=generator)
    keys, values = (part.double() for part in decoded)
    queries = q.double().unflatten(1, (layout.kv_heads, -1))
    logits = torch.einsum("bhgd,bhtd->bhgt", queries, keys) * DIM**-0.5
    exact = torch.einsum("bhgt,bhtd->bhgd", logits.softmax(-1), values).flatten(1, 2)
    exact_lse = logits.logsumexp(-1).flatten(1)
    starts, stops = (torch.tensor([bound], dtype=torch.int32, device=device) for bound in (start, tokens))
    out, lse = BitPlaneAttention(layout, device)(q, pages, starts, stops, DIM**-0.5)
    half = fp16_attention.decode("torch-flash", q, *(part.half().contiguous() for part in decoded))
    return {
        "packed_error": float((out - exact).norm() / exact.norm()),
        "fp16_error": float((half - exact).norm() / exact.norm()),
        "lse_error": float((lse - exact_lse).abs().max()),
    }
