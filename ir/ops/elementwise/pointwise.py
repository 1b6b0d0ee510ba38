"""How element-wise operators are declared: NumPy broadcasting, dims d0, d1, …, and gradients.

Dims are named by the output's axes. The families are in arithmetic.py, activation.py,
comparison.py, trigonometry.py, bitwise.py and cast.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine, Axis, DimTable, Operand, Signature, Whole, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.spec import (
    Attribute,
    Attributes,
    Case,
    GradientContext,
    OpSpec,
    SignatureRule,
    register,
)
from soapstone.ir.tensor import TensorSpec

Reference = Callable[..., Any]
GradientRule = Callable[[GradientContext], Sequence[str | None]]

UNARY_CASES = (Case(("2 3 4",)), Case(("5",)), Case(("1 1",)), Case(("0 3",)), Case(("",)))
BINARY_CASES = (
    Case(("3 4", "3 4")),
    Case(("2 3 4", "4")),
    Case(("2 1 4", "3 1")),
    Case(("3 2", "")),
    Case(("0 2", "1 2")),
)


def pointwise(inputs: Sequence[TensorSpec], dtype: str | None = None) -> Signature:
    """Return the signature of an element-wise operator: NumPy broadcasting, dims d0, d1, …

    Raises:
        ShapeError: two extents differ and neither is 1; names the dim.
    """
    rank = max(spec.rank for spec in inputs)
    largest = [1] * rank
    for spec in inputs:
        for axis, extent in enumerate(spec.shape, rank - spec.rank):
            if extent != 1:
                largest[axis] = extent
    table = DimTable()
    for axis, extent in enumerate(largest):
        table.add(f"d{axis}", extent, "output")
    operands = []
    for position, spec in enumerate(inputs):
        axes: list[Axis] = []
        for axis, extent in enumerate(spec.shape, rank - spec.rank):
            if extent == 1 and largest[axis] != 1:
                axes.append(Whole(1))
            else:
                if extent != largest[axis]:
                    raise ShapeError(
                        f"dim d{axis} is {largest[axis]} but {extent} in input {position}"
                        f" (shape {spec.shape})"
                    )
                axes.append(along(table, f"d{axis}", extent, f"input {position}"))
        operands.append(Operand(tuple(axes)))
    output = Operand(tuple(Affine(f"d{axis}", extent) for axis, extent in enumerate(largest)))
    return finish(table, operands, [output], [dtype or inputs[0].dtype])


def unbroadcast(
    context: GradientContext, grad: str, value: str, rename: dict[str, str] | None = None
) -> str:
    """Return the gradient summed over the dims along which `value` was broadcast.

    `rename` says what the gradient's dims d0, d1, … are called in the forward operator.
    """
    have, need = context.spec(grad).shape, context.spec(value).shape
    if have == need:
        return grad
    lead = len(have) - len(need)
    axes = tuple(
        axis
        for axis in range(len(have))
        if axis < lead or (need[axis - lead] == 1 and have[axis] != 1)
    )
    summed = context.emit("reduce_sum", grad, axes=axes, keepdims=False, rename=rename)
    if context.spec(summed).shape != need:
        summed = context.emit("reshape", summed, shape=need)
    return summed


def aligned(context: GradientContext, value: str) -> dict[str, str]:
    """Return what the dims of a broadcast operand are among those of the operator's output."""
    whole = context.spec(context.outputs[0]).shape
    shape = context.spec(value).shape
    lead = len(whole) - len(shape)
    return {
        f"d{axis}": f"d{axis + lead}" if extent == whole[axis + lead] else ""
        for axis, extent in enumerate(shape)
    }


def result_type(inputs: Sequence[TensorSpec]) -> str:
    """Return the type of NumPy's result on the inputs, which must be that of input 0.

    Raises:
        ShapeError: another input would change the type.
    """
    first = inputs[0].dtype
    for position, spec in enumerate(inputs):
        if np.result_type(first, spec.dtype).name != first:
            raise ShapeError(
                f"input {position} has type {spec.dtype}; {first} of input 0 needed: cast one"
                f" of them (shape {spec.shape})"
            )
    return first


