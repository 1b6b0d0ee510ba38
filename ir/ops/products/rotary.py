"""`rotary_embedding`: pairs of elements of each row turned by angles, as of their positions.

Of the first `width` elements, all by default, an element's partner is the one half the width away
or, where they are interleaved, its neighbour. Tables have a number for each of these elements or,
of half the width, for each pair. Dims: d0, d1, … but for the last, which is never split.

Source: Su et al., RoFormer: Enhanced transformer with rotary position embedding, 2021.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import DimTable, along, finish, named
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0, 1, 2)
    x = inputs[0]
    if x.rank == 0:
        raise ShapeError("input 0 has rank 0 (shape ()); 1 or more needed")
    width = width_of(attributes, x.shape[-1])
    if width % 2 or width > x.shape[-1]:
        raise ShapeError(
            f"dim d: width {width} found; an even number, at most {x.shape[-1]}, needed"
        )
    table, names = DimTable(), [f"d{axis}" for axis in range(x.rank - 1)]
    operands = [named(table, [*names, "d"], x.shape, "input 0")]
    for position, spec in enumerate(inputs[1:], 1):
        where = f"input {position}"
        if not 1 <= spec.rank <= x.rank or spec.shape[-1] not in (width, width // 2):
            raise ShapeError(
                f"{where} has shape {spec.shape}; up to {x.rank} axes needed, the last of {width}"
                f" or {width // 2}"
            )
        axes: list[Axis] = []
        for name, extent in zip(names[x.rank - spec.rank :], spec.shape):
            shared = extent == 1 != table.extent(name)
            axes.append(Whole(1) if shared else along(table, name, extent, where))
        operands.append(Operand((*axes, Whole(spec.shape[-1]))))
    return finish(table, operands, operands[:1], [x.dtype], {"d": Kind.WHOLE})


def width_of(attributes: Attributes, extent: int) -> int:
    """Return how many elements of a row of so many are turned."""
    width = attributes["width"]
    return extent if width is None else int(width)


def _rotary(attributes: Attributes, x: Array, cosine: Array, sine: Array) -> Array:
    width = width_of(attributes, x.shape[-1])

    def sides(values: Array) -> tuple[Array, Array]:
        if values.shape[-1] < width:  # numbers of pairs
            return values, values
        if attributes["interleaved"]:
            return values[..., ::2], values[..., 1::2]
        return values[..., : width // 2], values[..., width // 2 :]

    y = np.array(x)
    (low, high), to = sides(x[..., :width]), sides(y[..., :width])
    cosines, sines = sides(cosine), sides(sine)
    to[0][...] = low * cosines[0] - high * sines[0]
    to[1][...] = high * cosines[1] + low * sines[1]
    return y


define(
    name="rotary_embedding",
    inputs=("x", "cosine", "sine"),
    signature=_signature,
    reference=_rotary,
    attributes={
        "width": Attribute("int", None, minimum=0),
        "interleaved": Attribute("bool", False),
    },
    strided=True,
    tiles_free=True,
    flops_per_point=3,
    layer=None,
    cases=(
        Case(("2 3 5 8", "1 1 5 8", "1 1 5 8")),
        Case(("2 5 3 70", "5 1 35", "5 1 35")),
        Case(("2 3 40", "2 3 40", "3 40"), {"interleaved": True}),
        Case(("3 2 39", "3 1 17", "3 1 34"), {"interleaved": True, "width": 34}),
        Case(("2 4 7", "1 2", "4 4"), {"width": 4}),
        Case(("2", "1", "1")),
        Case(("0 4", "4", "4")),
    ),
    doc="x with pairs of its last axis' elements turned by angles, given cosines and sines",
)
