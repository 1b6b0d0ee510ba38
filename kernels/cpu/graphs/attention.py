"""Attention to neighbours, and its gradient: weights are made, used and forgotten entry by entry.

Up to sixteen heads go together, one in each lane; their weights are then used one by one on the
columns of a head. Rows are shared out as those of `spmm`, each made by one thread in the order of
its entries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.ir.ops.graphs.spmm import entries
from soapstone.ir.ops.normalization.dropout import INDEX, MASK, MIX_1, MIX_2, SEED, STEP
from soapstone.kernels.cpu.graphs.blocks import first_row
from soapstone.kernels.cpu.graphs.spmm import AHEAD, bad_row
from soapstone.kernels.cpu.graphs.tiles import LINE, request
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.layout import is_float32, private, rows_contiguous
from soapstone.kernels.cpu.substrate.mathematics import vexp, vlog
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.intrinsics import f32p, i32p, i64p
from soapstone.native.lanes import I64, LANES, Lanes, where
from soapstone.native.memory import aligned_array
from soapstone.native.simd import (
    choose,
    load,
    load_first,
    splat,
    store,
    store_first,
    sum_lanes,
    vectorised,
    vmax,
)
from soapstone.native.threads.parallel import parallel_for, useful_threads

# The bits of a draw are those of `ir.ops.normalization.dropout.random_bits`.
_INDEX, _SEED, _STEP, _MIX_1, _MIX_2 = (word - 2**64 for word in (INDEX, SEED, STEP, MIX_1, MIX_2))

# A tile of `rows` rows of the matrix, of which there are `parts` parts, as of `spmm`; columns: rows
# of what is gathered. x: gathered or, in the gradient, the rows' own; near, far: scores' parts of
# the rows and of what is gathered; steps: from row to row, in bytes. drawn: whether weights are
# dropped, by the step at `step`, and `turned` whether rows are sources.
_ATTENTION = Fields(
    "indptr indices rows entries columns parts heads width drawn step constant threshold base"
    " turned x x_step near near_step far far_step y y_step positive positive_step"
    " scale scale_step share share_step dots dots_step scratch numbers numbered",
    reals="slope factor",
)
_attention_of = _ATTENTION.at


@vectorised
def _leaky(raw: Lanes, slope: Lanes) -> Lanes:
    return where(raw > 0.0, raw, raw * slope)


@vectorised
def _kept(value: Lanes, start: Lanes, threshold: Lanes, factor: Lanes) -> Lanes:
    """The lanes times a factor where their draw keeps them; the weighted sum of lane 0 is start."""
    b = start.builder
    z = Lanes(b, ir.Constant(ir.VectorType(I64, LANES), list(range(LANES)))) * _SEED + start
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return where(((z ^ (z >> 31)) >> 32) >= threshold, value * factor, 0.0)


@helper
def _start(w: Any, row: int, column: Any, head: int) -> Any:
    """The weighted sum that an entry's draw for a head begins with."""
    own = np.int64(row + w.base)
    if w.numbered != 0:
        column = np.int64(i32p(w.numbers)[column])
    index = (own << 32) | column if w.turned != 0 else (column << 32) | own
    return w.constant + i64p(w.step)[0] * _STEP + index * _INDEX + head * _SEED


@helper
def _ahead(x: int, n: int) -> None:
    for line in range(0, 4 * n, LINE):
        request(x + line)


