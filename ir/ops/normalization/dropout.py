"""Dropout with counter-based random numbers, the same under every partitioning.

Whether element i is kept depends on the seed, the step and i alone, where i counts the elements of
the whole tensor in row-major order: no tile, executor or mapper changes the draw. Rows of the first
axis may each have a step of their own, as calls that run together do; then i counts the elements of
a row. Dims: d0, d1, …
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import DimTable, finish, numbered
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

INDEX, SEED, STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = 2**64 - 1


def random_bits(seed: int, step: int | Array, index: Array) -> Array:
    """Return 32 random bits for each index, as uint64 below 2**32; steps have their shape, or one.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014), on a weighted sum.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64, also of a single index
        shift = np.asarray(step).astype(np.uint64) * np.uint64(STEP)
        shift = shift + np.uint64((seed * SEED) & MASK)
        z = index.astype(np.uint64) * np.uint64(INDEX) + shift
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        return np.asarray((z ^ (z >> np.uint64(31))) >> np.uint64(32))


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    if inputs[1].rank > min(inputs[0].rank, 1):
        raise ShapeError(f"input 1 has shape {inputs[1].shape}; a step, or one a row of x needed")
    if inputs[1].dtype != "int64":
        raise ShapeError(f"input 1 has type {inputs[1].dtype}; int64 needed (the step)")
    if attributes["rate"] >= 1:
        raise GraphError(f"attribute rate: {attributes['rate']} found, less than 1 needed")
    table = DimTable()
    operands = [numbered(table, spec.shape, f"input {at}") for at, spec in enumerate(inputs)]
    return finish(table, operands, operands[:1], [inputs[0].dtype])


def _positions(shape: Sequence[int], origin: Sequence[int], full: Sequence[int]) -> Array:
    """Return the row-major index in the full tensor of every element of a tile."""
    index: Array = np.zeros((), np.int64)
    for extent, first, whole in zip(shape, origin, full):
        index = index[..., None] * whole + (first + np.arange(extent))
    return index


def _dropout(attributes: Attributes, x: Array, step: Array) -> Array:
    origin = attributes.get("origin", (0,) * x.ndim)
    inner = step.ndim  # the axes that rows have steps of
    full = attributes.get("full_shape", x.shape)
    index = _positions(x.shape[inner:], origin[inner:], full[inner:])
    steps = step.reshape(step.shape + (1,) * index.ndim)
    bits = random_bits(attributes["seed"], steps, index)
    kept = bits >= attributes["rate"] * 2**32
    scale = x.dtype.type(1 / (1 - attributes["rate"]))
    return np.asarray(np.where(kept, x * scale, x.dtype.type(0)))


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    origin = tuple(int(first) for first in tile.inputs[0][0])
    return {**attributes, "origin": origin, "full_shape": tile.input_shapes[0]}


def _gradient(g: GradientContext) -> Sequence[str | None]:
    return [g.emit("dropout", g.grad(), g.inputs[1], **g.attributes), None]


define(
    name="dropout",
    inputs=("x", "step"),
    signature=_signature,
    reference=_dropout,
    attributes={
        "rate": Attribute("float", 0.5, minimum=0),
        "seed": Attribute("int", 0, minimum=0),
    },
    gradient=_gradient,
    localize=_localize,
    flops_per_point=10,
    onnx="Dropout",
    cases=(
        Case(("4 6", "int64 <100"), {"rate": 0.5, "seed": 7}),
        Case(("2 3 5", "int64 <100"), {"rate": 0.25, "seed": 2**63 + 11}),
        Case(("9", "int64 <100"), {"rate": 0.0}),
        Case(("", "int64 <100"), {"rate": 0.9}),
        Case(("0 3", "int64 <100")),
        Case(("1 1", "int64 <100"), {"rate": 0.1}),
        Case(("4 6", "4 int64 <100"), {"rate": 0.5, "seed": 7}),
        Case(("3 2 5", "3 int64 <100"), {"seed": 2**63 + 11}),
        Case(("5", "5 int64 <100")),
        Case(("5 1", "5 int64 <100")),
    ),
    doc="x scaled by 1/(1-rate) or 0, drawn anew at every step; the gradient is dropout of dy",
)
