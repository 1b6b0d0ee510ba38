"""Chains of elementwise operators on integers and truths, which float32 does not hold exactly.

A chunk of a row of each operand is read as int64, each step is a loop over the chunk, and results
of 32 bits wrap as NumPy's do. Graphs have few such numbers (lengths, places, masks), so what counts
is that a native step costs less than to ask Python for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import name_of
from soapstone.ir.operations import COMPARISONS
from soapstone.kernels.cpu.elementwise.programs import Node
from soapstone.kernels.entry import Call, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.intrinsics import i32p, i64p, stack, u8p
from soapstone.native.memory import pack
from soapstone.native.moves import row_at
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import walk

_CHUNK = 128
_VALUE_BYTES = 8 * _CHUNK
_MOST = 32  # values of a chain, operands and results of steps: 32 KB
_TYPES = {"bool": 0, "int32": 1, "int64": 2}
_ARITHMETIC = {"add": 2, "sub": 2, "mul": 2, "minimum": 2, "maximum": 2, "neg": 1, "abs": 1}
_STEPS = {n: i for i, n in enumerate(("copy", "truth", "where", *COMPARISONS, *_ARITHMETIC))}
_COPY, _TRUTH, _WHERE, _EQUAL, _LESS, _LESS_EQUAL, _GREATER, _GREATER_EQUAL = range(8)
_ADD, _SUB, _MUL, _MINIMUM, _MAXIMUM, _NEG, _ABS = range(8, 15)

# operands: records of the inputs, then the outputs; length: of a row, in so many chunks. Then the
# walk of the other dims, of `rank`, in all of them.
_CHAIN = Fields("inputs outputs operands count steps length chunks rank")
_OPERAND = Fields("place inner type value")
_STEP = Fields("name to a b c narrow")
_chain_of, _chain_table, _operand_of, _step_of = (
    *(_CHAIN.at, _CHAIN.table),
    *(_OPERAND.at, _STEP.at),
)
_OPERAND_BYTES, _STEP_BYTES = 8 * _OPERAND.words, 8 * _STEP.words


@routine
def _read(to: Any, x: int, step: int, kind: int, n: int) -> None:
    """Read n numbers of a type that lie `step` bytes apart."""
    for i in range(n):
        if kind == 2:
            to[i] = i64p(x + i * step)[0]
        elif kind == 1:
            to[i] = np.int64(i32p(x + i * step)[0])
        else:
            to[i] = np.int64(u8p(x + i * step)[0] != 0)


@routine
def _write(values: Any, y: int, step: int, kind: int, n: int) -> None:
    """The inverse of `_read`."""
    for i in range(n):
        if kind == 2:
            i64p(y + i * step)[0] = values[i]
        elif kind == 1:
            i32p(y + i * step)[0] = np.int32(values[i])
        else:
            u8p(y + i * step)[0] = np.uint8(values[i])


@routine
def _step(name: int, y: Any, a: Any, b: Any, c: Any, n: int) -> None:
    """One step on n numbers."""
    for i in range(n):
        u, v = a[i], b[i]
        if name == _ADD:
            made = u + v
        elif name == _SUB:
            made = u - v
        elif name == _MUL:
            made = u * v
        elif name == _MINIMUM:
            made = min(u, v)
        elif name == _MAXIMUM:
            made = max(u, v)
        elif name == _NEG:
            made = -u
        elif name == _ABS:
            made = u if u >= 0 else -u
        elif name == _WHERE:
            made = v if u != 0 else c[i]
        elif name == _TRUTH:
            made = np.int64(u != 0)
        elif name == _EQUAL:
            made = np.int64(u == v)
        elif name == _LESS:
            made = np.int64(u < v)
        elif name == _LESS_EQUAL:
            made = np.int64(u <= v)
        elif name == _GREATER:
            made = np.int64(u > v)
        elif name == _GREATER_EQUAL:
            made = np.int64(u >= v)
        else:
            made = u
        y[i] = made


@native("body")
def _chain(block: Any, begin: int, end: int) -> int:
    w, table = _chain_of(block), _chain_table(block)
    values = stack(32768)
    for item in range(begin, end):
        row, column = item // w.chunks, item % w.chunks * _CHUNK
        n = min(_CHUNK, w.length - column)
        for e in range(w.inputs):
            x = _operand_of(w.operands + e * _OPERAND_BYTES)
            at = x.place + row_at(table, w.rank, e, row) + column * x.inner
            _read(i64p(values + x.value * _VALUE_BYTES), at, x.inner, x.type, n)
        for number in range(w.count):
            s = _step_of(w.steps + number * _STEP_BYTES)
            to = i64p(values + s.to * _VALUE_BYTES)
            a, b = i64p(values + s.a * _VALUE_BYTES), i64p(values + s.b * _VALUE_BYTES)
            _step(s.name, to, a, b, i64p(values + s.c * _VALUE_BYTES), n)
            if s.narrow != 0:
                for i in range(n):
                    to[i] = np.int64(np.int32(to[i]))
        for e in range(w.inputs, w.inputs + w.outputs):
            y = _operand_of(w.operands + e * _OPERAND_BYTES)
            at = y.place + row_at(table, w.rank, e, row) + column * y.inner
            _write(i64p(values + y.value * _VALUE_BYTES), at, y.inner, y.type, n)
    return 0


def _typed(name: str, types: Sequence[str], attributes: Mapping[str, Any]) -> tuple[str, str]:
    """Return the step of an operator on operands of these types, and its result's type.

    Raises:
        KeyError: there is none.
    """
    same = len(set(types)) == 1
    if name == "cast":
        target = str(attributes["to"])
        return ("truth" if target == "bool" else "copy"), list(_TYPES)[_TYPES[target]]
    if name == "where" and types[0] == "bool" and types[1] == types[2]:
        return name, types[1]
    if name in COMPARISONS and same:
        return name, "bool"
    if _ARITHMETIC.get(name) == len(types) and same and types[0] != "bool":
        return name, types[0]
    raise KeyError(name)


def chain(call: Call, nodes: Sequence[Node], results: Sequence[int]) -> Entry | None:
    """Return the entry of the nodes on integers and truths, or None where other numbers occur.

    nodes: operator, operands and attributes; operands and results number the inputs first, then the
    nodes.
    """
    arrays = [*call.inputs, *call.outputs]
    types = [name_of(array.dtype) for array in call.inputs]
    if len(types) + len(nodes) > _MOST or not all(array.flags.aligned for array in arrays):
        return None
    if not set(types) <= _TYPES.keys():
        return None
    steps = []
    for name, operands, attributes in nodes:
        try:
            step, made = _typed(name, [types[i] for i in operands], attributes)
        except KeyError:
            return None
        a, b, c = (operands[min(i, len(operands) - 1)] for i in range(3))
        narrow = made == "int32" and step != "where"
        steps.append(_STEP.row(name=_STEPS[step], to=len(types), a=a, b=b, c=c, narrow=narrow))
        types.append(made)
    shape = call.outputs[0].shape
    written = [types[result] for result in results]
    if [name_of(y.dtype) for y in call.outputs] != written:
        return None
    if any(y.shape != shape for y in call.outputs):
        return None
    if np.broadcast_shapes(shape, *(x.shape for x in call.inputs)) != shape:
        return None
    if call.outputs[0].size == 0:
        return noop()
    made_walk = walk(shape, arrays, lead=len(call.inputs))
    length = made_walk.extents[-1]
    rows = made_walk.rows
    chunks = -(-length // _CHUNK)
    shown = [*range(len(call.inputs)), *results]
    records = [
        _OPERAND.row(place=array, inner=inner, type=_TYPES[types[value]], value=value)
        for array, inner, value in zip(arrays, made_walk.steps, shown, strict=True)
    ]
    block = _CHAIN.pack(
        rows,
        inputs=len(call.inputs),
        outputs=len(call.outputs),
        operands=pack(records),
        count=len(steps),
        steps=pack(steps),
        length=length,
        chunks=chunks,
        rank=rows.rank,
    )
    nbytes = 8 * call.outputs[0].size * (len(arrays) + len(steps))
    return parallel_for(_chain, block, rows.size * chunks, useful_threads(call.threads, nbytes))
