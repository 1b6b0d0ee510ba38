"""ONNX operators that draw random numbers, between pieces, so that each run draws others.

A node has a generator of its own, which goes on from run to run of a session: a Mersenne Twister,
NumPy's `RandomState`, begun with the node's seed, or with the system's where it has none. So with
seeds the first run of a session draws what ONNX's reference implementation draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.tensors import dtype_of, shape_of
from soapstone.frontend.onnx.values import ALIGNED, Value, rule
from soapstone.ir.tensor import Array


def _shape(n: Call) -> tuple[int, ...]:
    if n.kind.endswith("Like"):
        return n.value().shape
    return shape_of(n.attribute("shape", ()), "attribute 'shape'", "float64")


def _dtype(n: Call, default: str) -> str:
    code = n.attribute("dtype")
    return default if code is None else dtype_of(code, "attribute 'dtype'")


def _real(n: Call) -> str:
    """Return the type of the numbers that are drawn.

    Raises:
        UnsupportedError: it has no fractions.
    """
    dtype = _dtype(n, n.value().dtype if n.kind.endswith("Like") else "float32")
    if not dtype.startswith("float"):
        raise UnsupportedError(f"numbers of type {dtype}; float16, float32 or float64 needed")
    return dtype


@rule("RandomNormal", "RandomNormalLike")
def normal(n: Call) -> Value:
    drawn = n.generator().standard_normal(_shape(n))
    made = drawn * n.attribute("scale", 1.0) + n.attribute("mean", 0.0)
    return n.known(np.asarray(made), _real(n))


@rule("RandomUniform", "RandomUniformLike")
def uniform(n: Call) -> Value:
    low, high = n.attribute("low", 0.0), n.attribute("high", 1.0)
    drawn = np.asarray(n.generator().random_sample(_shape(n)))
    return n.known(drawn * (high - low) + low, _real(n))


@rule("Bernoulli")
def bernoulli(n: Call) -> Value:
    chance = n.array(0, apart=True)
    drawn = n.generator().random_sample(chance.shape)
    return n.known(np.asarray(drawn < chance), _dtype(n, n.value().dtype))


@rule("Multinomial")
def multinomial(n: Call) -> Value:
    logits = n.array(0, apart=True).astype(np.float64)
    if logits.ndim != 2 or not logits.shape[1]:
        raise OnnxError(f"input 0 has shape {logits.shape}; (n, classes) needed")
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    ends = np.cumsum(powers, axis=1)
    count = n.room(n.attribute("sample_size", 1))
    drawn = n.generator().random_sample((len(logits), count)) * ends[:, -1:]
    places = [np.searchsorted(row, each, side="right") for row, each in zip(ends, drawn)]
    made = np.minimum(np.reshape(places, drawn.shape), logits.shape[1] - 1)
    return n.known(made, _dtype(n, "int32"))


@rule("Dropout", even=ALIGNED)
def dropout(n: Call) -> Any:
    x = n.value()
    if n.version < 7 and not n.attribute("is_test", 0):
        raise UnsupportedError("random numbers (is_test is 0) are not supported")
    share = n.number("ratio", 1, 0.5) or 0
    if not (n.has(2) and n.array(2).any() and share > 0):
        mask = n("full", shape=x.shape, value=1.0, dtype="bool") if n.wants(1) else None
        return [x, mask]
    kept = n.generator().random_sample(x.shape) >= share
    scale: Array = np.asarray(kept / (1 - share) if share < 1 else 0.0 * kept)
    return [n("mul", x, n.known(scale, x.dtype)), n.known(kept)]
