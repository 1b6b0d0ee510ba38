"""Convolution along one, two or three axes, with groups, a bias and an activation; its gradients.

Dims: n; channels as (group, channel of the group): g co for outputs, g ci for inputs; d h w are
output positions (h w of an image, w of a sequence), through which the input has a halo; kd kh kw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Affine, Kind, Operand, Product, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_count, need_float, need_lengths, need_rank
from soapstone.ir.ops.products.matmul import ACTIVATION, activate, activation_grad
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.ops.windows import laws_convolution
from soapstone.ir.ops.windows.window import (
    ONNX_WINDOW,
    Window,
    case_shape,
    case_window,
    gather,
    local_padding,
    need_window,
    of_rank,
    positions_of,
    scatter,
    spatial_dims,
    window_attributes,
    windows_of,
)
from soapstone.ir.spec import Case, GradientContext, Tile, box_shape, define
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.records import dataclass

RANKS = (1, 2, 3)
CONVOLUTIONS = tuple(f"conv{rank}d" for rank in RANKS)
GROUPS = {"groups": Attribute("int", 1, minimum=1)}


class ChannelAxes:
    """The dims of a convolution, from its attributes and the shapes as they become known."""

    def __init__(
        self,
        rank: int,
        inputs: Sequence[TensorSpec],
        attributes: Attributes,
        *,
        real: bool = True,
    ) -> None:
        need_window(attributes, rank)
        if real:
            need_float(inputs, 0, 1)
        self.rank = rank
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
        """Return the operand of weights (g co, ci, kernel…)."""
        out = self.channels("co", shape[0], where)
        ci = along(self.table, "ci", shape[1], where)
        kernel = [
            Affine(self.table.add(f"k{dim}", extent, where, Kind.WHOLE), extent)
            for dim, extent in zip(spatial_dims(self.rank), shape[2:])
        ]
        return Operand((out, ci, *kernel))

    def windows(self, size: Sequence[int], kernel: Sequence[int]) -> list[Window]:
        """Return the windows, and record how many positions they have."""
        windows = windows_of(self.attributes, size, kernel)
        for window in windows:
            self.table.add(window.dim, window.count, "the windows")
        return windows

    def positions(self, shape: Sequence[int], where: str) -> list[Affine]:
        """Return the axes of output positions of an operand that has them."""
        named = zip(spatial_dims(self.rank), shape)
        return [along(self.table, dim, extent, where) for dim, extent in named]


def image(rank: int, channels: str) -> str:
    """Return the axes of an image as `need_rank` wants them: `n co h w`."""
    return " ".join(("n", channels, *spatial_dims(rank)))


def filters(rank: int) -> str:
    """Return the axes of weights: `co ci kh kw`."""
    return " ".join(("co", "ci", *(f"k{dim}" for dim in spatial_dims(rank))))


def _signature(rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 2 + attributes["bias"])
    fused = attributes["bias"] or attributes["activation"] is not None
    kinds = {"ci": Kind.LOWERED} if fused else {}
    axes = ChannelAxes(rank, inputs, attributes)
    return windowed(axes, inputs, range(2, len(inputs)), inputs[0].dtype, kinds)


def windowed(
    axes: ChannelAxes,
    inputs: Sequence[TensorSpec],
    vectors: Sequence[int],
    dtype: str,
    kinds: Mapping[str, Kind],
) -> Signature:
    """Return the signature of a convolution of inputs 0 and 1, and of vectors over its channels.

    vectors: their positions among the inputs. dtype: of the result.
    """
    rank = axes.rank
    need_rank(inputs, 0, image(rank, "c"))
    need_rank(inputs, 1, filters(rank))
    x, w = inputs[:2]
    n = along(axes.table, "n", x.shape[0], "input 0")
    channels = axes.channels("ci", x.shape[1], "input 0")
    weights = axes.weights(w.shape, "input 1")
    windows = axes.windows(x.shape[2:], w.shape[2:])
    out = weights.axes[0]
    operands = [Operand((n, channels, *(window.read() for window in windows))), weights]
    for position in vectors:
        need_rank(inputs, position, "co")
        extent = inputs[position].shape[0]
        operands.append(Operand((axes.channels("co", extent, f"input {position}"),)))
    y = Operand((n, out, *(Affine(window.dim, window.count) for window in windows)))
    return finish(axes.table, operands, [y], [dtype], kinds)


def _grouped(windows: Array, groups: int) -> Array:
    """Return windows (n, g*ci, *count, *kernel) as a matrix a group: (g, n*count, ci*kernel)."""
    n, c, *rest = windows.shape
    rank = len(rest) // 2
    count, kernel = rest[:rank], rest[rank:]
    parts = windows.reshape(n, groups, c // groups, *rest)
    at = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    rows = int(np.prod([n, *count]))
    return parts.transpose(at).reshape(groups, rows, int(np.prod([c // groups, *kernel])))


def _outputs(y: Array, groups: int) -> Array:
    """Return y (n, g*co, *count) as one matrix a group: (g, n*count, co)."""
    n, c, *count = y.shape
    parts = np.moveaxis(y.reshape(n, groups, c // groups, *count), (1, 2), (0, -1))
    return parts.reshape(groups, int(np.prod([n, *count])), c // groups)


def _filters(w: Array, groups: int) -> Array:
    """Return w (g*co, ci, *kernel) as one matrix a group: (g, co, ci*kernel)."""
    return w.reshape(groups, w.shape[0] // groups, int(np.prod(w.shape[1:])))


def convolve(attributes: Attributes, x: Array, w: Array, *bias: Array) -> Array:
    """Return the convolution of x and w, plus a bias, then an activation."""
    groups, kernel = attributes["groups"], w.shape[2:]
    count = positions_of(attributes, x.shape[2:], kernel)
    columns = _grouped(gather(x, attributes, kernel, count), groups)
    y = np.matmul(columns, _filters(w, groups).transpose(0, 2, 1))
    y = y.reshape(groups, x.shape[0], *count, w.shape[0] // groups)
    y = np.moveaxis(y, (0, -1), (1, 2)).reshape(x.shape[0], w.shape[0], *count)
    if attributes["bias"]:
        y = y + bias[0].reshape(-1, *(1,) * len(count))
    return activate(attributes["activation"], y)


def localize(rank: int, attributes: Attributes, tile: Tile) -> Attributes:
    """Return a tile's attributes: the padding that is left, and the groups that it has."""
    kernel = [tile.size(f"k{dim}") for dim in spatial_dims(rank)]
    padding = local_padding(attributes, tile, tile.inputs[0], kernel)
    return {**attributes, "padding": padding, "groups": max(1, tile.size("g"))}


