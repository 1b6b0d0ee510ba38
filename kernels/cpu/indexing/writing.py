"""Rows written into a longer array at places of their own (`write_at`), of elements of any size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.ops.indexing.writing import checked_starts
from soapstone.kernels.cpu.indexing.slices import PUT, Slice, elements_served, slice_run
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import native, sequence
from soapstone.native.memory import address
from soapstone.native.moves import row_at
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import merge

# wide: starts are int64; size: bytes an element; rows: written to each of `lines` lines of a
# sample, of `extent` rows; sample, step: bytes from one sample and row to the next, in rows and y;
# elements, each: of a row, and its block. Then the walk of the lines, of `rank` dims.
_WRITE = Fields(
    "y x starts wide start_step size rows lines extent sample(x y) step(x y) rank elements each"
)
_write_of, _outer_of = _WRITE.at, _WRITE.table


@native("body")
def _write(block: Any, begin: int, end: int) -> int:
    w, table = _write_of(block), _outer_of(block)
    for item in range(begin, end):
        line, row = item // w.rows, item % w.rows
        sample, line = line // w.lines, line % w.lines
        start = integer_at(w.starts + sample * w.start_step, w.wide)
        if start < 0 or start > w.extent - w.rows:
            return 1
        x = w.x + sample * w.sample_x + row_at(table, w.rank, 0, line) + row * w.step_x
        y = w.y + sample * w.sample_y + row_at(table, w.rank, 1, line)
        slice_run(w.each, w.size, PUT, y + (start + row) * w.step_y, x, 0, w.elements)
    return 0


@variant("write_at", "numba")
def write_at(call: Call) -> Entry | None:
    """x with the rows written, where it lies if the result is to lie there."""
    (x, rows, starts), (y,), axis = call.inputs, call.outputs, call.attributes["axis"]
    if not (is_integer(starts) and elements_served(x, rows, y)):
        return None
    entries: list[Entry | None] = []
    if address(x) != address(y) or x.strides != y.strides:
        entries.append(copy(y, x, call.threads))
    if rows.size:
        count, extent, after = rows.shape[axis], x.shape[axis], axis + 1
        tail, steps = rows.shape[after:], [rows.strides[after:], y.strides[after:]]
        outer, walk = merge(rows.shape[1:axis], [rows.strides[1:axis], y.strides[1:axis]])
        lines = math.prod(rows.shape[1:axis])
        block = _WRITE.pack(
            *(outer, walk),
            y=y,
            x=rows,
            starts=starts,
            wide=starts.dtype == np.int64,
            start_step=starts.strides[0],
            size=x.itemsize,
            rows=count,
            lines=lines,
            extent=extent,
            sample=(rows.strides[0], y.strides[0]),
            step=(rows.strides[axis], y.strides[axis]),
            rank=len(outer),
            elements=math.prod(tail),
            each=Slice.of(tail, steps, x.itemsize).block,
        )

        def said() -> str:
            try:
                checked_starts(call.operator, starts, count, extent)
            except GraphError as error:
                return str(error)
            return (
                f"{call.operator}: rows outside their axis, of starts that are overwritten by now"
            )

        items, threads = (
            rows.shape[0] * lines * count,
            useful_threads(call.threads, 2 * rows.nbytes),
        )
        entries.append(parallel_for(_write, block, items, threads, {1: said}))
    return sequence(entries)
