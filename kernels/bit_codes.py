# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: RET505  (Triton compiles the branch of a constexpr `if` only when the other one is an `else`)
"""From bit planes to signed bytes in registers: the inner step of the bit-plane kernels, twice.

Once as inline PTX, for 32 codes a lane: bits of the planes are gathered into nibbles, eight codes a word; levels come
from two registers by ``prmt.b32`` (codes of 1 to 4 bits) or from memory (wider codes, and cells of several codebooks),
where they are two signed bytes, ``level = high + low / 16``. Once in plain Triton, for the interpreter and as the
definition the other is tested against. See :mod:`kvbench.kernels.bit_planes` for the layout.
"""

import triton
import triton.language as tl

from kvbench.kernels.bit_planes import DUAL, NARROW, SIGNED, WIDE

_NARROW, _SIGNED, _DUAL, _WIDE = tl.constexpr(NARROW), tl.constexpr(SIGNED), tl.constexpr(DUAL), tl.constexpr(WIDE)


def _gather(words: list[str], name: str) -> list[str]:
    """PTX that leaves set u's codes in the nibbles of ``{name}{u}``, rotated left by u, from planes of one nibble."""
    lines = []
    for parity, mask in ((0, 0x55555555), (1, 0xAAAAAAAA)):
        lines.append(f"lop3.b32 y, {words[0]}, {words[1]}, {mask:#x}, 0xE4;")  # mask ? first : second
        if len(words) == 3:
            lines.append(f"and.b32 z, {words[2]}, {mask:#x};")
        else:
            lines.append(f"lop3.b32 z, {words[2]}, {words[3]}, {mask:#x}, 0xE4;")
        for u in (parity, parity + 2):
            pair = sum(1 << ((u + bit) % 4) for bit in (0, 1)) * 0x11111111
            lines.append(f"lop3.b32 {name}{u}, y, z, {pair:#x}, 0xE4;")
    return lines


def _operands(first: int, count: int) -> list[str]:
    """Names of 32-bit inputs from operand ``first`` on: ``pack=4`` hands over four copies of each."""
    return [f"${first + 4 * index}" for index in range(count)]


def register_assembly(kind: int) -> str:
    """PTX for one lane: 8 outputs (set u, half of its codes: ``2 u + half``), 3 words or 4, two table registers; for
    DUAL another two, and which codes of each half they are for, in a byte mask each."""
    planes = min(kind, SIGNED)
    operands = _operands(8, planes + (6 if kind == DUAL else 2))
    words, (low, high, *other) = operands[:planes], operands[planes:]
    lines = ["{", ".reg .b32 y, z, s, m, x0, x1, x2, x3;", *_gather(words[:3], "x")]
    for u in range(4):
        lines += [f"shr.u32 s, x{u}, {u};"] if u else ["mov.b32 s, x0;"]
        for half in range(2):
            at = 2 * u + half
            if half:
                lines.append(f"shf.r.wrap.b32 s, x{u}, x{u}, {u + 16};")
            lines.append(f"prmt.b32 ${at}, {low}, {high}, s;")
            if kind == DUAL:
                lines.append(f"prmt.b32 m, {other[0]}, {other[1]}, s;")
                lines.append(f"lop3.b32 ${at}, m, ${at}, {other[2 + half]}, 0xE4;")
            if kind != NARROW:  # complement where the sign is set: prmt's mode 8 + i spreads the top bit of byte i
                lines += [f"shl.b32 m, {words[3]}, {at};", "prmt.b32 m, m, 0, 0xba98;", f"xor.b32 ${at}, ${at}, m;"]
    return "\n".join([*lines, "}"])


