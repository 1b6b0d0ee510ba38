"""Optimiser steps (sgd, adam): one pass over the parameter, its gradient and its states.

Outputs may be the inputs themselves. When `ok` is false everything is copied unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, native, noop
from soapstone.native.intrinsics import f32p, u8p
from soapstone.native.lanes import Lanes
from soapstone.native.moves import row_at
from soapstone.native.simd import load, load_first, splat, store, store_first, vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import walk

CHUNK = 4096  # floats of a row that one item covers

# p: the parameter, g its gradient; to_p and so on: the results. Then the walk of the rows, of
# `rank` dims, in the arrays, in the order in which they are named.
_COMMON = "rank length chunks ok rate"
_SGD = Fields(f"{_COMMON} nesterov has_state p g v to_p to_v", reals="momentum decay")
_ADAM = Fields(
    f"{_COMMON} step wide decoupled p g m v to_p to_m to_v", reals="beta1 beta2 epsilon decay"
)
_sgd_of, _sgd_table, _adam_of, _adam_table = _SGD.at, _SGD.table, _ADAM.at, _ADAM.table


@vectorised
def _root(x: Lanes) -> Lanes:
    return x.call("llvm.sqrt")


@native("body")
def _sgd(block: Any, begin: int, end: int) -> int:
    w, table = _sgd_of(block), _sgd_table(block)
    rank, length, chunks = w.rank, w.length, w.chunks
    ok = u8p(w.ok)[0] != 0
    rate = splat(np.float64(f32p(w.rate)[0]))
    momentum, decay = splat(w.momentum), splat(w.decay)
    nesterov, has_state = w.nesterov != 0, w.has_state != 0
    for item in range(begin, end):
        row, first = item // chunks, (item % chunks) * CHUNK
        n = min(length - first, CHUNK)
        p = w.p + row_at(table, rank, 0, row) + first * 4
        g = w.g + row_at(table, rank, 1, row) + first * 4
        v = w.v + row_at(table, rank, 2, row) + first * 4
        to_p = w.to_p + row_at(table, rank, 3, row) + first * 4
        to_v = w.to_v + row_at(table, rank, 4, row) + first * 4
        bulk = n & -16
        rest = n - bulk
        if not ok:
            if to_p != p:
                for i in range(n):
                    f32p(to_p)[i] = f32p(p)[i]
            if has_state and to_v != v:
                for i in range(n):
                    f32p(to_v)[i] = f32p(v)[i]
        elif not has_state:
            for i in range(0, bulk, 16):
                x = load(p, i)
                store(to_p, i, x - rate * (load(g, i) + decay * x))
            if rest > 0:
                x = load_first(p, bulk, rest)
                y = x - rate * (load_first(g, bulk, rest) + decay * x)
                store_first(to_p, bulk, y, rest)
        else:
            for i in range(0, bulk, 16):
                x = load(p, i)
                s = load(g, i) + decay * x
                a = momentum * load(v, i) + s
                store(to_v, i, a)
                if nesterov:
                    a = s + momentum * a
                store(to_p, i, x - rate * a)
            if rest > 0:
                x = load_first(p, bulk, rest)
                s = load_first(g, bulk, rest) + decay * x
                a = momentum * load_first(v, bulk, rest) + s
                store_first(to_v, bulk, a, rest)
                if nesterov:
                    a = s + momentum * a
                store_first(to_p, bulk, x - rate * a, rest)
    return 0


@native("body")
def _adam(block: Any, begin: int, end: int) -> int:
    w, table = _adam_of(block), _adam_table(block)
    rank, length, chunks = w.rank, w.length, w.chunks
    ok = u8p(w.ok)[0] != 0
    rate = np.float64(f32p(w.rate)[0])
    step = max(integer_at(w.step, w.wide), 1)
    beta1, beta2, decay = w.beta1, w.beta2, w.decay
    epsilon = splat(w.epsilon)
    b1, c1, b2, c2 = splat(beta1), splat(1 - beta1), splat(beta2), splat(1 - beta2)
    scale = splat(rate / (1 - beta1**step))
    correction = splat(1 / (1 - beta2**step))
    penalty = splat(0.0 if w.decoupled != 0 else decay)
    shrink = splat(1 - rate * decay if w.decoupled != 0 else 1.0)
    for item in range(begin, end):
        row, first = item // chunks, (item % chunks) * CHUNK
        n = min(length - first, CHUNK)
        p = w.p + row_at(table, rank, 0, row) + first * 4
        g = w.g + row_at(table, rank, 1, row) + first * 4
        m = w.m + row_at(table, rank, 2, row) + first * 4
        v = w.v + row_at(table, rank, 3, row) + first * 4
        to_p = w.to_p + row_at(table, rank, 4, row) + first * 4
        to_m = w.to_m + row_at(table, rank, 5, row) + first * 4
        to_v = w.to_v + row_at(table, rank, 6, row) + first * 4
        bulk = n & -16
        rest = n - bulk
        if not ok:
            for i in range(n):
                f32p(to_p)[i] = f32p(p)[i]
                f32p(to_m)[i] = f32p(m)[i]
                f32p(to_v)[i] = f32p(v)[i]
            continue
        for i in range(0, bulk, 16):
            x = load(p, i)
            s = load(g, i) + penalty * x
            a = b1 * load(m, i) + c1 * s
            b = b2 * load(v, i) + c2 * s * s
            store(to_m, i, a)
            store(to_v, i, b)
            store(to_p, i, x * shrink - scale * a / (_root(b * correction) + epsilon))
        if rest > 0:
            x = load_first(p, bulk, rest)
            s = load_first(g, bulk, rest) + penalty * x
            a = b1 * load_first(m, bulk, rest) + c1 * s
            b = b2 * load_first(v, bulk, rest) + c2 * s * s
            y = x * shrink - scale * a / (_root(b * correction) + epsilon)
            store_first(to_m, bulk, a, rest)
            store_first(to_v, bulk, b, rest)
            store_first(to_p, bulk, y, rest)
    return 0


def _entry(
    body: Native, fields: Fields, arrays: dict[str, Array], threads: int, **values: Any
) -> Entry | None:
    """Return the entry over arrays of one shape, or None unless they share contiguous rows."""
    if not is_float32(*arrays.values()):
        return None
    shape = arrays["p"].shape
    if arrays["p"].size == 0:
        return noop()
    walked = walk(shape, [*arrays.values()])
    length, outer = walked.extents[-1], walked.rows
    if length > 1 and any(step != 4 for step in walked.steps):
        return None
    chunks = -(-length // CHUNK)
    block = fields.pack(outer, rank=outer.rank, length=length, chunks=chunks, **arrays, **values)
    items = outer.size * chunks
    nbytes = sum(array.nbytes for array in arrays.values())
    return parallel_for(body, block, items, useful_threads(threads, nbytes))


@variant("sgd", "numba")
def sgd(call: Call) -> Entry | None:
    """Return the entry of the step of stochastic gradient descent."""
    w, g, *velocity, rate, ok = call.inputs
    if not is_float32(rate) or ok.dtype != np.bool_:
        return None
    (v,), to = velocity or [w], call.outputs
    arrays = {"p": w, "g": g, "v": v, "to_p": to[0], "to_v": to[-1]}
    a = call.attributes
    return _entry(
        *(_sgd, _SGD, arrays, call.threads),
        ok=ok,
        rate=rate,
        nesterov=a["nesterov"],
        has_state=len(velocity),
        momentum=a["momentum"],
        decay=a["weight_decay"],
    )


@variant("adam", "numba")
def adam(call: Call) -> Entry | None:
    """Return the entry of the step of Adam or AdamW."""
    w, g, m, v, rate, step, ok = call.inputs
    if not is_float32(rate) or ok.dtype != np.bool_ or not is_integer(step):
        return None
    a = call.attributes
    to = dict(zip(("to_p", "to_m", "to_v"), call.outputs))
    return _entry(
        *(_adam, _ADAM, {"p": w, "g": g, "m": m, "v": v} | to, call.threads),
        ok=ok,
        rate=rate,
        step=step,
        wide=step.dtype == np.int64,
        decoupled=a["decoupled"],
        decay=a["weight_decay"],
        **{name: a[name] for name in ("beta1", "beta2", "epsilon")},
    )
