"""Attention of few rows of queries at a time, with products of its own.

A library's products cost microseconds a call beside their arithmetic, which is most of the time of
a head of some fifty positions; and its scores go to memory and back. Here the scores of six queries
stay in the nearest cache. Keys are turned once into panels of 64, values copied once. Where a call
allows it products are of bfloat16, of which the processor multiplies and adds two at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.cache.objects import features
from soapstone.ir.ops.products.attention import scale_of, shared
from soapstone.kernels.cpu.attention.blocks_lanes import (
    HALF_PRODUCT,
    HALF_WEIGHTS,
    HALVED,
    PRODUCT,
    ROWS,
    WEIGHTS,
    WIDTH,
    ending,
    paired,
    turned,
)
from soapstone.kernels.cpu.attention.heads import mask_at, record_of, visible
from soapstone.kernels.cpu.attention.variants import ahead_of, empty_of, mask_fields
from soapstone.kernels.cpu.elementwise.conversions import store_bfloat16
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats
from soapstone.kernels.cpu.recurrent.layers import in_rows
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, helper, native, routine
from soapstone.native.intrinsics import f32p, i64p
from soapstone.native.lanes import LANES, held, pairs_at_once
from soapstone.native.memory import aligned_array, pack, scratch_array
from soapstone.native.threads.parallel import parallel_for, useful_threads

_MOST = 4096  # keys, or twice as many halves: more fill the second cache, as a library's do
_PANEL = WIDTH * LANES
# `pieces` of each head's queries, of `rows` each; parts and items: of the whole work; records: the
# addresses of the parts' buffers. Steps in bytes along samples, positions and heads.
_BLOCKS = Fields(
    "parts items heads group pieces rows tq tk d dv ahead q q_step(b t h) k k_step(b t h)"
    " v v_step(b t h) y y_step(b t h) mask mask_step(b h q k) lse lse_step(b h q) factors records",
    reals="empty",
)
# Of a part: keys in panels of (d, 64), values (tk, dv), each to whole vectors; of a block of rows
# scores, the sums of weights, then one over these, and largest scores, then logarithms of sums.
# Of halves, keys and values are words: two numbers of a key, and those of two positions. Then there
# are sixteen rows of keys or queries, weights, and a row of zeros, beside the value at an odd end.
_PART = Fields("keys values scores counts raised sums tops rows weights zeros")
_blocks_of, _part_of = _BLOCKS.at, _PART.at


def _shared(product: Any) -> Any:
    """Return a product as a function of which there is one copy."""

    @routine
    def shared(
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
        product(vectors, x, x_step, depth, lines, line, factors, to, to_step, last, room)

    return shared


@routine
def _turn(to: int, x: int, x_step: int, rows: int, width: int) -> None:
    turned(to, 4 * _PANEL, x, x_step, rows, width)


@helper
def _up(n: int) -> Any:
    """The next multiple of a vector's lanes."""
    return (n + 15) & -16