@native("body")
def _attention(block: Any, begin: int, end: int) -> int:
    w = _attention_of(block)
    p, column = i64p(w.indptr), i32p(w.indices)
    width, slope, factor = w.width, np.float32(w.slope), np.float32(w.factor)
    last = np.int64(w.entries - 1)
    weights, signs = w.scratch + begin * 128, w.scratch + begin * 128 + 64
    weight, sign = f32p(weights), f32p(signs)
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        first, past = p[row], p[row + 1]
        y, positive = w.y + row * w.y_step, w.positive + row * w.positive_step
        for head in range(0, w.heads, 16):
            lanes = min(w.heads - head, 16)
            near = load_first(w.near + row * w.near_step, head, lanes)
            top = splat(-np.float32(np.inf))
            for entry in range(first, past):
                far = w.far + np.int64(column[entry]) * w.far_step
                top = vmax(top, load_first(far, head, lanes))
            top = _leaky(near + top, slope)
            total = splat(np.float32(0))
            share = total
            for at in range(head * width, (head + lanes) * width):
                f32p(y)[at] = 0.0
                f32p(positive)[at] = 0.0
            for entry in range(first, past):
                s = np.int64(column[entry])
                later = np.int64(column[min(entry + AHEAD, last)])
                _ahead(w.x + later * w.x_step + 4 * head * width, lanes * width)
                raw = near + load_first(w.far + s * w.far_step, head, lanes)
                value = vexp(_leaky(raw, slope) - top)
                total = total + value
                share = share + choose(raw > 0.0, value, splat(np.float32(0)))
                if w.drawn != 0:
                    value = _kept(value, _start(w, row, s, head), w.threshold, factor)
                store(weights, 0, value)
                store(signs, 0, raw)
                for lane in range(lanes):
                    at = 4 * (head + lane) * width
                    of = w.x + s * w.x_step + at
                    to = (positive if sign[lane] > 0 else y) + at
                    v = weight[lane]
                    c = np.int64(0)
                    while c + 16 <= width:
                        store(to, c, load(to, c) + load(of, c) * v)
                        c += 16
                    if c < width:
                        n = width - c
                        store_first(to, c, load_first(to, c, n) + load_first(of, c, n) * v, n)
            if past > first:
                store(weights, 0, splat(np.float32(1)) / total)
                store_first(w.share + row * w.share_step, head, share / total, lanes)
                store_first(w.scale + row * w.scale_step, head, top + vlog(total), lanes)
                for lane in range(lanes):
                    for at in range((head + lane) * width, (head + lane + 1) * width):
                        f32p(positive)[at] *= weight[lane]
                        f32p(y)[at] = f32p(y)[at] * weight[lane] + f32p(positive)[at]
            else:
                store_first(w.share + row * w.share_step, head, total, lanes)
                store_first(w.scale + row * w.scale_step, head, total, lanes)
    return 0


@native("body")
def _attention_grad(block: Any, begin: int, end: int) -> int:
    w = _attention_of(block)
    p, column = i64p(w.indptr), i32p(w.indices)
    width, slope, factor = w.width, np.float32(w.slope), np.float32(w.factor)
    last = np.int64(w.entries - 1)
    weights, products = w.scratch + begin * 128, w.scratch + begin * 128 + 64
    weight, product = f32p(weights), f32p(products)
    for lane in range(16):
        product[lane] = 0.0
    for row in range(first_row(w, begin), first_row(w, end)):
        if bad_row(w, row):
            return 1
        own, dx = w.x + row * w.x_step, w.y + row * w.y_step
        for head in range(0, w.heads, 16):
            lanes = min(w.heads - head, 16)
            near = load_first(w.near + row * w.near_step, head, lanes)
            total = splat(np.float32(0))
            for at in range(head * width, (head + lanes) * width):
                f32p(dx)[at] = 0.0
            for entry in range(p[row], p[row + 1]):
                s = np.int64(column[entry])
                later = np.int64(column[min(entry + AHEAD, last)])
                _ahead(w.positive + later * w.positive_step + 4 * head * width, lanes * width)
                raw = near + load_first(w.far + s * w.far_step, head, lanes)
                whole = _leaky(raw, slope) - load_first(w.scale + s * w.scale_step, head, lanes)
                whole = vexp(whole)
                kept = whole
                if w.drawn != 0:
                    kept = _kept(whole, _start(w, row, s, head), w.threshold, factor)
                store(weights, 0, kept)
                for lane in range(lanes):
                    at = 4 * (head + lane) * width
                    dy = w.positive + s * w.positive_step + at
                    v = weight[lane]
                    inner = splat(np.float32(0))
                    c = np.int64(0)
                    while c + 16 <= width:
                        part = load(dy, c)
                        inner = inner + part * load(own + at, c)
                        store(dx + at, c, load(dx + at, c) + part * v)
                        c += 16
                    if c < width:
                        n = width - c
                        part = load_first(dy, c, n)
                        inner = inner + part * load_first(own + at, c, n)
                        store_first(dx + at, c, load_first(dx + at, c, n) + part * v, n)
                    product[lane] = sum_lanes(inner)
                dots = load_first(w.dots + s * w.dots_step, head, lanes)
                steep = kept * load(products, 0) - whole * dots
                total = total + choose(raw > 0.0, steep, steep * slope)
            store_first(w.share + row * w.share_step, head, total, lanes)
    return 0


