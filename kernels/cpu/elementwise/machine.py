"""The element-wise machine: any chain of element-wise operators in one pass over memory.

A chain is a small program (see `lane_loops`) run over chunks that stay in the first-level cache,
so a fused chain costs what its inputs and outputs cost to stream, and needs no compilation.
Operands may be strided and broadcast in any way; what is not contiguous is packed chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.dtypes import name_of
from soapstone.ir.spec import having
from soapstone.kernels.cpu.elementwise.conversions import (
    ITEM_BYTES,
    KINDS,
    pack_rows,
    read_number,
    unpack_rows,
)
from soapstone.kernels.cpu.elementwise.integers import chain
from soapstone.kernels.cpu.elementwise.lane_loops import WIDE, fill_floats
from soapstone.kernels.cpu.elementwise.long_sums import MOST, Split, split
from soapstone.kernels.cpu.elementwise.programs import Node, Program, compile_program
from soapstone.kernels.cpu.elementwise.steps import run_steps, step_rows
from soapstone.kernels.cpu.elementwise.tables import by_table
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import native, noop, sequence
from soapstone.native.intrinsics import i64p, stack, words
from soapstone.native.memory import Scratch, aligned_array, pack
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import in_places, memory_order, walk

_DIRECT, _SPLAT, _PACK = 0, 1, 2
_MAX_OUTER, _MAX_REGISTERS = 8, 60
_REGISTER_FLOATS = 6144  # of registers, in all: 24 KB of a 32 KB cache
_STAGGER = 32  # between registers, which would else compete for the same sets of the cache
_SHORT_ROW = 256  # rows shorter than this are packed several to a chunk

# group, columns: rows and columns of a chunk; spacing: floats from register to register; outer:
# dims outside the rows, of such extents; records: of the externals, each followed by its strides
# along those.
_MACHINE = Fields(
    "externals steps length rows group columns outer spacing extents records width program"
    " registers"
)
# inner, down: strides along a row and from row to row; kind: how it is reached; slot: of the
# register it is packed in; item: bytes an element, of a type.
_EXTERNAL = Fields("place inner down kind slot written type item")
_machine_of, _external_of, _strides_of = _MACHINE.at, _EXTERNAL.at, _EXTERNAL.table


@native("body")
def _machine(block: Any, begin: int, end: int) -> int:
    w = _machine_of(block)
    externals, outer, spacing = w.externals, w.outer, w.spacing
    length, rows, rows_a_chunk, columns_a_chunk = w.length, w.rows, w.group, w.columns
    extents, records, width = i64p(w.extents), w.records, w.width
    registers = stack(24576)
    place = words(stack(1536))
    filled = words(stack(1536))
    reach = words(stack(1536))
    turn = words(stack(1536))
    counter = words(stack(64))
    frame = stack(128)
    for r in range(w.registers):
        place[externals + r] = registers + r * spacing * 4
        turn[externals + r] = -1
    for e in range(externals):
        turn[e] = 0 if _external_of(records + e * width).kind == _SPLAT else -1
        filled[e] = 0
    column_chunks = (length + columns_a_chunk - 1) // columns_a_chunk
    row_chunks = (rows + rows_a_chunk - 1) // rows_a_chunk
    column = begin % column_chunks
    rest = begin // column_chunks
    row = rest % row_chunks
    rest = rest // row_chunks
    for d in range(outer - 1, -1, -1):
        counter[d] = rest % extents[d]
        rest = rest // extents[d]
    for _ in range(begin, end):
        r0 = row * rows_a_chunk
        c0 = column * columns_a_chunk
        nr = min(rows_a_chunk, rows - r0)
        nc = min(columns_a_chunk, length - c0)
        n = nr * nc
        for e in range(externals):
            x, strides = _external_of(records + e * width), _strides_of(records + e * width)
            inner, down = x.inner, x.down
            address = x.place + r0 * down + c0 * inner
            for d in range(outer):
                address += counter[d] * strides[d]
            if x.kind == _DIRECT:
                place[e] = address
            else:
                target = registers + x.slot * spacing * 4
                place[e] = target
                if x.written != 0:
                    filled[e] = address
                elif x.kind == _SPLAT:
                    if filled[e] != address:
                        fill_floats(target, read_number(x.type, address), WIDE)
                        filled[e] = address
                elif down != 0 or filled[e] != address or reach[e] < n:
                    # Rows that repeat one another are packed once.
                    pack_rows(x.type, x.item, target, address, inner, down, nr, nc)
                    filled[e] = address
                    reach[e] = n
        run_steps(w.program, w.steps, frame, place, turn, n)
        for e in range(externals):
            x = _external_of(records + e * width)
            if x.written != 0 and x.kind != _DIRECT:
                unpack_rows(x.type, x.item, filled[e], place[e], x.inner, x.down, nr, nc)
        column += 1
        if column == column_chunks:
            column = 0
            row += 1
            if row == row_chunks:
                row = 0
                for d in range(outer - 1, -1, -1):
                    counter[d] += 1
                    if counter[d] < extents[d]:
                        break
                    counter[d] = 0
    return 0


def _capacity(registers: int) -> int:
    """How many floats a chunk holds when that many registers share the cache."""
    if registers == 0:
        return 4096
    most = 1024 if registers <= 2 else 512
    return min(most, (_REGISTER_FLOATS // registers - _STAGGER) // 16 * 16)


def _kind(strides: Sequence[int], length: int, floats: bool, many: bool) -> int:
    """How a chunk of the operand is reached; strides: (..., row, inner)."""
    down, inner = strides[-2], strides[-1]
    if floats and inner == 4 and (not many or down == 4 * length):
        return _DIRECT
    if inner == 0 and (not many or down == 0):
        return _SPLAT
    return _PACK


def _order_apart(
    inputs: Sequence[Array], outputs: Sequence[Array], strides: Sequence[Sequence[int]]
) -> Sequence[int] | None:
    """Return the axes of inputs as all of them lie in memory, where a narrow output lies otherwise.

    Results are then narrowed along the inputs, and copied: each by itself would take longer.
    strides: of all, from row to row and along a row of the output.
    """
    whole = [(x, s[-1]) for x, s in zip(inputs, strides) if x.shape == outputs[0].shape]
    orders = [memory_order(x.strides) for x, _ in whole]
    if len(outputs) > 1 or outputs[0].itemsize >= 4 or not whole:
        return None
    dense = all(x.transpose(orders[0]).flags.c_contiguous for x, _ in whole)
    return orders[0] if dense and all(step > x.itemsize for x, step in whole) else None


def bind_program(
    program: Program, inputs: Sequence[Array], outputs: Sequence[Array], threads: int
) -> Entry | None:
    """Return the entry that runs the program on the arrays, or None where the machine cannot.

    inputs: broadcastable to the outputs; outputs: of one shape; of the program's types. An output
    may be an input in place, with the same strides.
    """
    shape = outputs[0].shape
    held = zip(program.types, (*inputs, *outputs), strict=True)
    if any(name_of(a.dtype) != kind or not a.flags.aligned for kind, a in held):
        return None
    if any(o.shape != shape for o in outputs):
        return None
    if np.broadcast_shapes(shape, *(a.shape for a in inputs)) != shape:
        return None
    if outputs[0].size == 0:
        return noop()
    arrays = [*inputs, *outputs]
    made = walk(shape, arrays, lead=len(inputs))
    extents = made.extents if made.rank > 1 else (1, *made.extents)
    strides = [s if made.rank > 1 else (0, *s) for s in made.strides]
    order = _order_apart(inputs, outputs, strides)
    if order is not None:
        (output,) = outputs
        room = aligned_array(tuple(shape[axis] for axis in order), output.dtype).view(Scratch)
        beside = in_places(room, order)
        first = bind_program(program, inputs, [beside], threads)
        return sequence([first, copy(output, beside, threads)]) if first is not None else None
    outer, rows, length = extents[:-2], extents[-2], extents[-1]
    most = len(arrays) + program.registers
    if len(outer) > _MAX_OUTER or most > _MAX_REGISTERS:
        return None
    many = rows > 1 and length < _SHORT_ROW and 2 * length <= _capacity(most)
    floats = [kind == "float32" for kind in program.types]
    kinds = [_kind(s, length, real, many) for s, real in zip(strides, floats)]
    for i, last in enumerate(program.read):
        if last < 0:
            kinds[i] = _DIRECT  # never read: nothing to prepare
    # An output written before an input that it lies over is last read is written back at the end.
    for o, output in enumerate(outputs):
        for i, x in enumerate(inputs):
            if program.read[i] > program.written[o] and np.may_share_memory(output, x):
                kinds[len(inputs) + o] = _PACK
    packed = [e for e, kind in enumerate(kinds) if kind != _DIRECT]
    registers = len(packed) + program.registers
    capacity = _capacity(registers)
    rows_a_chunk = min(rows, capacity // length) if many else 1
    columns_a_chunk = length if many else min(length, capacity)

    slots = {e: slot for slot, e in enumerate(packed)}
    first_register = len(arrays) + len(packed)

    def place(number: int) -> int:
        return number if number >= 0 else first_register - 1 - number

    records = [
        (
            _EXTERNAL.row(
                place=a,
                inner=s[-1],
                down=s[-2],
                kind=kinds[e],
                slot=slots.get(e, 0),
                written=e >= len(inputs),
                type=KINDS[kind],
                item=ITEM_BYTES[kind],
            ),
            s[:-2],
        )
        for e, (a, s, kind) in enumerate(zip(arrays, strides, program.types))
    ]
    block = _MACHINE.pack(
        externals=len(arrays),
        steps=len(program.steps),
        length=length,
        rows=rows,
        group=rows_a_chunk,
        columns=columns_a_chunk,
        outer=len(outer),
        spacing=capacity + _STAGGER,
        extents=pack(outer),
        records=pack(records),
        width=8 * (_EXTERNAL.words + len(outer)),
        program=pack(step_rows(program, place)),
        registers=registers,
    )
    chunks = -(-length // columns_a_chunk) * -(-rows // rows_a_chunk) * math.prod(outer)
    # Arithmetic in the cache costs less than memory traffic: one thread does up to 100 KB.
    nbytes = 4 * outputs[0].size * (len(arrays) + program.weight)
    return parallel_for(_machine, block, chunks, useful_threads(threads, nbytes // 3))


OPERATORS = (*having("formula"), "cast", "accumulate")


@variant(OPERATORS, "numba", promises=True)
def elementwise(call: Call) -> Entry | None:
    """One element-wise operator, as a program of one node."""
    operands = tuple(range(len(call.inputs)))
    return _bind(call, [(call.operator, operands, call.attributes)], (len(operands),))


@variant("fused_elementwise", "numba", promises=True)
def fused_elementwise(call: Call) -> Entry | None:
    """A chain of element-wise operators in one pass."""
    nodes: list[Node] = [
        (operator, tuple(operands), dict(attributes))
        for operator, operands, attributes in call.attributes["program"]
    ]
    return _bind(call, nodes, tuple(call.attributes["results"]))


def _bind(call: Call, nodes: Sequence[Node], results: Sequence[int]) -> Entry | None:
    if len(call.inputs) > MOST and all(array.dtype == np.float32 for array in call.inputs):
        return _bind_split(call, split(len(call.inputs), nodes, results))
    return _bind_program(call, nodes, results)


def _bind_split(call: Call, made: Split) -> Entry | None:
    """Return the entry of a program and of the sums before it, each in memory of its own."""
    parts: list[Array] = []
    entries: list[Entry | None] = []

    def of(keys: Sequence[int]) -> tuple[Array, ...]:
        return tuple(parts[-1 - key] if key < 0 else call.inputs[key] for key in keys)

    for keys in made.sums:
        operands = of(keys)
        part = aligned_array(np.broadcast_shapes(*(each.shape for each in operands)), np.float32)
        own = replace(call, inputs=operands, outputs=(part,), constants=frozenset())
        summed: Node = ("accumulate", tuple(range(len(operands))), {})
        entries.append(_bind_program(own, [summed], (len(operands),)))
        parts.append(part)
    constants = frozenset(n for n, key in enumerate(made.inputs) if key in call.constants)
    rest = replace(call, inputs=of(made.inputs), constants=constants)
    entries.append(_bind_program(rest, made.nodes, made.results))
    return sequence(entries)


def _bind_program(call: Call, nodes: Sequence[Node], results: Sequence[int]) -> Entry | None:
    types = [name_of(array.dtype) for array in call.inputs]
    known = {
        i: float(call.inputs[i].reshape(()))
        for i in call.constants
        if call.inputs[i].size == 1 and types[i] == "float32"
    }
    program = compile_program(len(call.inputs), nodes, results, types, known)
    if program is None:
        return chain(call, nodes, results)
    if len(results) != len(call.outputs):
        return None
    served = call.inputs, call.outputs, call.threads
    return by_table(program, *served, bind_program) or bind_program(program, *served)
