"""The space of the operators of transformers: batches of rows, weights, and what is repeated.

All extents differ. `c` has one column and is repeated along rows; `v` is a vector, repeated over
all rows, as are the ones; no functions of these alone are enumerated. Layer normalisation has the
weights `v` and `v`, which lifting tells apart.
"""

from __future__ import annotations

from soapstone.ir.term import parse
from soapstone.rules.enumeration.space import Kind, OperatorUse, Signature, Space, inputs

_BATCH: tuple[Kind, ...] = ("batch", "matrix")
_SAME: tuple[Signature, ...] = tuple((kind, kind, kind) for kind in _BATCH)
_REPEATED: tuple[Signature, ...] = (
    *_SAME,
    *((kind, "vector", kind) for kind in _BATCH),
    *(("vector", kind, kind) for kind in _BATCH),
)
_MATMUL: tuple[Signature, ...] = (
    *_SAME,
    ("batch", "matrix", "batch"),
    ("batch", "vector", "batch"),
)
_ONE: tuple[Signature, ...] = tuple((kind, kind) for kind in _BATCH)
_FUNCTIONS = ("exp", "sqrt", "rsqrt", "sigmoid", "tanh", "gelu")
_ALONG = ("softmax", "reduce_sum", "reduce_mean")


def transformer() -> Space:
    """Return the space of transformers' operators, of graphs of up to three."""
    two = (
        *(OperatorUse(s, (), _REPEATED, equal=False) for s in ("add", "sub", "mul", "div")),
        OperatorUse("matmul", (), _MATMUL),
        *(OperatorUse("concat", (axis,), _SAME) for axis in (-2, -1)),
        OperatorUse("concat", (-3,), (("batch", "batch", "batch"),)),
    )
    one = (
        *(OperatorUse(symbol, (), _ONE) for symbol in _FUNCTIONS),
        *(OperatorUse(symbol, (axis,), _ONE) for symbol in _ALONG for axis in (-1, -2)),
        OperatorUse("layer_norm", (), _ONE, (parse("v"), parse("v"))),
        OperatorUse("transpose", (), _ONE),
        OperatorUse("merge"),
    )
    given = "x1 x2 batch 2x3x4; c vector 2x3x1; w1 w2 matrix 4x5; v vector 4; ones vector 2x3x1"
    return Space("transformer", inputs(given), two + one, 3)
