"""Group and instance normalisation: over the channels of a group and all positions of a sample.

Dims: n; channels as (group, channel of the group), g ci; positions d h w. Instance normalisation
has groups of one channel. Inside a group everything is split only after lowering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Axis, Kind, Product, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.normalization.statistics import (
    emit_centred,
    emit_rstd,
    emit_slope,
    normalised,
    slope,
)
from soapstone.ir.ops.reduction.folds import unit_rename
from soapstone.ir.ops.signatures import DimTable, along, lettered
from soapstone.ir.ops.windows.window import spatial_dims
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

_EPSILON = {"epsilon": Attribute("float", 1e-5, minimum=0)}
_GROUPS = {"num_groups": Attribute("int", minimum=1)}


def _groups(attributes: Attributes, channels: int) -> int:
    """Return the number of groups: every channel its own where no attribute tells."""
    return int(attributes.get("num_groups", channels))


def _signature(
    inputs: Sequence[TensorSpec], attributes: Attributes, pattern: str, outputs: str
) -> Signature:
    """Return the signature of operands each written as x: (n, c, …), c: (c,) or s: (n, groups)."""
    rank = inputs[0].rank
    if not 2 <= rank <= 5:
        raise ShapeError(
            f"input 0 has rank {rank} (shape {inputs[0].shape}); 2 to 5 needed (n c …)"
        )
    places = spatial_dims(rank - 2)
    groups = _groups(attributes, inputs[0].shape[1])

    def axis(table: DimTable, name: str, extent: int, where: str) -> Axis:
        if name != "c":
            return along(table, name, extent, where)
        if groups and extent % groups:
            raise ShapeError(f"dim g: {groups} groups do not divide {extent} channels of {where}")
        inner = extent // groups if groups else 1
        table.add("g", groups, "attribute num_groups")
        table.add("ci", inner, where)
        return Product(("g", "ci"), (groups, inner))

    names = {"x": ("n", "c", *places), "c": ("c",), "s": ("n", "g")}
    kinds = dict.fromkeys(("ci", *places), Kind.LOWERED)
    return lettered(inputs, names, pattern, outputs, kinds, axis)


def _parts(attributes: Attributes, x: Array) -> Array:
    """Return x as (n, groups, everything else)."""
    groups = _groups(attributes, x.shape[1])
    rest = math.prod(x.shape[1:]) // max(1, groups)
    return x.reshape(x.shape[0], groups, rest)


def _spread(values: Array, x: Array) -> Array:
    """Return values of each channel in a shape that broadcasts over (n, c, …)."""
    return values.reshape(-1, *(1,) * (x.ndim - 2))


def _forward(attributes: Attributes, x: Array, gamma: Array, beta: Array) -> tuple[Array, ...]:
    normal, mean, rstd = normalised(_parts(attributes, x), (2,), attributes["epsilon"])
    y = normal.reshape(x.shape) * _spread(gamma, x) + _spread(beta, x)
    return y, mean[..., 0], rstd[..., 0]


def _backward(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, ...]:
    normal = (_parts(attributes, x) - mean[..., None]) * rstd[..., None]
    scaled = _parts(attributes, dy * _spread(gamma, x))
    dx = slope(scaled, normal, rstd[..., None], (2,)).reshape(x.shape)
    over = (0, *range(2, x.ndim))
    return dx, (dy * normal.reshape(x.shape)).sum(axis=over), dy.sum(axis=over)


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    return {**attributes, "num_groups": max(1, tile.size("g"))}


class _Lowering:
    """Emits the primitives of one node on arrays (n, g, ci, …), whose dims follow the node's."""

    def __init__(self, emit: Emitter, node: Node, x: str) -> None:
        self.shape = emit.spec(x).shape
        channels = self.shape[1]
        self.groups = _groups(node.attributes, channels)
        inner = channels // self.groups if self.groups else 1
        self.wide = (self.shape[0], self.groups, inner, *self.shape[2:])
        self.names = ("n", "g", "ci", *spatial_dims(len(self.shape) - 2))
        self.emit = emit
        self.e = emit.renamed({f"d{axis}": name for axis, name in enumerate(self.names)})
        self.over = tuple(range(2, len(self.wide)))

    def reshape(self, value: str, axes: Sequence[int], shape: Sequence[int]) -> str:
        """Emit a reshape of a value that has the wide shape's axes, of other extents one."""
        wide = [self.wide[axis] if axis in axes else 1 for axis in range(len(self.wide))]
        rename = unit_rename(wide, self.names)
        return self.emit("reshape", value, shape=tuple(shape), rename=rename)

    def widen(self, value: str, axes: Sequence[int]) -> str:
        """Emit the value in a shape that broadcasts over the wide one."""
        shape = [self.wide[axis] if axis in axes else 1 for axis in range(len(self.wide))]
        return self.reshape(value, axes, shape)


