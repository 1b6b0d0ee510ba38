"""Maximum and average pooling along one, two or three axes, and their gradients.

Dims: n c; d h w are output positions (h w of an image, w of a sequence), through which the input
has a halo; kd kh kw. With `ceil_mode` a last window may end past the padding, if it starts before
its end; positions past the padding count in no average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine, Ints, Kind, Operand, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_float, need_lengths, need_rank
from soapstone.ir.ops.reduction.folds import smallest
from soapstone.ir.ops.signatures import DimTable, finish, named
from soapstone.ir.ops.windows import laws_pooling
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

BYTE_POSITIONS = 256  # windows of more positions have indices of four bytes
_INDICES = {"indices": Attribute("bool", False)}
_SIZE = {"size": Attribute("ints", minimum=0)}


def pool_attributes(rank: int) -> dict[str, Attribute]:
    """Return the attributes of windows of a pooling operator."""
    window = window_attributes(rank) | {"ceil_mode": Attribute("bool", False)}
    return {"kernel": Attribute("ints", minimum=1)} | window


def index_type(kernel: Sequence[int]) -> str:
    """Return the type of positions in a window."""
    return "uint8" if math.prod(kernel) <= BYTE_POSITIONS else "int32"


def _windows(table: DimTable, attributes: Attributes, size: Sequence[int]) -> list[Window]:
    """Return the windows, and record their dims and the kernel's.

    Raises:
        ShapeError: padding as wide as the window, which could then hold no element.
    """
    windows = windows_of(attributes, size, attributes["kernel"])
    for window in windows:
        if max(window.low, window.high) >= window.span:
            raise ShapeError(
                f"dim {window.dim}: padding {max(window.low, window.high)} found, less than the"
                f" window's {window.span} needed"
            )
        if window.size < 1:
            raise ShapeError(f"dim {window.dim}: the input has {window.size} positions; 1 needed")
        table.add(window.dim, window.count, "the windows")
    for window in windows:
        table.add(f"k{window.dim}", window.kernel, "attribute kernel", Kind.WHOLE)
    return windows


def _image(rank: int) -> str:
    return " ".join(("n", "c", *spatial_dims(rank)))


def pool_signature(
    rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes, *, real: bool = True
) -> Signature:
    """Return the signature of pooled windows, with the attribute `indices` also of positions."""
    need_window(attributes, rank, kernel=rank)
    need_rank(inputs, 0, _image(rank))
    if real:
        need_float(inputs, 0)
    table = DimTable()
    lead = named(table, "nc", inputs[0].shape, "input 0").axes
    windows = _windows(table, attributes, inputs[0].shape[2:])
    y = Operand((*lead, *(Affine(window.dim, window.count) for window in windows)))
    outputs, types = [y], [inputs[0].dtype]
    if attributes.get("indices"):
        outputs, types = [y, y], [*types, index_type(attributes["kernel"])]
    x = Operand((*lead, *(window.read() for window in windows)))
    return finish(table, [x], outputs, types)


def pool_grad_signature(
    rank: int,
    inputs: tuple[TensorSpec, ...],
    attributes: Attributes,
    size: Sequence[int],
    pooled: int,
) -> Signature:
    """Return the signature of dx of a size, from `pooled` inputs like y and then perhaps x."""
    need_window(attributes, rank, kernel=rank)
    need_float(inputs, 0)
    table = DimTable()
    operands = []
    for position, spec in enumerate(inputs):
        need_rank(inputs, position, _image(rank))
        names = _image(rank).split()[: None if position < pooled else 2]
        operands.append(named(table, names, spec.shape, f"input {position}"))
    windows = _windows(table, attributes, size)
    dx = Operand((*operands[0].axes[:2], *(window.written() for window in windows)))
    return finish(
        table, [*operands[:pooled], *[dx] * (len(inputs) - pooled)], [dx], [inputs[0].dtype]
    )


def _grad_signature(rank: int, inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_lengths(attributes, size=rank)
    needed = index_type(attributes["kernel"])
    if len(inputs) == 2 and inputs[1].dtype != needed:
        raise ShapeError(f"input 1 has type {inputs[1].dtype}; {needed} needed")
    return pool_grad_signature(rank, inputs, attributes, attributes["size"], len(inputs))


def _local(attributes: Attributes, tile: Tile, box: tuple[Ints, Ints]) -> dict[str, Any]:
    """Return the attributes of a tile, which is an image of its own.

    Its box ends where the image ends, so local padding, `origin` and `full_size` give the averages
    at the borders the divisors that they have in the whole image. `excess` is how much of the
    padding at each end lies past the image's own.
    """
    size = box_shape(box)[2:]
    padding = local_padding(attributes, tile, box, attributes["kernel"])
    rank = len(size)
    excess = []
    for axis, window in enumerate(windows_of(attributes, (0,) * rank, attributes["kernel"])):
        first, last = tile.intervals[window.dim]
        ends = (last - 1) * window.stride - window.low + window.span
        whole = tile.input_shapes[0] if "size" not in attributes else tile.output_shapes[0]
        beyond = max(0, ends - whole[2 + axis] - window.high) if last > first else 0
        excess.append(beyond)
    local = {"padding": padding, "ceil_mode": False, "excess": tuple(excess)}
    return {**attributes, **local, "origin": (0,) * rank, "full_size": size}


def localize_pool(attributes: Attributes, tile: Tile) -> Attributes:
    """Return the attributes of a tile of pooled windows."""
    return _local(attributes, tile, tile.inputs[0])


def _grad_localize(attributes: Attributes, tile: Tile) -> Attributes:
    local = _local(attributes, tile, tile.outputs[0])
    return {**local, "size": local["full_size"]}


def window_counts(
    attributes: Attributes, size: Sequence[int], count: Sequence[int], include_pad: bool
) -> list[Array]:
    """Return how many positions of each window are inside x, or its padding, along each axis."""
    return [held.sum(axis=1) for held in _held(attributes, tuple(size), tuple(count), include_pad)]


def _held(
    attributes: Attributes, size: Sequence[int], count: Sequence[int], include_pad: bool
) -> list[Array]:
    """Return which positions of each window are inside, along each axis: (count, kernel)."""
    kernel = attributes["kernel"]
    excess = attributes.get("excess", (0,) * len(kernel))
    result = []
    for window, n, beyond in zip(windows_of(attributes, size, kernel), count, excess):
        at = np.arange(n)[:, None] * window.stride - window.low
        at = at + np.arange(window.kernel) * window.dilation
        end = window.size + (window.high - beyond if include_pad else 0)
        result.append((at < end) & ((at >= 0) | include_pad))
    return result


def _inside(attributes: Attributes, size: Sequence[int], count: Sequence[int]) -> Array:
    """Return which window positions hold an element: (*count, *kernel)."""
    rank = len(count)
    axes = (
        np.expand_dims(held, tuple(a for a in range(2 * rank) if a % rank != axis))
        for axis, held in enumerate(_held(attributes, size, count, False))
    )
    return np.asarray(reduce(np.logical_and, axes))


def _max_pool(attributes: Attributes, x: Array) -> Array | tuple[Array, Array]:
    count = positions_of(attributes, x.shape[2:], attributes["kernel"])
    windows = gather(x, attributes, attributes["kernel"], count, smallest(x.dtype))
    flat = windows.reshape(*windows.shape[: x.ndim], math.prod(attributes["kernel"]))
    y = np.asarray(flat.max(axis=-1))
    if not attributes["indices"]:
        return y
    # Padding never wins, not even against an element of -inf.
    inside = _inside(attributes, x.shape[2:], count).reshape(flat.shape[2:])
    winners = ((flat == y[..., None]) | (flat != flat)) & inside
    return y, winners.argmax(axis=-1).astype(index_type(attributes["kernel"]))


def _max_pool_grad(attributes: Attributes, dy: Array, index: Array) -> Array:
    kernel = attributes["kernel"]
    chosen = index[..., None] == np.arange(math.prod(kernel))
    parts = np.asarray(np.where(chosen, dy[..., None], dy.dtype.type(0)))
    return scatter(parts.reshape(*dy.shape, *kernel), attributes, attributes["size"])


def _divisor(attributes: Attributes, size: Sequence[int], count: Sequence[int]) -> Array:
    """Return the number of elements each average is over: (*count,)."""
    counts = window_counts(attributes, size, count, attributes["include_pad"])
    return np.asarray(np.maximum(1, reduce(np.multiply.outer, counts)))


def _avg_pool(attributes: Attributes, x: Array) -> Array:
    count = positions_of(attributes, x.shape[2:], attributes["kernel"])
    windows = gather(x, attributes, attributes["kernel"], count)
    divisor = _divisor(attributes, x.shape[2:], count).astype(x.dtype)
    return np.asarray(windows.sum(axis=tuple(range(x.ndim, windows.ndim))) / divisor)


def _avg_pool_grad(attributes: Attributes, dy: Array) -> Array:
    kernel = attributes["kernel"]
    divisor = _divisor(attributes, attributes["size"], dy.shape[2:]).astype(dy.dtype)
    share = (dy / divisor).reshape(*dy.shape, *(1,) * len(kernel))
    parts = np.broadcast_to(share, (*dy.shape, *kernel))
    return scatter(parts, attributes, attributes["size"])


def pool_window(rank: int, g: GradientContext) -> dict[str, Any]:
    """Return the attributes of windows that a gradient takes over, and the size of x."""
    size = g.spec(g.inputs[0]).shape[2:]
    return {name: g.attributes[name] for name in pool_attributes(rank)} | {"size": size}


def _max_grad(rank: int, g: GradientContext) -> Sequence[str | None]:
    dy, attributes = g.only_grad(), dict(g.attributes) | {"indices": True}
    if g.attributes["indices"]:
        index = g.outputs[1]
    else:
        index = g.emit.all(g.node.operator, g.inputs[0], **attributes)[1]
    return [g.emit(f"max_pool{rank}d_grad", dy, index, **pool_window(rank, g))]


def _avg_grad(rank: int, g: GradientContext) -> Sequence[str | None]:
    include_pad = g.attributes["include_pad"]
    window = pool_window(rank, g)
    return [g.emit(f"avg_pool{rank}d_grad", g.grad(), include_pad=include_pad, **window)]


_HALO = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
_PLAIN = {"kernel": (2, 2), "stride": (2, 2)}
_UNEVEN = {"kernel": (2, 3), "stride": (1, 2), "padding": (0, 2, 1, 1)}
_SPARSE = {"kernel": (2, 1), "stride": (3, 2)}
_CEIL = {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 1, 1, 0), "ceil_mode": True}
_DILATED = {"kernel": (2, 3), "dilation": (2, 2), "padding": (0, 1, 1, 2)}
# The window, the input, the output, and indices that no window has in its padding.
_SHAPES: tuple[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...], int], ...] = (
    (_HALO, (2, 3, 7, 6), (2, 3, 4, 3), 4),
    (_PLAIN, (2, 3, 4, 6), (2, 3, 2, 3), 0),
    (_PLAIN, (1, 2, 5, 7), (1, 2, 2, 3), 0),
    (_UNEVEN, (1, 2, 5, 7), (1, 2, 5, 4), 2),
    (_SPARSE, (1, 2, 7, 6), (1, 2, 2, 3), 0),
    (_PLAIN, (0, 2, 4, 4), (0, 2, 2, 2), 0),
    ({"kernel": (1, 1)}, (1, 1, 1, 1), (1, 1, 1, 1), 0),
    (_CEIL, (1, 2, 6, 6), (1, 2, 4, 3), 3),
    (_DILATED, (2, 2, 5, 6), (2, 2, 4, 5), 1),
)


def _case(rank: int, window: dict[str, Any]) -> dict[str, Any]:
    return {**case_window(window, rank), "kernel": of_rank(window["kernel"], rank, 2)}


def _declare(rank: int) -> None:
    window = pool_attributes(rank)
    maxima, to_maxima, averages, to_averages = [], [], [], []
    for number, (example, shape, made, inside) in enumerate(_SHAPES):
        x, y, attributes = (
            case_shape(shape, rank, 4),
            case_shape(made, rank, 2),
            _case(rank, example),
        )
        size = {"size": of_rank(shape[2:], rank, 4)}
        # A position that lies inside x in every window: its row and column, at any depth.
        at = inside if rank > 1 else inside % example["kernel"][1]
        maxima.append(Case((x,), {**attributes, "indices": bool(number % 2)}))
        index = f"uint8 {y} >={at} <{at + 1}"
        to_maxima.append(Case((y, index), {**attributes, **size}, ()))
        both = (True, False) if example.get("padding") else (number % 2 == 0,)
        for include_pad in both:
            whether = {"include_pad": include_pad}
            averages.append(Case((x,), {**attributes, **whether}))
            to_averages.append(Case((y,), {**attributes, **size, **whether}, ()))
    for dtype, limits in (("uint8", "<256"), ("int8", ">=-128 <128")):
        x = f"{dtype} {case_shape((2, 3, 7, 6), rank, 4)} {limits}"
        maxima.append(Case((x,), _case(rank, _HALO)))
    maximum, average = f"max_pool{rank}d", f"avg_pool{rank}d"
    define(
        name=maximum,
        inputs=("x",),
        outputs=("y", "index"),
        signature=partial(pool_signature, rank, real=False),
        reference=_max_pool,
        attributes=window | _INDICES,
        gradient=partial(_max_grad, rank),
        localize=localize_pool,
        chooses=True,
        forms=laws_pooling.MAX_POOL2D_FORMS if rank == 2 else (),
        laws=laws_pooling.MAX_POOL2D_LAWS if rank == 2 else (),
        onnx=Onnx("MaxPool", attributes=ONNX_WINDOW, implied=("indices",), outputs=1),
        layer=None,
        cases=tuple(maxima),
        doc="the maximum of each window; index: its first position in the window, row by row",
    )
    define(
        name=f"{maximum}_grad",
        inputs=("dy", "index"),
        outputs=("dx",),
        signature=partial(_grad_signature, rank),
        reference=_max_pool_grad,
        attributes=window | _SIZE,
        localize=_grad_localize,
        cases=tuple(to_maxima),
        doc="dy of each window, added to the element that was its maximum",
    )
    include = {"include_pad": Attribute("bool", True)}
    define(
        name=average,
        inputs=("x",),
        signature=partial(pool_signature, rank),
        reference=_avg_pool,
        attributes=window | include,
        gradient=partial(_avg_grad, rank),
        localize=localize_pool,
        forms=laws_pooling.AVG_POOL2D_FORMS if rank == 2 else (),
        constants=(laws_pooling.POOL_KERNEL,) if rank == 2 else (),
        laws=laws_pooling.AVG_POOL2D_LAWS if rank == 2 else (),
        onnx=Onnx("AveragePool", attributes=ONNX_WINDOW | {"include_pad": "count_include_pad"}),
        layer=None,
        cases=tuple(averages),
        doc="the average of each window, over all its positions or only those inside x",
    )
    define(
        name=f"{average}_grad",
        inputs=("dy",),
        outputs=("dx",),
        signature=partial(_grad_signature, rank),
        reference=_avg_pool_grad,
        attributes=window | _SIZE | include,
        localize=_grad_localize,
        cases=tuple(to_averages),
        doc="dy of each window, shared equally among the elements it averaged",
    )


for _rank in (1, 2, 3):
    _declare(_rank)
