"""Attention of one head at a time, forward and backward: products by a library, rows by Numba.

Each part of the work copies a head's operands into dense buffers of its own, on which
products are fastest, and its scores stay in the cache between the products that make and read them.

A product's record is its entry: function and block. A part's record: how many products it has, then
the buffers 1 scores, 2 their gradients (forward: the sum of each row), 3 gradients of
keys and 4 of values, 5 queries, 6 keys, 7 values, 8 gradients of y (forward: y), 9 gradients of
queries; then its products.

A block: 0 free, 1 parts, 2 items, 3 heads, 4 queries at a time, 5 how often, 6 tq, 7 tk, 8 d,
9 dv, 10 scale, 11 how many keys after its own place a query sees; then the operands, four words
each (address, bytes a sample, position and head): q, k, v, y and, backward, dy, dq, dk, dv; then
mask (address or 0, bytes a sample, head, query and key), lse (address, bytes a sample, head and
query), for each block of queries its first product and how many keys it sees, and the parts'
records.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import (
    add_floats,
    copy_floats,
    fill_floats,
    get,
    loop,
    put,
)
from soapstone.kernels.cpu.substrate.mathematics import exp, vexp
from soapstone.kernels.cpu.substrate.rowmath import (
    load_wide,
    logarithm,
    row_dot,
    row_max,
    scale_row,
    splat_wide,
    store_wide,
)
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import as_float, call_entry, f32p, words
from soapstone.native.lanes import Lanes
from soapstone.native.simd import (
    load_first,
    load_first_low,
    max_lanes,
    splat,
    store_first,
    sum_lanes,
    vectorised,
    vmax,
)

RECORD = 2  # words of a product
PART = 10  # words of a part before its products
PLACES = 12  # words of a block before its operands
LEAST = -3.4e38  # stands for the maximum of a row of which every score is minus infinity


@helper
def _at(w: Any, operand: int, b: int, t: int, h: int) -> Any:
    i = PLACES + 4 * operand
    return w[i] + b * w[i + 1] + t * w[i + 2] + h * w[i + 3]


@helper
def _product(w: Any, part: Any, which: int) -> Any:
    """Run a part's product on its buffers."""
    at = PART + RECORD * which
    return call_entry(part[at], part[at + 1])


@helper
def _collect(to: int, w: Any, operand: int, b: int, first: int, h: int, count: int, n: int) -> None:
    """Copy `count` positions of a head of an operand into a dense buffer."""
    for t in range(count):
        copy_floats(to + t * n * 4, _at(w, operand, b, first + t, h), n)


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
def _part(w: Any, at: int, begin: int) -> Any:
    """The record of the part whose first item is `begin`."""
    part = 0
    while part + 1 < w[1] and (part * w[2]) // w[1] != begin:
        part += 1
    return words(w[at + part])


@helper
def _visible(w: Any, keys: int, query: int) -> Any:
    """How many of a block's keys a query sees."""
    return max(0, min(keys, query + 1 + w[11]))


@native("body")
def forward(block: Any, begin: int, end: int) -> Any:
    """Attention of the items (sample, head, block of queries)."""
    w = words(block)
    rows, blocks, tq, d, dv = w[4], w[5], w[6], w[8], w[9]
    scale = np.float32(as_float(w[10]))
    mask_at, lse_at, table = PLACES + 16, PLACES + 21, PLACES + 25
    part = _part(w, table + 2 * blocks, begin)
    for item in range(begin, end):
        b, h, number = item // blocks // w[3], item // blocks % w[3], item % blocks
        first = number * rows
        count = min(rows, tq - first)
        which, tk = w[table + 2 * number], w[table + 2 * number + 1]
        _collect(part[5], w, 0, b, first, h, count, d)
        _collect(part[6], w, 1, b, 0, h, tk, d)
        _collect(part[7], w, 2, b, 0, h, tk, dv)
        status = _product(w, part, which)
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
            f32p(part[2])[i] = total
            fill_floats(row + n * 4, np.float32(0.0), tk - n)
            at = w[lse_at] + b * w[lse_at + 1] + h * w[lse_at + 2] + query * w[lse_at + 3]
            f32p(at)[0] = top + logarithm(total)
        status = _product(w, part, which + 1)
        if status != 0:
            return status
        for i in range(count):
            total = f32p(part[2])[i]
            factor = np.float32(0.0) if total == 0.0 else np.float32(1.0) / total
            scale_row(_at(w, 3, b, first + i, h), part[8] + i * dv * 4, dv, factor)
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


@helper
def _share(
    w: Any, operand: int, b: int, h: int, share: int, keys: int, n: int, fresh: bool
) -> None:
    """Add one block's share (keys, n) to the gradient of keys or values."""
    for t in range(w[7]):
        to = _at(w, operand, b, t, h)
        if t >= keys:
            if fresh:
                fill_floats(to, np.float32(0.0), n)
        elif fresh:
            copy_floats(to, share + t * n * 4, n)
        else:
            add_floats(to, share + t * n * 4, n)


@native("body")
def backward(block: Any, begin: int, end: int) -> Any:
    """The gradients of attention of the items (sample, head)."""
    w = words(block)
    rows, blocks, tq, d, dv = w[4], w[5], w[6], w[8], w[9]
    scale = np.float32(as_float(w[10]))
    mask_at, lse_at, table = PLACES + 32, PLACES + 37, PLACES + 41
    part = _part(w, table + 2 * blocks, begin)
    for item in range(begin, end):
        b, h = item // w[3], item % w[3]
        seen = w[table + 2 * blocks - 1]  # by the last block, the most
        _collect(part[6], w, 1, b, 0, h, seen, d)
        _collect(part[7], w, 2, b, 0, h, seen, dv)
        for number in range(blocks):
            first = number * rows
            count = min(rows, tq - first)
            which, tk = w[table + 2 * number], w[table + 2 * number + 1]
            _collect(part[5], w, 0, b, first, h, count, d)
            _collect(part[8], w, 4, b, first, h, count, dv)
            status = _product(w, part, which)
            status |= _product(w, part, which + 1)
            if status != 0:
                return status
            for i in range(count):
                query = first + i
                row, to = part[1] + i * tk * 4, part[2] + i * tk * 4
                n = _visible(w, tk, query)
                mask = np.int64(0)
                if w[mask_at] != 0:
                    offset = b * w[mask_at + 1] + h * w[mask_at + 2] + query * w[mask_at + 3]
                    mask = w[mask_at] + offset
                at = w[lse_at] + b * w[lse_at + 1] + h * w[lse_at + 2] + query * w[lse_at + 3]
                shift = _floor(f32p(at)[0])
                mean = row_dot(part[8] + i * dv * 4, _at(w, 3, b, query, h), dv)
                if mask != 0 and w[mask_at + 4] != 0:
                    _score_grad(row, to, mask, scale, shift, mean, n)
                else:
                    if mask != 0:
                        shift -= f32p(mask)[0]
                    _plain_score_grad(row, to, scale, shift, mean, n)
                fill_floats(row + n * 4, np.float32(0.0), tk - n)
                fill_floats(to + n * 4, np.float32(0.0), tk - n)
            for k in range(2, 5):
                status |= _product(w, part, which + k)
            if status != 0:
                return status
            for i in range(count):
                copy_floats(_at(w, 5, b, first + i, h), part[9] + i * d * 4, d)
            _share(w, 6, b, h, part[3], tk, d, number == 0)
            _share(w, 7, b, h, part[4], tk, dv, number == 0)
    return 0
