"""ONNX operators that read images between their pixels: grid sampling, in any number of dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.values import Value, rule

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