def memory_assembly(places: int) -> str:
    """PTX for one lane: 8 outputs of high bytes and 8 of low ones, 8 words, ``places`` (8 or none) of the codebooks of
    a set's codes in a table, and the lane's own address in it.

    Multiplication and addition of an address are apart so that the assembler makes one instruction of them; of
    ``mad.wide`` it makes three.
    """
    operands = _operands(16, 8 + places)
    words, place, table = operands[:8], operands[8:] or ["0"], f"${16 + 4 * (8 + places)}"
    lines = ["{", ".reg .b32 y, z, p, r, e, o, x0, x1, x2, x3, h0, h1, h2, h3;"]
    lines += [".reg .b32 c<8>;", ".reg .b16 v<8>;", ".reg .b64 a;"]
    lines += [*_gather(words[:4], "x"), *_gather(words[4:], "h")]
    for u in range(4):
        if u:
            lines += [f"shf.r.wrap.b32 {name}{u}, {name}{u}, {name}{u}, {u};" for name in "xh"]
        lines += [f"shl.b32 e, h{u}, 4;", f"lop3.b32 e, x{u}, e, 0x0F0F0F0F, 0xE4;"]
        lines += [f"shr.u32 o, x{u}, 4;", f"lop3.b32 o, o, h{u}, 0x0F0F0F0F, 0xE4;"]
        for n in range(8):
            one = 1 << (8 * (n // 2))
            lines.append(f"dp4a.u32.u32 c{n}, {'eo'[n % 2]}, {one:#x}, {place[n % len(place)]};")
            lines += [f"mul.wide.s32 a, c{n}, 2;", f"add.s64 a, a, {table};", f"ld.global.nc.u16 v{n}, [a];"]
        for half in range(2):
            a, b, c, d = (f"v{4 * half + index}" for index in range(4))
            lines += [f"mov.b32 p, {{{a}, {b}}};", f"mov.b32 r, {{{c}, {d}}};"]
            lines += [f"prmt.b32 ${2 * u + half}, p, r, 0x6420;", f"prmt.b32 ${8 + 2 * u + half}, p, r, 0x7531;"]
    return "\n".join([*lines, "}"])


_REGISTER3, _REGISTER4 = tl.constexpr(register_assembly(NARROW)), tl.constexpr(register_assembly(SIGNED))
_REGISTER5 = tl.constexpr(register_assembly(DUAL))
_MEMORY8, _MEMORY0 = tl.constexpr(memory_assembly(8)), tl.constexpr(memory_assembly(0))
_C3 = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 20))
_C4 = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 24))
_C5 = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 40))
_CM8 = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 64 + ["l"] * 4))
_CM0 = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 32 + ["l"] * 4))
_BYTES8 = tl.constexpr((tl.int8,) * 8)
_BYTES16 = tl.constexpr((tl.int8,) * 16)


@triton.constexpr_function
def planes_of(kind):
    """Planes that are read of codes that are looked up so."""
    return min(kind, SIGNED) if kind < WIDE else WIDE


@triton.jit
def look_up_registers(w, t, KIND: tl.constexpr):
    """Words ``w [..., 4]`` of 3 planes, or 4, and table registers ``t`` (2, DUAL: 6) -> 8 int8 tiles of that shape."""
    if KIND == _NARROW:
        return tl.inline_asm_elementwise(
            _REGISTER3, _C3, [w[0], w[1], w[2], t[0], t[1]], dtype=_BYTES8, is_pure=True, pack=4
        )
    elif KIND == _DUAL:
        return tl.inline_asm_elementwise(
            _REGISTER5,
            _C5,
            [w[0], w[1], w[2], w[3], t[0], t[1], t[2], t[3], t[4], t[5]],
            dtype=_BYTES8,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            _REGISTER4, _C4, [w[0], w[1], w[2], w[3], t[0], t[1]], dtype=_BYTES8, is_pure=True, pack=4
        )


@triton.jit
def look_up_memory(w, places, table, PLACES: tl.constexpr):
    """Words ``w [..., 4]`` of 8 planes, ``places`` (8 or none) from a lane's address ``table`` on -> 8
    int8 tiles of high bytes, 8 of low ones."""
    if PLACES == 8:
        return tl.inline_asm_elementwise(
            _MEMORY8,
            _CM8,
            [
                w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7],
                places[0], places[1], places[2], places[3], places[4], places[5], places[6], places[7], table,
            ],
            dtype=_BYTES16,
            is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _MEMORY0,
            _CM0,
            [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], table],
            dtype=_BYTES16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def key_rows(o, FIRST: tl.constexpr):
    """Eight int8 tiles ``[32 lanes r, 4 q, 4]`` of a slab of keys, from ``o[FIRST]`` on -> ``[128 tokens, 32]``."""
    low = tl.join(tl.join(o[FIRST], o[FIRST + 4]), tl.join(o[FIRST + 2], o[FIRST + 6]))  # u[1], u[0]
    high = tl.join(tl.join(o[FIRST + 1], o[FIRST + 5]), tl.join(o[FIRST + 3], o[FIRST + 7]))
    both = tl.reshape(tl.join(low, high), (4, 8, 4, 4, 2, 2, 2))  # r[4:3], r[2:0], q, byte, u[1], u[0], half
    return tl.reshape(tl.permute(both, (4, 0, 5, 1, 6, 2, 3)), (128, 32))


