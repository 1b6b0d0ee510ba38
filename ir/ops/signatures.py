"""How operators write signatures: as einsum does, or operand by operand over a table of dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from soapstone.ir.dims import Affine, Axis, Dim, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.tensor import TensorSpec


class DimTable:
    """Collects dims while a signature is built, and checks that extents agree."""

    def __init__(self) -> None:
        self._dims: dict[str, tuple[int, str, Kind]] = {}  # extent, where it was first, how split

    def add(self, name: str, extent: int, where: str, kind: Kind = Kind.FREE) -> str:
        """Record a dim's extent, where it was seen and what kind it is, and return its name.

        Raises:
            ShapeError: it has another extent elsewhere; names both places.
        """
        known, first, before = self._dims.get(name, (extent, where, kind))
        if known != extent:
            raise ShapeError(f"dim {name} is {known} in {first} but {extent} in {where}")
        self._dims[name] = known, first, before if kind is Kind.FREE else kind
        return name

    def extent(self, name: str) -> int:
        """Return the extent of a dim that was recorded."""
        return self._dims[name][0]

    def __contains__(self, name: str) -> bool:
        return name in self._dims

    def dims(self) -> Iterator[tuple[str, int, Kind]]:
        """Yield name, extent and kind of the dims in the order in which they were recorded."""
        return ((name, extent, kind) for name, (extent, _, kind) in self._dims.items())


def along(table: DimTable, name: str, extent: int, where: str) -> Affine:
    """Return the plain axis of a dim, recording its extent."""
    return Affine(table.add(name, extent, where), extent)


MakeAxis = Callable[[DimTable, str, int, str], Axis]


def einsum(
    text: str,
    inputs: Sequence[TensorSpec],
    *,
    dtypes: Sequence[str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    monoid: str = "sum",
) -> Signature:
    """Return the signature written as `m k, k n -> m n`.

    Operands are separated by commas, axes by spaces; `...` stands for leading dims `b0 b1 …`, which
    broadcast as in NumPy; `1` is an axis of extent one. A dim that is missing from an output is
    reduced by `monoid`, unless `kinds` says otherwise.

    Raises:
        ShapeError: the rank of an input, or two extents of a dim, do not agree.
    """
    left, right = (side.strip() for side in text.split("->"))
    in_terms = [term.split() for term in left.split(",")] if left else []
    out_terms = [term.split() for term in right.split(",")]
    if len(in_terms) != len(inputs):
        raise ShapeError(f"{len(inputs)} inputs found, {len(in_terms)} needed ({text})")
    leading = []  # how many axes of each input `...` stands for
    for position, (terms, spec) in enumerate(zip(in_terms, inputs)):
        named = len(terms) - ("..." in terms)
        if spec.rank < named or ("..." not in terms and spec.rank != named):
            raise ShapeError(
                f"input {position} has rank {spec.rank} (shape {spec.shape});"
                f" {' '.join(terms)} needs {named}{' or more' if '...' in terms else ''}"
            )
        leading.append(spec.rank - named)
    batch = [f"b{i}" for i in range(max(leading, default=0))]

    def names_of(terms: Sequence[str], count: int) -> list[str]:
        last = batch[len(batch) - count :]
        return [name for term in terms for name in (last if term == "..." else (term,))]

    rows = [names_of(terms, count) for terms, count in zip(in_terms, leading)]
    largest = dict.fromkeys(batch, 1)
    for names, spec in zip(rows, inputs):
        found = zip(names, spec.shape)
        largest |= {name: extent for name, extent in found if largest.get(name) == 1}
    table, operands = DimTable(), list[Operand]()
    for position, (names, spec) in enumerate(zip(rows, inputs)):
        where, axes = f"input {position}", list[Axis]()
        for name, extent in zip(names, spec.shape):
            if name == "1" and extent != 1:
                raise ShapeError(f"axis {len(axes)} of {where} is {extent}; 1 needed ({text})")
            most = largest.get(name, extent)
            if extent not in (1, most):
                raise ShapeError(f"dim {name} is {most} but {extent} in {where}")
            plain = name != "1" and extent == most
            axes.append(along(table, name, extent, where) if plain else Whole(1))
        operands.append(Operand(tuple(axes)))
    outputs = [
        Operand(
            tuple(
                Whole(1) if name == "1" else Affine(name, table.extent(name))
                for name in names_of(terms, len(batch))
                if name != "()"
            )
        )
        for terms in out_terms
    ]
    return finish(table, operands, outputs, dtypes, kinds, monoid)


def finish(
    table: DimTable,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    dtypes: Sequence[str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
    monoid: str = "sum",
) -> Signature:
    """Return the signature of collected operands, marking dims absent from an output as reduced."""
    dims = []
    types = tuple(dtypes) if dtypes is not None else ("float32",) * len(outputs)
    indexing = [(one.dims, dtype) for one, dtype in zip(outputs, types)]
    for name, extent, kind in table.dims():
        kind = (kinds or {}).get(name, kind)
        lack = {dtype for dims_of, dtype in indexing if name not in dims_of}
        if kind is Kind.FREE and lack:  # there is no sum of booleans
            kind = Kind.WHOLE if "bool" in lack and monoid == "sum" else Kind.REDUCED
        dims.append(Dim(name, extent, kind, monoid if lack else None))
    return Signature(tuple(dims), tuple(inputs), tuple(outputs), types)


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
