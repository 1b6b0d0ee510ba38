"""Vectors of lanes as Numba knows them: their type, and its operators.

Importing this module imports Numba; `simd` does when a function that has vectors is compiled.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from soapstone.native.lanes import I1, Lanes


class Vector(types.Type):  # type: ignore[misc, unused-ignore]
    """The Numba type of a vector of lanes."""

    def __init__(self, element: Any, count: int) -> None:
        self.element, self.count = element, count
        super().__init__(f"Vector({element} x {count})")


@register_model(Vector)  # type: ignore[untyped-decorator, unused-ignore]
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc, unused-ignore]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(kind.element, kind.count))


def numba_type(value: Any) -> Any:
    """Return Numba's type of a value of LLVM's, or of None."""
    if value is None:
        return types.void
    kind = value.type
    if isinstance(kind, ir.VectorType):
        return Vector(kind.element, kind.count)
    names = {"float": "float32", "double": "float64", "i64": "int64", "i32": "int32", "i8": "uint8"}
    return getattr(types, names.get(str(kind), "boolean"))


def _operator(sign: Any) -> None:
    @infer_global(sign)  # type: ignore[untyped-decorator, unused-ignore]
    class _Rule(AbstractTemplate):  # type: ignore[misc, unused-ignore]
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [a for a in args if isinstance(a, Vector)]
            if not vectors:
                return None
            result = vectors[0]
            if sign in _COMPARISONS:
                result = Vector(I1, result.count)
            others = (a for a in args if not isinstance(a, Vector))
            if any(not isinstance(a, (types.Float, types.Integer)) for a in others):
                return None
            return signature(result, *args)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = next(Lanes(builder, a) for a in args if isinstance(a.type, ir.VectorType))
        lanes = []
        for value in args:
            one = Lanes(builder, value)
            if not isinstance(value.type, ir.VectorType):
                one = one.cast(vector.element)
            lanes.append(one)
        return sign(*lanes).value

    if sign is operator.neg:
        lower_builtin(sign, Vector)(lower)
        return
    for other in (types.Float, types.Integer):
        lower_builtin(sign, Vector, other)(lower)
        lower_builtin(sign, other, Vector)(lower)
    lower_builtin(sign, Vector, Vector)(lower)


_COMPARISONS = (operator.lt, operator.gt, operator.le, operator.ge)
for _sign in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.neg,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.and_,
    operator.or_,
    operator.xor,
    *_COMPARISONS,
):
    _operator(_sign)

# What is being compiled goes on with these operators.
cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
