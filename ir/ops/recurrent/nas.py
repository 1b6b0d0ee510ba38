"""`nas_cell`, the recurrent cell found by architecture search: eight gates in a tree.

The gates of input and state are added, but for the fourth, where they are multiplied. Saved for the
gradient are the gates after their functions, and both factors of the fourth.

Source: Zoph and Le 2017, appendix A (the base-8 cell), as TensorFlow's NASCell wires it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.ir.attributes import Attributes
from soapstone.ir.ops.recurrent.cells import DC, NAS, PRODUCT, D
from soapstone.ir.ops.recurrent.rnn import (
    Rows,
    gated,
    grad_or_zeros,
    meaning,
    products,
)
from soapstone.ir.spec import Case, GradientContext, define, of_extents


def _cell(
    rows: Any, attributes: Attributes, x: Any, h: Any, c: Any, w: Any, r: Any, b: Any
) -> Sequence[Any]:
    left = rows.parts(rows.product(x, w, k="k"), 8)
    right = rows.parts(rows.product(h, r, b), 8)
    y, cell, *gates = NAS.step(rows.functions, *left, *right, c)
    return [y, cell, rows.joined(*gates), left[PRODUCT], right[PRODUCT]]


def _gradient(g: GradientContext) -> Sequence[str | None]:
    g.refuse_saved(2)
    x, h, c, w, r, _ = g.inputs
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), *g.outputs[2:], c)
    left, right, dc = g.emit.all("nas_cell_grad", *given)
    rows = Rows(g.emit, 2)
    dx, dh = rows.back(left, w, "k"), rows.back(right, r)
    return [dx, dh, dc, rows.weight(x, left, "k"), rows.weight(h, right), rows.total(right)]


def _cell_grad(
    rows: Any, attributes: Attributes, dy: Any, dcell: Any, gates: Any, p: Any, q: Any, c: Any
) -> Sequence[Any]:
    known = dict(zip(NAS.saved, rows.parts(gates, 8))) | {D: dy, DC: dcell, NAS.reads[16]: c}
    known |= {NAS.reads[PRODUCT]: p, NAS.reads[8 + PRODUCT]: q}
    *made, dc = NAS.back(rows.functions, known)
    return [rows.joined(*made[:8]), rows.joined(*made[8:]), dc]


define(
    name="nas_cell",
    half=True,
    inputs=("x", "h", "c", "w", "r", "b"),
    outputs=("y", "cell", "gates", "left", "right"),
    signature=gated("n k, n h, n h, k g, h g, g -> n h, n h, n g, n h, n h", 8),
    **meaning(_cell, 2),
    gradient=_gradient,
    operations=of_extents(products),
    cases=(
        Case(("2 5", "2 3", "2 3", "5 24", "3 24", "24")),
        Case(("3 2", "3 1", "3 1", "2 8", "1 8", "8")),
        Case(("1 1", "1 1", "1 1", "1 8", "1 8", "8")),
        Case(("0 3", "0 2", "0 2", "3 16", "2 16", "16")),
        Case(("19 20", "19 33", "19 33", "20 264", "33 264", "264"), {}, (), True),
    ),
    doc="one step: the state, the cell, then (saved) the gates and the factors of one",
)
define(
    name="nas_cell_grad",
    inputs=("dy", "dcell", "gates", "left", "right", "c"),
    outputs=("dinputs", "dstates", "dc"),
    signature=gated("n h, n h, n g, n h, n h, n h -> n g, n g, n h", 8),
    **meaning(_cell_grad, 2),
    operations=of_extents(lambda extents: 80.0 * extents["n"] * extents["h"]),
    cases=(
        Case(("2 3", "2 3", "2 24", "2 3", "2 3", "2 3"), {}, ()),
        Case(("1 1", "1 1", "1 8", "1 1", "1 1", "1 1"), {}, ()),
        Case(("0 2", "0 2", "0 16", "0 2", "0 2", "0 2"), {}, ()),
        Case(("19 33", "19 33", "19 264", "19 33", "19 33", "19 33"), {}, (), True),
    ),
    doc="the gradients of x w and of h r + b, and of the cell before",
)
