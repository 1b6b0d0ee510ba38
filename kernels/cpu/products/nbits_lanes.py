"""The product block of `nbits`: some rows of x by sixteen columns of weights of few bits."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.cache.objects import features
from soapstone.kernels.cpu.products.panels_lanes import STREAMS, ask
from soapstone.native.lanes import (
    F16,
    F32,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    load_lanes,
    load_one,
    store_lanes,
    stretch,
)
from soapstone.native.simd import vectorised

_LINE = 64  # bytes
MANY = 4  # rows of x at a time
# Numbers of narrow types as halves: bits they move left, and the power of two they lack then.
_HALVES = {"float4_e2m1fn": (9, 14), "float8_e4m3fn": (7, 8), "float8_e5m2": (8, 0)}


@cache
def _has_tables() -> bool:
    """Return whether this processor looks sixteen numbers up in a table of sixteen at once."""
    return "avx512f" in features()


def factor_of(kind: str) -> float:
    """Return what the numbers of `_numbers` are to be multiplied by, as scales are."""
    return 2.0 ** _HALVES[kind][1] if kind in _HALVES else 1.0


def _numbers(lanes: Lanes, place: int, bits: int, kind: str) -> Lanes:
    """Return the numbers at a place of words: of integers, minus the middle of their range."""
    b = lanes.builder
    moved = lanes >> (place * bits) if place else lanes
    middle = 1 << (bits - 1)
    vector = ir.VectorType(F32, LANES)
    if kind == "bfloat16":
        return (lanes & -65536 if place else lanes << 16).bits(F32)
    if kind == "float16":
        return moved.cast(I16).bits(F16).cast(F32)
    if kind in _HALVES:
        left, _ = _HALVES[kind]
        size = (moved & (middle - 1)) << left
        half = size | ((moved & middle) << (16 - bits))
        return half.cast(I16).bits(F16).cast(F32)
    if bits <= 4 and _has_tables():  # the table's index is the lowest four bits
        kind = ir.FunctionType(vector, [vector, ir.VectorType(I32, LANES)])
        name = "llvm.x86.avx512.permvar.sf.512"
        function = cgutils.get_or_insert_function(b.module, kind, name)
        own = [value & (2 * middle - 1) for value in range(16)]
        table = ir.Constant(vector, [float(value - middle) for value in own])
        return Lanes(b, b.call(function, [table, moved.value]))
    return (moved & ((1 << bits) - 1)).cast(F32) - float(middle)


def _product(rows: int, bits: int, zeros: bool, kind: str) -> Any:
    per = 32 // bits  # numbers in a word
    sets = max(1, 4 // rows)  # of sums, which take the numbers in turns

    def form(
        x: Lanes,
        step: Lanes,
        depth: Lanes,
        block: Lanes,
        weights: Lanes,
        to: Lanes,
        reading: Lanes,
    ) -> None:
        """Write the products of rows of x with a panel.

        Of a panel each block has its words (block / per, 16), then 16 scales and, where there are
        zero points, 16 times what the sum of x is to be multiplied by; then block and depth are
        multiples of 16.

        x, step: the first row's address and bytes from one to the next. depth: numbers in a row.
        block: numbers in a block. weights: the panel's address. to: (rows, 16).
        reading: see `panels_lanes.READINGS`.
        """
        b = depth.builder
        sources = [x + step * row for row in range(rows)]
        zero = Lanes(b, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
        words = (block >> (per.bit_length() - 1)) * _LINE  # bytes of a block's words
        size = words + _LINE * (2 if zeros else 1)

        def block_from(first: Lanes, sums: list[Lanes]) -> list[Lanes]:
            """Add the block that begins with number `first`."""
            at = weights + Lanes(b, b.udiv(first.value, block.value)) * size
            left = (depth - first).value
            count = Lanes(b, b.select((depth - first < block).value, left, block.value))

            def turn(k: Lanes, held: list[Lanes], stream: int = 0) -> list[Lanes]:
                held = list(held)
                line = at + (k >> (per.bit_length() - 1)) * _LINE
                ask(reading, line)
                lanes = load_lanes(line, 0, I32)
                for place in range(per):
                    numbers = _numbers(lanes, place, bits, kind)
                    for row in range(rows):
                        value = load_one(sources[row] + (first + k + place) * 4)
                        which = row * sets + (stream * per + place) % sets
                        held[which] = held[which] + value.splat() * numbers
                return held

            def turns(k: Lanes, held: list[Lanes]) -> list[Lanes]:
                for stream in range(STREAMS):
                    held = turn(k + part * stream, held, stream)
                return held

            part = (count >> (STREAMS.bit_length() - 1)) & -per
            held = stretch(b, (I64(0), part.value), per, [zero] * (rows * sets), turns)
            held = stretch(b, ((part * STREAMS).value, count.value), per, held, turn)
            scales = load_lanes(at + words, 0)
            made = []
            for row in range(rows):
                total = _sum(held[row * sets : (row + 1) * sets]) * scales + sums[row]
                if zeros:
                    source = sources[row] + first * 4

                    def some(k: Lanes, held: list[Lanes], source: Lanes = source) -> list[Lanes]:
                        return [held[0] + load_lanes(source, k)]

                    (own,) = stretch(b, (I64(0), count.value), LANES, [zero], some)
                    own = own.fold(lambda p, q: p + q)
                    total = own.splat() * load_lanes(at + words, LANES) + total
                made.append(total)
            return made

        def blocks(number: Lanes, sums: list[Lanes]) -> list[Lanes]:
            return block_from(number * block, sums)

        count = b.udiv((depth + block - 1).value, block.value)
        sums = stretch(b, (I64(0), count), 1, [zero] * rows, blocks)
        for row in range(rows):
            store_lanes(to, row * LANES, sums[row])

    return vectorised(form)


def _sum(parts: list[Lanes]) -> Lanes:
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


def products(bits: int, zeros: bool, kind: str) -> list[Any]:
    """Return the blocks of one row, two and `MANY`."""
    return [_product(rows, bits, zeros, kind) for rows in (1, 2, MANY)]