def need_type(inputs: Sequence[TensorSpec], kinds: str, needed: str, *positions: int) -> None:
    """Check the kinds of inputs, as NumPy's letters: b bool, i and u integers, f floating-point.

    Raises:
        ShapeError: an input has another kind.
    """
    for position in positions or range(len(inputs)):
        if np.dtype(inputs[position].dtype).kind not in kinds:
            raise ShapeError(
                f"input {position} has type {inputs[position].dtype}; {needed} needed"
                f" (shape {inputs[position].shape})"
            )


def broadcasting(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of inputs that broadcast together, all of the type of input 0."""
    return pointwise(inputs, result_type(inputs))


def floating(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of floating-point inputs that broadcast together."""
    need_type(inputs, "f", "a floating-point type")
    return broadcasting(inputs, attributes)


def numeric(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of inputs that broadcast together and hold numbers, not truth values."""
    need_type(inputs, "iuf", "a type of numbers", 0)
    return broadcasting(inputs, attributes)


def same_shapes(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    """Return the signature of inputs that must all have the shape of input 0."""
    for position, spec in enumerate(inputs):
        if spec.rank != inputs[0].rank:
            raise ShapeError(
                f"input {position} has rank {spec.rank} (shape {spec.shape});"
                f" rank {inputs[0].rank} of input 0 needed"
            )
        for axis, (extent, first) in enumerate(zip(spec.shape, inputs[0].shape)):
            if extent != first:
                raise ShapeError(
                    f"dim d{axis} is {first} in input 0 but {extent} in input {position}"
                )
    return broadcasting(inputs, attributes)


def declare(
    name: str,
    reference: Reference,
    gradient: GradientRule | None,
    *,
    inputs: tuple[str, ...] = ("x",),
    attributes: Mapping[str, Attribute] | None = None,
    flops: float = 1.0,
    forms: tuple[Form, ...] = (),
    constants: tuple[Constant, ...] = (),
    laws: tuple[Law, ...] = (),
    onnx: Onnx | str | None = None,
    layer: Mapping[str, Any] | None = MappingProxyType({}),
    cases: tuple[Case, ...] | None = None,
    doc: str = "",
    signature: SignatureRule = broadcasting,
) -> OpSpec:
    """Register an element-wise operator whose reference is a NumPy function of its operands."""
    default = UNARY_CASES if len(inputs) == 1 else BINARY_CASES
    return register(
        OpSpec(
            name=name,
            inputs=inputs,
            signature=signature,
            reference=reference,
            attributes=dict(attributes or {}),
            gradient=gradient,
            flops_per_point=flops,
            elementwise=True,
            tiles_free=True,
            forms=forms,
            constants=constants,
            laws=laws,
            onnx=onnx,
            layer=layer,
            cases=default if cases is None else cases,
            doc=doc,
        )
    )


def flat(cases: Sequence[Case]) -> tuple[Case, ...]:
    """Return the cases without gradients to compare: the operator is constant, or has none."""
    return tuple(Case(case.inputs, case.attributes, (), case.positive) for case in cases)


def from_output(grad: str) -> GradientRule:
    """Return the rule that emits `grad` of the arriving gradient and the operator's result."""
    return lambda g: [g.emit(grad, g.grad(), g.outputs[0], **g.attributes)]


def from_input(grad: str) -> GradientRule:
    """Return the rule that emits `grad` of the arriving gradient and the operator's argument."""
    return lambda g: [g.emit(grad, g.grad(), g.inputs[0], **g.attributes)]


def of_mask(g: GradientContext) -> list[str | None]:
    """Return the gradient of dy * mask(x) with respect to dy; the mask is piecewise constant."""
    return [g.emit(g.node.operator, g.grad(), g.inputs[1], **g.attributes), None]


def nowhere(g: GradientContext) -> list[str | None]:
    """Return no gradient for any input: the operator is piecewise constant."""
    return [None] * len(g.inputs)
