"""Softmax, its logarithm and their gradients over any axis.

Where the axis is contiguous, a row is passed over two or three times while it is in the cache.
Otherwise sixteen neighbouring columns go down the axis together.
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.mathematics import vexp, vlog
from soapstone.kernels.cpu.substrate.rowmath import (
    exp_sum,
    exp_sum_into,
    load_wide,
    logarithm,
    row_dot,
    row_max,
    row_sum,
    scale_row,
    scaled_difference,
    shift_row,
    store_wide,
)
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.moves import row_at
from soapstone.native.simd import load_first, splat, store_first, vmax
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

_KINDS = {"softmax": 0, "log_softmax": 1, "softmax_grad": 2, "log_softmax_grad": 3}

# extent: of the axis, with the steps along it; blocks: of columns; x: dy of gradients, whose y is
# the result forward; then the walk of the rows, of `rank` dims, in x, y and the target.
_BLOCK = Fields("kind extent step(x y to) columns blocks rank x y to")
_block_of, _table_of = _BLOCK.at, _BLOCK.table


@routine
def _log_gradient_row(to: int, dy: int, y: int, n: int, total: float) -> None:
    full = n & -64
    for i in range(0, full, 64):
        store_wide(to, i, load_wide(dy, i) - vexp(load_wide(y, i)) * total)
    for i in range(full, n, 16):
        value = load_first(dy, i, n - i) - vexp(load_first(y, i, n - i)) * total
        store_first(to, i, value, n - i)


@native("body")
def _rows(block: Any, begin: int, end: int) -> int:
    w, table = _block_of(block), _table_of(block)
    kind, n, rank = w.kind, w.extent, w.rank
    for row in range(begin, end):
        x = w.x + row_at(table, rank, 0, row)
        y = w.y + row_at(table, rank, 1, row)
        to = w.to + row_at(table, rank, 2, row)
        if kind == 0:
            total = exp_sum_into(to, x, row_max(x, n), n)
            scale_row(to, to, n, 1.0 / total)
        elif kind == 1:
            largest = row_max(x, n)
            shift_row(to, x, n, largest, logarithm(exp_sum(x, largest, n)))
        elif kind == 2:
            scaled_difference(to, y, x, n, row_dot(x, y, n))
        else:
            _log_gradient_row(to, x, y, n, row_sum(x, n))
    return 0


@native("body")
def _columns(block: Any, begin: int, end: int) -> int:
    w, table = _block_of(block), _table_of(block)
    kind, n, rank, blocks = w.kind, w.extent, w.rank, w.blocks
    sx, sy, st = w.step_x, w.step_y, w.step_to
    for item in range(begin, end):
        row, first = item // blocks, (item % blocks) * 16
        m = min(16, w.columns - first)
        x = w.x + row_at(table, rank, 0, row) + first * 4
        y = w.y + row_at(table, rank, 1, row) + first * 4
        to = w.to + row_at(table, rank, 2, row) + first * 4
        total = splat(0.0)
        if kind < 2:
            largest = splat(-float("inf"))
            for i in range(n):
                largest = vmax(largest, load_first(x + i * sx, 0, m))
            for i in range(n):
                value = load_first(x + i * sx, 0, m) - largest
                power = vexp(value)
                total = total + power
                store_first(to + i * st, 0, power if kind == 0 else value, m)
            if kind == 0:
                factor = 1.0 / total
                for i in range(n):
                    store_first(to + i * st, 0, load_first(to + i * st, 0, m) * factor, m)
            else:
                shift = vlog(total)
                for i in range(n):
                    store_first(to + i * st, 0, load_first(to + i * st, 0, m) - shift, m)
        elif kind == 2:
            for i in range(n):
                total = total + load_first(x + i * sx, 0, m) * load_first(y + i * sy, 0, m)
            for i in range(n):
                value = load_first(x + i * sx, 0, m) - total
                store_first(to + i * st, 0, load_first(y + i * sy, 0, m) * value, m)
        else:
            for i in range(n):
                total = total + load_first(x + i * sx, 0, m)
            for i in range(n):
                value = vexp(load_first(y + i * sy, 0, m)) * total
                store_first(to + i * st, 0, load_first(x + i * sx, 0, m) - value, m)
    return 0


@variant(tuple(_KINDS), "numba")
def softmax(call: Call) -> Entry | None:
    """Softmax or its logarithm over one axis, or the gradient of either."""
    x, y, to = call.inputs[0], call.inputs[-1], call.outputs[0]
    if not is_float32(x, y, to):
        return None
    if to.size == 0:
        return noop()
    arrays = (x, y, to)
    axis = call.attributes["axis"] % x.ndim
    extent = x.shape[axis]
    others = [d for d in memory_order(to.strides) if d != axis]
    walked = merge(x.shape, [a.strides for a in arrays], others)
    contiguous = extent == 1 or all(a.strides[axis] == 4 for a in arrays)
    columns = 1
    if not contiguous and all(step == 4 for step in walked.steps):
        columns, walked = walked.extents[-1], walked.rows
    blocks = -(-columns // 16)
    block = _BLOCK.pack(
        walked,
        kind=_KINDS[call.operator],
        extent=extent,
        step=[a.strides[axis] for a in arrays],
        columns=columns,
        blocks=blocks,
        rank=walked.rank,
        x=x,
        y=y,
        to=to,
    )
    items = walked.size * blocks
    threads = useful_threads(call.threads, 4 * x.nbytes)
    return parallel_for(_rows if contiguous else _columns, block, items, threads)
