"""`with_epilogue`: an operator and the element-wise steps on its result, in one launch.

What a convolution or a matrix product makes is still in registers when the steps run. The wrapped
operator's operands come first, then what the steps read besides; dims are the wrapped operator's,
and those that it reduces are whole. With `wide`, halves among its operands are read as the type
that they are computed in, which is that of its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from soapstone.dtypes import WIDE
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.elementwise.fused import of_step, program_steps, steps_flops
from soapstone.ir.spec import Case, OpSpec, Tile, define, operator
from soapstone.ir.tensor import Array, TensorSpec


def wrapped(attributes: Attributes) -> tuple[OpSpec, dict[str, Any]]:
    """Return the wrapped operator and its attributes, a tile's among them.

    Raises:
        GraphError: it is unknown, or its attributes are malformed.
    """
    return operator(attributes["operator"]), dict(attributes["items"])


def _own(inputs: Sequence[TensorSpec], attributes: Attributes) -> list[TensorSpec]:
    """Return the operands of the wrapped operator, as it reads them."""
    own = inputs[: attributes["arity"]]
    if attributes["wide"]:
        return [replace(x, dtype=WIDE[x.dtype]) if x.is_half else x for x in own]
    return list(own)


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    spec, given = wrapped(attributes)
    arity = attributes["arity"]
    if not 0 < arity <= len(inputs):
        raise GraphError(f"attribute arity: {arity} found, 1 to {len(inputs)} needed")
    own = _own(inputs, attributes)
    base = of_step(spec, own, spec.normalise(given))
    if len(base.outputs) != 1:
        raise GraphError(f"operator {spec.name!r} has {len(base.outputs)} outputs, 1 needed")
    output, shape = base.outputs[0], base.outputs[0].shape
    extras = []
    for position, extra in enumerate(inputs[arity:], arity):
        lead = len(shape) - extra.rank
        axes: list[Axis] = []
        for axis, extent in enumerate(extra.shape, lead):
            if lead < 0 or extent not in (1, shape[axis]):
                raise ShapeError(
                    f"input {position} has shape {extra.shape}; it must broadcast to {shape}"
                )
            axes.append(output.axes[axis] if extent == shape[axis] else Whole(1))
        extras.append(Operand(tuple(axes)))
    specs = [TensorSpec(shape, base.dtypes[0]), *inputs[arity:]]
    for step, operands, values in program_steps(attributes, len(specs)):
        specs += of_step(step, [specs[i] for i in operands], values).output_specs
    if specs[-1].shape != shape:
        raise ShapeError(f"attribute program: result {specs[-1].shape} found, {shape} needed")
    dims = tuple(
        dim if dim.kind is Kind.FREE and dim.name in output.dims else replace(dim, kind=Kind.WHOLE)
        for dim in base.dims
    )
    return Signature(dims, (*base.inputs, *extras), base.outputs, (specs[-1].dtype,))


def _operations(_: Signature, inputs: Sequence[TensorSpec], attributes: Attributes) -> float:
    spec, given = wrapped(attributes)
    own, values = _own(inputs, attributes), spec.normalise(given)
    base = of_step(spec, own, values)
    rest = steps_flops(attributes, [*base.output_specs, *inputs[attributes["arity"] :]])
    return spec.flops(base, own, values) + rest


def _reference(attributes: Attributes, *arrays: Array) -> Array:
    spec, given = wrapped(attributes)
    arity = attributes["arity"]
    values = [*spec.compute(given, *arrays[:arity]), *arrays[arity:]]
    for step, operands, settings in program_steps(attributes, len(values)):
        values += step.compute(settings, *(values[i] for i in operands))
    return values[-1]


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    spec, given = wrapped(attributes)
    if spec.localize is None:
        return attributes
    arity = attributes["arity"]
    own = replace(tile, inputs=tile.inputs[:arity], input_shapes=tile.input_shapes[:arity])
    return {**attributes, "items": tuple(spec.localize(given, own).items())}


_CONV = (
    ("activation", None),
    ("bias", True),
    ("dilation", (1, 1)),
    ("groups", 1),
    ("padding", (1, 1, 1, 1)),
    ("stride", (1, 1)),
)
_LINEAR = (("activation", None), ("bias", True))
_RESIDUAL = (("add", (0, 1), ()), ("relu", (2,), ()))
_BYTE = (("to", "uint8"),)

define(
    name="with_epilogue",
    mixes_types=True,
    inputs=("x*",),
    signature=_signature,
    reference=_reference,
    attributes={
        "operator": Attribute("str"),
        "items": Attribute("program"),
        "arity": Attribute("int", minimum=1),
        "program": Attribute("program"),
        "wide": Attribute("bool", False),
    },
    localize=_localize,
    operations=_operations,
    cases=(
        Case(
            ("2 3 5 5", "4 3 3 3", "4", "2 4 5 5"),
            {"operator": "conv2d", "items": _CONV, "arity": 3, "program": _RESIDUAL},
        ),
        Case(
            ("2 3 5 5", "4 3 3 3", "4"),
            {
                "operator": "conv2d",
                "items": _CONV,
                "arity": 3,
                "program": (
                    ("sigmoid", (0,), ()),
                    ("affine", (1,), (("scale", 2.0), ("shift", 1.0))),
                ),
            },
        ),
        Case(
            ("2 3 8", "8 6", "6", "2 3 6"),
            {"operator": "linear", "items": _LINEAR, "arity": 3, "program": _RESIDUAL},
        ),
        Case(
            ("3 8", "8 6", "6", "6"),
            {
                "operator": "linear",
                "items": _LINEAR,
                "arity": 3,
                "program": (("gelu", (0,), ()), ("mul", (1, 2), ())),
            },
        ),
        Case(
            ("2 3 5 5", "4 3 3 3", "4", "", "uint8"),
            {
                "operator": "conv2d",
                "items": _CONV,
                "arity": 3,
                "program": (("relu", (0,), ()), ("quantize", (3, 1, 2), _BYTE)),
            },
            positive=True,
        ),
        Case(
            (
                *("uint8 3 8 <9", "int8 8 6 >=-9 <9", "int32 <5", "6"),
                *("", "uint8 >=99 <140", "uint8 3 6 <256", "", "uint8 >=120 <140"),
            ),
            {
                "operator": "quantized_linear",
                "items": (("bias", False), ("to", "float"), ("w_zero", 0)),
                "arity": 4,
                "program": (
                    ("quantize", (0, 1, 2), _BYTE),
                    ("dequantize", (6, 1, 2), ()),
                    ("dequantize", (3, 4, 5), ()),
                    ("add", (7, 8), ()),
                    ("quantize", (9, 1, 2), _BYTE),
                ),
            },
            positive=True,
        ),
        Case(
            ("2 4 3", "2 3 5", "2 4 5"),
            {
                "operator": "matmul",
                "items": (("transpose_a", False), ("transpose_b", False)),
                "arity": 2,
                "program": (("sub", (0, 1), ()), ("tanh", (2,), ())),
            },
        ),
    ),
    doc="operator with items on the first `arity` operands, then the steps of program",
)
