"""Batch normalization, its inference form and its gradient, over dim 1 of arrays of any rank.

Each is three steps: sums by channel, a small step on the channels, and a multiply-add over the
array that the elementwise machine does. Sums are float64, so that E[x^2] - E[x]^2 loses nothing
that float32 shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise import bind_program
from soapstone.kernels.cpu.layout import is_float32, walk
from soapstone.kernels.cpu.native import (
    Native,
    as_float,
    bind,
    f32p,
    f64p,
    native,
    noop,
    pack,
    parallel_for,
    routine,
    sequence,
    stack,
    useful_threads,
    words,
)
from soapstone.kernels.cpu.programs import Node, compile_program
from soapstone.kernels.cpu.runs import row_offset
from soapstone.kernels.cpu.simd import (
    load,
    load_doubles,
    load_first,
    splat,
    store,
    sum_lanes,
    widen,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant


@routine
def _pair_run(sums: int, u: int, v: int, mean: float, n: int) -> None:
    """Add u and u * (v - mean), n floats each, to two times 16 lanes."""
    m = splat(mean)
    full = n & -16
    a, b = load_doubles(sums, 0), load_doubles(sums, 16)
    for i in range(0, full, 16):
        x = widen(load(u, i))
        a += x
        b += x * widen(load(v, i) - m)
    if full < n:
        x = widen(load_first(u, full, n - full))
        a += x
        b += x * widen(load_first(v, full, n - full) - m)
    store(sums, 0, a)
    store(sums, 16, b)


@routine
def _pair_row(sums: int, products: int, u: int, v: int, mean: int, n: int) -> None:
    """Add u and u * (v - mean), lane by lane, to rows of n totals (a multiple of 16 long)."""
    full = n & -16
    for i in range(0, full, 16):
        x = widen(load(u, i))
        store(sums, i, load_doubles(sums, i) + x)
        x = x * widen(load(v, i) - load(mean, i))
        store(products, i, load_doubles(products, i) + x)
    if full < n:
        k = n - full
        x = widen(load_first(u, full, k))
        store(sums, full, load_doubles(sums, full) + x)
        x = x * widen(load_first(v, full, k) - load_first(mean, full, k))
        store(products, full, load_doubles(products, full) + x)


# Words: 0 u, 1 v, 2 mean, 3 sums (parts, 2, padded channels), 4 channels, 5 padded channels,
# 6 parts, 7 rows, 8 run, 9 rank, 10 stride of channels of u, 11 of v; 12 extents, strides.
@native("body")
def _sums_by_channel(block: Any, begin: int, end: int) -> int:
    w = words(block)
    n, rank = w[8], w[9]
    sums = stack(256)
    out = f64p(w[3])
    for channel in range(begin, end):
        for i in range(32):
            f64p(sums)[i] = 0.0
        mean = f32p(w[2])[channel]
        for row in range(w[7]):
            u = w[0] + channel * w[10] + row_offset(w, 12, 12 + rank, rank, row)
            v = w[1] + channel * w[11] + row_offset(w, 12, 12 + 2 * rank, rank, row)
            _pair_run(sums, u, v, mean, n)
        out[channel] = sum_lanes(load_doubles(sums, 0))
        out[w[5] + channel] = sum_lanes(load_doubles(sums, 16))
    return 0


@native("body")
def _sums_by_row(block: Any, begin: int, end: int) -> int:
    w = words(block)
    rows, rank, padded = w[7], w[9], w[5]
    for part in range(begin, end):
        sums = w[3] + part * padded * 16
        for i in range(2 * padded):
            f64p(sums)[i] = 0.0
        for row in range(part * rows // w[6], (part + 1) * rows // w[6]):
            u = w[0] + row_offset(w, 12, 12 + rank, rank, row)
            v = w[1] + row_offset(w, 12, 12 + 2 * rank, rank, row)
            _pair_row(sums, sums + padded * 8, u, v, w[2], w[4])
    return 0


# Words: 0 sums, 1 channels, 2 padded channels, 3 parts, 4 count, 5 epsilon, 6 momentum, 7.. arrays.
@native()
def _statistics(block: Any) -> int:
    """Mean, rstd, running statistics, and the scale and shift of y."""
    w = words(block)
    sums, count, epsilon, momentum = f64p(w[0]), as_float(w[4]), as_float(w[5]), as_float(w[6])
    for c in range(w[1]):
        total = square = 0.0
        for part in range(w[3]):
            total += sums[part * w[2] * 2 + c]
            square += sums[part * w[2] * 2 + w[2] + c]
        mean = total / count
        variance = max(square / count - mean * mean, 0.0)
        rstd = 1.0 / np.sqrt(variance + epsilon)
        unbiased = variance * count / max(count - 1.0, 1.0)
        f32p(w[11])[c] = (1.0 - momentum) * f32p(w[9])[c] + momentum * mean
        f32p(w[12])[c] = (1.0 - momentum) * f32p(w[10])[c] + momentum * unbiased
        f32p(w[13])[c] = mean
        f32p(w[14])[c] = rstd
        f32p(w[15])[c] = f32p(w[7])[c] * rstd
        f32p(w[16])[c] = f32p(w[8])[c] - mean * rstd * f32p(w[7])[c]
    return 0


@native()
def _inference(block: Any) -> int:
    """The scale and shift of y from the running statistics."""
    w = words(block)
    for c in range(w[1]):
        scale = f32p(w[7])[c] / np.sqrt(f32p(w[10])[c] + as_float(w[5]))
        f32p(w[11])[c] = scale
        f32p(w[12])[c] = f32p(w[8])[c] - f32p(w[9])[c] * scale
    return 0


@native()
def _slopes(block: Any) -> int:
    """dgamma, dbeta, and the factors of dx = a * dy + b * (x - mean) + d."""
    w = words(block)
    sums, count = f64p(w[0]), as_float(w[4])
    for c in range(w[1]):
        total = product = 0.0
        for part in range(w[3]):
            total += sums[part * w[2] * 2 + c]
            product += sums[part * w[2] * 2 + w[2] + c]
        rstd = np.float64(f32p(w[8])[c])
        scale = f32p(w[7])[c] * rstd
        f32p(w[9])[c] = product * rstd
        f32p(w[10])[c] = total
        f32p(w[11])[c] = scale
        f32p(w[12])[c] = -scale * rstd * rstd * product / count
        f32p(w[13])[c] = -scale * total / count
    return 0


class _Sums:
    """The entry that sums u and u * (v - mean) by channel, and where it leaves the sums."""

    def __init__(self, u: Array, v: Array, mean: Array, threads: int) -> None:
        self.channels = c = u.shape[1]
        self.padded = (c + 15) // 16 * 16
        self.count = u.size // c
        self.parts = 1
        self.entry: Entry | None = None
        rest = [np.moveaxis(a, 1, 0)[0] for a in (u, v)]
        made = walk(rest[0].shape, rest)
        extents, strides = made.extents, made.strides
        threads = useful_threads(threads, u.nbytes + v.nbytes)
        run = 1
        by_row = c > 1 and u.strides[1] == 4 and v.strides[1] == 4
        if by_row:
            self.parts = min(threads, self.count)
        else:
            if any(s[-1] != 4 for s in strides) and extents[-1] > 1:
                return
            run, extents, strides = extents[-1], extents[:-1], tuple(s[:-1] for s in strides)
        self.sums = np.zeros((self.parts, 2, self.padded))
        block = pack(
            (u, v, mean, self.sums, c, self.padded, self.parts, self.count // run, run),
            (len(extents), u.strides[1], v.strides[1], extents, strides),
        )
        kernel: Native = _sums_by_row if by_row else _sums_by_channel
        self.entry = parallel_for(kernel, block, self.parts if by_row else c, threads)

    def words(self) -> tuple[Any, ...]:
        return (self.sums, self.channels, self.padded, self.parts, float(self.count))


def _served(arrays: tuple[Array, ...], vectors: tuple[Array, ...]) -> bool:
    x = arrays[0]
    return (
        x.ndim >= 2
        and is_float32(*arrays, *vectors)
        and all(
            (v.shape == (x.shape[1],) and v.strides in ((4,), (0,))) or v.size == 1 for v in vectors
        )
    )


def _apply(
    nodes: list[Node], inputs: list[Array], vectors: list[Array], y: Array, threads: int
) -> Entry | None:
    """The machine's entry of the nodes; vectors are by channel."""
    wide = [v.reshape(1, -1, *([1] * (y.ndim - 2))) for v in vectors]
    program = compile_program(
        len(inputs) + len(wide), nodes, (len(inputs) + len(wide) + len(nodes) - 1,)
    )
    if program is None:
        return None
    return bind_program(program, [*inputs, *wide], [y], threads)


