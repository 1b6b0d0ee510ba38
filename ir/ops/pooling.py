"""Maximum and average pooling over h and w, and their gradients.

Dims: n c; h w are output positions, through which the input has a halo; kh kw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine, Axis, DimTable, Ints, Kind, Operand, Signature, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float, need_lengths, need_rank
from soapstone.ir.ops.window import SPATIAL, Window, gather, local_padding, scatter, windows_of
from soapstone.ir.spec import Attribute, Attributes, Case, GradientContext, OpSpec, Tile, register
from soapstone.ir.tensor import Array, TensorSpec

_WINDOW = {
    "kernel": Attribute("ints", minimum=1),
    "stride": Attribute("ints", (1, 1), minimum=1),
    "padding": Attribute("ints", (0, 0, 0, 0), minimum=0),
}
_SIZE = {"size": Attribute("ints", minimum=0)}


def _windows(table: DimTable, attributes: Attributes, size: Sequence[int]) -> list[Window]:
    """Return the windows, and record h, w, kh, kw.

    Raises:
        ShapeError: padding as wide as the window, which could then hold no element.
    """
    windows = windows_of(attributes, size, attributes["kernel"])
    for window in windows:
        if max(window.low, window.high) >= window.kernel:
            raise ShapeError(
                f"dim {window.dim}: padding {max(window.low, window.high)} found, less than the"
                f" kernel's {window.kernel} needed"
            )
        if window.size < 1:
            raise ShapeError(f"dim {window.dim}: the input has {window.size} positions; 1 needed")
        table.add(window.dim, window.count, "the windows")
    for window in windows:
        table.add(f"k{window.dim}", window.kernel, "attribute kernel", Kind.WHOLE)
    return windows


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_lengths(attributes, kernel=2, stride=2, padding=4)
    need_rank(inputs, 0, "n c h w")
    need_float(inputs, 0)
    table = DimTable()
    lead: list[Axis] = [along(table, d, e, "input 0") for d, e in zip("nc", inputs[0].shape)]
    windows = _windows(table, attributes, inputs[0].shape[2:])
    y = Operand((*lead, *(Affine(window.dim, window.count) for window in windows)))
    outputs, types = [y], [inputs[0].dtype]
    if attributes.get("indices"):
        if attributes["kernel"][0] * attributes["kernel"][1] > 256:
            raise ShapeError(
                f"dims kh and kw: a window of {attributes['kernel']} found; at most 256 positions"
                " have indices"
            )
        outputs, types = [y, y], [inputs[0].dtype, "uint8"]
    x = Operand((*lead, *(window.read() for window in windows)))
    return finish(table, [x], outputs, types)


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_lengths(attributes, kernel=2, stride=2, padding=4, size=2)
    need_float(inputs, 0)
    table = DimTable()
    for position in range(len(inputs)):
        need_rank(inputs, position, "n c h w")
    if len(inputs) == 2 and inputs[1].dtype != "uint8":
        raise ShapeError(f"input 1 has type {inputs[1].dtype}; uint8 needed")
    lead: list[Axis] = [along(table, d, e, "input 0") for d, e in zip("nc", inputs[0].shape)]
    windows = _windows(table, attributes, attributes["size"])
    operands = []
    for position, spec in enumerate(inputs):
        names, where = ("n", "c", *SPATIAL), f"input {position}"
        axes = (along(table, d, e, where) for d, e in zip(names, spec.shape))
        operands.append(Operand(tuple(axes)))
    dx = Operand((*lead, *(window.written() for window in windows)))
    return finish(table, operands, [dx], [inputs[0].dtype])


def _local(attributes: Attributes, tile: Tile, box: tuple[Ints, Ints]) -> dict[str, Any]:
    """Return the attributes of a tile, which is an image of its own.

    Its box ends where the image ends, so local padding, `origin` and `full_size` give the averages
    at the borders the divisors that they have in the whole image.
    """
    size = tuple(int(extent) for extent in (box[1] - box[0])[2:])
    padding = local_padding(attributes, tile, box, attributes["kernel"])
    return {**attributes, "padding": padding, "origin": (0, 0), "full_size": size}


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    return _local(attributes, tile, tile.inputs[0])


def _grad_localize(attributes: Attributes, tile: Tile) -> Attributes:
    local = _local(attributes, tile, tile.outputs[0])
    return {**local, "size": local["full_size"]}


def _count(attributes: Attributes, size: Sequence[int]) -> list[int]:
    return [
        (window.size + window.low + window.high - window.span) // window.stride + 1
        for window in windows_of(attributes, size, attributes["kernel"])
    ]


def _inside(attributes: Attributes, size: Sequence[int], count: Sequence[int]) -> Array:
    """Return which window positions hold an element: (h, w, kh, kw)."""
    inside: Array = gather(np.ones((1, 1, *size), bool), attributes, attributes["kernel"], count)
    return np.asarray(inside[0, 0])


def _max_pool2d(attributes: Attributes, x: Array) -> Array | tuple[Array, Array]:
    count = _count(attributes, x.shape[2:])
    windows = gather(x, attributes, attributes["kernel"], count, -np.inf)
    flat = windows.reshape(*windows.shape[:4], windows.shape[4] * windows.shape[5])
    y = np.asarray(flat.max(axis=-1))
    if not attributes["indices"]:
        return y
    # Padding never wins, not even against an element of -inf.
    inside = _inside(attributes, x.shape[2:], count).reshape(flat.shape[2:])
    winners = ((flat == y[..., None]) | np.isnan(flat)) & inside
    return y, winners.argmax(axis=-1).astype(np.uint8)


def _max_pool2d_grad(attributes: Attributes, dy: Array, index: Array) -> Array:
    kh, kw = attributes["kernel"]
    chosen = index[..., None] == np.arange(kh * kw)
    parts = np.asarray(np.where(chosen, dy[..., None], dy.dtype.type(0)))
    parts = parts.reshape(*dy.shape, kh, kw)
    return scatter(parts, attributes, attributes["size"])


def _divisor(attributes: Attributes, size: Sequence[int], count: Sequence[int]) -> Array:
    """Return the number of elements each average is over: (h, w)."""
    kh, kw = attributes["kernel"]
    if attributes["include_pad"]:
        return np.full(tuple(count), kh * kw)
    return np.asarray(_inside(attributes, size, count).sum(axis=(2, 3)))


def _avg_pool2d(attributes: Attributes, x: Array) -> Array:
    count = _count(attributes, x.shape[2:])
    windows = gather(x, attributes, attributes["kernel"], count)
    divisor = _divisor(attributes, x.shape[2:], count).astype(x.dtype)
    return np.asarray(windows.sum(axis=(4, 5)) / divisor)


def _avg_pool2d_grad(attributes: Attributes, dy: Array) -> Array:
    divisor = _divisor(attributes, attributes["size"], dy.shape[2:]).astype(dy.dtype)
    share = (dy / divisor)[..., None, None]
    parts = np.broadcast_to(share, (*dy.shape, *attributes["kernel"]))
    return scatter(parts, attributes, attributes["size"])


def _pick(g: GradientContext) -> dict[str, Any]:
    size = g.spec(g.inputs[0]).shape[2:]
    return {name: g.attributes[name] for name in _WINDOW} | {"size": size}


def _max_grad(g: GradientContext) -> Sequence[str | None]:
    dy, attributes = g.only_grad(), dict(g.attributes) | {"indices": True}
    if g.attributes["indices"]:
        index = g.outputs[1]
    else:
        index = g.emit.all("max_pool2d", g.inputs[0], **attributes)[1]
    return [g.emit("max_pool2d_grad", dy, index, **_pick(g))]


def _avg_grad(g: GradientContext) -> Sequence[str | None]:
    include_pad = g.attributes["include_pad"]
    return [g.emit("avg_pool2d_grad", g.grad(), include_pad=include_pad, **_pick(g))]


def _window(**attributes: Any) -> dict[str, Any]:
    return dict(attributes)


_HALO = _window(kernel=(3, 3), stride=(2, 2), padding=(1, 1, 1, 1))
_PLAIN = _window(kernel=(2, 2), stride=(2, 2))
_UNEVEN = _window(kernel=(2, 3), stride=(1, 2), padding=(0, 2, 1, 1))
_SPARSE = _window(kernel=(2, 1), stride=(3, 2))
# The window, the input, the output, and indices that no window has in its padding.
_SHAPES = (
    (_HALO, "2 3 7 6", "2 3 4 3", ">=4 <6"),
    (_PLAIN, "2 3 4 6", "2 3 2 3", "<4"),
    (_PLAIN, "1 2 5 7", "1 2 2 3", "<4"),
    (_UNEVEN, "1 2 5 7", "1 2 5 4", ">=2 <3"),
    (_SPARSE, "1 2 7 6", "1 2 2 3", "<2"),
    (_PLAIN, "0 2 4 4", "0 2 2 2", "<4"),
    (_window(kernel=(1, 1)), "1 1 1 1", "1 1 1 1", "<1"),
)


def _size(shape: str) -> dict[str, Any]:
    return {"size": tuple(int(extent) for extent in shape.split()[2:])}


register(
    OpSpec(
        name="max_pool2d",
        inputs=("x",),
        outputs=("y", "index"),
        signature=_signature,
        reference=_max_pool2d,
        attributes=_WINDOW | {"indices": Attribute("bool", False)},
        gradient=_max_grad,
        localize=_localize,
        onnx="MaxPool",
        laws=("max_pool2d(relu(x)) = relu(max_pool2d(x))", "commutes with concat over channels"),
        cases=tuple(
            Case((shape,), {**window, "indices": bool(number % 2)})
            for number, (window, shape, *_) in enumerate(_SHAPES)
        ),
        doc="the maximum of each window; index: its first position in the window, row by row",
    )
)
register(
    OpSpec(
        name="max_pool2d_grad",
        inputs=("dy", "index"),
        outputs=("dx",),
        signature=_grad_signature,
        reference=_max_pool2d_grad,
        attributes=_WINDOW | _SIZE,
        localize=_grad_localize,
        cases=tuple(
            Case((made, f"uint8 {made} {indices}"), {**window, **_size(shape)}, ())
            for window, shape, made, indices in _SHAPES
        ),
        doc="dy of each window, added to the element that was its maximum",
    )
)
register(
    OpSpec(
        name="avg_pool2d",
        inputs=("x",),
        signature=_signature,
        reference=_avg_pool2d,
        attributes=_WINDOW | {"include_pad": Attribute("bool", True)},
        gradient=_avg_grad,
        localize=_localize,
        onnx="AveragePool",
        laws=("linear in x", "commutes with concat over channels"),
        cases=tuple(
            Case((shape,), {**window, "include_pad": include_pad})
            for number, (window, shape, *_) in enumerate(_SHAPES)
            for include_pad in ((True, False) if window.get("padding") else (number % 2 == 0,))
        ),
        doc="the average of each window, over all its positions or only those inside x",
    )
)
register(
    OpSpec(
        name="avg_pool2d_grad",
        inputs=("dy",),
        outputs=("dx",),
        signature=_grad_signature,
        reference=_avg_pool2d_grad,
        attributes=_WINDOW | _SIZE | {"include_pad": Attribute("bool", True)},
        localize=_grad_localize,
        cases=tuple(
            Case((made,), {**window, **_size(shape), "include_pad": include_pad}, ())
            for number, (window, shape, made, _) in enumerate(_SHAPES)
            for include_pad in ((True, False) if window.get("padding") else (number % 2 == 0,))
        ),
        doc="dy of each window, shared equally among the elements it averaged",
    )
)
