"""The gated recurrent unit: `gru` over steps, and `gru_cell`, one step of it.

Gates stand in the order reset, update, new. With `linear_before_reset`, as in cuDNN and PyTorch,
the reset gate scales the product of the state, else the state before its product. Saved for the
gradient are the gates after their functions, and `hidden`: that product, or the scaled state.

Source: Cho et al. 2014.
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
)
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, register
from soapstone.ir.tensor import Array

_LINEAR = {"linear_before_reset": Attribute("bool", True)}


def _step(linear: bool, sums: Array, h: Array, r: Array, rb: Array) -> tuple[Array, Array, Array]:
    """Return the state, the gates and `hidden` from x w + b and the state before."""
    width = h.shape[1]
    first, new = np.split(sums, [2 * width], axis=-1)
    if linear:
        product = h @ r + rb
        gates = activate("sigmoid", first + product[:, : 2 * width])
        hidden = product[:, 2 * width :]
        new = np.tanh(new + gates[:, :width] * hidden)
    else:
        gates = activate("sigmoid", first + h @ r[:, : 2 * width] + rb[: 2 * width])
        hidden = gates[:, :width] * h
        new = np.tanh(new + hidden @ r[:, 2 * width :] + rb[2 * width :])
    update = gates[:, width:]
    return (1 - update) * new + update * h, np.concatenate([gates, new], axis=-1), hidden


def _step_lower(
    rows: Rows, linear: bool, sums: str, h: str, r: str, rb: str
) -> tuple[str, str, str]:
    if linear:
        product = rows.product(h, r, rb)
        first, second, hidden = rows.parts(product, 3)
        reset, update, new = rows.parts(sums, 3)
        reset = rows("sigmoid", rows("add", reset, first))
        update = rows("sigmoid", rows("add", update, second))
        new = rows("tanh", rows("add", new, rows("mul", reset, hidden)))
    else:
        weights, biases = rows.columns(r, 3), rows.columns(rb, 3)
        reset, update, new = rows.parts(sums, 3)
        reset = rows("sigmoid", rows("add", reset, rows.product(h, weights[0], biases[0])))
        update = rows("sigmoid", rows("add", update, rows.product(h, weights[1], biases[1])))
        hidden = rows("mul", reset, h)
        new = rows("tanh", rows("add", new, rows.product(hidden, weights[2], biases[2])))
    kept = rows("sub", h, new)
    y = rows("add", new, rows("mul", update, kept))
    return y, rows.joined(reset, update, new), hidden


def _step_grad(
    linear: bool, dh: Array, gates: Array, hidden: Array, before: Array, r: Array
) -> tuple[Array, Array, Array]:
    """Return the gradients before the gates' functions, of the products and of the state before."""
    reset, update, new = np.split(gates, 3, axis=-1)
    width = dh.shape[1]
    dnew = dh * (1 - update) * (1 - new * new)
    dupdate = dh * (before - new) * (update * (1 - update))
    rest = dh * update
    if linear:
        dreset = dnew * hidden * (reset * (1 - reset))
        made = np.concatenate([dreset, dupdate, dnew], axis=-1)
        dproduct = np.concatenate([dreset, dupdate, dnew * reset], axis=-1)
        return made, dproduct, rest + dproduct @ r.T
    scaled = dnew @ r[:, 2 * width :].T
    dreset = scaled * before * (reset * (1 - reset))
    made = np.concatenate([dreset, dupdate, dnew], axis=-1)
    rest = rest + scaled * reset + made[:, : 2 * width] @ r[:, : 2 * width].T
    return made, made, rest


def _step_grad_lower(
    rows: Rows, linear: bool, dh: str, gates: str, hidden: str, before: str, r: str
) -> tuple[str, str, str]:
    reset, update, new = rows.parts(gates, 3)
    dnew = rows("tanh_grad", rows("mul", dh, rows("affine", update, scale=-1.0, shift=1.0)), new)
    dupdate = rows("sigmoid_grad", rows("mul", dh, rows("sub", before, new)), update)
    rest = rows("mul", dh, update)
    if linear:
        dreset = rows("sigmoid_grad", rows("mul", dnew, hidden), reset)
        made = rows.joined(dreset, dupdate, dnew)
        dproduct = rows.joined(dreset, dupdate, rows("mul", dnew, reset))
        return made, dproduct, rows("add", rest, rows.back(dproduct, r))
    weights = rows.columns(r, 3)
    scaled = rows.back(dnew, weights[2])
    dreset = rows("sigmoid_grad", rows("mul", scaled, before), reset)
    made = rows.joined(dreset, dupdate, dnew)
    rest = rows("add", rest, rows("mul", scaled, reset))
    rest = rows("add", rest, rows.back(dreset, weights[0]))
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


