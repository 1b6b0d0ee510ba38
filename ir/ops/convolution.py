"""Two-dimensional convolution, with groups, a bias and an activation, and its gradients.

Dims: n; channels as (group, channel of the group): g co for outputs, g ci for inputs; h w are
output positions, through which the input has a halo; kh kw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine, DimTable, Kind, Operand, Product, Signature, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Emitter, Node
from soapstone.ir.ops.checks import need_count, need_float, need_lengths, need_rank
from soapstone.ir.ops.matmul import ACTIVATION, activate, activation_grad
from soapstone.ir.ops.window import SPATIAL, Window, gather, local_padding, scatter, windows_of
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, Tile, register
from soapstone.ir.tensor import Array, TensorSpec

_WINDOW = {
    "stride": Attribute("ints", (1, 1), minimum=1),
    "padding": Attribute("ints", (0, 0, 0, 0), minimum=0),
    "dilation": Attribute("ints", (1, 1), minimum=1),
    "groups": Attribute("int", 1, minimum=1),
}


class _Axes:
    """The dims of a convolution, from its attributes and the shapes as they become known."""

    def __init__(self, inputs: Sequence[TensorSpec], attributes: Attributes) -> None:
        need_lengths(attributes, stride=2, padding=4, dilation=2)
        need_float(inputs, 0, 1)
        self.groups: int = attributes["groups"]
        self.attributes = attributes
        self.table = DimTable()

    def channels(self, inner: str, extent: int, where: str) -> Product:
        """Return the axis of input or output channels."""
        if extent % self.groups:
            raise ShapeError(
                f"dim g: {self.groups} groups do not divide {extent} channels of {where}"
            )
        self.table.add("g", self.groups, "attribute groups")
        self.table.add(inner, extent // self.groups, where)
        return Product(("g", inner), (self.groups, extent // self.groups))

    def weights(self, shape: Sequence[int], where: str) -> Operand:
        out = self.channels("co", shape[0], where)
        ci = along(self.table, "ci", shape[1], where)
        kernel = [
            Affine(self.table.add(f"k{dim}", extent, where, Kind.WHOLE), extent)
            for dim, extent in zip(SPATIAL, shape[2:])
        ]
        return Operand((out, ci, *kernel))

    def windows(self, size: Sequence[int], kernel: Sequence[int]) -> list[Window]:
        """Return the windows, and record the extents of h and w."""
        windows = windows_of(self.attributes, size, kernel)
        for window in windows:
            self.table.add(window.dim, window.count, "the windows")
        return windows

    def positions(self, shape: Sequence[int], where: str) -> tuple[Affine, Affine]:
        h, w = (along(self.table, dim, e, where) for dim, e in zip(SPATIAL, shape))
        return h, w


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 2 + attributes["bias"])
    need_rank(inputs, 0, "n c h w")
    need_rank(inputs, 1, "co ci kh kw")
    axes = _Axes(inputs, attributes)
    x, w = inputs[:2]
    n = along(axes.table, "n", x.shape[0], "input 0")
    channels = axes.channels("ci", x.shape[1], "input 0")
    weights = axes.weights(w.shape, "input 1")
    h, wide = axes.windows(x.shape[2:], w.shape[2:])
    out = weights.axes[0]
    operands = [Operand((n, channels, h.read(), wide.read())), weights]
    if attributes["bias"]:
        need_rank(inputs, 2, "co")
        operands.append(Operand((axes.channels("co", inputs[2].shape[0], "input 2"),)))
    y = Operand((n, out, Affine("h", h.count), Affine("w", wide.count)))
    fused = attributes["bias"] or attributes["activation"] is not None
    kinds = {"ci": Kind.LOWERED} if fused else {}
    return finish(axes.table, operands, [y], [x.dtype], kinds)


def _grouped(windows: Array, groups: int) -> Array:
    """Return windows (n, g*ci, h, w, kh, kw) as one matrix a group: (g, n*h*w, ci*kh*kw)."""
    n, c, h, w, kh, kw = windows.shape
    parts = windows.reshape(n, groups, c // groups, h, w, kh, kw)
    rows = parts.transpose(1, 0, 3, 4, 2, 5, 6)
    return rows.reshape(groups, n * h * w, (c // groups) * kh * kw)


def _outputs(y: Array, groups: int) -> Array:
    """Return y (n, g*co, h, w) as one matrix a group: (g, n*h*w, co)."""
    n, c, h, w = y.shape
    parts = y.reshape(n, groups, c // groups, h, w).transpose(1, 0, 3, 4, 2)
    return parts.reshape(groups, n * h * w, c // groups)


def _filters(w: Array, groups: int) -> Array:
    """Return w (g*co, ci, kh, kw) as one matrix a group: (g, co, ci*kh*kw)."""
    co, ci, kh, kw = w.shape
    return w.reshape(groups, co // groups, ci * kh * kw)


def _conv2d(attributes: Attributes, x: Array, w: Array, *bias: Array) -> Array:
    groups, kernel = attributes["groups"], w.shape[2:]
    count = [
        (window.size + window.low + window.high - window.span) // window.stride + 1
        for window in windows_of(attributes, x.shape[2:], kernel)
    ]
    columns = _grouped(gather(x, attributes, kernel, count), groups)
    y = np.matmul(columns, _filters(w, groups).transpose(0, 2, 1))
    y = y.reshape(groups, x.shape[0], *count, w.shape[0] // groups)
    y = y.transpose(1, 0, 4, 2, 3).reshape(x.shape[0], w.shape[0], *count)
    if attributes["bias"]:
        y = y + bias[0].reshape(-1, 1, 1)
    return activate(attributes["activation"], y)


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    kernel = tile.size("kh"), tile.size("kw")
    padding = local_padding(attributes, tile, tile.inputs[0], kernel)
    return {**attributes, "padding": padding, "groups": max(1, tile.size("g"))}


def _dims(groups: int) -> dict[str, str]:
    """Return how dims d0 … d3 of an output-shaped value are called here."""
    return {"d0": "n", "d1": "co" if groups == 1 else "g", "d2": "h", "d3": "w"}


def _lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, w, *bias = node.inputs
    groups = node.attributes["groups"]
    plain = {**node.attributes, "bias": False, "activation": None}
    y = emit("conv2d", x, w, **plain)
    follow = emit.renamed(_dims(groups))
    if bias:
        y = follow("add", y, emit("reshape", bias[0], shape=(*emit.spec(bias[0]).shape, 1, 1)))
    if node.attributes["activation"]:
        y = follow(node.attributes["activation"], y)
    return [y]


def _conv2d_grad(g: GradientContext) -> Sequence[str | None]:
    x, w = g.inputs[:2]
    window = {name: g.attributes[name] for name in _WINDOW}
    follow = replace(g, emit=g.emit.renamed(_dims(g.attributes["groups"])))
    dy = activation_grad(follow, len(g.inputs))
    dx = g.emit("conv2d_grad_input", dy, w, size=g.spec(x).shape[2:], **window)
    bias = g.attributes["bias"]
    kernel = g.spec(w).shape[2:]
    return [dx, *g.emit.all("conv2d_grad_weight", x, dy, kernel=kernel, bias=bias, **window)]


def _grad_input_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_lengths(attributes, size=2)
    need_rank(inputs, 0, "n co h w")
    need_rank(inputs, 1, "co ci kh kw")
    axes = _Axes(inputs, attributes)
    dy, w = inputs
    n = along(axes.table, "n", dy.shape[0], "input 0")
    out = axes.channels("co", dy.shape[1], "input 0")
    weights = axes.weights(w.shape, "input 1")
    h, wide = axes.windows(attributes["size"], w.shape[2:])
    given = Operand((n, out, *axes.positions(dy.shape[2:], "input 0")))
    channels = Product(("g", "ci"), (axes.groups, w.shape[1]))
    dx = Operand((n, channels, h.written(), wide.written()))
    return finish(axes.table, [given, weights], [dx], [dy.dtype])


def _grad_input(attributes: Attributes, dy: Array, w: Array) -> Array:
    groups, (ci, kh, kw) = attributes["groups"], w.shape[1:]
    n, _, *count = dy.shape
    parts = np.matmul(_outputs(dy, groups), _filters(w, groups))
    parts = parts.reshape(groups, n, *count, ci, kh, kw).transpose(1, 0, 4, 2, 3, 5, 6)
    windows = parts.reshape(n, groups * ci, *count, kh, kw)
    return scatter(windows, attributes, attributes["size"])


def _grad_input_localize(attributes: Attributes, tile: Tile) -> Attributes:
    kernel = tile.size("kh"), tile.size("kw")
    lo, hi = tile.outputs[0]
    return {
        **attributes,
        "padding": local_padding(attributes, tile, tile.outputs[0], kernel),
        "groups": max(1, tile.size("g")),
        "size": tuple(int(extent) for extent in (hi - lo)[2:]),
    }


def _grad_weight_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_lengths(attributes, kernel=2)
    need_rank(inputs, 0, "n c h w")
    need_rank(inputs, 1, "n co h w")
    axes = _Axes(inputs, attributes)
    x, dy = inputs
    n = along(axes.table, "n", x.shape[0], "input 0")
    channels = axes.channels("ci", x.shape[1], "input 0")
    shape = (dy.shape[1], x.shape[1] // axes.groups, *attributes["kernel"])
    weights = axes.weights(shape, "input 1")
    h, wide = axes.windows(x.shape[2:], attributes["kernel"])
    along(axes.table, "n", dy.shape[0], "input 1")
    given = Operand((n, weights.axes[0], *axes.positions(dy.shape[2:], "input 1")))
    operands = [Operand((n, channels, h.read(), wide.read())), given]
    outputs, kinds = [weights], {}
    if attributes["bias"]:
        # Tiles of ci would each hold the same db, not a part of it: such a split is lowered.
        outputs.append(Operand((weights.axes[0],)))
        kinds = {"ci": Kind.LOWERED}
    return finish(axes.table, operands, outputs, [x.dtype] * len(outputs), kinds)


def _grad_weight(attributes: Attributes, x: Array, dy: Array) -> Array | tuple[Array, Array]:
    groups, kernel = attributes["groups"], attributes["kernel"]
    columns = _grouped(gather(x, attributes, kernel, dy.shape[2:]), groups)
    dw = np.matmul(_outputs(dy, groups).transpose(0, 2, 1), columns)
    dw = dw.reshape(dy.shape[1], x.shape[1] // groups, *kernel)
    return (dw, dy.sum(axis=(0, 2, 3))) if attributes["bias"] else dw


def _grad_weight_lower(emit: Emitter, node: Node) -> Sequence[str]:
    x, dy = node.inputs
    dw = emit("conv2d_grad_weight", x, dy, **{**node.attributes, "bias": False})
    follow = emit.renamed(_dims(node.attributes["groups"]))
    return [dw, follow("reduce_sum", dy, axes=(0, 2, 3), keepdims=False)]


def _window(**attributes: Any) -> dict[str, Any]:
    return dict(attributes)


register(
    OpSpec(
        name="conv2d",
        inputs=("x", "w", "b?"),
        signature=_signature,
        reference=_conv2d,
        attributes=_WINDOW | {"bias": Attribute("bool", True), "activation": ACTIVATION},
        gradient=_conv2d_grad,
        localize=_localize,
        lower=_lower,
        flops_per_point=2,
        onnx="Conv",
        laws=(
            "without bias and activation: linear in x and in w",
            "conv2d(x, concat(w1, w2, axis=0)) = concat(conv2d(x, w1), conv2d(x, w2), axis=1)",
        ),
        cases=(
            Case(("2 3 6 5", "4 3 3 3", "4"), _window(padding=(1, 1, 1, 1))),
            Case(
                ("2 4 7 6", "4 2 3 2", "4"),
                _window(groups=2, stride=(2, 1), padding=(0, 1, 2, 0), activation="relu"),
            ),
            Case(("1 2 8 7", "3 2 2 3"), _window(bias=False, dilation=(2, 2), stride=(1, 2))),
            Case(
                ("2 3 5 5", "3 1 3 3"),
                _window(bias=False, groups=3, padding=(1, 1, 1, 1), activation="gelu"),
            ),
            Case(("2 2 5 7", "2 2 1 1", "2"), _window(stride=(2, 3), activation="tanh")),
            Case(("1 1 1 1", "1 1 1 1"), _window(bias=False)),
            Case(("0 2 4 4", "2 2 3 3", "2"), _window(padding=(1, 1, 0, 0))),
            Case(("1 1 3 3", "2 1 2 2", "2"), _window(padding=(2, 3, 3, 2), stride=(2, 2))),
        ),
        doc="cross-correlation of x with w: (o, c/groups, kh, kw), plus b, then an activation",
    )
)
register(
    OpSpec(
        name="conv2d_grad_input",
        inputs=("dy", "w"),
        outputs=("dx",),
        signature=_grad_input_signature,
        reference=_grad_input,
        attributes=_WINDOW | {"size": Attribute("ints", minimum=0)},
        localize=_grad_input_localize,
        flops_per_point=2,
        onnx="ConvTranspose",
        cases=(
            Case(("2 4 6 5", "4 3 3 3"), _window(padding=(1, 1, 1, 1), size=(6, 5)), ()),
            Case(
                ("2 4 4 6", "4 2 3 2"),
                _window(groups=2, stride=(2, 1), padding=(0, 1, 2, 0), size=(7, 6)),
                (),
            ),
            Case(("1 3 6 2", "3 2 2 3"), _window(dilation=(2, 2), stride=(1, 2), size=(8, 7)), ()),
            Case(("2 2 3 3", "2 2 1 1"), _window(stride=(2, 3), size=(6, 9)), ()),
            Case(("1 2 2 2", "2 1 2 2"), _window(stride=(3, 3), size=(7, 7)), ()),
            Case(("0 2 2 2", "2 2 3 3"), _window(size=(4, 4)), ()),
            Case(
                ("1 2 4 4", "2 1 2 2"),
                _window(padding=(2, 3, 3, 2), stride=(2, 2), size=(3, 3)),
                (),
            ),
        ),
        doc="the gradient of conv2d (without activation) with respect to x, of size (h, w)",
    )
)
register(
    OpSpec(
        name="conv2d_grad_weight",
        inputs=("x", "dy"),
        outputs=("dw", "db"),
        signature=_grad_weight_signature,
        reference=_grad_weight,
        attributes=_WINDOW
        | {"kernel": Attribute("ints", minimum=1), "bias": Attribute("bool", False)},
        localize=_localize,
        lower=_grad_weight_lower,
        flops_per_point=2,
        cases=(
            Case(
                ("2 3 6 5", "2 4 6 5"),
                _window(padding=(1, 1, 1, 1), kernel=(3, 3), bias=True),
                (),
            ),
            Case(
                ("2 4 7 6", "2 4 4 6"),
                _window(groups=2, stride=(2, 1), padding=(0, 1, 2, 0), kernel=(3, 2), bias=True),
                (),
            ),
            Case(
                ("1 2 8 7", "1 3 6 2"),
                _window(dilation=(2, 2), stride=(1, 2), kernel=(2, 3)),
                (),
            ),
            Case(
                ("2 3 5 5", "2 3 5 5"), _window(groups=3, padding=(1, 1, 1, 1), kernel=(3, 3)), ()
            ),
            Case(("0 2 4 4", "0 2 2 2"), _window(kernel=(3, 3), bias=True), ()),
            Case(
                ("1 1 3 3", "1 2 4 4"),
                _window(padding=(2, 3, 3, 2), stride=(2, 2), kernel=(2, 2)),
                (),
            ),
        ),
        doc="the gradients of conv2d (without activation) with respect to w and, with bias, b",
    )
)
