"""Products of one to four rows with constant weights, which read the weights at memory's speed.

So few rows use each weight once or a few times, so time is what memory takes to deliver them. They
are packed into panels of 64 columns, in the order in which a thread reads them: each thread goes
through one contiguous piece of memory. What follows, bias included, is a program of the elementwise
machine that runs on a panel's results at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.programs import Node
from soapstone.kernels.cpu.products.forms import MOST_ROWS, Form
from soapstone.kernels.cpu.products.panels_lanes import READINGS, panel_product
from soapstone.kernels.cpu.products.row_epilogue import (
    epilogue_program,
    offsets,
    product_of,
    run_epilogue,
    with_steps,
)
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.measure import fastest, of_computer
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy, copy_now
from soapstone.native.entries import native, sequence
from soapstone.native.intrinsics import stack
from soapstone.native.memory import Address, Block, address, aligned_array, pack
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for, useful_threads

_WIDTHS = (64, 32, 16)  # columns of a panel; the last may be cut into narrower ones
_USUAL = list(READINGS).index("farther")  # where nothing is measured
_PIECES, _COLUMNS, _DEPTH = 8, 2048, 1024  # of the weights that are read to measure: 64 MB


# cuts: first column and width of each panel; x: addresses of its rows; program: what follows;
# reading: see `READINGS`.
_PANELS = Fields("rows depth columns cuts weights x program reading")
_CUT = Fields("column width")
_panels_of, _cut_of = _PANELS.at, _CUT.at
_CUT_BYTES = 8 * _CUT.words


@native("body")
def _panels(block: Any, begin: int, end: int) -> int:
    w = _panels_of(block)
    rows, depth, columns = w.rows, w.depth, w.columns
    product = stack(1024)
    for panel in range(begin, end):
        cut = _cut_of(w.cuts + panel * _CUT_BYTES)
        column, width = cut.column, cut.width
        weights = w.weights + column * depth * 4
        panel_product(rows, width // 16, w.x, depth, weights, product, w.reading)
        for row in range(rows):
            some = min(width, columns - column)
            run_epilogue(w.program, row, product + row * 256, column, some)
    return 0


# ------------------------------------------------------------------------------------- the weights
def _packed(w: Array, width: int, threads: int) -> Array:
    """Return the weights in panels."""
    w = held(w)
    depth, columns = w.shape
    made = aligned_array((_ceil(columns, 16) * 16 * depth,), np.float32)
    whole = columns // width
    if whole:
        panels = made[: whole * width * depth].reshape(whole, depth, width)
        parts = w[:, : whole * width].reshape(depth, whole, width)
        copy_now(panels.transpose(1, 0, 2), parts, threads)
    for column, wide in _cuts(columns, width)[whole:]:
        panel = made[column * depth : (column + wide) * depth].reshape(depth, wide)
        part = w[:, column : column + wide]
        panel[:, : part.shape[1]] = part
        panel[:, part.shape[1] :] = 0.0
    return made


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def _cuts(columns: int, width: int) -> list[tuple[int, int]]:
    """Return the first column and the width of each panel; the last ones are narrower."""
    cuts = []
    column = 0
    while column < columns:
        stop, wide = min(columns, column // width * width + width), width
        while wide >= 32 and stop - column <= wide // 2:
            wide //= 2
        if wide == 64 and stop - column <= 48:
            wide = 32
        cuts.append((column, wide))
        column += wide
    return cuts


# ---------------------------------------------------------------------------------------- the calls
def _bind(
    x: Array, w: Array, operands: Sequence[Array], nodes: Sequence[Node], y: Array, threads: int
) -> Entry | None:
    """Return the entry of the nodes on x @ w and the operands, or None where unserved.

    w never changes. The nodes number the product 0, then the operands, then themselves.
    """
    rows = y.size // max(1, y.shape[-1]) if y.ndim else 0
    if not is_float32(x, w, y, *operands) or w.ndim != 2:
        return None
    if not 1 <= rows <= MOST_ROWS or x.ndim < 1 or 0 in (x.size, w.size):
        return None
    if x.shape[-1] != w.shape[0] or y.shape != (*x.shape[:-1], w.shape[1]):
        return None
    if y.strides[-1] != 4 and y.shape[-1] > 1:
        return None
    program = epilogue_program(operands, nodes, y)
    if program is None:
        return None
    entries: list[Entry | None] = []
    if x.strides[-1] != 4 and x.shape[-1] > 1:
        dense = aligned_array(x.shape, np.float32)
        entries.append(copy(dense, x, threads))
        x = dense
    entries.append(_entry(x, w, program, threads))
    return sequence(entries)


def _entry(x: Array, w: Array, program: Block, threads: int) -> Entry:
    depth, columns = w.shape
    threads = useful_threads(threads, w.nbytes)
    # The threads' shares should be equal, and wide panels are better.
    width = min(_WIDTHS, key=lambda wide: _ceil(_ceil(columns, wide), threads) * wide)
    # A network may use its weights at many steps; they must not come from memory at each.
    weights = packed(w, ("panels", width), lambda w: _packed(w, width, threads))
    cuts = _cuts(columns, width)
    block = _PANELS.pack(
        rows=x.size // depth,
        depth=depth,
        columns=columns,
        cuts=pack([_CUT.row(column=column, width=wide) for column, wide in cuts]),
        weights=weights,
        x=pack(_rows(x)),
        program=program,
        reading=reading_of(threads),
    )
    return parallel_for(_panels, block, len(cuts), threads)


def reading_of(threads: int) -> int:
    """Return the place of the best of `READINGS`, as this computer's memory was measured.

    Processors differ: one delivers twice as much of what is asked for early, another half.
    """
    of = f"panels by {threads} threads"
    times = of_computer(of, __name__, lambda: _readings(threads))
    return _USUAL if times is None else _best(tuple(times.items()))


@lru_cache(maxsize=16)
def _best(times: tuple[tuple[str, float], ...]) -> int:
    """Return the place of the best of `READINGS` by times of each, in microseconds."""
    least = {n: min(us for name, us in times if name.startswith(n)) for n in READINGS}
    return list(READINGS).index(fastest(least, list(READINGS)))


def _readings(threads: int) -> dict[str, Entry]:
    """Return entries that read pieces of more weights than caches hold, for each of `READINGS`.

    Each takes so little time that some run is not disturbed. In turns, none finds in a cache what
    another has just read.
    """
    weights = np.ones((_PIECES, _COLUMNS, _DEPTH), np.float32)
    cuts = _cuts(_COLUMNS, 64)
    given = {
        "rows": 1,
        "depth": _DEPTH,
        "columns": _COLUMNS,
        "cuts": pack([_CUT.row(column=column, width=width) for column, width in cuts]),
        "x": pack(_rows(np.ones((1, _DEPTH), np.float32))),
        "program": epilogue_program([], [], np.empty((1, _COLUMNS), np.float32)),
    }
    made = {}
    for turn in range(_PIECES):
        for number, name in enumerate(READINGS):
            piece = (turn + number * _PIECES // len(READINGS)) % _PIECES
            block = _PANELS.pack(**given, weights=weights[piece], reading=number)
            made[f"{name} {piece}"] = parallel_for(_panels, block, len(cuts), threads)
    return made


def _rows(array: Array) -> list[Address]:
    """Return the addresses of the array's rows, padded to the most there can be."""
    places = [address(array, int(offset)) for offset in offsets(array)]
    return places + [address(array)] * (MOST_ROWS - len(places))