def output_dims(rank: int, groups: int) -> dict[str, str]:
    """Return how dims d0, d1, … of an output-shaped value are called here."""
    names = ("n", "co" if groups == 1 else "g", *spatial_dims(rank))
    return {f"d{axis}": name for axis, name in enumerate(names)}


def _lower(rank: int, emit: Emitter, node: Node) -> Sequence[str]:
    x, w, *bias = node.inputs
    plain = {**node.attributes, "bias": False, "activation": None}
    y = emit(node.operator, x, w, **plain)
    follow = emit.renamed(output_dims(rank, node.attributes["groups"]))
    if bias:
        shape = (*emit.spec(bias[0]).shape, *(1,) * rank)
        y = follow("add", y, emit("reshape", bias[0], shape=shape))
    if node.attributes["activation"]:
        y = follow(node.attributes["activation"], y)
    return [y]


def _conv_grad(rank: int, g: GradientContext) -> Sequence[str | None]:
    x, w = g.inputs[:2]
    window = {name: g.attributes[name] for name in window_attributes(rank) | GROUPS}
    names = output_dims(rank, g.attributes["groups"])
    dy = activation_grad(replace(g, emit=g.emit.renamed(names)), len(g.inputs))
    size, kernel, bias = g.spec(x).shape[2:], g.spec(w).shape[2:], g.attributes["bias"]
    dx = g.emit(f"conv{rank}d_grad_input", dy, w, size=size, **window)
    return [
        dx,
        *g.emit.all(f"conv{rank}d_grad_weight", x, dy, kernel=kernel, bias=bias, **window),
    ]


