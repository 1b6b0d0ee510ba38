"""Attention of one head at a time, forward and backward: products by a library, rows by Numba.

Each part of the work copies a head's operands into dense buffers of its own, on which
products are fastest, and its scores stay in the cache between the products that make and read them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.conversions import store_bfloat16
from soapstone.kernels.cpu.elementwise.lane_loops import (
    add_floats,
    copy_floats,
    fill_floats,
    get,
    loop,
    put,
)
from soapstone.kernels.cpu.substrate.mathematics import brief_exp, falling_exp, vexp
from soapstone.kernels.cpu.substrate.rowmath import (
    load_wide,
    logarithm,
    row_dot,
    row_max,
    scale_row,
    splat_wide,
    store_wide,
)
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import address_of, call_entry, f32p, i16p, i64p
from soapstone.native.lanes import Lanes, first, positive_to_bfloat16, store_lanes, store_some
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

# group: heads of queries that share one of keys and values, forward; rows: queries at a time, in so
# many blocks; ahead: how many keys after its own place a query sees;
# halves: whether products read bfloat16; mask (0: none) and lse, with their steps; stretches: a
# table of the blocks of queries; records: addresses of the parts'; empty: by what a row without
# weights is multiplied. Then the operands: q, k, v, y and, backward, dy, dq, dk, dv.
BLOCK = Fields(
    "parts items heads group rows blocks tq tk d dv ahead halves mask mask_step(b h q k) lse"
    " lse_step(b h q) stretches records",
    reals="scale empty",
)
OPERAND = Fields("place sample position head")  # an address, and bytes from one to the next
Q, K, V, Y, DY, DQ, DK, DV = range(8)
# A block's first product, how many keys it sees, and of how many there are scores side by side, for
# all its queries; those of the next as many lie behind.
STRETCH = Fields("product keys width")
# A part's buffers: of scores; their gradients (forward: the sum of each row); gradients of keys and
# values; queries, keys, values; results (gradients of y); gradients of queries; of halves what
# scores become. Then its products.
PART = Fields("scores grads key_share value_share queries keys values results query_grads weights")
_PRODUCT = Fields("function block")
_block_of, _operands_of, _operand_of = BLOCK.at, BLOCK.table, OPERAND.at
_stretch_of, _part_of, _products_of, _product_of = (
    *(STRETCH.at, PART.at),
    *(PART.table, _PRODUCT.at),
)
_OPERAND_BYTES, _STRETCH_BYTES, _PRODUCT_BYTES = (
    8 * fields.words for fields in (OPERAND, STRETCH, _PRODUCT)
)
# The least float32 stands for the maximum of a row of which every score is minus infinity.
LEAST = -3.4028234663852886e38


@helper
def _at(operands: int, operand: int, b: int, t: int, h: int) -> Any:
    o = _operand_of(operands + operand * _OPERAND_BYTES)
    return o.place + b * o.sample + t * o.position + h * o.head


@helper
def _product(part: int, which: int) -> Any:
    """Run a part's product on its buffers."""
    one = _product_of(address_of(_products_of(part)) + which * _PRODUCT_BYTES)
    return call_entry(one.function, one.block)


@helper
def _stretch(w: Any, number: int) -> Any:
    """What there is to know of a block of queries."""
    return _stretch_of(w.stretches + number * _STRETCH_BYTES)


@helper
def mask_at(w: Any, b: int, h: int, query: int) -> Any:
    """The address of a query's row of the mask, 0 where there is none."""
    offset = b * w.mask_step_b + h * w.mask_step_h + query * w.mask_step_q
    return w.mask + offset if w.mask != 0 else np.int64(0)


@helper
def _collect(
    to: int, operands: int, operand: int, b: int, first: int, h: int, end: int, n: int
) -> None:
    """Copy positions `first` to `end` of a head of an operand into a dense buffer of all."""
    for t in range(first, end):
        copy_floats(to + t * n * 4, _at(operands, operand, b, t, h), n)


@helper
def _rounded(
    to: int, operands: int, operand: int, b: int, first: int, h: int, end: int, n: int
) -> None:
    """As `_collect`, rounded to bfloat16."""
    for t in range(first, end):
        store_bfloat16(to + t * n * 2, _at(operands, operand, b, t, h), n)


