"""Gates of the cell found by architecture search, forward and backward: rows of one step."""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.elementwise.opcodes import get, loop, put
from soapstone.kernels.cpu.recurrent.gates import head, team
from soapstone.kernels.cpu.substrate.lanes import LANES, Lanes
from soapstone.kernels.cpu.substrate.mathematics import sigmoid, tanh
from soapstone.kernels.cpu.substrate.native import native, pack, words
from soapstone.kernels.cpu.substrate.simd import vectorised, where
from soapstone.kernels.entry import Array, Entry

_PRODUCT = 3  # the gate whose two sums are multiplied
_WAYS = ("sigmoid", "relu", "sigmoid", "relu", "tanh", "sigmoid", "tanh", "sigmoid")


def _gate(way: str, x: Lanes) -> Lanes:
    if way == "relu":
        return where(x < 0.0, 0.0, x)
    return sigmoid(x) if way == "sigmoid" else tanh(x)


def _slope(way: str, y: Lanes, grad: Lanes) -> Lanes:
    if way == "relu":
        return where(y > 0.0, grad, 0.0)
    return grad * (y * (1.0 - y)) if way == "sigmoid" else grad * (1.0 - y * y)


# Words after the head: 4 sums of the inputs, 5 of the states (dense), then address and bytes a row
# of 6 c, 8 y, 10 cell, 12 gates, 14 and 16 the factors.


@vectorised
def _row(
    inputs: Lanes,
    states: Lanes,
    c: Lanes,
    y: Lanes,
    cell: Lanes,
    gates: Lanes,
    left: Lanes,
    right: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        made = []
        for k, way in enumerate(_WAYS):
            a, b = get(inputs, at + h * k, width, mask), get(states, at + h * k, width, mask)
            if k == _PRODUCT:
                put(left, at, a, mask)
                put(right, at, b, mask)
            made.append(_gate(way, a * b if k == _PRODUCT else a + b))
            put(gates, at + h * k, made[k], mask)
        inner = tanh(tanh(made[0] * made[1]) + get(c, at, width, mask))
        new = inner * tanh(made[2] + made[3])
        put(cell, at, new, mask)
        outer = tanh(tanh(made[4] * made[5]) + sigmoid(made[6] + made[7]))
        put(y, at, tanh(new * outer), mask)

    loop(n.builder, n, body, LANES)


@native("body")
def _forward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    h = w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        wide = (row * 8 * h + first) * 4
        _row(
            w[4] + wide,
            w[5] + wide,
            w[6] + row * w[7] + first * 4,
            w[8] + row * w[9] + first * 4,
            w[10] + row * w[11] + first * 4,
            w[12] + row * w[13] + first * 4,
            w[14] + row * w[15] + first * 4,
            w[16] + row * w[17] + first * 4,
            h,
            min(w[2], h - first),
        )
    return 0


def forward(
    inputs: Array, states: Array, c: Array, results: tuple[Array, ...], threads: int
) -> Entry:
    """Return the entry of one step. results: y, cell, gates and both factors."""
    rows, width = c.shape
    ends = [(array, array.strides[0]) for array in (c, *results)]
    block = pack(head(width), inputs, states, ends)
    return team(_forward, block, rows, width, threads)


# Words after the head, address and bytes a row of each: 4 dy, 6 dcell, 8 gates, 10 and 12 the
# factors, 14 c, 16 the inputs' gradient, 18 the states', 20 dc.


@vectorised
def _grad_row(
    dy: Lanes,
    dcell: Lanes,
    gates: Lanes,
    left: Lanes,
    right: Lanes,
    c: Lanes,
    dinputs: Lanes,
    dstates: Lanes,
    dc: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        each = [get(gates, at + h * k, width, mask) for k in range(8)]
        first, second = tanh(each[0] * each[1]), tanh(each[2] + each[3])
        third, fourth = tanh(each[4] * each[5]), sigmoid(each[6] + each[7])
        inner, outer = tanh(first + get(c, at, width, mask)), tanh(third + fourth)
        cell = inner * second
        grad = _slope("tanh", tanh(cell * outer), get(dy, at, width, mask))
        grad_cell = get(dcell, at, width, mask) + grad * outer
        dinner = _slope("tanh", inner, grad_cell * second)
        dsecond = _slope("tanh", second, grad_cell * inner)
        douter = _slope("tanh", outer, grad * cell)
        dfirst, dthird = _slope("tanh", first, dinner), _slope("tanh", third, douter)
        dfourth = _slope("sigmoid", fourth, douter)
        put(dc, at, dinner, mask)
        made = (
            *(dfirst * each[1], dfirst * each[0], dsecond, dsecond),
            *(dthird * each[5], dthird * each[4], dfourth, dfourth),
        )
        for k, way in enumerate(_WAYS):
            part = _slope(way, each[k], made[k])
            a, b = part, part
            if k == _PRODUCT:
                a, b = part * get(right, at, width, mask), part * get(left, at, width, mask)
            put(dinputs, at + h * k, a, mask)
            put(dstates, at + h * k, b, mask)

    loop(n.builder, n, body, LANES)


@native("body")
def _backward(block: Any, begin: int, end: int) -> int:
    w = words(block)
    h = w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        _grad_row(
            w[4] + row * w[5] + first * 4,
            w[6] + row * w[7] + first * 4,
            w[8] + row * w[9] + first * 4,
            w[10] + row * w[11] + first * 4,
            w[12] + row * w[13] + first * 4,
            w[14] + row * w[15] + first * 4,
            w[16] + row * w[17] + first * 4,
            w[18] + row * w[19] + first * 4,
            w[20] + row * w[21] + first * 4,
            h,
            min(w[2], h - first),
        )
    return 0


def backward(operands: tuple[Array, ...], threads: int) -> Entry:
    """Return the entry of the gradients of one step, of operands in the words' order."""
    rows, width = operands[0].shape
    block = pack(head(width), [(array, array.strides[0]) for array in operands])
    return team(_backward, block, rows, width, threads)
