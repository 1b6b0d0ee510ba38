"""Operator declarations: one `OpSpec` states everything about an operator, once.

A declaration gives the signature (dims, and how operands are indexed), the attributes, the NumPy
reference that defines the operator's meaning, its gradient as graph operators, the attributes of a
tile, the lowering of a composite, its work, its laws and its ONNX name. Shape rules, legal
configurations, tiles and cost features follow from it; kernels only add speed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from soapstone.dtypes import WIDE, DType, name_of
from soapstone.errors import hint
from soapstone.ir.attributes import REQUIRED, Attribute, Attributes
from soapstone.ir.dims import Ints, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.tensor import Array, TensorSpec, is_half, rounded, spec_of
from soapstone.records import dataclass

if TYPE_CHECKING:
    from soapstone.ir.builder import Emitter
    from soapstone.ir.graph import Node
    from soapstone.ir.operations import Formula


@dataclass(frozen=True)
class Tile:
    """One point task of an operator.

    Attributes:
        intervals: of every dim, as (first, past the last).
        inputs, outputs: the box of each operand: the first index along each axis, and those past
            the last.
        input_shapes, output_shapes: the shapes of the whole operands.
    """

    intervals: Mapping[str, tuple[int, int]]
    inputs: tuple[tuple[Ints, Ints], ...]
    outputs: tuple[tuple[Ints, Ints], ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]

    def size(self, dim: str) -> int:
        """Return the number of indices of a dim that the point has."""
        lo, hi = self.intervals[dim]
        return hi - lo


def box_shape(box: tuple[Ints, Ints]) -> tuple[int, ...]:
    """Return the extents of a box, given by its first indices and those past its last."""
    return tuple(int(hi) - int(lo) for lo, hi in zip(*box))


@dataclass(frozen=True)
class Case:
    """An example call, from which the checks of an operator are made.

    Attributes:
        inputs: specs such as `"2 3"` (float32 of shape (2, 3)) or `"int32 4 >=1 <5"` (integers from
            1 to 4; from 0 to 9 without limits).
        attributes: those that differ from their defaults.
        differentiable: the positions of the inputs whose gradient is compared with finite
            differences; None means every floating-point one.
        positive: whether inputs are drawn from (0.2, 0.9).
        contents: of inputs that are not drawn, by position, such as a graph's edges.
    """

    inputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    differentiable: tuple[int, ...] | None = None
    positive: bool = False  # draw inputs from (0.2, 0.9): logarithms, square roots, probabilities
    contents: Mapping[int, tuple[Any, ...]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class GradientContext:
    """The arguments of an operator's gradient: the names of values, and an emitter of nodes.

    Attributes:
        emit: adds nodes that follow the node's configuration. node: the node to differentiate.
        inputs, outputs: the names of its values.
        grads: the gradient of each output, None where the loss does not depend on that output.
    """

    emit: Emitter
    node: Node
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    grads: tuple[str | None, ...]

    @property
    def attributes(self) -> Attributes:
        """The node's attributes."""
        return self.node.attributes

    def grad(self, output: int = 0) -> str:
        """Return the gradient of an output, which must exist."""
        name = self.grads[output]
        if name is None:
            raise GraphError(
                f"{self.node.label}: output {output} takes no part in the loss,"
                " but its gradient is needed"
            )
        return name

    def only_grad(self) -> str:
        """Return the gradient of output 0 of an operator whose other outputs are saved values.

        Raises:
            GraphError: as `refuse_saved`.
        """
        self.refuse_saved(1)
        return self.grad()

    def refuse_saved(self, first: int) -> None:
        """Check that no output from `first` on, which are saved values, takes part in the loss.

        Raises:
            GraphError: one does, and its gradient would be ignored.
        """
        for output, name in enumerate(self.grads[first:], first):
            if name is not None:
                raise GraphError(
                    f"{self.node.label}: output {output} is auxiliary and has no gradient,"
                    " but takes part in the loss"
                )

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and type of a value, by its name."""
        return self.emit.spec(name)


Gradient = Callable[[GradientContext], Sequence[str | None]]
IndexRule = Callable[[Sequence[TensorSpec], Attributes], Mapping[int, range]]
SignatureRule = Callable[[tuple[TensorSpec, ...], Attributes], Signature]
Operations = Callable[[Signature, Sequence[TensorSpec], Attributes], float]


@dataclass(frozen=True)
class OpSpec:
    """The declaration of an operator.

    Attributes:
        name: the operator's name in graphs.
        inputs: operand names; a trailing `?` marks an optional one, a trailing `*` one or more.
        outputs: output names.
        signature: from input specs and attributes to dims, operands and output types.
        reference: `reference(attributes, *arrays)`, the meaning of one tile, in NumPy. Where a
            reduced dim is split, its results are partial and folded by `monoid`. Only `compute`
            calls it, with half types widened.
        gradient: emits the operators that compute the gradients of inputs.
        localize: the attributes of a tile, where they differ from the operator's.
        lower: emits the primitives of a composite, and returns the output values.
        flops_per_point: arithmetic operations per point of the iteration space.
        operations: all of them, from signature, inputs and attributes, where they are not
            proportional to the points.
        updates: pairs (output, input) where the output is the input's next value.
        states: of recurrent operators, by input that is a state before the first step, the output
            that is this state after each step.
        elementwise: whether it may join a fused chain.
        formula: the function of numbers that it applies element by element, of which kernels are
            made.
        view: the kind of rearrangement of its operands' elements, if it only rearranges them.
        chooses: whether results are elements of the operand selected by their order alone, so that
            monotonic functions may move across it.
        strided: whether its kernels take operands of any strides at no cost.
        tiles_free: whether they take tiles of larger arrays, with gaps between rows, at no cost.
        mixes_types: whether its operands may have several floating-point types.
        half: whether mixed precision computes it in halves (`ir/training/precision.py`): a product.
        epilogue: whether element-wise steps on its only result may join its launch.
        indices: for inputs that are indices, by position, the range of their values.
        forms: how terms state the operator (`ir/law.py`).
        constants: tensors that its laws mention, such as the identity of a matrix product.
        laws: equations of terms, from which substitutions are proved.
        onnx: its counterpart in ONNX; a name alone if only the name differs.
        layer: defaults of the layer's arguments where they are not the operator's; None if the
            operator is no layer, as operators without a gradient are.
        cases: example calls, from which its tests are made.
        doc: what it computes, in words that follow "Return"; after a line break, the shapes of
            operands and results, unless it is pointwise.
    """

    name: str
    inputs: tuple[str, ...]
    signature: SignatureRule
    reference: Callable[..., Any]
    outputs: tuple[str, ...] = ("y",)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    gradient: Gradient | None = None
    localize: Callable[[Attributes, Tile], Attributes] | None = None
    lower: Callable[[Emitter, Node], Sequence[str]] | None = None
    flops_per_point: float = 1.0
    operations: Operations | None = None
    updates: tuple[tuple[int, int], ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    elementwise: bool = False
    formula: Formula | None = None
    view: Literal["reshape", "transpose", "concat", "split", "slice"] | None = None
    chooses: bool = False
    strided: bool = False
    tiles_free: bool = False
    mixes_types: bool = False
    half: bool = False
    epilogue: bool = False
    indices: IndexRule | None = None
    forms: tuple[Form, ...] = ()
    constants: tuple[Constant, ...] = ()
    laws: tuple[Law, ...] = ()
    onnx: Onnx | str | None = None
    layer: Mapping[str, Any] | None = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    doc: str = ""

    @property
    def onnx_entry(self) -> Onnx | None:
        """The operator's counterpart in ONNX, where it has one."""
        return Onnx(self.onnx) if isinstance(self.onnx, str) else self.onnx

    def bind(self, inputs: Sequence[TensorSpec], attributes: Attributes) -> Signature:
        """Return the signature for these inputs and attributes, which are in their frozen form.

        Raises:
            ShapeError: the inputs do not fit; the message names the dim.
        """
        required = [name for name in self.inputs if name[-1] != "?"]
        most = math.inf if any(name.endswith("*") for name in self.inputs) else len(self.inputs)
        if not len(required) <= len(inputs) <= most:
            raise ShapeError(
                f"{len(inputs)} inputs found, {len(required)} needed ({', '.join(self.inputs)})"
            )
        reals = (
            {}
            if self.mixes_types
            else {spec.dtype: position for position, spec in enumerate(inputs) if spec.is_float}
        )
        if len(reals) > 1:
            found = " but ".join(
                f"{dtype} in input {position}" for dtype, position in reals.items()
            )
            raise ShapeError(f"floating-point types differ: {found}; cast one of them")
        return self.signature(tuple(inputs), attributes)

    def normalise(self, attributes: Attributes) -> dict[str, Any]:
        """Return all attributes, defaults included, in their frozen form.

        Raises:
            GraphError: an unknown, missing or ill-typed attribute.
        """
        unknown = set(attributes) - set(self.attributes)
        if unknown:
            have = ", ".join(self.attributes) or "none"
            raise GraphError(f"unknown attribute {sorted(unknown)[0]!r}; attributes are {have}")
        result = {}
        for name, attribute in self.attributes.items():
            value = attributes.get(name, attribute.default)
            if value is REQUIRED:
                raise GraphError(f"attribute {name} is missing; {attribute.kind} needed")
            result[name] = attribute.normalise(name, value)
        return result

    def flops(
        self, signature: Signature, inputs: Sequence[TensorSpec], attributes: Attributes
    ) -> float:
        """Return the arithmetic operations of one execution, as it was bound.

        signature: what `bind` returned for these inputs and attributes.
        """
        if self.operations is not None:
            return self.operations(signature, inputs, attributes)
        return self.flops_per_point * math.prod(dim.extent for dim in signature.dims)

    def compute(self, attributes: Attributes, *arrays: Array) -> tuple[Array, ...]:
        """Return the outputs before they are rounded to a half type; halves are widened.

        attributes: in their frozen form. arrays: the operands.
        """
        wide = [
            array.astype(WIDE[name_of(array.dtype)]) if is_half(array.dtype) else array
            for array in arrays
        ]
        result = self.reference(attributes, *wide)
        return result if isinstance(result, tuple) else (result,)

    def run(
        self, attributes: Attributes, *arrays: Array, dtypes: Sequence[DType] | None = None
    ) -> tuple[Array, ...]:
        """Return the outputs as the reference computes them.

        Half types are computed in their `WIDE` type and rounded once, at the end. What is computed
        in double precision stays so, whatever the outputs' types are.

        Args:
            attributes: in their frozen form. arrays: the operands.
            dtypes: the outputs' element types, by default those of the signature. A tile must name
                them, since it need not have a signature.
        """
        made = self.compute(attributes, *arrays)
        if dtypes is None:
            if "program" not in self.attributes and not any(is_half(a.dtype) for a in arrays):
                return made
            dtypes = self.bind([spec_of(array) for array in arrays], attributes).dtypes
        return tuple(
            rounded(array, dtype) if is_half(dtype) else array
            for array, dtype in zip(made, dtypes, strict=True)
        )


