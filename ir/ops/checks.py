"""What signatures ask of their inputs and attributes before they name dims."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ir.attributes import Attributes
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.tensor import TensorSpec


def need_rank(inputs: Sequence[TensorSpec], position: int, axes: str) -> None:
    """Check that an input has the named axes, written as `n c h w`.

    Raises:
        ShapeError: it has another rank.
    """
    spec, rank = inputs[position], len(axes.split())
    if spec.rank != rank:
        raise ShapeError(
            f"input {position} has rank {spec.rank} (shape {spec.shape});"
            f" {rank} needed ({axes or 'a scalar'})"
        )


def need_count(inputs: Sequence[TensorSpec], count: int) -> None:
    """Check the number of inputs, where attributes decide it.

    Raises:
        ShapeError: there are fewer or more.
    """
    if len(inputs) != count:
        raise ShapeError(f"{len(inputs)} inputs found, {count} needed")


def need_float(inputs: Sequence[TensorSpec], *positions: int) -> None:
    """Check that inputs are floating-point.

    Raises:
        ShapeError: one is not.
    """
    for position in positions:
        if not inputs[position].is_float:
            raise ShapeError(
                f"input {position} has type {inputs[position].dtype}; float32 or float64 needed"
            )


def need_one_type(inputs: Sequence[TensorSpec], activation: str | None = None) -> None:
    """Check that all inputs have one type, floating-point where an activation follows.

    Raises:
        ShapeError: they have not.
    """
    for position, spec in enumerate(inputs):
        if spec.dtype != inputs[0].dtype:
            raise ShapeError(
                f"input {position} has type {spec.dtype}; {inputs[0].dtype} of input 0 needed"
            )
    if activation is not None:
        need_float(inputs, 0)


def need_integer(inputs: Sequence[TensorSpec], position: int) -> None:
    """Check that an input holds indices or counts.

    Raises:
        ShapeError: it is neither int32 nor int64.
    """
    if inputs[position].dtype not in ("int32", "int64"):
        raise ShapeError(
            f"input {position} has type {inputs[position].dtype}; int32 or int64 needed"
        )


def need_lengths(attributes: Attributes, **lengths: int) -> None:
    """Check how many numbers attributes hold.

    Raises:
        GraphError: one holds fewer or more; names it.
    """
    for name, length in lengths.items():
        if len(attributes[name]) != length:
            raise GraphError(
                f"attribute {name}: {len(attributes[name])} numbers found, {length} needed"
            )


def need_numbers(spec: TensorSpec, name: str, values: Sequence[int]) -> None:
    """Check that an attribute has one number for each axis of input 0.

    Raises:
        ShapeError: it has fewer or more.
    """
    if len(values) != spec.rank:
        raise ShapeError(
            f"input 0 has rank {spec.rank} (shape {spec.shape});"
            f" attribute {name} has {len(values)} numbers, {spec.rank} needed"
        )


def need_axis(spec: TensorSpec, axis: int) -> None:
    """Check that input 0 has an axis.

    Raises:
        ShapeError: its rank is too small.
    """
    if axis >= spec.rank:
        raise ShapeError(f"dim d{axis} does not exist; input 0 has rank {spec.rank}")


def front_axis(spec: TensorSpec, axis: int) -> int:
    """Return the number of an axis of input 0, which may count from the end.

    Raises:
        ShapeError: there is none such.
    """
    if not -spec.rank <= axis < spec.rank:
        raise ShapeError(f"input 0 has rank {spec.rank} (shape {spec.shape}); no axis {axis}")
    return axis % spec.rank
