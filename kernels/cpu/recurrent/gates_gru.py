"""Gates of the gated recurrent unit, forward and backward, and the steps of the simple one.

Blocks begin as those of gates.py do: step, width, columns an item, items a row.
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.elementwise.opcodes import get, loop, put
from soapstone.kernels.cpu.recurrent.gates import NARROW, head, place, team
from soapstone.kernels.cpu.substrate.lanes import Lanes
from soapstone.kernels.cpu.substrate.mathematics import sigmoid, tanh
from soapstone.kernels.cpu.substrate.native import Block, native, pack, words
from soapstone.kernels.cpu.substrate.simd import vectorised
from soapstone.kernels.entry import Array, Entry

# gru, the reset gate after the product. Words after the head: 4 inputs' sums (address, steps in the
# buffer, bytes a step), 7 recurrent sums, 8 state, 9 gates, 12 hidden, 15 y (places).


@vectorised
def _linear_row(
    inputs: Lanes,
    sums: Lanes,
    state: Lanes,
    gates: Lanes,
    hidden: Lanes,
    y: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        def total(k: int) -> Lanes:
            return get(inputs, at + h * k, width, mask) + get(sums, at + h * k, width, mask)

        reset, update = sigmoid(total(0)), sigmoid(total(1))
        product = get(sums, at + h * 2, width, mask)
        new = tanh(get(inputs, at + h * 2, width, mask) + reset * product)
        for k, gate in enumerate((reset, update, new)):
            put(gates, at + h * k, gate, mask)
        put(hidden, at, product, mask)
        value = new + update * (get(state, at, width, mask) - new)
        put(state, at, value, mask)
        put(y, at, value, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _linear(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        wide = (row * 3 * h + first) * 4
        _linear_row(
            w[4] + (step % w[5]) * w[6] + wide,
            w[7] + wide,
            w[8] + (row * h + first) * 4,
            w[9] + step * w[10] + row * w[11] + first * 4,
            w[12] + step * w[13] + row * w[14] + first * 4,
            w[15] + step * w[16] + row * w[17] + first * 4,
            h,
            min(w[2], h - first),
        )
    return 0


def linear(
    inputs: Array,
    sums: Array,
    state: Array,
    results: tuple[Array, Array, Array],
    threads: int,
) -> tuple[Block, Entry]:
    """Return the block and the entry of one step, the reset gate after the product.

    inputs: (steps, n, 3h) sums of x w + b; sums: (n, 3h) of h r + rb; results: gates, hidden, y.
    """
    rows, width = state.shape
    stretch = (inputs, len(inputs), inputs.strides[0])
    block = pack(head(width), stretch, sums, state, [place(array) for array in results])
    return block, team(_linear, block, rows, width, threads)


# gru, the reset gate before the product: the same words, then 18 whether the second half, 19 the
# scaled state. Sums: (n, 2h) of the first two gates, or (n, h) of the third.


@vectorised
def _first_row(
    inputs: Lanes,
    sums: Lanes,
    state: Lanes,
    gates: Lanes,
    hidden: Lanes,
    scaled: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        def total(k: int) -> Lanes:
            return get(inputs, at + h * k, width, mask) + get(sums, at + h * k, width, mask)

        reset, update = sigmoid(total(0)), sigmoid(total(1))
        put(gates, at, reset, mask)
        put(gates, at + h, update, mask)
        value = reset * get(state, at, width, mask)
        put(hidden, at, value, mask)
        put(scaled, at, value, mask)

    loop(n.builder, n, body, NARROW)


@vectorised
def _second_row(
    inputs: Lanes, sums: Lanes, state: Lanes, gates: Lanes, y: Lanes, h: Lanes, n: Lanes
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        new = tanh(get(inputs, at + h * 2, width, mask) + get(sums, at, width, mask))
        put(gates, at + h * 2, new, mask)
        value = new + get(gates, at + h, width, mask) * (get(state, at, width, mask) - new)
        put(state, at, value, mask)
        put(y, at, value, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _halves(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        inputs = w[4] + (step % w[5]) * w[6] + (row * 3 * h + first) * 4
        gates = w[9] + step * w[10] + row * w[11] + first * 4
        narrow = (row * h + first) * 4
        n = min(w[2], h - first)
        if w[18] == 0:
            hidden = w[12] + step * w[13] + row * w[14] + first * 4
            sums = w[7] + (row * 2 * h + first) * 4
            _first_row(inputs, sums, w[8] + narrow, gates, hidden, w[19] + narrow, h, n)
        else:
            y = w[15] + step * w[16] + row * w[17] + first * 4
            _second_row(inputs, w[7] + narrow, w[8] + narrow, gates, y, h, n)
    return 0


def halves(
    inputs: Array,
    sums: tuple[Array, Array],
    state: Array,
    scaled: Array,
    results: tuple[Array, Array, Array],
    threads: int,
) -> list[tuple[Block, Entry]]:
    """Return the blocks and entries of the two halves of one step, the reset gate first."""
    rows, width = state.shape
    stretch = (inputs, len(inputs), inputs.strides[0])
    places = [place(array) for array in results]
    made = []
    for second, part in enumerate(sums):
        block = pack(head(width), stretch, part, state, places, second, scaled)
        made.append((block, team(_halves, block, rows, width, threads)))
    return made


# gru backward, the reset gate after the product. Words after the head: 4 dy, 7 gates, 10 hidden,
# 13 before, 16 dgates, 19 dproduct (places), 22 dense dproduct, 23 the gradient of the state that
# went past the product, 24 that which went through it.


@vectorised
def _grad_row(
    dy: Lanes,
    gates: Lanes,
    hidden: Lanes,
    before: Lanes,
    out: Lanes,
    product: Lanes,
    dense: Lanes,
    past: Lanes,
    through: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        reset, update, new = (get(gates, at + h * k, width, mask) for k in range(3))
        dh = get(dy, at, width, mask) + get(past, at, width, mask) + get(through, at, width, mask)
        dnew = dh * (1.0 - update) * (1.0 - new * new)
        dupdate = dh * (get(before, at, width, mask) - new) * (update * (1.0 - update))
        dreset = dnew * get(hidden, at, width, mask) * (reset * (1.0 - reset))
        put(past, at, dh * update, mask)
        for k, part in enumerate((dreset, dupdate, dnew)):
            put(out, at + h * k, part, mask)
        for k, part in enumerate((dreset, dupdate, dnew * reset)):
            put(product, at + h * k, part, mask)
            put(dense, at + h * k, part, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        narrow = (row * h + first) * 4
        _grad_row(
            w[4] + step * w[5] + row * w[6] + first * 4,
            w[7] + step * w[8] + row * w[9] + first * 4,
            w[10] + step * w[11] + row * w[12] + first * 4,
            w[13] + step * w[14] + row * w[15] + first * 4,
            w[16] + step * w[17] + row * w[18] + first * 4,
            w[19] + step * w[20] + row * w[21] + first * 4,
            w[22] + (row * 3 * h + first) * 4,
            w[23] + narrow,
            w[24] + narrow,
            h,
            min(w[2], h - first),
        )
    return 0


def linear_grad(
    given: tuple[Array, Array, Array, Array],
    made: tuple[Array, Array],
    dense: Array,
    ends: tuple[Array, Array],
    threads: int,
) -> tuple[Block, Entry]:
    """Return the block and the entry of one step, backward, the reset gate after the product.

    given: dy, gates, hidden, before; made: dgates, dproduct; dense: dproduct of this step; ends:
    the two parts of the state's gradient (n, h), of which the first is updated.
    """
    rows, width = ends[0].shape
    places = [place(array) for array in (*given, *made)]
    block = pack(head(width), places, dense, ends)
    return block, team(_grad, block, rows, width, threads)


# sru. An item goes through all steps. Words after the head: 4 steps, 5 first, 6 stride, 7 columns
# of h in gates, 8 biases, 9 cell, then places: 10 gates, 13 highway, 16 cells, 19 y.


@vectorised
def _sru_row(
    gates: Lanes,
    bias: Lanes,
    highway: Lanes,
    cell: Lanes,
    cells: Lanes,
    y: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        new = get(gates, at, width, mask)
        forget, reset = (
            sigmoid(get(gates, at + h * k, width, mask) + get(bias, at + h * (k - 1), width, mask))
            for k in (1, 2)
        )
        put(gates, at + h, forget, mask)
        put(gates, at + h * 2, reset, mask)
        now = new + forget * (get(cell, at, width, mask) - new)
        put(cell, at, now, mask)
        put(cells, at, now, mask)
        past = get(highway, at, width, mask)
        put(y, at, past + reset * (now - past), mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _sru(block: Any, begin: int, end: int) -> int:
    w = words(block)
    h = w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        for turn in range(w[4]):
            step = w[5] + turn * w[6]
            _sru_row(
                w[10] + step * w[11] + row * w[12] + first * 4,
                w[8] + first * 4,
                w[13] + step * w[14] + row * w[15] + first * 4,
                w[9] + (row * h + first) * 4,
                w[16] + step * w[17] + row * w[18] + first * 4,
                w[19] + step * w[20] + row * w[21] + first * 4,
                h,
                min(w[2], h - first),
            )
    return 0


def sru(
    places: tuple[Array, Array, Array, Array],
    bias: Array,
    cell: Array,
    order: tuple[int, int],
    threads: int,
) -> Entry:
    """Return the entry of all steps. places: gates (x w, replaced), highway, cells, y."""
    rows, width = cell.shape
    steps = len(places[0])
    block = pack(head(width), steps, order, 0, bias, cell, [place(array) for array in places])
    return team(_sru, block, rows, width, threads)


# sru backward. Words after the head: 4 steps, 5 first (backward), 6 stride, 7 c0, 8 its bytes a
# row, 9 gradient of the cell, then places: 10 dy, 13 gates, 16 cells, 19 highway, 22 dgates,
# 25 gradient of the highway.


@vectorised
def _sru_grad_row(
    dy: Lanes,
    gates: Lanes,
    cell: Lanes,
    before: Lanes,
    highway: Lanes,
    out: Lanes,
    direct: Lanes,
    dcell: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        new, forget, reset = (get(gates, at + h * k, width, mask) for k in range(3))
        dh = get(dy, at, width, mask)
        put(direct, at, dh * (1.0 - reset), mask)
        kept = get(cell, at, width, mask) - get(highway, at, width, mask)
        put(out, at + h * 2, dh * kept * (reset * (1.0 - reset)), mask)
        dc = get(dcell, at, width, mask) + dh * reset
        moved = dc * (get(before, at, width, mask) - new)
        put(out, at + h, moved * (forget * (1.0 - forget)), mask)
        put(out, at, dc * (1.0 - forget), mask)
        put(dcell, at, dc * forget, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _sru_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    h = w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        for turn in range(w[4]):
            step = w[5] + turn * w[6]
            before = w[7] + row * w[8]
            if turn + 1 < w[4]:
                before = w[16] + (step + w[6]) * w[17] + row * w[18]
            _sru_grad_row(
                w[10] + step * w[11] + row * w[12] + first * 4,
                w[13] + step * w[14] + row * w[15] + first * 4,
                w[16] + step * w[17] + row * w[18] + first * 4,
                before + first * 4,
                w[19] + step * w[20] + row * w[21] + first * 4,
                w[22] + step * w[23] + row * w[24] + first * 4,
                w[25] + step * w[26] + row * w[27] + first * 4,
                w[9] + (row * h + first) * 4,
                h,
                min(w[2], h - first),
            )
    return 0


def sru_grad(
    places: tuple[Array, ...], c0: Array, dcell: Array, order: tuple[int, int], threads: int
) -> Entry:
    """Return the entry of all steps, backward, in that order.

    places: dy, gates, cells, highway, dgates, gradient of the highway.
    """
    rows, width = dcell.shape
    ends = (c0, c0.strides[0], dcell)
    steps = len(places[0])
    block = pack(head(width), steps, order, ends, [place(array) for array in places])
    return team(_sru_grad, block, rows, width, threads)
