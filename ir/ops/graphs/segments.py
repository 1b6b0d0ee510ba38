"""Softmax over the entries of each row of a sparse matrix: over the edges that lead to a vertex.

Sums, means and maxima over such segments, and what gathers rows at the ends of edges, are `spmm`
with the matrix (vertices, edges) that says where edges end.

Dims: v, the matrix's rows, which are segments of entries: split, each point has zeros in entries
that are not its own, and they add up; d, columns; e, the entries, never split.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.ops.checks import need_float, need_integer
from soapstone.ir.ops.graphs.spmm import DOUBLE, NONE, WIDE, bound, entries, example
from soapstone.ir.spec import GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    *reals, offsets = range(len(inputs))
    need_float(inputs, *reals)
    need_integer(inputs, offsets)
    return bound(inputs, (*["e d"] * len(reals), "v+"), ["e d"])


def segments(operator: str, indptr: Array, rows: int) -> tuple[Array, slice]:
    """Return the segment of each entry, counted from the first, and which entries have one.

    Raises:
        GraphError: offsets that fall, or lie outside of the rows.
    """
    return entries(operator, indptr, np.zeros(rows, np.int64), 1)


def _softmax(attributes: Attributes, x: Array, indptr: Array) -> Array:
    rows, held = segments("segment_softmax", indptr, len(x))
    most = np.full((max(len(indptr) - 1, 0), x.shape[1]), -np.inf, x.dtype)
    np.maximum.at(most, rows, x[held])
    y, total = np.zeros_like(x), np.zeros_like(most)
    y[held] = np.exp(x[held] - most[rows])
    np.add.at(total, rows, y[held])
    y[held] /= total[rows]
    return y


def _gradient(g: GradientContext) -> Sequence[str | None]:
    return [g.emit("segment_softmax_grad", g.grad(), g.outputs[0], g.inputs[1]), None]


def _softmax_grad(attributes: Attributes, dy: Array, y: Array, indptr: Array) -> Array:
    rows, held = segments("segment_softmax_grad", indptr, len(y))
    dots = np.zeros((max(len(indptr) - 1, 0), y.shape[1]), y.dtype)
    np.add.at(dots, rows, (dy * y)[held])
    dx = np.zeros_like(y)
    dx[held] = y[held] * (dy[held] - dots[rows])
    return dx


define(
    name="segment_softmax",
    inputs=("x", "indptr"),
    signature=_signature,
    reference=_softmax,
    gradient=_gradient,
    flops_per_point=8,
    cases=(
        example(("6 3", "p"), WIDE),
        example(("6 20", "p"), DOUBLE),
        example(("8 1", "p"), WIDE),
        example(("0 2", "p"), NONE),
        example(("6 0", "p"), WIDE),
    ),
    layer=None,
    doc="softmax of each column of x over each segment of rows\n"
    "x: (e, d); indptr: (v + 1), where segments begin and the last one ends; result: (e, d),\n"
    "0 in rows that are in no segment",
)
define(
    name="segment_softmax_grad",
    inputs=("dy", "y", "indptr"),
    outputs=("dx",),
    signature=_signature,
    reference=_softmax_grad,
    flops_per_point=4,
    cases=(
        example(("6 3", "6 3", "p"), WIDE, ()),
        example(("8 20", "8 20", "p"), DOUBLE, ()),
        example(("0 2", "0 2", "p"), NONE, ()),
    ),
    doc="y (dy - s), where s is the sum of y dy over each segment of rows",
)
