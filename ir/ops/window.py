"""Sliding windows over the last two axes, shared by convolution and pooling.

Output position i along an axis looks at input positions i*stride - low + k*dilation, for k below
the kernel's extent. `padding` is (top, left, bottom, right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.ir.dims import Affine
from soapstone.ir.errors import ShapeError
from soapstone.ir.spec import Attributes, Tile
from soapstone.ir.tensor import Array

SPATIAL = ("h", "w")


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

    @property
    def span(self) -> int:
        """Input positions from the window's first to its last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def count(self) -> int:
        """Output positions.

        Raises:
            ShapeError: not one window fits; names the dim.
        """
        if self.kernel < 1:
            raise ShapeError(f"dim k{self.dim} is {self.kernel}; 1 or more needed")
        padded = self.size + self.low + self.high
        if padded < self.span:
            raise ShapeError(
                f"dim {self.dim}: the window spans {self.span} positions, but the padded input"
                f" has {padded}"
            )
        return (padded - self.span) // self.stride + 1

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
    """Return the windows along h and w, from an operator's stride, padding and dilation."""
    padding, dilation = attributes["padding"], attributes.get("dilation", (1, 1))
    return [
        Window(
            dim,
            size[axis],
            kernel[axis],
            attributes["stride"][axis],
            padding[axis],
            padding[axis + 2],
            dilation[axis],
        )
        for axis, dim in enumerate(SPATIAL)
    ]


def local_padding(
    attributes: Attributes, tile: Tile, box: tuple[Any, Any], kernel: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding of one tile: what of its windows lies outside its box of the input."""
    low, high = [], []
    for axis, window in enumerate(windows_of(attributes, (0, 0), kernel)):
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


def gather(
    x: Array,
    attributes: Attributes,
    kernel: Sequence[int],
    count: Sequence[int],
    fill: float = 0.0,
) -> Array:
    """Return the windows of x: (n, c, h, w) -> (n, c, count h, count w, kh, kw), mostly a view."""
    shape = (*x.shape[:2], *count, *kernel)
    if 0 in shape:
        return np.zeros(shape, x.dtype)
    windows = windows_of(attributes, x.shape[2:], kernel)
    need = [(n - 1) * window.stride + window.span for n, window in zip(count, windows)]
    padded = np.full((*x.shape[:2], *need), fill, x.dtype)
    (top, left), (height, width) = attributes["padding"][:2], x.shape[2:]
    part = padded[:, :, top : top + height, left : left + width]
    part[...] = x[:, :, : part.shape[2], : part.shape[3]]
    rows, columns = windows
    views = np.lib.stride_tricks.sliding_window_view(padded, (rows.span, columns.span), (2, 3))
    return views[:, :, :: rows.stride, :: columns.stride, :: rows.dilation, :: columns.dilation]


def scatter(parts: Array, attributes: Attributes, size: Sequence[int]) -> Array:
    """Return the transpose of `gather`: windows (n, c, h, w, kh, kw) summed into (n, c, *size)."""
    n, c, *count, kh, kw = parts.shape
    rows, columns = windows_of(attributes, size, (kh, kw))
    top, left = attributes["padding"][:2]
    height = max(top + size[0], (count[0] - 1) * rows.stride + rows.span, 0)
    width = max(left + size[1], (count[1] - 1) * columns.stride + columns.span, 0)
    total = np.zeros((n, c, height, width), parts.dtype)
    for i in range(kh if parts.size else 0):
        for j in range(kw):
            y, x = i * rows.dilation, j * columns.dilation
            total[
                :,
                :,
                y : y + (count[0] - 1) * rows.stride + 1 : rows.stride,
                x : x + (count[1] - 1) * columns.stride + 1 : columns.stride,
            ] += parts[..., i, j]
    return total[:, :, top : top + size[0], left : left + size[1]].copy()
