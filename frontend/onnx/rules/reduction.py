"""ONNX reductions, argmax and top-k, running sums, losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.dtypes import integers, kind_of
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.values import PLAIN, Value, rule
from soapstone.ir.tensor import Array

# What a reduction over no elements gives.
_EMPTY = {"ReduceMax": -math.inf, "ReduceMin": math.inf, "ReduceLogSumExp": -math.inf}


@rule(
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    even=PLAIN,
)
def reduce(n: Call) -> Value:
    x = n.value()
    given = n.ints("axes", 1)
    if not given:
        if n.attribute("noop_with_empty_axes", 0):
            return _elementwise(n, x)
        given = tuple(range(x.rank))
    axes = n.axes_of(given, x.rank)
    keepdims = bool(n.attribute("keepdims", 1))
    if n.kind in _EMPTY and any(x.shape[axis] == 0 for axis in axes):
        shape = [1 if a in axes else e for a, e in enumerate(x.shape) if keepdims or a not in axes]
        return n.broadcast(n.known(_identity(x.dtype, _EMPTY[n.kind])), shape)
    if x.dtype == "bool":  # the extrema of truth values
        small = n(n.spec.name, n.cast(x, "uint8"), axes=axes, keepdims=keepdims)
        return n.cast(small, "bool")
    if n.kind == "ReduceMean" and not x.spec.is_float:
        count = math.prod(x.shape[axis] for axis in axes)
        total = n("reduce_sum", x, axes=axes, keepdims=keepdims)
        return n("div", total, n.like(count, x))
    real = n.kind in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")  # roots and logarithms
    wide = n.cast(x, "float64") if real and not x.spec.is_float else x
    return n.cast(n(n.spec.name, wide, axes=axes, keepdims=keepdims), x.dtype)


def _identity(dtype: str, value: float) -> Array:
    if kind_of(dtype) == "f":
        return np.asarray(value, dtype)
    if dtype == "bool":
        return np.asarray(value > 0)
    limits = integers(dtype)
    return np.asarray(limits.max if value > 0 else limits.min, dtype)


def _elementwise(n: Call, x: Value) -> Value:
    """Return what a reduction over no axes makes of each element."""
    if n.kind in ("ReduceL1", "ReduceL2"):
        return n("abs", x)
    if n.kind == "ReduceLogSum":
        return n("log", x)
    if n.kind == "ReduceSumSquare":
        return n("mul", x, x)
    return x


@rule("TopK")
def top_k(n: Call) -> Any:
    x = n.value()
    axis = n.axis(x.rank, -1)
    count = n.ints("k", 1)
    if count is None or len(count) != 1 or not 0 <= count[0] <= x.shape[axis]:
        raise OnnxError(f"k is {count}; 0 to {x.shape[axis]} needed")
    return n.all(
        "top_k",
        x,
        k=count[0],
        axis=axis,
        largest=bool(n.attribute("largest", 1)),
        sorted=bool(n.attribute("sorted", 1)),
    )


@rule("CumProd")
def cumprod(n: Call) -> Value:
    """Products of all shorter prefixes, by doubling: log2 of the axis' extent steps."""
    x = n.value()
    axis = n.axis_of(int(n.array(1).reshape(())), x.rank)
    extent, backwards = x.shape[axis], bool(n.attribute("reverse", 0))

    def moved(value: Value, by: int) -> Value:
        """Return the elements `by` places on, ones where there are none."""
        ones, none = [0] * x.rank, (0,) * x.rank
        ones[axis] = by
        first = by if backwards else 0
        kept = n.part(value, axis, first, first + extent - by)
        low, high = (none, ones) if backwards else (ones, none)
        return n("pad", kept, low=low, high=high, interior=none, value=1.0)

    if n.attribute("exclusive", 0) and extent:
        x = moved(x, 1)
    by = 1
    while by < extent:
        x = n("mul", x, moved(x, by))
        by *= 2
    return x
