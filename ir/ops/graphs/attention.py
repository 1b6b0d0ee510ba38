"""Attention of each vertex to its neighbours, as graph attention networks have it.

A vertex v has for each neighbour u and head the score leaky(target[v] + source[u]). Softmax over
the neighbours makes weights of them, by which the neighbours' rows of x are summed. Kernels pass
over the neighbours of a vertex once for the largest score and once for the rest: nothing that an
edge has its own of, neither message nor score, is ever in memory.

The gradient passes once over the neighbours on the other side, by the transposed matrix. The part
of `target` would need the entries in their first order, and follows without them: the scores of a
vertex change together with `target[v]`, which softmax does not see, except for the slope. So it is
what the positive scores alone contribute, times 1 - slope, and forward keeps their part of the sum.

Dims: v, the rows of the matrix, which may be split; h, heads; d, the columns of a head; e, the
entries. The rows of x that a point task gathers from are whole.
Source: Velickovic et al., Graph attention networks, ICLR 2018; that the gradient makes the weights
again from a saved sum is due to Dao et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float, need_integer
from soapstone.ir.ops.graphs.spmm import DOUBLE, NONE, WIDE, bound, entries, example, renamed
from soapstone.ir.ops.normalization.dropout import random_bits
from soapstone.ir.spec import GradientContext, Tile, define, of_extents
from soapstone.ir.tensor import Array, TensorSpec

_ROWS = {"d0": "v", "d1": "h", "d2": "d"}
_ATTRIBUTES = {
    "slope": Attribute("float", 0.2, minimum=0),
    "rate": Attribute("float", 0.0, minimum=0),
    "seed": Attribute("int", 0, minimum=0),
}


def _bound(
    inputs: tuple[TensorSpec, ...],
    attributes: Attributes,
    terms: Sequence[str],
    made: Sequence[str],
    by: tuple[int, int],
) -> Signature:
    """Return the signature of operands and results in letters, then perhaps step and numbers.

    by: `Whole.by`.
    """
    reals = [place for place, term in enumerate(terms) if "h" in term]
    need_float(inputs, *reals)
    for place in range(len(reals), len(inputs)):
        need_integer(inputs, place)
    rate, stepped = attributes["rate"], len(inputs) > len(terms)
    if rate >= 1:
        raise GraphError(f"attribute rate: {rate} found, less than 1 needed")
    if stepped != (rate > 0):
        raise ShapeError(
            f"{len(inputs)} inputs found with rate {rate}; {len(terms)} needed, and the step where"
            " weights are dropped"
        )
    if stepped and inputs[len(terms)].dtype != "int64":
        found_type = inputs[len(terms)].dtype
        raise ShapeError(f"input {len(terms)} has type {found_type}; int64 needed (the step)")
    found = bound(inputs, (*terms, "", "u")[: len(inputs)], made, by=by, named=rate > 0)
    dims = [replace(d, kind=Kind.WHOLE, monoid=None) if d.name == "d" else d for d in found.dims]
    return replace(found, dims=tuple(dims), dtypes=(inputs[0].dtype,) * len(made))


def _work(extents: Mapping[str, int]) -> float:
    return 4.0 * extents["e"] * extents["h"] * (extents["d"] + 4)


def _drawn(
    attributes: Attributes, sources: Array, targets: Array, x: Array, step: Array | None
) -> Array:
    """Return the factor by which dropout multiplies each entry's weights: (entries, heads).

    The draw is that of the numbers of an entry's ends, and of the head's, whichever way the matrix
    is turned and cut; equal entries have the same.
    """
    heads, rate = x.shape[1], attributes["rate"]
    if step is None:
        return np.ones((len(sources), heads), x.dtype)
    index = (sources.astype(np.int64) << 32) | targets
    seed = attributes["seed"] + attributes.get("head", 0)
    bits = [random_bits(seed + head, int(step), index) for head in range(heads)]
    bits_of_heads = np.reshape(bits, (heads, len(sources))).T
    kept = bits_of_heads >= rate * 2**32
    return np.asarray(np.where(kept, x.dtype.type(1 / (1 - rate)), x.dtype.type(0)))


def _leaky(attributes: Attributes, raw: Array) -> Array:
    return np.where(raw > 0, raw, raw * raw.dtype.type(attributes["slope"]))


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    return {
        **attributes,
        "base": attributes.get("base", 0) + tile.intervals["v"][0],
        "head": attributes.get("head", 0) + tile.intervals["h"][0],
    }


# ------------------------------------------------------------------------------------- forward
_TERMS = ("u h d", "u h", "v h", "v+", "e", "u+", "e")


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return _bound(inputs, attributes, _TERMS, ("v h d", "v h d", "v h", "v h"), (3, 4))


def _attention(
    attributes: Attributes,
    x: Array,
    source: Array,
    target: Array,
    indptr: Array,
    indices: Array,
    indptr_t: Array,
    indices_t: Array,
    step: Array | None = None,
    numbers: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    rows, held = entries("graph_attention", indptr, indices, len(x))
    columns = indices[held]
    raw = target[rows] + source[columns]
    scores = _leaky(attributes, raw)
    most = np.full(target.shape, -np.inf, x.dtype)
    np.maximum.at(most, rows, scores)
    powers = np.exp(scores - most[rows])
    total = np.zeros_like(most)
    np.add.at(total, rows, powers)
    filled = np.diff(indptr)[:, np.newaxis] > 0
    with np.errstate(divide="ignore"):
        scale = np.where(filled, np.log(total) + most, x.dtype.type(0))
    weights = powers / total[rows]
    positive = np.where(raw > 0, weights, x.dtype.type(0))
    sums = [np.zeros((*target.shape, *x.shape[2:]), x.dtype) for _ in range(2)]
    others = columns if numbers is None else numbers[columns]
    drawn = _drawn(attributes, others, rows + attributes.get("base", 0), x, step)
    for to, factor in zip(sums, (weights, positive)):
        np.add.at(to, rows, (factor * drawn)[:, :, np.newaxis] * x[columns])
    share = np.zeros_like(total)
    np.add.at(share, rows, positive)
    return sums[0], sums[1], scale, share


def _gradient(g: GradientContext) -> Sequence[str | None]:
    x, source, target, _, _, indptr_t, indices_t, *step = g.inputs
    if step[1:]:
        raise GraphError("graph_attention: a gradient found of rows with numbers; none needed")
    y, positive, scale, share = g.outputs
    dy = g.only_grad()

    def dot(a: str, b: str) -> str:
        product = g.emit("mul", a, b, rename=_ROWS)
        return g.emit("reduce_sum", product, axes=(2,), rename=_ROWS)

    dots = dot(dy, y)
    operands = (dy, x, source, target, scale, dots, indptr_t, indices_t, *step)
    made = g.emit.all("graph_attention_grad", *operands, rename=renamed(g), **g.attributes)
    whole = g.emit("mul", dots, share, rename=_ROWS)
    rest = g.emit("sub", dot(dy, positive), whole, rename=_ROWS)
    dtarget = g.emit("affine", rest, scale=1 - g.attributes["slope"], rename=_ROWS)
    return [*made, dtarget, *(None for _ in g.inputs[3:])]


# ------------------------------------------------------------------------------------- gradient
# Rows are now the sources of entries, and u the targets.
_GRAD_TERMS = ("u h d", "v h d", "v h", "u h", "u h", "u h", "v+", "e")


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return _bound(inputs, attributes, _GRAD_TERMS, ("v h d", "v h"), (6, 7))


def _attention_grad(
    attributes: Attributes,
    dy: Array,
    x: Array,
    source: Array,
    target: Array,
    scale: Array,
    dots: Array,
    indptr_t: Array,
    indices_t: Array,
    step: Array | None = None,
    numbers: Array | None = None,
) -> tuple[Array, Array]:
    rows, held = entries("graph_attention_grad", indptr_t, indices_t, len(dy))
    ends = indices_t[held]
    raw = source[rows] + target[ends]
    weights = np.exp(_leaky(attributes, raw) - scale[ends])
    others = ends if numbers is None else numbers[ends]
    kept = weights * _drawn(attributes, rows + attributes.get("base", 0), others, x, step)
    dx, dsource = np.zeros_like(x), np.zeros_like(source)
    np.add.at(dx, rows, kept[:, :, np.newaxis] * dy[ends])
    inner = np.einsum("ehd,ehd->eh", dy[ends], x[rows])
    steep = np.where(raw > 0, x.dtype.type(1), x.dtype.type(attributes["slope"]))
    np.add.at(dsource, rows, (kept * inner - weights * dots[ends]) * steep)
    return dx, dsource


# -------------------------------------------------------------------------------- declarations
_ALL = ("p", "i", "pt", "it")
_DROPPED: Mapping[str, Any] = {"rate": 0.4, "seed": 2**63 + 5}
define(
    name="graph_attention",
    inputs=(
        "x",
        "source",
        "target",
        "indptr",
        "indices",
        "indptr_t",
        "indices_t",
        "step?",
        "numbers?",
    ),
    outputs=("y", "positive", "scale", "share"),
    signature=_signature,
    reference=_attention,
    attributes=_ATTRIBUTES,
    gradient=_gradient,
    localize=_localize,
    operations=of_extents(_work),
    cases=(
        example(("5 2 3", "5 2", "4 2", *_ALL), WIDE),
        example(("5 2 3", "5 2", "4 2", *_ALL, "int64 <100"), WIDE, **_DROPPED),
        example(("3 1 20", "3 1", "3 1", *_ALL), DOUBLE, slope=0.0),
        example(("3 18 2", "3 18", "3 18", *_ALL, "int64 <100"), DOUBLE, rate=0.2),
        example(("1 2 4", "1 2", "2 2", *_ALL), NONE),
    ),
    layer=None,
    doc="the sum over the neighbours of each vertex of their rows of x, weighted by softmax\n"
    "x: (u, h, d); source: (u, h), target: (v, h), the parts of scores; indptr: (v + 1),\n"
    "indices: (e), the matrix (v, u) in CSR; indptr_t: (u + 1), indices_t: (e), its\n"
    "transpose; step: (), where weights are dropped at a rate; numbers: (u), of the rows of\n"
    "x, by which draws go, by default their places; results: the sum (v, h, d), 0\n"
    "where a row has no entry; the part of it that positive scores have, (v, h, d); the\n"
    "logarithm of the sum of exponentials, (v, h); the weight of positive scores, (v, h)",
)
define(
    name="graph_attention_grad",
    inputs=(
        *("dy", "x", "source", "target", "scale", "dots", "indptr_t", "indices_t"),
        "step?",
        "numbers?",
    ),
    outputs=("dx", "dsource"),
    signature=_grad_signature,
    reference=_attention_grad,
    attributes=_ATTRIBUTES,
    localize=_localize,
    operations=of_extents(_work),
    cases=(
        example(("4 2 3", "5 2 3", "5 2", *["4 2"] * 3, "pt", "it"), WIDE, ()),
        example(
            ("4 2 3", "5 2 3", "5 2", *["4 2"] * 3, "pt", "it", "int64 <100"),
            WIDE,
            (),
            **_DROPPED,
        ),
        example(
            ("4 2 3", "5 2 3", "5 2", *["4 2"] * 3, "pt", "it", "int64 <100", "int32 4 <90"),
            WIDE,
            (),
            **_DROPPED,
        ),
        example(("3 1 20", "3 1 20", *["3 1"] * 4, "pt", "it"), DOUBLE, (), slope=0.0),
        example(("3 18 2", "3 18 2", *["3 18"] * 4, "pt", "it"), DOUBLE, ()),
        example(("2 2 4", "1 2 4", "1 2", *["2 2"] * 3, "pt", "it"), NONE, ()),
    ),
    doc="the gradients of x and of source, from dy and its products with y, `dots`",
)