@triton.jit
def value_rows(o, FIRST: tl.constexpr, LANE_ROWS: tl.constexpr):
    """Eight int8 tiles ``[32 lanes r, 4 q, rows a lane, 4]`` of values, from ``o[FIRST]`` on -> ``[rows, 128]``."""
    even = tl.join(tl.join(o[FIRST], o[FIRST + 1]), tl.join(o[FIRST + 4], o[FIRST + 5]))  # half, u[1]
    odd = tl.join(tl.join(o[FIRST + 2], o[FIRST + 3]), tl.join(o[FIRST + 6], o[FIRST + 7]))
    both = tl.reshape(tl.join(even, odd), (4, 8, 4, LANE_ROWS // 2, 2, 4, 2, 2, 2))
    # r[4:3], r[2:0], q, k[.:1], k[0], byte, half, u[1], u[0]
    return tl.reshape(tl.permute(both, (3, 0, 4, 1, 7, 8, 6, 2, 5)), (32 * LANE_ROWS, 128))


@triton.jit
def _plain_bit(word, u, n, J: tl.constexpr, KIND: tl.constexpr):
    """Bit J of code ``(u, n)`` from its plane's word, in its place of the pattern."""
    shift = (4 * n + u + J % 4) % 32
    if (KIND != _NARROW) and (KIND != _WIDE) and (J == 3):
        shift = 8 * (n % 4) + 7 - 2 * u - n // 4
    return (((word >> shift.to(tl.uint32)) & 1) << J).to(tl.int32)


@triton.jit
def _split_level(level):
    return ((level << 8) >> 8).to(tl.int8), (level >> 8).to(tl.int8)


@triton.jit
def plain_keys(words, cells, places, table, SLAB: tl.constexpr, KIND: tl.constexpr):
    """A slab of keys in plain Triton: high and low bytes ``[128, 32]``.

    ``words`` uint32: the head's key codes; ``cells`` int32: ``first plane << 8 | planes``; ``places`` int32 ``[cells,
    8]`` and ``table`` int16: where codebooks start, and levels (high byte lowest).
    """
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 32)[None, :]
    r, u = ((row >> 4) & 3) * 8 + (row & 7), (row >> 6) * 2 + ((row >> 3) & 1)
    q, n = 4 * SLAB + ((column >> 2) & 3), (column & 3) + 4 * (column >> 4)
    cell = tl.load(cells + q) + 0 * row
    pattern = tl.zeros((128, 32), tl.int32)
    for j in tl.static_range(planes_of(KIND)):
        word = tl.load(words + ((cell >> 8) + j) * 32 + r, mask=(cell & 255) > j, other=0)
        pattern |= _plain_bit(word, u, n, j, KIND)
    return _split_level(tl.load(table + tl.load(places + 8 * q + n) + pattern))


@triton.jit
def plain_values(words, planes, places, table, KIND: tl.constexpr, LANE_ROWS: tl.constexpr):
    """All values of a page in plain Triton: high and low bytes ``[rows, 128]``; ``planes``: ``before << 16 |
    coordinates`` of each; ``places`` int32 ``[rows]``; the rest as of :func:`plain_keys`."""
    row, column = tl.arange(0, 32 * LANE_ROWS)[:, None], tl.arange(0, 128)[None, :]
    r, k = ((row >> 4) & 3) * 8 + (row & 7), (row >> 6) * 2 + ((row >> 3) & 1)
    u, q, n = column >> 5, (column >> 2) & 3, (column & 3) + 4 * ((column >> 4) & 1)
    pattern = tl.zeros((32 * LANE_ROWS, 128), tl.int32)
    for j in tl.static_range(KIND):
        at = (planes[j] >> 16) * 4 + (r * 4 + q) * LANE_ROWS + k
        present = (r * LANE_ROWS + k + 0 * column) < (planes[j] & 0xFFFF)
        pattern |= _plain_bit(tl.load(words + at, mask=present, other=0), u, n, j, KIND)
    return _split_level(tl.load(table + tl.load(places + row) + pattern))
