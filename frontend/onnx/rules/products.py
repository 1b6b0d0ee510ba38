"""ONNX operators that are matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.frontend.onnx import extent_axes as follow
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.values import Even, Value, rule
from soapstone.ir.tensor import TensorSpec


@rule("MatMul", even=Even(axes=follow.multiplied))
def matmul(n: Call) -> Value:
    return product(n, n.value(0), n.value(1))


def product(n: Call, a: Value, b: Value) -> Value:
    """Return the product of matrices, or of vectors, as NumPy's matmul."""
    if a.rank == 0 or b.rank == 0:
        raise OnnxError("an operand of rank 0 found; 1 or more needed")
    left, right = a.rank == 1, b.rank == 1
    a = n.reshape(a, (1, *a.shape)) if left else a
    b = n.reshape(b, (*b.shape, 1)) if right else b
    if b.rank == 2 and b.array is not None and b.spec.is_float:
        y = n("linear", a, b, bias=False)
    else:
        y = n("matmul", a, b)
    if left or right:
        shape = y.shape[: y.rank - 2] + (() if left else (y.shape[-2],))
        y = n.reshape(y, (*shape, *(() if right else (y.shape[-1],))))
    return y


@rule("Gemm", even=Even(axes=follow.multiplied_turned))
def gemm(n: Call) -> Value:
    a, b, c = n.value(0), n.value(1), n.maybe(2)
    if a.rank != 2 or b.rank != 2:
        raise OnnxError(f"ranks {a.rank} and {b.rank} found; matrices needed")
    alpha, beta = n.attribute("alpha", 1.0), n.attribute("beta", 1.0)
    ta, tb = bool(n.attribute("transA", 0)), bool(n.attribute("transB", 0))
    columns = b.shape[0] if tb else b.shape[1]
    if c is not None:
        if n.version < 7 and not n.attribute("broadcast", 0):
            c = n.reshape(c, c.shape)
        if c.rank > 2:
            raise OnnxError(f"input 2 has rank {c.rank}; at most 2 needed")
        if beta != 1.0:
            c = scaled(n, c, beta)
    plain = not ta and alpha == 1.0 and a.spec.is_float
    if plain and (b.array is not None or not tb):
        # The shape that kernels know best; a transposed weight is folded away later.
        w = n("transpose", b, permutation=(1, 0)) if tb else b
        if c is not None and c.shape in ((columns,), (1, columns)):
            return n("linear", a, w, n.reshape(c, (columns,)))
        y = n("linear", a, w, bias=False)
    else:
        y = n("matmul", a, b, transpose_a=ta, transpose_b=tb)
        if alpha != 1.0:
            y = scaled(n, y, alpha)
    return y if c is None else n("add", y, c)


def scaled(n: Call, x: Value, factor: float) -> Value:
    """Return x times a number."""
    if x.spec.is_float:
        return n("affine", x, scale=factor)
    return n.cast(n("affine", n.cast(x, "float64"), scale=factor), x.dtype)


class _Emitter:
    """What `einsum` asks of a builder, with values of the file in the place of names."""

    def __init__(self, n: Call) -> None:
        self._n = n

    def spec(self, value: Value) -> TensorSpec:
        return value.spec

    def apply(
        self, operator_name: str, *inputs: Value, name: str, **attributes: Any
    ) -> Sequence[Value]:
        return self._n.all(operator_name, *inputs, **attributes)


@rule("Einsum")
def contracted(n: Call) -> Value:
    from soapstone.frontend.einsum import einsum

    return einsum(_Emitter(n), n.attribute("equation"), n.values())
