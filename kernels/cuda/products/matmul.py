"""Matrix products, linear layers and their gradients; any of them with element-wise steps after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from soapstone.ir.ops.elementwise.fused import program_steps
from soapstone.kernels.cuda.elementwise.pointwise import Writer
from soapstone.kernels.cuda.elementwise.text import Text, Value, step
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.products.operands import Axes, Operand
from soapstone.kernels.cuda.products.tiled import product
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

# What a product is: operands a, b and c along named axes, and the axes; and how each axis of the
# output is named, by which further operands are found.
Problem = tuple[Operand, Operand, Operand, Mapping[str, Axes], Sequence[str]]
Prepare = Callable[[Mapping[str, Any], Sequence[View], View], Problem]


@dataclass(frozen=True)
class Product:
    """A product that a call asks for.

    Attributes:
        name: of its operator. attributes, inputs, y: of the operator, its operands and its result.
        more: writes what is stored from a result in registers and the values of `extras`, which
            are of the shape of y; None where the result itself is.
    """

    name: str
    attributes: Mapping[str, Any]
    inputs: Sequence[View]
    y: View
    more: Writer | None = None
    extras: Sequence[View] = ()


def product_of(call: Call) -> Product:
    """Return what a call of a product asks for, or of `with_epilogue`: that with its steps."""
    inputs, outputs = views(call)
    at = call.attributes
    if call.operator != "with_epilogue":
        return Product(call.operator, at, inputs, outputs[0])
    of, arity = dict(at["items"]), at["arity"]
    return Product(at["operator"], of, inputs[:arity], outputs[0], _steps(at), inputs[arity:])


def along(view: View, names: Sequence[str]) -> Operand:
    """Return a view whose axes are named, as an operand; of extent 1 they do not vary."""
    return Operand(
        view, {n: 0 if e == 1 else s for n, e, s in zip(names, view.shape, view.strides)}
    )


def named(names: Sequence[str], extents: Sequence[int]) -> Axes:
    """Return axes, of which there is one at least."""
    return list(zip(names, extents)) or [("none", 1)]


def matmul(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    """Return a batched product as a problem."""
    a, b = inputs
    lead = [f"b{n}" for n in range(len(y.shape) - 2)]
    ends = ("k", "m") if attributes["transpose_a"] else ("m", "k")
    others = ("n", "k") if attributes["transpose_b"] else ("k", "n")
    first = lead[len(lead) + 2 - len(a.shape) :] if len(a.shape) > 2 else []
    second = lead[len(lead) + 2 - len(b.shape) :] if len(b.shape) > 2 else []
    depth = a.shape[-2 if attributes["transpose_a"] else -1]
    axes = {
        "b": named(lead, y.shape[:-2]),
        "m": [("m", y.shape[-2])],
        "n": [("n", y.shape[-1])],
        "k": [("k", depth)],
    }
    out = [*lead, "m", "n"]
    return along(a, [*first, *ends]), along(b, [*second, *others]), along(y, out), axes, out


def _of_rows(x: View, w: View, y: View, ends: Sequence[str]) -> Problem:
    """Return x w, whose rows are all but the last axis of x; ends: of w, k and n in its order."""
    rows = [f"m{n}" for n in range(len(x.shape) - 1)]
    axes = {
        "b": [("none", 1)],
        "m": named(rows, x.shape[:-1]),
        "n": [("n", w.shape[ends.index("n")])],
        "k": [("k", w.shape[ends.index("k")])],
    }
    out = [*rows, "n"]
    return along(x, [*rows, "k"]), along(w, ends), along(y, out), axes, out


def linear(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    """Return x w, as a problem."""
    return _of_rows(inputs[0], inputs[1], y, "kn")


def linear_grad_input(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    """Return dy w', as a problem."""
    return _of_rows(inputs[0], inputs[1], y, "nk")


