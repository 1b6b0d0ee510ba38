"""Transposed convolution along one to three axes: a convolution's gradient as a layer.

Dims are those of the convolution that it transposes: n; g co the channels of x and g ci those of y;
d h w are positions of x, through which y has a halo; kd kh kw. A bias is added once all parts of y
are there, so with one, splits of co, d, h and w are lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.dims import Affine, Kind, Operand, Product, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Node
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_count, need_lengths, need_rank
from soapstone.ir.ops.signatures import along, finish
from soapstone.ir.ops.windows.convolution import GROUPS, ChannelAxes, filters, grad_input, image
from soapstone.ir.ops.windows.window import (
    ONNX_WINDOW,
    Window,
    case_shape,
    case_window,
    local_padding,
    of_rank,
    spatial_dims,
    window_attributes,
)
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec


def transposed_windows(
    attributes: Attributes, count: Sequence[int], kernel: Sequence[int]
) -> list[Window]:
    """Return the windows of the transposed convolution, of `count` positions along each axis."""
    rank = len(kernel)
    padding, extra = attributes["padding"], attributes["output_padding"]
    windows = []
    for axis, dim in enumerate(spatial_dims(rank)):
        low, high = padding[axis], padding[axis + rank]
        stride, dilation = attributes["stride"][axis], attributes["dilation"][axis]
        span = (kernel[axis] - 1) * dilation + 1
        size = (count[axis] - 1) * stride + span - low - high + extra[axis]
        # The positions added at the end are in no window.
        windows.append(Window(dim, size, kernel[axis], stride, low, high - extra[axis], dilation))
    return windows


def within_strides(attributes: Attributes) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return attributes that add less than a stride along each axis, and how many zeros follow.

    What is added takes first what padding cut off. Behind that are zeros, which a bias is added to.
    """
    padding, extra = list(attributes["padding"]), list(attributes["output_padding"])
    zeros = [0] * len(extra)
    for axis, stride in enumerate(attributes["stride"]):
        high = axis + len(extra)
        if extra[axis] >= stride:
            kept = min(extra[axis], padding[high])
            padding[high] -= kept
            extra[axis] -= kept
        if extra[axis] >= stride:
            zeros[axis], extra[axis] = extra[axis], 0
    window = {"padding": tuple(padding), "output_padding": tuple(extra)}
    return {**attributes, **window}, tuple(zeros)


def _signature(rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 2 + attributes["bias"])
    need_lengths(attributes, output_padding=rank)
    need_rank(inputs, 0, image(rank, "co"))
    need_rank(inputs, 1, filters(rank))
    axes = ChannelAxes(rank, inputs, attributes)
    x, w = inputs[:2]
    n = along(axes.table, "n", x.shape[0], "input 0")
    given = axes.channels("co", x.shape[1], "input 0")
    weights = axes.weights(w.shape, "input 1")
    positions = axes.positions(x.shape[2:], "input 0")
    windows = transposed_windows(attributes, x.shape[2:], w.shape[2:])
    extra, dilations = attributes["output_padding"], attributes["dilation"]
    for window, more, dilation in zip(windows, extra, dilations):
        if more >= max(window.stride, dilation):
            raise ShapeError(
                f"dim {window.dim}: output_padding {more} found, less than the stride"
                f" {window.stride} or the dilation {dilation} needed"
            )
        if window.size < 0 or window.kernel < 1:
            raise ShapeError(
                f"dim {window.dim}: an output of {window.size} positions found, 0 or more needed"
            )
    made = Product(("g", "ci"), (axes.groups, w.shape[1]))
    operands = [Operand((n, given, *positions)), weights]
    kinds = {}
    if attributes["bias"]:
        need_rank(inputs, 2, "ci")
        operands.append(Operand((axes.channels("ci", inputs[2].shape[0], "input 2"),)))
        kinds = dict.fromkeys(("co", *spatial_dims(rank)), Kind.LOWERED)
    y = Operand((n, made, *(_written(window) for window in windows)))
    return finish(axes.table, operands, [y], [x.dtype], kinds)


def _written(window: Window) -> Affine:
    """Return the output's axis; an input without positions leaves nothing but padding."""
    if window.positions < 1:
        return Affine(window.dim, window.size, window.stride, -window.low, window.span)
    return window.written()


def _size(attributes: Attributes, x: Sequence[int], kernel: Sequence[int]) -> tuple[int, ...]:
    return tuple(window.size for window in transposed_windows(attributes, x, kernel))


def _conv_transpose(attributes: Attributes, x: Array, w: Array, *bias: Array) -> Array:
    size = _size(attributes, x.shape[2:], w.shape[2:])
    y = grad_input({**attributes, "size": size}, x, w)
    return y + bias[0].reshape(-1, *(1,) * len(size)) if attributes["bias"] else y


def _localize(rank: int, attributes: Attributes, tile: Tile) -> Attributes:
    names = spatial_dims(rank)
    kernel = [tile.size(f"k{dim}") for dim in names]
    box = tile.outputs[0]
    local = {
        **attributes,
        "padding": local_padding(attributes, tile, box, kernel),
        "output_padding": (0,) * rank,
        "groups": max(1, tile.size("g")),
    }
    whole = _size(local, [tile.size(dim) for dim in names], kernel)
    rest = ((hi - lo) - size for lo, hi, size in zip(box[0][2:], box[1][2:], whole))
    return {**local, "output_padding": tuple(int(extent) for extent in rest)}


