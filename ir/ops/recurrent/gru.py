"""The gated recurrent unit: `gru` over steps, and `gru_cell`, one step of it.

Gates stand in the order reset, update, new. With `linear_before_reset`, as in cuDNN and PyTorch,
the reset gate scales the product of the state, else the state before its product. Saved for the
gradient are the gates after their functions, and `hidden`: that product, or the scaled state.

Source: Cho et al. 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.expression import variable
from soapstone.ir.ops.recurrent.cells import GRU, GRU_FIRST, GRU_SECOND, D
from soapstone.ir.ops.recurrent.rnn import (
    REVERSE,
    Rows,
    Within,
    gated,
    grad_or_zeros,
    meaning,
    previous,
    products,
    step_order,
)
from soapstone.ir.spec import Case, GradientContext, define, of_extents

_LINEAR = {"linear_before_reset": Attribute("bool", True)}


Shown = Callable[[Any], Any]  # of a part of a step, what samples without that step have


def _all(part: Any) -> Any:
    return part


def _step(
    rows: Any, linear: bool, sums: Any, h: Any, r: Any, rb: Any, shown: Shown = _all
) -> tuple[Any, Any, Any]:
    """Return the state, the gates and `hidden` from x w + b and the state before."""
    reset, update, new = rows.parts(sums, 3)
    if linear:
        first, second, hidden = rows.parts(rows.product(h, r, rb), 3)
        reset, update = rows("add", reset, first), rows("add", update, second)
        y, *gates = GRU.step(rows.functions, reset, update, new, hidden, h)
        return y, rows.joined(*map(shown, gates)), hidden
    weights, biases = rows.columns(r, 3), rows.columns(rb, 3)
    reset = rows("add", reset, rows.product(h, weights[0], biases[0]))
    update = rows("add", update, rows.product(h, weights[1], biases[1]))
    hidden, update, reset, _ = GRU_FIRST.step(rows.functions, reset, update, h)
    new = rows("add", new, rows.product(hidden, weights[2], biases[2]))
    y, new = GRU_SECOND.step(rows.functions, new, update, h)
    return y, rows.joined(*map(shown, (reset, update, new))), hidden


def _step_grad(
    rows: Any,
    linear: bool,
    dh: Any,
    gates: Any,
    hidden: Any,
    before: Any,
    r: Any,
    shown: Shown = _all,
) -> tuple[Any, Any, Any]:
    """Return the gradients before the gates' functions, of the products and of the state before."""
    each = rows.parts(gates, 3)
    if linear:
        known = dict(zip(GRU.saved, each)) | {D: dh, GRU.reads[3]: hidden, GRU.reads[4]: before}
        *made, rest = GRU.back(rows.functions, known)
        dreset, dupdate, dnew, dhidden = map(shown, made)
        dproduct = rows.joined(dreset, dupdate, dhidden)
        made = rows.joined(dreset, dupdate, dnew)
        return made, dproduct, rows("add", rest, rows.back(dproduct, r))
    weights = rows.columns(r, 3)
    _, given, state = GRU_SECOND.reads
    known = {D: dh, GRU_SECOND.saved[0]: each[2], given: each[1], state: before}
    dnew, dupdate, rest = GRU_SECOND.back(rows.functions, known)
    dnew = shown(dnew)
    known = dict(zip(GRU_FIRST.saved, each)) | {state: before}
    known |= {variable("dscaled"): rows.back(dnew, weights[2]), variable("dupdate"): dupdate}
    dreset, dupdate, more = GRU_FIRST.back(rows.functions, known)
    dreset, dupdate = shown(dreset), shown(dupdate)
    made = rows.joined(dreset, dupdate, dnew)
    rest = rows("add", rows("add", rest, more), rows.back(dreset, weights[0]))
    return made, made, rows("add", rest, rows.back(dupdate, weights[1]))


