"""`tree_leaves`: the leaf of each decision tree that each sample comes to.

All trees lie in one table of nodes. A node compares one feature of a sample with its threshold and
names the nodes that follow where that holds and where it does not; a leaf stays where it is. Dims:
n, the samples; f, their features; t, the trees; m, the nodes.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.ops.checks import need_float, need_integer
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

# How a node compares, in the order of their numbers; a leaf does not. Ten more: NaN holds.
COMPARISONS = ("leaf", "<=", "<", ">=", ">", "==", "!=")
MISSING = 10
_HOLDS = {
    "<=": np.less_equal,
    "<": np.less,
    ">=": np.greater_equal,
    ">": np.greater,
    "==": np.equal,
    "!=": np.not_equal,
}


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0, 1)
    for position in range(2, 7):
        need_integer(inputs, position)
    kinds = {"f": Kind.WHOLE, "m": Kind.WHOLE}
    text = "n f, m, m, m, m, m, t -> n t"
    return einsum(text, inputs, dtypes=["int32"], kinds=kinds)


def check_nodes(operator: str, features: int, feature: Array, *links: Array) -> None:
    """Check a table of nodes, whose links are where it leads to: `yes`, `no` and `roots`.

    Raises:
        GraphError: a feature or a node is not there; names the operator, operand and index.
    """
    nodes, (yes, no, roots) = len(feature), links
    for name, array, extent in (
        ("feature", feature, features),
        ("yes", yes, nodes),
        ("no", no, nodes),
        ("roots", roots, nodes),
    ):
        wrong = (array < 0) | (array >= extent)
        if wrong.any():
            needed = f"0 to {extent - 1} needed"
            raise GraphError(
                f"{operator}: operand {name!r}: {array[wrong].flat[0]} found, {needed}"
            )


def _tree_leaves(
    attributes: Attributes,
    x: Array,
    threshold: Array,
    feature: Array,
    yes: Array,
    no: Array,
    comparison: Array,
    roots: Array,
) -> Array:
    if x.shape[0] and len(roots):
        check_nodes("tree_leaves", x.shape[1], feature, yes, no, roots)
    at = np.broadcast_to(roots.astype(np.int32), (x.shape[0], len(roots))).copy()
    for _ in range(len(threshold)):  # at most: a path that is longer comes back to a node
        kind, value = comparison[at] % MISSING, np.take_along_axis(x, feature[at], axis=1)
        if at.size == 0 or (kind == 0).all():
            break
        holds = np.isnan(value) & (comparison[at] >= MISSING)
        for number, name in enumerate(COMPARISONS[1:], 1):
            holds |= (kind == number) & _HOLDS[name](value, threshold[at])
        at = np.where(kind == 0, at, np.where(holds, yes[at], no[at])).astype(np.int32)
    return at


# Three nodes that part samples by two features, and the four leaves below them.
_NODES = {
    2: (0, 1, 1, 0, 0, 0, 0),
    3: (1, 3, 5, 3, 4, 5, 6),
    4: (2, 4, 6, 3, 4, 5, 6),
    5: (1, 4, 13, 0, 0, 0, 0),
    6: (0, 2, 0),
}
_TABLE = ("7", "int32 7", "int32 7", "int32 7", "int32 7", "int32 3")
define(
    name="tree_leaves",
    inputs=("x", "threshold", "feature", "yes", "no", "comparison", "roots"),
    signature=_signature,
    reference=_tree_leaves,
    flops_per_point=8,
    cases=(
        Case(("5 2", *_TABLE), contents=_NODES),
        Case(("600 2", *_TABLE), contents=_NODES),
        Case(("0 2", *_TABLE), contents=_NODES),
        Case(
            ("1 1", "1", "int32 1", "int32 1", "int32 1", "int32 1", "int32 1"),
            contents={2: (0,), 3: (0,), 4: (0,), 5: (0,), 6: (0,)},
        ),
    ),
    doc="the node of a table at which each tree ends for each sample (n, f): (n, t)",
)
