"""Decode attention over tile pages: head tables, the launches, and the torch reference they are tested against."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.attention import Partial
from kvbench.kernels.codec import Codec
from kvbench.kernels.formats import Fp16Norm, Group
from kvbench.kernels.page_attention import FEW, LOG2_E, MAX_GROUP, MERGE, PageAttention, padded_group
from kvbench.kernels.tile_centre import TileCentre
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tiles import (
    SLABS,
    UNIT,
    HeadTile,
    TileLayout,
    byte_levels,
    code_places,
    matrices,
    stored_patterns,
)

CODE_UNIT = 32768  # kernels read a log code as 1 + code / CODE_UNIT: see kernels.tile_norms
BLOCKS_PER_MULTIPROCESSOR = 3  # a fourth would leave each 128 registers, and a sixth of the loop would move them about
REGISTERS = 168
STAGES = 3  # pages in flight a block


@dataclass(frozen=True)
class _Tables:
    """What the kernels read about the heads of a layer; shapes in :mod:`kvbench.kernels.tile_kernels`."""

    ints: Tensor
    floats: Tensor
    places: Tensor
    levels: Tensor
    key_rotation: Tensor
    value_rotation: Tensor
    value_scale: Tensor


def _words(levels: list[int]) -> list[int]:
    """Signed bytes as one or two 32-bit words, first byte lowest."""
    octets = np.array(levels, dtype=np.int8)
    return np.resize(octets, max(4, len(octets))).view(np.int32).tolist()


def norm_code(group: Group) -> tuple[float, float, float]:
    """A norm code as ``unit * 2^(low + step * (1 + code / CODE_UNIT))`` (log) or ``unit * float16`` (low, step unused).

    ``low`` and ``step`` are float32 numbers; what rounding takes off ``low``, ``unit`` makes good.
    """
    if isinstance(group.norm, Fp16Norm):
        return group.norm.scale, 0.0, 0.0
    step = float(np.float32(group.norm.step * CODE_UNIT))
    largest = (2**group.norm.bits - 1) * group.norm.step  # the largest norm is the unit
    exact = -largest - step
    low = float(np.float32(exact))
    return 2.0 ** (group.norm.low + largest + exact - low), low, step


def _stored_levels(tile: HeadTile) -> list[list[int]]:
    """The signed byte of every stored pattern, ``[4 slabs, 16]``."""
    rows = [[0] * 16 for _ in range(SLABS)]
    for (start, count), book in zip(tile.runs, tile.codebooks, strict=True):
        for slab in range(start, start + count):
            for pattern, level in zip(stored_patterns(book.bits), byte_levels(book)[0], strict=True):
                rows[slab][pattern] = level
    return rows


def _tables(layout: TileLayout, device: torch.device) -> _Tables:
    from kvbench.kernels import tile_pages as k

    heads = layout.kv_heads
    ints, floats = np.zeros((heads, k.INTS), np.int32), np.zeros((heads, k.FLOATS), np.float32)
    value_scale = np.zeros(heads, np.float32)
    table_column = {4: 0, 3: 2, 2: 4, 1: 5}
    for head, (key, value) in enumerate(zip(layout.key, layout.value, strict=True)):
        ints[head, k.TEMPLATE] = key.template
        ints[head, [k.KEY_CODES, k.VALUE_CODES, k.KEY_NORMS, k.VALUE_NORM]] = layout.offsets[head] // UNIT
        for run, (group, book) in enumerate(zip(key.groups, key.codebooks, strict=True)):
            levels, scale, offset = byte_levels(book)
            words = _words(levels[8:] if book.bits == 4 else levels)
            at = k.KEY_TABLES + table_column[book.bits]
            ints[head, at : at + len(words)] = words
            unit, floats[head, k.KEY_LOW + run], floats[head, k.KEY_STEP + run] = norm_code(group)
            floats[head, k.KEY_SCALE + run], floats[head, k.KEY_OFFSET + run] = scale * unit, offset
        levels, scale, _ = byte_levels(value.codebooks[0])
        words = _words(levels[8:] if value.codebooks[0].bits == 4 else levels)
        ints[head, k.VALUE_TABLE : k.VALUE_TABLE + len(words)] = words
        unit, floats[head, k.VALUE_LOW], floats[head, k.VALUE_STEP] = norm_code(value.groups[0])
        value_scale[head] = unit * scale
    pairs = list(zip(layout.key, layout.value, strict=True))
    tensor = lambda array, dtype: torch.as_tensor(np.array(array)).to(device, dtype)  # noqa: E731
    return _Tables(
        ints=tensor(ints, torch.int32),
        floats=tensor(floats, torch.float32),
        places=tensor([[code_places(tile.template) for tile in pair] for pair in pairs], torch.int32),
        levels=tensor([[_stored_levels(tile) for tile in pair] for pair in pairs], torch.int8),
        key_rotation=matrices(layout.key_format)[1].to(device).contiguous(),
        value_rotation=matrices(layout.value_format)[1].to(device).contiguous(),
        value_scale=tensor(value_scale, torch.float32),
    )


@dataclass(frozen=True)
class NewToken:
    """A token that attention stores before it reads: ``keys, values [batch, 1, kv_heads, 128]`` into ``slots [batch]``
    (int32, on the device) as ``encoder`` does, which takes ``origins`` too."""

    encoder: TileEncoder
    keys: Tensor
    values: Tensor
    slots: Tensor
    origins: Tensor | None = None


class TileAttention(PageAttention):
    """Attention of one query token a sequence over one layer's tile pages, in Triton.

    ``rotate_output=False`` leaves the output in the values' rotated space, for a model whose output projection has that
    rotation folded in.
    """

    layout: TileLayout

    def __init__(
        self,
        layout: TileLayout,
        device: torch.device | str,
        assembly: bool | None = None,
        splits: int | None = None,
        rotate_output: bool = True,
    ) -> None:
        super().__init__(layout, device, assembly, splits)
        self.rotate_output = rotate_output
        self.tables = _tables(layout, self.device)
        self._centre = TileCentre.of(layout.key_format, self.device)

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        starts: Tensor,
        stops: Tensor,
        scaling: float,
        extra: Partial | None = None,
        new: "NewToken | None" = None,
        origins: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend ``q [batch, q_heads, 128]`` to tokens ``starts[b] <= t < stops[b]`` (int32, on the device).

        ``pages [batch, pages, page_bytes]`` uint8. ``extra``: the same queries' attention over other tokens, ``out
        [batch, q_heads, 128]`` and natural ``lse [batch, q_heads]`` float32, to be merged in. ``new``: a token that is
        stored first, by the launch that rotates the query. ``origins`` (int32 ``[batch]``, on the device): the slot of
        each sequence's position 0, where keys have a centre; ``starts`` where None. Returns ``out`` in q's dtype and
        ``lse`` float32; both are those of no token (0, minus infinity) where there is none.
        """
        from kvbench.kernels import tile_kernels as k
        from kvbench.kernels.tile_step_kernels import append_and_rotate

        batch, q_heads, dim = q.shape
        kv_heads, t = self.layout.kv_heads, self.tables
        group = self.group_of(q, pages)
        q = q if q.stride(-1) == 1 else q.contiguous()
        rows, heads = batch * kv_heads, padded_group(group)
        splits = self.splits_for(batch, pages.shape[1], group)
        empty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=q.device)  # noqa: E731
        query = empty((rows, heads, dim), torch.float32)
        partial, partial_lse = (
            empty((rows, heads, splits, 128), torch.float16),
            empty((rows, heads, splits), torch.float32),
        )
        out, lse = empty((batch, q_heads, dim), q.dtype), empty((batch, q_heads), torch.float32)
        others = (out, lse) if extra is None else (extra.out, extra.lse)
        turned = (empty(out.shape, torch.float32), torch.empty_like(lse)) if self.rotate_output else (out, lse)
        variant = self.variant(group)
        centre = self._centre and self._centre.reading(q, starts if origins is None else origins)
        sizes = (kv_heads, self.layout.page_bytes, pages.stride(0))
        cuda = self.device.type == "cuda"
        launch = {"launch_pdl": True} if cuda else {}
        few = rows * group * 4 <= FEW
        block = 1 if few else MAX_GROUP
        blocks = -(-group // block)
        turning = (q, t.key_rotation, query, group, q.stride(0), q.stride(1))
        how = {"HEADS": heads, "BLOCK": block, "DEPENDENT": cuda, "num_warps": 4}
        if new is None:
            k.rotate_query[(rows, blocks, 4)](*turning, kv_heads, **how)
        else:
            inputs, constants = new.encoder.arguments(new.keys, new.values, pages, new.slots, new.origins)
            append_and_rotate[((2 + blocks * 4) * kv_heads, batch)](*inputs, *turning, **constants, **how)
        k.attend[(splits, rows)](
            query, group, scaling * LOG2_E, pages, t.ints, t.floats, t.places, t.levels, starts, stops, partial,
            partial_lse, *sizes, centre, **variant, STAGES=STAGES if self.assembly else 1, ASSEMBLY=self.assembly,
            DEPENDENT=self.dependent(rows * splits, group), num_warps=4, **launch,
            **({"maxnreg": REGISTERS} if self.assembly else {}),
        )  # fmt: skip
        k.merge[(rows, group, 4)](
            partial, partial_lse, t.value_scale, starts, stops, *others, *turned, kv_heads, splits,
            HEADS=heads, SPLITS=1 << (splits - 1).bit_length(), EXTRA=extra is not None and not self.rotate_output,
            DEPENDENT=cuda, **MERGE, num_warps=4 if few else 2, **launch,
        )  # fmt: skip
        if self.rotate_output:
            k.rotate_output[(rows, blocks, 4)](
                *turned, t.value_rotation, *others, out, lse, kv_heads, group,
                BLOCK=block, EXTRA=extra is not None, DEPENDENT=cuda, num_warps=4, **launch,
            )  # fmt: skip
        return out, lse

    def occupancy(self, group: int) -> tuple[int, int]:
        return BLOCKS_PER_MULTIPROCESSOR, REGISTERS

    def variant(self, group: int) -> dict[str, int]:
        """The compile-time constants of the page loop: two layers that agree in them share a compiled kernel."""
        return {
            "HEADS": padded_group(group),
            "WORDS": self.layout.key_words,
            "VALUE_TEMPLATE": self.layout.value[0].template,
            "VALUE_WORDS": self.layout.value_words,
            "KEY_LOG": self.layout.key_norm_bits == 8,
            "VALUE_LOG": self.layout.value_norm_bits == 8,
            "CENTRE": self._centre is not None,
        }


def reference_attention(
    q: Tensor,
    layout: TileLayout,
    pages: Tensor,
    starts: Tensor,
    stops: Tensor,
    scaling: float,
    origins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What :class:`TileAttention` computes, from the reference codec's decoded values, in float64.

    Same arguments and results (both float64). Slow: it decodes every token.
    """
    batch, q_heads, dim = q.shape
    kv_heads = layout.kv_heads
    key_codec, value_codec = layout.key_format.codec(pages.device), layout.value_format.codec(pages.device)
    queries = q.reshape(batch, kv_heads, -1, dim)
    turned = torch.einsum("hcd,bhgd->bhgc", matrices(layout.key_format)[1].to(q.device).double(), queries.double())
    outs, lses = [], []
    for b in range(batch):
        start, stop = int(starts[b]), int(stops[b])
        keys, values = (
            decode_codes(codec, *part) for codec, part in _parts(layout, pages[b], stop, key_codec, value_codec)
        )
        logits = torch.einsum("hgc,thc->hgt", turned[b], keys[start:stop])
        position = torch.arange(start, stop, device=q.device) - (starts if origins is None else origins)[b]
        if (centre := key_codec.centre(position)) is not None:
            logits += torch.einsum("hgd,thd->hgt", queries[b].double(), centre.double())
        logits *= scaling
        lses.append(torch.logsumexp(logits, -1))
        weights = torch.exp(logits - lses[-1].nan_to_num(neginf=0.0)[..., None])
        outs.append(torch.einsum("hgt,thc->hgc", weights, values[start:stop]))
    turn_back = matrices(layout.value_format)[1].to(q.device).double()
    out = torch.einsum("hcd,bhgc->bhgd", turn_back, torch.stack(outs))
    return out.reshape(batch, q_heads, dim), torch.stack(lses).reshape(batch, q_heads)


def _parts(
    layout: TileLayout, pages: Tensor, tokens: int, key_codec: Codec, value_codec: Codec
) -> list[tuple[Codec, tuple[Tensor, Tensor]]]:
    key_codes, key_norms, value_codes, value_norms = layout.unpack(pages, tokens)
    return [(key_codec, (key_codes, key_norms)), (value_codec, (value_codes, value_norms))]


def decode_codes(codec: Codec, codes: Tensor, norms: Tensor) -> Tensor:
    """Codes ``[tokens, kv_heads, 128]`` and stored norms in the codec's own decoder, float64."""
    rows = codec.layout.pack(codes.flatten(1))  # type: ignore[attr-defined]
    return codec.decode((rows, norms)).double()
