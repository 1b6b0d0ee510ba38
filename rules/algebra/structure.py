"""The polynomial operators as index structures: which products each output element sums.

Every operator of Table 2.1 of the paper (Jia et al., TASO, section 2.3) is a sum of products of at
most one element of each operand, a maximum of elements, or relu of those. A structure lists the
products, so that one loop that knows no operator evaluates all of them: on integers (`exact.py`)
and on polynomials (`polynomial.py`). Other symbols (`exp`, `softmax`) have no structure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone.cache.compiled import njit
from soapstone.ir.ops.forms import kernel_size, window_of
from soapstone.ir.term import SPLITS, Value
from soapstone.rules.algebra.evaluate import apply
from soapstone.search.rules.shapes import concrete, tensor_type

Indices: TypeAlias = "NDArray[np.int32]"
Shape: TypeAlias = "tuple[int, ...]"
Kind: TypeAlias = Literal["sum", "max", "relu", "sum+relu"]


@dataclass(frozen=True, eq=False)
class Structure:
    """What one output of an operator is made of; the entries of an output element are adjacent.

    With the operands A and B flattened in row-major order, output element o of kind `sum` is the
    sum over its entries of `numerator / denominator * A[a] * B[b]`, where index -1 stands for the
    factor 1; of kind `max`, the maximum of its A[a]; of kind `relu`, max(0, A[a]); of kind
    `sum+relu`, max(0, the sum). `out` ascends; an element without entries is 0.
    """

    shape: Shape
    kind: Kind
    out: Indices
    a: Indices
    b: Indices
    numerator: NDArray[np.int64]
    denominator: int = 1

    @property
    def starts(self) -> Indices:
        """Where the entries of each output element begin, and one more: where the last end."""
        return np.searchsorted(self.out, np.arange(math.prod(self.shape) + 1)).astype(np.int32)


def _ids(shape: Shape) -> Indices:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def _make(
    shape: Sequence[int],
    kind: Kind,
    a: Any,
    b: Any = None,
    numerator: Any = 1,
    denominator: int = 1,
) -> Structure:
    """Return the structure whose entries are arrays of shape (outputs, entries an output).

    An entry where both indices are -1 stands for padding and is left out.
    """
    rows = math.prod(shape)
    a = np.asarray(a)
    b = np.full(1, -1) if b is None else np.asarray(b)
    columns = np.broadcast_shapes((rows, 1), a.shape, b.shape, np.shape(numerator))
    wide = [np.broadcast_to(part, columns).ravel() for part in (a, b, numerator)]
    out = np.broadcast_to(np.arange(rows)[:, None], columns).ravel()
    keep = (wide[0] >= 0) | (wide[1] >= 0)
    outs, firsts, seconds = (part[keep].astype(np.int32) for part in (out, wide[0], wide[1]))
    return _frozen(shape, kind, outs, firsts, seconds, wide[2][keep].astype(np.int64), denominator)


def _frozen(
    shape: Sequence[int],
    kind: Kind,
    out: Indices,
    a: Indices,
    b: Indices,
    numerators: NDArray[np.int64],
    denominator: int = 1,
) -> Structure:
    for part in (out, a, b, numerators):
        part.setflags(write=False)
    return Structure(tuple(map(int, shape)), kind, out, a, b, numerators, denominator)


def _column(indices: Any) -> Any:
    return np.ascontiguousarray(indices).reshape(-1, 1)


def _broadcast(x: Shape, y: Shape) -> tuple[Shape, Indices, Indices] | None:
    try:
        shape = np.broadcast_shapes(x, y)
    except ValueError:
        return None
    return shape, *(_column(np.broadcast_to(_ids(part), shape)) for part in (x, y))


def _sum_of_two(sign: int, x: Shape, y: Shape) -> Structure | None:
    found = _broadcast(x, y)
    if found is None:
        return None
    shape, a, b = found
    none = np.full_like(a, -1)
    return _make(shape, "sum", np.hstack([a, none]), np.hstack([none, b]), np.array([[1, sign]]))


def _product(x: Shape, y: Shape) -> Structure | None:
    found = _broadcast(x, y)
    return None if found is None else _make(found[0], "sum", found[1], found[2])


def _smul(x: Shape, w: Shape) -> Structure | None:
    return _product(x, w) if w == () else None


def _moved(
    symbol: str, parameters: tuple[Value, ...], shapes: tuple[Shape, ...], left: int | None
) -> Structure | None:
    """Return what an operator that only moves elements makes: its reference moves their numbers."""
    counts = list(map(math.prod, shapes))
    numbers = np.split(np.arange(1.0, sum(counts) + 1), counts[:1])
    operands = [part.reshape(shape) for part, shape in zip(numbers, shapes)]
    axis, sizes = parameters[0] if parameters else None, None
    if symbol in SPLITS:
        if left is None or not isinstance(axis, int) or not -len(shapes[0]) <= axis < 0:
            return None
        sizes = left, shapes[0][axis] - left
        if min(sizes) < 1:
            return None
    made = apply(symbol, parameters, operands, sizes)
    if made is None:
        return None
    place = _column(made.astype(np.int64) - 1)  # -1 in what is padded
    first = np.where(place < counts[0], place, -1)
    return _make(made.shape, "sum", first, np.where(place < counts[0], -1, place - counts[0]))


def _matmul(x: Shape, y: Shape) -> Structure | None:
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-2]:
        return None
    try:
        batch = np.broadcast_shapes(x[:-2], y[:-2])
    except ValueError:
        return None
    m, k, n = x[-2], x[-1], y[-1]
    full = (*batch, m, n, k)
    rows = np.broadcast_to(_ids(x), (*batch, m, k))[..., :, None, :]
    columns = np.swapaxes(np.broadcast_to(_ids(y), (*batch, k, n)), -1, -2)[..., None, :, :]
    a, b = (np.broadcast_to(part, full).reshape(-1, k) for part in (rows, columns))
    return _make((*batch, m, n), "sum", a, b)


def _pads(kernel: Sequence[int], stride: Value, padding: Value) -> Sequence[int] | None:
    """Return the padding above and to the left, or None where there are no such windows."""
    window = window_of(stride, padding, kernel) if min(kernel) >= 1 else None
    return None if window is None else window["padding"][:2]


def _windows(x: Shape, kernel: tuple[int, int], stride: Value, padding: Value) -> Indices | None:
    """Return the input elements of every window: (n, c, oh, ow, kh, kw), -1 in the padding."""
    pads = _pads(kernel, stride, padding)
    if len(x) != 4 or pads is None:
        return None
    around = [(0, 0), (0, 0), *((pad, pad) for pad in pads)]
    padded = np.pad(_ids(x), around, constant_values=-1)
    if any(extent < size for extent, size in zip(padded.shape[2:], kernel)):
        return None
    views = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
    return views[:, :, ::stride, ::stride]


def _conv2d(parameters: tuple[Value, ...], x: Shape, y: Shape) -> Structure | None:
    _, stride, padding, activation = parameters
    if concrete("conv2d", parameters, (tensor_type(x), tensor_type(y))) is None:
        return None
    pads = _pads((y[2], y[3]), stride, padding)
    if pads is None:
        return None
    shape, *entries = _convolved(x, y, x[1] // y[1], stride, *pads)
    kind: Kind = "sum+relu" if activation == "relu" else "sum"
    return _frozen(shape, kind, *entries)


@njit()
def _convolved(x, y, groups, stride, pad_h, pad_w):  # type: ignore[no-untyped-def]
    """Return the shape of a convolution and its entries: out, a, b and numerators."""
    n, c, h, w = x
    outputs, inner, kh, kw = y
    height, width = (h + 2 * pad_h - kh) // stride + 1, (w + 2 * pad_w - kw) // stride + 1
    rows = n * outputs * height * width
    out = np.empty(rows * inner * kh * kw, np.int32)
    first, second = np.empty_like(out), np.empty_like(out)
    at = 0
    for row in range(rows):
        column, rest = row % width, row // width
        line, rest = rest % height, rest // height
        o, image = rest % outputs, rest // outputs
        group = o // (outputs // groups)
        for i in range(inner):
            for u in range(max(0, pad_h - line * stride), min(kh, h + pad_h - line * stride)):
                for v in range(
                    max(0, pad_w - column * stride), min(kw, w + pad_w - column * stride)
                ):
                    top, left = line * stride + u - pad_h, column * stride + v - pad_w
                    out[at] = row
                    first[at] = ((image * c + group * inner + i) * h + top) * w + left
                    second[at] = ((o * inner + i) * kh + u) * kw + v
                    at += 1
    shape = (n, outputs, height, width)
    return shape, out[:at], first[:at], second[:at], np.ones(at, np.int64)


def _relu(x: Shape) -> Structure:
    return _make(x, "relu", _column(_ids(x)))


def _pool(parameters: tuple[Value, ...], x: Shape, maximum: bool) -> Structure | None:
    kernel = kernel_size(parameters[0])
    windows = None if kernel is None else _windows(x, kernel, parameters[1], parameters[2])
    if windows is None or kernel is None:
        return None
    shape = windows.shape[:4]
    a = windows.reshape(math.prod(shape), -1)
    if maximum:
        return _make(shape, "max", a)
    if parameters[3] == "all":
        return _make(shape, "sum", a, denominator=math.prod(kernel))
    if parameters[3] != "inside":
        return None
    inside = (a >= 0).sum(axis=1, keepdims=True)
    common = math.lcm(*map(int, np.unique(inside)))
    return _make(shape, "sum", a, numerator=common // inside, denominator=common)


def _axis(axis: Value, x: Shape) -> int | None:
    return axis if isinstance(axis, int) and -len(x) <= axis < 0 else None


def _reduce(axis: Value, x: Shape, mean: bool) -> Structure | None:
    at = _axis(axis, x)
    if at is None:
        return None
    last = np.moveaxis(_ids(x), at, -1)
    shape = list(x)
    shape[at] = 1
    return _make(shape, "sum", last.reshape(math.prod(shape), -1), denominator=x[at] if mean else 1)


_Builder: TypeAlias = "Callable[[tuple[Value, ...], tuple[Shape, ...]], Structure | None]"
_MOVING = frozenset(("transpose", "enlarge", "concat", "merge", *SPLITS))
_TABLE: dict[str, tuple[int, int, _Builder]] = {  # parameters, operands, what builds it
    "add": (0, 2, lambda p, s: _sum_of_two(1, *s)),
    "sub": (0, 2, lambda p, s: _sum_of_two(-1, *s)),
    "mul": (0, 2, lambda p, s: _product(*s)),
    "smul": (0, 2, lambda p, s: _smul(*s)),
    "matmul": (0, 2, lambda p, s: _matmul(*s)),
    "conv2d": (4, 2, lambda p, s: _conv2d(p, *s)),
    "relu": (0, 1, lambda p, s: _relu(*s)),
    "avg_pool2d": (4, 1, lambda p, s: _pool(p, s[0], maximum=False)),
    "max_pool2d": (3, 1, lambda p, s: _pool(p, s[0], maximum=True)),
    "reduce_sum": (1, 1, lambda p, s: _reduce(p[0], s[0], mean=False)),
    "reduce_mean": (1, 1, lambda p, s: _reduce(p[0], s[0], mean=True)),
}
POLYNOMIAL = _MOVING.union(_TABLE)


@lru_cache(maxsize=1 << 14)
def structure(
    symbol: str,
    parameters: tuple[Value, ...],
    shapes: tuple[Shape, ...],
    left: int | None = None,
) -> Structure | None:
    """Return what the outputs of a symbol on operands of these shapes are made of, or None.

    None where the symbol has no structure (`symbol not in POLYNOMIAL`), or takes no such operands
    with such parameters. `left` is the extent of the first part, for `split0` and `split1`.
    """
    if symbol in _MOVING:
        return _moved(symbol, parameters, shapes, left)
    found = _TABLE.get(symbol)
    if found is None or (len(parameters), len(shapes)) != found[:2]:
        return None
    return found[2](parameters, shapes)
