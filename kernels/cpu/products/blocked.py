"""Products of many rows with constant weights, in blocks that caches and registers hold.

A panel of weights is as wide as a block of registers; some hundred values of k of it stay in the
nearest cache while all rows of a part pass by, and their sums in the next one. Rows are read where
they lie. 1x1 convolutions are such products, of pixels, and those of sequences, of windows. What
follows is done while sums are there.

Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008); here x is
not packed, since its rows are few at a time, and weights are, once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from soapstone.kernels.cpu.products.blocked_lanes import (
    AHEAD,
    ROWS,
    VECTORS,
    WIDTH,
    block_product,
    finish_lanes,
)
from soapstone.kernels.cpu.products.conv_epilogue import ConvEpilogue, conv_epilogue
from soapstone.kernels.cpu.products.forms import MOST_ROWS
from soapstone.kernels.cpu.products.row_epilogue import (
    AT_ONCE,
    epilogue_program,
    offsets,
    product_of,
    run_epilogue,
    with_steps,
)
from soapstone.kernels.cpu.substrate.layout import is_float32, overlaps
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.arrays import strided
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy, copy_now
from soapstone.native.entries import helper, native, sequence
from soapstone.native.intrinsics import stack, words
from soapstone.native.lanes import LANES
from soapstone.native.memory import Block, aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for

_PART = 126  # rows of a part: their sums of _ACROSS columns take 64 KB
_ACROSS = AT_ONCE  # columns of a part, at most
_STEP = 4 * _ACROSS  # bytes from a row of sums to the next
_DEPTH = 512 if VECTORS[-1] > 1 else 256  # values of k of a panel that all rows pass by

# parts: of the rows; each: rows of a part; across: its columns; x, y, added: where offsets of rows
# count from; program: what follows, or 0; bias: padded to whole panels.
_BLOCKED = Fields(
    "rows depth columns parts each across x x_rows y y_rows added added_rows weights bias deep"
    " program",
    reals="before low high",
)
_blocked_of = _BLOCKED.at


@helper
def _end(w: Any, sums: int, row: int, column: int, columns: int) -> None:
    """Write a row of results: its sums, raised, added to and kept within bounds."""
    to = w.y + words(w.y_rows)[row] + column * 4
    other = w.added + words(w.added_rows)[row] + column * 4 if w.added != 0 else 0
    for lane in range(0, columns, 16):
        place = other + lane * 4 if other != 0 else 0
        count = columns - lane
        finish_lanes(sums + lane * 4, place, to + lane * 4, count, w.before, w.low, w.high)


@native("body")
def _parts(block: Any, begin: int, end: int) -> int:
    w = _blocked_of(block)
    depth, each = w.depth, w.each
    sums = stack(65536)
    for item in range(begin, end):
        first, column = item % w.parts * each, item // w.parts * w.across
        count, columns = min(each, w.rows - first), min(w.across, w.columns - column)
        k = 0
        while k < depth:
            deep = min(w.deep, depth - k)
            ends = w.program == 0 and k + deep == depth
            for panel in range(0, columns, WIDTH):
                weights = w.weights + ((column + panel) * depth + k * WIDTH) * 4
                further = depth - k  # to the next columns
                if panel + WIDTH < columns:
                    further = depth
                elif k + deep < depth:
                    further = deep - panel // WIDTH * depth
                later = weights + further * WIDTH * 4
                vectors = VECTORS[-1] if 2 * (columns - panel) > WIDTH else VECTORS[0]
                row = 0
                while row < count:
                    together, place = min(ROWS, count - row), sums + row * _STEP + panel * 4
                    start, step = place, _STEP
                    if k == 0:
                        start, step = w.bias + (column + panel) * 4, 0
                    block_product(
                        together,
                        vectors,
                        w.x + k * 4,
                        w.x_rows + (first + row) * 8,
                        deep,
                        weights,
                        start,
                        step,
                        place,
                        _STEP,
                        later + min(row // ROWS * AHEAD, WIDTH * 4 - AHEAD) * deep,
                    )
                    if ends:
                        for r in range(together):
                            at = first + row + r, column + panel, min(WIDTH, columns - panel)
                            _end(w, place + r * _STEP, at[0], at[1], at[2])
                    row += together
            k += deep
        if w.program != 0:
            for row in range(count):
                run_epilogue(w.program, first + row, sums + row * _STEP, column, columns)
    return 0


def _packed(w: Array, threads: int) -> Array:
    """Return weights (..., columns) in panels, the last one padded with zeros."""
    w = w.reshape(-1, w.shape[-1])
    depth, columns = w.shape
    made = aligned_array((-(-columns // WIDTH), depth, WIDTH), np.float32)
    whole, more = divmod(columns, WIDTH)
    if whole:
        panels = w[:, : whole * WIDTH].reshape(depth, whole, WIDTH)
        copy_now(made[:whole].transpose(1, 0, 2), panels, threads)
    if more:
        copy_now(made[whole, :, :more], w[:, whole * WIDTH :], threads)
        made[whole, :, more:] = 0.0
    return made


class _Problem(NamedTuple):
    """x @ w and what follows: x (..., depth), y and added (..., columns), w (..., columns).

    The first axes of w together have the depth.
    """

    x: Array
    w: Array
    y: Array
    bias: Array | None = None
    epilogue: ConvEpilogue = ConvEpilogue()
    program: Block | None = None


def _problem(call: Call) -> _Problem | None:
    """Return the problem of a call, or None of one that is no product with constant weights."""
    if 1 not in call.constants or overlaps(call.outputs[0]):
        return None
    found, (y,) = conv_epilogue(call), call.outputs
    first, after, extra = (found[0], [], ()) if found is not None else with_steps(call)
    if first.operator.startswith("conv"):
        extra = [_last(np.broadcast_to(operand, y.shape)) for operand in extra]
        moved, y = _of_windows(first), _last(y)
        if moved is None:
            return None
        first = moved
    if found is not None:
        alone = product_of(_with(first, activation=None), (), ())
        if alone is None:
            return None
        x, w, operands, _ = alone
        epilogue = found[1]
        if epilogue.added is not None and first is not found[0]:
            epilogue = replace(epilogue, added=_last(epilogue.added))
        return _Problem(x, w, y, operands[0] if operands else None, epilogue)
    bias = None
    if first.operator == "linear" and first.attributes.get("bias", False):
        *factors, bias = first.inputs
        first = replace(_with(first, bias=False), inputs=tuple(factors))
    whole = product_of(first, after, extra)
    if whole is None:
        return None
    x, w, operands, nodes = whole
    program = epilogue_program(operands, nodes, y)
    return None if program is None else _Problem(x, w, y, bias, program=program)


def _with(call: Call, **changes: Any) -> Call:
    return replace(call, attributes={**call.attributes, **changes})


def _of_windows(call: Call) -> Call | None:
    """Return a convolution as a product, each row a window whose numbers lie side by side, or None.

    They do in an image of 1x1 windows, and in a sequence whose channels are last.
    """
    (x, w, *rest), (y,), at = call.inputs, call.outputs, call.attributes
    if x.ndim != w.ndim or at["groups"] != 1 or any(at["padding"]) or w.ndim == 5:
        return None
    rows = _last(x)
    if w.ndim == 3:
        (step,), (_, channels, length) = at["stride"], w.shape
        beside = rows.strides[1] == 4 * channels and (channels == 1 or rows.strides[2] == 4)
        if not (beside and is_float32(x)) or at["dilation"] != (1,) or x.shape[2] < length:
            return None
        shape = (*_last(y).shape[:-1], length * channels)
        rows = strided(rows, shape, (rows.strides[0], step * rows.strides[1], 4))
    elif w.shape[2:] != (1, 1):
        return None
    else:
        (down, along), (height, width) = at["stride"], y.shape[2:]
        rows = rows[:, ::down, ::along][:, :height, :width]
    attributes = {"bias": at.get("bias", False), "activation": at.get("activation")}
    inputs = (rows, w.transpose(*range(w.ndim)[:1:-1], 1, 0), *rest)
    return replace(call, operator="linear", attributes=attributes, inputs=inputs)


def _last(array: Array) -> Array:
    """Return a view with channels last."""
    return array.transpose(0, *range(2, array.ndim), 1)


def _across(columns: int) -> int:
    """Return how many columns a part has, so that parts are about equal: a multiple of a panel's.

    Each part costs as much as 16 columns more.
    """
    return min(
        range(_ACROSS, 0, -WIDTH), key=lambda across: -(-columns // across) * (across + LANES)
    )


def _expected(call: Call) -> float:
    """Return what is expected: oneDNN's own blocks are made for registers of 16 lanes.

    Of large weights these here are asked for in time, which no measurement shows that repeats one
    product.
    """
    x, w = call.inputs[:2]
    windows = call.attributes.get("operator", call.operator).startswith("conv")
    deep = (math.prod(w.shape[1:]) if windows else x.shape[-1]) >= 512
    return (0.95 if deep else 1.1) if VECTORS[-1] > 1 else 0.8


@variant(
    ("conv1d", "conv2d", "linear", "matmul", "with_epilogue"),
    "blocked",
    expected=_expected,
    promises=True,
)
def blocked(call: Call) -> Entry | None:
    """Return the entry of a product of many rows with constant weights, with what follows it."""
    problem = _problem(call)
    if problem is None:
        return None
    x, w, y, bias, epilogue, program = problem
    arrays = [x, y] if epilogue.added is None else [x, y, epilogue.added]
    if not is_float32(w, *arrays) or 0 in (x.size, w.size, y.size) or x.ndim < 1:
        return None
    depth, columns = math.prod(w.shape[:-1]), w.shape[-1]
    if (*x.shape, columns) != (*y.shape[:-1], depth, y.shape[-1]):
        return None
    if any(a.strides[-1] != 4 and a.shape[-1] > 1 for a in arrays):
        return None
    rows = y.size // columns
    if rows <= MOST_ROWS:  # which are `panels`'
        return None
    across = _across(columns)
    groups = -(-columns // across)
    parts = -(-rows // _PART)
    while parts * groups < 8 * call.threads and parts * groups % call.threads:
        parts += 1
    each = -(-rows // (parts * ROWS)) * ROWS
    parts = -(-rows // each)
    entries: list[Entry | None] = []
    whole = aligned_array((groups * across,), np.float32, zero=True)
    if bias is not None:
        entries.append(copy(whole[:columns], bias, 1))
    chunks = -(-depth // _DEPTH)
    y_rows = offsets(y)
    block = _BLOCKED.pack(
        rows=rows,
        depth=depth,
        columns=columns,
        parts=parts,
        each=each,
        across=across,
        x=x,
        x_rows=offsets(x),
        y=y,
        y_rows=y_rows,
        added=0 if epilogue.added is None else epilogue.added,
        added_rows=y_rows if epilogue.added is None else offsets(epilogue.added),
        weights=packed(w, ("blocked", WIDTH), lambda w: _packed(held(w), call.threads)),
        bias=whole,
        deep=-(-depth // (chunks * 4)) * 4,
        program=0 if program is None else program,
        before=epilogue.before,
        low=epilogue.low,
        high=epilogue.high,
    )
    entries.append(parallel_for(_parts, block, parts * groups, call.threads))
    return sequence(entries)
