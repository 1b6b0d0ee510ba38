"""`window_partition` and `window_reverse`: an image as windows beside each other, and back.

Before it is cut, the image is moved up and left by `shift`, and what leaves comes in on the other
side. Dims: n, samples; windows of each; p, positions of a window; c, channels. Only n and c are
split.

Source: Liu et al., Swin transformer: hierarchical vision transformer using shifted windows, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Operand, Product, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_rank
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

_SIZES = {"size": Attribute("ints", minimum=1), "shift": Attribute("ints", (0, 0), minimum=0)}
_WHOLE = {"windows": Kind.WHOLE, "p": Kind.WHOLE}
_TURN = (0, 1, 3, 2, 4, 5)  # rows of a window and windows beside each other in each other's place


def _operands(
    attributes: Attributes, n: int, image: Sequence[int], c: int, first: bool
) -> tuple[DimTable, Operand, Operand]:
    """Return the operands of an image (n, h, w, c) and of its windows. first: it is the input."""
    table, where = DimTable(), "input 0"
    for name, extent, size, shift in zip("hw", image, attributes["size"], attributes["shift"]):
        if extent % size or shift >= max(extent, 1):
            raise ShapeError(
                f"dim {name}: extent {extent}, window {size} and shift {shift} found; a multiple of"
                " the window, larger than the shift, needed"
            )
    count = image[0] // attributes["size"][0] * (image[1] // attributes["size"][1])
    samples, channels = along(table, "n", n, where), along(table, "c", c, where)
    table.add("windows", count, where)
    positions = along(table, "p", attributes["size"][0] * attributes["size"][1], where)
    whole = Operand((samples, Whole(image[0]), Whole(image[1]), channels))
    parts = Operand((Product(("n", "windows"), (n, count)), positions, channels))
    return (table, whole, parts) if first else (table, parts, whole)


def _need_two(attributes: Attributes) -> None:
    for name in attributes:
        if len(attributes[name]) != 2:
            raise ShapeError(f"attribute {name}: shape {attributes[name]} found, two needed")


def _partition_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_rank(inputs, 0, "n h w c")
    _need_two(attributes)
    n, *image, c = inputs[0].shape
    table, x, y = _operands(attributes, n, image, c, first=True)
    return finish(table, [x], [y], [inputs[0].dtype], _WHOLE)


def _reverse_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_rank(inputs, 0, "n p c")
    _need_two(attributes)
    image, size = attributes["extents"], attributes["size"]
    count = image[0] // size[0] * (image[1] // size[1])
    windows, p, c = inputs[0].shape
    if not count or windows % count or p != size[0] * size[1]:
        raise ShapeError(
            f"input 0 has shape {inputs[0].shape}; a multiple of {count} windows of"
            f" {size[0] * size[1]} positions needed"
        )
    table, x, y = _operands(attributes, windows // count, image, c, first=False)
    return finish(table, [x], [y], [inputs[0].dtype], _WHOLE)


def _partition(attributes: Attributes, x: Array) -> Array:
    n, h, w, c = x.shape
    (high, wide), shift = attributes["size"], attributes["shift"]
    moved = np.roll(x, (-shift[0], -shift[1]), (1, 2))
    apart = moved.reshape(n, h // high, high, w // wide, wide, c).transpose(_TURN)
    return apart.reshape(n * (h // high) * (w // wide), high * wide, c)


def _reverse(attributes: Attributes, x: Array) -> Array:
    (h, w), (high, wide), c = attributes["extents"], attributes["size"], x.shape[2]
    n = x.shape[0] // (h // high * (w // wide))
    apart = x.reshape(n, h // high, w // wide, high, wide, c).transpose(_TURN)
    return np.roll(apart.reshape(n, h, w, c), attributes["shift"], (1, 2))


def _partition_gradient(g: GradientContext) -> Sequence[str | None]:
    extents = g.spec(g.inputs[0]).shape[1:3]
    return [g.emit("window_reverse", g.grad(), extents=extents, **g.attributes)]


def _reverse_gradient(g: GradientContext) -> Sequence[str | None]:
    at = {name: g.attributes[name] for name in _SIZES}
    return [g.emit("window_partition", g.grad(), **at)]


define(
    name="window_partition",
    inputs=("x",),
    signature=_partition_signature,
    reference=_partition,
    attributes=_SIZES,
    gradient=_partition_gradient,
    chooses=True,
    strided=True,
    tiles_free=True,
    layer=None,
    cases=(
        Case(("2 6 4 3",), {"size": (3, 2), "shift": (1, 1)}),
        Case(("1 8 12 5",), {"size": (2, 4), "shift": (5, 0)}),
        Case(("2 4 4 2",), {"size": (2, 2)}),
        Case(("0 2 2 3",), {"size": (1, 2), "shift": (0, 1)}),
    ),
    doc="the windows (n * windows, positions, c) of an image (n, h, w, c) moved up and left",
)
define(
    name="window_reverse",
    inputs=("x",),
    signature=_reverse_signature,
    reference=_reverse,
    attributes={"extents": Attribute("ints", minimum=1), **_SIZES},
    gradient=_reverse_gradient,
    chooses=True,
    strided=True,
    tiles_free=True,
    layer=None,
    cases=(
        Case(("8 6 3",), {"extents": (6, 4), "size": (3, 2), "shift": (1, 1)}),
        Case(("12 8 5",), {"extents": (8, 12), "size": (2, 4), "shift": (5, 0)}),
        Case(("8 4 2",), {"extents": (4, 4), "size": (2, 2)}),
        Case(("0 2 3",), {"extents": (2, 2), "size": (1, 2), "shift": (0, 1)}),
    ),
    doc="the image (n, h, w, c) of windows (n * windows, positions, c), moved down and right",
)
