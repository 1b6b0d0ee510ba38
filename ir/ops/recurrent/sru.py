"""`sru`, the simple recurrent unit: one product for all steps, then a recurrence by elements.

Columns of w stand in the order candidate, forget, reset, and highway, which may be left out where k
is h: x itself is the highway then. Saved for the gradient are these columns, after the functions of
the two gates, and the cells of every step.

Source: Lei et al. 2018, without the cell's terms in the gates, as it was first published.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.ir.attributes import Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.expression import evaluate
from soapstone.ir.ops.recurrent.cells import DC, SRU, D
from soapstone.ir.ops.recurrent.rnn import (
    KINDS,
    REVERSE,
    Rows,
    Within,
    grad_or_zeros,
    meaning,
    step_order,
    with_lengths,
)
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, GradientContext, define, of_extents
from soapstone.ir.tensor import TensorSpec

_FORWARD = "t n k, k g, e, n h -> t n h, n h, t n g, t n h"
_BACKWARD = "t n h, n h, t n g, t n h, t n k, n h -> t n g, t n k, n h"


def _bind(text: str, inputs: tuple[TensorSpec, ...]) -> Signature:
    dtypes = [inputs[0].dtype] * (text.split(" -> ")[1].count(",") + 1)
    kinds = {**KINDS, "e": Kind.WHOLE, "k": Kind.LOWERED if text == _FORWARD else Kind.WHOLE}
    signature = einsum(with_lengths(text, inputs), inputs, dtypes=dtypes, kinds=kinds)
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


def _parts(rows: Any, gates: Any, c0: Any) -> Sequence[Any]:
    """Return the candidate, both gates and, where there are four parts, the highway."""
    width = rows.width(c0)
    return tuple(rows.parts(gates, rows.width(gates) // width if width else 4))


def _sru(
    rows: Any, attributes: Attributes, x: Any, w: Any, b: Any, c0: Any, *lengths: Any
) -> Sequence[Any]:
    within = Within(rows, lengths)
    candidate, *gates = _parts(rows, rows.product(x, w, k="k"), c0)
    highway = gates[2:]
    totals = (rows("add", gate, bias) for gate, bias in zip(gates, rows.columns(b, 2)))
    forget, reset = (rows("sigmoid", total) for total in totals)
    each = [rows.steps(value) for value in (candidate, forget, reset, *(highway or [x]))]
    y, cells = list(each[0]), list(each[0])
    cell = rows.shaped(c0, 3)
    candidate_read, _, _, cell_read, past = SRU.reads
    for step in step_order(len(y), attributes):
        new, *kept, rest = (values[step] for values in each)
        known = dict(zip(SRU.saved, kept)) | {candidate_read: new, cell_read: cell, past: rest}
        made, after = (evaluate(one, known, rows.functions) for one in SRU.results)
        y[step], cell = within.shown(step, made), within.kept(step, after, cell)
        cells[step] = cell
    saved = rows.joined(candidate, forget, reset, *highway)
    return [rows.stacked(y), rows.shaped(cell, 2), saved, rows.stacked(cells)]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(2)
    x, w, _, c0, *lengths = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), *g.outputs[2:], x, c0, *lengths)
    made, direct, dc0 = g.emit.all("sru_grad", *given, **g.attributes)
    rows = Rows(g.emit, 3)
    width = g.spec(c0).shape[1]
    dx = rows.back(made, w, "k")
    if g.spec(w).shape[1] != 4 * width:
        dx = rows("add", dx, direct)
    total = rows.total(made)
    bounds = {"starts": (width,), "stops": (3 * width,), "steps": (1,)}
    db = g.emit("slice", total, rename={"d0": ""}, **bounds)
    return [dx, rows.weight(x, made, "k"), db, dc0, *(None for _ in lengths)]


def _sru_grad(rows: Any, attributes: Attributes, *operands: Any) -> Sequence[Any]:
    dy, dc, gates, cells, x, c0, *lengths = operands
    within = Within(rows, lengths)
    candidate, *kept = _parts(rows, gates, c0)
    highway = kept[2:]
    read, _, _, cell_read, past = SRU.reads
    dcandidate, dforget, dreset, dbefore, dpast = SRU.gradients
    # What needs no gradient of a later step is of all steps at once.
    whole = dict(zip(SRU.saved, kept)) | {D: dy, SRU.results[1]: cells}
    whole[past] = highway[0] if highway else x
    after, passed = (evaluate(one, whole, rows.functions) for one in (dreset, dpast))
    if lengths:
        after, passed = (
            rows.stacked([within.shown(step, one) for step, one in enumerate(rows.steps(value))])
            for value in (after, passed)
        )
    reach = D * SRU.saved[1]
    each = [
        rows.steps(value)
        for value in (evaluate(reach, whole, rows.functions), candidate, kept[0], cells)
    ]
    made = [list(each[0]), list(each[0])]
    cell, first = rows.shaped(dc, 3), rows.shaped(c0, 3)
    order = list(step_order(len(each[0]), attributes))
    for place in range(len(order) - 1, -1, -1):
        step = order[place]
        before = each[3][order[place - 1]] if place else first
        known = {reach: each[0][step], DC: cell, read: each[1][step], cell_read: before}
        known[SRU.saved[0]] = each[2][step]
        *new, past = (
            evaluate(one, known, rows.functions) for one in (dcandidate, dforget, dbefore)
        )
        made[0][step], made[1][step] = (within.shown(step, one) for one in new)
        cell = within.kept(step, past, cell)
    parts = [rows.stacked(made[0]), rows.stacked(made[1]), after, *([passed] if highway else [])]
    direct = rows.zeros(x) if highway else passed
    return [rows.joined(*parts), direct, rows.shaped(cell, 2)]


define(
    name="sru",
    half=True,
    strided=True,
    inputs=("x", "w", "b", "c0", "lengths?"),
    outputs=("y", "c", "gates", "cells"),
    states={"c0": "cells"},
    signature=lambda inputs, attributes: _bind(_FORWARD, inputs),
    **meaning(_sru, 3),
    attributes=REVERSE,
    gradient=_gradient,
    operations=of_extents(lambda e: 2.0 * e["t"] * e["n"] * e["g"] * (e["k"] + 10)),
    cases=(
        Case(("3 2 3", "3 9", "6", "2 3")),
        Case(("3 2 3", "3 9", "6", "2 3"), {"reverse": True}),
        Case(("3 2 5", "5 12", "6", "2 3")),
        Case(("1 1 1", "1 4", "2", "1 1")),
        Case(("2 0 3", "3 8", "4", "0 2")),
        Case(("2 3 2", "2 0", "0", "3 0")),
        Case(("3 19 20", "20 132", "66", "19 33"), {}, ()),
        Case(("3 19 33", "33 99", "66", "19 33"), {"reverse": True}, ()),
        Case(("3 3 2", "2 12", "6", "3 3", "int32 3 >=1 <4")),
        Case(("3 3 3", "3 9", "6", "3 3", "int32 3 >=1 <4"), {"reverse": True}),
    ),
    doc="all states, the last cell, then the columns and the cells of every step (saved)",
)
define(
    name="sru_grad",
    strided=True,
    inputs=("dy", "dc", "gates", "cells", "x", "c0", "lengths?"),
    outputs=("dgates", "direct", "dc0"),
    signature=lambda inputs, attributes: _bind(_BACKWARD, inputs),
    **meaning(_sru_grad, 3),
    attributes=REVERSE,
    operations=of_extents(lambda e: 20.0 * e["t"] * e["n"] * e["h"]),
    cases=(
        Case(("3 2 3", "2 3", "3 2 9", "3 2 3", "3 2 3", "2 3"), {}, ()),
        Case(("3 2 3", "2 3", "3 2 12", "3 2 3", "3 2 5", "2 3"), {"reverse": True}, ()),
        Case(("1 1 1", "1 1", "1 1 4", "1 1 1", "1 1 1", "1 1"), {}, ()),
        Case(("3 19 33", "19 33", "3 19 99", "3 19 33", "3 19 33", "19 33"), {}, ()),
        Case(("2 3 0", "3 0", "2 3 0", "2 3 0", "2 3 2", "3 0"), {}, ()),
        Case(("3 2 3", "2 3", "3 2 12", "3 2 3", "3 2 5", "2 3", "int32 2 <4"), {}, ()),
    ),
    doc="the gradients of x w, of x along the highway (zeros if x is none), and of c0",
)
