"""`sru`, the simple recurrent unit: one product for all steps, then a recurrence by elements.

Columns of w stand in the order candidate, forget, reset, and highway, which may be left out where k
is h: x itself is the highway then. Saved for the gradient are these columns, after the functions of
the two gates, and the cells of every step.

Source: Lei et al. 2018, without the cell's terms in the gates, as it was first published.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.dims import Kind, Signature, einsum
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.checks import need_count, need_float
from soapstone.ir.ops.products.matmul import activate
from soapstone.ir.ops.recurrent.rnn import (
    KINDS,
    REVERSE,
    CountedSpec,
    Rows,
    grad_or_zeros,
    refuse_saved,
    step_order,
)
from soapstone.ir.spec import Attributes, Case, GradientContext, register
from soapstone.ir.tensor import Array, TensorSpec

_FORWARD = "t n k, k g, e, n h -> t n h, n h, t n g, t n h"
_BACKWARD = "t n h, n h, t n g, t n h, t n k, n h -> t n g, t n k, n h"


def _bind(text: str, inputs: tuple[TensorSpec, ...]) -> Signature:
    need_count(inputs, text.split(" -> ")[0].count(",") + 1)
    need_float(inputs, *range(len(inputs)))
    dtypes = [inputs[0].dtype] * (text.split(" -> ")[1].count(",") + 1)
    kinds = {**KINDS, "e": Kind.WHOLE, "k": Kind.LOWERED if text == _FORWARD else Kind.WHOLE}
    signature = einsum(text, inputs, dtypes=dtypes, kinds=kinds)
    extent = {name: dim.extent for name, dim in signature.by_name.items()}
    width = extent["h"]
    if extent["g"] != 4 * width and (extent["g"] != 3 * width or extent["k"] != width):
        raise ShapeError(
            f"dim g is {extent['g']}; {4 * width} needed, or {3 * width} where dim k is {width}"
            f" (k is {extent['k']})"
        )
    if extent.get("e", 2 * width) != 2 * width:
        raise ShapeError(f"dim e is {extent['e']}; {2 * width} needed, 2 gates of dim h")
    if extent["t"] < 1:
        raise ShapeError("dim t is 0; 1 step or more needed")
    return signature


def _sru(attributes: Attributes, x: Array, w: Array, b: Array, c0: Array) -> tuple[Array, ...]:
    width = c0.shape[1]
    gates = np.matmul(x, w)
    gates[..., width : 3 * width] = activate("sigmoid", gates[..., width : 3 * width] + b)
    candidate, forget, reset, *highway = np.split(gates, gates.shape[-1] // max(width, 1), axis=-1)
    passed = highway[0] if highway else x
    y, cells = np.empty_like(candidate), np.empty_like(candidate)
    cell = c0
    for step in step_order(len(x), attributes):
        cell = candidate[step] + forget[step] * (cell - candidate[step])
        cells[step] = cell
        y[step] = passed[step] + reset[step] * (cell - passed[step])
    return y, cell.copy(), gates, cells


def _lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, w, b, c0 = node.inputs
    rows = Rows(emit, 3)
    width = emit.spec(c0).shape[1]
    count = emit.spec(w).shape[1] // width
    candidate, forget, reset, *highway = rows.parts(rows.product(x, w, k="k"), count)
    biases = rows.columns(b, 2)
    forget, reset = (
        rows("sigmoid", rows("add", part, bias)) for part, bias in zip((forget, reset), biases)
    )
    passed = highway[0] if highway else x
    each = [rows.steps(value) for value in (candidate, forget, reset, passed)]
    y, cells = list(each[0]), list(each[0])
    cell = rows.shaped(c0, 3)
    for step in step_order(len(y), node.attributes):
        new, keep, scale, rest = (values[step] for values in each)
        cell = rows("add", new, rows("mul", keep, rows("sub", cell, new)))
        cells[step] = cell
        y[step] = rows("add", rest, rows("mul", scale, rows("sub", cell, rest)))
    gates = rows.joined(candidate, forget, reset, *highway)
    return [rows.stacked(y), rows.shaped(cell, 2), gates, rows.stacked(cells)]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    refuse_saved(g, 2)
    x, w, _, c0 = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), *g.outputs[2:], x, c0)
    made, direct, dc0 = g.emit.all("sru_grad", *given, **g.attributes)
    rows = Rows(g.emit, 3)
    width = g.spec(c0).shape[1]
    dx = rows.back(made, w, "k")
    if g.spec(w).shape[1] != 4 * width:
        dx = rows("add", dx, direct)
    total = rows.total(made)
    bounds = {"starts": (width,), "stops": (3 * width,), "steps": (1,)}
    db = g.emit("slice", total, rename={"d0": ""}, **bounds)
    return [dx, rows.weight(x, made, "k"), db, dc0]


def _sru_grad(
    attributes: Attributes,
    dy: Array,
    dc: Array,
    gates: Array,
    cells: Array,
    x: Array,
    c0: Array,
) -> tuple[Array, ...]:
    made, direct = np.empty_like(gates), np.zeros_like(x)
    width = c0.shape[1]
    parts = gates.shape[-1] // max(width, 1)
    candidate, forget, reset, *highway = np.split(gates, parts, axis=-1)
    dcandidate, dforget, dreset, *dhighway = np.split(made, parts, axis=-1)
    passed, dpassed = (highway[0], dhighway[0]) if highway else (x, direct)
    order = list(step_order(len(dy), attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = cells[order[place - 1]] if place else c0
        f, r = forget[step], reset[step]
        dpassed[step] = dy[step] * (1 - r)
        dreset[step] = dy[step] * (cells[step] - passed[step]) * (r * (1 - r))
        dc = dc + dy[step] * r
        dforget[step] = dc * (before - candidate[step]) * (f * (1 - f))
        dcandidate[step] = dc * (1 - f)
        dc = dc * f
    return made, direct, dc


def _grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, dc, gates, cells, x, c0 = node.inputs
    rows = Rows(emit, 3)
    width = emit.spec(c0).shape[1]
    candidate, forget, reset, *highway = rows.parts(gates, emit.spec(gates).shape[-1] // width)
    passed = highway[0] if highway else x
    keep = rows("affine", reset, scale=-1.0, shift=1.0)
    dpassed = rows("mul", dy, keep)
    dreset = rows("sigmoid_grad", rows("mul", dy, rows("sub", cells, passed)), reset)
    reach = rows.steps(rows("mul", dy, reset))
    each = [rows.steps(value) for value in (candidate, forget, cells)]
    dcandidate, dforget = list(reach), list(reach)
    cell, first = rows.shaped(dc, 3), rows.shaped(c0, 3)
    order = list(step_order(len(reach), node.attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = each[2][order[place - 1]] if place else first
        new, f = each[0][step], each[1][step]
        cell = rows("add", cell, reach[step])
        moved = rows("mul", cell, rows("sub", before, new))
        dforget[step] = rows("sigmoid_grad", moved, f)
        kept = rows("mul", cell, f)
        dcandidate[step] = rows("sub", cell, kept)
        cell = kept
    made = [rows.stacked(dcandidate), rows.stacked(dforget), dreset]
    if highway:
        spec = emit.spec(x)
        rename = {"d0": "t", "d1": "n", "d2": "k"}
        direct = emit("full", shape=spec.shape, dtype=spec.dtype, rename=rename)
        made.append(dpassed)
    else:
        direct = dpassed
    return [rows.joined(*made), direct, rows.shaped(cell, 2)]


register(
    CountedSpec(
        name="sru",
        strided=True,
        inputs=("x", "w", "b", "c0"),
        outputs=("y", "c", "gates", "cells"),
        signature=lambda inputs, attributes: _bind(_FORWARD, inputs),
        reference=_sru,
        attributes=REVERSE,
        gradient=_gradient,
        lower=_lower,
        operations=lambda e: 2.0 * e["t"] * e["n"] * e["g"] * (e["k"] + 10),
        cases=(
            Case(("3 2 3", "3 9", "6", "2 3")),
            Case(("3 2 3", "3 9", "6", "2 3"), {"reverse": True}),
            Case(("3 2 5", "5 12", "6", "2 3")),
            Case(("1 1 1", "1 4", "2", "1 1")),
            Case(("2 0 3", "3 8", "4", "0 2")),
            Case(("3 19 20", "20 132", "66", "19 33"), {}, ()),
            Case(("3 19 33", "33 99", "66", "19 33"), {"reverse": True}, ()),
        ),
        doc="all states, the last cell, then the columns and the cells of every step (saved)",
    )
)
register(
    CountedSpec(
        name="sru_grad",
        strided=True,
        inputs=("dy", "dc", "gates", "cells", "x", "c0"),
        outputs=("dgates", "direct", "dc0"),
        signature=lambda inputs, attributes: _bind(_BACKWARD, inputs),
        reference=_sru_grad,
        attributes=REVERSE,
        lower=_grad_lower,
        operations=lambda e: 20.0 * e["t"] * e["n"] * e["h"],
        cases=(
            Case(("3 2 3", "2 3", "3 2 9", "3 2 3", "3 2 3", "2 3"), {}, ()),
            Case(("3 2 3", "2 3", "3 2 12", "3 2 3", "3 2 5", "2 3"), {"reverse": True}, ()),
            Case(("1 1 1", "1 1", "1 1 4", "1 1 1", "1 1 1", "1 1"), {}, ()),
            Case(("3 19 33", "19 33", "3 19 99", "3 19 33", "3 19 33", "19 33"), {}, ()),
        ),
        doc="the gradients of x w, of x along the highway (zeros if x is none), and of c0",
    )
)
