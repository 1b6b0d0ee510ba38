"""Attention of one head at a time, forward and backward: products by oneDNN, rows by Numba.

A part of the work owns its scores, stream and memory objects, whose addresses it sets anew for each
head. A head's scores stay in the cache between the products that make and read them.

A product's record has six words: primitive, number of arguments, their address, and the memory
objects of its three operands. A part's record: stream, scores, their gradients, one block's share
of the gradients of keys (forward: the sum of each row) and of values, then its products.

A block: 0 execute, 1 set handle, 2 parts, 3 items, 4 heads, 5 queries at a time, 6 how often, 7 tq,
8 tk, 9 d, 10 dv, 11 scale, 12 how many keys after its own place a query sees; then the operands,
four words each (address, bytes a sample, position and head): q, k, v, y and, backward, dy, dq, dk,
dv; then mask (address or 0, bytes a sample, head, query and key), lse (address, bytes a sample,
head and query), for each block of queries its first product and how many keys it sees, and the
parts' records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from soapstone.kernels.cpu.lanes import Lanes
from soapstone.kernels.cpu.mathematics import exp, vexp
from soapstone.kernels.cpu.native import (
    as_float,
    f32p,
    fixed_arity,
    helper,
    native,
    routine,
    words,
)
from soapstone.kernels.cpu.opcodes import copy_floats, fill_floats, get, loop, put
from soapstone.kernels.cpu.rowmath import (
    load_wide,
    logarithm,
    row_dot,
    row_max,
    scale_row,
    splat_wide,
    store_wide,
)
from soapstone.kernels.cpu.simd import (
    load_first,
    load_first_low,
    max_lanes,
    splat,
    store_first,
    sum_lanes,
    vectorised,
    vmax,
)

RECORD = 6  # words of a product
PART = 5  # words of a part before its products
PLACES = 13  # words of a block before its operands
LEAST = -3.4e38  # stands for the maximum of a row of which every score is minus infinity


def _foreign(count: int) -> Any:
    """An intrinsic that calls a C function of `count` words at an address, and gives its status."""

    def typer(typing: Any, *given: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * count)
            return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

        return types.int32(*([types.int64] * (count + 1))), emit

    return fixed_arity(typer, count + 1)


# Integers and pointers go in the same registers; a C int is the low half of its register.
_call_two: Any = _foreign(2)
_call_four: Any = _foreign(4)


@helper
def _product(w: Any, part: Any, which: int, a: int, b: int, y: int) -> Any:
    """Run a part's product on three addresses."""
    at = PART + RECORD * which
    status = _call_two(w[1], part[at + 3], a)
    status |= _call_two(w[1], part[at + 4], b)
    status |= _call_two(w[1], part[at + 5], y)
    if status != 0:
        return status
    return _call_four(w[0], part[at], part[0], part[at + 1], part[at + 2])


@routine
def _scaled(row: int, mask: Any, step: int, scale: Any, n: int) -> Any:
    """Scale a row of scores, add the mask, and give the largest; mask 0: none, step 0: a number."""
    full = n & -64
    low, rest = splat_wide(-float("inf")), splat(-float("inf"))
    shift = np.float32(0.0)
    if mask != 0 and step == 0:
        shift = f32p(mask)[0]
    if mask != 0 and step != 0:
        for i in range(0, full, 64):
            wide = load_wide(row, i) * scale + load_wide(mask, i)
            store_wide(row, i, wide)
            low = vmax(low, wide)
        for i in range(full, n, 16):
            value = load_first_low(row, i, n - i) * scale + load_first(mask, i, n - i)
            store_first(row, i, value, n - i)
            rest = vmax(rest, load_first_low(row, i, n - i))
    else:
        for i in range(0, full, 64):
            wide = load_wide(row, i) * scale + shift
            store_wide(row, i, wide)
            low = vmax(low, wide)
        for i in range(full, n, 16):
            store_first(row, i, load_first(row, i, n - i) * scale + shift, n - i)
            rest = vmax(rest, load_first_low(row, i, n - i))
    top = max_lanes(rest)
    if full > 0:
        top = max_lanes(vmax(splat(max_lanes(low)), rest))
    return top


