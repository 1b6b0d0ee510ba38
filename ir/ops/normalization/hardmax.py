"""`hardmax`: one where an axis has its first maximum, zero elsewhere. Dims: d0, d1, … by axis."""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.ops.checks import front_axis
from soapstone.ir.ops.elementwise.pointwise import nowhere
from soapstone.ir.ops.signatures import aligned, finish
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    whole = {f"d{front_axis(inputs[0], attributes['axis'])}": Kind.WHOLE}
    table, operands = aligned(inputs)
    return finish(table, operands, operands, [inputs[0].dtype], whole)


def _hardmax(attributes: Attributes, x: Array) -> Array:
    axis = attributes["axis"]
    y = np.zeros_like(x)
    if x.size:
        place = np.expand_dims(np.argmax(x, axis), axis)
        np.put_along_axis(y, place, 1, axis)
    return y


define(
    name="hardmax",
    inputs=("x",),
    signature=_signature,
    reference=_hardmax,
    attributes={"axis": Attribute("axis", -1)},
    gradient=nowhere,
    onnx="Hardmax",
    cases=(
        Case(("3 5",), {}, ()),
        Case(("2 3 4",), {"axis": 1}, ()),
        Case(("4",), {"axis": 0}, ()),
        Case(("int32 3 2",), {"axis": -2}, ()),
        Case(("0 3",), {}, ()),
    ),
    doc="one at the first maximum along the axis, zero elsewhere\n"
    "x: any shape, which is also the result's",
)