def _weight_gradients(
    g: GradientContext, rows: Rows, before: str, made: tuple[str, ...], hidden: str
) -> tuple[str, str]:
    """Return the gradients of r and rb from those of the products, made[1]."""
    if g.attributes["linear_before_reset"]:
        return rows.weight(before, made[1]), rows.total(made[1])
    parts = rows.parts(made[0], 3)
    each = [rows.weight(before, part) for part in parts[:2]] + [rows.weight(hidden, parts[2])]
    joined = g.emit("concat", *each, axis=1, rename={"d0": "", "d1": ""})
    return joined, rows.total(made[0])


# gru


def _gru(rows: Any, attributes: Attributes, *operands: Any) -> Sequence[Any]:
    x, w, r, b, rb, h0, *lengths = operands
    within = Within(rows, lengths)
    gates = list(rows.steps(rows.product(x, w, b, k="k")))
    y, saved = list(gates), list(gates)
    h, linear = rows.shaped(h0, 3), attributes["linear_before_reset"]
    for step in step_order(len(gates), attributes):
        shown = partial(within.shown, step)
        new, gates[step], hidden = _step(rows, linear, gates[step], h, r, rb, shown)
        saved[step] = within.shown(step, hidden)
        y[step], h = within.shown(step, new), within.kept(step, new, h)
    return [rows.stacked(y), rows.shaped(h, 2), rows.stacked(gates), rows.stacked(saved)]


def _gru_gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(2)
    x, w, r, _, _, h0, *lengths = g.inputs
    gates, hidden = g.outputs[2:]
    before = previous(g, h0)
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), gates, hidden, before, r, *lengths)
    made = g.emit.all("gru_grad", *given, **g.attributes)
    rows = Rows(g.emit, 3)
    dr, drb = _weight_gradients(g, rows, before, made, hidden)
    dx, dw = rows.back(made[0], w, "k"), rows.weight(x, made[0], "k")
    return [dx, dw, dr, rows.total(made[0]), drb, made[2], *(None for _ in lengths)]


def _gru_grad(rows: Any, attributes: Attributes, *operands: Any) -> Sequence[Any]:
    dy, dh, gates, hidden, past, r, *lengths = operands
    linear, within = attributes["linear_before_reset"], Within(rows, lengths)
    made, saved = list(rows.steps(dy)), [rows.steps(value) for value in (gates, hidden, past)]
    dproduct, dh = list(made), rows.shaped(dh, 3)
    for step in reversed(list(step_order(len(made), attributes))):
        total = rows("add", made[step], dh)
        kept, inner, before = (values[step] for values in saved)
        shown = partial(within.shown, step)
        made[step], dproduct[step], rest = _step_grad(
            rows, linear, total, kept, inner, before, r, shown
        )
        dh = within.kept(step, rest, dh)
    return [rows.stacked(made), rows.stacked(dproduct), rows.shaped(dh, 2)]


_SMALL = ("3 2 5", "5 9", "3 9", "9", "9", "2 3")
_SMALL_GRAD = ("3 2 3", "2 3", "3 2 9", "3 2 3", "3 2 3", "3 9")
_LARGE_GRAD = ("2 19 33", "19 33", "2 19 99", "2 19 33", "2 19 33", "33 99")
_AFTER = {"linear_before_reset": False}
_BACK = {"reverse": True}

