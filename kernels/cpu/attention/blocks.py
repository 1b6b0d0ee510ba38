"""Attention of few rows of queries at a time, with products of its own.

A library's products cost microseconds a call beside their arithmetic, which is most of the time of
a head of some fifty positions; and its scores go to memory and back. Here the scores of six queries
stay in the nearest cache. Keys are turned once into panels of 64, values copied once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.cache.objects import features
from soapstone.ir.ops.products.attention import scale_of
from soapstone.kernels.cpu.attention.blocks_lanes import PRODUCTS, ROWS, WIDTH, turned
from soapstone.kernels.cpu.attention.heads import (
    floor,
    mask_at,
    record_of,
    scaled,
    visible,
    weights,
)
from soapstone.kernels.cpu.attention.variants import ahead_of, empty_of, mask_fields
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, fill_floats
from soapstone.kernels.cpu.recurrent.layers import in_rows
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.cpu.substrate.mathematics import vlog
from soapstone.kernels.cpu.substrate.rowmath import row_max
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import f32p
from soapstone.native.lanes import LANES
from soapstone.native.memory import pack
from soapstone.native.parallel import parallel_for, useful_threads
from soapstone.native.simd import load_first, store_first

_MOST = 1024  # keys: more fill the second cache, where a library's products do as well
_PANEL = WIDTH * LANES
# `pieces` of each head's queries, of `rows` each; parts and items: of the whole work; records: the
# addresses of the parts' buffers. Steps in bytes along samples, positions and heads.
_BLOCKS = Fields(
    "parts items heads pieces rows tq tk d dv ahead q q_step(b t h) k k_step(b t h) v v_step(b t h)"
    " y y_step(b t h) mask mask_step(b h q k) lse lse_step(b h q) factors records",
    reals="empty",
)
# Of a part: keys in panels of (d, 64), values (tk, dv), each to whole vectors; of a block of rows
# scores, the sums of weights, then one over these, and largest scores, then logarithms of sums.
_PART = Fields("keys values scores sums tops")
_blocks_of, _part_of = _BLOCKS.at, _PART.at
_one, _two, _three, _four = PRODUCTS


@routine
def _product(
    vectors: int,
    x: int,
    x_step: int,
    depth: int,
    lines: int,
    line: int,
    factors: int,
    to: int,
    to_step: int,
    last: int,
    room: int,
) -> None:
    if vectors == 4:
        _four(x, x_step, depth, lines, line, factors, to, to_step, last, room)
    elif vectors == 3:
        _three(x, x_step, depth, lines, line, factors, to, to_step, last, room)
    elif vectors == 2:
        _two(x, x_step, depth, lines, line, factors, to, to_step, last, room)
    else:
        _one(x, x_step, depth, lines, line, factors, to, to_step, last, room)


@routine
def _turn(to: int, x: int, x_step: int, rows: int, width: int) -> None:
    turned(to, 4 * _PANEL, x, x_step, rows, width)


@helper
def _up(n: int) -> Any:
    """The next multiple of a vector's lanes."""
    return (n + 15) & -16


