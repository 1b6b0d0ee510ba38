"""Layer normalization and its gradient: rows of c contiguous floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.cpu.substrate.rows import over_last_axis
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import Native, native, noop, parallel_for, sequence, useful_threads
from soapstone.native.intrinsics import as_float, f32p, f64p, words
from soapstone.native.memory import Block, aligned_array, pack
from soapstone.native.moves import row_offset
from soapstone.native.simd import (
    load,
    load_doubles,
    load_first,
    splat,
    store,
    store_first,
    sum_lanes,
    widen,
)
from soapstone.native.walks import walk

# Words of the blocks: 0 channels, 1 rank of the rows' walk, 2 epsilon, 3 gamma, 4 beta (backward:
# how many vectors of partial sums a part has), 5 these sums, 6 parts, 7 rows, 8.. addresses of what
# has rows, 13, 14 of the vectors' gradients; then from 16 the extents and one table of strides an
# array that has rows.


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    c, rank, epsilon, gamma, beta = w[0], w[1], as_float(w[2]), w[3], w[4]
    full = c & -64
    bulk = c & -16
    for row in range(begin, end):
        x = w[8] + row_offset(w, 16, 16 + rank, rank, row)
        y = w[9] + row_offset(w, 16, 16 + 2 * rank, rank, row)
        a = b = d = e = splat(0.0)
        for i in range(0, full, 64):
            a += load(x, i)
            b += load(x, i + 16)
            d += load(x, i + 32)
            e += load(x, i + 48)
        for i in range(full, bulk, 16):
            a += load(x, i)
        if bulk < c:
            b += load_first(x, bulk, c - bulk)
        mean = sum_lanes(widen(a) + widen(b) + widen(d) + widen(e)) / c
        m = splat(mean)
        a = b = d = e = splat(0.0)
        for i in range(0, full, 64):
            v = load(x, i) - m
            a += v * v
            v = load(x, i + 16) - m
            b += v * v
            v = load(x, i + 32) - m
            d += v * v
            v = load(x, i + 48) - m
            e += v * v
        for i in range(full, bulk, 16):
            v = load(x, i) - m
            a += v * v
        square = sum_lanes(widen(a) + widen(b) + widen(d) + widen(e))
        for i in range(bulk, c):
            square += (f32p(x)[i] - mean) ** 2
        rstd = 1.0 / np.sqrt(square / c + epsilon)
        s = splat(rstd)
        for i in range(0, bulk, 16):
            store(y, i, (load(x, i) - m) * s * load(gamma, i) + load(beta, i))
        if bulk < c:
            n = c - bulk
            v = (load_first(x, bulk, n) - m) * s * load_first(gamma, bulk, n)
            store_first(y, bulk, v + load_first(beta, bulk, n), n)
        f32p(w[10] + row_offset(w, 16, 16 + 3 * rank, rank, row))[0] = mean
        f32p(w[11] + row_offset(w, 16, 16 + 4 * rank, rank, row))[0] = rstd
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    # An item is a part of the rows: each has its own partial sums of dgamma and dbeta.
    w = words(block)
    c, rank, gamma = w[0], w[1], w[3]
    bulk = c & -16
    tail = c - bulk
    wide = (c + 15) & -16
    for part in range(begin, end):
        dgamma = w[5] + part * wide * 16
        dbeta = dgamma + wide * 8
        for i in range(2 * wide):
            f64p(dgamma)[i] = 0.0
        for row in range(part * w[7] // w[6], (part + 1) * w[7] // w[6]):
            dy = w[8] + row_offset(w, 16, 16 + rank, rank, row)
            x = w[9] + row_offset(w, 16, 16 + 2 * rank, rank, row)
            mean = f32p(w[10] + row_offset(w, 16, 16 + 3 * rank, rank, row))[0]
            rstd = f32p(w[11] + row_offset(w, 16, 16 + 4 * rank, rank, row))[0]
            dx = w[12] + row_offset(w, 16, 16 + 5 * rank, rank, row)
            m, s = splat(mean), splat(rstd)
            first, second = splat(0.0), splat(0.0)
            for i in range(0, bulk, 16):
                g = load(dy, i)
                h = (load(x, i) - m) * s
                store(dbeta, i, load_doubles(dbeta, i) + widen(g))
                store(dgamma, i, load_doubles(dgamma, i) + widen(g * h))
                g = g * load(gamma, i)
                first += g
                second += g * h
            if tail > 0:
                g = load_first(dy, bulk, tail)
                h = (load_first(x, bulk, tail) - m) * s
                store(dbeta, bulk, load_doubles(dbeta, bulk) + widen(g))
                store(dgamma, bulk, load_doubles(dgamma, bulk) + widen(g * h))
                g = g * load_first(gamma, bulk, tail)
                first += g
                second += g * h
            p = splat(sum_lanes(widen(first)) / c)
            q = splat(sum_lanes(widen(second)) / c)
            for i in range(0, bulk, 16):
                h = (load(x, i) - m) * s
                store(dx, i, (load(dy, i) * load(gamma, i) - p - h * q) * s)
            if tail > 0:
                h = (load_first(x, bulk, tail) - m) * s
                g = load_first(dy, bulk, tail) * load_first(gamma, bulk, tail)
                store_first(dx, bulk, (g - p - h * q) * s, tail)
    return 0


@native()
def _join(block: Any) -> int:
    """Fold the parts of the vectors' gradients, in order."""
    w = words(block)
    c, vectors, parts = w[0], w[4], w[6]
    wide = (c + 15) & -16
    sums = f64p(w[5])
    for vector in range(vectors):
        for i in range(c):
            total = 0.0
            for part in range(parts):
                total += sums[(part * vectors + vector) * wide + i]
            f32p(w[13 + vector])[i] = total
    return 0