P = ParamSpec("P")
_OPS = "soapstone.ir.ops."
_REGISTRY: dict[str, OpSpec] = {}
_HOMES: dict[str, str] = {}  # of each, the module that declares it
_LISTENERS: list[Callable[[OpSpec], None]] = []
_OF_ONNX: dict[tuple[str, str], OpSpec] = {}  # by domain and name, the first of each


def register(spec: OpSpec) -> OpSpec:
    """Add an operator to the registry and return it; layers and ONNX then include it.

    spec: its declaration.

    Raises:
        GraphError: the name is taken.
    """
    home = importing()
    if not home.startswith(_OPS):  # the package's own may not be imported yet
        from soapstone.ir.ops import load

        load(spec.name)
    if spec.name in _REGISTRY:
        raise GraphError(f"operator {spec.name!r} is declared twice")
    _REGISTRY[spec.name], _HOMES[spec.name] = spec, home
    entry = spec.onnx_entry
    if entry is not None:
        _OF_ONNX.setdefault((entry.domain, entry.name), spec)
    for listener in _LISTENERS:
        listener(spec)
    return spec


def importing() -> str:
    """Return the name of the module that the caller is importing, "" if none."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>":
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def of_extents(count: Callable[[Mapping[str, int]], float]) -> Operations:
    """Return the `operations` that follow from the extents of dims. count: counts them by these."""
    return lambda signature, *_: count({dim.name: dim.extent for dim in signature.dims})


def _defining(kind: Callable[P, OpSpec]) -> Callable[P, OpSpec]:
    """Return `define`, which has the parameters of `OpSpec`."""

    def define(*values: P.args, **fields: P.kwargs) -> OpSpec:
        """Return the specification of an operator that these fields make, in the registry.

        values, fields: those of `OpSpec`.

        Raises:
            GraphError: the name is taken.
        """
        return register(kind(*values, **fields))

    return define


define = _defining(OpSpec)


def when_registered(listener: Callable[[OpSpec], None]) -> None:
    """Call `listener` with every operator that is registered from now on."""
    _LISTENERS.append(listener)


def operator(name: str) -> OpSpec:
    """Return the declaration of an operator.

    Raises:
        GraphError: an unknown name.
    """
    declared = _REGISTRY.get(name)
    if declared is not None:
        return declared
    from soapstone.ir.ops import load  # declares operators on first use

    load(name)
    if name not in _REGISTRY:
        load()
        raise GraphError(
            f"operator {name!r} is not declared; see `soapstone ops`{hint(name, _REGISTRY)}"
        )
    return _REGISTRY[name]


def operator_of_onnx(name: str, domain: str = "") -> OpSpec | None:
    """Return the first declared operator whose counterpart has this name in ONNX, or None.

    domain: of the counterpart; ONNX's own is empty.
    """
    from soapstone.ir.ops import of_onnx

    own = of_onnx().get(f"{domain}:{name}")
    return operator(own) if own is not None else _OF_ONNX.get((domain, name))


def homes() -> tuple[tuple[OpSpec, str], ...]:
    """Return the operators declared so far, each with the module that declares it."""
    return tuple((spec, _HOMES[name]) for name, spec in _REGISTRY.items())


def having(field: str) -> tuple[str, ...]:
    """Return the names of all declared operators with a non-empty field.

    field: "formula" or "chooses".
    """
    from soapstone.ir.ops import having as own

    known = own(field)
    made = [spec.name for spec in tuple(_REGISTRY.values()) if getattr(spec, field)]
    return tuple(sorted({*known, *made}))


def operators() -> tuple[OpSpec, ...]:
    """Return all declared operators, by name."""
    from soapstone.ir.ops import load

    load()
    return tuple(_REGISTRY[name] for name in sorted(_REGISTRY))
