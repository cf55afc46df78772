"""Decode attention over bit-plane pages: head tables and the launches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.attention import Partial
from kvbench.kernels.bit_planes import CELL, SIGNED, WIDE, BitPlaneLayout, Cell, Coordinate, registers, split_levels
from kvbench.kernels.formats import Codebook, Group
from kvbench.kernels.page_attention import FEW, LOG2_E, MAX_GROUP, MERGE, PageAttention, padded_group
from kvbench.kernels.rotated_codebook import head_matrices
from kvbench.kernels.tile_attention import norm_code
from kvbench.kernels.tiles import UNIT, byte_levels, stored_patterns

MOST_COLUMNS = 64  # of the query's operand at a time: their products are registers


@dataclass(frozen=True)
class _Tables:
    """What the kernels read about the heads of a layer; see :mod:`kvbench.kernels.bit_plane_operands`."""

    ints: Tensor
    floats: Tensor
    levels: Tensor
    table: int  # levels a head and tensor
    key_matrix: Tensor
    value_matrix: Tensor


class _Levels:
    """A head's levels as the kernels look them up in memory: codebooks one after the other, high byte lowest."""

    def __init__(self) -> None:
        self.entries: list[int] = []
        self._places: dict[tuple[Codebook, bool], int] = {}

    def place(self, codebook: Codebook, signed: bool) -> int:
        """Where a codebook starts; ``signed``: by stored pattern, not by code."""
        key = (codebook, signed)
        if key not in self._places:
            self._places[key] = len(self.entries)
            high, low, _ = split_levels(codebook)
            codes = np.argsort(stored_patterns(4)) if signed else range(len(high))
            self.entries += [(high[code] & 255) | low[code] << 8 for code in codes]
        return self._places[key]


def _registers(codebook: Codebook) -> tuple[int, int]:
    """The eight signed bytes that a code's low three bits choose from, as two 32-bit words."""
    levels = byte_levels(codebook)[0]
    octets = np.resize(np.array(levels[8:] if codebook.bits == 4 else levels, dtype=np.int8), 8)
    low, high = octets.view(np.int32).tolist()
    return low, high