@helper
def _hold(w: Any, part: Any, b: int, h: int, begin: int, end: int) -> None:
    """Bring keys and values of a head into the buffers of a part; begin is a multiple of 16."""
    k, v = w.k + b * w.k_step_b + h * w.k_step_h, w.v + b * w.v_step_b + h * w.v_step_h
    deep, wide = _up(w.d), _up(w.dv)
    for t in range(begin, end, 16):
        to = part.keys + (t // _PANEL * deep * _PANEL + t % _PANEL) * 4
        for i in range(0, w.d, 16):
            at = k + t * w.k_step_t + i * 4
            _turn(to + i * _PANEL * 4, at, w.k_step_t, min(16, w.tk - t), min(16, w.d - i))
    for t in range(begin, min(end, w.tk)):
        copy_floats(part.values + t * wide * 4, v + t * w.v_step_t, w.dv)


@routine
def _shares(row: int, mask: int, mask_step: int, n: int, seen: int, total: int) -> Any:
    """Make n scores of a row weights, the others of `seen` zeros; give the largest score.

    Scores past `seen` are minus infinity, to a multiple of 16. total: where the sum is written.
    """
    if n < seen:
        fill_floats(row + n * 4, np.float32(-np.inf), seen - n)
    if mask != 0:
        top = floor(scaled(row, mask, mask_step, np.float32(1.0), n))
    else:
        top = floor(row_max(row, _up(n)))
    f32p(total)[0] = weights(row, row, np.float32(1.0), top, _up(seen))
    return top


@native("body")
def _attend(block: Any, begin: int, end: int) -> int:
    w = _blocks_of(block)
    part = _part_of(record_of(w, begin))
    tk, d, dv, pieces = w.tk, w.d, w.dv, w.pieces
    deep, wide, long = _up(d), _up(dv), _up(tk) * 4
    have: Any = np.int64(0)  # keys of the head in the buffers
    for item in range(begin, end):
        b, h, number = item // pieces // w.heads, item // pieces % w.heads, item % pieces
        have = np.int64(0) if number == 0 else have
        stop = min(w.tq, (number + 1) * w.rows)
        q, y = w.q + b * w.q_step_b + h * w.q_step_h, w.y + b * w.y_step_b + h * w.y_step_h
        for start in range(number * w.rows, stop, ROWS):
            first = min(start, stop - ROWS)  # rows before it are made again
            seen = visible(w, tk, first + ROWS - 1)
            if seen > have:
                _hold(w, part, b, h, have, _up(seen))
                have = _up(seen)
            at = q + first * w.q_step_t
            for t in range(0, seen, _PANEL):
                vectors = min(WIDTH, (seen - t + 15) >> 4)
                last = min(16, seen - t - (vectors - 1) * 16)
                lines, to = part.keys + t * deep * 4, part.scores + t * 4
                _product(
                    vectors,
                    at,
                    w.q_step_t,
                    d,
                    lines,
                    4 * _PANEL,
                    w.factors,
                    to,
                    long,
                    last,
                    16,
                )
            for i in range(ROWS):
                query, row = first + i, part.scores + i * long
                n, mask, sums = visible(w, tk, query), mask_at(w, b, h, query), part.sums + i * 4
                f32p(part.tops)[i] = _shares(row, mask, w.mask_step_k, n, seen, sums)
            total = load_first(part.sums, 0, ROWS)
            store_first(part.tops, 0, load_first(part.tops, 0, ROWS) + vlog(total), ROWS)
            for i in range(ROWS):
                sums = w.lse + b * w.lse_step_b + h * w.lse_step_h + (first + i) * w.lse_step_q
                f32p(sums)[0] = f32p(part.tops)[i]
                one = f32p(part.sums)[i]
                factor = np.float32(w.empty) if one == 0.0 else np.float32(1.0) / one
                f32p(part.sums)[i] = factor
            at = y + first * w.y_step_t
            for i in range(0, dv, _PANEL):
                vectors = min(WIDTH, (dv - i + 15) >> 4)
                last = min(16, dv - i - (vectors - 1) * 16)
                lines, to = part.values + i * 4, at + i * 4
                _product(
                    vectors,
                    part.scores,
                    long,
                    seen,
                    lines,
                    4 * wide,
                    part.sums,
                    to,
                    w.y_step_t,
                    last,
                    last,
                )
    return 0


@in_rows
def _bind(call: Call) -> Entry | None:
    """Return the entry of attention of all heads."""
    q, k, v = call.inputs[:3]
    y, lse = call.outputs
    samples, tq, heads, d = q.shape
    tk, dv = k.shape[1], v.shape[3]
    mask = mask_fields(call, 3, (samples, heads, tq, tk))
    if mask is None or tq < ROWS or tk > _MOST:
        return None
    if not all(a.size for a in (*call.inputs, *call.outputs)):
        return None
    threads = useful_threads(call.threads, 4 * samples * heads * tq * tk)
    pieces = max(1, min(-(-threads // (samples * heads)), tq // ROWS))
    rows = -(-tq // pieces)
    pieces = -(-tq // rows)
    if tq - (pieces - 1) * rows < ROWS:
        pieces, rows = 1, tq
    items = samples * heads * pieces
    parts = min(threads, items)
    deep, wide, long = (-(-n // LANES) * LANES for n in (d, dv, tk))
    records = [
        _PART.pack(
            keys=private(-(-tk // _PANEL), deep, _PANEL),
            values=np.zeros((tk, wide), np.float32),
            scores=private(ROWS, long),
            sums=private(ROWS),
            tops=private(ROWS),
        )
        for _ in range(parts)
    ]
    factors = private(ROWS)
    factors[...] = scale_of(call.attributes, d)
    operands = dict(zip("qkvy", (q, k, v, y)))
    block = _BLOCKS.pack(
        parts=parts,
        items=items,
        heads=heads,
        pieces=pieces,
        rows=rows,
        tq=tq,
        tk=tk,
        d=d,
        dv=dv,
        ahead=ahead_of(call, tk),
        **operands,
        **{f"{name}_step": array.strides[:3] for name, array in operands.items()},
        **mask,
        lse=lse,
        lse_step=lse.strides,
        factors=factors,
        records=pack(records),
        empty=empty_of(call),
    )
    return parallel_for(_attend, block, items, parts)


if "avx512f" in features():  # sums of six rows take 24 registers
    variant("attention", "blocks", expected=0.8)(_bind)
