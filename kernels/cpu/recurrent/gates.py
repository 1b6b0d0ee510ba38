"""Gates of recurrent layers, forward and backward, and the loop over their steps.

A step of a recurrence is a few entries: products, then the gates. `repeat` runs them once a step
and writes the step's number into the first word of the gates' blocks, so that neither blocks nor
entries grow with the number of steps. Gates stand side by side in a row: column j of gate k is at
k h + j. States that the products read and write are dense and private to the entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.kernels.cpu.elementwise.opcodes import copy_floats, get, loop, put
from soapstone.kernels.cpu.substrate.lanes import Lanes
from soapstone.kernels.cpu.substrate.mathematics import sigmoid, tanh
from soapstone.kernels.cpu.substrate.native import (
    Block,
    Native,
    bind,
    call_entry,
    i64p,
    native,
    pack,
    parallel_for,
    useful_threads,
    words,
)
from soapstone.kernels.cpu.substrate.simd import vectorised, where
from soapstone.kernels.entry import Array, Entry

NARROW = 32  # lanes of a formula with many operands
_COLUMNS = 256  # of a row, in one item of work


@native()
def _repeat(block: Any) -> Any:
    w = words(block)
    blocks, entries = w[3], w[4]
    for turn in range(w[0]):
        for k in range(blocks):
            i64p(w[5 + k])[0] = w[1] + turn * w[2]
        for k in range(entries):
            at = 5 + blocks + 2 * k
            status = call_entry(w[at], w[at + 1])
            if status != 0:
                return status
    return 0


def repeat(
    count: int, first: int, stride: int, blocks: Sequence[Block], entries: Sequence[Entry]
) -> Entry:
    """Return the entry that runs the entries `count` times, for steps first, first + stride, ….

    The step's number is written into the first word of each block.
    """
    statuses = {code: text for entry in entries for code, text in entry.statuses.items()}
    head = (count, first, stride, len(blocks), len(entries))
    return bind(_repeat, head, list(blocks), list(entries), statuses=statuses)


@native()
def _copy(block: Any) -> int:
    w = words(block)
    for outer in range(w[0]):
        for row in range(w[1]):
            source = w[3] + outer * w[4] + row * w[5]
            copy_floats(w[6] + outer * w[7] + row * w[8], source, w[2])
    return 0


def copy(source: Array, target: Array) -> Entry:
    """Return the entry that copies rows of contiguous floats, (n, h) or (t, n, h)."""
    if source.ndim == 2:
        source, target = source[None], target[None]
    ends = (source, source.strides[:2], target, target.strides[:2])
    return bind(_copy, source.shape, ends)


@vectorised
def _add_row(to: Lanes, x: Lanes, y: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(x, i, width, mask) + get(y, i, width, mask), mask)

    loop(n.builder, n, body)


@native()
def _add(block: Any) -> int:
    w = words(block)
    for row in range(w[0]):
        _add_row(w[6] + row * w[7], w[2] + row * w[3], w[4] + row * w[5], w[1])
    return 0


def add(x: Array, y: Array, target: Array) -> Entry:
    """Return the entry of target = x + y, by rows (n, h) of contiguous floats."""
    return bind(_add, x.shape, [(array, array.strides[0]) for array in (x, y, target)])


def rows_contiguous(*arrays: Array) -> bool:
    """Whether the last axis of each array is contiguous."""
    return all(a.size == 0 or a.shape[-1] == 1 or a.strides[-1] == a.itemsize for a in arrays)


def team(body: Native, block: Block, rows: int, width: int, threads: int) -> Entry:
    """Return the entry that runs the gates of `rows` rows, some columns of a row an item."""
    items = rows * -(-width // _COLUMNS)
    return parallel_for(body, block, items, useful_threads(threads, 64 * rows * width))


def head(width: int) -> tuple[int, ...]:
    """Return the first words of a gates' block: step, width, columns an item, items a row."""
    return (0, width, min(width, _COLUMNS), -(-width // _COLUMNS))


def place(array: Array) -> tuple[Any, ...]:
    """Return the three words of an array (t, n, …): address, bytes a step, bytes a row."""
    return (array, array.strides[0], array.strides[1])


# lstm. Words after the head: 4 inputs' sums (their address, steps in the buffer, bytes a step),
# 7 recurrent sums, 8 state, 9 cell, 10 gates, 13 cells, 16 y (places).


@vectorised
def _lstm_row(
    inputs: Lanes,
    sums: Lanes,
    state: Lanes,
    cell: Lanes,
    gates: Lanes,
    cells: Lanes,
    y: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        def total(k: int) -> Lanes:
            j = at + h * k
            return get(inputs, j, width, mask) + get(sums, j, width, mask)

        i, f, g, o = sigmoid(total(0)), sigmoid(total(1)), tanh(total(2)), sigmoid(total(3))
        for k, gate in enumerate((i, f, g, o)):
            put(gates, at + h * k, gate, mask)
        new = f * get(cell, at, width, mask) + i * g
        put(cell, at, new, mask)
        put(cells, at, new, mask)
        value = o * tanh(new)
        put(state, at, value, mask)
        put(y, at, value, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _lstm(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        wide, narrow = (row * 4 * h + first) * 4, (row * h + first) * 4
        _lstm_row(
            w[4] + (step % w[5]) * w[6] + wide,
            w[7] + wide,
            w[8] + narrow,
            w[9] + narrow,
            w[10] + step * w[11] + row * w[12] + first * 4,
            w[13] + step * w[14] + row * w[15] + first * 4,
            w[16] + step * w[17] + row * w[18] + first * 4,
            h,
            min(w[2], h - first),
        )
    return 0


def lstm(
    inputs: Array,
    sums: Array,
    ends: tuple[Array, Array],
    results: tuple[Array, Array, Array],
    threads: int,
) -> tuple[Block, Entry]:
    """Return the block and the entry of the gates of one step, forward.

    inputs: (steps, n, 4h) sums of x w + b of a stretch of steps; sums: (n, 4h) of h r; ends: state
    and cell (n, h), updated; results: gates, cells and y, of all steps.
    """
    rows, width = ends[0].shape
    stretch = (inputs, len(inputs), inputs.strides[0])
    block = pack(head(width), stretch, sums, ends, [place(array) for array in results])
    return block, team(_lstm, block, rows, width, threads)


# lstm backward. Words after the head: 4 dy, 7 gates, 10 cells, 13 dgates (places), 16 dense dgates,
# 17 gradient of the state, 18 of the cell, 19 c0 and its bytes a row, 21 the first step, 22 stride.


@vectorised
def _lstm_grad_row(
    dy: Lanes,
    gates: Lanes,
    cell: Lanes,
    before: Lanes,
    out: Lanes,
    dense: Lanes,
    dstate: Lanes,
    dcell: Lanes,
    h: Lanes,
    n: Lanes,
) -> None:
    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        i, f, g, o = (get(gates, at + h * k, width, mask) for k in range(4))
        height = tanh(get(cell, at, width, mask))
        dh = get(dy, at, width, mask) + get(dstate, at, width, mask)
        dc = get(dcell, at, width, mask) + dh * o * (1.0 - height * height)
        parts = (
            dc * g * (i * (1.0 - i)),
            dc * get(before, at, width, mask) * (f * (1.0 - f)),
            dc * i * (1.0 - g * g),
            dh * height * (o * (1.0 - o)),
        )
        put(dcell, at, dc * f, mask)
        for k, part in enumerate(parts):
            put(out, at + h * k, part, mask)
            put(dense, at + h * k, part, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _lstm_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        before = w[19] + row * w[20]
        if step != w[21]:
            before = w[10] + (step - w[22]) * w[11] + row * w[12]
        narrow = (row * h + first) * 4
        _lstm_grad_row(
            w[4] + step * w[5] + row * w[6] + first * 4,
            w[7] + step * w[8] + row * w[9] + first * 4,
            w[10] + step * w[11] + row * w[12] + first * 4,
            before + first * 4,
            w[13] + step * w[14] + row * w[15] + first * 4,
            w[16] + (row * 4 * h + first) * 4,
            w[17] + narrow,
            w[18] + narrow,
            h,
            min(w[2], h - first),
        )
    return 0


def lstm_grad(
    given: tuple[Array, Array, Array],
    made: tuple[Array, Array],
    ends: tuple[Array, Array],
    c0: Array,
    order: tuple[int, int],
    threads: int,
) -> tuple[Block, Entry]:
    """Return the block and the entry of the gates of one step, backward.

    given: dy, gates, cells; made: dgates of all steps, and of this one, dense; ends: gradients of
    state and cell (n, h), the cell's updated; order: the first step and the stride, forward.
    """
    rows, width = ends[0].shape
    places = [place(array) for array in (*given, made[0])]
    block = pack(head(width), places, made[1], ends, c0, c0.strides[0], order)
    return block, team(_lstm_grad, block, rows, width, threads)


# rnn. Words after the head: 4 whether relu, 5 recurrent sums, 6 state, 7 y (place, which holds
# the inputs' sums before).


@vectorised
def _rnn_row(y: Lanes, sums: Lanes, state: Lanes, relu: Lanes, n: Lanes) -> None:
    chosen = relu.compare("!=", 0)

    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        total = get(y, at, width, mask) + get(sums, at, width, mask)
        picked = Lanes(chosen.builder, chosen.value).splat(width)
        value = where(picked, where(total < 0.0, 0.0, total), tanh(total))
        put(y, at, value, mask)
        put(state, at, value, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _rnn(block: Any, begin: int, end: int) -> int:
    w = words(block)
    h = w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        narrow = (row * h + first) * 4
        y = w[7] + w[0] * w[8] + row * w[9] + first * 4
        _rnn_row(y, w[5] + narrow, w[6] + narrow, w[4], min(w[2], h - first))
    return 0


def rnn(y: Array, sums: Array, state: Array, relu: bool, threads: int) -> tuple[Block, Entry]:
    """Return the block and the entry of one step. y: (t, n, h) sums of x w + b, replaced."""
    rows, width = state.shape
    block = pack(head(width), relu, sums, state, place(y))
    return block, team(_rnn, block, rows, width, threads)


# rnn backward. Words after the head: 4 whether relu, 5 dy, 8 y, 11 dgates (places), 14 dense
# dgates, 15 gradient of the state.


@vectorised
def _rnn_grad_row(
    dy: Lanes, y: Lanes, out: Lanes, dense: Lanes, dstate: Lanes, relu: Lanes, n: Lanes
) -> None:
    chosen = relu.compare("!=", 0)

    def body(at: Lanes, width: int, mask: Lanes | None) -> None:
        total = get(dy, at, width, mask) + get(dstate, at, width, mask)
        value = get(y, at, width, mask)
        picked = Lanes(chosen.builder, chosen.value).splat(width)
        made = where(picked, where(value > 0.0, total, 0.0), total * (1.0 - value * value))
        put(out, at, made, mask)
        put(dense, at, made, mask)

    loop(n.builder, n, body, NARROW)


@native("body")
def _rnn_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    step, h = w[0], w[1]
    for item in range(begin, end):
        row, first = item // w[3], (item % w[3]) * w[2]
        narrow = (row * h + first) * 4
        _rnn_grad_row(
            w[5] + step * w[6] + row * w[7] + first * 4,
            w[8] + step * w[9] + row * w[10] + first * 4,
            w[11] + step * w[12] + row * w[13] + first * 4,
            w[14] + narrow,
            w[15] + narrow,
            w[4],
            min(w[2], h - first),
        )
    return 0


def rnn_grad(
    given: tuple[Array, Array], made: tuple[Array, Array], dstate: Array, relu: bool, threads: int
) -> tuple[Block, Entry]:
    """Return the block and the entry of one step, backward. given: dy, y; made: as of lstm_grad."""
    rows, width = dstate.shape
    places = [place(array) for array in (*given, made[0])]
    block = pack(head(width), relu, places, made[1], dstate)
    return block, team(_rnn_grad, block, rows, width, threads)
