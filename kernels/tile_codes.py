# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""From packed words to signed bytes in registers: the inner step of the tile kernels, twice.

Once as inline PTX, one text a template: ``prmt.b32`` looks four codes up at once in a table held in two registers, so a
code costs about half an instruction. Once in plain Triton, for the interpreter and as the definition the other is
tested against. Both take the codebook at run time. See :mod:`kvbench.kernels.tiles` for the layout.
"""

import triton
import triton.language as tl

from kvbench.kernels.tiles import SHARES, slab_bits

TABLES = {4: 2, 3: 2, 2: 1, 1: 1}  # registers that hold a width's levels as bytes


def _repeat(nibble: int) -> str:
    return f"{nibble * 0x11111111:#x}"


def _pattern(bits: list[tuple[int, int]], words: list[str]) -> list[str]:
    """PTX that leaves a slab's codes in the nibbles of register ``s``."""
    (word, low), width = bits[0], len(bits)
    if len({word for word, _ in bits}) == 1:
        shift = [f"shr.u32 s, {words[word]}, {low};"] if low else []
        return [*shift, f"and.b32 s, {'s' if low else words[word]}, {_repeat(2**width - 1)};"]
    # one bit from the top of each of several words: shift each to its place, then select bit by bit (lop3 0xE4 is m ?
    # a : b)
    lines = [f"shr.u32 {'suv'[index]}, {words[word]}, {3 - index};" for index, (word, _) in enumerate(bits)]
    lines += [f"lop3.b32 s, s, {'suv'[index]}, {_repeat(2**index - 1)}, 0xE4;" for index in range(1, width)]
    return [*lines, f"and.b32 s, s, {_repeat(2**width - 1)};"]


def _look_up(width: int, word: str, table: list[str], outputs: tuple[str, str]) -> list[str]:
    """PTX from the nibbles in ``s`` to eight signed bytes."""
    first, last = table[0], table[-1]
    if width < 4:
        return [
            f"prmt.b32 {outputs[0]}, {first}, {last}, s;",
            "shr.u32 s, s, 16;",
            f"prmt.b32 {outputs[1]}, {first}, {last}, s;",
        ]
    return [  # magnitude, then its complement where the sign is set: prmt's mode 8 + i spreads the sign of byte i
        f"and.b32 s, {word}, {_repeat(7)};",
        f"prmt.b32 u, {first}, {last}, s;",
        "shr.u32 s, s, 16;",
        f"prmt.b32 v, {first}, {last}, s;",
        f"prmt.b32 s, {word}, 0, 0xba98;",
        f"xor.b32 {outputs[0]}, u, s;",
        f"shl.b32 s, {word}, 4;",
        "prmt.b32 s, s, 0, 0xba98;",
        f"xor.b32 {outputs[1]}, v, s;",
    ]


def widths(template: int) -> list[int]:
    """The distinct code widths of a template, widest first: the order of its tables."""
    return sorted({int(digit) for digit in str(template)}, reverse=True)


def assembly(template: int) -> str:
    """PTX for one lane and row: words in, eight registers of four signed bytes out (two a slab).

    Operands: 8 outputs, the words, then each table register four times (``pack=4`` hands over four copies of a 32-bit
    value; they are the same register).
    """
    count = len(SHARES[template])
    words = [f"${8 + word}" for word in range(count)]
    tables, operand = {}, 8 + count
    for width in widths(template):
        tables[width] = [f"${operand + 4 * register}" for register in range(TABLES[width])]
        operand += 4 * TABLES[width]
    lines = ["{", ".reg .b32 s, u, v;"]
    for slab in range(4):
        bits = slab_bits(template, slab)
        if len(bits) < 4:
            lines += _pattern(bits, words)
        lines += _look_up(len(bits), words[bits[0][0]], tables[len(bits)], (f"${2 * slab}", f"${2 * slab + 1}"))
    return "\n".join([*lines, "}"])


def constraints(template: int) -> str:
    """Operand constraints of :func:`assembly`."""
    registers = sum(TABLES[width] for width in widths(template))
    return ",".join(["=r"] * 8 + ["r"] * (len(SHARES[template]) + 4 * registers))


_2222, _C2222 = tl.constexpr(assembly(2222)), tl.constexpr(constraints(2222))
_3221, _C3221 = tl.constexpr(assembly(3221)), tl.constexpr(constraints(3221))
_3311, _C3311 = tl.constexpr(assembly(3311)), tl.constexpr(constraints(3311))
_4211, _C4211 = tl.constexpr(assembly(4211)), tl.constexpr(constraints(4211))
_3333, _C3333 = tl.constexpr(assembly(3333)), tl.constexpr(constraints(3333))
_4332, _C4332 = tl.constexpr(assembly(4332)), tl.constexpr(constraints(4332))
_4422, _C4422 = tl.constexpr(assembly(4422)), tl.constexpr(constraints(4422))
_4431, _C4431 = tl.constexpr(assembly(4431)), tl.constexpr(constraints(4431))
_4444, _C4444 = tl.constexpr(assembly(4444)), tl.constexpr(constraints(4444))
BYTES = tl.constexpr((tl.int8,) * 8)


