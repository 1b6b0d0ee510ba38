"""Sliding windows over one, two or three trailing axes, shared by convolution and pooling.

Output position i along an axis looks at input positions i*stride - low + k*dilation, for k below
the kernel's extent. `padding` holds what each axis has before its first element, then what each has
after its last: (top, left, bottom, right) of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Affine
from soapstone.ir.errors import ShapeError
from soapstone.ir.onnx_entry import OnnxAttribute
from soapstone.ir.ops.checks import need_lengths
from soapstone.ir.spec import Tile
from soapstone.ir.tensor import Array
from soapstone.records import dataclass


def spatial_dims(count: int) -> tuple[str, ...]:
    """Return the names of the last `count` axes of an image: of d h w."""
    return ("d", "h", "w")[3 - count :]


ONNX_WINDOW: dict[str, str | OnnxAttribute | None] = {
    "kernel": "kernel_shape",
    "stride": "strides",
    "padding": "pads",
    "dilation": "dilations",
    "groups": "group",
}


def window_attributes(count: int) -> dict[str, Attribute]:
    """Return the attributes of windows along `count` axes, without the kernel's extents."""
    return {
        "stride": Attribute("ints", (1,) * count, minimum=1),
        "padding": Attribute("ints", (0,) * (2 * count), minimum=0),
        "dilation": Attribute("ints", (1,) * count, minimum=1),
    }


def need_window(attributes: Attributes, count: int, **lengths: int) -> None:
    """Check how many numbers the attributes of windows along `count` axes hold.

    Raises:
        GraphError: one holds fewer or more; names it.
    """
    need_lengths(attributes, stride=count, padding=2 * count, dilation=count, **lengths)


@dataclass(frozen=True)
class Window:
    """How output positions along one axis look at the input's."""

    dim: str
    size: int  # the input's extent
    kernel: int
    stride: int
    low: int
    high: int
    dilation: int = 1
    ceil: bool = False  # whether a last window may end past the padding, if it starts before it

    @property
    def span(self) -> int:
        """Input positions from the window's first to its last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def room(self) -> int:
        """Positions that the window can move by; negative where it does not fit."""
        return self.size + self.low + self.high - self.span

    @property
    def positions(self) -> int:
        """Output positions; zero or fewer where no window fits."""
        if not self.ceil:
            return self.room // self.stride + 1
        count = -(-self.room // self.stride) + 1
        return count - ((count - 1) * self.stride >= self.size + self.low)

    @property
    def count(self) -> int:
        """Output positions.

        Raises:
            ShapeError: not one window fits; names the dim.
        """
        if self.kernel < 1:
            raise ShapeError(f"dim k{self.dim} is {self.kernel}; 1 or more needed")
        if self.positions < 1:
            raise ShapeError(
                f"dim {self.dim}: the window spans {self.span} positions, but the padded input"
                f" has {self.size + self.low + self.high}"
            )
        return self.positions

    @property
    def excess(self) -> int:
        """Positions of the last window past the padding: there are some only with `ceil`."""
        return max(0, (self.positions - 1) * self.stride - self.room)

    def read(self) -> Affine:
        """Return the input's axis where it is read."""
        return Affine(self.dim, self.size, self.stride, -self.low, self.span)

    def written(self) -> Affine:
        """Return the input's axis where a gradient writes it.

        The windows need not cover the axis: strides may skip positions, and the last window may end
        early. The tiles must, so that those positions become zero; they are taken in wider.
        """
        last = (self.count - 1) * self.stride - self.low + self.span
        tail = max(0, self.size - last)
        gap = self.stride if self.count > 1 else 0
        return Affine(self.dim, self.size, self.stride, -self.low, max(self.span + tail, gap))


def windows_of(attributes: Attributes, size: Sequence[int], kernel: Sequence[int]) -> list[Window]:
    """Return the windows along the axes of `kernel`, from an operator's attributes."""
    count = len(kernel)
    padding, dilation = attributes["padding"], attributes.get("dilation", (1,) * count)
    return [
        Window(
            dim,
            size[axis],
            kernel[axis],
            attributes["stride"][axis],
            padding[axis],
            padding[axis + count],
            dilation[axis],
            bool(attributes.get("ceil_mode", False)),
        )
        for axis, dim in enumerate(spatial_dims(count))
    ]


