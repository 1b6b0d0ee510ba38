"""Cross-entropy of logits against labels or probabilities, and the primitives it is lowered to.

Split over classes, a cross-entropy runs as reductions, a masked `pick` of the labels' columns and,
in the gradient, a `one_hot` of the columns held. Dims: n (samples), c (classes); of `one_hot`: d0,
d1, … for the labels' axes, and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import need_float, need_integer, need_rank
from soapstone.ir.ops.reduction.folds import unit_rename
from soapstone.ir.ops.signatures import DimTable, along, einsum, finish, numbered
from soapstone.ir.ops.training.loss import COUNT, mean_of
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

_NC = {"d0": "n", "d1": "c"}


def _check_labels(labels: Array, classes: int) -> None:
    bad = labels[(labels < 0) | (labels >= classes)]
    if bad.size:
        raise GraphError(f"label {int(bad.flat[0])} found, 0 to {classes - 1} needed")


def _classes(inputs: Sequence[TensorSpec], attributes: Attributes) -> dict[int, range]:
    return {1: range(inputs[0].shape[1])}


def _one_hot_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_integer(inputs, 0)
    table = DimTable()
    labels = numbered(table, inputs[0].shape, "input 0")
    classes = along(table, "v", attributes["classes"], "attribute classes")
    outputs = [Operand((*labels.axes, classes))]
    return finish(table, [labels], outputs, [attributes["dtype"]])


def _one_hot(attributes: Attributes, labels: Array) -> Array:
    classes, base, total = (attributes[name] for name in ("classes", "base", "total"))
    _check_labels(labels, base + classes if total is None else total)
    hit: Array = labels[..., np.newaxis] == np.arange(base, base + classes)
    return hit.astype(attributes["dtype"])


def _one_hot_localize(attributes: Attributes, tile: Tile) -> Attributes:
    base, total = attributes["base"], attributes["total"]
    return {
        **attributes,
        "classes": tile.size("v"),
        "base": base + tile.intervals["v"][0],
        "total": base + attributes["classes"] if total is None else total,
    }


def _pick_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_integer(inputs, 1)
    return einsum("n c, n -> n", inputs, dtypes=[inputs[0].dtype])


def _pick(attributes: Attributes, x: Array, labels: Array) -> Array:
    base, total = attributes["base"], attributes["total"]
    _check_labels(labels, base + x.shape[1] if total is None else total)
    column = labels - base
    held = (column >= 0) & (column < x.shape[1])
    y = np.zeros(labels.shape, x.dtype)
    y[held] = x[np.flatnonzero(held), column[held]]
    return y


def _pick_localize(attributes: Attributes, tile: Tile) -> Attributes:
    base, total = attributes["base"], attributes["total"]
    if total is None:
        total = base + tile.input_shapes[0][1]
    return {"base": base + tile.intervals["c"][0], "total": total}


def _pick_grad(g: GradientContext) -> list[str | None]:
    spec = g.spec(g.inputs[0])
    hit = g.emit(
        "one_hot",
        g.inputs[1],
        classes=spec.shape[1],
        base=g.attributes["base"],
        total=g.attributes["total"],
        dtype=spec.dtype,
        rename={"d0": "n", "v": "c"},
    )
    return [g.emit("mul", hit, _column(g.emit, g.grad()), rename=_NC), None]


_WINDOW = {"base": Attribute("int", 0, minimum=0), "total": Attribute("int", None, minimum=0)}
define(
    name="one_hot",
    inputs=("labels",),
    signature=_one_hot_signature,
    reference=_one_hot,
    attributes={
        "classes": Attribute("int", minimum=0),
        "dtype": Attribute("str", "float32", choices=("float32", "float64")),
        **_WINDOW,
    },
    gradient=lambda g: [None],
    localize=_one_hot_localize,
    onnx="OneHot",
    cases=(
        Case(("int64 4 <3",), {"classes": 3}),
        Case(("int32 2 3 <5",), {"classes": 5, "dtype": "float64"}),
        Case(("int32 6 <5",), {"classes": 2, "base": 1, "total": 5}),
        Case(("int64 <2",), {"classes": 2}),
        Case(("int64 0 <2",), {"classes": 2}),
    ),
    doc="1 where base + column is the label, else 0\n"
    "labels: integers of any shape, from 0 to total - 1, or base + classes - 1 without a\n"
    "total; result: (*labels, classes)",
)
define(
    name="pick",
    inputs=("x", "labels"),
    signature=_pick_signature,
    reference=_pick,
    attributes=_WINDOW,
    gradient=_pick_grad,
    localize=_pick_localize,
    flops_per_point=0,
    cases=(
        Case(("4 3", "int64 4 <3")),
        Case(("5 2", "int32 5 <6"), {"base": 3, "total": 6}),
        Case(("1 1", "int64 1 <1")),
        Case(("0 3", "int64 0 <3")),
    ),
    layer=None,
    doc="x[i, labels[i] - base], or 0 where the column is not held; x: (n, c), labels: (n)",
)


# Cross-entropy


def _need_samples(spec: TensorSpec, attributes: Attributes) -> None:
    if attributes["count"] is None and spec.size == 0:
        dim = f"dim n is {spec.shape[0]}" if spec.shape[0] == 0 else "dim c is 0"
        raise ShapeError(f"{dim} in the shape {spec.shape}; 1 or more needed for a mean")


def _need_expected(inputs: tuple[TensorSpec, ...], position: int, dims: str) -> None:
    """Check what is expected of each row: a label ("n"), or a probability of each class ("n c")."""
    if dims == "n":
        need_integer(inputs, position)
    else:
        need_float(inputs, position)


def _signature(expected: str, inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_rank(inputs, 0, "n c")
    need_float(inputs, 0)
    _need_expected(inputs, 1, expected)
    _need_samples(inputs[0], attributes)
    dtypes = [inputs[0].dtype] * 2
    return einsum(f"n c, {expected} -> (), n", inputs, dtypes=dtypes, kinds={"c": Kind.LOWERED})


def _grad_signature(
    expected: str, inputs: tuple[TensorSpec, ...], attributes: Attributes
) -> Signature:
    _need_expected(inputs, 2, expected)
    need_rank(inputs, 1, "n c")
    need_float(inputs, 0, 1, 3)
    _need_samples(inputs[1], attributes)
    text = f", n c, {expected}, n -> n c"
    return einsum(text, inputs, dtypes=[inputs[1].dtype], kinds={"c": Kind.LOWERED})


def _localize_rows(attributes: Attributes, tile: Tile, logits: int) -> Attributes:
    if attributes["count"] is not None:
        return attributes
    return {**attributes, "count": tile.input_shapes[logits][0]}


def _rows(attributes: Attributes, logits: Array) -> int:
    return int(attributes["count"] or max(logits.shape[0], 1))


def _log_sum_exp(logits: Array) -> Array:
    largest = np.max(logits, axis=1, keepdims=True, initial=-np.inf)
    total = np.sum(np.exp(logits - largest), axis=1, keepdims=True)
    return np.asarray((np.log(total) + largest)[:, 0])


def _cross_entropy(attributes: Attributes, logits: Array, labels: Array) -> tuple[Array, Array]:
    lse = _log_sum_exp(logits)
    picked = _pick({"base": 0, "total": None}, logits, labels)
    return mean_of(lse - picked, _rows(attributes, logits)), lse


def _cross_entropy_dense(
    attributes: Attributes, logits: Array, targets: Array
) -> tuple[Array, Array]:
    lse = _log_sum_exp(logits)
    rows = np.sum(targets * (lse[:, np.newaxis] - logits), axis=1)
    return mean_of(rows, _rows(attributes, logits)), lse


def _cross_entropy_grad(
    attributes: Attributes, dloss: Array, logits: Array, labels: Array, lse: Array
) -> Array:
    _check_labels(labels, logits.shape[1])
    hit = labels[:, np.newaxis] == np.arange(logits.shape[1])
    scale = dloss / logits.dtype.type(_rows(attributes, logits))
    return np.asarray((np.exp(logits - lse[:, np.newaxis]) - hit) * scale)


def _cross_entropy_dense_grad(
    attributes: Attributes, dloss: Array, logits: Array, targets: Array, lse: Array
) -> Array:
    total = np.sum(targets, axis=1, keepdims=True)
    scale = dloss / logits.dtype.type(_rows(attributes, logits))
    return np.asarray((np.exp(logits - lse[:, np.newaxis]) * total - targets) * scale)


def _column(emit: Emitter, value: str) -> str:
    """Return a value of shape (n) as (n, 1)."""
    shape = (*emit.spec(value).shape, 1)
    return emit("reshape", value, shape=shape, rename=unit_rename(shape, ("n", "c")))


def _row_sum(emit: Emitter, value: str) -> str:
    return emit("reduce_sum", value, axes=(1,), keepdims=True, rename=_NC)


def _lower_lse(emit: Emitter, logits: str) -> tuple[str, str]:
    """Emit the log-sum-exp of the rows, and return it as (n, 1) and as (n)."""
    rows = {"d0": "n", "d1": ""}
    largest = emit("reduce_max", logits, axes=(1,), keepdims=True, rename=_NC)
    powers = emit("exp", emit("sub", logits, largest, rename=_NC), rename=_NC)
    total = emit("log", _row_sum(emit, powers), rename=rows)
    column = emit("add", total, largest, rename=rows)
    shape = emit.spec(logits).shape[:1]
    return column, emit("reshape", column, shape=shape, rename=unit_rename(shape, ("n",)))


def _lower_mean(emit: Emitter, node: Node, rows: str) -> str:
    """Emit the mean of per-row losses."""
    axes = tuple(range(emit.spec(rows).rank))
    total = emit("reduce_sum", rows, axes=axes, rename={"d0": "n", "d1": "c"})
    return emit("affine", total, scale=1 / _lowered_count(emit, node, node.inputs[0]))


def _lowered_count(emit: Emitter, node: Node, logits: str) -> int:
    return int(node.attributes["count"] or max(emit.spec(logits).shape[0], 1))


def _lower_sparse(emit: Emitter, node: Node) -> Sequence[str]:
    logits, labels = node.inputs
    _, lse = _lower_lse(emit, logits)
    picked = emit("pick", logits, labels)
    rows = emit("sub", lse, picked, rename={"d0": "n"})
    return [_lower_mean(emit, node, rows), lse]


def _lower_dense(emit: Emitter, node: Node) -> Sequence[str]:
    logits, targets = node.inputs
    column, lse = _lower_lse(emit, logits)
    below = emit("sub", column, logits, rename=_NC)
    return [_lower_mean(emit, node, emit("mul", targets, below, rename=_NC)), lse]


def _lower_softmax(emit: Emitter, logits: str, lse: str) -> str:
    difference = emit("sub", logits, _column(emit, lse), rename=_NC)
    return emit("exp", difference, rename=_NC)


def _lower_scaled(emit: Emitter, node: Node, value: str) -> list[str]:
    scale = emit("affine", node.inputs[0], scale=1 / _lowered_count(emit, node, node.inputs[1]))
    return [emit("mul", value, scale, rename=_NC)]


def _lower_sparse_grad(emit: Emitter, node: Node) -> Sequence[str]:
    _, logits, labels, lse = node.inputs
    spec = emit.spec(logits)
    rename = {"d0": "n", "v": "c"}
    hit = emit("one_hot", labels, classes=spec.shape[1], dtype=spec.dtype, rename=rename)
    softmax = _lower_softmax(emit, logits, lse)
    return _lower_scaled(emit, node, emit("sub", softmax, hit, rename=_NC))


def _lower_dense_grad(emit: Emitter, node: Node) -> Sequence[str]:
    _, logits, targets, lse = node.inputs
    softmax = _lower_softmax(emit, logits, lse)
    expected = emit("mul", softmax, _row_sum(emit, targets), rename=_NC)
    return _lower_scaled(emit, node, emit("sub", expected, targets, rename=_NC))


def _lse_grad(g: GradientContext, parts: list[str]) -> str | None:
    """Return the logits' gradient, adding the part that arrives through the second output."""
    if g.grads[1] is not None:
        softmax = _lower_softmax(g.emit, g.inputs[0], g.outputs[1])
        parts = [*parts, g.emit("mul", softmax, _column(g.emit, g.grads[1]), rename=_NC)]
    if len(parts) < 2:
        return parts[0] if parts else None
    return g.emit("accumulate", *parts, rename=_NC)


