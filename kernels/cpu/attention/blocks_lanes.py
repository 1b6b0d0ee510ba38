"""Products of a few rows with 16 to 64 columns, and transposed keys: what `blocks` is made of."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    stretch,
)
from soapstone.native.simd import store_lanes, store_some, vectorised, where

ROWS = 6  # with 64 columns their sums take 24 of the 32 registers
WIDTH = 4  # vectors of a panel


def _product(vectors: int) -> Any:
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
        `depth` lines of the panel; factors: that of a number for each row; room: how many lanes of
        the last vector are written, those past `last` as minus infinity.
        """
        builder = depth.builder

        def number(place: Lanes) -> Lanes:
            made = builder.load(builder.inttoptr(place.value, F32.as_pointer()))
            made.align = 4
            return Lanes(builder, made).splat()

        rows = [x + x_step * row for row in range(ROWS)]

        def turn(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
            right = [load_lanes(lines + line * k, v * LANES) for v in range(vectors)]
            left = [number(row + k * 4) for row in rows]
            pairs = [(a, b) for a in left for b in right]
            return [a * b + total for (a, b), total in zip(pairs, sums)]

        zero = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
        sums = stretch(builder, (I64(0), depth.value), 1, [zero] * (ROWS * vectors), turn)
        for row in range(ROWS):
            factor, place = number(factors + row * 4), to + to_step * row
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


PRODUCTS = tuple(_product(vectors) for vectors in range(1, WIDTH + 1))
