"""`write_at`: rows written into a longer array, each sample's from a place of its own.

It is how keys and values join what a decoder remembers. The result is the array's next contents, so
where it outlives a step, rows are written where it lies. Dims: b, samples; t, the axis that is
written to; d1, d2, … the others.

Source: TensorScatter of ONNX.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_axis, need_integer
from soapstone.ir.ops.signatures import DimTable, along, finish, named
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    (x, rows, _), axis = inputs, attributes["axis"]
    need_integer(inputs, 2)
    need_axis(x, axis)
    if (rows.rank, rows.dtype) != (x.rank, x.dtype):
        raise ShapeError(f"input 1 is {rows}; {x.dtype} of rank {x.rank} needed, as input 0")
    if rows.shape[axis] > x.shape[axis]:
        raise ShapeError(
            f"dim t is {x.shape[axis]} in input 0 but {rows.shape[axis]} in input 1;"
            f" at most {x.shape[axis]} needed"
        )
    table = DimTable()
    names = ["t" if place == axis else f"d{place}" if place else "b" for place in range(x.rank)]
    whole = named(table, names, x.shape, "input 0")
    some: list[Axis] = [
        Whole(extent) if name == "t" else along(table, name, extent, "input 1")
        for name, extent in zip(names, rows.shape)
    ]
    starts = named(table, ["b"], inputs[2].shape, "input 2")
    return finish(table, [whole, Operand(tuple(some)), starts], [whole], [x.dtype], _KINDS)


_KINDS = {"t": Kind.WHOLE}


def checked_starts(operator: str, starts: Array, rows: int, extent: int) -> None:
    """Check where rows are to begin.

    Raises:
        GraphError: some would not fit; names the operator, the place and the extent.
    """
    bad = (starts < 0) | (starts > extent - rows)
    if bad.any():
        raise GraphError(
            f"{operator}: operand 'starts': {starts[bad].flat[0]} found, 0 to {extent - rows}"
            f" needed for {rows} of {extent} rows"
        )


def _write_at(attributes: Attributes, x: Array, rows: Array, starts: Array) -> Array:
    axis = attributes["axis"]
    count = rows.shape[axis]
    checked_starts("write_at", starts, count, x.shape[axis])
    y = x.copy()
    for b, start in enumerate(starts):
        np.moveaxis(y[b], axis - 1, 0)[start : start + count] = np.moveaxis(rows[b], axis - 1, 0)
    return y


define(
    name="write_at",
    inputs=("x", "rows", "starts"),
    outputs=("x'",),
    signature=_signature,
    reference=_write_at,
    attributes={"axis": Attribute("axis", 1, minimum=1)},
    updates=((0, 0),),
    cases=(
        Case(("2 5 3", "2 2 3", "int64 2 <4"), {}, ()),
        Case(("2 3 6 4", "2 3 1 4", "int64 2 <6"), {"axis": 2}, ()),
        Case(("2 3 4 6", "2 3 4 2", "int32 2 <5"), {"axis": 3}, ()),
        Case(("int64 3 4", "int64 3 4", "int64 3 <1"), {}, ()),
        Case(("1 1 1", "1 1 1", "int64 1 <1"), {}, ()),
        Case(("0 2 3", "0 1 3", "int64 0 <2"), {}, ()),
        Case(("2 4 3", "2 0 3", "int64 2 <4"), {}, ()),
    ),
    doc="x, with rows from starts[i] on along axis in each sample i; x's next contents\n"
    "x: (b, …); rows: the same, no longer along axis; starts: (b,) int32 or int64, from 0",
)