def _lower(rank: int, emit: Emitter, node: Node) -> Sequence[str]:
    x, w, *bias = node.inputs
    plain = {**node.attributes, "bias": False}
    y = emit(node.operator, x, w, **plain)
    names = ("n", "ci" if node.attributes["groups"] == 1 else "g", *("",) * rank)
    follow = emit.renamed({f"d{axis}": name for axis, name in enumerate(names)})
    shape = (*emit.spec(bias[0]).shape, *(1,) * rank)
    return [follow("add", y, emit("reshape", bias[0], shape=shape))]


def _gradient(rank: int, g: GradientContext) -> Sequence[str | None]:
    x, w, *bias = g.inputs
    groups, extra = g.attributes["groups"], g.attributes["output_padding"]
    window = {name: g.attributes[name] for name in window_attributes(rank) | GROUPS}
    dy = g.grad()
    names = ("n", "ci" if groups == 1 else "g", *("",) * rank)
    follow = g.emit.renamed({f"d{axis}": name for axis, name in enumerate(names)})
    db = follow("reduce_sum", dy, axes=(0, *range(2, 2 + rank)), keepdims=False)
    # A convolution of all of dy would have more positions than x where a stride or more is added:
    # what is added takes padding away, and is left out of dy where there is no more of it.
    padding = list(window["padding"])
    drop = [0] * rank
    for axis, (more, step) in enumerate(zip(extra, g.attributes["stride"])):
        if more >= step:
            drop[axis] = max(more - padding[axis + rank], 0)
            padding[axis + rank] = max(padding[axis + rank] - more, 0)
    window["padding"] = tuple(padding)
    if any(drop):
        shape = g.spec(dy).shape
        stops = (*shape[:2], *(extent - less for extent, less in zip(shape[2:], drop)))
        starts, steps = (0,) * len(shape), (1,) * len(shape)
        dy = follow("slice", dy, starts=starts, stops=stops, steps=steps)
    dx = g.emit(f"conv{rank}d", dy, w, bias=False, **window)
    kernel = g.spec(w).shape[2:]
    dw = g.emit(f"conv{rank}d_grad_weight", dy, x, kernel=kernel, **window)
    return [dx, dw, db][: 2 + len(bias)]


_WINDOWS: tuple[tuple[str, str, str | None, dict[str, Any]], ...] = (
    ("2 4 3 3", "4 3 3 2", "3", {"padding": (1, 0, 1, 1), "stride": (2, 2)}),
    ("2 4 3 2", "4 2 2 3", "4", {"groups": 2, "stride": (3, 2), "output_padding": (2, 1)}),
    ("1 2 4 3", "2 3 2 2", None, {"dilation": (2, 3), "padding": (0, 1, 2, 0)}),
    ("1 3 3 3", "3 1 2 2", "3", {"groups": 3, "dilation": (2, 2), "output_padding": (1, 1)}),
    (
        *("1 2 3 2", "2 2 3 3", "2"),
        {"dilation": (2, 3), "padding": (1, 1, 1, 1), "output_padding": (1, 2)},
    ),
    ("1 1 1 1", "1 1 1 1", None, {}),
    ("0 2 3 3", "2 2 3 3", "2", {"stride": (2, 1)}),
)


def _case(rank: int, number: int) -> Case:
    """Return a case of the rank, made from one of two dims: without h, or with d before."""
    x, w, bias, window = _WINDOWS[number]

    extents = [[int(extent) for extent in shape.split()] for shape in (x, w)]
    attributes = {
        **case_window(window, rank, low=1),
        "output_padding": of_rank(window.get("output_padding", (0, 0)), rank, 1),
        "bias": bias is not None,
    }
    shapes = (case_shape(shape, rank, 2) for shape in extents)
    return Case((*shapes, *(() if bias is None else (bias,))), attributes)


def _declare(rank: int) -> None:
    shape = ", ".join(f"k{dim}" for dim in spatial_dims(rank))
    define(
        name=f"conv_transpose{rank}d",
        half=True,
        inputs=("x", "w", "b?"),
        signature=partial(_signature, rank),
        reference=_conv_transpose,
        attributes=window_attributes(rank)
        | GROUPS
        | {
            "output_padding": Attribute("ints", (0,) * rank, minimum=0),
            "bias": Attribute("bool", True),
        },
        gradient=partial(_gradient, rank),
        localize=partial(_localize, rank),
        lower=partial(_lower, rank),
        flops_per_point=2,
        onnx=Onnx("ConvTranspose", attributes=ONNX_WINDOW, implied=("bias",)),
        layer=None,
        cases=tuple(_case(rank, number) for number in range(len(_WINDOWS))),
        doc=f"the transpose of conv{rank}d with w: (c, o/groups, {shape}), plus b",
    )


for _rank in (1, 2, 3):
    _declare(_rank)
