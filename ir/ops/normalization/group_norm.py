"""Group and instance normalisation: over the channels of a group and all positions of a sample.

Dims: n; channels as (group, channel of the group), g ci; positions d h w. Instance normalisation
has groups of one channel. Inside a group everything is split only after lowering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from soapstone.ir.dims import (
    Affine,
    Axis,
    DimTable,
    Kind,
    Operand,
    Product,
    Signature,
    along,
    finish,
)
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Emitter, Node
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.ops.reduction.folds import unit_rename
from soapstone.ir.ops.windows.window import spatial_dims
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, Tile, register
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
    need_float(inputs, *range(len(inputs)))
    rank = inputs[0].rank
    if not 2 <= rank <= 5:
        raise ShapeError(
            f"input 0 has rank {rank} (shape {inputs[0].shape}); 2 to 5 needed (n c …)"
        )
    places = spatial_dims(rank - 2)
    groups = _groups(attributes, inputs[0].shape[1])
    table = DimTable()

    def channels(extent: int, where: str) -> Axis:
        if groups and extent % groups:
            raise ShapeError(f"dim g: {groups} groups do not divide {extent} channels of {where}")
        inner = extent // groups if groups else 1
        table.add("g", groups, "attribute num_groups")
        table.add("ci", inner, where)
        return Product(("g", "ci"), (groups, inner))

    operands = []
    for position, (spec, letter) in enumerate(zip(inputs, pattern)):
        where = f"input {position}"
        names = {"x": ("n", "c", *places), "c": ("c",), "s": ("n", "g")}[letter]
        need_rank(inputs, position, " ".join(names))
        operands.append(
            Operand(
                tuple(
                    channels(extent, where) if name == "c" else along(table, name, extent, where)
                    for name, extent in zip(names, spec.shape)
                )
            )
        )
    x = operands[0]
    n = Affine("n", table.extent("n"))
    made = {"x": x, "c": Operand((x.axes[1],)), "s": Operand((n, Affine("g", groups)))}
    kinds = dict.fromkeys(("ci", *places), Kind.LOWERED)
    found = [made[letter] for letter in outputs]
    return finish(table, operands, found, [inputs[0].dtype] * len(found), kinds)


def _parts(attributes: Attributes, x: Array) -> Array:
    """Return x as (n, groups, everything else)."""
    groups = _groups(attributes, x.shape[1])
    rest = math.prod(x.shape[1:]) // max(1, groups)
    return x.reshape(x.shape[0], groups, rest)


def _spread(values: Array, x: Array) -> Array:
    """Return values of each channel in a shape that broadcasts over (n, c, …)."""
    return values.reshape(-1, *(1,) * (x.ndim - 2))


def _forward(attributes: Attributes, x: Array, gamma: Array, beta: Array) -> tuple[Array, ...]:
    parts = _parts(attributes, x)
    count = x.dtype.type(max(1, parts.shape[2]))
    mean = parts.sum(axis=2) / count
    centred = parts - mean[..., None]
    variance = (centred * centred).sum(axis=2) / count
    rstd = 1 / np.sqrt(variance + x.dtype.type(attributes["epsilon"]))
    normal = (centred * rstd[..., None]).reshape(x.shape)
    return normal * _spread(gamma, x) + _spread(beta, x), mean, rstd


def _backward(
    attributes: Attributes, dy: Array, x: Array, gamma: Array, mean: Array, rstd: Array
) -> tuple[Array, ...]:
    parts = _parts(attributes, x)
    count = x.dtype.type(max(1, parts.shape[2]))
    normal = (parts - mean[..., None]) * rstd[..., None]
    scaled = _parts(attributes, dy * _spread(gamma, x))
    inner = scaled - scaled.sum(axis=2, keepdims=True) / count
    inner = inner - normal * ((scaled * normal).sum(axis=2, keepdims=True) / count)
    dx = (inner * rstd[..., None]).reshape(x.shape)
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

    def mean(self, value: str) -> str:
        """Emit the mean over a group, which is kept as axes of one."""
        total = self.e("reduce_sum", value, axes=self.over, keepdims=True)
        share = 1 / max(1, math.prod(self.wide[2:]))
        return self.e("affine", total, scale=share)


def _lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, gamma, beta = node.inputs
    low = _Lowering(emit, node, x)
    e, everything = low.e, range(len(low.wide))
    wide = low.widen(x, everything)
    mean = low.mean(wide)
    centred = e("sub", wide, mean)
    variance = low.mean(e("mul", centred, centred))
    rstd = e("power", e("affine", variance, shift=node.attributes["epsilon"]), exponent=-0.5)
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
    scaled = e("mul", dy, low.widen(gamma, (1, 2)))
    inner = e("sub", scaled, low.mean(scaled))
    inner = e("sub", inner, e("mul", normal, low.mean(e("mul", scaled, normal))))
    dx = low.reshape(e("mul", inner, rstd), everything, low.shape)
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
    register(
        OpSpec(
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
    )
    register(
        OpSpec(
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
