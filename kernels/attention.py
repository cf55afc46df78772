"""Reference attention over packed storage, in torch: partial results that merge by log-sum-exp.

A part of the cache (packed tokens, full-precision windows) is attended on its own and gives a :class:`Partial`: its
normalised output and the log-sum-exp of its logits. Partials of disjoint sets of tokens merge exactly. Packed tokens
are decoded a bounded tile at a time and never un-rotated: the query moves into the key format's space, the output
out of the value format's.

Shapes: queries ``[batch, queries, kv_heads, group, head_dim]``; keys and values ``[batch, tokens, kv_heads,
head_dim]``. Arithmetic is float32 whatever comes in.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.codec import Codec

TILE = 1024  # tokens decoded at a time

Visible = Callable[[int, int], Tensor | None]
"""``visible(start, stop)``: which of the tokens ``start..stop`` each query may see, bool ``[batch, queries, tokens]``
(dims of size 1 broadcast); None where all may be seen."""


@dataclass(frozen=True)
class Partial:
    """Attention over some of the tokens.

    ``out [batch, queries, kv_heads, group, head_dim]`` is normalised over these tokens alone; ``lse [batch, queries,
    kv_heads, group]`` is the log of the sum of exponentials of their logits, minus infinity where none was visible.
    """

    out: Tensor
    lse: Tensor


class _OnlineSoftmax:
    """Accumulates softmax-weighted values tile by tile (Milakov and Gimelshein, arXiv 1805.02867)."""

    def __init__(self, queries: Tensor, scaling: float) -> None:
        self.queries, self.scaling = queries.float(), scaling
        self.peak = torch.full(queries.shape[:-1], -torch.inf, device=queries.device)
        self.total = torch.zeros(queries.shape[:-1], device=queries.device)
        self.sum: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor, visible: Tensor | None, more_logits: Tensor | None = None) -> None:
        logits = torch.einsum("bqhgd,bthd->bqhgt", self.queries, keys)
        if more_logits is not None:
            logits += more_logits
        logits *= self.scaling
        if visible is not None:
            logits.masked_fill_(~visible[:, :, None, None, :], -torch.inf)
        peak = torch.maximum(self.peak, logits.amax(-1))
        # a query that has seen nothing yet has no peak; any finite stand-in leaves its weights at zero
        anchor = torch.where(peak == -torch.inf, 0.0, peak)
        weights = torch.exp(logits - anchor.unsqueeze(-1))
        decay = torch.exp(self.peak - anchor)
        added = torch.einsum("bqhgt,bthd->bqhgd", weights, values)
        self.sum = added if self.sum is None else self.sum * decay.unsqueeze(-1) + added
        self.total = self.total * decay + weights.sum(-1)
        self.peak = peak

    def result(self) -> Partial:
        assert self.sum is not None
        out = self.sum / self.total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        return Partial(out, self.peak + torch.log(self.total))


def attend_dense(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, scaling: float) -> Partial:
    """Attention over full-precision keys and values; ``visible`` bool ``[batch, queries, tokens]``."""
    softmax = _OnlineSoftmax(queries, scaling)
    softmax.add(keys.float(), values.float(), visible)
    return softmax.result()


def attend_packed(
    queries: Tensor,
    key_codec: Codec,
    value_codec: Codec,
    key_planes: tuple[Tensor, ...],
    value_planes: tuple[Tensor, ...],
    visible: Visible,
    scaling: float,
    starts: Tensor | None = None,
    tile: int = TILE,
) -> Partial:
    """Attention over packed tokens; planes are ``[batch, tokens, width]``.

    ``starts [batch]`` is the slot of each sequence's position 0 (left padding comes before it); zeros where None.
    """
    if starts is None:
        starts = torch.zeros(queries.shape[0], dtype=torch.long, device=queries.device)
    softmax = _OnlineSoftmax(key_codec.to_space(queries), scaling)
    tokens = key_planes[0].shape[1]
    for start in range(0, tokens, tile):
        stop = min(start + tile, tokens)
        tile_planes = tuple(plane[:, start:stop] for plane in key_planes)
        keys = key_codec.decode(tile_planes)
        values = value_codec.decode(tuple(plane[:, start:stop] for plane in value_planes))
        centre = key_codec.centre_logits(queries, start - starts, stop - start)
        if centre is not None and (centred := key_codec.centred(tile_planes)) is not None:
            centre = centre * centred.transpose(1, 2)[:, None, :, None]
        softmax.add(keys, values, visible(start, stop), centre)
    partial = softmax.result()
    out, offset = value_codec.from_space(partial.out), value_codec.output_offset()
    return Partial(out if offset is None else out + offset[:, None], partial.lse)


def merge(partials: list[Partial]) -> Partial:
    """The attention over the union of disjoint sets of tokens."""
    if len(partials) == 1:
        return partials[0]
    lse = torch.stack([partial.lse for partial in partials])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total == -torch.inf, 0.0, total))
    out = torch.stack([partial.out for partial in partials])
    return Partial((weights.unsqueeze(-1) * out).sum(0), total)
