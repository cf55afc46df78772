"""Formats for the kernels' tests: heads made of runs of equal widths."""

import torch

from kvbench.kernels.formats import Fp16Norm, Group, HaarRotation, HeadFormat, LogNorm, RotatedCodebook, Segment
from kvbench.quantizers.codebooks import codebook


def head(widths: list[int], unit: int, seed: int, log_norms: bool) -> HeadFormat:
    """A head of ``len(widths) * unit`` dims: ``unit`` dims of each width, one group a distinct width, widest first."""
    groups = []
    dims = torch.randperm(len(widths) * unit, generator=torch.Generator().manual_seed(seed)).tolist()
    for bits in sorted(set(widths), reverse=True):
        count = widths.count(bits) * unit
        mine, dims = tuple(dims[:count]), dims[count:]
        norm = LogNorm(-6.0, 12.0 / 254) if log_norms else Fp16Norm(0.5)
        groups.append(Group(mine, HaarRotation(count, seed), (Segment(count, codebook(count, bits)),), norm))
    return HeadFormat(tuple(groups))


def tensor_format(heads: list[list[int]], unit: int = 32, seed: int = 0, log_norms: bool = False) -> RotatedCodebook:
    """One layer's keys or values: ``heads[h]`` lists head h's widths, ``unit`` dims each."""
    return RotatedCodebook(tuple(head(widths, unit, seed + 7 * h, log_norms) for h, widths in enumerate(heads)))