def _grad_input_signature(
    rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes
) -> Signature:
    need_lengths(attributes, size=rank)
    need_rank(inputs, 0, image(rank, "co"))
    need_rank(inputs, 1, filters(rank))
    axes = ChannelAxes(rank, inputs, attributes)
    dy, w = inputs
    n = along(axes.table, "n", dy.shape[0], "input 0")
    out = axes.channels("co", dy.shape[1], "input 0")
    weights = axes.weights(w.shape, "input 1")
    windows = axes.windows(attributes["size"], w.shape[2:])
    given = Operand((n, out, *axes.positions(dy.shape[2:], "input 0")))
    channels = Product(("g", "ci"), (axes.groups, w.shape[1]))
    dx = Operand((n, channels, *(window.written() for window in windows)))
    return finish(axes.table, [given, weights], [dx], [dy.dtype])


def grad_input(attributes: Attributes, dy: Array, w: Array) -> Array:
    """Return the gradient of a convolution with respect to x, of the attribute `size`."""
    groups, (ci, *kernel) = attributes["groups"], w.shape[1:]
    n, _, *count = dy.shape
    parts = np.matmul(_outputs(dy, groups), _filters(w, groups))
    parts = np.moveaxis(parts.reshape(groups, n, *count, ci, *kernel), (0, 2 + len(count)), (1, 2))
    windows = parts.reshape(n, groups * ci, *count, *kernel)
    return scatter(windows, attributes, attributes["size"])


def _grad_input_localize(rank: int, attributes: Attributes, tile: Tile) -> Attributes:
    kernel = [tile.size(f"k{dim}") for dim in spatial_dims(rank)]
    return {
        **attributes,
        "padding": local_padding(attributes, tile, tile.outputs[0], kernel),
        "groups": max(1, tile.size("g")),
        "size": box_shape(tile.outputs[0])[2:],
    }


