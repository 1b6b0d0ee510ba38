"""How signatures write operands: by the names of their axes, by letters, or all of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from soapstone.ir.dims import Affine, Axis, DimTable, Kind, Operand, Signature, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.tensor import TensorSpec

MakeAxis = Callable[[DimTable, str, int, str], Axis]


def named(table: DimTable, names: Iterable[str], shape: Iterable[int], where: str) -> Operand:
    """Return the operand whose axes are the named dims, recording their extents."""
    return Operand(tuple(along(table, name, e, where) for name, e in zip(names, shape)))


def numbered(table: DimTable, shape: Sequence[int], where: str) -> Operand:
    """Return the operand whose axes are the dims d0, d1, …, recording their extents."""
    return named(table, (f"d{axis}" for axis in range(len(shape))), shape, where)


def aligned(
    inputs: Sequence[TensorSpec], scalars: Sequence[int] = ()
) -> tuple[DimTable, list[Operand]]:
    """Return the operands of inputs that all have one shape, dims d0, d1, …, but for the scalars.

    Raises:
        ShapeError: a shape differs, or a scalar has axes; names the dim.
    """
    table = DimTable()
    first = next(position for position in range(len(inputs)) if position not in scalars)
    rank = inputs[first].rank
    operands = []
    for position, spec in enumerate(inputs):
        if position in scalars:
            need_rank(inputs, position, "")
        elif spec.rank != rank:
            raise ShapeError(
                f"input {position} has rank {spec.rank} (shape {spec.shape});"
                f" {rank} needed (shape {inputs[first].shape} of input {first})"
            )
        operands.append(numbered(table, spec.shape, f"input {position}"))
    return table, operands


def lettered(
    inputs: Sequence[TensorSpec],
    names: Mapping[str, Sequence[str]],
    pattern: str,
    outputs: str,
    kinds: Mapping[str, Kind],
    axis: MakeAxis = along,
) -> Signature:
    """Return the signature of floating-point operands, each a letter of `pattern` or `outputs`.

    names: the dims of each letter. axis: makes an input's axis; an output's is as in the inputs.

    Raises:
        ShapeError: an input has another type or rank, or extents of a dim differ.
    """
    need_float(inputs, *range(len(inputs)))
    table = DimTable()
    axes: dict[str, Axis] = {}
    operands = []
    for position, (spec, letter) in enumerate(zip(inputs, pattern)):
        need_rank(inputs, position, " ".join(names[letter]))
        made = [
            axis(table, name, extent, f"input {position}")
            for name, extent in zip(names[letter], spec.shape)
        ]
        axes |= dict(zip(names[letter], made))
        operands.append(Operand(tuple(made)))
    results = [
        Operand(
            tuple(axes[name] if name in axes else Affine(name, table.extent(name)) for name in dims)
        )
        for dims in (names[letter] for letter in outputs)
    ]
    return finish(table, operands, results, [inputs[0].dtype] * len(results), kinds)


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
