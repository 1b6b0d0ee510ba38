"""Matrix products: `matmul`, and `linear`, the composite of a product, a bias and an activation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.ops.checks import need_one_type
from soapstone.ir.ops.elementwise.pointwise import unbroadcast
from soapstone.ir.ops.products import laws_batched, laws_matmul
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, GradientContext, SignatureRule, define, operator
from soapstone.ir.tensor import Array, TensorSpec

ACTIVATIONS = ("relu", "leaky_relu", "gelu", "sigmoid", "tanh")
ACTIVATION = Attribute("str", None, choices=(None, *ACTIVATIONS))


def activate(name: str | None, x: Array) -> Array:
    """Return the activation's reference with its default attributes, or x for None."""
    if name is None:
        return x
    spec = operator(name)
    return spec.run(spec.normalise({}), x)[0]


def is_of_result(activation: str) -> bool:
    """Return whether the gradient of an activation needs no more than its result."""
    return "y" in operator(f"{activation}_grad").inputs


def activation_grad(context: GradientContext, operands: int) -> str:
    """Return the gradient before the activation, of an operator that fuses one at its end.

    Where it needs the value before the activation, that is computed again from the operator without
    its activation.
    """
    name = context.attributes["activation"]
    grad = context.grad()
    if name is None:
        return grad
    if is_of_result(name):
        return context.emit(f"{name}_grad", grad, context.outputs[0])
    attributes = dict(context.attributes) | {"activation": None}
    before = context.emit(context.node.operator, *context.inputs[:operands], **attributes)
    return context.emit(f"{name}_grad", grad, before)


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_one_type(inputs)
    a = "... k m" if attributes["transpose_a"] else "... m k"
    b = "... n k" if attributes["transpose_b"] else "... k n"
    return einsum(f"{a}, {b} -> ... m n", inputs, dtypes=[inputs[0].dtype])


def _matmul(attributes: Attributes, a: Array, b: Array) -> Array:
    if attributes["transpose_a"]:
        a = np.swapaxes(a, -1, -2)
    if attributes["transpose_b"]:
        b = np.swapaxes(b, -1, -2)
    return np.asarray(np.matmul(a, b))


def _matmul_grad(g: GradientContext) -> Sequence[str | None]:
    a, b = g.inputs
    dy = g.grad()
    ta, tb = g.attributes["transpose_a"], g.attributes["transpose_b"]
    # Each gradient is a product whose reduced dim is one of the forward operator's free dims.
    if ta:
        da = g.emit(
            "matmul", b, dy, transpose_a=tb, transpose_b=True, rename={"m": "k", "k": "n", "n": "m"}
        )
    else:
        da = g.emit("matmul", dy, b, transpose_b=not tb, rename={"k": "n", "n": "k"})
    if tb:
        db = g.emit(
            "matmul", dy, a, transpose_a=True, transpose_b=ta, rename={"m": "n", "k": "m", "n": "k"}
        )
    else:
        db = g.emit("matmul", a, dy, transpose_a=not ta, rename={"m": "k", "k": "m"})
    return [
        unbroadcast(g, da, a, _matrix_dims(g.spec(da).rank, "km" if ta else "mk")),
        unbroadcast(g, db, b, _matrix_dims(g.spec(db).rank, "nk" if tb else "kn")),
    ]


def _matrix_dims(rank: int, last: str) -> dict[str, str]:
    """Return how dims d0, d1, … of an array of matrices are called in a matmul."""
    return {f"d{axis}": f"b{axis}" for axis in range(rank - 2)} | {
        f"d{rank - 2 + i}": name for i, name in enumerate(last)
    }


define(
    name="matmul",
    half=True,
    epilogue=True,
    strided=True,
    inputs=("a", "b"),
    signature=_signature,
    reference=_matmul,
    attributes={
        "transpose_a": Attribute("bool", False),
        "transpose_b": Attribute("bool", False),
    },
    gradient=_matmul_grad,
    flops_per_point=2,
    forms=laws_matmul.MATMUL_FORMS,
    constants=(laws_matmul.IDENTITY_MATRIX,),
    laws=laws_matmul.MATMUL_LAWS + laws_batched.MATMUL_BATCHED_LAWS,
    onnx="MatMul",
    cases=(
        Case(("3 5", "5 4")),
        Case(("5 3", "5 4"), {"transpose_a": True}),
        Case(("3 5", "4 5"), {"transpose_b": True}),
        Case(("5 3", "4 5"), {"transpose_a": True, "transpose_b": True}),
        Case(("2 3 5", "2 5 4")),
        Case(("2 1 3 5", "3 5 4")),
        Case(("1 1", "1 1")),
        Case(("0 3", "3 2")),
        Case(("2 0", "0 3")),
    ),
)