@triton.jit
def _plane(pointer, at):
    """A plane's words ``[128 rows, 16 bytes]`` in the matrix instruction's row order: one 16-byte load a lane."""
    octets = tl.load(pointer + at)
    parts = tl.reshape(octets, (4, 8, 4, 2, 2, 4))  # row[5:4], row[2:0], column[3:2], row[6], row[3], byte
    return tl.reshape(tl.permute(parts, (3, 0, 4, 1, 2, 5)), (128, 16))


@triton.jit
def load_words(pointer, at, COUNT: tl.constexpr):
    """The planes at ``pointer``, ``at`` the bytes of a plane ``[32, 64]``."""
    if COUNT == 2:
        return _plane(pointer, at), _plane(pointer + 2048, at)
    elif COUNT == 3:
        return _plane(pointer, at), _plane(pointer + 2048, at), _plane(pointer + 4096, at)
    else:
        return _plane(pointer, at), _plane(pointer + 2048, at), _plane(pointer + 4096, at), _plane(pointer + 6144, at)


@triton.jit
def unpack_words(w, t, TEMPLATE: tl.constexpr):
    """Words ``w`` -> eight int8 tiles ``[128, 16]``, two a slab. ``t``: tables of 4 bits (2 words), 3 (2), 2 and 1."""
    if TEMPLATE == 2222:
        return tl.inline_asm_elementwise(_2222, _C2222, [w[0], w[1], t[4]], dtype=BYTES, is_pure=True, pack=4)
    elif TEMPLATE == 3221:
        return tl.inline_asm_elementwise(
            _3221, _C3221, [w[0], w[1], t[2], t[3], t[4], t[5]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 3311:
        return tl.inline_asm_elementwise(
            _3311, _C3311, [w[0], w[1], t[2], t[3], t[5]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 4211:
        return tl.inline_asm_elementwise(
            _4211, _C4211, [w[0], w[1], t[0], t[1], t[4], t[5]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 3333:
        return tl.inline_asm_elementwise(
            _3333, _C3333, [w[0], w[1], w[2], t[2], t[3]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 4332:
        return tl.inline_asm_elementwise(
            _4332, _C4332, [w[0], w[1], w[2], t[0], t[1], t[2], t[3], t[4]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 4422:
        return tl.inline_asm_elementwise(
            _4422, _C4422, [w[0], w[1], w[2], t[0], t[1], t[4]], dtype=BYTES, is_pure=True, pack=4
        )
    elif TEMPLATE == 4431:
        return tl.inline_asm_elementwise(
            _4431, _C4431, [w[0], w[1], w[2], t[0], t[1], t[2], t[3], t[5]], dtype=BYTES, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _4444, _C4444, [w[0], w[1], w[2], w[3], t[0], t[1]], dtype=BYTES, is_pure=True, pack=4
        )


@triton.jit
def slab1(a, b):
    """Two int8 tiles of a slab -> its columns ``[128, 32]``."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (128, 32))


@triton.jit
def slab2(a, b, c, d):
    """Two slabs ``[128, 64]``."""
    pair = tl.join(tl.join(a, b), tl.join(c, d))  # row, column, half of a slab, slab
    return tl.reshape(tl.permute(pair, (0, 3, 2, 1)), (128, 64))


@triton.jit
def slab4(o):
    """Four slabs ``[128, 128]``."""
    even = tl.join(tl.join(o[0], o[1]), tl.join(o[4], o[5]))  # row, column, half of a slab, slab[1]
    odd = tl.join(tl.join(o[2], o[3]), tl.join(o[6], o[7]))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 3, 4, 2, 1)), (128, 128))


@triton.jit
def plain_slab(pointer, places, levels, SLAB: tl.constexpr):
    """One slab's signed bytes ``[128, 32]`` in plain Triton.

    ``pointer``: the planes, uint32. ``places`` int32 ``[4 slabs, 4 bits]``: ``4 * word + bit`` of every code bit, -1
    where the slab has fewer. ``levels`` int8 ``[4 slabs, 16]``: the byte each stored pattern stands for.
    """
    row = tl.arange(0, 128)[:, None]
    column = tl.arange(0, 32)[None, :]
    unit = column & 3
    nibble = 4 * (column >> 4) + unit
    lane = ((row >> 4) & 3) * 32 + (row & 7) * 4 + ((column >> 2) & 3)
    at = lane * 4 + ((row >> 6) & 1) * 2 + ((row >> 3) & 1)
    pattern = tl.zeros((128, 32), tl.int32)
    for index in tl.static_range(4):
        place = tl.load(places + SLAB * 4 + index)
        present = place >= 0
        word = tl.load(pointer + tl.maximum(place >> 2, 0) * 512 + at)
        shift = 4 * nibble + (place & 3)
        if index == 3:  # a sign: see kernels.tiles._shifts
            shift = 8 * unit + tl.where(column < 16, 7, 3)
        bit = (word >> shift.to(tl.uint32)) & 1
        pattern |= tl.where(present, bit.to(tl.int32) << index, 0)
    return tl.load(levels + SLAB * 16 + pattern)
