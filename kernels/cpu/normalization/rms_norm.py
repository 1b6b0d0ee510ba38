"""Root-mean-square normalization and its gradient: rows of c contiguous floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.normalization.layer_norm import backward, forward
from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where, store_where
from soapstone.kernels.cpu.substrate.rows import over_last_axis
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native
from soapstone.native.intrinsics import as_float, f32p, f64p, words
from soapstone.native.moves import row_offset
from soapstone.native.simd import load_doubles, splat, store, sum_lanes, widen

# Blocks are those of layer_norm.py, with one vector.


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    c, rank, epsilon, gamma = w[0], w[1], as_float(w[2]), w[3]
    for row in range(begin, end):
        x = w[8] + row_offset(w, 16, 16 + rank, rank, row)
        y = w[9] + row_offset(w, 16, 16 + 2 * rank, rank, row)
        square = splat(0.0)
        for i in range(0, c, 16):
            v = load_where(x, i, first_lanes(c - i))
            square += v * v
        rstd = 1.0 / np.sqrt(sum_lanes(widen(square)) / c + epsilon)
        s = splat(rstd)
        for i in range(0, c, 16):
            mask = first_lanes(c - i)
            store_where(y, i, load_where(x, i, mask) * s * load_where(gamma, i, mask), mask)
        f32p(w[10] + row_offset(w, 16, 16 + 3 * rank, rank, row))[0] = rstd
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    # An item is a part of the rows: each has its own partial sums of dgamma.
    w = words(block)
    c, rank, gamma = w[0], w[1], w[3]
    wide = (c + 15) & -16
    for part in range(begin, end):
        sums = w[5] + part * wide * 8
        for i in range(wide):
            f64p(sums)[i] = 0.0
        for row in range(part * w[7] // w[6], (part + 1) * w[7] // w[6]):
            dy = w[8] + row_offset(w, 16, 16 + rank, rank, row)
            x = w[9] + row_offset(w, 16, 16 + 2 * rank, rank, row)
            rstd = f32p(w[10] + row_offset(w, 16, 16 + 3 * rank, rank, row))[0]
            dx = w[11] + row_offset(w, 16, 16 + 4 * rank, rank, row)
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


@variant("rms_norm", "numba")
@over_last_axis("xc", "xs")
def rms_norm(call: Call) -> Entry | None:
    """y and rstd of rows normalized over the last dim."""
    return forward(call, _forward, call.outputs[1:])


@variant("rms_norm_grad", "numba")
@over_last_axis("xxcs", "xc")
def rms_norm_grad(call: Call) -> Entry | None:
    """dx and dgamma from dy, x, gamma and rstd."""
    return backward(call, _backward)
