"""Local response normalisation across channels (Krizhevsky et al. 2012) and its gradient.

Dims: n; c, through which the input has a halo of the neighbouring channels; positions d h w.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Operand, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.ops.windows.window import spatial_dims
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

_ATTRIBUTES = {
    "size": Attribute("int", minimum=1),
    "alpha": Attribute("float", 1e-4),
    "beta": Attribute("float", 0.75),
    "bias": Attribute("float", 1.0),
}


def reach(attributes: Attributes) -> tuple[int, int]:
    """Return how many channels before and after one its sum takes in."""
    size = int(attributes["size"])
    return (size - 1) // 2, size // 2


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes, gradient: bool) -> Signature:
    need_float(inputs, *range(len(inputs)))
    rank = inputs[0].rank
    if not 3 <= rank <= 5:
        raise ShapeError(
            f"input 0 has rank {rank} (shape {inputs[0].shape}); 3 to 5 needed (n c …)"
        )
    low, high = reach(attributes)
    # A gradient needs dy of every sum that a channel is in, and x of all that these take in.
    reaches = [(high, low), (low + high, low + high)] if gradient else [(low, high)]
    table = DimTable()
    names = ("n", "c", *spatial_dims(rank - 2))
    operands = []
    for position, (spec, (before, after)) in enumerate(zip(inputs, reaches)):
        if spec.rank != rank:
            raise ShapeError(
                f"input {position} has rank {spec.rank} (shape {spec.shape}); {rank} needed"
            )
        where = f"input {position}"
        axes = [along(table, d, e, where) for d, e in zip(names, spec.shape)]
        axes[1] = Affine("c", spec.shape[1], 1, -before, before + after + 1)
        operands.append(Operand(tuple(axes)))
    made = Operand(tuple(Affine(name, table.extent(name)) for name in names))
    return finish(table, operands, [made], [inputs[0].dtype])


def _sums(values: Array, before: int, after: int) -> Array:
    """Return the sums over each channel and its neighbours."""
    pad = [(0, 0)] * values.ndim
    pad[1] = (before, after)
    padded = np.pad(values, pad)
    if values.size == 0:
        return values.copy()
    windows = np.lib.stride_tricks.sliding_window_view(padded, before + after + 1, 1)
    return np.asarray(windows.sum(axis=-1))


def _scale(attributes: Attributes, x: Array) -> Array:
    """Return what x is divided by, before the exponent."""
    share = x.dtype.type(attributes["alpha"] / attributes["size"])
    sums = _sums(x * x, *reach(attributes))
    return np.asarray(x.dtype.type(attributes["bias"]) + share * sums)


def _window(attributes: Attributes, x: Array) -> slice:
    """Return the channels of x that a tile makes: all of them outside a split."""
    first, count = attributes.get("channels", (0, x.shape[1]))
    return slice(first, first + count)


def _lrn(attributes: Attributes, x: Array) -> Array:
    y = x * _scale(attributes, x) ** x.dtype.type(-attributes["beta"])
    return np.asarray(y[:, _window(attributes, x)])


def _lrn_grad(attributes: Attributes, dy: Array, x: Array) -> Array:
    beta, kind = attributes["beta"], x.dtype.type
    low, high = reach(attributes)
    scale = _scale(attributes, x)
    power = scale ** kind(-beta)
    wide = np.zeros_like(x)  # dy where it is known, in the channels of x
    first = attributes.get("offset", 0)
    wide[:, first : first + dy.shape[1]] = dy
    inner = _sums(wide * x * power / scale, high, low)
    factor = kind(2 * attributes["alpha"] * beta / attributes["size"])
    return np.asarray((wide * power - factor * x * inner)[:, _window(attributes, x)])


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    """Return the attributes of a tile: where its channels are in the box of x with its halo."""
    lo, hi = tile.intervals["c"]
    x = tile.inputs[-1]
    start = int(x[0][1])
    local = {**attributes, "channels": (max(0, lo - start), hi - lo)}
    if len(tile.inputs) > 1:
        local["offset"] = max(0, int(tile.inputs[0][0][1]) - start)
    return local


def _gradient(g: GradientContext) -> Sequence[str | None]:
    return [g.emit("lrn_grad", g.grad(), g.inputs[0], **g.attributes)]


_CASES = (
    ("2 7 3 2", {"size": 5, "alpha": 0.5, "bias": 2.0}),
    ("1 4 3", {"size": 4, "alpha": 1.0, "beta": 0.5}),
    ("2 3 2 2 2", {"size": 3, "alpha": 0.3}),
    ("1 2 1 1", {"size": 7, "alpha": 0.8}),
    ("1 1 2 2", {"size": 1, "alpha": 0.8}),
    ("0 3 2 2", {"size": 3}),
)

define(
    name="lrn",
    inputs=("x",),
    signature=lambda inputs, a: _signature(inputs, a, False),
    reference=_lrn,
    attributes=_ATTRIBUTES,
    gradient=_gradient,
    localize=_localize,
    flops_per_point=10,
    onnx="LRN",
    layer={"size": 5},
    cases=tuple(Case((shape,), attributes) for shape, attributes in _CASES),
    doc="x / (bias + alpha / size * the sum of squares over size channels around)^beta\n"
    "x: (n, c, …), which is also the result's shape",
)
define(
    name="lrn_grad",
    inputs=("dy", "x"),
    outputs=("dx",),
    signature=lambda inputs, a: _signature(inputs, a, True),
    reference=_lrn_grad,
    attributes=_ATTRIBUTES,
    localize=_localize,
    flops_per_point=20,
    cases=tuple(Case((shape, shape), attributes, ()) for shape, attributes in _CASES),
)
