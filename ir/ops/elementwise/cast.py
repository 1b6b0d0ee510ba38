"""`cast`: the same values in another element type. Dims: d0, d1, … by axis."""

from __future__ import annotations

import numpy as np

from soapstone.dtypes import DTYPES, floats, learn, name_of
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.ops.elementwise.pointwise import declare, pointwise
from soapstone.ir.spec import Case, GradientContext
from soapstone.ir.tensor import Array, TensorSpec

_POWERS, _MOST = "float8_e8m0fnu", 254  # the highest exponent; the one after it is NaN


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pointwise(inputs, attributes["to"])


def _cast(attributes: Attributes, x: Array) -> Array:
    to = learn(attributes["to"])
    with np.errstate(invalid="ignore", over="ignore"):  # out of range: as NumPy, unspecified
        if to == _POWERS and name_of(x.dtype) != _POWERS:
            return _powers(x, attributes["round_mode"], attributes["saturate"])
        if attributes["saturate"] and to.startswith("float8"):
            limits = floats(to)
            x = np.clip(x, float(limits.min), float(limits.max))
        return np.asarray(x).astype(to)


def _powers(x: Array, mode: str, saturate: bool) -> Array:
    """Return powers of two, of which the type has but the exponents, near the magnitudes of x."""
    part, exponent = np.frexp(np.abs(x.astype(np.float64)))  # a half to one, of the next power
    above = {"up": part > 0.5, "down": np.zeros_like(part, bool), "nearest": part >= 0.75}[mode]
    place = np.where(np.isinf(x), _MOST + 1, np.where(part == 0, -1, exponent + 126 + above))
    beyond = np.isnan(x) | ((place != np.clip(place, 0, _MOST)) & (not saturate))
    return np.where(beyond, _MOST + 1, np.clip(place, 0, _MOST)).astype(np.uint8).view(_POWERS)


def _gradient(g: GradientContext) -> list[str | None]:
    x, y = g.spec(g.inputs[0]), g.spec(g.outputs[0])
    return [g.emit("cast", g.grad(), to=x.dtype) if x.is_float and y.is_float else None]


declare(
    "cast",
    None,
    _gradient,
    reference=_cast,
    attributes={
        "to": Attribute("str", choices=DTYPES),
        "saturate": Attribute("bool", False),
        "round_mode": Attribute("str", "nearest", choices=("nearest", "up", "down")),
    },
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
        Case(("3 4",), {"to": "bfloat16"}, ()),
        Case(("2 3",), {"to": "float8_e4m3fn", "saturate": True}, ()),
        Case(("2 3",), {"to": "float8_e8m0fnu", "round_mode": "up"}, ()),
    ),
    doc="the same values in another element type; to integers by truncation, to types of 8 bits"
    " within their limits if it saturates, to powers of two by round_mode",
    signature=_signature,
)