define(
    name="gru",
    half=True,
    strided=True,
    inputs=("x", "w", "r", "b", "rb", "h0", "lengths?"),
    outputs=("y", "h", "gates", "hidden"),
    states={"h0": "y"},
    signature=gated("t n k, k g, h g, g, g, n h -> t n h, n h, t n g, t n h", 3),
    **meaning(_gru, 3),
    attributes={**REVERSE, **_LINEAR},
    gradient=_gru_gradient,
    operations=of_extents(products),
    onnx="GRU",
    cases=(
        Case(_SMALL),
        Case(_SMALL, _BACK),
        Case(_SMALL, _AFTER),
        Case(_SMALL, {**_AFTER, **_BACK}),
        Case(("1 1 1", "1 3", "1 3", "3", "3", "1 1")),
        Case(("2 0 3", "3 6", "2 6", "6", "6", "0 2")),
        Case(("3 19 20", "20 99", "33 99", "99", "99", "19 33"), {}, ()),
        Case(("3 19 20", "20 99", "33 99", "99", "99", "19 33"), _AFTER, ()),
        Case(("3 3 2", "2 9", "3 9", "9", "9", "3 3", "int32 3 >=1 <4")),
        Case(("3 3 2", "2 9", "3 9", "9", "9", "3 3", "int32 3 >=1 <4"), {**_AFTER, **_BACK}),
    ),
    doc="all states, the last state, then the gates and `hidden` of every step (saved)",
)
define(
    name="gru_grad",
    strided=True,
    inputs=("dy", "dh", "gates", "hidden", "before", "r", "lengths?"),
    outputs=("dgates", "dproduct", "dh0"),
    signature=gated("t n h, n h, t n g, t n h, t n h, h g -> t n g, t n g, n h", 3),
    **meaning(_gru_grad, 3),
    attributes={**REVERSE, **_LINEAR},
    operations=of_extents(products),
    cases=(
        Case(_SMALL_GRAD, {}, ()),
        Case(_SMALL_GRAD, _BACK, ()),
        Case(_SMALL_GRAD, _AFTER, ()),
        Case(("1 1 1", "1 1", "1 1 3", "1 1 1", "1 1 1", "1 3"), {}, ()),
        Case(_LARGE_GRAD, {}, (), True),
        Case((*_LARGE_GRAD, "int32 19 <4"), _BACK, (), True),
    ),
    doc="the gradients before the gates' functions and of the products at all steps, and of h0",
)


# gru_cell


def _cell(
    rows: Any, attributes: Attributes, x: Any, h: Any, w: Any, r: Any, b: Any, rb: Any
) -> Sequence[Any]:
    linear = attributes["linear_before_reset"]
    return _step(rows, linear, rows.product(x, w, b, k="k"), h, r, rb)


def _cell_grad(rows: Any, attributes: Attributes, *given: Any) -> Sequence[Any]:
    return _step_grad(rows, attributes["linear_before_reset"], *given)


def _cell_gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(1)
    x, h, w, r, _, _ = g.inputs
    given = (grad_or_zeros(g, 0), *g.outputs[1:], h, r)
    made = g.emit.all("gru_cell_grad", *given, **g.attributes)
    rows = Rows(g.emit, 2)
    dr, drb = _weight_gradients(g, rows, h, made, g.outputs[2])
    dx, dw = rows.back(made[0], w, "k"), rows.weight(x, made[0], "k")
    return [dx, made[2], dw, dr, rows.total(made[0]), drb]


_CELL = ("2 5", "2 3", "5 9", "3 9", "9", "9")
_CELL_GRAD = ("2 3", "2 9", "2 3", "2 3", "3 9")

define(
    name="gru_cell",
    half=True,
    inputs=("x", "h", "w", "r", "b", "rb"),
    outputs=("y", "gates", "hidden"),
    signature=gated("n k, n h, k g, h g, g, g -> n h, n g, n h", 3),
    **meaning(_cell, 2),
    attributes=_LINEAR,
    gradient=_cell_gradient,
    operations=of_extents(products),
    cases=(
        Case(_CELL),
        Case(_CELL, _AFTER),
        Case(("1 1", "1 1", "1 3", "1 3", "3", "3")),
        Case(("0 3", "0 2", "3 6", "2 6", "6", "6")),
        Case(("19 20", "19 33", "20 99", "33 99", "99", "99"), {}, ()),
    ),
    doc="one step of gru: the state, then the gates and `hidden` (saved)",
)
define(
    name="gru_cell_grad",
    inputs=("dy", "gates", "hidden", "h", "r"),
    outputs=("dgates", "dproduct", "dh"),
    signature=gated("n h, n g, n h, n h, h g -> n g, n g, n h", 3),
    **meaning(_cell_grad, 2),
    attributes=_LINEAR,
    operations=of_extents(products),
    cases=(
        Case(_CELL_GRAD, {}, ()),
        Case(_CELL_GRAD, _AFTER, ()),
        Case(("0 2", "0 6", "0 2", "0 2", "2 6"), {}, ()),
        Case(("19 33", "19 99", "19 33", "19 33", "33 99"), {}, (), True),
    ),
    doc="the gradients before the gates' functions, of the products, and of the state before",
)
