"""Sums, means and maxima over the neighbours of each vertex: products with a sparse matrix in CSR.

Row i of the matrix has the entries from indptr[i] to before indptr[i + 1]; entry j is of column
indices[j], which is a row of x. A gradient goes the other way along each entry, so the operators
take the transposed matrix too: nothing is sorted in a step. Kernels make no message of an entry.

Dims: v, the rows of the matrix, which may be split, at unequal cuts too; d, the columns of x; e,
the matrix's entries. The entries, and the rows of x that a point task gathers from, are whole.
Source: Jia, Automated Discovery of Machine Learning Optimizations, 2020, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float, need_integer, need_rank
from soapstone.ir.ops.signatures import DimTable, finish
from soapstone.ir.spec import Case, GradientContext, Tile, define, of_extents
from soapstone.ir.tensor import Array, TensorSpec

# What each operand's axes are: letters of dims; `v+` and `u+` have one more, for the last offset,
# and of `u-`, offsets too, the differences are gathered.
_GRAPH = ("v+", "e", "u+", "e")


def bound(
    inputs: Sequence[TensorSpec],
    terms: Sequence[str],
    outputs: Sequence[str],
    by: tuple[int, ...] = (),
    named: bool = False,
) -> Signature:
    """Return the signature of operands and results in the letters v, u, d and e.

    by, named: those of `Whole`.
    """
    sizes, table = DimTable(), DimTable()

    def axis(letter: str, extent: int, where: str) -> Axis:
        if letter[1:]:
            if not extent:
                raise ShapeError(f"dim {letter[0]}: no offset found in {where}, 1 or more needed")
            sizes.add(letter[0], extent - 1, where)
            if letter == "v+":
                return Affine(table.add("v", extent - 1, where), extent, window=2)
            offsets = letter == "u-"
            return Whole(extent, gathered=True, by=by if offsets else (), offsets=offsets)
        sizes.add(letter, extent, where)
        if letter == "u":
            of = "v" if "v+" in terms else ""
            return Whole(extent, gathered=True, of=of, by=by, named=named)
        kind = Kind.WHOLE if letter == "e" else Kind.FREE
        return Affine(table.add(letter, extent, where, kind), extent)

    operands = []
    for position, (term, spec) in enumerate(zip(terms, inputs)):
        need_rank(inputs, position, term)
        where, letters = f"input {position}", term.split()
        axes = [axis(letter, extent, where) for letter, extent in zip(letters, spec.shape)]
        operands.append(Operand(tuple(axes)))
    made = [
        Operand(tuple(Affine(letter, table.extent(letter)) for letter in term.split()))
        for term in outputs
    ]
    real = next(spec.dtype for spec in inputs if spec.is_float)
    index = next(spec.dtype for spec in reversed(inputs) if not spec.is_float)
    return finish(table, operands, made, [real, index][: len(made)])


def _work(extents: Mapping[str, int]) -> float:
    return 2.0 * extents["e"] * extents["d"]


def entries(operator: str, indptr: Array, indices: Array, columns: int) -> tuple[Array, slice]:
    """Return the row of each entry of a tile of rows, counted from the first, and which they are.

    Raises:
        GraphError: offsets that fall or lie outside, or an index that is no column.
    """
    counts = np.diff(indptr)
    if indptr.size and (counts.min(initial=0) < 0 or indptr[0] < 0 or indptr[-1] > len(indices)):
        fall = np.flatnonzero(counts < 0)
        at = int(fall[0]) if fall.size else int(indptr[0] >= 0) * (len(indptr) - 1)
        found = f"{int(indptr[at])}, then {int(indptr[at + 1])}" if fall.size else int(indptr[at])
        raise GraphError(
            f"{operator}: indptr {found} found at row {at}, offsets from 0 to {len(indices)} that"
            " do not fall needed"
        )
    held = slice(int(indptr[0]), int(indptr[-1])) if indptr.size else slice(0, 0)
    bad = indices[held][(indices[held] < 0) | (indices[held] >= columns)]
    if bad.size:
        raise GraphError(f"{operator}: index {int(bad[0])} found, 0 to {columns - 1} needed")
    return np.repeat(np.arange(counts.size), counts), held


def renamed(g: GradientContext) -> dict[str, str]:
    """Return how a gradient's rows, which are columns of the matrix, follow the operator's rows."""
    square = g.spec(g.inputs[0]).shape[0] == g.spec(g.outputs[0]).shape[0]
    return {} if square else {"v": ""}


# -------------------------------------------------------------------------------- sums and means
def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    if len(inputs) == 6:
        raise ShapeError("6 inputs found; 5 needed, or 7 where the matrix has weights")
    need_float(inputs, 0, *range(5, len(inputs)))
    for position in range(1, 5):
        need_integer(inputs, position)
    if len(inputs) == 7 and attributes["reduction"] == "mean":
        raise ShapeError("7 inputs found; 5 needed for a mean: its shape has no place for weights")
    return bound(inputs, ("u d", *_GRAPH, "e", "e")[: len(inputs)], ["v d"], by=(1, 2))


def _spmm(
    attributes: Attributes,
    x: Array,
    indptr: Array,
    indices: Array,
    indptr_t: Array,
    indices_t: Array,
    weights: Array | None = None,
    weights_t: Array | None = None,
) -> Array:
    rows, held = entries("spmm", indptr, indices, len(x))
    terms = x[indices[held]]
    if weights is not None:
        terms = terms * weights[held, np.newaxis]
    counts = np.diff(indptr)
    y = np.zeros((counts.size, x.shape[1]), x.dtype)
    np.add.at(y, rows, terms)
    if attributes["reduction"] == "mean":
        y /= np.maximum(counts, 1)[:, np.newaxis].astype(x.dtype)
    return y


def _gradient(g: GradientContext) -> Sequence[str | None]:
    x, indptr, indices, indptr_t, indices_t, *weights = g.inputs
    rename = renamed(g)
    if g.attributes["reduction"] == "mean":
        operands = (g.grad(), indptr, indptr_t, indices_t)
        return [g.emit("spmm_mean_grad", *operands, rename=rename), None, None, None, None]
    back = (g.grad(), indptr_t, indices_t, indptr, indices, *reversed(weights))
    dx = g.emit("spmm", *back, rename=rename)
    if not weights:
        return [dx, None, None, None, None]
    dweights = g.emit("sddmm", g.grad(), x, indptr, indices)
    return [dx, None, None, None, None, dweights, None]


def _mean_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    for position in range(1, 4):
        need_integer(inputs, position)
    return bound(inputs, ("u d", "u-", "v+", "e"), ["v d"], by=(2, 3))


def _mean_grad(
    attributes: Attributes, dy: Array, indptr: Array, indptr_t: Array, indices_t: Array
) -> Array:
    shares = dy / np.maximum(np.diff(indptr), 1)[:, np.newaxis].astype(dy.dtype)
    rows, held = entries("spmm_mean_grad", indptr_t, indices_t, len(dy))
    dx = np.zeros((max(len(indptr_t) - 1, 0), dy.shape[1]), dy.dtype)
    np.add.at(dx, rows, shares[indices_t[held]])
    return dx


def _sddmm_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0, 1)
    need_integer(inputs, 2)
    need_integer(inputs, 3)
    plain = bound(inputs, ("n d", "u d", "n+", "e"), ["e"])
    table = DimTable()
    table.add("e", plain.by_name["e"].extent, "input 3", Kind.WHOLE)
    table.add("d", plain.by_name["d"].extent, "input 0")
    whole = [Operand((Whole(spec.shape[0]), *o.axes[1:])) for spec, o in zip(inputs, plain.inputs)]
    return finish(table, [*whole[:3], plain.inputs[3]], plain.outputs, plain.dtypes)


def _sddmm(attributes: Attributes, a: Array, b: Array, indptr: Array, indices: Array) -> Array:
    rows, held = entries("sddmm", indptr, indices, len(b))
    y = np.zeros(len(indices), a.dtype)
    y[held] = np.einsum("ed,ed->e", a[rows], b[indices[held]])
    return y


# ------------------------------------------------------------------------------------- maxima
def _max_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    for position in range(1, len(inputs)):
        need_integer(inputs, position)
    terms = ("u d", *_GRAPH, "u")[: len(inputs)]
    return bound(inputs, terms, ["v d", "v d"], by=(1, 2), named=True)


def _spmm_max(
    attributes: Attributes,
    x: Array,
    indptr: Array,
    indices: Array,
    indptr_t: Array,
    indices_t: Array,
    numbers: Array | None = None,
) -> tuple[Array, Array]:
    entries("spmm_max", indptr, indices, len(x))
    numbers = np.arange(len(x)) if numbers is None else numbers
    y = np.zeros((max(len(indptr) - 1, 0), x.shape[1]), x.dtype)
    chosen = np.full(y.shape, -1, indices_t.dtype)
    for row in range(len(y)):
        held = indices[indptr[row] : indptr[row + 1]]
        if held.size:
            y[row] = x[held].max(axis=0)
            chosen[row] = numbers[held[x[held].argmax(axis=0)]]
    return y, chosen


def _max_gradient(g: GradientContext) -> Sequence[str | None]:
    if g.inputs[5:]:
        raise GraphError("spmm_max: a gradient found of rows with numbers; rows by place needed")
    operands = (g.only_grad(), g.outputs[1], *g.inputs[3:])
    return [g.emit("spmm_max_grad", *operands, rename=renamed(g)), None, None, None, None]


def _max_grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    for position in range(1, 4):
        need_integer(inputs, position)
    return bound(inputs, ("u d", "u d", "v+", "e"), ["v d"], by=(2, 3))


def _spmm_max_grad(
    attributes: Attributes, dy: Array, chosen: Array, indptr_t: Array, indices_t: Array
) -> Array:
    rows, held = entries("spmm_max_grad", indptr_t, indices_t, len(dy))
    targets = indices_t[held]
    same = (rows[1:] == rows[:-1]) & (targets[1:] == targets[:-1])
    first = np.concatenate([np.ones(min(rows.size, 1), bool), ~same])  # of equal entries
    rows, targets = rows[first], targets[first]
    hit = chosen[targets] == (rows + attributes["base"])[:, np.newaxis]
    dx = np.zeros((max(len(indptr_t) - 1, 0), dy.shape[1]), dy.dtype)
    np.add.at(dx, rows, np.where(hit, dy[targets], 0))
    return dx


def _localize_rows(attributes: Attributes, tile: Tile) -> Attributes:
    return {"base": attributes["base"] + tile.intervals["v"][0]}


# -------------------------------------------------------------------------------- declarations
# (offsets, indices) of a matrix of 4 by 5 with an empty row and an empty column, and transposed;
# of one of 3 by 3 with equal entries; of one of 2 by 1 without any.
WIDE = ((0, 2, 2, 5, 6), (4, 0, 1, 0, 4, 3)), ((0, 2, 3, 3, 4, 6), (0, 2, 2, 3, 0, 2))
DOUBLE = ((0, 2, 5, 6), (1, 1, 0, 2, 0, 1)), ((0, 2, 5, 6), (1, 1, 0, 0, 2, 1))
NONE = ((0, 0, 0), ()), ((0, 0), ())


def example(
    operands: tuple[str, ...],
    graph: Sequence[tuple[Sequence[int], Sequence[int]]],
    differentiable: tuple[int, ...] | None = None,
    index: str = "int32",
    **attributes: object,
) -> Case:
    """Return a case; `p`, `i`, `pt` and `it` stand for a matrix, `w` and `wt` for weights."""
    (p, i), (pt, it) = graph
    given = {"p": p, "i": i, "pt": pt, "it": it}
    types = {"p": "int64", "i": index, "pt": "int64", "it": index}
    texts = tuple(f"{types[o]} {len(given[o])}" if o in types else o for o in operands)
    given |= {"w 6": (1, 2, 3, 4, 5, 6), "wt 6": (2, 4, 3, 6, 1, 5)}  # those of WIDE
    texts = tuple(text.removeprefix("w ").removeprefix("wt ") for text in texts)
    contents = {k: tuple(given[o]) for k, o in enumerate(operands) if o in given}
    return Case(texts, attributes, differentiable, contents=contents)


_ALL = ("p", "i", "pt", "it")
define(
    name="spmm",
    inputs=("x", "indptr", "indices", "indptr_t", "indices_t", "weights?", "weights_t?"),
    signature=_signature,
    reference=_spmm,
    attributes={"reduction": Attribute("str", "sum", choices=("sum", "mean"))},
    gradient=_gradient,
    operations=of_extents(_work),
    cases=(
        example(("5 3", *_ALL), WIDE),
        example(("5 3", *_ALL, "w 6", "wt 6"), WIDE, (0, 5)),
        example(("5 3", *_ALL), WIDE, reduction="mean"),
        example(("3 70", *_ALL), DOUBLE, (0,), "int64"),
        example(("3 149", *_ALL, "6", "6"), DOUBLE, ()),
        example(("1 2", *_ALL), NONE, reduction="mean"),
        example(("3 0", *_ALL), DOUBLE),
    ),
    doc="the sum or mean, over the entries of each row of a sparse matrix, of the rows of x\n"
    "x: (u, d); indptr: (v + 1), indices: (e), the matrix (v, u) in CSR; indptr_t: (u + 1),\n"
    "indices_t: (e), its transpose; weights, weights_t: (e), the entries of both, 1 without\n"
    "them, for sums alone; result: (v, d), 0 where a row has no entry. The gradient of the\n"
    "entries is that of weights, and needs weights_t to be of the same numbers",
)
define(
    name="spmm_mean_grad",
    inputs=("dy", "indptr", "indptr_t", "indices_t"),
    outputs=("dx",),
    signature=_mean_signature,
    reference=_mean_grad,
    operations=of_extents(_work),
    cases=(
        example(("4 3", "p", "pt", "it"), WIDE, ()),
        example(("3 70", "p", "pt", "it"), DOUBLE, ()),
        example(("2 1", "p", "pt", "it"), NONE, ()),
    ),
    doc="the rows of dy over their entries' number, summed over the entries of each column",
)
define(
    name="sddmm",
    inputs=("a", "b", "indptr", "indices"),
    signature=_sddmm_signature,
    reference=_sddmm,
    operations=of_extents(_work),
    cases=(
        example(("4 3", "5 3", "p", "i"), WIDE, ()),
        example(("3 70", "3 70", "p", "i"), DOUBLE, ()),
        example(("2 2", "1 2", "p", "i"), NONE, ()),
    ),
    doc="at each entry of a sparse matrix, the product of its row of a and its column's of b",
)
define(
    name="spmm_max",
    inputs=("x", "indptr", "indices", "indptr_t", "indices_t", "numbers?"),
    outputs=("y", "chosen"),
    signature=_max_signature,
    reference=_spmm_max,
    gradient=_max_gradient,
    operations=of_extents(_work),
    cases=(
        example(("5 3", *_ALL), WIDE),
        example(("3 70", *_ALL), DOUBLE),
        example(("1 2", *_ALL), NONE),
    ),
    doc="the maxima, over the entries of each row of a sparse matrix, of the rows of x, and"
    " which rows they are\n"
    "x, indptr, indices, indptr_t, indices_t: as of spmm; equal entries lie together in the\n"
    "transpose; numbers: (u), of the rows of x, their places by default; results: the maxima,\n"
    "(v, d), 0 where a row has no entry; the numbers of the first rows of x that have them,\n"
    "or -1",
)
define(
    name="spmm_max_grad",
    inputs=("dy", "chosen", "indptr_t", "indices_t"),
    outputs=("dx",),
    signature=_max_grad_signature,
    reference=_spmm_max_grad,
    attributes={"base": Attribute("int", 0, minimum=0)},
    localize=_localize_rows,
    operations=of_extents(_work),
    cases=(
        example(("4 3", "int32 4 3 >=-1 <5", "pt", "it"), WIDE, ()),
        example(("3 20", "int32 3 20 >=-1 <3", "pt", "it"), DOUBLE, ()),
        example(("2 1", "int32 2 1 >=-1 <1", "pt", "it"), NONE, ()),
    ),
    doc="dy, added to the row of x that was chosen",
)