def _grad_weight_signature(
    rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes
) -> Signature:
    need_lengths(attributes, kernel=rank)
    need_rank(inputs, 0, image(rank, "c"))
    need_rank(inputs, 1, image(rank, "co"))
    axes = ChannelAxes(rank, inputs, attributes)
    x, dy = inputs
    n = along(axes.table, "n", x.shape[0], "input 0")
    channels = axes.channels("ci", x.shape[1], "input 0")
    shape = (dy.shape[1], x.shape[1] // axes.groups, *attributes["kernel"])
    weights = axes.weights(shape, "input 1")
    windows = axes.windows(x.shape[2:], attributes["kernel"])
    along(axes.table, "n", dy.shape[0], "input 1")
    given = Operand((n, weights.axes[0], *axes.positions(dy.shape[2:], "input 1")))
    operands = [Operand((n, channels, *(window.read() for window in windows))), given]
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
    return (dw, dy.sum(axis=(0, *range(2, dy.ndim)))) if attributes["bias"] else dw


def _grad_weight_lower(rank: int, emit: Emitter, node: Node) -> Sequence[str]:
    x, dy = node.inputs
    dw = emit(node.operator, x, dy, **{**node.attributes, "bias": False})
    follow = emit.renamed(output_dims(rank, node.attributes["groups"]))
    axes = (0, *range(2, 2 + rank))
    return [dw, follow("reduce_sum", dy, axes=axes, keepdims=False)]


@dataclass(frozen=True)
class _Example:
    """Shapes of a two-dimensional call, from which cases of every rank are made."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    window: dict[str, Any]
    activation: str | None = None
    bias: bool = True


_EXAMPLES = (
    _Example((2, 3, 6, 5), (4, 3, 3, 3), (2, 4, 6, 5), {"padding": (1, 1, 1, 1)}),
    _Example(
        *((2, 4, 7, 6), (4, 2, 3, 2), (2, 4, 4, 6)),
        {"groups": 2, "stride": (2, 1), "padding": (0, 1, 2, 0)},
        activation="relu",
    ),
    _Example(
        *((1, 2, 8, 7), (3, 2, 2, 3), (1, 3, 6, 2)),
        {"dilation": (2, 2), "stride": (1, 2)},
        bias=False,
    ),
    _Example(
        *((2, 3, 5, 5), (3, 1, 3, 3), (2, 3, 5, 5)),
        {"groups": 3, "padding": (1, 1, 1, 1)},
        activation="gelu",
        bias=False,
    ),
    _Example(
        *((2, 2, 5, 7), (2, 2, 1, 1), (2, 2, 3, 3)),
        {"stride": (2, 3)},
        activation="tanh",
    ),
    _Example((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), {}, bias=False),
    _Example((0, 2, 4, 4), (2, 2, 3, 3), (0, 2, 3, 3), {"padding": (1, 1, 0, 0)}),
    _Example(
        *((1, 1, 3, 3), (2, 1, 2, 2), (1, 2, 4, 4)),
        {"padding": (2, 3, 3, 2), "stride": (2, 2)},
    ),
    _Example((1, 2, 7, 7), (2, 1, 2, 2), (1, 2, 2, 2), {"stride": (3, 3), "groups": 2}),
)


def _declare(rank: int) -> None:
    name, window = f"conv{rank}d", window_attributes(rank) | GROUPS
    forward, to_input, to_weight = [], [], []
    for e in _EXAMPLES:
        x, y, w = case_shape(e.x, rank, 3), case_shape(e.y, rank, 2), case_shape(e.w, rank, 2)
        bias = {"bias": e.bias}
        attributes, size = case_window(e.window, rank, high=1), of_rank(e.x[2:], rank, 3)
        kernel = of_rank(e.w[2:], rank, 2)
        operands = (x, w, str(e.w[0])) if e.bias else (x, w)
        forward.append(Case(operands, {**attributes, **bias, "activation": e.activation}))
        to_input.append(Case((y, w), {**attributes, "size": size}, ()))
        to_weight.append(Case((x, y), {**attributes, **bias, "kernel": kernel}, ()))
    shape = ", ".join(f"k{dim}" for dim in spatial_dims(rank))
    define(
        name=name,
        half=True,
        epilogue=True,
        inputs=("x", "w", "b?"),
        signature=partial(_signature, rank),
        reference=convolve,
        attributes=window | {"bias": Attribute("bool", True), "activation": ACTIVATION},
        gradient=partial(_conv_grad, rank),
        localize=partial(localize, rank),
        lower=partial(_lower, rank),
        flops_per_point=2,
        forms=laws_convolution.CONV2D_FORMS if rank == 2 else (),
        constants=(laws_convolution.IDENTITY_KERNEL,) if rank == 2 else (),
        laws=laws_convolution.CONV2D_LAWS if rank == 2 else (),
        onnx=Onnx("Conv", attributes=ONNX_WINDOW | {"activation": None}, implied=("bias",)),
        cases=tuple(forward),
        doc=f"cross-correlation of x with w: (o, c/groups, {shape}), plus b, then an activation",
    )
    define(
        name=f"{name}_grad_input",
        inputs=("dy", "w"),
        outputs=("dx",),
        signature=partial(_grad_input_signature, rank),
        reference=grad_input,
        attributes=window | {"size": Attribute("ints", minimum=0)},
        localize=partial(_grad_input_localize, rank),
        flops_per_point=2,
        cases=tuple(to_input),
        doc=f"the gradient of {name} (without activation) with respect to x, of that size",
    )
    define(
        name=f"{name}_grad_weight",
        inputs=("x", "dy"),
        outputs=("dw", "db"),
        signature=partial(_grad_weight_signature, rank),
        reference=_grad_weight,
        attributes=window
        | {"kernel": Attribute("ints", minimum=1), "bias": Attribute("bool", False)},
        localize=partial(localize, rank),
        lower=partial(_grad_weight_lower, rank),
        flops_per_point=2,
        cases=tuple(to_weight),
        doc=f"the gradients of {name} (without activation) with respect to w and b",
    )


for _rank in RANKS:
    _declare(_rank)
