"""`nas_cell`, the recurrent cell found by architecture search: eight gates in a tree.

The gates of input and state are added, but for the fourth, where they are multiplied. Saved for the
gradient are the gates after their functions, and both factors of the fourth.

Source: Zoph and Le 2017, appendix A (the base-8 cell), as TensorFlow's NASCell wires it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.products.matmul import activate
from soapstone.ir.ops.recurrent.rnn import (
    CountedSpec,
    Rows,
    gated,
    grad_or_zeros,
    products,
    refuse_saved,
)
from soapstone.ir.spec import Attributes, Case, GradientContext, register
from soapstone.ir.tensor import Array

FUNCTIONS = ("sigmoid", "relu", "sigmoid", "relu", "tanh", "sigmoid", "tanh", "sigmoid")
PRODUCT = 3  # the gate whose two sums are multiplied


def _slope(name: str, y: Array) -> Array:
    if name == "relu":
        return np.asarray(y > 0, y.dtype)
    return y * (1 - y) if name == "sigmoid" else 1 - y * y


def _cell(
    attributes: Attributes, x: Array, h: Array, c: Array, w: Array, r: Array, b: Array
) -> tuple[Array, ...]:
    left, right = np.split(x @ w, 8, axis=-1), np.split(h @ r + b, 8, axis=-1)
    gates = [
        activate(name, p * q if k == PRODUCT else p + q)
        for k, (name, p, q) in enumerate(zip(FUNCTIONS, left, right))
    ]
    inner = np.tanh(np.tanh(gates[0] * gates[1]) + c)
    cell = inner * np.tanh(gates[2] + gates[3])
    outer = np.tanh(np.tanh(gates[4] * gates[5]) + activate("sigmoid", gates[6] + gates[7]))
    factors = left[PRODUCT].copy(), right[PRODUCT].copy()
    return np.tanh(cell * outer), cell, np.concatenate(gates, axis=-1), *factors


def _cell_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, h, c, w, r, b = node.inputs
    rows = Rows(emit, 2)
    left = rows.parts(rows.product(x, w, k="k"), 8)
    right = rows.parts(rows.product(h, r, b), 8)
    gates = [
        rows(name, rows("mul" if k == PRODUCT else "add", p, q))
        for k, (name, p, q) in enumerate(zip(FUNCTIONS, left, right))
    ]
    first = rows("tanh", rows("mul", gates[0], gates[1]))
    inner = rows("tanh", rows("add", first, c))
    cell = rows("mul", inner, rows("tanh", rows("add", gates[2], gates[3])))
    third = rows("tanh", rows("mul", gates[4], gates[5]))
    fourth = rows("sigmoid", rows("add", gates[6], gates[7]))
    y = rows("tanh", rows("mul", cell, rows("tanh", rows("add", third, fourth))))
    return [y, cell, rows.joined(*gates), left[PRODUCT], right[PRODUCT]]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 2)
    x, h, c, w, r, _ = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), *g.outputs[2:], c)
    left, right, dc = g.emit.all("nas_cell_grad", *given)
    rows = Rows(g.emit, 2)
    dx, dh = rows.back(left, w, "k"), rows.back(right, r)
    return [dx, dh, dc, rows.weight(x, left, "k"), rows.weight(h, right), rows.total(right)]


def _cell_grad(
    attributes: Attributes,
    dy: Array,
    dcell: Array,
    gates: Array,
    p: Array,
    q: Array,
    c: Array,
) -> tuple[Array, ...]:
    each = np.split(gates, 8, axis=-1)
    first, second = np.tanh(each[0] * each[1]), np.tanh(each[2] + each[3])
    third, fourth = np.tanh(each[4] * each[5]), activate("sigmoid", each[6] + each[7])
    inner, outer = np.tanh(first + c), np.tanh(third + fourth)
    cell = inner * second
    dy = dy * (1 - np.tanh(cell * outer) ** 2)
    dcell = dcell + dy * outer
    dinner = dcell * second * (1 - inner * inner)
    dsecond = dcell * inner * (1 - second * second)
    douter = dy * cell * (1 - outer * outer)
    dfirst, dthird = dinner * (1 - first * first), douter * (1 - third * third)
    dfourth = douter * (fourth * (1 - fourth))
    made = [
        *(dfirst * each[1], dfirst * each[0], dsecond, dsecond),
        *(dthird * each[5], dthird * each[4], dfourth, dfourth),
    ]
    made = [part * _slope(name, y) for part, name, y in zip(made, FUNCTIONS, each)]
    left = [part * q if k == PRODUCT else part for k, part in enumerate(made)]
    right = [part * p if k == PRODUCT else part for k, part in enumerate(made)]
    return np.concatenate(left, axis=-1), np.concatenate(right, axis=-1), dinner


def _cell_grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, dcell, gates, p, q, c = node.inputs
    rows = Rows(emit, 2)
    each = rows.parts(gates, 8)
    first = rows("tanh", rows("mul", each[0], each[1]))
    second = rows("tanh", rows("add", each[2], each[3]))
    third = rows("tanh", rows("mul", each[4], each[5]))
    fourth = rows("sigmoid", rows("add", each[6], each[7]))
    inner = rows("tanh", rows("add", first, c))
    outer = rows("tanh", rows("add", third, fourth))
    cell = rows("mul", inner, second)
    dy = rows("tanh_grad", dy, rows("tanh", rows("mul", cell, outer)))
    dcell = rows("add", dcell, rows("mul", dy, outer))
    dinner = rows("tanh_grad", rows("mul", dcell, second), inner)
    dsecond = rows("tanh_grad", rows("mul", dcell, inner), second)
    douter = rows("tanh_grad", rows("mul", dy, cell), outer)
    dfirst, dthird = rows("tanh_grad", dinner, first), rows("tanh_grad", douter, third)
    dfourth = rows("sigmoid_grad", douter, fourth)
    made = [
        *(rows("mul", dfirst, each[1]), rows("mul", dfirst, each[0]), dsecond, dsecond),
        *(rows("mul", dthird, each[5]), rows("mul", dthird, each[4]), dfourth, dfourth),
    ]
    made = [rows(f"{name}_grad", part, y) for part, name, y in zip(made, FUNCTIONS, each)]
    left, right = list(made), list(made)
    left[PRODUCT], right[PRODUCT] = rows("mul", made[PRODUCT], q), rows("mul", made[PRODUCT], p)
    return [rows.joined(*left), rows.joined(*right), dinner]


register(
    CountedSpec(
        name="nas_cell",
        inputs=("x", "h", "c", "w", "r", "b"),
        outputs=("y", "cell", "gates", "left", "right"),
        signature=gated("n k, n h, n h, k g, h g, g -> n h, n h, n g, n h, n h", 8),
        reference=_cell,
        gradient=_gradient,
        lower=_cell_lower,
        operations=products,
        cases=(
            Case(("2 5", "2 3", "2 3", "5 24", "3 24", "24")),
            Case(("3 2", "3 1", "3 1", "2 8", "1 8", "8")),
            Case(("1 1", "1 1", "1 1", "1 8", "1 8", "8")),
            Case(("0 3", "0 2", "0 2", "3 16", "2 16", "16")),
            Case(("19 20", "19 33", "19 33", "20 264", "33 264", "264"), {}, (), True),
        ),
        doc="one step: the state, the cell, then (saved) the gates and the factors of one",
    )
)
register(
    CountedSpec(
        name="nas_cell_grad",
        inputs=("dy", "dcell", "gates", "left", "right", "c"),
        outputs=("dinputs", "dstates", "dc"),
        signature=gated("n h, n h, n g, n h, n h, n h -> n g, n g, n h", 8),
        reference=_cell_grad,
        lower=_cell_grad_lower,
        operations=lambda extents: 80.0 * extents["n"] * extents["h"],
        cases=(
            Case(("2 3", "2 3", "2 24", "2 3", "2 3", "2 3"), {}, ()),
            Case(("1 1", "1 1", "1 8", "1 1", "1 1", "1 1"), {}, ()),
            Case(("0 2", "0 2", "0 16", "0 2", "0 2", "0 2"), {}, ()),
            Case(("19 33", "19 33", "19 264", "19 33", "19 33", "19 33"), {}, (), True),
        ),
        doc="the gradients of x w and of h r + b, and of the cell before",
    )
)
