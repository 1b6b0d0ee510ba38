"""The product block of `panels`: up to four rows of x by sixteen, 32 or 64 columns of weights."""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from soapstone.native.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    chosen,
    load_lanes,
    load_one,
    prefetch,
    store_lanes,
    stretch,
)
from soapstone.native.simd import vectorised

_LINE = 64  # bytes
_STEPS = 4  # values of k in one turn of the loop
STREAMS = 4  # pieces of weights that are read side by side: prefetchers end at a page's bound
# How weights are asked for before they are used, by number: not at all, since the processor does so
# itself; or by so many lines, for the cache that `prefetch` says. Sums are the same.
READINGS = {"unasked": (0, 0), "farther": (16, 2), "nearest": (32, 3)}
_SUMS = 4  # vectors of a row: fewer would wait for one another


def ask(reading: Lanes, line: Lanes, count: int = 1) -> None:
    """Ask for as many lines as are read from one on, as the number of one of `READINGS` says."""

    def lines(ahead: int, nearness: int) -> None:
        for number in range(count if ahead else 0):
            prefetch(line + (ahead + number) * _LINE, nearness)

    chosen(reading, {n: partial(lines, *each) for n, each in enumerate(READINGS.values())})


def _product(
    rows: int,
    vectors: int,
    places: Lanes,
    depth: Lanes,
    weights: Lanes,
    to: Lanes,
    reading: Lanes,
) -> None:
    sets = _SUMS // vectors  # of sums, which take the values of k in turns
    builder = depth.builder
    x = [load_one(places + row * 8, I64) for row in range(rows)]

    def turn(k: Lanes, sums: list[Lanes], steps: int) -> list[Lanes]:
        sums = list(sums)
        line = weights + k * (vectors * _LINE)

        ask(reading, line, steps * vectors)
        for step in range(steps):
            right = [load_lanes(line, (step * vectors + v) * LANES) for v in range(vectors)]
            for row in range(rows):
                left = load_one(x[row] + k * 4 + step * 4).splat()
                first = (row * sets + step % sets) * vectors
                for v in range(vectors):
                    sums[first + v] = sums[first + v] + left * right[v]
        return sums

    def turns(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
        for stream in range(STREAMS):
            sums = turn(k + part * stream, sums, _STEPS)
        return sums

    zero = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
    sums = [zero] * (rows * sets * vectors)
    part = (depth >> (STREAMS.bit_length() - 1)) & -_STEPS
    done = (part * STREAMS).value
    sums = stretch(builder, (I64(0), part.value), _STEPS, sums, turns)
    sums = stretch(builder, (done, depth.value), 1, sums, lambda k, s: turn(k, s, 1))
    for row in range(rows):
        for v in range(vectors):
            parts = [sums[(row * sets + part) * vectors + v] for part in range(sets)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
            store_lanes(to, row * _SUMS * LANES + v * LANES, parts[0])


@vectorised
def panel_product(
    rows: Lanes,
    vectors: Lanes,
    places: Lanes,
    depth: Lanes,
    weights: Lanes,
    to: Lanes,
    reading: Lanes,
) -> None:
    """Write the products of one to four rows, whose addresses lie at `places`, with a panel.

    vectors: 1, 2 or 4; weights: (depth, 16 * vectors); to: (rows, 64); reading: the place of one of
    `READINGS`.
    """

    def of_rows(count: int) -> None:
        given = places, depth, weights, to, reading
        chosen(vectors, {n: partial(_product, count, n, *given) for n in (1, 2, 4)})

    chosen(rows, {count: partial(of_rows, count) for count in (1, 2, 3, 4)})