def _sparse_gradient(g: GradientContext) -> list[str | None]:
    parts = []
    if g.grads[0] is not None:
        operands = (g.grads[0], *g.inputs, g.outputs[1])
        parts.append(g.emit("cross_entropy_grad", *operands, count=g.attributes["count"]))
    return [_lse_grad(g, parts), None]


def _dense_gradient(g: GradientContext) -> list[str | None]:
    count = g.attributes["count"]
    spec = g.spec(g.inputs[0])
    parts, targets = [], None
    if g.grads[0] is not None:
        operands = (g.grads[0], *g.inputs, g.outputs[1])
        parts.append(g.emit("cross_entropy_dense_grad", *operands, count=count))
        below = g.emit("sub", _column(g.emit, g.outputs[1]), g.inputs[0], rename=_NC)
        scale = g.emit("affine", g.grads[0], scale=1 / (count or spec.shape[0]))
        targets = g.emit("mul", below, scale, rename=_NC)
    else:  # the log-sum-exp does not depend on the targets
        whole = {"d0": "n", "d1": "c"}
        targets = g.emit("full", shape=spec.shape, dtype=spec.dtype, rename=whole)
    return [_lse_grad(g, parts), targets]


for _name, _second, _dims, _references, _lowers, _rule, _doc, _cases, _grad_cases in (
    (
        *("cross_entropy", "labels", "n", (_cross_entropy, _cross_entropy_grad)),
        *((_lower_sparse, _lower_sparse_grad), _sparse_gradient),
        "sum of lse_i - logits[i, labels_i] over count; count: n unless given",
        (
            Case(("4 3", "int64 4 <3")),
            Case(("3 5", "int32 3 <5")),
            Case(("4 3", "int64 4 <3"), {"count": 7}),
            Case(("1 1", "int64 1 <1")),
            Case(("0 3", "int64 0 <3"), {"count": 4}),
        ),
        (
            Case(("", "4 3", "int64 4 <3", "4"), {}, ()),
            Case(("", "3 5", "int32 3 <5", "3"), {"count": 6}, ()),
            Case(("", "1 2", "int64 1 <2", "1"), {}, ()),
            Case(("", "0 2", "int64 0 <2", "0"), {"count": 1}, ()),
        ),
    ),
    (
        *("cross_entropy_dense", "targets", "n c"),
        *((_cross_entropy_dense, _cross_entropy_dense_grad), (_lower_dense, _lower_dense_grad)),
        _dense_gradient,
        "sum of targets * (lse - logits) over count; targets: (n, c) probabilities",
        (
            Case(("4 3", "4 3")),
            Case(("3 5", "3 5"), {"count": 7}, positive=True),
            Case(("1 2", "1 2")),
            Case(("0 3", "0 3"), {"count": 4}),
        ),
        (
            Case(("", "4 3", "4 3", "4"), {}, ()),
            Case(("", "3 5", "3 5", "3"), {"count": 6}, ()),
            Case(("", "1 2", "1 2", "1"), {}, ()),
            Case(("", "0 2", "0 2", "0"), {"count": 1}, ()),
        ),
    ),
):
    define(
        name=_name,
        inputs=("logits", _second),
        outputs=("loss", "lse"),
        signature=partial(_signature, _dims),
        reference=_references[0],
        attributes=COUNT,
        gradient=_rule,
        localize=lambda a, tile: _localize_rows(a, tile, 0),
        lower=_lowers[0],
        indices=_classes if _name == "cross_entropy" else None,
        flops_per_point=8,
        layer=None,
        cases=_cases,
        doc=_doc,
    )
    define(
        name=f"{_name}_grad",
        inputs=("dloss", "logits", _second, "lse"),
        outputs=("dlogits",),
        signature=partial(_grad_signature, _dims),
        reference=_references[1],
        attributes=COUNT,
        localize=lambda a, tile: _localize_rows(a, tile, 1),
        lower=_lowers[1],
        flops_per_point=8,
        cases=_grad_cases,
    )
