"""How element-wise operators are declared: NumPy broadcasting, dims d0, d1, …, and gradients.

Dims are named by the output's axes. The families are in arithmetic.py, activation.py,
comparison.py, trigonometry.py, bitwise.py and cast.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Dim, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.expression import Expression, bound, evaluate, make, parameter, variable
from soapstone.ir.operations import Formula, adjoints
from soapstone.ir.spec import Case, GradientContext, OpSpec, SignatureRule, register
from soapstone.ir.tensor import TensorSpec

Algorithm = tuple[str | float, ...]
NO_ATTRIBUTES: Mapping[str, Attribute] = MappingProxyType({})
NO_ALGORITHMS: Mapping[Any, Algorithm] = MappingProxyType({})
Reference = Callable[..., Any]
Function = Callable[..., Expression] | tuple[str, ...]
Meaning = Function | Mapping[Any, Function]
GradientRule = Callable[[GradientContext], Sequence[str | None]]

_ONE = Whole(1)
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
    plain = [Affine(f"d{axis}", extent) for axis, extent in enumerate(largest)]
    operands = []
    for position, spec in enumerate(inputs):
        axes: list[Axis] = []
        for extent, along in zip(spec.shape, plain[rank - spec.rank :]):
            if extent not in (1, along.extent):
                raise ShapeError(
                    f"dim {along.dim} is {along.extent} but {extent} in input {position}"
                    f" (shape {spec.shape})"
                )
            axes.append(along if extent == along.extent else _ONE)
        operands.append(Operand(tuple(axes)))
    dims = tuple([Dim(axis.dim, axis.extent) for axis in plain])
    output = Operand(tuple(plain))
    return Signature(dims, tuple(operands), (output,), (dtype or inputs[0].dtype,))


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


def aligned(context: GradientContext, shape: Sequence[int]) -> dict[str, str]:
    """Return what the dims of a broadcast shape are among those of the operator's output."""
    whole = context.spec(context.outputs[0]).shape
    lead = len(whole) - len(shape)
    return {
        f"d{axis}": f"d{axis + lead}" if extent == whole[axis + lead] else ""
        for axis, extent in enumerate(shape)
    }


def _common(first: str, second: str) -> str | None:
    """Return NumPy's common type of two, None where it has none."""
    try:
        return np.result_type(first, second).name
    except TypeError:
        return None


def result_type(inputs: Sequence[TensorSpec]) -> str:
    """Return the type of NumPy's result on the inputs, which must be that of input 0.

    Raises:
        ShapeError: another input would change the type.
    """
    first = inputs[0].dtype
    for position, spec in enumerate(inputs):
        if spec.dtype != first and _common(first, spec.dtype) != first:
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
        if kind_of(inputs[position].dtype) not in kinds:
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


class Declared(NamedTuple):
    """A function taken apart: its formula, and its attributes with their defaults."""

    formula: Formula
    attributes: dict[str, Attribute]


def formula(
    meaning: Meaning,
    attributes: Mapping[str, Attribute] = NO_ATTRIBUTES,
    choice: str = "",
    onednn: Mapping[Any, Algorithm] = NO_ALGORITHMS,
) -> Declared:
    """Return the formula of a function of expressions.

    meaning: arguments with defaults, or of the attributes' names, are attributes, the others
    operands; a tuple names an operation and its arguments. Where the attribute `choice` chooses
    between several functions, these by its value.
    """
    expressions, own = {}, dict(attributes)
    for value, function in meaning.items() if isinstance(meaning, Mapping) else ((None, meaning),):
        if isinstance(function, tuple):
            name, *names = function
            function = partial(make, name)
        else:
            names = [*_arguments(function)]
            given = function.__defaults__ or ()
            for one, default in zip(names[len(names) - len(given) :], given):
                own.setdefault(one, Attribute("float", default))
        operands = tuple(name for name in names if name not in own)
        expressions[value] = function(
            *(parameter(name) if name in own else variable(name) for name in names)
        )
    return Declared(Formula(operands, expressions, choice, onednn), own)