def contiguous_rows(*arrays: Array) -> bool:
    """Whether each array is float32 with contiguous rows of its last dim."""
    return is_float32(*arrays) and all(a.shape[-1] == 1 or a.strides[-1] == 4 for a in arrays)


def forward(call: Call, body: Native, statistics: tuple[Array, ...]) -> Entry | None:
    """Return the entry of a kernel of rows of x, or None where it does not serve them."""
    (x, *vectors), y = call.inputs, call.outputs[0]
    if x.ndim == 0 or not contiguous_rows(x, y, *vectors) or not is_float32(*statistics):
        return None
    if x.size == 0:
        return noop() if statistics[0].size == 0 else None
    c = x.shape[-1]
    made = walk(statistics[0].shape, [x[..., 0], y[..., 0], *statistics])
    head = (c, len(made.extents), float(call.attributes["epsilon"]), *vectors)
    places = (x, y, *statistics)
    block = pack(
        (*head, *(0,) * (8 - len(head))),
        (*places, *(0,) * (8 - len(places))),
        (made.extents, made.strides),
    )
    return parallel_for(body, block, x.size // c, useful_threads(call.threads, 2 * x.nbytes))


def backward(call: Call, body: Native) -> Entry | None:
    """Return the entry of dx and the vectors' gradients, from dy, x, gamma and statistics."""
    dy, x, gamma, *statistics = call.inputs
    dx, *made = call.outputs
    if x.ndim == 0 or x.size == 0 or not is_float32(*statistics):
        return None
    if not contiguous_rows(dy, x, dx, gamma, *made):
        return None
    c = x.shape[-1]
    rows = x.size // c
    arrays = [dy[..., 0], x[..., 0], *statistics, dx[..., 0]]
    ways = walk(statistics[0].shape, arrays)
    threads = min(rows, useful_threads(call.threads, 3 * x.nbytes))
    sums = aligned_array((threads * len(made) * ((c + 15) // 16 * 16),), np.float64, zero=True)
    places = (dy, x, *statistics, dx)
    block: Block = pack(
        (c, len(ways.extents), 0, gamma, len(made), sums, threads, rows),
        (*places, *(0,) * (5 - len(places)), *made, *(0,) * (3 - len(made))),
        (ways.extents, ways.strides),
    )
    entry = parallel_for(body, block, threads, threads)
    return sequence([entry, Entry(_join.address, block)])


@variant("layer_norm", "numba")
@over_last_axis("xcc", "xss")
def layer_norm(call: Call) -> Entry | None:
    """y, mean, rstd of rows normalized over the last dim."""
    return forward(call, _forward, call.outputs[1:])


@variant("layer_norm_grad", "numba")
@over_last_axis("xxcss", "xcc")
def layer_norm_grad(call: Call) -> Entry | None:
    """dx, dgamma, dbeta from dy, x, gamma, mean, rstd."""
    return backward(call, _backward)