@routine
def scaled(row: int, mask: Any, step: int, scale: Any, n: int) -> Any:
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


def _weights(exponential: Any, put_wide: Any, put_first: Any) -> Any:
    """Return the routine that makes and stores weights so."""

    @routine
    def make(to: int, row: int, scale: Any, top: Any, n: int) -> Any:
        """Write exp(row * scale - top), and give the sum."""
        full = n & -64
        total, rest = splat_wide(0.0), splat(0.0)
        for i in range(0, full, 64):
            wide = exponential(load_wide(row, i) * scale - top)
            put_wide(to, i, wide)
            total = total + wide
        for i in range(full, n, 16):
            value = exponential(load_first_low(row, i, n - i) * scale - top)
            put_first(to, i, value, n - i)
            rest = rest + value
        return sum_lanes(total) + sum_lanes(rest)

    return make


weights = _weights(vexp, store_wide, store_first)
half_weights = _weights(
    vectorised(brief_exp),
    vectorised(lambda p, i, v: store_lanes(p, i, positive_to_bfloat16(v))),
    vectorised(lambda p, i, v, n: store_some(p, i, positive_to_bfloat16(v), first(n))),
)


@helper
def floor(top: float) -> Any:
    """The largest of a row, or `LEAST` where every score is minus infinity."""
    return np.float32(LEAST) if top < LEAST else np.float32(top)


@helper
def _larger(a: float, b: float) -> Any:
    """The larger of two; NaN if either is."""
    return b if b > a or b != b else a


@helper
def record_of(w: Any, begin: int) -> Any:
    """The address of the record of the part whose first item is `begin`."""
    part = 0
    while part + 1 < w.parts and (part * w.items) // w.parts != begin:
        part += 1
    return i64p(w.records)[part]


@helper
def visible(w: Any, keys: int, query: int) -> Any:
    """How many of a block's keys a query sees."""
    return max(0, min(keys, query + 1 + w.ahead))


@native("body")
def forward(block: Any, begin: int, end: int) -> Any:
    """Attention of the items (sample, head, block of queries)."""
    w, operands = _block_of(block), address_of(_operands_of(block))
    rows, blocks, tq, d, dv = w.rows, w.blocks, w.tq, w.d, w.dv
    scale = np.float32(w.scale)
    record = record_of(w, begin)
    part = _part_of(record)
    have: Any = np.int64(0)  # keys and values of the head in their buffers
    for item in range(begin, end):
        b, h, number = item // blocks // w.heads, item // blocks % w.heads, item % blocks
        first = number * rows
        count = min(rows, tq - first)
        stretch = _stretch(w, number)
        which, tk, width = stretch.product, stretch.keys, stretch.width
        few = h // w.group
        have = np.int64(0) if number == 0 and h % w.group == 0 else have
        if w.halves:
            _rounded(part.queries - first * d * 2, operands, Q, b, first, h, first + count, d)
            _rounded(part.keys, operands, K, b, have, few, tk, d)
            _rounded(part.values, operands, V, b, have, few, tk, dv)
        else:
            _collect(part.queries - first * d * 4, operands, Q, b, first, h, first + count, d)
            _collect(part.keys, operands, K, b, have, few, tk, d)
            _collect(part.values, operands, V, b, have, few, tk, dv)
        have = max(have, tk)
        status = _product(record, which)
        if status != 0:
            return status
        for i in range(count):
            query = first + i
            row, to = part.scores + i * width * 4, part.weights + i * tk * 2
            n = visible(w, tk, query)
            mask = mask_at(w, b, h, query)
            most: Any = np.float32(-np.inf)
            total: Any = np.float32(0.0)
            factor = scale
            for t in range(0, n, width):
                piece, keys = row + t * count * 4, min(width, n - t)
                if mask == 0 and scale > 0.0:
                    most = _larger(most, row_max(piece, keys) * scale)
                else:
                    at = mask + t * w.mask_step_k if mask != 0 else mask
                    most = _larger(most, scaled(piece, at, w.mask_step_k, scale, keys))
                    factor = np.float32(1.0)
            top = floor(most)
            for t in range(0, n, width):
                piece, keys = row + t * count * 4, min(width, n - t)
                if w.halves:
                    total += half_weights(to + t * 2, piece, factor, top, keys)
                else:
                    total += weights(piece, piece, factor, top, keys)
            f32p(part.grads)[i] = total
            if w.halves:
                for t in range(n, tk):
                    i16p(to)[t] = 0
            else:
                fill_floats(row + n * 4, np.float32(0.0), tk - n)
            at = w.lse + b * w.lse_step_b + h * w.lse_step_h + query * w.lse_step_q
            f32p(at)[0] = top + logarithm(total)
        status = _product(record, which + 1)
        if status != 0:
            return status
        for i in range(count):
            total = f32p(part.grads)[i]
            factor = np.float32(w.empty) if total == 0.0 else np.float32(1.0) / total
            scale_row(_at(operands, Y, b, first + i, h), part.results + i * dv * 4, dv, factor)
    return 0


