"""Root-mean-square normalization and its gradient: rows of c contiguous floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.normalization.layer_norm import BACKWARD, FORWARD, backward, forward
from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.kernels.cpu.substrate.rows import over_last_axis
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.moves import row_at
from soapstone.native.simd import load_doubles, splat, store, sum_lanes, widen

_forward_of, _forward_table = FORWARD.at, FORWARD.table
_backward_of, _backward_table = BACKWARD.at, BACKWARD.table


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w, table = _forward_of(block), _forward_table(block)
    c, rank, epsilon, gamma = w.channels, w.rank, w.epsilon, w.gamma
    for row in range(begin, end):
        x = w.x + row_at(table, rank, 0, row)
        y = w.y + row_at(table, rank, 1, row)
        square = splat(0.0)
        for i in range(0, c, 16):
            v = load_where(x, i, first_lanes(c - i))
            square += v * v
        rstd = 1.0 / np.sqrt(sum_lanes(widen(square)) / c + epsilon)
        s = splat(rstd)
        for i in range(0, c, 16):
            mask = first_lanes(c - i)
            store_where(y, i, load_where(x, i, mask) * s * load_where(gamma, i, mask), mask)
        f32p(w.rstd + row_at(table, rank, 2, row))[0] = rstd
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    # An item is a part of the rows: each has its own partial sums of dgamma.
    w, table = _backward_of(block), _backward_table(block)
    c, rank, gamma = w.channels, w.rank, w.gamma
    wide = (c + 15) & -16
    for part in range(begin, end):
        sums = w.sums + part * wide * 8
        for i in range(wide):
            f64p(sums)[i] = 0.0
        for row in range(part * w.rows // w.parts, (part + 1) * w.rows // w.parts):
            dy = w.dy + row_at(table, rank, 0, row)
            x = w.x + row_at(table, rank, 1, row)
            rstd = f32p(w.rstd + row_at(table, rank, 2, row))[0]
            dx = w.dx + row_at(table, rank, 3, row)
            s = splat(rstd)
            total = splat(0.0)
            for i in range(0, c, 16):
                mask = first_lanes(c - i)
                g = load_where(dy, i, mask)
                h = load_where(x, i, mask) * s
                store(sums, i, load_doubles(sums, i) + widen(g * h))
                total += g * load_where(gamma, i, mask) * h
            mean = splat(sum_lanes(widen(total)) / c)
            for i in range(0, c, 16):
                mask = first_lanes(c - i)
                g = load_where(dy, i, mask) * load_where(gamma, i, mask)
                store_where(dx, i, (g - load_where(x, i, mask) * s * mean) * s, mask)
    return 0


@variant("rms_norm", "numba", promises=True)
@over_last_axis("xc", "xs")
def rms_norm(call: Call) -> Entry | None:
    """y and rstd of rows normalized over the last dim."""
    return forward(call, _forward, call.outputs[1:])


@variant("rms_norm_grad", "numba")
@over_last_axis("xxcs", "xc")
def rms_norm_grad(call: Call) -> Entry | None:
    """dx and dgamma from dy, x, gamma and rstd."""
    return backward(call, _backward)
