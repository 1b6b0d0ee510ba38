"""Element-wise operators: arithmetic and activations, broadcasting as in NumPy; their gradients.

Dims are named by the output's axes: d0, d1, …
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine, Axis, DimTable, Operand, Signature, Whole, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, register
from soapstone.ir.tensor import Array, TensorSpec


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


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pointwise(inputs)


def _same_shapes(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
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
    return pointwise(inputs)


def declare(
    name: str,
    reference: Reference,
    gradient: GradientRule | None,
    *,
    inputs: tuple[str, ...] = ("x",),
    attributes: dict[str, Attribute] | None = None,
    flops: float = 1.0,
    laws: tuple[str, ...] = (),
    onnx: str | None = None,
    cases: tuple[Case, ...] | None = None,
    doc: str = "",
    same_shapes: bool = False,
) -> OpSpec:
    """Register an element-wise operator whose reference is a NumPy function of its operands."""
    default = UNARY_CASES if len(inputs) == 1 else BINARY_CASES
    return register(
        OpSpec(
            name=name,
            inputs=inputs,
            signature=_same_shapes if same_shapes else _signature,
            reference=reference,
            attributes=attributes or {},
            gradient=gradient,
            flops_per_point=flops,
            elementwise=True,
            laws=laws,
            onnx=onnx,
            cases=default if cases is None else cases,
            doc=doc,
        )
    )


def erf(x: Array) -> Array:
    """Return the error function, element by element, in the array's precision."""
    return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x.copy()


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow."""
    positive = np.exp(-np.abs(x))
    result: Array = np.where(x >= 0, 1 / (1 + positive), positive / (1 + positive))
    return result.astype(x.dtype)


def gelu(attributes: Attributes, x: Array) -> Array:
    """Return x Phi(x), exactly or by the tanh approximation (Hendrycks and Gimpel 2016)."""
    if attributes["approximate"] == "tanh":
        twice = 1 + np.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * x**3))
    else:
        twice = 1 + erf(x / math.sqrt(2))
    return np.asarray(0.5 * x * twice, x.dtype)


_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def _gelu_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    if attributes["approximate"] == "tanh":
        t = np.tanh(_ROOT_2_OVER_PI * (x + 0.044715 * x**3))
        slope = _ROOT_2_OVER_PI * (1 + 3 * 0.044715 * x**2)
        return np.asarray(dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope), x.dtype)
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return np.asarray(dy * (0.5 * (1 + erf(x / math.sqrt(2))) + x * density), x.dtype)


def _accumulate(attributes: Attributes, *parts: Array) -> Array:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


_APPROXIMATE = {"approximate": Attribute("str", "none", choices=("none", "tanh"))}
_ALPHA = {"alpha": Attribute("float", 0.01)}
_BOTH_CASES = (Case(("3 4",), {"approximate": "none"}), Case(("3 4",), {"approximate": "tanh"}))
_GRAD_CASES = (Case(("3 4", "3 4")), Case(("0 2", "0 2")))
_GELU_GRAD_CASES = tuple(Case(("3 4", "3 4"), c.attributes, ()) for c in _BOTH_CASES)


def _from_output(grad: str) -> GradientRule:
    return lambda g: [g.emit(grad, g.grad(), g.outputs[0], **g.attributes)]


def _from_input(grad: str) -> GradientRule:
    return lambda g: [g.emit(grad, g.grad(), g.inputs[0], **g.attributes)]


def _grad_of_mask(g: GradientContext) -> list[str | None]:
    """The gradient of dy * mask(x) with respect to dy; the mask is piecewise constant."""
    return [g.emit(g.node.operator, g.grad(), g.inputs[1], **g.attributes), None]


def _add_grad(g: GradientContext) -> list[str | None]:
    return [unbroadcast(g, g.grad(), value) for value in g.inputs]


def _sub_grad(g: GradientContext) -> list[str | None]:
    negative = g.emit("neg", g.grad())
    return [unbroadcast(g, g.grad(), g.inputs[0]), unbroadcast(g, negative, g.inputs[1])]


def _mul_grad(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    dx, dy = g.emit("mul", g.grad(), y), g.emit("mul", g.grad(), x)
    return [unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


def _div_grad(g: GradientContext) -> list[str | None]:
    x, y = g.inputs
    dx = g.emit("div", g.grad(), y)
    dy = g.emit("neg", g.emit("mul", dx, g.outputs[0]))
    return [unbroadcast(g, dx, x), unbroadcast(g, dy, y)]


def _power_grad(g: GradientContext) -> list[str | None]:
    exponent = g.attributes["exponent"]
    slope = g.emit("power", g.inputs[0], exponent=exponent - 1)
    return [g.emit("mul", g.grad(), g.emit("affine", slope, scale=exponent))]


def _sqrt_grad(g: GradientContext) -> list[str | None]:
    return [g.emit("div", g.emit("affine", g.grad(), scale=0.5), g.outputs[0])]


declare("neg", lambda a, x: -x, lambda g: [g.emit("neg", g.grad())], onnx="Neg")
declare(
    "relu",
    lambda a, x: np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0))),
    _from_output("relu_grad"),
    onnx="Relu",
    laws=("relu(relu(x)) = relu(x)",),
)
declare(
    "leaky_relu",
    lambda a, x: np.where(x > 0, x, x * x.dtype.type(a["alpha"])),
    _from_input("leaky_relu_grad"),
    attributes=_ALPHA,
    onnx="LeakyRelu",
)
declare(
    "gelu",
    gelu,
    _from_input("gelu_grad"),
    attributes=_APPROXIMATE,
    flops=12,
    onnx="Gelu",
    cases=_BOTH_CASES,
)
declare("sigmoid", lambda a, x: sigmoid(x), _from_output("sigmoid_grad"), flops=6, onnx="Sigmoid")
declare("tanh", lambda a, x: np.tanh(x), _from_output("tanh_grad"), flops=8, onnx="Tanh")
declare(
    "exp",
    lambda a, x: np.exp(x),
    lambda g: [g.emit("mul", g.grad(), g.outputs[0])],
    flops=6,
    onnx="Exp",
)
declare(
    "log",
    lambda a, x: np.log(x),
    lambda g: [g.emit("div", g.grad(), g.inputs[0])],
    flops=6,
    onnx="Log",
    cases=(Case(("2 3 4",), positive=True), Case(("0 3",))),
)
declare(
    "sqrt",
    lambda a, x: np.sqrt(x),
    _sqrt_grad,
    onnx="Sqrt",
    cases=(Case(("2 3 4",), positive=True), Case(("0 3",))),
)
declare(
    "affine",
    lambda a, x: x * x.dtype.type(a["scale"]) + x.dtype.type(a["shift"]),
    lambda g: [g.emit("affine", g.grad(), scale=g.attributes["scale"])],
    attributes={"scale": Attribute("float", 1.0), "shift": Attribute("float", 0.0)},
    cases=(Case(("3 4",), {"scale": -1.5, "shift": 0.25}),),
    doc="x * scale + shift",
)
declare(
    "power",
    lambda a, x: np.power(x, x.dtype.type(a["exponent"])),
    _power_grad,
    attributes={"exponent": Attribute("float")},
    flops=10,
    onnx="Pow",
    cases=(
        Case(("3 4",), {"exponent": 2.0}),
        Case(("3 4",), {"exponent": -0.5}, positive=True),
        Case(("3 4",), {"exponent": 3.0}),
    ),
)
_XY = ("x", "y")
_COMMUTES = ("commutative", "associative")
declare("add", lambda a, x, y: x + y, _add_grad, inputs=_XY, laws=_COMMUTES, onnx="Add")
declare("sub", lambda a, x, y: x - y, _sub_grad, inputs=_XY, onnx="Sub")
declare("mul", lambda a, x, y: x * y, _mul_grad, inputs=_XY, laws=_COMMUTES, onnx="Mul")
declare(
    "div",
    lambda a, x, y: x / y,
    _div_grad,
    inputs=_XY,
    onnx="Div",
    cases=(
        Case(("3 4", "3 4"), positive=True),
        Case(("2 3 4", "4"), positive=True),
        Case(("3 2", ""), positive=True),
    ),
)
declare(
    "accumulate",
    _accumulate,
    lambda g: [g.grad()] * len(g.inputs),
    inputs=("x*",),
    cases=(Case(("3 4", "3 4", "3 4")), Case(("2", "2")), Case(("0 3",))),
    same_shapes=True,
    onnx="Sum",
    doc="the sum of equal-shaped values, left to right: where gradients meet",
)
declare(
    "relu_grad",
    lambda a, dy, y: np.where(y > 0, dy, dy.dtype.type(0)),
    _grad_of_mask,
    inputs=("dy", "y"),
    cases=tuple(Case(c.inputs, {}, (0,)) for c in _GRAD_CASES),
)
declare(
    "leaky_relu_grad",
    lambda a, dy, x: np.where(x > 0, dy, dy * dy.dtype.type(a["alpha"])),
    _grad_of_mask,
    inputs=("dy", "x"),
    attributes=_ALPHA,
    cases=tuple(Case(c.inputs, {}, (0,)) for c in _GRAD_CASES),
)
declare(
    "gelu_grad",
    _gelu_grad,
    None,
    inputs=("dy", "x"),
    attributes=_APPROXIMATE,
    flops=16,
    cases=_GELU_GRAD_CASES,
)
declare(
    "sigmoid_grad",
    lambda a, dy, y: dy * y * (1 - y),
    None,
    inputs=("dy", "y"),
    flops=3,
    cases=tuple(Case(c.inputs, {}, ()) for c in _GRAD_CASES),
)
declare(
    "tanh_grad",
    lambda a, dy, y: dy * (1 - y * y),
    None,
    inputs=("dy", "y"),
    flops=3,
    cases=tuple(Case(c.inputs, {}, ()) for c in _GRAD_CASES),
)