def _linear_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    text = "... k, k n, n -> ... n" if attributes["bias"] else "... k, k n -> ... n"
    if len(inputs) != 2 + attributes["bias"]:
        raise ShapeError(f"{len(inputs)} inputs found, {2 + attributes['bias']} needed")
    need_one_type(inputs, attributes["activation"])
    fused = attributes["bias"] or attributes["activation"] is not None
    kinds = {"k": Kind.LOWERED} if fused else {}
    return einsum(text, inputs, dtypes=[inputs[0].dtype], kinds=kinds)


def _product(text: str) -> SignatureRule:
    def signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
        need_one_type(inputs)
        return einsum(text, inputs, dtypes=[inputs[0].dtype])

    return signature


def _linear(attributes: Attributes, x: Array, w: Array, *bias: Array) -> Array:
    y = np.matmul(x, w)
    if attributes["bias"]:
        y = y + bias[0]
    return activate(attributes["activation"], y)


def _linear_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, w, *bias = node.inputs
    y = emit("linear", x, w, bias=False)
    rank = len(emit.spec(y).shape)
    dims = {f"d{axis}": f"b{axis}" for axis in range(rank - 1)} | {f"d{rank - 1}": "n"}
    if bias:
        y = emit("add", y, bias[0], rename=dims)
    if node.attributes["activation"]:
        y = emit(node.attributes["activation"], y, rename=dims)
    return [y]


def _linear_grad(g: GradientContext) -> Sequence[str | None]:
    x, w = g.inputs[:2]
    rank = len(g.spec(x).shape)
    dims = {f"d{axis}": f"b{axis}" for axis in range(rank - 1)} | {f"d{rank - 1}": "n"}
    follow = replace(g, emit=g.emit.renamed(dims))
    dy = activation_grad(follow, len(g.inputs))
    dx = g.emit("linear_grad_input", dy, w)
    dw = g.emit("linear_grad_weight", x, dy)
    if not g.attributes["bias"]:
        return [dx, dw]
    db = g.emit("reduce_sum", dy, axes=tuple(range(rank - 1)), keepdims=False, rename=dims)
    return [dx, dw, db]


def _rows(x: Array) -> Array:
    """Return x as a matrix: leading dims joined, also when the last extent is zero."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


_LINEAR_CASES = (
    Case(("4 5", "5 3", "3")),
    Case(("4 5", "5 3", "3"), {"activation": "relu"}),
    Case(("2 3 5", "5 4", "4"), {"activation": "gelu"}),
    Case(("4 5", "5 3"), {"bias": False}),
    Case(("4 5", "5 3"), {"bias": False, "activation": "tanh"}),
    Case(("4 5", "5 3", "3"), {"activation": "sigmoid"}),
    Case(("4 5", "5 3", "3"), {"activation": "leaky_relu"}),
    Case(("1 1", "1 1", "1")),
    Case(("0 3", "3 2", "2")),
)

define(
    name="linear",
    half=True,
    epilogue=True,
    inputs=("x", "w", "b?"),
    signature=_linear_signature,
    reference=_linear,
    attributes={"bias": Attribute("bool", True), "activation": ACTIVATION},
    gradient=_linear_grad,
    lower=_linear_lower,
    flops_per_point=2,
    onnx="Gemm",
    layer=None,
    cases=_LINEAR_CASES,
    doc="x w + b, then an activation; w: (k, n)",
)
define(
    name="linear_grad_input",
    inputs=("dy", "w"),
    signature=_product("... n, k n -> ... k"),
    reference=lambda a, dy, w: np.matmul(dy, w.T),
    flops_per_point=2,
    cases=(Case(("4 3", "5 3"), {}, ()), Case(("2 4 3", "5 3"), {}, ())),
)
define(
    name="linear_grad_weight",
    inputs=("x", "dy"),
    signature=_product("... k, ... n -> k n"),
    reference=lambda a, x, dy: np.matmul(_rows(x).T, _rows(dy)),
    flops_per_point=2,
    cases=(
        Case(("4 5", "4 3"), {}, ()),
        Case(("2 4 5", "2 4 3"), {}, ()),
        Case(("4 0", "4 3"), {}, ()),
    ),
)
