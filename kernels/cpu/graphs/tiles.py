"""The sum of some columns of the rows of x that one row of a sparse matrix names, in registers.

A tile of up to 128 columns is made in one pass over the entries: there is a loop for each number of
vectors that it takes, whose sums never leave the registers where the machine has as many. Rows that
lie in memory are asked for while those of earlier entries are added.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_lanes,
    store_some,
)
from soapstone.native.simd import vectorised

WIDTH = 8 * LANES  # columns of a tile
LINE = 64  # bytes
_LINES = 128  # of rows to come that are asked for


def _scalar(place: Any, index: Any, kind: Any) -> Any:
    """The number at an index of an array at an address."""
    b = place.builder
    return b.load(b.gep(b.inttoptr(place.value, kind.as_pointer()), [index]))


def _request(p: Lanes) -> None:
    """Ask for the line at an address, for the second-level cache.

    A core has more lines under way to it than to the first, and rows from memory are limited by
    how many are.
    """
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = cgutils.get_or_insert_function(p.builder.module, kind, "llvm.prefetch.p0")
    p.builder.call(function, [p.builder.inttoptr(p.value, pointer), I32(0), I32(2), I32(1)])


def _leading(column: Lanes, begin: Lanes, end: Lanes, low: Lanes, high: Lanes) -> Lanes:
    """How many of the entries from begin to before end, 16 at most, are of columns low to high."""
    b = column.builder
    entry = load_some(column, begin, first(end - begin), -1.0, I32)
    inside = entry - low.cast(I32).splat(), (high - low).cast(I32).splat()
    within = b.icmp_unsigned("<", inside[0].value, inside[1].value)
    valid = b.and_(within, first(end - begin).value)
    bits = b.zext(b.not_(b.bitcast(valid, ir.IntType(LANES))), I64)
    return Lanes(b, b.cttz(b.or_(bits, I64(1 << LANES)), ir.Constant(ir.IntType(1), 1)))


def _weighted_sum(
    ahead: bool,
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
    onto: Lanes,
) -> None:
    """Write scale times the sum over entries e of weight[e] x[column[e]] to n (1 to 128) floats.

    x: address of the tile's first column, rows are `step` bytes apart; column: int32. The entries
    are from begin to before end; the last one is the matrix's, up to which rows are asked for if
    they are asked for ahead. The weight of an entry is number e * by_entry + column[e] * by_column
    of `weights`. The sum begins with what is in `to` where onto is 1, with 0 where it is 0.
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
        there = [
            load_some(to, Lanes(b, I64(LANES * number)), first((n - LANES * number) * onto))
            for number in range(count)
        ]
        head, run, out = (b.append_basic_block(name) for name in ("head", "run", "out"))
        b.branch(head)
        b.position_at_end(head)
        entry = b.phi(I64)
        entry.add_incoming(begin.value, block)
        sums = [b.phi(wide) for _ in range(count)]
        for each, start in zip(sums, there):
            each.add_incoming(start.value, block)
        b.cbranch(b.icmp_signed("<", entry, end.value), run, out)
        b.position_at_end(run)
        if ahead:
            later = b.add(entry, I64(min(max(_LINES // count, 4), 32)))
            later = b.select(b.icmp_signed("<", later, last.value), later, last.value)
            far = x + Lanes(b, b.sext(_scalar(column, later, I32), I64)) * step
            for line in range(count):
                _request(far + LINE * line)
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


request = vectorised(_request)
leading = vectorised(_leading)
weighted_sum = vectorised(partial(_weighted_sum, True))
weighted_sum_near = vectorised(partial(_weighted_sum, False))  # of rows that are in a cache
