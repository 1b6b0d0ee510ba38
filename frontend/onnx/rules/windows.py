"""ONNX convolutions and pooling, and what else looks through windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.values import PLAIN, STRIDED, Value, rule
from soapstone.ir.ops.windows.conv_transpose import within_strides
from soapstone.records import dataclass

_MOST = 1 << 31  # of a stride, pad, dilation or kernel
_MOST_PLACES = 1 << 22  # of what MaxUnpool makes larger


@dataclass(frozen=True)
class Window:
    """The windows along the spatial axes of an input, as the attributes give them."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]  # before every axis, then after every axis
    ceil: bool = False

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def attributes(self) -> dict[str, Any]:
        return {"stride": self.strides, "padding": self.pads, "dilation": self.dilations}


def window(n: Call, size: Sequence[int], kernel: Sequence[int] | None) -> Window:
    """Return the windows of a node over an input of these spatial extents.

    Raises:
        OnnxError: an attribute has another number of values, or one is out of range.
    """
    rank = len(size)
    shape = n.attribute("kernel_shape")
    if shape is None and kernel is None:
        raise OnnxError("attribute 'kernel_shape' is missing")
    if kernel is not None and shape is not None and tuple(shape) != tuple(kernel):
        raise OnnxError(f"attribute 'kernel_shape' is {shape}; the weights have {tuple(kernel)}")
    extents = tuple(shape if shape is not None else kernel or ())
    strides = tuple(n.attribute("strides") or (1,) * rank)
    dilations = tuple(n.attribute("dilations") or (1,) * rank)
    pads = tuple(n.attribute("pads") or (0,) * (2 * rank))
    for name, values, count, least in (
        ("kernel_shape", extents, rank, 1),
        ("strides", strides, rank, 1),
        ("dilations", dilations, rank, 1),
        ("pads", pads, 2 * rank, -_MOST),
    ):
        if len(values) != count or any(not least <= v < _MOST for v in values):
            raise OnnxError(f"attribute {name!r} is {values}; {count} numbers needed, in range")
    auto = n.text("auto_pad", "NOTSET", ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    if auto == "VALID":
        pads = (0,) * (2 * rank)
    elif auto != "NOTSET":
        low, high = [], []
        for extent, k, stride, dilation in zip(size, extents, strides, dilations):
            span = (k - 1) * dilation + 1
            total = max(0, (-(-extent // stride) - 1) * stride + span - extent)
            less, more = total // 2, total - total // 2
            low.append(less if auto == "SAME_UPPER" else more)
            high.append(more if auto == "SAME_UPPER" else less)
        pads = (*low, *high)
    return Window(extents, strides, dilations, pads, bool(n.attribute("ceil_mode", 0)))


def _spatial(x: Value) -> tuple[int, ...]:
    if not 3 <= x.rank <= 5:
        raise UnsupportedError(f"rank {x.rank} found; 3 to 5 are supported (n c, then 1 to 3 axes)")
    return x.shape[2:]


def windowed(n: Call, x: Value, w: Value) -> dict[str, Any]:
    """Return the attributes of a convolution of x and w; padding may be negative."""
    size = _spatial(x)
    if w.rank != x.rank:
        raise OnnxError(f"weights of rank {w.rank} found; {x.rank} needed")
    windows = window(n, size, w.shape[2:])
    return windows.attributes() | {"groups": n.attribute("group", 1)}


def convolved(n: Call, x: Value, w: Value, bias: Value | None) -> Value:
    """Return a convolution with the node's attributes."""
    attributes = windowed(n, x, w)
    if any(pad < 0 for pad in attributes["padding"]):
        x, attributes["padding"] = cropped(n, x, attributes["padding"])
    inputs = (x, w) if bias is None else (x, w, bias)
    return n(f"conv{x.rank - 2}d", *inputs, bias=bias is not None, **attributes)


def cropped(n: Call, x: Value, pads: Sequence[int]) -> tuple[Value, tuple[int, ...]]:
    """Return an image without what negative pads cut, and the other pads."""
    rank = len(pads) // 2
    starts, stops = [0, 0], list(x.shape[:2])
    for axis in range(rank):
        starts.append(max(0, -pads[axis]))
        stops.append(x.shape[2 + axis] - max(0, -pads[axis + rank]))
    part = n("slice", x, starts=starts, stops=stops, steps=(1,) * x.rank)
    return part, tuple(max(0, pad) for pad in pads)


@rule("Conv", even=STRIDED)
def conv(n: Call) -> Value:
    return convolved(n, n.value(0), n.value(1), n.maybe(2))


@rule("ConvTranspose", even=PLAIN)
def conv_transpose(n: Call) -> Value:
    x, w, bias = n.value(0), n.value(1), n.maybe(2)
    size = _spatial(x)
    if w.rank != x.rank:
        raise OnnxError(f"weights of rank {w.rank} found; {x.rank} needed")
    rank = len(size)
    kernel, auto = w.shape[2:], n.attribute("auto_pad", "NOTSET")
    strides = tuple(n.attribute("strides") or (1,) * rank)
    dilations = tuple(n.attribute("dilations") or (1,) * rank)
    more = list(n.attribute("output_padding") or (0,) * rank)
    pads = list(n.attribute("pads") or (0,) * (2 * rank))
    wanted = n.attribute("output_shape")
    lists = ((strides, 1), (dilations, 1), (more, 0), (pads, 0))
    if any(
        len(v) != (2 * rank if v is pads else rank) or any(not least <= e < _MOST for e in v)
        for v, least in lists
    ):
        raise OnnxError(f"an attribute does not fit {rank} spatial axes")
    if wanted is not None and len(wanted) == rank + 2:
        wanted = wanted[2:]
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [extent * stride for extent, stride in zip(size, strides)]
    if wanted is not None:
        for axis, extent in enumerate(wanted):
            span = (kernel[axis] - 1) * dilations[axis] + 1
            total = (size[axis] - 1) * strides[axis] + more[axis] + span - extent
            if total < 0:  # the result is larger than the windows reach
                more[axis] -= total
                total = 0
            less, most = total // 2, total - total // 2
            if auto == "SAME_UPPER":
                pads[axis], pads[axis + rank] = less, most
            else:
                pads[axis], pads[axis + rank] = most, less
    elif auto == "VALID":
        pads = [0] * (2 * rank)
    attributes = {
        "stride": strides,
        "padding": tuple(pads),
        "dilation": dilations,
        "groups": n.attribute("group", 1),
        "output_padding": tuple(more),
    }
    attributes, zeros = within_strides(attributes)
    if any(zeros):
        y = n(f"conv_transpose{rank}d", x, w, bias=False, **attributes)
        none = (0,) * (rank + 2)
        y = n("pad", y, low=none, high=(0, 0, *zeros), interior=none)
        if bias is not None:
            y = n("add", y, n.reshape(bias, (bias.spec.size, *(1,) * rank)))
        return y
    inputs = (x, w) if bias is None else (x, w, bias)
    return n(f"conv_transpose{rank}d", *inputs, bias=bias is not None, **attributes)


@rule("MaxPool", even=STRIDED)
def max_pool(n: Call) -> Any:
    return max_pooled(n, n.value())


def max_pooled(n: Call, x: Value) -> list[Value]:
    """Return the maxima of x's windows by the node's attributes, and their places if wanted."""
    if n.wants(1):
        n.importer.uneven()  # places go by the extents of the whole input
    size = _spatial(x)
    windows = window(n, size, None)
    attributes = {"kernel": windows.kernel, "ceil_mode": windows.ceil, **windows.attributes()}
    none = _none_fit(n, x, windows)
    if none is not None:
        return [none, n.cast(none, "int64")] if n.wants(1) else [none]
    own = x.spec.is_float or x.dtype in BYTES
    name, real = f"max_pool{windows.rank}d", x if own else n.cast(x, "float32")
    if not n.wants(1):
        return [n.cast(n(name, real, **attributes), x.dtype)]
    y, index = n.all(name, real, indices=True, **attributes)
    return [n.cast(y, x.dtype), _flat_places(n, index, x, windows)]


def _none_fit(n: Call, x: Value, windows: Window) -> Value | None:
    """Return the empty result of a padded image that no window fits into by one step, or None."""
    spans = ((k - 1) * d + 1 for k, d in zip(windows.kernel, windows.dilations))
    counts = []
    for extent, span, stride, low, high in zip(
        x.shape[2:], spans, windows.strides, windows.pads, windows.pads[windows.rank :]
    ):
        room = extent + low + high - span
        count = (-(-room // stride) if windows.ceil else room // stride) + 1
        beyond = windows.ceil and (count - 1) * stride >= extent + low  # it sees padding alone
        counts.append(count - beyond)
    if min(counts) != 0:
        return None
    return n("full", shape=(*x.shape[:2], *counts), value=0.0, dtype=x.dtype)


def _flat_places(n: Call, index: Value, x: Value, windows: Window) -> Value:
    """Return the places of maxima in the whole input, from their places in the windows."""
    rank, size = windows.rank, x.shape[2:]
    if n.attribute("storage_order", 0):
        order = [math.prod(size[:axis]) for axis in range(rank)]
    else:
        order = [math.prod(size[axis + 1 :]) for axis in range(rank)]
    # A place in the window gives a step, a window gives its first place: both known tables.
    count = n.room(math.prod(windows.kernel))
    n.room(math.prod(index.shape))
    inside = np.stack(np.unravel_index(np.arange(count), windows.kernel))
    steps = sum(inside[a] * windows.dilations[a] * order[a] for a in range(rank))
    first = np.zeros(index.shape[2:], np.int64)
    for axis in range(rank):
        line = np.arange(index.shape[2 + axis]) * windows.strides[axis] - windows.pads[axis]
        first = first + (line * order[axis]).reshape(-1, *(1,) * (rank - 1 - axis))
    images = np.arange(x.shape[0] * x.shape[1]) * math.prod(size)
    base = first + images.reshape(*x.shape[:2], *(1,) * rank)
    table = n.known(np.asarray(steps, np.int64))
    return n("add", n("gather", table, n.cast(index, "int64"), axis=0), n.known(base))


@rule("MaxUnpool")
def max_unpool(n: Call) -> Value:
    x, ids = n.value(0), n.value(1)
    windows = window(n, _spatial(x), None)
    size = [
        (extent - 1) * stride - low - high + k
        for extent, stride, low, high, k in zip(
            x.shape[2:],
            windows.strides,
            windows.pads,
            windows.pads[windows.rank :],
            windows.kernel,
        )
    ]
    wanted = n.ints("output_shape", 2)
    shape = (*x.shape[:2], *size) if wanted is None else wanted
    if len(shape) != x.rank or any(extent < 0 for extent in shape):
        raise OnnxError(f"the result's shape would be {shape}")
    if wanted is not None and tuple(wanted[2:]) != tuple(size):
        ids = _replaced(n, ids, (*x.shape[:2], *size), tuple(wanted))
    zeros = n("full", shape=(math.prod(shape),), value=0.0, dtype=x.dtype)
    flat = n(
        "scatter_elements",
        zeros,
        n.reshape(ids, (ids.spec.size,)),
        n.reshape(x, (x.spec.size,)),
        axis=0,
        reduction="none",
    )
    return n.reshape(flat, shape)


def _replaced(n: Call, ids: Value, old: tuple[int, ...], new: tuple[int, ...]) -> Value:
    """Return flat places in one shape as flat places in another, larger one."""
    if math.prod(old) > _MOST_PLACES:
        raise UnsupportedError(f"pooled shape {old} found; {_MOST_PLACES:,} values at most")
    table = np.zeros(old, np.int64)
    for axis, extent in enumerate(old):
        line = np.arange(extent) * math.prod(new[axis + 1 :])
        table = table + line.reshape(-1, *(1,) * (len(old) - 1 - axis))
    return n("gather", n.known(table.reshape(-1)), ids, axis=0)


@rule("AveragePool", even=STRIDED)
def average_pool(n: Call) -> Value:
    return averaged(n, n.value())


def averaged(n: Call, x: Value) -> Value:
    """Return the averages of x's windows by the node's attributes."""
    windows = window(n, _spatial(x), None)
    if (none := _none_fit(n, x, windows)) is not None:
        return none
    return n(
        f"avg_pool{windows.rank}d",
        x,
        kernel=windows.kernel,
        ceil_mode=windows.ceil,
        include_pad=bool(n.attribute("count_include_pad", 0)),
        **windows.attributes(),
    )


@rule("LpPool")
def lp_pool(n: Call) -> Value:
    x = n.value()
    windows = window(n, _spatial(x), None)
    if (none := _none_fit(n, x, windows)) is not None:
        return none
    return n(
        "lp_pool",
        x,
        kernel=windows.kernel,
        ceil_mode=windows.ceil,
        p=n.attribute("p", 2),
        **windows.attributes(),
    )


@rule("GlobalAveragePool", "GlobalMaxPool", even=PLAIN)
@rule("GlobalLpPool")
def global_pool(n: Call) -> Value:
    x = n.value()
    axes = tuple(range(2, x.rank))
    if not axes:
        raise OnnxError(f"rank {x.rank} found; 3 or more needed")
    if n.kind == "GlobalLpPool":
        order = float(n.attribute("p", 2))
        total = n("reduce_sum", n("power", n("abs", x), exponent=order), axes=axes, keepdims=True)
        return n("power", total, exponent=1 / order)
    name = "reduce_mean" if n.kind == "GlobalAveragePool" else "reduce_max"
    return n(name, x, axes=axes, keepdims=True)


@rule("Col2Im")
def col2im(n: Call) -> Value:
    """Return columns added up into an image: the transpose of taking windows."""
    x = n.value()
    image, block = n.ints("image_shape", 1) or (), n.ints("block_shape", 2) or ()
    rank, kernel = len(image), math.prod(block)
    if not 1 <= rank <= 3 or len(block) != rank or x.rank != 3 or kernel < 1:
        raise UnsupportedError(
            f"image {image}, block {block} and columns {x.spec} found; 1 to 3 axes of image and"
            " block, and columns (n, c k, l), needed"
        )
    strides = tuple(n.attribute("strides") or (1,) * rank)
    dilations = tuple(n.attribute("dilations") or (1,) * rank)
    pads = tuple(n.attribute("pads") or (0,) * (2 * rank))
    counts = [
        (image[a] + pads[a] + pads[a + rank] - (block[a] - 1) * dilations[a] - 1) // strides[a] + 1
        for a in range(rank)
    ]
    channels = x.shape[1] // kernel
    columns = n.reshape(x, (x.shape[0] * channels, kernel, *counts))
    # One filter for each place in the window, with a one at that place.
    n.room(kernel * kernel)
    weights = n.known(np.eye(kernel).reshape(kernel, 1, *block), x.dtype)
    more = [
        (image[a] + pads[a] + pads[a + rank] - (block[a] - 1) * dilations[a] - 1) % strides[a]
        for a in range(rank)
    ]
    y = n(
        f"conv_transpose{rank}d",
        columns,
        weights,
        bias=False,
        stride=strides,
        padding=pads,
        dilation=dilations,
        output_padding=tuple(more),
    )
    return n.reshape(y, (x.shape[0], channels, *image))
