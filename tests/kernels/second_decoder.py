"""A second reader of ``RotatedCodebook`` bytes, written from the prose of ``kvbench.kernels.formats`` alone.

Plain Python, one bit at a time, from the format's description as JSON data: nothing of the codec is used. Rotations
come from ``haar``, which the prose names.
"""

import math
from typing import Any

import numpy as np

from kvbench.kernels.rotations import haar


def read_codes(description: dict[str, Any], row: bytes) -> list[list[list[int]]]:
    """The codes of one token: per head, per group, one a coordinate."""
    heads, start = [], 0
    for head in description["heads"]:
        position, groups = 0, []
        for group in head["groups"]:
            codes = []
            for segment in group["segments"]:
                bits = segment["codebook"]["bits"]
                for _ in range(segment["count"]):
                    code = 0
                    for place in range(bits):
                        bit = position + place
                        code |= (row[start + bit // 8] >> bit % 8 & 1) << place
                    codes.append(code)
                    position += bits
            groups.append(codes)
        padding = [row[start + bit // 8] >> bit % 8 & 1 for bit in range(position, -(-position // 8) * 8)]
        assert not any(padding)
        heads.append(groups)
        start += -(-position // 8)
    assert start == len(row)
    return heads


def decode(description: dict[str, Any], row: bytes, norms: list[float]) -> np.ndarray:
    """One token's vectors, float64 ``[kv_heads, head_dim]``; ``norms`` as stored, in units of each group's scale."""
    remaining = iter(norms)
    out = []
    for head, groups in zip(description["heads"], read_codes(description, row), strict=True):
        vector = [0.0] * sum(len(group["dims"]) for group in head["groups"])
        for group, codes in zip(head["groups"], groups, strict=True):
            books = [segment["codebook"] for segment in group["segments"] for _ in range(segment["count"])]
            y = [book["scale"] * book["levels"][code] for book, code in zip(books, codes, strict=True)]
            norm = next(remaining) * group["norm"]["scale"]
            turned = haar(group["rotation"]["dim"], group["rotation"]["seed"])
            for column, dim in enumerate(group["dims"]):
                vector[dim] = norm * math.fsum(turned[j, column] * y[j] for j in range(len(y)))
        out.append(vector)
    return np.array(out)
