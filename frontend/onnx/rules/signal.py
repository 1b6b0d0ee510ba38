"""ONNX operators of signal processing and geometry, as products with known matrices."""

from __future__ import annotations

import math

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.tensors import dtype_of
from soapstone.frontend.onnx.values import Value, rule
from soapstone.ir.tensor import Array

_MOST = 1 << 24  # elements of a known matrix
_MOST_ROWS = 64  # of a matrix whose determinant is computed


@rule("DFT")
def dft(n: Call) -> Value:
    x = n.value()
    given = n.number("axis", 2, -2) if n.version >= 20 else n.attribute("axis", 1)
    axis = n.axis_of(int(given or 0), x.rank)
    if axis == x.rank - 1:
        raise OnnxError("the last axis holds real and imaginary parts; another one needed")
    inverse, one_sided = bool(n.attribute("inverse", 0)), bool(n.attribute("onesided", 0))
    length = int(n.number("dft_length", 1, None) or 0) if n.has(1) else 0
    if one_sided and inverse:
        return _real_inverse(n, x, axis, length or 2 * (x.shape[axis] - 1))
    return transformed(n, x, axis, length or x.shape[axis], inverse, one_sided)


def transformed(n: Call, x: Value, axis: int, length: int, inverse: bool, one_sided: bool) -> Value:
    """Return the discrete Fourier transform along an axis; parts stand in the last axis."""
    parts, extent = x.shape[-1], min(x.shape[axis], length)
    if parts not in (1, 2) or length < 1:
        raise OnnxError(f"{parts} parts and length {length} found; 1 or 2, and 1 or more needed")
    bins = length // 2 + 1 if one_sided else length
    if 4 * bins * extent > _MOST:
        raise UnsupportedError(f"length {length} is too large")
    angle = 2 * np.pi * (np.outer(np.arange(extent), np.arange(bins)) % length) / length
    cos, sin = np.cos(angle), np.sin(angle) * (1 if inverse else -1)
    # From (element, part) to (bin, part): the rows of imaginary parts turn by a quarter.
    matrix = np.empty((extent, parts, bins, 2))
    matrix[:, 0, :, 0], matrix[:, 0, :, 1] = cos, sin
    if parts == 2:
        matrix[:, 1, :, 0], matrix[:, 1, :, 1] = -sin, cos
    if inverse:
        matrix /= length
    return _along(n, x, axis, matrix.reshape(extent * parts, bins * 2), 2)