class Weights:
    """Constant weights as the right operand of products of few rows, as parts of larger entries.

    rest: the form that serves products of more rows.
    """

    def __init__(self, array: Array, threads: int, constant: bool = False, *, rest: Form) -> None:
        self.prepare: list[Entry] = []
        self._array, self._threads = array, threads
        self._rest = rest(array, threads, constant) if constant else None

    def product(self, a: Array, y: Array, bias: Array | None = None) -> Entry | None:
        """Return the entry of y = a b + bias, or None where the weights may change."""
        if self._rest is None:
            return None
        if len(a) > MOST_ROWS:
            return self._rest.product(a, y, bias)
        operands = [] if bias is None else [bias]
        nodes: list[Node] = [("add", (0, 1), {}) for _ in operands]
        return _bind(a, self._array, operands, nodes, y, self._threads)


def _of_pixels(call: Call) -> Call | None:
    """Return a convolution of images of one pixel, by windows of one, as a product, or None."""
    (x, w, *rest), at = call.inputs, call.attributes
    if at["groups"] != 1 or any(at["padding"]) or {*x.shape[2:], *w.shape[2:]} != {1}:
        return None
    attributes = {"bias": at.get("bias", False), "activation": at.get("activation")}
    inputs = (x[:, :, 0, 0], w[:, :, 0, 0].T, *rest)
    return replace(call, operator="linear", attributes=attributes, inputs=inputs)


@variant(("conv2d", "linear", "matmul", "with_epilogue"), "panels", expected=0.6, promises=True)
def product(call: Call) -> Entry | None:
    """Return the entry of a product of few rows with constant weights, with the steps on it."""
    if 1 not in call.constants:
        return None
    (first, after, extra), y = with_steps(call), call.outputs[0]
    if first.operator == "conv2d":
        extra = [np.broadcast_to(operand, y.shape)[:, :, 0, 0] for operand in extra]
        moved, y = _of_pixels(first), y[:, :, 0, 0]
        if moved is None:
            return None
        first = moved
    found = product_of(first, after, extra)
    return None if found is None else _bind(*found, y, call.threads)