def linear_grad_weight(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    """Return x' dy, summed over all rows, as a problem."""
    x, dy = inputs
    rows = [f"k{n}" for n in range(len(x.shape) - 1)]
    axes = {
        "b": [("none", 1)],
        "m": [("m", x.shape[-1])],
        "n": [("n", dy.shape[-1])],
        "k": named(rows, x.shape[:-1]),
    }
    return along(x, [*rows, "m"]), along(dy, [*rows, "n"]), along(y, ["m", "n"]), axes, ["m", "n"]


PROBLEMS: dict[str, Prepare] = {
    "matmul": matmul,
    "linear": linear,
    "linear_grad_input": linear_grad_input,
    "linear_grad_weight": linear_grad_weight,
}

BINDS: dict[str, Callable[[Product], DeviceEntry]] = {}  # of what is more than a problem


def _own(attributes: Mapping[str, Any]) -> Writer | None:
    """Return the writer of a product's own bias and activation, None where it has none."""
    bias, activation = attributes.get("bias", False), attributes.get("activation")
    if not bias and activation is None:
        return None

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        total = values[0]
        if bias:
            total = text.set(f"{total.name} + {values[1].name}", total.type)
        if activation is not None:
            from soapstone.ir.spec import operator

            total = step(text, activation, [total], operator(activation).normalise({}))
        return [total]

    return write


def channel_of(view: View, rank: int, axis: int) -> View:
    """Return a vector as a view that varies along one axis of the output."""
    shape, strides = [1] * rank, [0] * rank
    shape[axis], strides[axis] = view.shape[0], view.strides[0]
    return View(view.span, tuple(shape), tuple(strides), view.dtype, view.offset)


def ending(of: Product) -> tuple[Writer | None, list[View]]:
    """Return what follows a product's sums: bias and activation of its own, then `more`.

    It is the writer from a sum, and the values of further operands, to what is stored, or None; and
    those operands, of the shape of y.
    """
    own, more, shape = _own(of.attributes), of.more, of.y.shape
    channel = 1 if of.name.startswith("conv") else len(shape) - 1
    biases = [channel_of(view, len(shape), channel) for view in of.inputs[2:]]
    operands = [view.broadcast(shape) for view in (*biases, *of.extras)]

    def write(text: Text, values: Sequence[Value]) -> Sequence[Value]:
        total, rest = values[0], list(values[1:])
        if own is not None:
            (total,) = own(text, [total, *rest[: len(biases)]])
        return more(text, [total, *rest[len(biases) :]]) if more is not None else [total]

    return write if own or more else None, operands


def bound(of: Product, kind: str | None = None) -> DeviceEntry:
    """Return the entry of a product with its own bias and activation, then its steps.

    kind: the type in which products are added, by default that of the first operand.
    """
    a, b, c, axes, out = PROBLEMS[of.name](of.attributes, of.inputs, of.y)
    write, operands = ending(of)
    likes = [output_like(c, view, out) for view in operands]
    return product(a, b, c, axes, write, likes, kind)


def output_like(c: Operand, view: View, names: Sequence[str]) -> Operand:
    """Return a view of the output's shape as an operand along the output's axes.

    An axis that is the output's several times over, as channels are of groups, is `name*count`.
    """
    strides: dict[str, int] = {}
    for name, step_of in zip(names, view.strides):
        for part in name.split("+"):
            axis, _, count = part.partition("*")
            strides[axis] = step_of * int(count or 1)
    return replace(c, view=view, strides=strides)


def _steps(attributes: Mapping[str, Any]) -> Writer:
    """Return the writer of the steps of `with_epilogue`, from the wrapped operator's result."""

    def write(text: Text, given: Sequence[Value]) -> list[Value]:
        values = list(given)
        for spec, operands, settings in program_steps(attributes, len(given)):
            values.append(step(text, spec.name, [values[i] for i in operands], settings))
        return [values[-1]]

    return write


@variant((*PROBLEMS, "with_epilogue"), "tiled", processor="cuda")
def tiled(call: Call) -> DeviceEntry | None:
    """Return the entry of a product, whose element-wise steps run on sums in registers."""
    if len(call.outputs) != 1:
        return None
    of = product_of(call)
    bind = BINDS.get(of.name, bound if of.name in PROBLEMS else None)
    return None if bind is None else bind(of)
