"""Optimiser steps (sgd, adam): one pass over the parameter, its gradient and its states.

Outputs may be the inputs themselves. When `ok` is false everything is copied unchanged.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native, noop, parallel_for, useful_threads
from soapstone.native.intrinsics import as_float, f32p, i32p, i64p, u8p, words
from soapstone.native.memory import pack
from soapstone.native.moves import row_offset
from soapstone.native.simd import Lanes, load, load_first, splat, store, store_first, vectorised
from soapstone.native.walks import walk

CHUNK = 4096  # floats of a row that one item covers

# Words of the blocks: 0 rank of the rows' walk, 1 floats in a row, 2 chunks in a row, 3 ok,
# 4 learning rate, 5 step, 6 whether the step is int32, 8.. parameters, 16.. addresses; then from 24
# the extents and one table of strides an array.
_TABLE = 24


@vectorised
def _root(x: Lanes) -> Lanes:
    return x.call("llvm.sqrt")


@native("body")
def _sgd(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rank, length, chunks = w[0], w[1], w[2]
    ok = u8p(w[3])[0] != 0
    rate = splat(np.float64(f32p(w[4])[0]))
    momentum, decay = splat(as_float(w[8])), splat(as_float(w[9]))
    nesterov, has_state = w[10] != 0, w[11] != 0
    for item in range(begin, end):
        row, first = item // chunks, (item % chunks) * CHUNK
        n = min(length - first, CHUNK)
        p = w[16] + row_offset(w, _TABLE, _TABLE + rank, rank, row) + first * 4
        g = w[17] + row_offset(w, _TABLE, _TABLE + 2 * rank, rank, row) + first * 4
        v = w[18] + row_offset(w, _TABLE, _TABLE + 3 * rank, rank, row) + first * 4
        to_p = w[19] + row_offset(w, _TABLE, _TABLE + 4 * rank, rank, row) + first * 4
        to_v = w[20] + row_offset(w, _TABLE, _TABLE + 5 * rank, rank, row) + first * 4
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
    w = words(block)
    rank, length, chunks = w[0], w[1], w[2]
    ok = u8p(w[3])[0] != 0
    rate = np.float64(f32p(w[4])[0])
    step = max(np.int64(i32p(w[5])[0]) if w[6] != 0 else i64p(w[5])[0], 1)
    beta1, beta2, decay = as_float(w[8]), as_float(w[9]), as_float(w[11])
    epsilon = splat(as_float(w[10]))
    b1, c1, b2, c2 = splat(beta1), splat(1 - beta1), splat(beta2), splat(1 - beta2)
    scale = splat(rate / (1 - beta1**step))
    correction = splat(1 / (1 - beta2**step))
    penalty = splat(0.0 if w[12] != 0 else decay)
    shrink = splat(1 - rate * decay if w[12] != 0 else 1.0)
    for item in range(begin, end):
        row, first = item // chunks, (item % chunks) * CHUNK
        n = min(length - first, CHUNK)
        p = w[16] + row_offset(w, _TABLE, _TABLE + rank, rank, row) + first * 4
        g = w[17] + row_offset(w, _TABLE, _TABLE + 2 * rank, rank, row) + first * 4
        m = w[18] + row_offset(w, _TABLE, _TABLE + 3 * rank, rank, row) + first * 4
        v = w[19] + row_offset(w, _TABLE, _TABLE + 4 * rank, rank, row) + first * 4
        to_p = w[20] + row_offset(w, _TABLE, _TABLE + 5 * rank, rank, row) + first * 4
        to_m = w[21] + row_offset(w, _TABLE, _TABLE + 6 * rank, rank, row) + first * 4
        to_v = w[22] + row_offset(w, _TABLE, _TABLE + 7 * rank, rank, row) + first * 4
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
    body: Any,
    arrays: list[Array],
    scalars: tuple[Any, ...],
    parameters: tuple[Any, ...],
    threads: int,
) -> Entry | None:
    """Return the entry over arrays of one shape, or None unless they share contiguous rows."""
    if not is_float32(*arrays):
        return None
    shape = arrays[0].shape
    if arrays[0].size == 0:
        return noop()
    extents, strides = walk(shape, arrays)
    if extents[-1] > 1 and any(table[-1] != 4 for table in strides):
        return None
    length = extents[-1]
    outer = extents[:-1] or (1,)
    tables = [table[:-1] or (0,) for table in strides]
    chunks = -(-length // CHUNK)
    block = pack(
        (len(outer), length, chunks, *scalars),
        (0,) * (8 - 3 - len(scalars)),
        (*parameters, *(0,) * (8 - len(parameters))),
        (*arrays, *(0,) * (8 - len(arrays))),
        (outer, *tables),
    )
    items = math.prod(outer) * chunks
    nbytes = sum(array.nbytes for array in arrays)
    return parallel_for(body, block, items, useful_threads(threads, nbytes))


@variant("sgd", "numba")
def sgd(call: Call) -> Entry | None:
    """Return the entry of the step of stochastic gradient descent."""
    w, g, *velocity, rate, ok = call.inputs
    if not is_float32(rate) or ok.dtype != np.bool_:
        return None
    state = velocity or [w]
    arrays = [w, g, *state, call.outputs[0], *(call.outputs[1:] or call.outputs)]
    a = call.attributes
    parameters = (float(a["momentum"]), float(a["weight_decay"]), a["nesterov"], len(velocity))
    return _entry(_sgd, arrays, (ok, rate), parameters, call.threads)


@variant("adam", "numba")
def adam(call: Call) -> Entry | None:
    """Return the entry of the step of Adam or AdamW."""
    w, g, m, v, rate, step, ok = call.inputs
    if not is_float32(rate) or ok.dtype != np.bool_ or step.dtype.name not in ("int32", "int64"):
        return None
    a = call.attributes
    parameters = (
        *(float(a[name]) for name in ("beta1", "beta2", "epsilon", "weight_decay")),
        bool(a["decoupled"]),
    )
    scalars = (ok, rate, step, step.dtype == np.int32)
    return _entry(_adam, [w, g, m, v, *call.outputs], scalars, parameters, call.threads)