def positions_of(
    attributes: Attributes, size: Sequence[int], kernel: Sequence[int]
) -> tuple[int, ...]:
    """Return the output positions along each axis; of a tile they may be none."""
    return tuple(max(0, window.positions) for window in windows_of(attributes, size, kernel))


def local_padding(
    attributes: Attributes, tile: Tile, box: tuple[Any, Any], kernel: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding of one tile: what of its windows lies outside its box of the input."""
    low, high = [], []
    for axis, window in enumerate(windows_of(attributes, (0,) * len(kernel), kernel)):
        first, last = tile.intervals[window.dim]
        start, stop = int(box[0][2 + axis]), int(box[1][2 + axis])
        if last <= first:  # an empty tile: a window that just does not fit
            before, total = window.span - 1, window.span - 1
        else:
            total = (last - first - 1) * window.stride + window.span
            before = start - (first * window.stride - window.low) if stop > start else total
        low.append(before)
        high.append(max(0, total - before - (stop - start)))
    return (*low, *high)


def _box(along: Iterable[slice | int]) -> Any:
    """Return an index into the last axes."""
    return (..., *along)


def gather(
    x: Array,
    attributes: Attributes,
    kernel: Sequence[int],
    count: Sequence[int],
    fill: Any = 0.0,
) -> Array:
    """Return the windows of x: (n, c, *size) -> (n, c, *count, *kernel), mostly a view."""
    shape = (*x.shape[:2], *count, *kernel)
    if 0 in shape:
        return np.zeros(shape, x.dtype)
    windows = windows_of(attributes, x.shape[2:], kernel)
    need = [(n - 1) * window.stride + window.span for n, window in zip(count, windows)]
    padded = np.full((*x.shape[:2], *need), fill, x.dtype)
    part = padded[_box(slice(w.low, w.low + w.size) for w in windows)]
    part[...] = x[_box(slice(extent) for extent in part.shape[2:])]
    axes = tuple(range(2, x.ndim))
    views = np.lib.stride_tricks.sliding_window_view(padded, [w.span for w in windows], axes)
    steps = [w.stride for w in windows] + [w.dilation for w in windows]
    return np.asarray(views[_box(slice(None, None, step) for step in steps)])


def scatter(parts: Array, attributes: Attributes, size: Sequence[int]) -> Array:
    """Return the transpose of `gather`: windows (n, c, *count, *kernel) summed to (n, c, *size)."""
    rank = len(size)
    count, kernel = parts.shape[2 : 2 + rank], parts.shape[2 + rank :]
    windows = windows_of(attributes, size, kernel)
    whole = [
        max(w.low + extent, (n - 1) * w.stride + w.span, 0)
        for w, extent, n in zip(windows, size, count)
    ]
    total = np.zeros((*parts.shape[:2], *whole), parts.dtype)
    for place in itertools.product(*map(range, kernel)) if parts.size else ():
        starts = [k * w.dilation for k, w in zip(place, windows)]
        box = (
            slice(start, start + (n - 1) * w.stride + 1, w.stride)
            for start, n, w in zip(starts, count, windows)
        )
        total[_box(box)] += parts[_box(place)]
    inner = (slice(w.low, w.low + extent) for w, extent in zip(windows, size))
    return np.array(total[_box(inner)])


def of_rank(values: Sequence[int], rank: int, depth: int) -> tuple[int, ...]:
    """Return numbers along h w as those along w, h w, or d h w: of cases of every rank."""
    return tuple((depth, *values)[3 - rank :])


def case_shape(shape: Sequence[int], rank: int, depth: int) -> str:
    """Return the shape of an image, or of weights, as a case of the rank says it."""
    return " ".join(map(str, (*shape[:2], *of_rank(shape[2:], rank, depth))))


def case_window(
    window: Mapping[str, Any], rank: int, low: int = 0, high: int = 0
) -> dict[str, Any]:
    """Return a case's window; along d, 4 positions hold two windows of 2, stride 2.

    low, high: the padding along d.
    """
    padding = window.get("padding", (0, 0, 0, 0))
    return {
        **window,
        "stride": of_rank(window.get("stride", (1, 1)), rank, 2),
        "dilation": of_rank(window.get("dilation", (1, 1)), rank, 1),
        "padding": (*of_rank(padding[:2], rank, low), *of_rank(padding[2:], rank, high)),
    }
