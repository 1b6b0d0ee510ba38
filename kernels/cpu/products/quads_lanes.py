"""The inner blocks of `quads`: sums of products of bytes, four of them in one instruction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import Late, cgutils
from soapstone.cache.objects import features
from soapstone.dtypes import BYTES
from soapstone.native.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    chosen,
    load_lanes,
    load_one,
    store_lanes,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

_binding = Late("llvmlite.binding")
ROWS = 6  # of a block, at most: with four vectors of columns, sums stay in registers
VECTORS = 4  # of columns of a panel of weights
PANEL = VECTORS * LANES  # columns, whose results fill a vector if they are bytes
_CLOSEST = 4  # rounding, of an instruction that takes it as an operand: ties to even


@cache
def has_quads() -> bool:
    """Return whether an instruction adds four products of bytes, in vectors of 512 bits."""
    return {"avx512f", "avx512bw", "avx512vnni"} <= features()


def _text(rows: int) -> str:
    """Return the instructions that add up and write the sums of a block.

    They are written here since LLVM moves sums between registers for longer than it adds to them.
    Registers: sums from 0, weights from 24, numbers of x from 28, and what turns their signs.
    """
    x = ("($0)", "($0,$11)", "($0,$11,2)", "($1)", "($1,$11)", "($1,$11,2)")[:rows]
    cells = [(row, v, row * VECTORS + v) for row in range(rows) for v in range(VECTORS)]
    lines = ["vpbroadcastd ${13:k}, %zmm28", "vpbroadcastb ${15:k}, %zmm31"]
    lines += [f"vpmulld {64 * v}($12), %zmm28, %zmm{24 + v}" for v in range(VECTORS)]
    lines += [f"vmovdqa64 %zmm{24 + v}, %zmm{cell}" for _, v, cell in cells]
    lines += ["1:", "prefetcht1 ($4)"]
    lines += [f"vmovdqu64 {64 * v}($2), %zmm{24 + v}" for v in range(VECTORS)]
    for row, place in enumerate(x):
        word = f"%zmm{28 + row % 3}"
        lines += [f"vpbroadcastd {place}, {word}", f"vpxord %zmm31, {word}, {word}"]
        lines += [f"vpdpbusd %zmm{24 + v}, {word}, %zmm{cell}" for r, v, cell in cells if r == row]
    lines += ["addq $$4, $0", "addq $$4, $1", f"addq $${PANEL * 4}, $2", "addq $14, $4"]
    lines += ["decq $3", "jne 1b"]
    lines += [f"vmovdqu64 %zmm{cell}, {64 * cell}($10)" for *_, cell in cells]
    return "\n".join(lines)


def _product(
    rows: int,
    x: Lanes,
    step: Lanes,
    depth: Lanes,
    flip: Lanes,
    weights: Lanes,
    totals: Lanes,
    zero: Lanes,
    sums: Lanes,
    later: Lanes,
    pace: Lanes,
) -> None:
    _binding.initialize_native_asmparser()
    moved = [x, x + step * 3, weights, depth >> 2, later]  # operands 0 to 4, and again 5 to 9
    given = [each.value for each in (*moved, sums, step, totals, 0 - zero, pace, flip)]
    parts = ["=&r"] * 5 + ["0", "1", "2", "3", "4"] + ["r"] * 6 + ["~{memory}", "~{cc}"]
    parts += [f"~{{zmm{number}}}" for number in range(32)]
    kind = ir.FunctionType(ir.LiteralStructType([I64] * 5), [I64] * len(given))
    depth.builder.asm(kind, _text(rows), ",".join(parts), given, True)


@vectorised
def products(
    rows: Lanes,
    x: Lanes,
    step: Lanes,
    depth: Lanes,
    flip: Lanes,
    weights: Lanes,
    totals: Lanes,
    zero: Lanes,
    sums: Lanes,
    later: Lanes,
    pace: Lanes,
) -> None:
    """Write (rows, PANEL) sums of products of up to ROWS rows with a panel.

    x: rows of `depth` bytes, a multiple of 4, `step` bytes apart, which `^ flip` makes bytes
    without a sign. weights: (depth / 4, PANEL, 4) with a sign; totals: their sum of each column,
    int32. zero: what is subtracted of each byte of x ^ flip. later: weights that are needed next,
    of which `pace` bytes are asked for with each four numbers of the depth.
    """
    given = x, step, depth, flip, weights, totals, zero, sums, later, pace
    chosen(rows, {count: partial(_product, count, *given) for count in range(1, ROWS + 1)})


# What is done to sums: s * scale + bias, then * rise + start; where a byte is rounded in between,
# within the first bounds and rounded, * rise_2 + start_2; what is added, times `more`; within low
# and high; and of bytes rounded, plus zero; or "rounded", then * rise_3 + start_3.
NUMBERS = (
    *("rise", "start", "low_between", "high_between", "rise_2", "start_2"),
    *("more", "rise_3", "start_3", "low", "high", "zero"),
)
ADDED = ("none", "float32", "uint8", "int8")
RESULTS = ("float32", "rounded", "uint8", "int8", "int32")


def form(rounds: bool, added: str, result: str) -> int:
    """The number by which `finish` knows what is done to sums."""
    return (ADDED.index(added) * 2 + rounds) * len(RESULTS) + RESULTS.index(result)


@vectorised
def finish(
    rows: Lanes,
    sums: Lanes,
    scale: Lanes,
    bias: Lanes,
    numbers: Lanes,
    how: Lanes,
    added: Lanes,
    added_step: Lanes,
    to: Lanes,
    step: Lanes,
) -> None:
    """Write rows of results of their sums (rows, PANEL), `step` bytes apart.

    scale, bias: of each column; numbers: NUMBERS, float32. how: see `form`.
    """
    b = rows.builder
    starts = [v * LANES for v in range(VECTORS)]

    def each_row(put: Callable[[Lanes], None]) -> None:
        def turn(row: Lanes, _: list[Lanes]) -> list[Lanes]:
            put(row)
            return []

        stretch(b, (I64(0), rows.value), 1, [], turn)

    def total(row: Lanes, start: int) -> Lanes:
        return load_lanes(sums, row * PANEL + start, I32)

    def whole(row: Lanes) -> None:
        for start in starts:
            store_lanes(to + step * row, start, total(row, start))

    def operand(name: str, place: Lanes, start: int) -> Lanes:
        if name == "float32":
            return load_lanes(place, start)
        read = load_lanes(place, start, I8)
        kind = ir.VectorType(F32, LANES)
        return read.cast(F32) if name == "uint8" else Lanes(b, b.sitofp(read.value, kind))

    def real(rounds: bool, name: str, result: str) -> None:
        given = [load_one(numbers + 4 * place) for place in range(len(NUMBERS))]
        rise, start, least, most, rise_2, start_2, more, *rest = (n.splat() for n in given)
        rise_3, start_3, low, high, _ = rest
        scales = [load_lanes(scale, v) * rise for v in starts]
        shifts = [load_lanes(bias, v) * rise + start for v in starts]

        def values(row: Lanes) -> list[Lanes]:
            made = []
            for start, by, shift in zip(starts, scales, shifts):
                value = total(row, start).cast(F32) * by + shift
                if rounds:
                    value = where(most < value, most, where(least > value, least, value))
                    value = value.call("llvm.rint") * rise_2 + start_2
                if name != "none":
                    value = operand(name, added + added_step * row, start) * more + value
                made.append(where(high < value, high, value))
            return made

        def put(row: Lanes) -> None:
            for start, value in zip(starts, values(row)):
                value = where(low > value, low, value)
                if result == "rounded":
                    value = value.call("llvm.rint") * rise_3 + start_3
                store_lanes(to + step * row, start, value)

        *_, least_byte, most_byte, zero = given
        signed = result == "int8"

        def put_bytes(row: Lanes) -> None:
            packed = _as_bytes([_nearest(value) for value in values(row)], zero, signed)
            for bound, of in ((least_byte, "max"), (most_byte, "min")):
                byte = (bound + zero).call("llvm.rint").cast(I32).cast(I8).splat(PANEL)
                packed = packed.call(f"llvm.{'s' if signed else 'u'}{of}", byte)
            store_lanes(to + step * row, 0, packed)

        each_row(put_bytes if result in BYTES else put)

    forms = {
        form(rounds, name, result): partial(real, rounds, name, result)
        for rounds in (False, True)
        for name in ADDED
        for result in RESULTS[:-1]
    }
    chosen(how, {**forms, form(False, "none", "int32"): partial(each_row, whole)})


def _called(builder: Any, name: str, kind: Any, *operands: Any) -> Lanes:
    """Return what an instruction makes of its operands."""
    shape = ir.FunctionType(kind, [each.type for each in operands])
    function = cgutils.get_or_insert_function(builder.module, shape, name)
    return Lanes(builder, builder.call(function, operands))


def _nearest(value: Lanes) -> Lanes:
    """Return the nearest whole numbers, of ties the even ones; of those too low, the least."""
    kind, every = ir.VectorType(I32, LANES), ir.IntType(16)(-1)
    none = ir.Constant(kind, [0] * LANES)
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    return _called(value.builder, name, kind, value.value, none, every, I32(_CLOSEST))


def _as_bytes(numbers: list[Lanes], zero: Lanes, signed: bool) -> Lanes:
    """Return PANEL whole numbers plus zero as bytes, those beyond a byte's bounds at these."""
    b, words = zero.builder, []
    halves, kind = ir.VectorType(I16, 2 * LANES), ir.VectorType(I8, PANEL)
    moved = zero.cast(I32).cast(I16).splat(2 * LANES)
    for left, right in (numbers[:2], numbers[2:]):
        word = _called(b, "llvm.x86.avx512.packssdw.512", halves, left.value, right.value)
        words.append(word.call("llvm.sadd.sat", moved).value)
    pack = f"llvm.x86.avx512.pack{'sswb' if signed else 'uswb'}.512"
    mixed = b.bitcast(_called(b, pack, kind, *words).value, ir.VectorType(I32, LANES))
    # Four numbers of each vector lie together, since packing goes by 128 bits.
    order = [4 * part + v for v in range(VECTORS) for part in range(4)]
    places = ir.Constant(ir.VectorType(I32, LANES), order)
    return Lanes(b, b.bitcast(b.shuffle_vector(mixed, mixed, places), kind))
