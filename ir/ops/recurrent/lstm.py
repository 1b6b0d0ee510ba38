"""The long short-term memory: `lstm` over steps, and `lstm_cell`, one step of it.

Gates stand in the order input, forget, cell, output. Saved for the gradient are the gates after
their functions and the cells of every step.

Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.ir.attributes import Attributes
from soapstone.ir.ops.recurrent.cells import DC, LSTM, D
from soapstone.ir.ops.recurrent.rnn import (
    REVERSE,
    Rows,
    Within,
    gated,
    grad_or_zeros,
    meaning,
    products,
    step_order,
    weight_gradients,
)
from soapstone.ir.spec import Case, GradientContext, define, of_extents


def _lstm(rows: Any, attributes: Attributes, *operands: Any) -> Sequence[Any]:
    x, w, r, b, h0, c0, *lengths = operands
    within = Within(rows, lengths)
    gates = list(rows.steps(rows.product(x, w, b, k="k")))
    y, kept = list(gates), list(gates)
    hidden, cell = rows.shaped(h0, 3), rows.shaped(c0, 3)
    for step in step_order(len(gates), attributes):
        total = rows("add", gates[step], rows.product(hidden, r))
        new, after, *made = LSTM.step(rows.functions, *rows.parts(total, 4), cell)
        y[step] = within.shown(step, new)
        gates[step] = rows.joined(*(within.shown(step, gate) for gate in made))
        hidden, cell = within.kept(step, new, hidden), within.kept(step, after, cell)
        kept[step] = cell
    ends = rows.shaped(hidden, 2), rows.shaped(cell, 2)
    return [rows.stacked(y), *ends, rows.stacked(gates), rows.stacked(kept)]


def _step_grad(rows: Any, dh: Any, dc: Any, gates: Any, cell: Any, before: Any) -> Sequence[Any]:
    """Return the gradients before the gates' functions, one by one, and of the cell before."""
    known = dict(zip(LSTM.saved, rows.parts(gates, 4)))
    known |= {D: dh, DC: dc, LSTM.results[1]: cell, LSTM.reads[4]: before}
    return LSTM.back(rows.functions, known)


def _lstm_gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(3)
    given = [grad_or_zeros(g, output) for output in range(3)]
    _, _, r, _, _, c0, *lengths = g.inputs
    made = g.emit.all("lstm_grad", *given, *g.outputs[3:], r, c0, *lengths, **g.attributes)
    return [*weight_gradients(g, made[0]), *made[1:], *(None for _ in lengths)]


