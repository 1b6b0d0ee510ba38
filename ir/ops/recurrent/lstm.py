"""The long short-term memory: `lstm` over steps, and `lstm_cell`, one step of it.

Gates stand in the order input, forget, cell, output. Saved for the gradient are the gates after
their functions and the cells of every step.

Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.products.matmul import activate
from soapstone.ir.ops.recurrent.rnn import (
    REVERSE,
    CountedSpec,
    Rows,
    gated,
    grad_or_zeros,
    products,
    refuse_saved,
    step_order,
    weight_gradients,
)
from soapstone.ir.spec import Attributes, Case, GradientContext, register
from soapstone.ir.tensor import Array


def _gate(total: Array, cell: Array) -> tuple[Array, Array, Array]:
    """Return the state, the cell and the gates from the sums before the gates' functions."""
    i, f, g, o = np.split(total, 4, axis=-1)
    i, f, o = (activate("sigmoid", part) for part in (i, f, o))
    g = np.tanh(g)
    cell = f * cell + i * g
    return o * np.tanh(cell), cell, np.concatenate([i, f, g, o], axis=-1)


def _gate_lower(rows: Rows, total: str, cell: str) -> tuple[str, str, str]:
    i, f, g, o = rows.parts(total, 4)
    i, f, o = (rows("sigmoid", part) for part in (i, f, o))
    g = rows("tanh", g)
    cell = rows("add", rows("mul", f, cell), rows("mul", i, g))
    return rows("mul", o, rows("tanh", cell)), cell, rows.joined(i, f, g, o)


def _gate_grad(
    dh: Array, dc: Array, gates: Array, cell: Array, before: Array
) -> tuple[Array, Array]:
    """Return the gradients before the gates' functions, and of the cell before."""
    i, f, g, o = np.split(gates, 4, axis=-1)
    height = np.tanh(cell)
    dc = dc + dh * o * (1 - height * height)
    parts = (
        dc * g * (i * (1 - i)),
        dc * before * (f * (1 - f)),
        dc * i * (1 - g * g),
        dh * height * (o * (1 - o)),
    )
    return np.concatenate(parts, axis=-1), dc * f


def _gate_grad_lower(
    rows: Rows, dh: str, dc: str, gates: str, cell: str, before: str
) -> tuple[str, str]:
    i, f, g, o = rows.parts(gates, 4)
    height = rows("tanh", cell)
    dc = rows("add", dc, rows("tanh_grad", rows("mul", dh, o), height))
    made = rows.joined(
        rows("sigmoid_grad", rows("mul", dc, g), i),
        rows("sigmoid_grad", rows("mul", dc, before), f),
        rows("tanh_grad", rows("mul", dc, i), g),
        rows("sigmoid_grad", rows("mul", dh, height), o),
    )
    return made, rows("mul", dc, f)


# lstm


def _lstm(
    attributes: Attributes, x: Array, w: Array, r: Array, b: Array, h0: Array, c0: Array
) -> tuple[Array, ...]:
    gates = np.matmul(x, w) + b
    y = np.empty((*x.shape[:2], h0.shape[1]), gates.dtype)
    cells = np.empty_like(y)
    hidden, cell = h0, c0
    for step in step_order(len(x), attributes):
        hidden, cell, gates[step] = _gate(gates[step] + hidden @ r, cell)
        y[step], cells[step] = hidden, cell
    return y, hidden.copy(), cell.copy(), gates, cells


def _lstm_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, w, r, b, h0, c0 = node.inputs
    rows = Rows(emit, 3)
    gates = list(rows.steps(rows.product(x, w, b, k="k")))
    y, cells = list(gates), list(gates)
    hidden, cell = rows.shaped(h0, 3), rows.shaped(c0, 3)
    for step in step_order(len(gates), node.attributes):
        total = rows("add", gates[step], rows.product(hidden, r))
        hidden, cell, gates[step] = _gate_lower(rows, total, cell)
        y[step], cells[step] = hidden, cell
    ends = rows.shaped(hidden, 2), rows.shaped(cell, 2)
    return [rows.stacked(y), *ends, rows.stacked(gates), rows.stacked(cells)]


def _lstm_gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 3)
    given = [grad_or_zeros(g, output) for output in range(3)]
    _, _, r, _, _, c0 = g.inputs
    made = g.emit.all("lstm_grad", *given, *g.outputs[3:], r, c0, **g.attributes)
    return [*weight_gradients(g, made[0]), *made[1:]]


