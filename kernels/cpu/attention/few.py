"""Attention of a few queries, as of a decoder's next token: keys and values are read in place.

Each key is read once, for all queries of its head, and so is each value; those past the last one
that the mask shows, for which a buffer has no tokens yet, are not read at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.ops.products.attention import scale_of, shared
from soapstone.kernels.cpu.attention.heads import floor, mask_at, scaled, weights
from soapstone.kernels.cpu.attention.variants import ahead_of, empty_of, mask_fields
from soapstone.kernels.cpu.elementwise.lane_loops import add_scaled, fill_floats
from soapstone.kernels.cpu.recurrent.layers import in_rows
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.cpu.substrate.rowmath import logarithm, row_dot, scale_row
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native
from soapstone.native.intrinsics import f32p
from soapstone.native.threads.parallel import parallel_for, useful_threads

_MOST = 8  # queries
_HIDES = -1e30  # a mask that is less leaves a key no weight beside one that is seen
# Steps in bytes along samples, positions and heads; of the mask and the sums as in `heads.py`.
_FEW = Fields(
    "heads group tq tk d dv ahead q q_step(b t h) k k_step(b t h) v v_step(b t h) y y_step(b t h)"
    " mask mask_step(b h q k) lse lse_step(b h q) scores",
    reals="scale empty",
)
_few_of = _FEW.at


@helper
def _seen(w: Any, b: int, h: int, i: int) -> Any:
    """How many keys there are up to the last that a query sees; all where it sees none."""
    most = max(0, min(w.tk, i + 1 + w.ahead))
    count = most
    if w.mask != 0:
        row = mask_at(w, b, h, i)
        while count > 0 and f32p(row + (count - 1) * w.mask_step_k)[0] < np.float32(_HIDES):
            count -= 1
    return count if count > 0 else most


@native("body")
def _few(block: Any, begin: int, end: int) -> int:
    w = _few_of(block)
    heads, tq, tk, d, dv = w.heads, w.tq, w.tk, w.d, w.dv
    scale = np.float32(w.scale)
    for item in range(begin, end):
        b, h = item // heads, item % heads
        scores = w.scores + item * tq * tk * 4
        q = w.q + b * w.q_step_b + h * w.q_step_h
        k = w.k + b * w.k_step_b + h // w.group * w.k_step_h
        v = w.v + b * w.v_step_b + h // w.group * w.v_step_h
        y = w.y + b * w.y_step_b + h * w.y_step_h
        most = np.int64(0)
        for i in range(tq):
            most = max(most, _seen(w, b, h, i))
        for t in range(most):
            for i in range(tq):
                at = scores + i * tk * 4
                f32p(at)[t] = row_dot(q + i * w.q_step_t, k + t * w.k_step_t, d)
        for i in range(tq):
            row, mask, n = scores + i * tk * 4, mask_at(w, b, h, i), _seen(w, b, h, i)
            top = floor(scaled(row, mask, w.mask_step_k, scale, n))
            total = weights(row, row, np.float32(1.0), top, n)
            fill_floats(row + n * 4, np.float32(0.0), most - n)
            at = w.lse + b * w.lse_step_b + h * w.lse_step_h + i * w.lse_step_q
            f32p(at)[0] = top + logarithm(total)
            factor = np.float32(w.empty) if total == 0.0 else np.float32(1.0) / total
            scale_row(row, row, n, factor)
            # What no key adds to is a row without weights.
            fill_floats(y + i * w.y_step_t, np.float32(0.0) if n > 0 else factor, dv)
        for t in range(most):
            for i in range(tq):
                weight = f32p(scores + i * tk * 4)[t]
                add_scaled(y + i * w.y_step_t, v + t * w.v_step_t, dv, weight)
    return 0


@variant("attention", "few", expected=0.5, promises=True)
@in_rows
def attention(call: Call) -> Entry | None:
    """Return the entry of attention of a few queries of each head."""
    q, k, v = call.inputs[:3]
    y, lse = call.outputs
    samples, tq, heads, d = q.shape
    tk = k.shape[1]
    mask = mask_fields(call, 3, (samples, heads, tq, tk))
    if tq > _MOST or mask is None or not all(a.size for a in (*call.inputs, *call.outputs)):
        return None
    scale = scale_of(call.attributes, d)
    if not scale > 0:  # minus infinity would become another number
        return None
    steps = {f"{n}_step": a.strides[:3] for n, a in zip("qkvy", (q, k, v, y))}
    block = _FEW.pack(
        heads=heads,
        group=shared(heads, k.shape[2]),
        tq=tq,
        tk=tk,
        d=d,
        dv=v.shape[3],
        ahead=ahead_of(call, tk),
        **dict(zip("qkvy", (q, k, v, y))),
        **steps,
        **mask,
        lse=lse,
        lse_step=lse.strides,
        scores=private(samples * heads, tq, tk),
        scale=scale,
        empty=empty_of(call),
    )
    items = samples * heads
    threads = useful_threads(call.threads, k.nbytes + v.nbytes)
    return parallel_for(_few, block, items, threads)
