"""What the recurrent operators share, and the plain recurrence `rnn`.

All are time-major. Dims: t, the steps, never split; n, the samples; k, the inputs' elements, split
only after lowering; h, the state's elements, likewise; g, the columns of all gates, one gate after
the other. A gradient operator makes the gradients before the gates' functions for all steps, so
that each weight's gradient is one product over all rows.

The last operand may be `lengths`, (n,) int32: a sample's steps from its length on are left out, in
both directions. Its states stay what they are, and what is made of each step is 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.operations import NUMPY
from soapstone.ir.ops.checks import need_count, need_float
from soapstone.ir.ops.elementwise.pointwise import Emission
from soapstone.ir.ops.recurrent import cells
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, GradientContext, SignatureRule, define, of_extents, operator
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.records import dataclass

REVERSE = {"reverse": Attribute("bool", False)}
KINDS = {"t": Kind.WHOLE, "k": Kind.LOWERED, "h": Kind.LOWERED, "g": Kind.WHOLE}
Extents = Mapping[str, int]
Layer = Callable[..., Sequence[Any]]


def products(extents: Extents) -> float:
    """Return the operations of x w and h r at every step."""
    rows = extents.get("t", 1) * extents["n"]
    columns = extents.get("g", extents["h"])
    return 2.0 * rows * columns * (extents.get("k", 0) + extents["h"])


def gated(text: str, gates: int) -> SignatureRule:
    """Return the signature rule of a text as `einsum` takes it, where g is `gates` times h.

    One more operand than it has is lengths.
    """
    right = text.split(" -> ")[1]

    def rule(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
        dtypes = [inputs[0].dtype] * len(right.split(", "))
        signature = einsum(with_lengths(text, inputs), inputs, dtypes=dtypes, kinds=KINDS)
        extents = {name: dim.extent for name, dim in signature.by_name.items()}
        if "g" in extents and extents["g"] != gates * extents["h"]:
            raise ShapeError(
                f"dim g is {extents['g']}; {gates * extents['h']} needed,"
                f" {gates} gates of dim h, which is {extents['h']}"
            )
        if extents.get("t", 1) < 1:
            raise ShapeError("dim t is 0; 1 step or more needed")
        return signature

    return rule


def with_lengths(text: str, inputs: Sequence[TensorSpec]) -> str:
    """Return the text of a signature for all inputs, of which the last may be lengths.

    Raises:
        ShapeError: another number of inputs, or one of another type.
    """
    left, right = text.split(" -> ")
    count = left.count(",") + 1
    if len(inputs) == count + 1:
        if inputs[-1].dtype != "int32":
            raise ShapeError(f"lengths have type {inputs[-1].dtype}; int32 needed")
        left = f"{left}, n"
    else:
        need_count(inputs, count)
    need_float(inputs, *range(count))
    return f"{left} -> {right}"


def step_order(steps: int, attributes: Attributes) -> Iterable[int]:
    """Return the steps in the order in which they follow each other."""
    return range(steps - 1, -1, -1) if attributes["reverse"] else range(steps)


def grad_or_zeros(g: GradientContext, output: int) -> str:
    """Return the gradient of an output (t n h or n h), zeros where nothing depends on it."""
    found = g.grads[output]
    if found is not None:
        return found
    spec = g.spec(g.outputs[output])
    names = ("t", "n", "h")[3 - spec.rank :]
    rename = {f"d{axis}": name for axis, name in enumerate(names)}
    return g.emit("full", shape=spec.shape, dtype=spec.dtype, rename=rename)


@dataclass(frozen=True)
class Rows:
    """Emits operators on values (…, n, h) of one step, which follow dims n and h.

    `rank` is 2, or 3 where a first axis holds the one step.
    """

    emit: Emitter
    rank: int

    @property
    def functions(self) -> Emission:
        """The functions of a cell's expressions."""
        return Emission(self)

    @property
    def names(self) -> tuple[str, ...]:
        return ("t", "n", "h")[3 - self.rank :]

    def __call__(self, operator: str, *values: str, **attributes: object) -> str:
        """Emit an element-wise operator."""
        rename = {f"d{axis}": name for axis, name in enumerate(self.names)}
        return self.emit(operator, *values, rename=rename, **attributes)

    def _leading(self) -> dict[str, str]:
        return {f"b{axis}": name for axis, name in enumerate(self.names[:-1])}

    def product(self, x: str, w: str, *bias: str, k: str = "") -> str:
        """Emit x w + b; x's last axis follows dim k."""
        rename = {**self._leading(), "n": "h", "k": k}
        return self.emit("linear", x, w, *bias, bias=bool(bias), rename=rename)

    def back(self, dy: str, w: str, k: str = "h") -> str:
        """Emit dy w'; the result's last axis follows dim k."""
        return self.emit("linear_grad_input", dy, w, rename={**self._leading(), "n": "", "k": k})

    def weight(self, x: str, dy: str, k: str = "") -> str:
        """Emit x' dy summed over all rows; the result's first axis follows dim k."""
        return self.emit("linear_grad_weight", x, dy, rename={**self._leading(), "n": "h", "k": k})

    def total(self, dy: str) -> str:
        """Emit the sum of dy over all rows."""
        rename = {f"d{axis}": name for axis, name in enumerate(self.names)}
        axes = tuple(range(self.rank - 1))
        return self.emit("reduce_sum", dy, axes=axes, keepdims=False, rename=rename)

    def parts(self, value: str, count: int) -> tuple[str, ...]:
        """Emit the equal parts of a value's last axis."""
        axis = self.rank - 1
        size = self.emit.spec(value).shape[axis] // count
        rename = {f"d{i}": name for i, name in enumerate(self.names[:-1])} | {f"d{axis}": ""}
        return self.emit.all("split", value, axis=axis, sizes=(size,) * count, rename=rename)

    def columns(self, weights: str, count: int) -> tuple[str, ...]:
        """Emit the equal parts of the last axis of weights, which follow no dim."""
        shape = self.emit.spec(weights).shape
        sizes = (shape[-1] // count,) * count
        rename = {f"d{axis}": "" for axis in range(len(shape))}
        return self.emit.all("split", weights, axis=len(shape) - 1, sizes=sizes, rename=rename)

    def joined(self, *values: str) -> str:
        """Emit values side by side along the last axis."""
        axis = self.rank - 1
        rename = {f"d{i}": name for i, name in enumerate(self.names[:-1])} | {f"d{axis}": ""}
        return self.emit("concat", *values, axis=axis, rename=rename)

    def shaped(self, value: str, rank: int) -> str:
        """Emit a value (n, h) as (1, n, h), or the other way round."""
        rows, columns = self.emit.spec(value).shape[-2:]
        shape = (1, rows, columns) if rank == 3 else (rows, columns)
        rename = {"f0": "n", "f1": "h"} if rows != 1 else {"f0": "h"}
        return self.emit("reshape", value, shape=shape, rename=rename)

    def steps(self, value: str) -> tuple[str, ...]:
        """Emit the steps (1, n, …) of a value (t, n, …)."""
        sizes = (1,) * self.emit.spec(value).shape[0]
        rename = {f"d{axis}": name for axis, name in enumerate(self.names)}
        return self.emit.all("split", value, axis=0, sizes=sizes, rename=rename)

    def stacked(self, values: Sequence[str]) -> str:
        """Emit steps (1, n, …) as one value (t, n, …)."""
        rename = {f"d{axis}": name for axis, name in enumerate(self.names)}
        return self.emit("concat", *values, axis=0, rename=rename)

    def width(self, value: str) -> int:
        """Return the extent of a value's last axis."""
        return self.emit.spec(value).shape[-1]

    def zeros(self, like: str) -> str:
        """Emit zeros in the shape of an input (t, n, k)."""
        spec, rename = self.emit.spec(like), {"d0": "t", "d1": "n", "d2": "k"}
        return self.emit("full", shape=spec.shape, dtype=spec.dtype, rename=rename)

    def before(self, step: int, lengths: str) -> str:
        """Emit which samples (1, n, 1) have a step."""
        (samples,) = self.emit.spec(lengths).shape
        rename = {"f0": "n"} if samples != 1 else {}
        rows = self.emit("reshape", lengths, shape=(1, samples, 1), rename=rename)
        number = self.emit("full", shape=(), value=step, dtype="int32", rename={})
        return self.emit("greater", rows, number, rename={"d0": "t", "d1": "n", "d2": ""})

    def chosen(self, mask: str, value: str, other: str | None) -> str:
        """Emit a value (1, n, h) where the mask holds, else another or 0."""
        rename = {"d0": "t", "d1": "n", "d2": "h"}
        if other is None:
            dtype = self.emit.spec(value).dtype
            other = self.emit("full", shape=(), dtype=dtype, rename={})
        return self.emit("where", mask, value, other, rename=rename)


@dataclass(frozen=True)
class Arrays:
    """The same in NumPy, on arrays (n, …) of one step: what a layer means."""

    functions: ClassVar[Mapping[str, Callable[..., Array]]] = NUMPY

    def __call__(self, operator: str, *values: Array) -> Array:
        return np.asarray(NUMPY[operator](*values))

    def product(self, x: Array, w: Array, *bias: Array, k: str = "") -> Array:
        y: Array = np.matmul(x, w)
        return y + bias[0] if bias else y

    def back(self, dy: Array, w: Array, k: str = "h") -> Array:
        return np.asarray(np.matmul(dy, w.T))

    def parts(self, value: Array, count: int) -> Sequence[Array]:
        return np.split(value, count, axis=-1)

    columns = parts

    def joined(self, *values: Array) -> Array:
        return np.concatenate(values, axis=-1)

    def shaped(self, value: Array, rank: int) -> Array:
        return value.copy()

    def steps(self, value: Array) -> Sequence[Array]:
        return list(value)

    def stacked(self, values: Sequence[Array]) -> Array:
        return np.stack(values)

    def width(self, value: Array) -> int:
        return int(value.shape[-1])

    def zeros(self, like: Array) -> Array:
        return np.zeros_like(like)

    def before(self, step: int, lengths: Array) -> Array:
        return np.greater(lengths, step)[:, None]

    def chosen(self, mask: Array, value: Array, other: Array | None) -> Array:
        return np.where(mask, value, np.zeros_like(value) if other is None else other)


class Within:
    """Which steps each sample has: those before its length, all where no lengths are given.

    rows: `Rows` or `Arrays`; lengths: the operand, or none.
    """

    def __init__(self, rows: Any, lengths: Sequence[Any]) -> None:
        self._rows, self._lengths, self._masks = rows, lengths, dict[int, Any]()

    def _mask(self, step: int) -> Any:
        if step not in self._masks:
            self._masks[step] = self._rows.before(step, *self._lengths)
        return self._masks[step]

    def shown(self, step: int, value: Any) -> Any:
        """Return what a step makes, with 0 for samples that do not have it."""
        if not self._lengths:
            return value
        return self._rows.chosen(self._mask(step), value, None)

    def kept(self, step: int, new: Any, old: Any) -> Any:
        """Return the state after a step, the old one for samples that do not have it."""
        return self._rows.chosen(self._mask(step), new, old) if self._lengths else new


class Meaning(TypedDict):
    """Both fields of an `OpSpec` that a layer written for `Rows` and `Arrays` gives."""

    reference: Callable[..., tuple[Array, ...]]
    lower: Callable[[Emitter, Node], Sequence[str]]


def meaning(layer: Layer, rank: int) -> Meaning:
    """Return the reference and the lowering of a layer: `layer(rows, attributes, *operands)`.

    It is written once, with the methods that `Rows` (of that rank) and `Arrays` have.
    """
    return {
        "reference": lambda attributes, *arrays: tuple(layer(Arrays(), attributes, *arrays)),
        "lower": lambda emit, node: layer(Rows(emit, rank), node.attributes, *node.inputs),
    }


# The values of the steps before, which are the left operand of the recurrent weights' gradient.


def _previous(
    rows: Any, attributes: Attributes, y: Any, first: Any, *lengths: Any
) -> Sequence[Any]:
    steps = list(rows.steps(y))
    start = rows.shaped(first, 3)
    if not attributes["reverse"]:
        return [rows.stacked([start, *steps[:-1]])]
    within = Within(rows, lengths)
    after = [within.kept(number, step, start) for number, step in enumerate(steps[1:], 1)]
    return [rows.stacked([*after, start])]


define(
    name="previous_step",
    strided=True,
    inputs=("y", "first", "lengths?"),
    signature=gated("t n h, n h -> t n h", 1),
    **meaning(_previous, 3),
    attributes=REVERSE,
    flops_per_point=0,
    cases=(
        Case(("3 2 4", "2 4"), {}, ()),
        Case(("3 2 4", "2 4"), {"reverse": True}, ()),
        Case(("1 2 3", "2 3"), {}, ()),
        Case(("2 0 3", "0 3"), {}, ()),
        Case(("4 3 4", "3 4", "int32 3 >=1 <4"), {"reverse": True}, ()),
    ),
    doc="y a step later: (first, y[0], y[1], …), or (…, y[-1], first) in reverse, with first\n"
    "from a sample's last step on",
)


def lengths_of(g: GradientContext) -> tuple[str, ...]:
    """Return the lengths that a layer was given, if any."""
    return g.inputs[sum(not name.endswith("?") for name in operator(g.node.operator).inputs) :]


def previous(g: GradientContext, first: str) -> str:
    """Return the states (t, n, h) that the steps of a layer were made of."""
    operands = (g.outputs[0], first, *lengths_of(g))
    return g.emit("previous_step", *operands, reverse=g.attributes["reverse"], rename={})


def weight_gradients(g: GradientContext, dgates: str) -> tuple[str, str, str, str]:
    """Return the gradients of x, w, r and b from those before the gates' functions."""
    x, w, _, _, first, *_ = g.inputs
    rows = Rows(g.emit, 3)
    before = previous(g, first)
    return (
        rows.back(dgates, w, "k"),
        rows.weight(x, dgates, "k"),
        rows.weight(before, dgates),
        rows.total(dgates),
    )


# rnn


def _rnn(
    rows: Any, attributes: Attributes, x: Any, w: Any, r: Any, b: Any, h0: Any, *lengths: Any
) -> Sequence[Any]:
    cell, within = cells.rnn(attributes["activation"]), Within(rows, lengths)
    made = list(rows.steps(rows.product(x, w, b, k="k")))
    hidden = rows.shaped(h0, 3)
    for step in step_order(len(made), attributes):
        total = rows("add", made[step], rows.product(hidden, r))
        (new,) = cell.step(rows.functions, total)
        made[step], hidden = within.shown(step, new), within.kept(step, new, hidden)
    return [rows.stacked(made), rows.shaped(hidden, 2)]


def _rnn_gradient(g: GradientContext) -> Sequence[str | None]:
    lengths = lengths_of(g)
    given = (grad_or_zeros(g, 0), grad_or_zeros(g, 1), g.outputs[0], g.inputs[2], *lengths)
    dgates, dh0 = g.emit.all("rnn_grad", *given, **g.attributes)
    return [*weight_gradients(g, dgates), dh0, *(None for _ in lengths)]


def _rnn_grad(
    rows: Any, attributes: Attributes, dy: Any, dh: Any, y: Any, r: Any, *lengths: Any
) -> Sequence[Any]:
    cell, within = cells.rnn(attributes["activation"]), Within(rows, lengths)
    made, values = list(rows.steps(dy)), rows.steps(y)
    hidden = rows.shaped(dh, 3)
    for step in reversed(list(step_order(len(made), attributes))):
        total = rows("add", made[step], hidden)
        known = {cells.D: total, cell.results[0]: values[step]}
        (new,) = cell.back(rows.functions, known)
        made[step] = within.shown(step, new)
        hidden = within.kept(step, rows.back(made[step], r), hidden)
    return [rows.stacked(made), rows.shaped(hidden, 2)]


_ACTIVATION = {"activation": Attribute("str", "tanh", choices=("tanh", "relu"))}

define(
    name="rnn",
    half=True,
    strided=True,
    inputs=("x", "w", "r", "b", "h0", "lengths?"),
    outputs=("y", "h"),
    states={"h0": "y"},
    signature=gated("t n k, k h, h h, h, n h -> t n h, n h", 1),
    **meaning(_rnn, 3),
    attributes={**REVERSE, **_ACTIVATION},
    gradient=_rnn_gradient,
    operations=of_extents(products),
    onnx="RNN",
    cases=(
        Case(("3 2 5", "5 4", "4 4", "4", "2 4")),
        Case(("3 2 5", "5 4", "4 4", "4", "2 4"), {"reverse": True}),
        Case(("2 3 2", "2 3", "3 3", "3", "3 3"), {"activation": "relu"}),
        Case(("1 1 1", "1 1", "1 1", "1", "1 1")),
        Case(("2 0 3", "3 2", "2 2", "2", "0 2")),
        Case(("2 17 20", "20 33", "33 33", "33", "17 33"), {}, ()),
        Case(("3 3 2", "2 4", "4 4", "4", "3 4", "int32 3 >=1 <4")),
        Case(("3 3 2", "2 4", "4 4", "4", "3 4", "int32 3 >=1 <4"), {"reverse": True}),
    ),
    doc="h = activation(x w + b + h r) over steps: all values, and the last one",
)
define(
    name="rnn_grad",
    strided=True,
    inputs=("dy", "dh", "y", "r", "lengths?"),
    outputs=("dgates", "dh0"),
    signature=gated("t n h, n h, t n h, h h -> t n h, n h", 1),
    **meaning(_rnn_grad, 3),
    attributes={**REVERSE, **_ACTIVATION},
    operations=of_extents(products),
    cases=(
        Case(("3 2 4", "2 4", "3 2 4", "4 4"), {}, ()),
        Case(("3 2 4", "2 4", "3 2 4", "4 4"), {"reverse": True, "activation": "relu"}, ()),
        Case(("1 1 1", "1 1", "1 1 1", "1 1"), {}, ()),
        Case(("2 17 33", "17 33", "2 17 33", "33 33"), {}, (), True),
        Case(("3 5 33", "5 33", "3 5 33", "33 33", "int32 5 <4"), {}, ()),
    ),
    doc="the gradients before the activation at all steps, and of the first state",
)
