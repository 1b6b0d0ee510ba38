"""ONNX operators that read images between their pixels: at the places of a grid, or of a window."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.values import Value, rule
from soapstone.ir.tensor import Array

_CUBIC = -0.75  # the constant of the cubic convolution
_MODES = {"bilinear": "linear", "bicubic": "cubic"}


@rule("GridSample")
def grid_sample(n: Call) -> Value:
    """The sum of the pixels around each place, each dim weighted; all channels are read at once."""
    x, grid = n.value(0), n.value(1)
    count = x.rank - 2
    if count < 1 or grid.rank != x.rank or grid.shape[-1] != count:
        raise OnnxError(f"image {x.spec} and grid {grid.spec} found; (n, …, {count}) needed")
    kind = n.text("mode", "linear", ("linear", "nearest", "cubic", *_MODES))
    kind = _MODES.get(kind, kind)
    if kind == "cubic" and count != 2:
        raise UnsupportedError(f"attribute 'mode' is 'cubic' for {count} dims; 2 are supported")
    padding = n.text("padding_mode", "zeros", ("zeros", "border", "reflection"))
    aligned = bool(n.attribute("align_corners", 0))
    extents, places = x.shape[2:], grid.shape[1:-1]
    positions, weights, inside = [], [], []
    for dim, extent in enumerate(extents):
        g = n.row(grid, grid.rank - 1, count - 1 - dim)  # the last dim comes first
        g = n.reshape(n.cast(g, "float32"), (grid.shape[0], math.prod(places), 1))
        edges = (0.0, extent - 1.0) if aligned else (-0.5, extent - 0.5)
        at = _at(n, g, extent, aligned=aligned)
        at = _padded(n, at, edges, padding) if kind == "linear" else at
        taps = _taps(n, at, kind)
        positions.append([_index(n, tap, extent, edges, padding) for tap, _ in taps])
        weights.append([weight for _, weight in taps])
        whole = n.like(0, at), n.like(extent - 1, at)
        inside.append([_between(n, tap, *whole) for tap, _ in taps])
    return _gathered(n, x, places, positions, weights, inside if padding == "zeros" else None)


@rule("DeformConv")
def deform_conv(n: Call) -> Value:
    """A product of weights with what lies where each tap of a window was moved to."""
    x, w, offset = n.value(0), n.value(1), n.value(2)
    if (x.rank, w.rank, offset.rank) != (4, 4, 4):
        raise UnsupportedError(f"image {x.spec} and weights {w.spec}; 4 axes each are supported")
    samples, channels = x.shape[:2]
    taps = math.prod(w.shape[2:])
    groups, parts = n.attribute("group", 1), n.attribute("offset_group", 1)
    made = _moved(n, x, w, offset.shape[2:])
    fits = groups * w.shape[1] == channels and w.shape[0] % groups == 0 == channels % parts
    if not fits or offset.shape[:2] != (samples, 2 * taps * parts):
        raise OnnxError(f"offsets {offset.spec} and weights {w.spec} do not fit image {x.spec}")
    count = taps * math.prod(offset.shape[2:])
    moves = n.reshape(offset, (samples, parts, taps, 2, count // max(taps, 1)))
    columns = []
    for part in range(parts):
        own = n.part(x, 1, part * channels // parts, (part + 1) * channels // parts)
        mine = n.row(moves, 1, part)
        positions, weights, inside = [], [], []
        for dim, extent in enumerate(x.shape[2:]):
            at = n("add", n.row(mine, 2, dim), n.known(made[dim], x.dtype))
            found = _taps(n, n.reshape(at, (samples, count, 1)), "linear")
            edges = (0.0, extent - 1.0)
            positions.append([_index(n, tap, extent, edges, "zeros") for tap, _ in found])
            weights.append([weight for _, weight in found])
            ends = n.like(0, x), n.like(extent - 1, x)
            inside.append([_between(n, tap, *ends) for tap, _ in found])
        read = _gathered(n, own, (count, 1), positions, weights, inside)
        if n.has(4):
            mask = n.part(n.reshape(n.value(4), (samples, parts, count, 1)), 1, part, part + 1)
            read = n("mul", read, mask)
        columns.append(read)
    whole = n("concat", *columns, axis=1) if parts > 1 else columns[0]
    whole = n.reshape(whole, (samples, groups, channels // groups * taps, count // max(taps, 1)))
    rows = n.reshape(w, (1, groups, w.shape[0] // groups, channels // groups * taps))
    result = n.reshape(n("matmul", rows, whole), (samples, w.shape[0], *offset.shape[2:]))
    if n.has(3):
        result = n("add", result, n.reshape(n.value(3), (1, w.shape[0], 1, 1)))
    return result


def _moved(n: Call, x: Value, w: Value, made: Sequence[int]) -> list[Array]:
    """Return where each tap of each window is before it is moved, along each dim: (taps, windows).

    Raises:
        OnnxError: there are not as many windows as offsets.
    """
    strides, dilations = n.attribute("strides", (1, 1)), n.attribute("dilations", (1, 1))
    pads = n.attribute("pads", (0, 0, 0, 0))
    if (len(strides), len(dilations), len(pads)) != (2, 2, 4) or min(strides) < 1:
        raise OnnxError(f"strides {strides}, dilations {dilations} and pads {pads} found; 2, 2, 4")
    at = []
    for dim, (kernel, count) in enumerate(zip(w.shape[2:], made)):
        room = x.shape[2 + dim] + pads[dim] + pads[2 + dim] - (kernel - 1) * dilations[dim] - 1
        if count != (fit := room // strides[dim] + 1):
            raise OnnxError(f"{count} offsets along axis {dim + 2} found, {fit} needed")
        tap, window = np.arange(kernel) * dilations[dim], np.arange(count) * strides[dim]
        at.append(tap[:, None] + window - pads[dim])
    n.room(2 * math.prod(w.shape[2:]) * math.prod(made))
    rows, columns = at
    shape = (rows.shape[0], columns.shape[0], rows.shape[1], columns.shape[1])
    both = (
        np.broadcast_to(rows[:, None, :, None], shape),
        np.broadcast_to(columns[:, None], shape),
    )
    return [each.reshape(shape[0] * shape[1], -1) for each in both]


def _gathered(
    n: Call,
    x: Value,
    places: Sequence[int],
    positions: Sequence[Sequence[Value]],
    weights: Sequence[Sequence[Value | None]],
    inside: Sequence[Sequence[Value]] | None,
) -> Value:
    """Return the sum over all combinations of each dim's taps: (n, channels, *places)."""
    rank, extents = x.rank, x.shape[2:]
    last = n.transpose(x, (0, *range(2, rank), 1))
    pixels = n.reshape(last, (x.shape[0], math.prod(extents), x.shape[1]))
    parts = []
    for choice in itertools.product(*(range(len(taps)) for taps in positions)):
        chosen = [taps[i] for taps, i in zip(positions, choice)]
        at = reduce(
            lambda before, each: n("add", n("mul", before, n.like(each[1], before)), each[0]),
            zip(chosen[1:], extents[1:]),
            chosen[0],
        )
        part = n("gather_nd", pixels, at, batch_dims=1)
        factors = [taps[i] for taps, i in zip(weights, choice)]
        scale = [each for each in factors if each is not None]
        scale += [n.cast(taps[i], "float32") for taps, i in zip(inside or (), choice)]
        for each in scale:
            part = n("mul", part, n.cast(each, x.dtype))
        parts.append(part)
    total = reduce(lambda a, b: n("add", a, b), parts)
    made = n.reshape(total, (x.shape[0], *places, x.shape[1]))
    return n.transpose(made, (0, rank - 1, *range(1, rank - 1)))