def _entry(
    call: Call,
    body: Any,
    matrix: tuple[Array, Array],
    gathered: Array,
    step: list[Array],
    **arrays: Array,
) -> Entry | None:
    """Return the entry that runs a body over the rows of a matrix, if it serves the arrays.

    gathered: the rows that are gathered; step: perhaps it, then perhaps rows' numbers; arrays: x,
        near, far, y, positive, scale, share and dots.
    """
    indptr, indices = matrix
    if indptr.dtype != np.int64 or indices.dtype != np.int32:
        return None
    if not all(a.flags.c_contiguous and a.flags.aligned for a in matrix):
        return None
    every = arrays.values()
    if not is_float32(*every) or not rows_contiguous(*every):
        return None
    heads, width = gathered.shape[1:]
    if any(a.ndim == 3 and 4 * width != a.strides[1] and a.size and heads > 1 for a in every):
        return None  # the heads of a row lie together
    if any(n.dtype != np.int32 or not n.flags.c_contiguous for n in step[1:]):
        return None
    if arrays["y"].size == 0 or not indptr.size:
        return None if arrays["share"].size else noop()
    a, rows = call.attributes, indptr.size - 1
    parts = useful_threads(call.threads, 4 * indices.size * heads * width)
    parts = max(1, min(parts, rows))
    constant = (a["seed"] + a.get("head", 0)) * (_SEED & MASK) & MASK
    places = {f"{name}_step": array.strides[0] for name, array in arrays.items()}
    block = _ATTENTION.pack(
        **arrays,
        **places,
        indptr=indptr,
        indices=indices,
        rows=rows,
        entries=indices.size,
        columns=len(gathered),
        parts=parts,
        heads=heads,
        width=width,
        drawn=bool(step),
        step=step[0] if step else aligned_array((), np.int64),
        numbers=step[1] if step[1:] else 0,
        numbered=len(step) > 1,
        constant=constant,
        threshold=math.ceil(a["rate"] * 2**32),
        base=a.get("base", 0),
        turned=body is _attention_grad,
        scratch=private(parts, 32),
        slope=a["slope"],
        factor=1 / (1 - a["rate"]),
    )
    said = outside(call.operator, entries, indptr, indices, len(gathered))
    return parallel_for(body, block, parts, parts, said)


@variant("graph_attention", "numba")
def graph_attention(call: Call) -> Entry | None:
    """The weighted sums over neighbours, and what the gradient needs."""
    x, source, target, indptr, indices, _, _, *step = call.inputs
    y, positive, scale, share = call.outputs
    matrix = indptr, indices
    own = {"x": x, "near": target, "far": source, "dots": share}
    made = {"y": y, "positive": positive, "scale": scale, "share": share}
    return _entry(call, _attention, matrix, x, step, **own, **made)


@variant("graph_attention_grad", "numba")
def graph_attention_grad(call: Call) -> Entry | None:
    """The gradients of the gathered rows and of their part of the scores."""
    dy, x, source, target, scale, dots, indptr, indices, *step = call.inputs
    dx, dsource = call.outputs
    own = {"x": x, "near": source, "far": target, "dots": dots, "scale": scale, "positive": dy}
    return _entry(call, _attention_grad, (indptr, indices), dy, step, **own, y=dx, share=dsource)
