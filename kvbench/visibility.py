"""Which tokens the queries of a chunk may see, and which copy of each token they read: packed, sink or recent."""

import torch
from torch import Tensor

from kvbench.cache_options import CacheOptions


class Visibility:
    """What ``count`` queries of ``batch`` sequences see of a layer of ``tokens`` slots, of which theirs are the last.

    Slots count from 0, left padding included. ``mask`` is the model's own, bool or additive ``[batch, 1, count,
    tokens]``, or None for plain causal. ``kept_recent``: tokens before the chunk that the recent window holds.
    """

    def __init__(
        self,
        options: CacheOptions,
        mask: Tensor | None,
        batch: int,
        count: int,
        tokens: int,
        kept_recent: int,
        device: torch.device,
    ) -> None:
        self.options, self.batch, self.count, self.tokens, self.kept_recent = options, batch, count, tokens, kept_recent
        self.first = tokens - count
        self.slots = torch.arange(self.first, tokens, device=device)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask == 0  # an additive mask: zero keeps, anything else is minus infinity in some dtype
        self.mask = None if mask is None else mask[:, 0, :, :tokens]
        if self.mask is None:
            self.starts = torch.zeros(batch, dtype=torch.long, device=device)
        else:
            # the newest query sees every real token, so its first visible slot is the sequence's start
            self.starts = self.mask[:, -1].to(torch.uint8).argmax(-1).expand(batch)

    def allowed(self, start: int, stop: int) -> Tensor:
        """The model's own mask for slots ``start..stop``: bool ``[batch or 1, queries, stop - start]``."""
        if self.mask is not None:
            return self.mask[:, :, start:stop]
        return (torch.arange(start, stop, device=self.slots.device) <= self.slots[:, None])[None]

    def in_windows(self, start: int, stop: int) -> Tensor | None:
        """Slots that are read in full precision: bool, broadcastable to ``[batch, queries, stop - start]``."""
        slots = torch.arange(start, stop, device=self.slots.device)
        parts = []
        if self.options.n_sink:
            parts.append(self.sinks(slots))
        recent = self.recent(slots)
        if recent is not None:
            parts.append(recent[None])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else parts[0] | parts[1]

    def sinks(self, slots: Tensor) -> Tensor:
        """Which ``slots`` are among their sequence's first ``n_sink`` tokens, padding before them included.

        ``[batch, 1, slots]``.
        """
        return (slots[None] < (self.starts + self.options.n_sink)[:, None])[:, None]

    def recent(self, slots: Tensor) -> Tensor | None:
        """Which ``slots`` each query reads from the recent window or its own exact chunk: ``[queries, slots]``."""
        recent = None
        if self.options.recent_window:
            recent = slots[None] > self.slots[:, None] - self.options.recent_window
            recent &= slots[None] >= self.first - self.kept_recent
        if self.options.exact_prefill:
            chunk = (slots[None] >= self.first).expand(self.count, -1)
            recent = chunk if recent is None else recent | chunk
        return recent

    def packed(self, start: int, stop: int) -> Tensor:
        """Which of the slots ``start..stop`` each query reads from packed storage: bool, broadcastable."""
        windows = self.in_windows(start, stop)
        allowed = self.allowed(start, stop)
        return allowed if windows is None else allowed & ~windows

    def own(self) -> Tensor:
        """Which slots of the chunk each of its queries reads, sinks left out: bool ``[batch or 1, queries, count]``."""
        allowed = self.allowed(self.first, self.tokens)
        return allowed & ~self.sinks(self.slots) if self.options.n_sink else allowed

    def packed_span(self) -> tuple[Tensor, Tensor]:
        """What a single query reads from packed storage: slots ``starts[b] <= t < stops[b]``, int32 ``[batch]``.

        Never less than none: ``stops[b]`` is at least ``starts[b]``.
        """
        recent = min(self.options.recent_window, self.kept_recent + 1)
        if self.options.exact_prefill:
            recent = max(recent, 1)
        starts = (self.starts + self.options.n_sink).to(torch.int32)
        return starts, starts.clamp_min(self.tokens - recent)
