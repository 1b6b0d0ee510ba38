"""`cast`: the same values in another element type. Dims: d0, d1, … by axis."""

from __future__ import annotations

import numpy as np

from soapstone.ir.dims import Signature
from soapstone.ir.ops.elementwise.pointwise import declare, pointwise
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext
from soapstone.ir.tensor import DTYPES, Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pointwise(inputs, attributes["to"])


def _cast(attributes: Attributes, x: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):  # out of range: as NumPy, unspecified
        return np.asarray(x).astype(attributes["to"])


def _gradient(g: GradientContext) -> list[str | None]:
    x, y = g.spec(g.inputs[0]), g.spec(g.outputs[0])
    return [g.emit("cast", g.grad(), to=x.dtype) if x.is_float and y.is_float else None]


declare(
    "cast",
    None,
    _gradient,
    reference=_cast,
    attributes={"to": Attribute("str", choices=DTYPES)},
    onnx="Cast",
    cases=(
        Case(("3 4",), {"to": "float64"}),
        Case(("3 4",), {"to": "float32"}, ()),
        Case(("2 3",), {"to": "int32"}, ()),
        Case(("2 3",), {"to": "bool"}, ()),
        Case(("int64 2 3 <9",), {"to": "float32"}, ()),
        Case(("int32 2 3 >=-9 <9",), {"to": "int64"}, ()),
        Case(("bool 4",), {"to": "float32"}, ()),
        Case(("",), {"to": "int64"}, ()),
        Case(("0 3",), {"to": "float64"}),
    ),
    doc="the same values in another element type; to integers by truncation",
    signature=_signature,
)