def _at(n: Call, g: Value, extent: int, *, aligned: bool) -> Value:
    """Return places from -1 to 1 in pixels: of the outermost pixels' middles, or their edges."""
    scale = (extent - 1) / 2 if aligned else extent / 2
    return n("affine", g, scale=scale, shift=scale if aligned else scale - 0.5)


def _padded(n: Call, at: Value, edges: tuple[float, float], padding: str) -> Value:
    """Return places moved to where their pixels are read: to the border, or folded back at it."""
    if padding == "border":
        return n("clip", at, low=math.ceil(edges[0]), high=math.floor(edges[1]))
    return at if padding == "zeros" else _folded(n, at, edges)


def _folded(n: Call, at: Value, edges: tuple[float, float]) -> Value:
    """Return places reflected at both edges until they lie between them."""
    low, size = edges[0], edges[1] - edges[0]
    if size == 0:
        return n("affine", at, scale=0.0)
    rounds = n("floor", n("affine", at, scale=0.5 / size, shift=-low * 0.5 / size))
    rest = n("sub", at, n("affine", rounds, scale=2 * size))  # between low and low + 2 size
    back = n("affine", rest, scale=-1.0, shift=2 * (low + size))
    return n("minimum", rest, back)


def _taps(n: Call, at: Value, kind: str) -> list[tuple[Value, Value | None]]:
    """Return the pixels around places along one dim, and what each is weighted by."""
    if kind == "nearest":
        return [(n("round", at), None)]
    first = n("floor", at)
    t = n("sub", at, first)
    if kind == "linear":
        return [
            (first, n("affine", t, scale=-1.0, shift=1.0)),
            (n("affine", first, shift=1.0), t),
        ]
    near: Callable[[Value], Value] = lambda d: _cubic(n, d, (_CUBIC + 2, -_CUBIC - 3, 0, 1))  # noqa: E731
    far: Callable[[Value], Value] = lambda d: _cubic(  # noqa: E731
        n, d, (_CUBIC, -5 * _CUBIC, 8 * _CUBIC, -4 * _CUBIC)
    )
    s = n("affine", t, scale=-1.0, shift=1.0)
    return [
        (n("affine", first, shift=-1.0), far(n("affine", t, shift=1.0))),
        (first, near(t)),
        (n("affine", first, shift=1.0), near(s)),
        (n("affine", first, shift=2.0), far(n("affine", s, shift=1.0))),
    ]


def _cubic(n: Call, d: Value, factors: Sequence[float]) -> Value:
    """Return a polynomial of the third degree."""
    made = n("affine", d, scale=factors[0], shift=factors[1])
    for factor in factors[2:]:
        made = n("affine", n("mul", made, d), shift=factor)
    return made


def _index(n: Call, tap: Value, extent: int, edges: tuple[float, float], padding: str) -> Value:
    """Return which pixel is read, always one that is there."""
    if padding == "reflection":
        tap = _folded(n, tap, edges)
    return n.cast(n("clip", tap, low=0.0, high=max(extent - 1.0, 0.0)), "int64")


def _between(n: Call, tap: Value, low: Value, high: Value) -> Value:
    return n("logical_and", n("greater_equal", tap, low), n("less_equal", tap, high))
