"""What follows a product in the same entry: a program of the element-wise machine, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.lane_loops import fill_floats
from soapstone.kernels.cpu.elementwise.programs import Node, compile_program
from soapstone.kernels.cpu.elementwise.steps import run_steps, step_rows
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper
from soapstone.native.intrinsics import f32p, stack, words
from soapstone.native.memory import Block, pack

AT_ONCE = 128  # results of a row
_MAX_PLACES = 32  # operands, y and registers of the program
_ROOM = 4 * AT_ONCE  # bytes of a register

# externals: of the program: the product, operands, y; records: of these but the first; steps: the
# program's, at an address.
_PROGRAM = Fields("externals registers records count steps")
# wide: columns lie side by side, else one number serves them all; rows: where each begins.
_EXTERNAL = Fields("wide base rows")
_program_of, _external_of = _PROGRAM.at, _EXTERNAL.at
_EXTERNAL_BYTES = 8 * _EXTERNAL.words


@helper
def run_epilogue(program: int, row: int, product: int, column: int, count: int) -> None:
    """Run the program on `count` results of a row, AT_ONCE at most, from a column on."""
    w = _program_of(program)
    frame, places, turns, room = stack(128), stack(256), stack(256), stack(16384)
    place, turn = words(places), words(turns)
    for e in range(w.externals + w.registers):
        place[e], turn[e] = room + e * _ROOM, -1
    place[0] = product
    for e in range(1, w.externals):
        record = _external_of(w.records + (e - 1) * _EXTERNAL_BYTES)
        at = record.base + words(record.rows)[row]
        if record.wide != 0:
            place[e] = at + column * 4
        else:
            turn[e] = 0
            fill_floats(place[e], f32p(at)[0], AT_ONCE)
    run_steps(w.steps, w.count, frame, place, turn, count)


def epilogue_program(operands: Sequence[Array], nodes: Sequence[Node], y: Array) -> Block | None:
    """Return the program of nodes that number the product 0, then the operands, then themselves.

    y: rows of which the last axis' numbers lie side by side. None where it is unserved.
    """
    program = compile_program(1 + len(operands), nodes, (len(operands) + len(nodes),))
    if program is None or not is_float32(y, *operands):
        return None
    if len(operands) + 2 + program.registers > _MAX_PLACES:
        return None
    try:
        externals = [*(np.broadcast_to(operand, y.shape) for operand in operands), y]
    except ValueError:
        return None
    columns, count = y.shape[-1], len(externals) + 1
    if any(array.strides[-1] not in (0, 4) and columns > 1 for array in externals):
        return None

    def place(number: int) -> int:
        return number if number >= 0 else count - 1 - number

    records = [
        _EXTERNAL.row(wide=a.strides[-1] == 4 or columns == 1, base=a, rows=offsets(a))
        for a in externals
    ]
    return _PROGRAM.pack(
        externals=count,
        registers=program.registers,
        records=pack(records),
        count=len(program.steps),
        steps=pack(step_rows(program, place)),
    )


def offsets(array: Array) -> Array:
    """Return where each row of the last axis begins, in bytes from the first: int64."""
    made: Any = np.zeros((), np.int64)
    for extent, step in zip(array.shape[:-1], array.strides):
        made = made[..., None] + np.arange(extent, dtype=np.int64) * step
    return np.ascontiguousarray(made.reshape(-1))


def product_of(
    call: Call, after: Sequence[Node], extra: Sequence[Array]
) -> tuple[Array, Array, list[Array], list[Node]] | None:
    """Return x, w, operands and nodes of a product of matrices, or None of another operator.

    The product is x @ w; the nodes are its own, then those `after` it, and number as in
    `epilogue_program`. after: nodes that number the result of the call 0, then the extra.
    """
    at = call.attributes
    x, w, *operands = call.inputs
    nodes: list[Node] = []
    if call.operator == "matmul":
        if min(x.ndim, w.ndim) < 2 or w.size != w.shape[-1] * w.shape[-2]:
            return None
        w = w.reshape(w.shape[-2:])
        x = x.swapaxes(-1, -2) if at.get("transpose_a", False) else x
        w = w.swapaxes(-1, -2) if at.get("transpose_b", False) else w
    elif call.operator == "linear":
        if len(operands) != bool(at.get("bias", False)):
            return None
        first = 1 + len(operands) + len(extra)
        if operands:
            nodes.append(("add", (0, 1), {}))
        if at.get("activation") is not None:
            nodes.append((at["activation"], (first if operands else 0,), {}))
    else:
        return None
    before, own = len(operands), len(nodes)

    def number(given: int) -> int:
        if given == 0:
            return before + len(extra) + own if own else 0
        return given + before + (own if given > len(extra) else 0)

    nodes.extend((name, tuple(map(number, given)), at) for name, given, at in after)
    return x, w, [*operands, *extra], nodes


def with_steps(call: Call) -> tuple[Call, list[Node], Sequence[Array]]:
    """Return the call alone, the nodes on its result, which number it 0, and what they read."""
    first, at = call.inner, call.attributes
    if first is call:
        return call, [], ()
    after: list[Node] = [(name, tuple(given), dict(items)) for name, given, items in at["program"]]
    return first, after, call.inputs[at["arity"] :]
