"""Convolutions as cuDNN takes them: tensors with strides, and what surrounds an image.

Source: NVIDIA, cuDNN documentation, graph API: convolution forward, backward data and backward
filter, of (n, c, *positions); groups are in the extents of channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from soapstone.ir.ops.windows.window import windows_of
from soapstone.kernels.cuda.substrate.arrays import View

Kind = Literal["conv_fprop", "conv_dgrad", "conv_wgrad"]


@dataclass(frozen=True)
class Tensor:
    """Extents and strides, in elements; one of extent 1 has the stride that its layout gives it."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """y of x and w, or one of these of the others; positions have two axes or three."""

    kind: Kind
    x: Tensor
    w: Tensor
    y: Tensor
    pre_padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def result(self) -> Tensor:
        """What is computed."""
        return {"conv_fprop": self.y, "conv_dgrad": self.x, "conv_wgrad": self.w}[self.kind]

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """As products: groups, rows, columns, and terms of a sum; of y by places, filters, taps."""
        filters, taps = self.w.dim[0], math.prod(self.w.dim[1:])
        groups = self.x.dim[1] // self.w.dim[1]
        filters //= groups
        places = self.y.dim[0] * math.prod(self.y.dim[2:])
        if self.kind == "conv_wgrad":
            return groups, filters, taps, places
        if self.kind == "conv_fprop":
            return groups, places, filters, taps
        kernel = math.prod(self.w.dim[2:])
        reads = self.x.dim[0] * math.prod(self.x.dim[2:])
        return groups, reads, self.w.dim[1], filters * kernel

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        """What it is computed from, in the order of cuDNN's functions."""
        x, w, y = self.x, self.w, self.y
        return {"conv_fprop": (x, w), "conv_dgrad": (y, w), "conv_wgrad": (x, y)}[self.kind]


def convolution(
    kind: Kind, attributes: Mapping[str, Any], x: View, w: View, y: View
) -> Convolution | None:
    """Return a convolution, or None where cuDNN has no such layout or padding.

    What follows the image is found from the extents of y, so tiles and transposed convolutions,
    whose windows need not end where their attributes say, are convolutions like others.
    """
    post = []
    windows = windows_of(attributes, x.shape[2:], w.shape[2:])
    for window, count in zip(windows, y.shape[2:]):
        least = (count - 1) * window.stride + window.span - window.size - window.low
        if window.low < 0 or least + window.stride <= 0:
            return None
        post.append(max(least, 0))
    tensors = [_tensor(view) for view in (x, w, y)]
    if not all(tensors) or min(x.shape + w.shape + y.shape) < 1:
        return None
    more = (0,) if len(windows) == 1 else ()  # cuDNN has no single axis
    ones = tuple(1 for _ in more)
    known = [each for each in tensors if each is not None]
    return Convolution(
        kind,
        known[0],
        known[1],
        known[2],
        (*more, *(window.low for window in windows)),
        (*more, *post),
        (*ones, *(window.stride for window in windows)),
        (*ones, *(window.dilation for window in windows)),
    )


def _tensor(view: View) -> Tensor | None:
    """Return a view as a tensor, with two axes of positions at least; None where some repeat."""
    shape, strides = view.shape, view.strides
    if any(extent != 1 and stride == 0 for extent, stride in zip(shape, strides)):
        return None
    rank = len(shape)
    orders = (range(rank), (0, *range(2, rank), 1))  # channels first, and last
    for order in orders:
        packed = _packed(shape, order)
        if all(e == 1 or s == p for e, s, p in zip(shape, strides, packed)):
            strides = packed
            break
    else:
        whole = max(e * s for e, s in zip(shape, strides))
        strides = tuple(whole if e == 1 else s for e, s in zip(shape, strides))
    if rank == 3:
        shape = (*shape[:2], 1, shape[2])
        strides = (*strides[:2], strides[2] * shape[3], strides[2])
    return Tensor(shape, strides)


def _packed(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of axes without gaps, the last of an order innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)
