"""Products of a few rows with 16 to 64 columns, and transposed keys: what `blocks` is made of.

Of bfloat16, two numbers that are multiplied and added at once lie side by side, as a word.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_one,
    load_some,
    paired_bfloat16,
    stretch,
)
from soapstone.native.simd import store_lanes, store_some, vectorised, where

ROWS = 6  # with 64 columns their sums take 24 of the 32 registers
WIDTH = 4  # vectors of a panel


def _pairs(total: Lanes, left: Lanes, right: Lanes) -> Lanes:
    """Return the total plus the products of each lane's two numbers of bfloat16."""
    b, words = total.builder, ir.VectorType(I32, LANES)
    shape = ir.FunctionType(total.kind, [total.kind, words, words])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    made = cgutils.get_or_insert_function(b.module, shape, name)
    return Lanes(b, b.call(made, [total.value, left.value, right.value]))


def _product(vectors: int, halves: bool) -> Any:
    element = I32 if halves else F32

    def form(
        x: Lanes,
        x_step: Lanes,
        depth: Lanes,
        lines: Lanes,
        line: Lanes,
        factors: Lanes,
        to: Lanes,
        to_step: Lanes,
        last: Lanes,
        room: Lanes,
    ) -> None:
        """Write the products of ROWS rows with a panel of so many vectors, each row by a factor.

        x: the rows' first address, to: the results', with the bytes between rows; lines: that of
        `depth` lines of the panel, words of halves; factors: that of a number for each row; room:
        how many lanes of the last vector are written, those past `last` as minus infinity.
        """
        builder = depth.builder
        rows = [x + x_step * row for row in range(ROWS)]

        def turn(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
            right = [load_lanes(lines + line * k, v * LANES, element) for v in range(vectors)]
            left = [load_one(row + k * 4, element).splat() for row in rows]
            both = zip(((a, b) for a in left for b in right), sums)
            return [_pairs(total, a, b) if halves else a * b + total for (a, b), total in both]

        zero = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
        sums = stretch(builder, (I64(0), depth.value), 1, [zero] * (ROWS * vectors), turn)
        for row in range(ROWS):
            factor, place = load_one(factors + row * 4).splat(), to + to_step * row
            for v in range(vectors):
                made = sums[row * vectors + v] * factor
                if v + 1 < vectors:
                    store_lanes(place, v * LANES, made)
                else:
                    made = where(first(last), made, -float("inf"))
                    store_some(place, v * LANES, made, first(room))

    return vectorised(form)


@vectorised
def turned(to: Lanes, to_step: Lanes, x: Lanes, x_step: Lanes, rows: Lanes, width: Lanes) -> None:
    """Write up to sixteen rows of up to sixteen floats, transposed; what lacks is anything.

    x, to: first addresses, with the bytes between rows; rows, width: of x, from one on. All sixteen
    lines of `to` are written whole.
    """
    builder = to.builder
    some = first(width)
    lines = []
    for row in range(LANES):
        exists = builder.icmp_signed("<", I64(row), rows.value)
        place = x + x_step * Lanes(builder, builder.select(exists, I64(row), I64(0)))
        lines.append(load_some(place, 0, some).value)
    for step in (1, 2, 4, 8):
        low = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        high = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & step:
                pair = lines[row], lines[row + step]
                for into, lanes in ((row, low), (row + step, high)):
                    picks = ir.Constant(ir.VectorType(I32, LANES), lanes)
                    lines[into] = builder.shuffle_vector(*pair, picks)
    for row in range(LANES):
        store_lanes(to + to_step * row, 0, Lanes(builder, lines[row]))


@vectorised
def paired(to: Lanes, x: Lanes, y: Lanes, n: Lanes) -> None:
    """Write n words of a number of x and one of y, rounded to bfloat16."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        made = paired_bfloat16(get(x, i, width, some), get(y, i, width, some))
        put(to, i, made, some)

    loop(n.builder, n, body, LANES)


PRODUCTS, HALF_PRODUCTS = (
    tuple(_product(vectors, halves) for vectors in range(1, WIDTH + 1)) for halves in (False, True)
)