def _lstm_grad(
    attributes: Attributes,
    dy: Array,
    dh: Array,
    dc: Array,
    gates: Array,
    cells: Array,
    r: Array,
    c0: Array,
) -> tuple[Array, ...]:
    dgates = np.empty_like(gates)
    order = list(step_order(len(dy), attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = cells[order[place - 1]] if place else c0
        made, dc = _gate_grad(dy[step] + dh, dc, gates[step], cells[step], before)
        dgates[step] = made
        dh = made @ r.T
    return dgates, dh, dc


def _lstm_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, dh, dc, gates, cells, r, c0 = node.inputs
    rows = Rows(emit, 3)
    made, all_gates, all_cells = list(rows.steps(dy)), rows.steps(gates), rows.steps(cells)
    hidden, cell, first = (rows.shaped(value, 3) for value in (dh, dc, c0))
    order = list(step_order(len(made), node.attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = all_cells[order[place - 1]] if place else first
        total = rows("add", made[step], hidden)
        made[step], cell = _gate_grad_lower(
            rows, total, cell, all_gates[step], all_cells[step], before
        )
        hidden = rows.back(made[step], r)
    return [rows.stacked(made), rows.shaped(hidden, 2), rows.shaped(cell, 2)]


_LARGE = ("2 19 33", "19 33", "19 33", "2 19 132", "2 19 33", "33 132", "19 33")

register(
    CountedSpec(
        name="lstm",
        strided=True,
        inputs=("x", "w", "r", "b", "h0", "c0"),
        outputs=("y", "h", "c", "gates", "cells"),
        signature=gated("t n k, k g, h g, g, n h, n h -> t n h, n h, n h, t n g, t n h", 4),
        reference=_lstm,
        attributes=REVERSE,
        gradient=_lstm_gradient,
        lower=_lstm_lower,
        operations=products,
        onnx="LSTM",
        cases=(
            Case(("3 2 5", "5 12", "3 12", "12", "2 3", "2 3")),
            Case(("3 2 5", "5 12", "3 12", "12", "2 3", "2 3"), {"reverse": True}),
            Case(("2 4 3", "3 8", "2 8", "8", "4 2", "4 2")),
            Case(("1 1 1", "1 4", "1 4", "4", "1 1", "1 1")),
            Case(("2 0 3", "3 8", "2 8", "8", "0 2", "0 2")),
            Case(("3 19 20", "20 132", "33 132", "132", "19 33", "19 33"), {}, ()),
            Case(("3 1 20", "20 264", "66 264", "264", "1 66", "1 66"), {"reverse": True}, ()),
        ),
        doc="all states, the last state and cell, then the gates and cells of every step (saved)",
    )
)
register(
    CountedSpec(
        name="lstm_grad",
        strided=True,
        inputs=("dy", "dh", "dc", "gates", "cells", "r", "c0"),
        outputs=("dgates", "dh0", "dc0"),
        signature=gated("t n h, n h, n h, t n g, t n h, h g, n h -> t n g, n h, n h", 4),
        reference=_lstm_grad,
        attributes=REVERSE,
        lower=_lstm_grad_lower,
        operations=products,
        cases=(
            Case(("3 2 3", "2 3", "2 3", "3 2 12", "3 2 3", "3 12", "2 3"), {}, ()),
            Case(("3 2 3", "2 3", "2 3", "3 2 12", "3 2 3", "3 12", "2 3"), {"reverse": True}, ()),
            Case(("1 1 1", "1 1", "1 1", "1 1 4", "1 1 1", "1 4", "1 1"), {}, ()),
            Case(
                ("2 19 33", "19 33", "19 33", "2 19 132", "2 19 33", "33 132", "19 33"),
                {},
                (),
                True,
            ),
        ),
        doc="the gradients before the gates' functions at all steps, of the first state and cell",
    )
)


# lstm_cell


def _cell(
    attributes: Attributes, x: Array, h: Array, c: Array, w: Array, r: Array, b: Array
) -> tuple[Array, ...]:
    return _gate(x @ w + b + h @ r, c)


def _cell_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, h, c, w, r, b = node.inputs
    rows = Rows(emit, 2)
    total = rows("add", rows.product(x, w, b, k="k"), rows.product(h, r))
    return _gate_lower(rows, total, c)


def _cell_gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 2)
    x, h, c, w, r, _ = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), g.outputs[2], g.outputs[1], c)
    dgates, dc = g.emit.all("lstm_cell_grad", *given)
    rows = Rows(g.emit, 2)
    dx, dh = rows.back(dgates, w, "k"), rows.back(dgates, r)
    return [dx, dh, dc, rows.weight(x, dgates, "k"), rows.weight(h, dgates), rows.total(dgates)]


register(
    CountedSpec(
        name="lstm_cell",
        inputs=("x", "h", "c", "w", "r", "b"),
        outputs=("y", "cell", "gates"),
        signature=gated("n k, n h, n h, k g, h g, g -> n h, n h, n g", 4),
        reference=_cell,
        gradient=_cell_gradient,
        lower=_cell_lower,
        operations=products,
        cases=(
            Case(("2 5", "2 3", "2 3", "5 12", "3 12", "12")),
            Case(("4 1", "4 2", "4 2", "1 8", "2 8", "8")),
            Case(("1 1", "1 1", "1 1", "1 4", "1 4", "4")),
            Case(("0 3", "0 2", "0 2", "3 8", "2 8", "8")),
            Case(("19 20", "19 33", "19 33", "20 132", "33 132", "132"), {}, ()),
        ),
        doc="one step of lstm: the state, the cell, and the gates (saved)",
    )
)
register(
    CountedSpec(
        name="lstm_cell_grad",
        inputs=("dy", "dcell", "gates", "cell", "c"),
        outputs=("dgates", "dc"),
        signature=gated("n h, n h, n g, n h, n h -> n g, n h", 4),
        reference=lambda attributes, *given: _gate_grad(*given),
        lower=lambda emit, node: _gate_grad_lower(Rows(emit, 2), *node.inputs),
        operations=lambda extents: 30.0 * extents["n"] * extents["h"],
        cases=(
            Case(("2 3", "2 3", "2 12", "2 3", "2 3"), {}, ()),
            Case(("1 1", "1 1", "1 4", "1 1", "1 1"), {}, ()),
            Case(("0 2", "0 2", "0 8", "0 2", "0 2"), {}, ()),
            Case(("19 33", "19 33", "19 132", "19 33", "19 33"), {}, ()),
        ),
        doc="the gradients before the gates' functions, and of the cell before",
    )
)