def _along(n: Call, x: Value, axis: int, matrix: Array, parts: int) -> Value:
    """Return x with its elements along an axis, and their parts, multiplied by a known matrix.

    matrix: (elements and parts of x, elements and `parts` of the result); elements beyond it are
    left out.
    """
    order = [a for a in range(x.rank - 1) if a != axis]
    extent = len(matrix) // x.shape[-1]
    if extent < x.shape[axis]:
        x = n.part(x, axis, 0, extent)
    moved = n.transpose(x, (*order, axis, x.rank - 1))
    lead = moved.shape[:-2]
    rows = n.reshape(moved, (math.prod(lead), len(matrix)))
    made = n("linear", rows, n.known(matrix, x.dtype), bias=False)
    made = n.reshape(made, (*lead, matrix.shape[1] // parts, parts))
    back = list(range(len(order)))
    back.insert(axis, len(order))
    return n.transpose(made, (*back, len(order) + 1))


def _real_inverse(n: Call, x: Value, axis: int, length: int) -> Value:
    """Return the real signal whose transform has these bins, half of all."""
    bins = min(x.shape[axis], length // 2 + 1)
    if x.shape[-1] != 2 or length < 1 or 2 * bins * length > _MOST:
        raise OnnxError(f"bins {x.spec} and length {length} do not fit")
    angle = 2 * np.pi * (np.outer(np.arange(bins), np.arange(length)) % length) / length
    twice = np.full((bins, 1), 2.0)  # each bin stands for its mirror image, too
    twice[0] = 1
    if length % 2 == 0 and bins == length // 2 + 1:
        twice[-1] = 1
    matrix = np.stack([twice * np.cos(angle), -twice * np.sin(angle)], 1) / length
    return _along(n, x, axis, matrix.reshape(bins * 2, length), 1)


@rule("STFT")
def stft(n: Call) -> Value:
    signal = n.value()
    if signal.rank == 2:  # real numbers, as PyTorch's exporter writes them
        signal = n.reshape(signal, (*signal.shape, 1))
    step = int(n.array(1).reshape(()))
    window = n.maybe(2)
    size = int(n.array(3).reshape(())) if n.has(3) else window.shape[0] if window else 0
    if size < 1 or step < 1 or signal.rank != 3 or size > signal.shape[1]:
        raise OnnxError(f"frames of {size} every {step} found; they do not fit {signal.spec}")
    count = (signal.shape[1] - size) // step + 1
    if count * size > _MOST:
        raise UnsupportedError(f"{count} frames of {size} found; {_MOST:,} values in all at most")
    places = (np.arange(count)[:, None] * step + np.arange(size)).astype(np.int64)
    frames = n("gather", signal, n.known(places), axis=1)
    if window is not None:
        frames = n("mul", frames, n.reshape(window, (size, 1)))
    return transformed(n, frames, 2, size, False, bool(n.attribute("onesided", 1)))


@rule("Det")
def det(n: Call) -> Value:
    """Return determinants: by their formula up to three rows, by elimination beyond."""
    x = n.value()
    size = x.shape[-1] if x.rank >= 2 else 0
    if x.rank < 2 or x.shape[-2] != size:
        raise OnnxError(f"input 0 is {x.spec}; square matrices needed")
    if size == 0:
        return n("full", shape=x.shape[:-2], value=1.0, dtype=x.dtype)
    if size > _MOST_ROWS:
        raise UnsupportedError(f"matrices of {size} rows found; {_MOST_ROWS} at most")
    if size > 3:
        return _eliminated(n, x)

    def at(row: int, column: int) -> Value:
        starts = (*(0,) * (x.rank - 2), row, column)
        stops = (*x.shape[:-2], row + 1, column + 1)
        part = n("slice", x, starts=starts, stops=stops, steps=(1,) * x.rank)
        return n.reshape(part, x.shape[:-2])

    def minor(rows: tuple[int, int], columns: tuple[int, int]) -> Value:
        (a, b), (c, d) = rows, columns
        return n("sub", n("mul", at(a, c), at(b, d)), n("mul", at(a, d), at(b, c)))

    if size == 1:
        return at(0, 0)
    if size == 2:
        return minor((0, 1), (0, 1))
    terms = [n("mul", at(0, i), minor((1, 2), c)) for i, c in enumerate(((1, 2), (0, 2), (0, 1)))]
    return n("add", n("sub", terms[0], terms[1]), terms[2])


def _eliminated(n: Call, x: Value) -> Value:
    """Return determinants by elimination, a column at a time, by the largest number in it."""
    outer, result = x.shape[:-2], None
    for size in range(x.shape[-1], 1, -1):
        column = n.row(x, x.rank - 1, 0)
        place = n("argmax", n("abs", column), axis=x.rank - 2, keepdims=True)
        rows = n("equal", place, n.known(np.arange(size), place.dtype))
        rows = n.reshape(rows, (*outer, size, 1))
        row = n("reduce_sum", n("where", rows, x, n.like(0, x)), axes=(x.rank - 2,), keepdims=True)
        first, others = n.part(x, x.rank - 2, 0, 1), n.part(x, x.rank - 2, 1, size)
        others = n("where", n.part(rows, x.rank - 2, 1, size), first, others)
        pivot = n.part(row, x.rank - 1, 0, 1)
        nothing = n("equal", pivot, n.like(0, pivot))
        scale = n("div", row, n("where", nothing, n.like(1, pivot), pivot))
        right = n.part(scale, x.rank - 1, 1, size)
        left, rest = n.part(others, x.rank - 1, 0, 1), n.part(others, x.rank - 1, 1, size)
        x = n("sub", rest, n("mul", left, right))
        stays = n("equal", n.reshape(place, outer), n.like(0, place))
        factor = n.reshape(pivot, outer)
        factor = n("where", stays, factor, n("neg", factor))
        result = factor if result is None else n("mul", result, factor)
    last = n.reshape(x, outer)
    return last if result is None else n("mul", result, last)


@rule("MelWeightMatrix")
def mel_weight_matrix(n: Call) -> Value:
    bands, length, rate = (int(n.array(i).reshape(())) for i in range(3))
    low, high = (float(n.array(i).reshape(())) for i in (3, 4))
    bins = length // 2 + 1
    if bands < 1 or bins < 1 or rate < 1 or bands * bins > _MOST:
        raise OnnxError(f"{bands} bands of {bins} bins found")
    lowest, highest = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    mels = np.arange(bands + 2) * ((highest - lowest) / (bands + 2)) + lowest
    places = ((length + 1) * (700 * (np.power(10, mels / 2595) - 1)) // rate).astype(int)
    if places.min() < 0 or places.max() >= bins + 1:
        raise OnnxError(f"frequencies {low} to {high} do not fit a rate of {rate}")
    matrix = np.zeros((bins + 1, bands))
    for band in range(bands):
        left, centre, right = places[band : band + 3]
        up, down = np.arange(left, centre + 1), np.arange(centre, right)
        if centre == left:
            matrix[centre, band] = 1
        else:
            matrix[up, band] = (up - left) / (centre - left)
        if right > centre:
            matrix[down, band] = (right - down) / (right - centre)
    matrix = matrix[:bins]
    return n.known(matrix, dtype_of(n.attribute("output_datatype", 1), "output_datatype"))


@rule("AffineGrid")
def affine_grid(n: Call) -> Value:
    theta, size = n.value(), n.ints("size", 1) or ()
    count = len(size) - 2  # axes of space
    if count not in (2, 3) or theta.shape != (size[0], count, count + 1):
        raise OnnxError(
            f"theta {theta.spec} and size {size} found; (N, 2, 3) with a size of 4 numbers, or "
            "(N, 3, 4) with one of 5, needed"
        )
    space = size[2:]
    n.room((count + 1) * math.prod(space))
    reach = 0 if n.attribute("align_corners", 0) else 1
    axes = [(2 * np.arange(extent) + reach) / max(extent - 1 + reach, 1) - 1 for extent in space]
    points = [*np.meshgrid(*axes, indexing="ij")[::-1], np.ones(space)]  # x first, then y and z
    known = n.known(np.stack(points).reshape(count + 1, -1), theta.dtype)
    rows = n.reshape(theta, (size[0] * count, count + 1))
    made = n.reshape(n("linear", rows, known, bias=False), (size[0], count, known.shape[1]))
    return n.reshape(n.transpose(made, (0, 2, 1)), (size[0], *space, count))