def _gru(
    attributes: Attributes, x: Array, w: Array, r: Array, b: Array, rb: Array, h0: Array
) -> tuple[Array, ...]:
    gates = np.matmul(x, w) + b
    y = np.empty((*x.shape[:2], h0.shape[1]), gates.dtype)
    saved = np.empty_like(y)
    h, linear = h0, attributes["linear_before_reset"]
    for step in step_order(len(x), attributes):
        h, gates[step], saved[step] = _step(linear, gates[step], h, r, rb)
        y[step] = h
    return y, h.copy(), gates, saved


def _gru_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, w, r, b, rb, h0 = node.inputs
    rows, linear = Rows(emit, 3), node.attributes["linear_before_reset"]
    gates = list(rows.steps(rows.product(x, w, b, k="k")))
    y, saved = list(gates), list(gates)
    h = rows.shaped(h0, 3)
    for step in step_order(len(gates), node.attributes):
        h, gates[step], saved[step] = _step_lower(rows, linear, gates[step], h, r, rb)
        y[step] = h
    return [rows.stacked(y), rows.shaped(h, 2), rows.stacked(gates), rows.stacked(saved)]


def _gru_gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 2)
    x, w, r, _, _, h0 = g.inputs
    y, _, gates, hidden = g.outputs
    reverse = g.attributes["reverse"]
    before = g.emit("previous_step", y, h0, reverse=reverse, rename={})
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), gates, hidden, before, r)
    made = g.emit.all("gru_grad", *given, **g.attributes)
    rows = Rows(g.emit, 3)
    dr, drb = _weight_gradients(g, rows, before, made, hidden)
    dx, dw = rows.back(made[0], w, "k"), rows.weight(x, made[0], "k")
    return [dx, dw, dr, rows.total(made[0]), drb, made[2]]


def _gru_grad(
    attributes: Attributes,
    dy: Array,
    dh: Array,
    gates: Array,
    hidden: Array,
    before: Array,
    r: Array,
) -> tuple[Array, ...]:
    dgates, dproduct = np.empty_like(gates), np.empty_like(gates)
    linear = attributes["linear_before_reset"]
    for step in reversed(list(step_order(len(dy), attributes))):
        total = dy[step] + dh
        dgates[step], dproduct[step], dh = _step_grad(
            linear, total, gates[step], hidden[step], before[step], r
        )
    return dgates, dproduct, dh


def _gru_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, dh, gates, hidden, past, r = node.inputs
    rows, linear = Rows(emit, 3), node.attributes["linear_before_reset"]
    made, saved = list(rows.steps(dy)), [rows.steps(value) for value in (gates, hidden, past)]
    dproduct, dh = list(made), rows.shaped(dh, 3)
    for step in reversed(list(step_order(len(made), node.attributes))):
        total = rows("add", made[step], dh)
        kept, inner, before = (values[step] for values in saved)
        made[step], dproduct[step], dh = _step_grad_lower(
            rows, linear, total, kept, inner, before, r
        )
    return [rows.stacked(made), rows.stacked(dproduct), rows.shaped(dh, 2)]


_SMALL = ("3 2 5", "5 9", "3 9", "9", "9", "2 3")
_SMALL_GRAD = ("3 2 3", "2 3", "3 2 9", "3 2 3", "3 2 3", "3 9")
_AFTER = {"linear_before_reset": False}
_BACK = {"reverse": True}

