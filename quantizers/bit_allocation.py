"""Greedy bit allocation over blocks: the paper's allocator, with a heap."""

import heapq
import math
from collections.abc import Sequence

from kvbench.errors import ConfigurationError


def allocate_bits(scores: Sequence[float], budget: int, min_bits: int = 1, max_bits: int = 8) -> tuple[int, ...]:
    """Widths for blocks with the given scores, summing to ``budget``.

    Every block starts at ``min_bits``; each further bit goes to the block with the largest remaining error
    ``score * 4^-bits`` (ties: the first such block) until the budget is spent. Since every bit divides a block's error
    by four, this minimises ``sum(score * 4^-bits)`` over all allocations (arXiv 2606.24033, section 3).

    Raises ConfigurationError where no allocation meets the budget, ValueError on negative or non-finite scores.
    """
    if any(not math.isfinite(score) or score < 0 for score in scores):
        raise ValueError("block scores must be finite and not negative")
    lowest, highest = len(scores) * min_bits, len(scores) * max_bits
    if not lowest <= budget <= highest:
        raise ConfigurationError(
            f"no allocation of {min_bits} to {max_bits} bits to {len(scores)} blocks spends exactly {budget} bits. "
            f"Choose an average between {min_bits} and {max_bits}, or change min_bits and max_bits."
        )
    widths = [min_bits] * len(scores)
    heap = [(-score * 4.0**-min_bits, block) for block, score in enumerate(scores)]
    heapq.heapify(heap)
    for _ in range(budget - lowest):
        error, block = heapq.heappop(heap)
        widths[block] += 1
        if widths[block] < max_bits:
            heapq.heappush(heap, (error / 4.0, block))
    return tuple(widths)
