"""Products of a few rows, their softmax, and transposed keys: what `blocks` is made of.

Of bfloat16, two numbers that are multiplied and added at once lie side by side, as a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.kernels.cpu.attention.heads import LEAST
from soapstone.kernels.cpu.elementwise.lane_loops import get, loop, put
from soapstone.kernels.cpu.substrate.mathematics import brief_exp, falling_exp, log
from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    chosen,
    first,
    held,
    load_lanes,
    load_one,
    load_some,
    paired_bfloat16,
    positive_to_bfloat16,
    stretch,
)
from soapstone.native.simd import store_lanes, store_some, vectorised, where

ROWS = 6  # with 64 columns their sums take 24 of 32 registers of 16 lanes
# Vectors of a panel. Of eight lanes sixteen registers hold the sums of six rows with 16 columns.
WIDTH = 4 if held() >= 32 else 1
HALVED = WIDTH == 1  # half a vector is a register: values of up to eight columns take that


def _pairs(total: Lanes, left: Lanes, right: Lanes) -> Lanes:
    """Return the total plus the products of each lane's two numbers of bfloat16."""
    b, words = total.builder, ir.VectorType(I32, LANES)
    shape = ir.FunctionType(total.kind, [total.kind, words, words])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    made = cgutils.get_or_insert_function(b.module, shape, name)
    return Lanes(b, b.call(made, [total.value, left.value, right.value]))


def _widened(half: Lanes) -> Lanes:
    """Return half a vector as one whose other half is anything."""
    b = half.builder
    places = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    return Lanes(b, b.shuffle_vector(half.value, half.value, places))


def _larger(a: Lanes, b: Lanes) -> Lanes:
    return where(a > b, a, b)


def _store_one(p: Lanes, value: Lanes) -> None:
    p.builder.store(value.value, p.builder.inttoptr(p.value, F32.as_pointer()))