def operand_rows(slabs: int) -> np.ndarray:
    """The cell and the place in it of every row of the keys' operand, ``[32 * slabs, 2]``."""
    row = np.arange(32 * slabs)
    return np.stack([row // 32 * 4 + (row >> 2 & 3), (row & 3) + 4 * (row >> 4 & 1)], 1)


def result_rows(rows: int) -> np.ndarray:
    """The coordinate (widest first) of every row of the values' operand, ``[rows]``."""
    row = np.arange(rows)
    lane = 8 * (row >> 4 & 3) + (row & 7)
    return lane * (rows // 32) + 2 * (row >> 6) + (row >> 3 & 1)


def _key_head(layout: BitPlaneLayout, head: int, levels: _Levels) -> dict[str, np.ndarray]:
    rows, cells = layout.rows, layout.cells[head]
    places, groups = np.zeros((4 * layout.slabs, CELL), np.int32), np.full(rows, -1, np.int32)
    offsets, registers_of = np.zeros(rows, np.float32), np.zeros((4 * layout.slabs, 8), np.int32)
    order = layout.norm_order[head]
    read = head_matrices(layout.key_format.heads[head])[1]
    matrix = np.zeros((rows, layout.head_dim), np.float32)
    for row, (at, n) in enumerate(operand_rows(layout.slabs)):
        cell = cells[at] if at < len(cells) else Cell(())
        if n >= len(cell.members):
            continue
        member = cell.members[n]
        signed = layout.signed_at(at, member)
        places[at, n] = levels.place(member.codebook, signed)
        groups[row] = order.index(member.group)
        offsets[row] = 0.5 if signed else 0.0
        matrix[row] = read[member.index] * _unit(layout.key_format.heads[head].groups[member.group], member)
    for at, cell in enumerate(cells):
        if layout.slab_kind(at // 4) != WIDE:
            registers_of[at] = _cell_registers(cell)
    return {"places": places, "groups": groups, "offsets": offsets, "registers": registers_of, "matrix": matrix}


def _cell_registers(cell: Cell) -> np.ndarray:
    """Registers of a cell's first codebook, of its other one, and which codes the other is for: a byte mask a half."""
    books = list(dict.fromkeys(member.codebook for member in cell.members))
    other = np.zeros(CELL, np.int8)
    other[: len(cell.members)] = [-1 if member.codebook != books[0] else 0 for member in cell.members]
    return np.array([*_registers(books[0]), *_registers(books[-1]), *other.view(np.int32).tolist(), 0, 0])


def _value_head(layout: BitPlaneLayout, head: int, levels: _Levels) -> dict[str, np.ndarray]:
    rows, values = layout.rows, layout.values[head]
    places, groups = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    offsets, registers_of = np.zeros(rows, np.float32), np.zeros((rows, 2), np.int32)
    read = head_matrices(layout.value_format.heads[head])[1]
    matrix = np.zeros((layout.head_dim, rows), np.float32)
    for row, at in enumerate(result_rows(rows)):
        if at >= len(values):
            continue
        value = values[at]
        signed = layout.value_kind == SIGNED and value.bits == 4
        places[row], groups[row] = levels.place(value.codebook, signed), value.group
        offsets[row] = 0.5 if signed else 0.0
        if registers(value.codebook):
            registers_of[at] = _registers(value.codebook)
        matrix[:, row] = read[value.index] * _unit(layout.value_format.heads[head].groups[value.group], value)
    return {"places": places, "groups": groups, "offsets": offsets, "registers": registers_of, "matrix": matrix}


def _unit(group: Group, coordinate: Coordinate) -> float:
    """What a coordinate's signed bytes are multiples of, times what the group's stored norms are multiples of."""
    return norm_code(group)[0] * split_levels(coordinate.codebook)[2]


def _ranges(groups: Sequence[Group], count: int) -> np.ndarray:
    """Low end and step of the groups' log norms, ``[count, 2]``."""
    table = np.zeros((count, 2), np.float32)
    for index, group in enumerate(groups):
        table[index] = norm_code(group)[1:]
    return table


def _tables(layout: BitPlaneLayout, device: torch.device) -> _Tables:
    from kvbench.kernels import bit_plane_operands as k

    ints, floats, levels, matrices = [], [], [], []
    for head in range(layout.kv_heads):
        books = _Levels(), _Levels()
        key, value = _key_head(layout, head, books[0]), _value_head(layout, head, books[1])
        key_groups, value_groups = (form.heads[head].groups for form in (layout.key_format, layout.value_format))
        key_groups = tuple(key_groups[index] for index in layout.norm_order[head])
        header = np.zeros(k.HEADER, np.int32)
        header[k.PARTS : k.PARTS + 4] = layout.offsets[head] // UNIT
        header[k.NORMS : k.NORMS + 2] = [len(key_groups), len(value_groups)]
        header[k.VALUE_PLANES : k.VALUE_PLANES + 8] = layout.value_planes[head] @ [1 << 16, 1]
        cells = layout.cell_planes[head] @ [256, 1]
        parts = [header, cells, *(part[name] for part in (key, value) for name in ("registers", "places", "groups"))]
        ints.append(np.concatenate([part.reshape(-1) for part in parts]).astype(np.int32))
        ranges = _ranges(key_groups, layout.key_groups), _ranges(value_groups, layout.value_groups)
        floats.append(np.concatenate([key["offsets"], value["offsets"], *(part.reshape(-1) for part in ranges)]))
        levels.append([book.entries for book in books])
        matrices.append((key["matrix"], value["matrix"]))
    table = max(256, 1 << (max(len(entries) for pair in levels for entries in pair) - 1).bit_length())
    padded = [[entries + [0] * (table - len(entries)) for entries in pair] for pair in levels]
    tensor = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device)  # noqa: E731
    key_matrix, value_matrix = (tensor(np.stack(part)) for part in zip(*matrices, strict=True))
    return _Tables(
        ints=tensor(np.stack(ints)),
        floats=tensor(np.stack(floats)),
        levels=tensor(np.array(padded, np.uint16).view(np.int16)),
        table=table,
        key_matrix=key_matrix,
        value_matrix=value_matrix,
    )


class BitPlaneAttention(PageAttention):
    """Attention of one query token a sequence over one layer's bit-plane pages, in Triton."""

    layout: BitPlaneLayout

    def __init__(
        self,
        layout: BitPlaneLayout,
        device: torch.device | str,
        assembly: bool | None = None,
        splits: int | None = None,
    ) -> None:
        super().__init__(layout, device, assembly, splits)
        self.tables = _tables(layout, self.device)

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        starts: Tensor,
        stops: Tensor,
        scaling: float,
        extra: Partial | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend ``q [batch, q_heads, head_dim]`` to tokens ``starts[b] <= t < stops[b]`` (int32, on the device).

        ``pages [batch, pages, page_bytes]`` uint8; ``extra`` and results as of
        :class:`~kvbench.kernels.tile_attention.TileAttention`.
        """
        from kvbench.kernels import bit_plane_kernels as k

        layout, t = self.layout, self.tables
        batch, q_heads, dim = q.shape
        kv_heads, rows = layout.kv_heads, layout.rows
        group = self.group_of(q, pages)
        q = q if q.stride(-1) == 1 else q.contiguous()
        lines, heads = batch * kv_heads, padded_group(group)
        splits = self.splits_for(batch, pages.shape[1], group)
        new = lambda shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=q.device)  # noqa: E731
        query, merged, merged_lse = new((lines, heads, rows)), new((lines, group, rows)), new((lines, group))
        partial, partial_lse = new((lines, heads, splits, rows)), new((lines, heads, splits))
        out, lse = new((batch, q_heads, dim), q.dtype), new((batch, q_heads))
        others = (out, lse) if extra is None else (extra.out.contiguous(), extra.lse.contiguous())
        cuda = self.device.type == "cuda"
        launch = {"launch_pdl": True} if cuda else {}
        few = lines * group * 4 <= FEW
        block = 1 if few else MAX_GROUP
        width = max(16, 1 << (dim - 1).bit_length())
        k.rotate[(lines, -(-group // block), rows // 32)](
            q, lse, t.key_matrix, *others, query, lse, group, kv_heads, q.stride(0), q.stride(1), heads, IN=dim,
            IN_WIDTH=width, OUT=rows, BLOCK=block, LSE=False, EXTRA=False, FIRST=True, DEPENDENT=cuda, num_warps=4,
        )  # fmt: skip
        k.attend[(splits, lines)](
            query, group, scaling * LOG2_E, pages, t.ints, t.floats, t.levels, starts, stops, partial, partial_lse,
            kv_heads, layout.page_bytes, pages.stride(0), **self.variant(group),
            ASSEMBLY=self.assembly, DEPENDENT=self.dependent(lines * splits, group), num_warps=4, **launch,
            **({"maxnreg": self.occupancy(group)[1]} if self.assembly else {}),
        )  # fmt: skip
        k.merge[(lines, group, rows // 32)](
            partial, partial_lse, starts, stops, merged, merged_lse, kv_heads, splits, HEADS=heads, ROWS=rows,
            SPLITS=1 << (splits - 1).bit_length(), DEPENDENT=cuda, **MERGE, num_warps=4 if few else 2, **launch,
        )  # fmt: skip
        k.rotate[(lines, -(-group // block), -(-dim // 32))](
            merged, merged_lse, t.value_matrix, *others, out, lse, group, kv_heads, kv_heads * group * rows, rows,
            group, IN=rows, IN_WIDTH=rows, OUT=dim, BLOCK=block, LSE=True, EXTRA=extra is not None, FIRST=False,
            DEPENDENT=cuda, num_warps=4, **launch,
        )  # fmt: skip
        return out, lse

    def _columns(self, group: int) -> int:
        """Columns of the query's operand at a time: up to four groups of coordinates."""
        heads = padded_group(group)
        return max(16, min(MOST_COLUMNS, 2 * heads * min(4, 1 << (self.layout.key_groups - 1).bit_length())))

    def occupancy(self, group: int) -> tuple[int, int]:
        """Blocks a multiprocessor and registers a thread: as many as the page loop can do with."""
        few = self._columns(group) <= 32 and self.layout.rows <= 128
        return (3, 168) if few else (2, 255)

    def variant(self, group: int) -> dict[str, int]:
        """The compile-time constants of the page loop: two layers that agree in them share a compiled kernel."""
        layout = self.layout
        return {
            "HEADS": padded_group(group),
            "COLUMNS": self._columns(group),
            "SLABS": layout.slabs,
            "WIDE_SLABS": layout.wide,
            "DUAL_SLABS": layout.dual,
            "SIGNED_SLABS": layout.signed,
            "VALUE_KIND": layout.value_kind,
            "KEY_GROUPS": layout.key_groups,
            "HALF_GROUPS": layout.half_groups,
            "VALUE_GROUPS": layout.value_groups,
            "KEY_LOG": layout.norm_bytes[0] == 128,
            "VALUE_LOG": layout.norm_bytes[1] == 128,
            "TABLE": self.tables.table,
        }