@routine
def _powers(row: int, scale: Any, top: Any, n: int) -> Any:
    """Replace a row by exp(row * scale - top), and give its sum."""
    full = n & -64
    total, rest = splat_wide(0.0), splat(0.0)
    for i in range(0, full, 64):
        wide = vexp(load_wide(row, i) * scale - top)
        store_wide(row, i, wide)
        total = total + wide
    for i in range(full, n, 16):
        value = vexp(load_first_low(row, i, n - i) * scale - top)
        store_first(row, i, value, n - i)
        rest = rest + value
    return sum_lanes(total) + sum_lanes(rest)


@helper
def _floor(top: float) -> Any:
    """The largest of a row, or `LEAST` where every score is minus infinity."""
    return np.float32(LEAST) if top < LEAST else np.float32(top)


@helper
def _at(w: Any, operand: int, b: int, t: int, h: int) -> Any:
    i = PLACES + 4 * operand
    return w[i] + b * w[i + 1] + t * w[i + 2] + h * w[i + 3]


@helper
def _part(w: Any, at: int, begin: int) -> Any:
    """The record of the part whose first item is `begin`."""
    part = 0
    while part + 1 < w[2] and (part * w[3]) // w[2] != begin:
        part += 1
    return words(w[at + part])


@helper
def _visible(w: Any, keys: int, query: int) -> Any:
    """How many of a block's keys a query sees."""
    return max(0, min(keys, query + 1 + w[12]))


@native("body")
def forward(block: Any, begin: int, end: int) -> Any:
    """Attention of the items (sample, head, rows of queries)."""
    w = words(block)
    rows, blocks, tq = w[5], w[6], w[7]
    scale = np.float32(as_float(w[11]))
    mask_at, lse_at, table = PLACES + 16, PLACES + 21, PLACES + 25
    part = _part(w, table + 2 * blocks, begin)
    for item in range(begin, end):
        b, h = item // blocks // w[4], item // blocks % w[4]
        number = item % blocks
        first = number * rows
        count = min(rows, tq - first)
        which, tk = w[table + 2 * number], w[table + 2 * number + 1]
        status = _product(w, part, which, _at(w, 0, b, first, h), _at(w, 1, b, 0, h), part[1])
        if status != 0:
            return status
        for i in range(count):
            query = first + i
            row = part[1] + i * tk * 4
            n = _visible(w, tk, query)
            mask = np.int64(0)
            if w[mask_at] != 0:
                offset = b * w[mask_at + 1] + h * w[mask_at + 2] + query * w[mask_at + 3]
                mask = w[mask_at] + offset
            total = np.float32(0.0)
            if mask == 0 and scale > 0.0:
                top = _floor(row_max(row, n) * scale)
                total = _powers(row, scale, top, n)
            else:
                top = _floor(_scaled(row, mask, w[mask_at + 4], scale, n))
                total = _powers(row, np.float32(1.0), top, n)
            f32p(part[3])[i] = total
            fill_floats(row + n * 4, np.float32(0.0), tk - n)
            at = w[lse_at] + b * w[lse_at + 1] + h * w[lse_at + 2] + query * w[lse_at + 3]
            f32p(at)[0] = top + logarithm(total)
        status = _product(w, part, which + 1, part[1], _at(w, 2, b, 0, h), _at(w, 3, b, first, h))
        if status != 0:
            return status
        for i in range(count):
            total = f32p(part[3])[i]
            if total != 0.0:
                y = _at(w, 3, b, first + i, h)
                scale_row(y, y, w[10], 1.0 / total)
    return 0