@helper
def _hold_halves(w: Any, part: Any, b: int, h: int, begin: int, end: int) -> None:
    """As `_hold`, in words."""
    few = h // w.group
    k, v = w.k + b * w.k_step_b + few * w.k_step_h, w.v + b * w.v_step_b + few * w.v_step_h
    words = w.d // 2
    deep, wide = _up(words), _up(w.dv)
    for t in range(begin, end, 16):
        to = part.keys + (t // _PANEL * deep * _PANEL + t % _PANEL) * 4
        rows = min(16, w.tk - t)
        for i in range(rows):
            store_bfloat16(part.rows + i * deep * 4, k + (t + i) * w.k_step_t, w.d)
        for i in range(0, words, 16):
            _turn(to + i * _PANEL * 4, part.rows + i * 4, deep * 4, rows, min(16, words - i))
    for t in range(begin, min(end, w.tk), 2):
        at = v + t * w.v_step_t
        after = at + w.v_step_t if t + 1 < w.tk else part.zeros
        paired(part.values + t // 2 * wide * 4, at, after, w.dv)


@helper
def _hold(w: Any, part: Any, b: int, h: int, begin: int, end: int) -> None:
    """Bring keys and values of a head into the buffers of a part; begin is a multiple of 16."""
    few = h // w.group
    k, v = w.k + b * w.k_step_b + few * w.k_step_h, w.v + b * w.v_step_b + few * w.v_step_h
    deep, wide = _up(w.d), _up(w.dv)
    for t in range(begin, end, 16):
        to = part.keys + (t // _PANEL * deep * _PANEL + t % _PANEL) * 4
        for i in range(0, w.d, 16):
            at = k + t * w.k_step_t + i * 4
            _turn(to + i * _PANEL * 4, at, w.k_step_t, min(16, w.tk - t), min(16, w.d - i))
    for t in range(begin, min(end, w.tk)):
        copy_floats(part.values + t * wide * 4, v + t * w.v_step_t, w.dv)


def _attend(halves: bool) -> Native:
    """Return the loop over items. halves: whether products are of bfloat16."""
    product = _shared(HALF_PRODUCT if halves else PRODUCT)
    hold = _hold_halves if halves else _hold
    weigh = HALF_WEIGHTS if halves else WEIGHTS
    per = 2 if halves else 1  # numbers of a word

    @native("body")
    def attend(block: Any, begin: int, end: int) -> int:
        w = _blocks_of(block)
        part = _part_of(record_of(w, begin))
        tk, d, dv, pieces = w.tk, w.d, w.dv, w.pieces
        words = d // per
        deep, wide, long = _up(words), _up(dv), _up(tk) * 4
        shares, share_step = (part.weights, long // 2) if halves else (part.scores, long)
        have: Any = np.int64(0)  # keys of the head in the buffers
        for item in range(begin, end):
            b, h, number = item // pieces // w.heads, item // pieces % w.heads, item % pieces
            have = np.int64(0) if number == 0 and h % w.group == 0 else have
            stop = min(w.tq, (number + 1) * w.rows)
            q, y = w.q + b * w.q_step_b + h * w.q_step_h, w.y + b * w.y_step_b + h * w.y_step_h
            for start in range(number * w.rows, stop, ROWS):
                first = min(start, stop - ROWS)  # rows before it are made again
                seen = visible(w, tk, first + ROWS - 1)
                if seen > have:
                    hold(w, part, b, h, have, _up(seen))
                    have = _up(seen)
                at, step = q + first * w.q_step_t, w.q_step_t
                if halves:
                    for i in range(ROWS):
                        store_bfloat16(part.rows + i * deep * 4, at + i * step, d)
                    at, step = part.rows, deep * 4
                for t in range(0, seen, _PANEL):
                    vectors = min(WIDTH, (seen - t + 15) >> 4)
                    last = min(16, seen - t - (vectors - 1) * 16)
                    lines, to = part.keys + t * deep * 4, part.scores + t * 4
                    product(
                        vectors,
                        at,
                        step,
                        words,
                        lines,
                        4 * _PANEL,
                        w.factors,
                        to,
                        long,
                        last,
                        16,
                    )
                mask = mask_at(w, b, h, first)
                number = mask != 0 and w.mask_step_k == 0
                for i in range(ROWS):
                    i64p(part.counts)[i] = visible(w, tk, first + i)
                    f32p(part.raised)[i] = (
                        f32p(mask + i * w.mask_step_q)[0] if number else np.float32(0.0)
                    )
                weigh(
                    shares,
                    share_step,
                    part.scores,
                    long,
                    part.counts,
                    seen,
                    np.int64(0) if number else mask,
                    w.mask_step_q,
                    part.raised,
                    part.sums,
                    part.tops,
                )
                ending(part.sums, part.tops, w.empty)
                sums = w.lse + b * w.lse_step_b + h * w.lse_step_h + first * w.lse_step_q
                for i in range(ROWS):
                    f32p(sums + i * w.lse_step_q)[0] = f32p(part.tops)[i]
                at = y + first * w.y_step_t
                for i in range(0, dv, _PANEL):
                    vectors = min(WIDTH, (dv - i + 15) >> 4)
                    last = min(16, dv - i - (vectors - 1) * 16)
                    if HALVED and last <= 8:
                        vectors = 0
                    lines, to = part.values + i * 4, at + i * 4
                    product(
                        vectors,
                        shares,
                        share_step,
                        (seen + per - 1) // per,
                        lines,
                        4 * wide,
                        part.sums,
                        to,
                        w.y_step_t,
                        last,
                        last,
                    )
        return 0

    return attend


_PAIRS = "avx512bf16" in features()  # which adds two products of halves; no level of a wheel has it
_ATTEND = {halves: _attend(halves) for halves in ((False, True) if _PAIRS else (False,))}


def _work(*shape: int, kind: Any = np.float32) -> Array:
    """Return memory that a part works in, of which no later process needs what is there."""
    return scratch_array(shape, kind)


@in_rows
def _bind(call: Call, halves: bool = False) -> Entry | None:
    """Return the entry of attention of all heads. halves: whether products are of bfloat16."""
    q, k, v = call.inputs[:3]
    y, lse = call.outputs
    samples, tq, heads, d = q.shape
    tk, dv = k.shape[1], v.shape[3]
    mask = mask_fields(call, 3, (samples, heads, tq, tk))
    per = 2 if halves else 1
    if mask is None or tq < ROWS or tk > per * _MOST or d % per:
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
    deep, wide, long = (-(-n // LANES) * LANES for n in (d // per, dv, tk))
    records = [
        _PART.pack(
            keys=_work(-(-tk // _PANEL), deep, _PANEL),
            values=aligned_array((-(-tk // per), wide), np.float32, zero=True),
            scores=_work(ROWS, long),
            counts=_work(ROWS, kind=np.int64),
            raised=_work(ROWS),
            sums=_work(LANES),
            tops=_work(LANES),
            rows=_work(LANES, deep) if halves else 0,
            weights=_work(ROWS, long // 2) if halves else 0,
            zeros=aligned_array((wide,), np.float32, zero=True) if halves else 0,
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
        group=shared(heads, k.shape[2]),
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
    return parallel_for(_ATTEND[halves], block, items, parts)


def _of_halves(call: Call) -> Entry | None:
    allowed = call.precision == BFLOAT16
    entry: Entry | None = _bind(call, halves=True) if allowed else None
    return entry


def _expected(_: Call) -> float:
    return 0.4 if pairs_at_once() else 0.9


# Registers must hold the sums of six rows.
variant("attention", "blocks", expected=0.8, promises=True, runs=held() > 4)(_bind)
variant("attention", "blocks_bfloat16", expected=_expected, promises=True, runs=_PAIRS)(_of_halves)