_SCALE_AND_SHIFT: list[Node] = [("mul", (0, 1), {}), ("add", (3, 2), {})]


@variant("batch_norm", "numba")
def batch_norm(call: Call) -> Entry | None:
    """y, new running mean and variance, mean, rstd of x (n, c, ...)."""
    x, *vectors = call.inputs
    y, *results = call.outputs
    if not _served((x, y), (*vectors, *results)) or x.size == 0:
        return None
    c = x.shape[1]
    zero, scale, shift = (np.zeros(c, np.float32) for _ in range(3))
    sums = _Sums(x, x, zero, call.threads)
    apply = _apply(_SCALE_AND_SHIFT, [x], [scale, shift], y, call.threads)
    if sums.entry is None or apply is None:
        return None
    epsilon, momentum = float(call.attributes["epsilon"]), float(call.attributes["momentum"])
    middle = bind(_statistics, sums.words(), epsilon, momentum, vectors, results, scale, shift)
    return sequence([sums.entry, middle, apply])


@variant("batch_norm_inference", "numba")
def batch_norm_inference(call: Call) -> Entry | None:
    """y of x (n, c, ...), gamma, beta, mean and variance."""
    (x, *vectors), (y,) = call.inputs, call.outputs
    if not _served((x, y), tuple(vectors)):
        return None
    if x.size == 0:
        return noop()
    scale, shift = np.zeros(x.shape[1], np.float32), np.zeros(x.shape[1], np.float32)
    apply = _apply(_SCALE_AND_SHIFT, [x], [scale, shift], y, call.threads)
    if apply is None:
        return None
    epsilon = float(call.attributes["epsilon"])
    first = bind(_inference, 0, x.shape[1], 0, 0, 0, epsilon, 0, vectors, scale, shift)
    return sequence([first, apply])


@variant("batch_norm_grad", "numba")
def batch_norm_grad(call: Call) -> Entry | None:
    """dx, dgamma, dbeta from dy, x, gamma, mean, rstd."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    if not _served((dy, x, dx), (gamma, mean, rstd, dgamma, dbeta)) or x.size == 0:
        return None
    a, b, d = (np.zeros(x.shape[1], np.float32) for _ in range(3))
    sums = _Sums(dy, x, mean, call.threads)
    nodes: list[Node] = [
        ("sub", (1, 2), {}),
        ("mul", (6, 4), {}),
        ("mul", (0, 3), {}),
        ("add", (8, 7), {}),
        ("add", (9, 5), {}),
    ]
    apply = _apply(nodes, [dy, x], [mean, a, b, d], dx, call.threads)
    if sums.entry is None or apply is None:
        return None
    middle = bind(_slopes, sums.words(), 0, 0, gamma, rstd, dgamma, dbeta, a, b, d)
    return sequence([sums.entry, middle, apply])