def _product(halves: bool) -> Any:
    element = I32 if halves else F32

    def write(vectors: int, *given: Lanes) -> None:
        x, x_step, depth, lines, line, factors, to, to_step, last, room = given
        builder = depth.builder
        rows = [x + x_step * row for row in range(ROWS)]
        # Six sums of half a vector would wait for each other: there are two of each.
        lanes, vectors, steps = (LANES, vectors, 1) if vectors else (LANES // 2, 1, 2)
        count = ROWS * vectors

        def turn(steps: int, k: Lanes, sums: list[Lanes]) -> list[Lanes]:
            sums = list(sums)
            for step in range(steps):
                at = k + step if step else k
                panel = lines + line * at
                right = [load_lanes(panel, v * LANES, element, lanes) for v in range(vectors)]
                left = [load_one(row + at * 4, element).splat(lanes) for row in rows]
                for place, (a, b) in enumerate(((a, b) for a in left for b in right), step * count):
                    sums[place] = _pairs(sums[place], a, b) if halves else a * b + sums[place]
            return sums

        zero = Lanes(builder, ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes))
        whole = (depth & -steps if steps > 1 else depth).value
        sums = [zero] * (count * steps)
        sums = stretch(builder, (I64(0), whole), steps, sums, partial(turn, steps))
        if steps > 1:
            sums = stretch(builder, (whole, depth.value), 1, sums, partial(turn, 1))
            sums = [_widened(a + b) for a, b in zip(sums[:count], sums[count:])]
        for row in range(ROWS):
            factor, place = load_one(factors + row * 4).splat(), to + to_step * row
            for v in range(vectors):
                made = sums[row * vectors + v] * factor
                if v + 1 < vectors:
                    store_lanes(place, v * LANES, made)
                else:
                    made = where(first(last), made, -float("inf"))
                    store_some(place, v * LANES, made, first(room))

    def product(
        vectors: Lanes,
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

        vectors: 0 is the first half of one, where they are HALVED. x: the rows' first address, to:
        the results', with the bytes between rows; lines: that of `depth` lines of the panel, words
        of halves; factors: that of a number for each row; room: how many lanes of the last vector
        are written, those past `last` as minus infinity.
        """
        given = x, x_step, depth, lines, line, factors, to, to_step, last, room
        forms = range(0 if HALVED else 1, WIDTH + 1)
        chosen(vectors, {count: partial(write, count, *given) for count in forms})

    return vectorised(product)


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


def _weights(halves: bool) -> Any:
    exponential = brief_exp if halves else falling_exp

    def form(
        to: Lanes,
        to_step: Lanes,
        scores: Lanes,
        step: Lanes,
        counts: Lanes,
        seen: Lanes,
        mask: Lanes,
        mask_step: Lanes,
        raised: Lanes,
        sums: Lanes,
        tops: Lanes,
    ) -> None:
        """Write exp(score - largest score) of ROWS rows; of each, their sum and the largest score.

        All are addresses, with the bytes between rows. to: of weights, which may be the scores;
        counts: of how many of a row's `seen` scores, int64, count, the first row's being fewest:
        the weights of others are zeros. mask: of what is added to scores, 0: nothing; raised: of a
        number for each row that is added to them as well. Whole vectors are read and written.
        """
        builder, rows = seen.builder, range(ROWS)
        some = [load_one(counts + row * 8, I64) for row in rows]
        whole = (some[0] & -LANES).value
        low = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [-float("inf")] * LANES))
        shifts = [load_one(raised + row * 4) for row in rows]

        def both(sums: list[Lanes], body: Callable[..., list[Lanes]]) -> list[Lanes]:
            """Walk over what all rows see, then over the rest."""
            sums = stretch(builder, (I64(0), whole), LANES, sums, partial(body, True))
            return stretch(builder, (whole, seen.value), LANES, sums, partial(body, False))

        def make(masked: bool) -> None:
            def score(row: int, i: Lanes, valid: Lanes | None) -> Lanes:
                value = load_lanes(scores + step * row, i)
                if masked:
                    at = mask + mask_step * row
                    value = value + (
                        load_lanes(at, i) if valid is None else load_some(at, i, valid)
                    )
                return value if valid is None else where(valid, value, low)

            def larger(full: bool, i: Lanes, most: list[Lanes]) -> list[Lanes]:
                """The largest so far; what is not a number shows in the sums."""
                made = []
                for row in rows:
                    value = score(row, i, None if full else first(some[row] - i))
                    made.append(where(value > most[row], value, most[row]))
                return made

            largest = [each.fold(_larger) for each in both([low] * ROWS, larger)]
            top = [value + shift for value, shift in zip(largest, shifts)]
            # Not the top less the shift, of which nothing is left beside a large one; a shift that
            # is infinite or no number hides the row, or shows in its weights.
            base = [
                where(value < LEAST, float("inf"), each + (shift - shift)).splat()
                for value, each, shift in zip(top, largest, shifts)
            ]
            top = [where(value < LEAST, LEAST, value) for value in top]

            def weigh(full: bool, i: Lanes, totals: list[Lanes]) -> list[Lanes]:
                made = []
                for row in rows:
                    valid = None if full else first(some[row] - i)
                    weight = exponential(score(row, i, valid) - base[row])
                    written = positive_to_bfloat16(weight) if halves else weight
                    store_lanes(to + to_step * row, i, written)
                    made.append(totals[row] + weight)
                return made

            totals = both([low.like(0.0)] * ROWS, weigh)
            for row, total in enumerate(totals):
                _store_one(sums + row * 4, total.fold(lambda a, b: a + b))
                _store_one(tops + row * 4, top[row])

        chosen(mask.compare("!=", 0), {k: partial(make, bool(k)) for k in (0, 1)})

    return vectorised(form)


@vectorised
def ending(sums: Lanes, tops: Lanes, empty: Lanes) -> None:
    """Make sixteen sums of weights what results are multiplied by, and tops logarithms of sums."""
    total = load_lanes(sums, 0)
    store_lanes(tops, 0, load_lanes(tops, 0) + log(total))
    store_lanes(sums, 0, where(total.compare("==", 0.0), empty.cast(F32).splat(), 1.0 / total))


PRODUCT, HALF_PRODUCT = _product(False), _product(True)
WEIGHTS, HALF_WEIGHTS = _weights(False), _weights(True)
