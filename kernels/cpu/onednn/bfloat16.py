"""Products of bfloat16: of operands of that type, or rounded to it where a call allows that.

Sums, biases and steps are in float32, and results of either type. Constant weights are rounded as
they are packed, and the other operand on each run, which is copied for it: oneDNN's float32
primitives do not round by themselves here, whatever mode of arithmetic their attributes allow (3.2,
AVX-512). Two numbers are multiplied and added by one instruction, so there are no such kernels
where that is missing. What is subnormal counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from soapstone.dtypes import learn, name_of
from soapstone.kernels.cpu.elementwise.machine import bind_program
from soapstone.kernels.cpu.elementwise.programs import Node, compile_program
from soapstone.kernels.cpu.onednn import convolution, matmul, pointwise
from soapstone.kernels.cpu.onednn.descriptors import Step
from soapstone.kernels.cpu.onednn.library import (
    channels_at_once,
    gains_by_bfloat16,
    multiplies_bfloat16,
)
from soapstone.kernels.cpu.onednn.sequences import as_image
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.arrays import strided
from soapstone.native.copies import copies, copy, filling
from soapstone.native.entries import noop, sequence
from soapstone.native.memory import Scratch, aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed

NAME, PRODUCT = "onednn_bfloat16", "onednn_bfloat16_product"
_FEW = 4  # rows, whose product takes the time in which weights are read
_FEW_CHANNELS = 6  # of an image, which may be written once for each column of a window
_Bind = Callable[..., Entry | None]


def expected(call: Call) -> float:
    """Return the time that a call is expected to take, as a share of the one in float32."""
    x = call.inputs[0]
    return 0.5 if gains_by_bfloat16() or x.size <= _FEW * x.shape[-1] else 2.0


_EXACT, _ROUNDED = np.array([True]), np.array([False])


def _allowed(call: Call) -> bool:
    """Return whether operands are of the type, or may be rounded to it."""
    x, w, *vectors = call.inputs
    if any(each.dtype != np.float32 for each in vectors):
        return False
    halves = [name_of(each.dtype) == BFLOAT16 for each in (x, w)]
    if not halves[1] and 1 not in call.constants:
        return False
    return call.precision == BFLOAT16 or (halves[0] and (halves[1] or _exact(w)))


def _exact(weights: Array) -> bool:
    """Return whether constant weights are of the type already."""

    def asked(weights: Array) -> Array:
        bits = held(weights).view(np.uint32)
        return _ROUNDED if (bits & 0xFFFF).any() else _EXACT

    return weights.dtype == np.float32 and packed(weights, "exact", asked) is _EXACT


def conv(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of a convolution, then the steps; groups of one channel gain nothing."""
    if not _allowed(call) or call.attributes["groups"] == call.inputs[0].shape[1] > 1:
        return None
    first, call = _unfolded(call) or (noop(), call)
    return sequence([first, convolution.convolution(call, steps, BFLOAT16)])


def _unfolded(call: Call) -> tuple[Entry | None, Call] | None:
    """Return what writes the rows of all windows, and the convolution of that; None: as it is.

    An instruction multiplies pairs of channels, with AMX 32 of them, and of few it is partly idle
    for each pixel of a window. Where the pixels of a window's row lie side by side as channels, for
    each place of a window along the axis, it is only for the last of them.
    """
    (x, w, *bias), (y,), at = call.inputs, call.outputs, call.attributes
    if x.ndim != 4 or x.shape[1] != w.shape[1] or min(at["padding"]) < 0 or 0 in (x.size, y.size):
        return None
    (n, channels, height, width), (filters, _, rows, columns) = x.shape, w.shape
    (down, along), (top, low, bottom, _) = at["stride"], at["padding"]
    at_once, row = channels_at_once(), columns * channels
    fewer = 5 * _whole(row, at_once) <= 4 * columns * _whole(channels, at_once)
    if not fewer or channels > _FEW_CHANNELS or at["dilation"][1] != 1:
        return None
    places = y.shape[3]
    reach = (places - 1) * along + columns
    image = aligned_array((n, height, reach, channels), learn(BFLOAT16)).view(Scratch)
    kept = min(width, reach - low)
    inside = np.moveaxis(image, -1, 1)[..., low : low + kept]
    windows = aligned_array((n, height, places, row), image.dtype).view(Scratch)
    edges = image[:, :, :low], image[:, :, low + kept :]
    steps = *image.strides[:2], along * image.strides[2], image.itemsize
    first = [
        copies([filling(edge, 0) for edge in edges], call.threads),
        _written(inside, x[..., :kept], call.threads),
        copy(windows, strided(image, windows.shape, steps), call.threads),
    ]
    wide = held(w).transpose(0, 2, 3, 1).reshape(filters, rows, 1, row)
    operands = (np.moveaxis(array, -1, 1) for array in (windows, wide))
    attributes = {**at, "stride": (down, 1), "padding": (top, 0, bottom, 0)}
    return sequence(first), replace(call, inputs=(*operands, *bias), attributes=attributes)


def _whole(channels: int, at_once: int) -> int:
    """Return the number of channels, rounded up to whole instructions."""
    return -(-channels // at_once) * at_once


def _written(to: Array, x: Array, threads: int) -> Entry | None:
    """Return the entry that rounds an array to another one's type, where that is not its own."""
    if x.dtype == to.dtype:
        return copy(to, x, threads)
    nodes: list[Node] = [("cast", (0,), {"to": BFLOAT16})]
    program = compile_program(1, nodes, (1,), [name_of(x.dtype)])
    return None if program is None else bind_program(program, [x], [to], threads)


def linear(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of y = activation(x @ w + b), then the steps."""
    return matmul.linear(call, steps, BFLOAT16) if _allowed(call) else None


def product(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of y = a @ b, then the steps."""
    return matmul.matmul(call, steps, BFLOAT16) if _allowed(call) else None


def pixels(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of a convolution as a product of its pixels, then the steps."""
    return pointwise.conv2d(call, steps, BFLOAT16) if _allowed(call) else None


# By operator; all may have steps on their results.
BINDS: dict[str, _Bind] = {"conv1d": as_image(conv), "conv2d": conv, "conv3d": conv}
BINDS |= {"linear": linear, "matmul": product}

_registered = partial(variant, expected=expected, promises=True, runs=multiplies_bfloat16())
for _operator, _bind in BINDS.items():
    _registered(_operator, NAME)(_bind)
_registered("conv2d", PRODUCT)(pixels)