def _lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, gamma, beta = node.inputs
    low = _Lowering(emit, node, x)
    e, everything = low.e, range(len(low.wide))
    centred, mean, variance = emit_centred(e, low.widen(x, everything), low.over)
    rstd = emit_rstd(e, variance, node.attributes["epsilon"])
    y = e("mul", e("mul", centred, rstd), low.widen(gamma, (1, 2)))
    y = e("add", y, low.widen(beta, (1, 2)))
    flat = [low.reshape(value, (0, 1), low.wide[:2]) for value in (mean, rstd)]
    return [low.reshape(y, everything, low.shape), *flat]


def _grad_lower(emit: Emitter, node: Node) -> Sequence[str]:
    dy, x, gamma, mean, rstd = node.inputs
    low = _Lowering(emit, node, x)
    e, everything = low.e, range(len(low.wide))
    dy, x = (low.widen(value, everything) for value in (dy, x))
    mean, rstd = (low.widen(value, (0, 1)) for value in (mean, rstd))
    normal = e("mul", e("sub", x, mean), rstd)
    inner = emit_slope(e, e("mul", dy, low.widen(gamma, (1, 2))), normal, rstd, low.over)
    dx = low.reshape(inner, everything, low.shape)
    over = (0, *low.over[1:])
    sums = (
        e("reduce_sum", value, axes=over, keepdims=True) for value in (e("mul", dy, normal), dy)
    )
    return [dx, *(low.reshape(value, (1, 2), low.shape[1:2]) for value in sums)]


def _gradient(name: str, g: GradientContext) -> Sequence[str | None]:
    x, gamma, _ = g.inputs
    given = {key: g.attributes[key] for key in ("num_groups",) if key in g.attributes}
    operands = (g.only_grad(), x, gamma, *g.outputs[1:])
    return list(g.emit.all(f"{name}_grad", *operands, **given))


_SHAPES = (("2 4 3 2", "4", 2), ("3 6 4", "6", 3), ("1 2 2 2 3", "2", 1), ("2 3", "3", 3))
_EMPTY = ("0 2 3", "2", 1)


def _declare(name: str, onnx: str, grouped: bool, doc: str) -> None:
    forward, backward = [], []
    for shape, channels, groups in (*_SHAPES, _EMPTY):
        if not grouped and len(shape.split()) == 2:
            continue  # a single value has no variance
        if grouped and shape == "2 3":
            groups = 1
        given = {"num_groups": groups} if grouped else {}
        n = shape.split()[0]
        statistics = f"{n} {groups if grouped else channels}"
        forward.append(Case((shape, channels, channels), given))
        operands = (shape, shape, channels, statistics, statistics)
        backward.append(Case(operands, given, (), positive=True))
    attributes = _GROUPS if grouped else {}
    localize = _localize if grouped else None
    define(
        name=name,
        inputs=("x", "gamma", "beta"),
        outputs=("y", "mean", "rstd"),
        signature=lambda inputs, a: _signature(inputs, a, "xcc", "xss"),
        reference=_forward,
        attributes=attributes | _EPSILON,
        gradient=partial(_gradient, name),
        localize=localize,
        lower=_lower,
        flops_per_point=8,
        onnx=Onnx(onnx, outputs=1),
        cases=tuple(forward),
        doc=doc,
    )
    define(
        name=f"{name}_grad",
        inputs=("dy", "x", "gamma", "mean", "rstd"),
        outputs=("dx", "dgamma", "dbeta"),
        signature=lambda inputs, a: _signature(inputs, a, "xxcss", "xcc"),
        reference=_backward,
        attributes=attributes,
        localize=localize,
        lower=_grad_lower,
        flops_per_point=12,
        cases=tuple(backward),
    )


_declare(
    "group_norm",
    "GroupNormalization",
    True,
    "x normalised by mean and biased variance of each group of channels of a sample",
)
_declare(
    "instance_norm",
    "InstanceNormalization",
    False,
    "x normalised by mean and biased variance of each channel of a sample",
)