@vectorised
def _score_grad(
    row: Lanes, to: Lanes, mask: Lanes, scale: Lanes, shift: Lanes, mean: Lanes, n: Lanes
) -> None:
    """row = exp(row * scale + mask - shift), the weights; to = row * (to - mean) * scale."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        score = get(row, i, width, some) * scale - shift
        weight = falling_exp(score + get(mask, i, width, some))
        put(row, i, weight, some)
        put(to, i, weight * (get(to, i, width, some) - mean) * scale, some)

    loop(n.builder, n, body)


@vectorised
def _plain_score_grad(
    row: Lanes, to: Lanes, scale: Lanes, shift: Lanes, mean: Lanes, n: Lanes
) -> None:
    """As `_score_grad`, without a mask."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        weight = falling_exp(get(row, i, width, some) * scale - shift)
        put(row, i, weight, some)
        put(to, i, weight * (get(to, i, width, some) - mean) * scale, some)

    loop(n.builder, n, body)


@helper
def _share(
    w: Any, operands: int, operand: int, b: int, h: int, share: int, keys: int, n: int, fresh: bool
) -> None:
    """Add one block's share (keys, n) to the gradient of keys or values."""
    for t in range(w.tk):
        to = _at(operands, operand, b, t, h)
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
    w, operands = _block_of(block), address_of(_operands_of(block))
    rows, blocks, tq, d, dv = w.rows, w.blocks, w.tq, w.d, w.dv
    scale = np.float32(w.scale)
    record = record_of(w, begin)
    part = _part_of(record)
    for item in range(begin, end):
        b, h = item // w.heads, item % w.heads
        seen = _stretch(w, blocks - 1).keys  # by the last block, the most
        _collect(part.keys, operands, K, b, 0, h, seen, d)
        _collect(part.values, operands, V, b, 0, h, seen, dv)
        for number in range(blocks):
            first = number * rows
            count = min(rows, tq - first)
            which, tk = _stretch(w, number).product, _stretch(w, number).keys
            _collect(part.queries - first * d * 4, operands, Q, b, first, h, first + count, d)
            _collect(part.results - first * dv * 4, operands, DY, b, first, h, first + count, dv)
            status = _product(record, which)
            status |= _product(record, which + 1)
            if status != 0:
                return status
            for i in range(count):
                query = first + i
                row, to = part.scores + i * tk * 4, part.grads + i * tk * 4
                n = visible(w, tk, query)
                mask = mask_at(w, b, h, query)
                at = w.lse + b * w.lse_step_b + h * w.lse_step_h + query * w.lse_step_q
                shift = floor(f32p(at)[0])
                mean = row_dot(part.results + i * dv * 4, _at(operands, Y, b, query, h), dv)
                if mask != 0 and w.mask_step_k != 0:
                    _score_grad(row, to, mask, scale, shift, mean, n)
                else:
                    if mask != 0:
                        shift -= f32p(mask)[0]
                    _plain_score_grad(row, to, scale, shift, mean, n)
                fill_floats(row + n * 4, np.float32(0.0), tk - n)
                fill_floats(to + n * 4, np.float32(0.0), tk - n)
            for k in range(2, 5):
                status |= _product(record, which + k)
            if status != 0:
                return status
            for i in range(count):
                copy_floats(_at(operands, DQ, b, first + i, h), part.query_grads + i * d * 4, d)
            _share(w, operands, DK, b, h, part.key_share, tk, d, number == 0)
            _share(w, operands, DV, b, h, part.value_share, tk, dv, number == 0)
    return 0