def _arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's arguments, all of which have a place."""
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def declare(
    name: str,
    meaning: Meaning | None,
    gradient: GradientRule | Literal["derived"] | None = "derived",
    *,
    reference: Reference | None = None,
    inputs: tuple[str, ...] | None = None,
    attributes: Mapping[str, Attribute] = NO_ATTRIBUTES,
    choice: str = "",
    onednn: Algorithm | Mapping[Any, Algorithm] = (),
    cases: tuple[Case, ...] | None = None,
    flops: float = 1.0,
    signature: SignatureRule = broadcasting,
    **others: Any,
) -> OpSpec:
    """Register an element-wise operator; `others` are further fields of its `OpSpec`.

    meaning: the function that it is, on expressions (`ir/expression.py`), from which its reference
    and its kernels follow; None where `reference`, of NumPy, is all there is.
    gradient: by default derived from the meaning, as a chain of operators.
    onednn: as in `Formula`.
    """
    made, own, meant = None, dict(attributes), reference
    if meaning is not None:
        algorithms = onednn if isinstance(onednn, Mapping) else {None: onednn} if onednn else {}
        made, own = formula(meaning, attributes, choice, algorithms)
        inputs, meant = inputs or made.operands, reference or made.reference()
    inputs = inputs or ("x",)
    if meant is None:
        raise GraphError(f"operator {name!r}: no meaning and no reference found, one needed")
    default = UNARY_CASES if len(inputs) == 1 else BINARY_CASES
    return register(
        OpSpec(
            name=name,
            inputs=inputs,
            signature=signature,
            reference=meant,
            attributes=own,
            gradient=derived if gradient == "derived" else gradient,
            flops_per_point=flops,
            elementwise=True,
            formula=made,
            tiles_free=True,
            cases=default if cases is None else cases,
            **others,
        )
    )


def unary(name: str) -> tuple[str, ...]:
    """Return the function of one operand that is the operation of that name."""
    return name, "x"


def binary(name: str) -> tuple[str, ...]:
    """Return the function of two operands that is the operation of that name."""
    return name, "x", "y"


# ----------------------------------------------------------------- gradients as chains of operators


def derived(g: GradientContext) -> list[str | None]:
    """Return the inputs' gradients as the operator's formula has them."""
    made, dy = _formula(g), variable("dy")
    result = _result(g)
    return _emitted(g, adjoints({result: dy}, [variable(name) for name in made.operands]))


def chain(*gradients: Callable[..., Expression]) -> GradientRule:
    """Return the rule of gradients given as functions, one an operand, where derived ones cancel.

    Their arguments are named: dy, operands and attributes.
    """

    def rule(g: GradientContext) -> list[str | None]:
        return _emitted(
            g,
            [
                gradient(
                    *(
                        parameter(name) if name in g.attributes else variable(name)
                        for name in _arguments(gradient)
                    )
                )
                for gradient in gradients
            ],
        )

    return rule


def _formula(g: GradientContext) -> Formula:
    made = g.node.spec.formula
    if made is None:
        raise GraphError(f"{g.node.label}: it has no formula that could be differentiated")
    return made


def _numbers(g: GradientContext) -> dict[str, float]:
    return {name: v for name, v in g.attributes.items() if isinstance(v, float | int)}


def _result(g: GradientContext) -> Expression:
    made = _formula(g)
    return bound(made.expressions[made.value(g.attributes)], _numbers(g))


def _emitted(g: GradientContext, gradients: Sequence[Expression | None]) -> list[str | None]:
    """Emit the gradients and sum each over the dims along which its operand was broadcast."""
    values: dict[Expression, Any] = {variable("dy"): g.grad(), _result(g): g.outputs[0]}
    values |= dict(zip(map(variable, _formula(g).operands), g.inputs))
    functions = Emission(partial(_emit, g))
    names = [
        None if one is None else evaluate(bound(one, _numbers(g)), values, functions)
        for one in gradients
    ]
    return [
        None if name is None else unbroadcast(g, name, value)
        for name, value in zip(names, g.inputs, strict=True)
    ]


def _emit(g: GradientContext, name: str, *operands: str | float, **attributes: object) -> str:
    """Emit one operator; dims of what is smaller than the result are those it is aligned to."""
    dtype, whole = g.spec(g.outputs[0]).dtype, g.spec(g.outputs[0]).shape
    used = tuple(
        one if isinstance(one, str) else g.emit("full", shape=(), value=one, dtype=dtype)
        for one in operands
    )
    shape = np.broadcast_shapes(*(g.spec(one).shape for one in used))
    rename = None if shape == whole else aligned(g, shape)
    return g.emit(name, *used, rename=rename, **attributes)


# The attributes that operators take for the last operands of operations.
_SETTINGS = {
    "affine": ("scale", "shift"),
    "power": ("exponent",),
    "clip": ("low", "high"),
    "clip_grad": ("low", "high"),
}


class Emission(dict[str, Callable[..., str]]):
    """The functions that emit an operation's operators on values of a graph.

    emit: `emit(operator, *values, **attributes)` adds one and returns its result.
    """

    def __init__(self, emit: Callable[..., str]) -> None:
        super().__init__(lerp=self._lerp)
        self._emit = emit
        for name, names in _SETTINGS.items():
            self[name] = partial(self._with_settings, name, names)

    def __missing__(self, name: str) -> Callable[..., str]:
        return partial(self._emit, name)

    def _with_settings(self, name: str, names: tuple[str, ...], *operands: Any) -> str:
        count = len(operands) - len(names)
        return self._emit(name, *operands[:count], **dict(zip(names, operands[count:])))

    def _lerp(self, a: str, b: str, t: str) -> str:
        return self._emit("add", a, self._emit("mul", t, self._emit("sub", b, a)))


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