def _lstm_grad(rows: Any, attributes: Attributes, *operands: Any) -> Sequence[Any]:
    dy, dh, dc, gates, cells, r, c0, *lengths = operands
    within = Within(rows, lengths)
    made, all_gates, all_cells = list(rows.steps(dy)), rows.steps(gates), rows.steps(cells)
    hidden, cell, first = (rows.shaped(value, 3) for value in (dh, dc, c0))
    order = list(step_order(len(made), attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = all_cells[order[place - 1]] if place else first
        total = rows("add", made[step], hidden)
        *new, past = _step_grad(rows, total, cell, all_gates[step], all_cells[step], before)
        made[step] = rows.joined(*(within.shown(step, gate) for gate in new))
        cell = within.kept(step, past, cell)
        hidden = within.kept(step, rows.back(made[step], r), hidden)
    return [rows.stacked(made), rows.shaped(hidden, 2), rows.shaped(cell, 2)]


_LARGE = ("2 19 33", "19 33", "19 33", "2 19 132", "2 19 33", "33 132", "19 33")

define(
    name="lstm",
    half=True,
    strided=True,
    inputs=("x", "w", "r", "b", "h0", "c0", "lengths?"),
    outputs=("y", "h", "c", "gates", "cells"),
    states={"h0": "y", "c0": "cells"},
    signature=gated("t n k, k g, h g, g, n h, n h -> t n h, n h, n h, t n g, t n h", 4),
    **meaning(_lstm, 3),
    attributes=REVERSE,
    gradient=_lstm_gradient,
    operations=of_extents(products),
    onnx="LSTM",
    cases=(
        Case(("3 2 5", "5 12", "3 12", "12", "2 3", "2 3")),
        Case(("3 2 5", "5 12", "3 12", "12", "2 3", "2 3"), {"reverse": True}),
        Case(("2 4 3", "3 8", "2 8", "8", "4 2", "4 2")),
        Case(("1 1 1", "1 4", "1 4", "4", "1 1", "1 1")),
        Case(("2 0 3", "3 8", "2 8", "8", "0 2", "0 2")),
        Case(("3 19 20", "20 132", "33 132", "132", "19 33", "19 33"), {}, ()),
        Case(("3 1 20", "20 264", "66 264", "264", "1 66", "1 66"), {"reverse": True}, ()),
        Case(("3 3 2", "2 12", "3 12", "12", "3 3", "3 3", "int32 3 >=1 <4")),
        Case(("3 3 2", "2 12", "3 12", "12", "3 3", "3 3", "int32 3 >=1 <4"), {"reverse": True}),
    ),
    doc="all states, the last state and cell, then the gates and cells of every step (saved)",
)
define(
    name="lstm_grad",
    strided=True,
    inputs=("dy", "dh", "dc", "gates", "cells", "r", "c0", "lengths?"),
    outputs=("dgates", "dh0", "dc0"),
    signature=gated("t n h, n h, n h, t n g, t n h, h g, n h -> t n g, n h, n h", 4),
    **meaning(_lstm_grad, 3),
    attributes=REVERSE,
    operations=of_extents(products),
    cases=(
        Case(("3 2 3", "2 3", "2 3", "3 2 12", "3 2 3", "3 12", "2 3"), {}, ()),
        Case(("3 2 3", "2 3", "2 3", "3 2 12", "3 2 3", "3 12", "2 3"), {"reverse": True}, ()),
        Case(("1 1 1", "1 1", "1 1", "1 1 4", "1 1 1", "1 4", "1 1"), {}, ()),
        Case(_LARGE, {}, (), True),
        Case((*_LARGE, "int32 19 <4"), {"reverse": True}, (), True),
    ),
    doc="the gradients before the gates' functions at all steps, of the first state and cell",
)


# lstm_cell


def _cell(
    rows: Any, attributes: Attributes, x: Any, h: Any, c: Any, w: Any, r: Any, b: Any
) -> Sequence[Any]:
    total = rows("add", rows.product(x, w, b, k="k"), rows.product(h, r))
    hidden, cell, *gates = LSTM.step(rows.functions, *rows.parts(total, 4), c)
    return hidden, cell, rows.joined(*gates)


def _cell_gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(2)
    x, h, c, w, r, _ = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), g.outputs[2], g.outputs[1], c)
    dgates, dc = g.emit.all("lstm_cell_grad", *given)
    rows = Rows(g.emit, 2)
    dx, dh = rows.back(dgates, w, "k"), rows.back(dgates, r)
    return [dx, dh, dc, rows.weight(x, dgates, "k"), rows.weight(h, dgates), rows.total(dgates)]


def _cell_grad(rows: Any, attributes: Attributes, *given: Any) -> Sequence[Any]:
    *made, dc = _step_grad(rows, *given)
    return rows.joined(*made), dc


define(
    name="lstm_cell",
    half=True,
    inputs=("x", "h", "c", "w", "r", "b"),
    outputs=("y", "cell", "gates"),
    signature=gated("n k, n h, n h, k g, h g, g -> n h, n h, n g", 4),
    **meaning(_cell, 2),
    gradient=_cell_gradient,
    operations=of_extents(products),
    cases=(
        Case(("2 5", "2 3", "2 3", "5 12", "3 12", "12")),
        Case(("4 1", "4 2", "4 2", "1 8", "2 8", "8")),
        Case(("1 1", "1 1", "1 1", "1 4", "1 4", "4")),
        Case(("0 3", "0 2", "0 2", "3 8", "2 8", "8")),
        Case(("19 20", "19 33", "19 33", "20 132", "33 132", "132"), {}, ()),
    ),
    doc="one step of lstm: the state, the cell, and the gates (saved)",
)
define(
    name="lstm_cell_grad",
    inputs=("dy", "dcell", "gates", "cell", "c"),
    outputs=("dgates", "dc"),
    signature=gated("n h, n h, n g, n h, n h -> n g, n h", 4),
    **meaning(_cell_grad, 2),
    operations=of_extents(lambda extents: 30.0 * extents["n"] * extents["h"]),
    cases=(
        Case(("2 3", "2 3", "2 12", "2 3", "2 3"), {}, ()),
        Case(("1 1", "1 1", "1 4", "1 1", "1 1"), {}, ()),
        Case(("0 2", "0 2", "0 8", "0 2", "0 2"), {}, ()),
        Case(("19 33", "19 33", "19 132", "19 33", "19 33"), {}, ()),
    ),
    doc="the gradients before the gates' functions, and of the cell before",
)
