"""Prefill attention: a chunk of queries over packed tile pages and the chunk's own tokens, by log-sum-exp.

Packed tokens are decoded a bounded tile at a time into fp16 keys and values, which one library call attends to
(FlashAttention-2 as PyTorch ships it); the tiles' results merge by their log-sum-exps. Whatever the context, the
memory beyond the pages is one tile and a few tensors of the chunk's size. Nothing is un-rotated but the output: queries
move into the keys' space once. On a CPU the same tiles are attended to by the torch reference.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.attention import Partial, attend_dense
from kvbench.kernels.formats import Fp16Norm
from kvbench.kernels.tile_centre import TileCentre
from kvbench.kernels.tiles import DIM, PAGE, SLABS, UNIT, HeadTile, TileLayout, code_places, matrices, stored_patterns

TILE_TOKENS = 16384  # decoded at a time, all sequences together: 64 MB of keys and values with 8 KV heads


@dataclass(frozen=True)
class _Tables:
    """What decoding reads about the heads; shapes in :func:`kvbench.kernels.tile_prefill_kernels.decode_pages`."""

    offsets: Tensor
    places: Tensor
    levels: Tensor
    runs: Tensor
    norms: Tensor


def _tables(layout: TileLayout, device: torch.device) -> _Tables:
    heads = layout.kv_heads
    levels = np.zeros((heads, 2, SLABS, 16), np.float32)
    runs, norms = np.zeros((heads, 2, SLABS), np.int32), np.zeros((heads, 2, 3, 3), np.float32)
    pairs: list[tuple[HeadTile, HeadTile]] = list(zip(layout.key, layout.value, strict=True))
    for index, tile in np.ndenumerate(np.array(pairs, dtype=object)):
        for run, ((start, count), group, book) in enumerate(zip(tile.runs, tile.groups, tile.codebooks, strict=True)):
            mine = (*index, slice(start, start + count))
            order = np.argsort(stored_patterns(book.bits))  # the code behind each stored pattern
            levels[mine][:, : len(order)] = np.float32(book.scale) * np.array(book.levels, np.float32)[order]
            runs[mine] = run
            if isinstance(group.norm, Fp16Norm):
                norms[(*index, run, 2)] = group.norm.scale
            else:
                norms[(*index, run)][:2] = group.norm.low, group.norm.step
    places = np.array([[code_places(tile.template) for tile in pair] for pair in pairs], np.int32)
    offsets = np.ascontiguousarray(layout.offsets[:heads] // UNIT, np.int32)
    return _Tables(*(torch.from_numpy(array).to(device) for array in (offsets, places, levels, runs, norms)))


class TilePrefill:
    """Attention of a chunk of query tokens over one layer's tile pages and over the chunk itself.

    ``tile_tokens`` bounds the tokens decoded at a time over all sequences (at least a page a sequence is). On a GPU, a
    chunk of float32 keys and values is attended to in torch, which holds its logits whole.
    """

    def __init__(self, layout: TileLayout, device: torch.device | str, tile_tokens: int = TILE_TOKENS) -> None:
        self.layout, self.device, self.tile_tokens = layout, torch.device(device), tile_tokens
        self._tables = _tables(layout, self.device)
        self._centre = TileCentre.of(layout.key_format, self.device)
        self._key_rotation = matrices(layout.key_format)[1].to(self.device)
        self._value_rotation = matrices(layout.value_format)[1].to(self.device)

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        starts: Tensor,
        stop: int,
        scaling: float,
        own: tuple[Tensor, Tensor] | None = None,
        own_starts: Tensor | None = None,
        extra: Partial | None = None,
        origins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend a chunk ``q [batch, tokens, q_heads, 128]`` (fp16, bf16 or fp32; rotary embedding applied).

        Every query sees the packed tokens ``starts[b] <= t < stop`` of its sequence in ``pages [batch, pages,
        page_bytes]`` (``starts`` int32 ``[batch]``, on the device), and causally the chunk itself:

        - ``own`` given: full-precision keys and values ``[batch, tokens, kv_heads, 128]`` of the chunk;
        - ``own`` None: the chunk as packed, in slots ``stop .. stop + tokens`` of ``pages``.

        The first ``own_starts[b]`` tokens of the chunk are padding that nobody sees (int32 ``[batch]``; by default
        those whose slot ``stop + i`` is before ``starts[b]``); the outputs at padding are finite and mean nothing.
        ``extra``: the same queries' attention over tokens held elsewhere, ``out [batch, tokens, q_heads, 128]`` and
        natural ``lse [batch, tokens, q_heads]``, merged in. ``origins`` (int32 ``[batch]``, on the device): the slot of
        each sequence's position 0, where keys have a centre; ``starts`` where None.

        Returns ``out`` like ``q`` and natural ``lse`` float32 ``[batch, tokens, q_heads]``, of all tokens seen.
        """
        batch, tokens, q_heads, dim = q.shape
        if dim != DIM or q_heads % self.layout.kv_heads:
            raise ValueError(f"q must be [batch, tokens, multiple of {self.layout.kv_heads}, 128], not {list(q.shape)}")
        if own_starts is None:
            own_starts = (starts - stop).clamp(0, tokens)
        packed_stop = stop if own is not None else stop + tokens
        if not 0 <= packed_stop <= pages.shape[1] * PAGE:
            raise ValueError(f"pages hold {pages.shape[1] * PAGE} tokens a sequence, not {packed_stop}")
        merged = _Merged(batch, tokens, q_heads, q.device)
        if packed_stop:
            turned = _turn(self._key_rotation, q).to(_working(q.device))
            origins = starts if origins is None else origins
            for keys, values, first in self._tiles(pages, 0, stop, origins):
                bounds = (starts - first).clamp(0, keys.shape[1]), min(stop - first, keys.shape[1])
                merged.add(*_attend(turned, keys, values, *bounds, torch.zeros_like(own_starts), False, scaling))
            if own is None:
                ((keys, values, first),) = self._tiles(pages, stop, packed_stop, origins, whole=True)
                bounds = stop - first + own_starts, packed_stop - first
                merged.add(*_attend(turned, keys, values, *bounds, own_starts, True, scaling))
            del turned
            merged.out = _turn(self._value_rotation.transpose(1, 2), merged.out)
        if own is not None:
            merged.add(*_attend(q, *own, own_starts, tokens, own_starts, True, scaling))
        if extra is not None:
            merged.add(extra.out, extra.lse)
        return merged.out.to(q.dtype), merged.lse

    def _tiles(
        self, pages: Tensor, start: int, stop: int, origins: Tensor, whole: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Tokens ``start..stop`` decoded, as ``(keys, values, slot of their first token)``, in one or several tiles.

        The tensors are overwritten by the next tile.
        """
        batch, heads = pages.shape[0], self.layout.kv_heads
        begin, end = start // PAGE, -(-stop // PAGE)
        share = end - begin if whole else min(end - begin, max(1, self.tile_tokens // (batch * PAGE)))
        space = torch.empty(2, batch, share * PAGE, heads, DIM, dtype=torch.float16, device=pages.device)
        for page in range(begin, end, max(share, 1)):
            count = min(share, end - page)
            keys, values = space.flatten(1)[:, : batch * count * PAGE * heads * DIM].view(2, batch, -1, heads, DIM)
            self.decode(pages, page, keys, values)
            if self._centre is not None:
                slots = torch.arange(page * PAGE, (page + count) * PAGE, device=pages.device)
                keys += self._centre.coordinates(slots - origins[:, None])
            yield keys.to(_working(pages.device)), values.to(_working(pages.device)), page * PAGE

    def decode(self, pages: Tensor, first_page: int, keys: Tensor, values: Tensor) -> None:
        """Decode pages from ``first_page`` on into ``keys`` and ``values``, rotated, float16 ``[batch, tokens,
        kv_heads, 128]`` contiguous, ``tokens`` a multiple of 128."""
        from kvbench.kernels.tile_prefill_kernels import decode_pages

        t, (batch, tokens, heads, _) = self._tables, keys.shape
        decode_pages[(tokens // PAGE, 2 * heads, batch)](
            pages, first_page, self.layout.page_bytes, pages.stride(0), t.offsets, t.places, t.levels, t.runs, t.norms,
            keys, values, tokens, heads, KEY_LOG=self.layout.key_norm_bits == 8,
            VALUE_LOG=self.layout.value_norm_bits == 8, num_warps=4,
        )  # fmt: skip


def _working(device: torch.device) -> torch.dtype:
    """What tiles are attended to in: FlashAttention takes fp16; the reference has no reason to round queries."""
    return torch.float16 if device.type == "cuda" else torch.float32


def _turn(matrices: Tensor, x: Tensor) -> Tensor:
    """Every KV head's matrix ``[kv_heads, 128, 128]`` times its query heads' vectors ``[batch, tokens, q_heads, 128]``,
    float32."""
    batch, tokens, q_heads, dim = x.shape
    rows = x.float().view(batch * tokens, len(matrices), -1, dim)
    return torch.einsum("hcd,nhgd->nhgc", matrices, rows).reshape(batch, tokens, q_heads, dim)


class _Merged:
    """Attention over the tokens added so far: ``out`` float32 ``[batch, tokens, q_heads, 128]`` and natural ``lse``."""

    def __init__(self, batch: int, tokens: int, q_heads: int, device: torch.device) -> None:
        self.out = torch.zeros(batch, tokens, q_heads, DIM, device=device)
        self.lse = torch.full((batch, tokens, q_heads), -torch.inf, device=device)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the same queries' attention over further tokens."""
        total = torch.logaddexp(self.lse, lse)
        weight = torch.exp(lse - total).nan_to_num_(0.0)  # NaN where neither saw a token
        self.out.lerp_(out.float(), weight.unsqueeze(-1))
        self.lse = total


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    stop: int,
    padding: Tensor,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q [batch, queries, q_heads, 128]`` to tokens ``start[b]..stop`` of dense keys and values
    ``[batch, tokens, kv_heads, 128]``: ``out`` and natural ``lse [batch, queries, q_heads]``.

    Causal: the last query sees all tokens, the one before it one fewer, ...; the first ``padding[b]`` queries get
    results without a meaning.
    """
    if q.device.type == "cuda" and q.dtype != torch.float32:
        return _flash(q, keys, values, start, stop, padding, causal, scaling)
    batch, queries = q.shape[:2]
    place = torch.arange(keys.shape[1], device=q.device)
    visible = ((place >= start[:, None]) & (place < stop))[:, None].expand(batch, queries, -1)
    if causal:
        last = torch.arange(stop - queries, stop, device=q.device)
        visible = visible & (place <= last[:, None])
    grouped = q.unflatten(2, (keys.shape[2], -1))
    partial = attend_dense(grouped, keys, values, visible, scaling)
    return partial.out.flatten(2, 3), partial.lse.flatten(2, 3)


def _flash(
    q: Tensor, keys: Tensor, values: Tensor, start: Tensor, stop: int, padding: Tensor, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """:func:`_attend` by FlashAttention-2. Bounds stay on the device: the library is told that each sequence is three,
    of which the middle one holds the queries and tokens that matter, the first the padding and the last what is left.

    (For one query the library has a path of its own that ignores the bounds; so it is told of two at most.)
    """
    batch, queries, q_heads, _ = q.shape
    tokens = keys.shape[1]
    rows = torch.arange(batch, device=q.device, dtype=torch.int32)
    middle = torch.full_like(rows, stop)

    def bounds(length: int, first: Tensor, last: Tensor) -> Tensor:
        inner = torch.stack([torch.zeros_like(rows), first.int(), last.int()], 1) + rows[:, None] * length
        return torch.nn.functional.pad(inner.flatten(), (0, 1), value=batch * length)

    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1),
        bounds(queries, padding, torch.full_like(rows, queries)), bounds(tokens, start.clamp_max(stop), middle),
        max(queries, 2), tokens, 0.0, causal, False, scale=scaling,
    )  # fmt: skip
    lse = lse.transpose(0, 1).view(batch, queries, q_heads)
    return out.view(q.shape), torch.where(lse == torch.inf, -torch.inf, lse)  # infinity where no token was seen
