"""Layer normalization and its gradient: rows of c contiguous floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import float_rows, is_float32
from soapstone.kernels.cpu.substrate.rows import over_last_axis
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, native, noop, sequence
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.memory import aligned_array
from soapstone.native.moves import row_at
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
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import walk

# Each is followed by the walk of the rows, of `rank` dims, in what has rows, in the order in which
# they are named. mean and beta, with their gradients: 0 where there are none.
FORWARD = Fields("channels rank gamma beta x y mean rstd", reals="epsilon")
# vectors: gradients of which a part has sums of its own, dgamma and perhaps dbeta
BACKWARD = Fields("channels rank rows parts gamma sums vectors dy x mean rstd dx dgamma dbeta")
_forward_of, _forward_table = FORWARD.at, FORWARD.table
_backward_of, _backward_table = BACKWARD.at, BACKWARD.table


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w, table = _forward_of(block), _forward_table(block)
    c, rank, epsilon, gamma, beta = w.channels, w.rank, w.epsilon, w.gamma, w.beta
    full = c & -64
    bulk = c & -16
    for row in range(begin, end):
        x = w.x + row_at(table, rank, 0, row)
        y = w.y + row_at(table, rank, 1, row)
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
        f32p(w.mean + row_at(table, rank, 2, row))[0] = mean
        f32p(w.rstd + row_at(table, rank, 3, row))[0] = rstd
    return 0


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    # An item is a part of the rows: each has its own partial sums of dgamma and dbeta.
    w, table = _backward_of(block), _backward_table(block)
    c, rank, gamma = w.channels, w.rank, w.gamma
    bulk = c & -16
    tail = c - bulk
    wide = (c + 15) & -16
    for part in range(begin, end):
        dgamma = w.sums + part * wide * 16
        dbeta = dgamma + wide * 8
        for i in range(2 * wide):
            f64p(dgamma)[i] = 0.0
        for row in range(part * w.rows // w.parts, (part + 1) * w.rows // w.parts):
            dy = w.dy + row_at(table, rank, 0, row)
            x = w.x + row_at(table, rank, 1, row)
            mean = f32p(w.mean + row_at(table, rank, 2, row))[0]
            rstd = f32p(w.rstd + row_at(table, rank, 3, row))[0]
            dx = w.dx + row_at(table, rank, 4, row)
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
    w = _backward_of(block)
    c, vectors, parts = w.channels, w.vectors, w.parts
    wide = (c + 15) & -16
    sums = f64p(w.sums)
    for vector in range(vectors):
        for i in range(c):
            total = 0.0
            for part in range(parts):
                total += sums[(part * vectors + vector) * wide + i]
            f32p(w.dgamma if vector == 0 else w.dbeta)[i] = total
    return 0


def forward(call: Call, body: Native, statistics: tuple[Array, ...]) -> Entry | None:
    """Return the entry of a kernel of rows of x, or None where it does not serve them."""
    (x, *vectors), y = call.inputs, call.outputs[0]
    if x.ndim == 0 or not float_rows(x, y, *vectors) or not is_float32(*statistics):
        return None
    if x.size == 0:
        return noop() if statistics[0].size == 0 else None
    c = x.shape[-1]
    made = walk(statistics[0].shape, [x[..., 0], y[..., 0], *statistics])
    block = FORWARD.pack(
        *made,
        channels=c,
        rank=made.rank,
        epsilon=call.attributes["epsilon"],
        gamma=vectors[0],
        beta=vectors[1] if len(vectors) > 1 else 0,
        x=x,
        y=y,
        mean=statistics[0] if len(statistics) > 1 else 0,
        rstd=statistics[-1],
    )
    return parallel_for(body, block, x.size // c, useful_threads(call.threads, 2 * x.nbytes))


def backward(call: Call, body: Native) -> Entry | None:
    """Return the entry of dx and the vectors' gradients, from dy, x, gamma and statistics."""
    dy, x, gamma, *statistics = call.inputs
    dx, *made = call.outputs
    if x.ndim == 0 or x.size == 0 or not is_float32(*statistics):
        return None
    if not float_rows(dy, x, dx, gamma, *made):
        return None
    c = x.shape[-1]
    rows = x.size // c
    arrays = [dy[..., 0], x[..., 0], *statistics, dx[..., 0]]
    ways = walk(statistics[0].shape, arrays)
    threads = min(rows, useful_threads(call.threads, 3 * x.nbytes))
    sums = aligned_array((threads * len(made) * ((c + 15) // 16 * 16),), np.float64, zero=True)
    block = BACKWARD.pack(
        *ways,
        channels=c,
        rank=ways.rank,
        rows=rows,
        parts=threads,
        gamma=gamma,
        sums=sums,
        vectors=len(made),
        dy=dy,
        x=x,
        mean=statistics[0] if len(statistics) > 1 else 0,
        rstd=statistics[-1],
        dx=dx,
        dgamma=made[0],
        dbeta=made[1] if len(made) > 1 else 0,
    )
    entry = parallel_for(body, block, threads, threads)
    return sequence([entry, Entry(_join.address, block)])


@variant("layer_norm", "numba", promises=True)
@over_last_axis("xcc", "xss")
def layer_norm(call: Call) -> Entry | None:
    """y, mean, rstd of rows normalized over the last dim."""
    return forward(call, _forward, call.outputs[1:])


@variant("layer_norm_grad", "numba")
@over_last_axis("xxcss", "xcc")
def layer_norm_grad(call: Call) -> Entry | None:
    """dx, dgamma, dbeta from dy, x, gamma, mean, rstd."""
    return backward(call, _backward)
