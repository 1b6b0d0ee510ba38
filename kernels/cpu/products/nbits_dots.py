"""The product block of `nbits` where the processor multiplies bytes and adds up their products.

Numbers of x become integers of 24 bits, in parts of their block's largest, which are three signed
bytes each: a block's sums are exact, and x is rounded about as finely as float32 holds its largest.
Where a file says that one byte will do, it is one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.cache.objects import features
from soapstone.kernels.cpu.products.panels_lanes import ask
from soapstone.native.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_one,
    load_some,
    maximum,
    prefetch,
    store_lanes,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

_LINE = 64  # bytes
PLANES = 3  # bytes of a number of x, the lowest first
_LEAST = 1e-30  # the smallest number that a block's largest is taken for
HEAD = 8 * 4  # bytes of what is kept of a block of x: its scale, its sum, and a sum of each plane


@cache
def _in_one() -> bool:
    """Return whether an instruction adds products of bytes in vectors of 512 bits."""
    return {"avx512f", "avx512vnni"} <= features()


@cache
def has_dots(bits: int) -> bool:
    """Return whether there are sums of products of bytes, by weights of so many bits.

    AVX2 adds two products in 16 bits, which hold those of few bits. With AVX-512 alone, tables of
    numbers are faster.
    """
    return _in_one() or (bits <= 4 and "avx2" in features() and "avx512f" not in features())


class Layout(NamedTuple):
    """How panels of weights are taken, and how they lie.

    several: panels at a time for one row; pair: for many. Those that share rows read half as much
    of x each. together: panels whose lines alternate in memory; one, or what the others are
    multiples of.
    """

    several: int
    pair: int
    together: int = 1


LAYOUTS = (Layout(4, 2), Layout(2, 2, 2)) if _in_one() else (Layout(2, 1),)
# Zen 5 reads one stream faster than four, where it is asked for at an even pace.
LAYOUT = LAYOUTS[-1 if {"avx512vp2intersect", "sse4a"} <= features() else 0]
_AHEAD = 144 * _LINE  # bytes by which one stream is asked for before it is used
# Rows at a time, by bytes of a number of x: as many as there are registers for.
MANY = {3: 2, 1: 8} if _in_one() else {3: 2, 1: 4}


def digits(bits: int, planes: int) -> Any:
    """Return the function that writes the bytes of a row of x, for weights of so many bits."""
    middle = 1 << (bits - 1)
    whole_top = 127 << (8 * (planes - 1))  # of a block: its highest byte stays a signed one
    middles = 0x808080 >> (8 * (PLANES - planes))  # what makes each of the bytes positive
    # Shifted words of weights hold, as bytes, every second number (of four bits) or every fourth.
    per, turns = 32 // bits, 8 // bits
    group = [place for turn in range(turns) for place in range(turn, per, turns)]
    places = [start + place for start in range(0, LANES, per) for place in group]
    order = ir.Constant(ir.VectorType(I32, LANES), places)

    def form(x: Lanes, depth: Lanes, block: Lanes, plane: Lanes, to: Lanes, heads: Lanes) -> None:
        """Write depth numbers at x as bytes at `to`, a plane apart, and what is kept of each block.

        Up to 15 bytes of a plane beyond depth are written.
        """
        b = depth.builder
        vector = ir.VectorType(F32, LANES)
        zero = Lanes(b, ir.Constant(vector, [0.0] * LANES))
        none = Lanes(b, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))

        def one(number: Lanes, held: list[Lanes]) -> list[Lanes]:
            start = number * block
            rest = depth - start
            count = Lanes(b, b.select((rest < block).value, rest.value, block.value))
            source = x + start * 4

            def largest(k: Lanes, held: list[Lanes]) -> list[Lanes]:
                v = load_some(source, k, first(count - k))
                return [maximum(held[0], v.call("llvm.fabs")), held[1] + v * 0.0]

            most, wrong = stretch(b, (I64(0), count.value), LANES, [zero, zero], largest)
            # NaN where a number is not finite, so that the products are.
            top = most.fold(maximum) + wrong.fold(lambda p, q: p + q)
            top = where(top < _LEAST, _LEAST, top)
            scale, inverse = top * (1.0 / whole_top), float(whole_top) / top

            def part(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
                v = load_some(source, k, first(count - k)) * inverse
                v = where(v.compare("!=", v), 0.0, v.call("llvm.rint"))
                moved = v.cast(I32) + middles
                signed = moved ^ middles
                made = []
                for place in range(planes):
                    low = (signed >> (8 * place) if place else signed).cast(I8)
                    mixed = b.shuffle_vector(low.value, low.value, order)
                    store_lanes(to + plane * place, start + k, Lanes(b, mixed))
                    byte = (moved >> (8 * place) if place else moved) & 255
                    made.append(sums[place] + byte - 128)
                return made

            sums = stretch(b, (I64(0), count.value), LANES, [none] * planes, part)
            totals = [total.fold(lambda p, q: p + q) for total in sums]
            whole = _whole([total.cast(F32) for total in totals])
            head = heads + number * HEAD
            _put(head, scale)
            _put(head + 4, whole * scale)
            for place, total in enumerate(totals):
                _put(head + 8 + 4 * place, total * -middle)
            return []

        stretch(b, (I64(0), b.udiv((depth + block - 1).value, block.value)), 1, [], one)

    return vectorised(form)


def _whole(parts: list[Lanes]) -> Lanes:
    """Return the number of which these are the digits, the lowest first."""
    *lower, whole = parts
    for part in reversed(lower):
        whole = whole * 256.0 + part
    return whole


def _put(p: Lanes, value: Lanes) -> None:
    b = p.builder
    b.store(value.value, b.inttoptr(p.value, value.kind.as_pointer())).align = 4


def _dots(total: Lanes, unsigned: Lanes, signed: Lanes) -> Lanes:
    """Return the total plus the products of each lane's four bytes."""
    b, vector = total.builder, ir.VectorType(I32, LANES)

    def call(name: str, kind: Any, *operands: Any) -> Any:
        shape = ir.FunctionType(kind, [each.type for each in operands])
        return b.call(cgutils.get_or_insert_function(b.module, shape, name), operands)

    if _in_one():
        name = "llvm.x86.avx512.vpdpbusd.512"
        return Lanes(b, call(name, vector, total.value, unsigned.value, signed.value))
    words = ir.VectorType(I16, LANES)
    sums = []
    for start in (0, LANES // 2):
        half = ir.Constant(ir.VectorType(I32, LANES // 2), [*range(start, start + LANES // 2)])
        left, right = (
            b.bitcast(b.shuffle_vector(each.value, each.value, half), ir.VectorType(I8, 2 * LANES))
            for each in (unsigned, signed)
        )
        pairs = call("llvm.x86.avx2.pmadd.ub.sw", words, left, right)
        ones = ir.Constant(words, [1] * LANES)
        sums.append(call("llvm.x86.avx2.pmadd.wd", half.type, pairs, ones))
    whole = ir.Constant(vector, [*range(LANES)])
    return total + Lanes(b, b.shuffle_vector(*sums, whole))


def _product(rows: int, panels: int, bits: int, zeros: bool, planes: int, together: int) -> Any:
    per = 32 // bits  # numbers in a word
    row_of_lines = _LINE * together  # bytes from a panel's line to its next
    halves = per // 4
    # Of sums, which take the words of x in turns: fewer would wait for one another.
    sets = halves if _in_one() and rows * panels * planes < 10 else 1

    def form(
        x: Lanes,
        step: Lanes,
        depth: Lanes,
        block: Lanes,
        weights: Lanes,
        to: Lanes,
        reading: Lanes,
    ) -> None:
        """Write the products of rows with panels as `nbits_lanes` has them.

        x: the first row's heads, followed by its planes; step: bytes from a row to the next. depth:
        numbers in a row; block: in a block. weights: the first panel's address; panels that do not
        lie together are read side by side, since prefetchers end at a page's bound. to: (rows,
        panels, 16). reading: see `panels_lanes.READINGS`, of panels that do not lie together.
        """
        b = depth.builder
        zero = Lanes(b, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
        none = Lanes(b, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
        words = (block >> (per.bit_length() - 1)) * row_of_lines  # bytes of a block's words
        size = words + row_of_lines * (2 if zeros else 1)
        blocks = Lanes(b, b.udiv((depth + block - 1).value, block.value))
        heads = [x + step * row for row in range(rows)]
        cells = [(row, number) for row in range(rows) for number in range(panels)]
        plane = plane_of(depth)
        digits = [
            [head + blocks * HEAD + plane * place for place in range(planes)] for head in heads
        ]

        def turn(number: Lanes, sums: list[Lanes]) -> list[Lanes]:
            start = number * block
            at = []
            for place in range(panels):
                group, line = divmod(place, together)
                at.append(weights + (blocks * group + number) * size + line * _LINE)
            rest = depth - start
            count = Lanes(b, b.select((rest < block).value, rest.value, block.value))
            begin = []
            for row, _ in cells:
                for place in range(planes):
                    head = heads[row] + number * HEAD + (8 + 4 * place)
                    begin += [load_one(head, I32).splat(), *[none] * (sets - 1)]

            def part(k: Lanes, held: list[Lanes]) -> list[Lanes]:
                held = list(held)
                lines = [each + (k >> (per.bit_length() - 1)) * row_of_lines for each in at]
                for line in lines:
                    if together > 1:
                        prefetch(line + _AHEAD)
                    else:
                        ask(reading, line)
                lanes = [load_lanes(line, 0, I32) for line in lines]
                for half in range(halves):
                    numbers = lanes
                    if bits < 8:
                        mask = ((1 << bits) - 1) * 0x01010101
                        numbers = [(each >> bits * half if half else each) & mask for each in lanes]
                    for row in range(rows):
                        for place in range(planes):
                            word = load_one(
                                digits[row][place] + (start + k + 4 * half), I32
                            ).splat()
                            for column, each in enumerate(numbers):
                                cell = row * panels + column
                                which = (cell * planes + place) * sets + half % sets
                                held[which] = _dots(held[which], each, word)
                return held

            held = stretch(b, (I64(0), count.value), per, begin, part)
            made = []
            for cell, (row, column) in enumerate(cells):
                parts = []
                for place in range(planes):
                    own = held[(cell * planes + place) * sets :][:sets]
                    parts.append(sum(own[1:], own[0]).cast(F32))
                head, end = heads[row] + number * HEAD, at[column] + words
                scales = load_one(head, F32).splat() * load_lanes(end, 0)
                total = _whole(parts) * scales + sums[cell]
                if zeros:
                    shifts = load_lanes(end + row_of_lines, 0)
                    total = load_one(head + 4, F32).splat() * shifts + total
                made.append(total)
            return made

        sums = stretch(b, (I64(0), blocks.value), 1, [zero] * len(cells), turn)
        for cell, total in enumerate(sums):
            store_lanes(to, cell * LANES, total)

    return vectorised(form)


def plane_of(depth: Any) -> Any:
    """Return the bytes of a plane of a row of so many numbers, and of what is written beyond."""
    return ((depth + 15) >> 4) * 16 + 16


def products(bits: int, zeros: bool, planes: int, layout: Layout) -> list[Any]:
    """Return the blocks of one row and of two by a panel, and of many and of one by the layout's.

    layout: whose `pair` is for `MANY` rows, and `several` for one.
    """
    sizes = (1, 1), (2, 1), (MANY[planes], layout.pair), (1, layout.several)
    return [_product(*size, bits, zeros, planes, layout.together) for size in sizes]