register(
    CountedSpec(
        name="gru",
        strided=True,
        inputs=("x", "w", "r", "b", "rb", "h0"),
        outputs=("y", "h", "gates", "hidden"),
        signature=gated("t n k, k g, h g, g, g, n h -> t n h, n h, t n g, t n h", 3),
        reference=_gru,
        attributes={**REVERSE, **_LINEAR},
        gradient=_gru_gradient,
        lower=_gru_lower,
        operations=products,
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
        ),
        doc="all states, the last state, then the gates and `hidden` of every step (saved)",
    )
)
register(
    CountedSpec(
        name="gru_grad",
        strided=True,
        inputs=("dy", "dh", "gates", "hidden", "before", "r"),
        outputs=("dgates", "dproduct", "dh0"),
        signature=gated("t n h, n h, t n g, t n h, t n h, h g -> t n g, t n g, n h", 3),
        reference=_gru_grad,
        attributes={**REVERSE, **_LINEAR},
        lower=_gru_grad_lower,
        operations=products,
        cases=(
            Case(_SMALL_GRAD, {}, ()),
            Case(_SMALL_GRAD, _BACK, ()),
            Case(_SMALL_GRAD, _AFTER, ()),
            Case(("1 1 1", "1 1", "1 1 3", "1 1 1", "1 1 1", "1 3"), {}, ()),
            Case(("2 19 33", "19 33", "2 19 99", "2 19 33", "2 19 33", "33 99"), {}, (), True),
        ),
        doc="the gradients before the gates' functions and of the products at all steps, and of h0",
    )
)


# gru_cell


def _cell(
    attributes: Attributes, x: Array, h: Array, w: Array, r: Array, b: Array, rb: Array
) -> tuple[Array, ...]:
    return _step(attributes["linear_before_reset"], x @ w + b, h, r, rb)


def _cell_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, h, w, r, b, rb = node.inputs
    rows, linear = Rows(emit, 2), node.attributes["linear_before_reset"]
    return _step_lower(rows, linear, rows.product(x, w, b, k="k"), h, r, rb)


def _cell_gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 1)
    x, h, w, r, _, _ = g.inputs
    given = (grad_or_zeros(g, 0), *g.outputs[1:], h, r)
    made = g.emit.all("gru_cell_grad", *given, **g.attributes)
    rows = Rows(g.emit, 2)
    dr, drb = _weight_gradients(g, rows, h, made, g.outputs[2])
    dx, dw = rows.back(made[0], w, "k"), rows.weight(x, made[0], "k")
    return [dx, made[2], dw, dr, rows.total(made[0]), drb]


_CELL = ("2 5", "2 3", "5 9", "3 9", "9", "9")
_CELL_GRAD = ("2 3", "2 9", "2 3", "2 3", "3 9")

register(
    CountedSpec(
        name="gru_cell",
        inputs=("x", "h", "w", "r", "b", "rb"),
        outputs=("y", "gates", "hidden"),
        signature=gated("n k, n h, k g, h g, g, g -> n h, n g, n h", 3),
        reference=_cell,
        attributes=_LINEAR,
        gradient=_cell_gradient,
        lower=_cell_lower,
        operations=products,
        cases=(
            Case(_CELL),
            Case(_CELL, _AFTER),
            Case(("1 1", "1 1", "1 3", "1 3", "3", "3")),
            Case(("0 3", "0 2", "3 6", "2 6", "6", "6")),
            Case(("19 20", "19 33", "20 99", "33 99", "99", "99"), {}, ()),
        ),
        doc="one step of gru: the state, then the gates and `hidden` (saved)",
    )
)
register(
    CountedSpec(
        name="gru_cell_grad",
        inputs=("dy", "gates", "hidden", "h", "r"),
        outputs=("dgates", "dproduct", "dh"),
        signature=gated("n h, n g, n h, n h, h g -> n g, n g, n h", 3),
        reference=lambda a, *given: _step_grad(a["linear_before_reset"], *given),
        attributes=_LINEAR,
        lower=lambda emit, node: _step_grad_lower(
            Rows(emit, 2), node.attributes["linear_before_reset"], *node.inputs
        ),
        operations=products,
        cases=(
            Case(_CELL_GRAD, {}, ()),
            Case(_CELL_GRAD, _AFTER, ()),
            Case(("0 2", "0 6", "0 2", "0 2", "2 6"), {}, ()),
            Case(("19 33", "19 99", "19 33", "19 33", "33 99"), {}, (), True),
        ),
        doc="the gradients before the gates' functions, of the products, and of the state before",
    )
)
