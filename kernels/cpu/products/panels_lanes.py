"""The product block of `panels`: up to four rows of x by sixteen, 32 or 64 columns of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from soapstone.native.lanes import F32, I64, LANES, Lanes, load_lanes, prefetch, store_lanes
from soapstone.native.simd import vectorised

_LINE = 64  # bytes
_STEPS = 4  # values of k in one turn of the loop
_STREAMS = 4  # pieces of a panel that are read side by side: prefetchers end at a page's bound
_AHEAD = 32  # lines of each piece that are asked for before they are used
_SUMS = 4  # vectors of a row: fewer would wait for one another


def stretch(
    builder: Any,
    bounds: tuple[Any, Any],
    step: int,
    sums: list[Lanes],
    body: Callable[[Lanes, list[Lanes]], list[Lanes]],
) -> list[Lanes]:
    """Write a loop over `bounds` and return what `body(i, sums)` made of the sums.

    builder: of the program. step: from one i to the next. sums: what they begin with.
    """
    before = builder.block
    head, run, done = (builder.append_basic_block(name) for name in ("head", "run", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    i = builder.phi(I64)
    i.add_incoming(bounds[0], before)
    phis = [builder.phi(total.kind) for total in sums]
    for phi, total in zip(phis, sums):
        phi.add_incoming(total.value, before)
    builder.cbranch(builder.icmp_signed("<", i, bounds[1]), run, done)
    builder.position_at_end(run)
    made = body(Lanes(builder, i), [Lanes(builder, phi) for phi in phis])
    i.add_incoming(builder.add(i, I64(step)), builder.block)
    for phi, total in zip(phis, made):
        phi.add_incoming(total.value, builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return [Lanes(builder, phi) for phi in phis]


def _product(rows: int, vectors: int) -> Any:
    sets = _SUMS // vectors  # of sums, which take the values of k in turns

    def form(places: Lanes, depth: Lanes, weights: Lanes, to: Lanes) -> None:
        """Write the products of the rows, whose addresses lie at `places`, with a panel.

        weights: (depth, 16 * vectors); to: (rows, 64).
        """
        builder = depth.builder
        x = []
        for row in range(rows):
            place = builder.inttoptr((places + row * 8).value, I64.as_pointer())
            x.append(Lanes(builder, builder.load(place)))

        def turn(k: Lanes, sums: list[Lanes], steps: int) -> list[Lanes]:
            sums = list(sums)
            line = weights + k * (vectors * _LINE)
            for ahead in range(steps * vectors):
                prefetch(line + (_AHEAD + ahead) * _LINE)
            for step in range(steps):
                right = [load_lanes(line, (step * vectors + v) * LANES) for v in range(vectors)]
                for row in range(rows):
                    source = (x[row] + k * 4 + step * 4).value
                    one = builder.load(builder.inttoptr(source, F32.as_pointer()))
                    one.align = 4
                    left = Lanes(builder, one).splat()
                    first = (row * sets + step % sets) * vectors
                    for v in range(vectors):
                        sums[first + v] = sums[first + v] + left * right[v]
            return sums

        def turns(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
            for stream in range(_STREAMS):
                sums = turn(k + part * stream, sums, _STEPS)
            return sums

        zero = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
        sums = [zero] * (rows * sets * vectors)
        part = (depth >> (_STREAMS.bit_length() - 1)) & -_STEPS
        done = (part * _STREAMS).value
        sums = stretch(builder, (I64(0), part.value), _STEPS, sums, turns)
        sums = stretch(builder, (done, depth.value), 1, sums, lambda k, s: turn(k, s, 1))
        for row in range(rows):
            for v in range(vectors):
                parts = [sums[(row * sets + part) * vectors + v] for part in range(sets)]
                while len(parts) > 1:
                    parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
                store_lanes(to, row * _SUMS * LANES + v * LANES, parts[0])

    return vectorised(form)


# By the number of rows, from one on; each of 16, 32 and 64 columns.
PRODUCTS = [[_product(rows, vectors) for vectors in (1, 2, 4)] for rows in (1, 2, 3, 4)]
