"""The sum of some columns of the rows of x that one row of a sparse matrix names, in registers.

A tile of up to 128 columns is made in one pass over the entries: there is a loop for each number of
vectors that it takes, whose sums never leave the registers where the machine has as many. Rows of
entries to come are asked for about as far ahead as the machine has lines under way.
"""

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
    prefetch,
    store_lanes,
    store_some,
)
from soapstone.native.simd import vectorised

WIDTH = 8 * LANES  # columns of a tile
_LINES = 64  # of rows to come that are asked for


def _scalar(place: Any, index: Any, kind: Any) -> Any:
    """The number at an index of an array at an address."""
    b = place.builder
    return b.load(b.gep(b.inttoptr(place.value, kind.as_pointer()), [index]))


@vectorised
def weighted_sum(
    to: Lanes,
    x: Lanes,
    n: Lanes,
    step: Lanes,
    column: Lanes,
    begin: Lanes,
    end: Lanes,
    last: Lanes,
    weights: Lanes,
    by_entry: Lanes,
    by_column: Lanes,
    scale: Lanes,
) -> None:
    """Write scale times the sum over entries e of weight[e] x[column[e]] to n (1 to 128) floats.

    x: address of the tile's first column, rows are `step` bytes apart; column: int32. The entries
    are from begin to before end; the last one is the matrix's. The weight of an entry is number
    e * by_entry + column[e] * by_column of `weights`.
    """
    b = n.builder
    wide = ir.VectorType(F32, LANES)
    done = b.append_basic_block("done")
    vectors = b.lshr(b.add(n.value, I64(LANES - 1)), I64(4))
    which = b.switch(vectors, done)
    for count in range(1, WIDTH // LANES + 1):
        block = b.append_basic_block(f"tile{count}")
        which.add_case(I64(count), block)
        b.position_at_end(block)
        mask = first(n - LANES * (count - 1))
        head, run, out = (b.append_basic_block(name) for name in ("head", "run", "out"))
        b.branch(head)
        b.position_at_end(head)
        entry = b.phi(I64)
        entry.add_incoming(begin.value, block)
        sums = [b.phi(wide) for _ in range(count)]
        for each in sums:
            each.add_incoming(ir.Constant(wide, [0.0] * LANES), block)
        b.cbranch(b.icmp_signed("<", entry, end.value), run, out)
        b.position_at_end(run)
        ahead = b.add(entry, I64(min(max(_LINES // count, 4), 32)))
        ahead = b.select(b.icmp_signed("<", ahead, last.value), ahead, last.value)
        later = x + Lanes(b, b.sext(_scalar(column, ahead, I32), I64)) * step
        for line in range(count):
            prefetch(later + 4 * LANES * line)
        source = Lanes(b, b.sext(_scalar(column, entry, I32), I64))
        place = Lanes(b, entry) * by_entry + source * by_column
        weight = Lanes(b, _scalar(weights, place.value, F32)).splat()
        row = x + source * step
        for number, each in enumerate(sums):
            at = I64(LANES * number)
            whole = number < count - 1
            part = load_lanes(row, Lanes(b, at)) if whole else load_some(row, Lanes(b, at), mask)
            each.add_incoming((part * weight + Lanes(b, each)).value, b.block)
        entry.add_incoming(b.add(entry, I64(1)), b.block)
        b.branch(head)
        b.position_at_end(out)
        for number, each in enumerate(sums):
            made = Lanes(b, each) * scale.cast(F32).splat()
            at = Lanes(b, I64(LANES * number))
            if number < count - 1:
                store_lanes(to, at, made)
            else:
                store_some(to, at, made, mask)
        b.branch(done)
    b.position_at_end(done)
