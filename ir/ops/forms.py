"""What forms of several operators share: axes counted from the end, kernel sizes, paddings.

Terms (`ir/term.py`) count axes from the end and name a padding by a word; operators count axes from
the front and pad by numbers. Each pair of functions here is a translation and its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from soapstone.ir.attributes import Attributes
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Value

AXES: tuple[Value, ...] = (-4, -3, -2, -1)
STRIDES: tuple[Value, ...] = (1, 2)
PADDINGS: tuple[Value, ...] = ("same", "valid")
_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)\Z")


def front_axis(axis: Value, spec: TensorSpec) -> int | None:
    """Return an axis counted from the front, None where the tensor has none such."""
    if not isinstance(axis, int) or not -spec.rank <= axis < 0:
        return None
    return axis + spec.rank


def kernel_size(size: Value) -> tuple[int, int] | None:
    """Return height and width of a kernel from `3x5`, None for any other word."""
    found = _SIZE.match(str(size))
    return (int(found[1]), int(found[2])) if found else None


def size_text(kernel: Sequence[int]) -> str:
    """Return a kernel's height and width as terms say them: `3x5`."""
    return f"{kernel[0]}x{kernel[1]}"


def window_of(
    stride: Value, padding: Value, kernel: Sequence[int]
) -> dict[str, tuple[int, ...]] | None:
    """Return a window's attributes; None where stride or padding is no value, or an extent even.

    `same` pads by half the kernel on each side, so the kernel's extents must be odd.
    """
    if not isinstance(stride, int) or stride < 1 or padding not in PADDINGS:
        return None
    if padding == "same" and any(extent % 2 == 0 for extent in kernel):
        return None
    half = tuple(extent // 2 if padding == "same" else 0 for extent in kernel)
    return {"stride": (stride, stride), "padding": half + half, "dilation": (1, 1)}


def read_window(attributes: Attributes, kernel: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the strides and paddings that say a window: two where a 1x1 kernel has no padding."""
    stride = attributes["stride"][0]
    for padding in PADDINGS:
        found = window_of(stride, padding, kernel)
        if found is not None and all(attributes[name] == value for name, value in found.items()):
            yield stride, str(padding)