@vectorised
def _score_grad(
    row: Lanes, to: Lanes, mask: Lanes, scale: Lanes, shift: Lanes, mean: Lanes, n: Lanes
) -> None:
    """row = exp(row * scale + mask - shift), the weights; to = row * (to - mean) * scale."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        score = get(row, i, width, some) * scale - shift
        weight = exp(score + get(mask, i, width, some))
        put(row, i, weight, some)
        put(to, i, weight * (get(to, i, width, some) - mean) * scale, some)

    loop(n.builder, n, body)


@vectorised
def _plain_score_grad(
    row: Lanes, to: Lanes, scale: Lanes, shift: Lanes, mean: Lanes, n: Lanes
) -> None:
    """As `_score_grad`, without a mask."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        weight = exp(get(row, i, width, some) * scale - shift)
        put(row, i, weight, some)
        put(to, i, weight * (get(to, i, width, some) - mean) * scale, some)

    loop(n.builder, n, body)


@vectorised
def _add(to: Lanes, x: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(to, i, width, mask) + get(x, i, width, mask), mask)

    loop(n.builder, n, body)


@helper
def _gather(
    w: Any, operand: int, b: int, h: int, share: int, keys: int, n: int, fresh: bool
) -> None:
    """Add one block's share (keys, n) to the gradient of keys or values."""
    for t in range(w[8]):
        to = _at(w, operand, b, t, h)
        if t >= keys:
            if fresh:
                fill_floats(to, np.float32(0.0), n)
        elif fresh:
            copy_floats(to, share + t * n * 4, n)
        else:
            _add(to, share + t * n * 4, n)


@native("body")
def backward(block: Any, begin: int, end: int) -> Any:
    """The gradients of attention of the items (sample, head)."""
    w = words(block)
    rows, blocks, tq = w[5], w[6], w[7]
    scale = np.float32(as_float(w[11]))
    mask_at, lse_at, table = PLACES + 32, PLACES + 37, PLACES + 41
    part = _part(w, table + 2 * blocks, begin)
    direct = blocks == 1 and w[table + 1] == w[8]
    scores, dscores = part[1], part[2]
    for item in range(begin, end):
        b, h = item // w[4], item % w[4]
        for number in range(blocks):
            first = number * rows
            count = min(rows, tq - first)
            which, tk = w[table + 2 * number], w[table + 2 * number + 1]
            q, dy = _at(w, 0, b, first, h), _at(w, 4, b, first, h)
            status = _product(w, part, which, q, _at(w, 1, b, 0, h), scores)
            status |= _product(w, part, which + 1, dy, _at(w, 2, b, 0, h), dscores)
            if status != 0:
                return status
            for i in range(count):
                query = first + i
                row, to = scores + i * tk * 4, dscores + i * tk * 4
                n = _visible(w, tk, query)
                mask = np.int64(0)
                if w[mask_at] != 0:
                    offset = b * w[mask_at + 1] + h * w[mask_at + 2] + query * w[mask_at + 3]
                    mask = w[mask_at] + offset
                at = w[lse_at] + b * w[lse_at + 1] + h * w[lse_at + 2] + query * w[lse_at + 3]
                shift = _floor(f32p(at)[0])
                mean = row_dot(_at(w, 4, b, query, h), _at(w, 3, b, query, h), w[10])
                if mask != 0 and w[mask_at + 4] != 0:
                    _score_grad(row, to, mask, scale, shift, mean, n)
                else:
                    if mask != 0:
                        shift -= f32p(mask)[0]
                    _plain_score_grad(row, to, scale, shift, mean, n)
                fill_floats(row + n * 4, np.float32(0.0), tk - n)
                fill_floats(to + n * 4, np.float32(0.0), tk - n)
            dk, dv = _at(w, 6, b, 0, h), _at(w, 7, b, 0, h)
            if not direct:
                dk, dv = part[3], part[4]
            status = _product(
                w, part, which + 2, dscores, _at(w, 1, b, 0, h), _at(w, 5, b, first, h)
            )
            status |= _product(w, part, which + 3, dscores, q, dk)
            status |= _product(w, part, which + 4, scores, dy, dv)
            if status != 0:
                return status
            if not direct:
                _gather(w, 6, b, h, dk, tk, w[9], number == 0)
                _gather(w, 7, b, h, dv, tk, w[10], number == 0)
    return 0
