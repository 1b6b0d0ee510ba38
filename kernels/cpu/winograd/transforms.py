"""What Winograd's convolution does to sixteen channels: the two transforms and the product block.

F(2x2, 3x3) takes the points 0, 1, -1 and infinity. F(4x4, 3x3) takes 0, 3/4, -3/4, 3/2, -3/2 and
infinity: exact in float32, and four times as accurate as the usual 0, 1, -1, 2, -2.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016); for the points,
Barabasz et al., Error Analysis and Improving the Accuracy of Winograd Convolution (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from soapstone.native.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    chosen,
    held,
    load_lanes,
    load_one,
    prefetch,
    store_lanes,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

NEAR, FAR = 0.75, 1.5  # the points of F(4x4), each with its negative
PANEL = 32  # filters of a block of the product: two vectors
ROWS = (4, 7, 8, 10, 12, 13, 14)  # tiles of a block of the product
STEPS = 4  # channels of one round of the product's loop
AHEAD = 64  # lines of weights that are asked for before they are used


def _input4(d: Sequence[Lanes]) -> list[Lanes]:
    """Six values to the values at the six points: a row or column of B^T d B."""
    near, far = NEAR * NEAR, FAR * FAR
    even_near, odd_near = d[4] - d[2] * far, (d[3] - d[1] * far) * NEAR
    even_far, odd_far = d[4] - d[2] * near, (d[3] - d[1] * near) * FAR
    return [
        d[4] - d[2] * (near + far) + d[0] * (near * far),
        even_near + odd_near,
        even_near - odd_near,
        even_far + odd_far,
        even_far - odd_far,
        d[5] - d[3] * (near + far) + d[1] * (near * far),
    ]


def _output4(m: Sequence[Lanes]) -> list[Lanes]:
    """Products at the six points to four results: a row or column of A^T m A."""
    even_near, odd_near, even_far, odd_far = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [
        m[0] + even_near + even_far,
        odd_near * NEAR + odd_far * FAR,
        even_near * NEAR**2 + even_far * FAR**2,
        m[5] + odd_near * NEAR**3 + odd_far * FAR**3,
    ]


def _input2(d: Sequence[Lanes]) -> list[Lanes]:
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[3] - d[1]]


def _output2(m: Sequence[Lanes]) -> list[Lanes]:
    return [m[0] + m[1] + m[2], m[1] - m[2] + m[3]]


_FORMS = {2: (_input2, _output2), 4: (_input4, _output4)}


def filter_transform(size: int) -> tuple[tuple[float, ...], ...]:
    """Return G, the matrix that takes three taps to the points of F(size x size, 3x3)."""
    points = [0.0, 1.0, -1.0] if size == 2 else [0.0, NEAR, -NEAR, FAR, -FAR]
    rows = []
    for p in points:
        scale = 1.0
        for q in points:
            scale *= 1.0 if p == q else p - q
        rows.append((1 / scale, p / scale, p * p / scale))
    if size == 2:  # _input2 has the point 0 with the other sign
        rows[0] = (1.0, 0.0, 0.0)
    return (*rows, (0.0, 0.0, 1.0))


def _rows(width: int, read: Callable[[int, int], Lanes], transform: Any) -> Iterator[list[Lanes]]:
    """Yield the rows of the grid that is transformed along its columns, then along its rows.

    Reading, arithmetic and what is done to a row alternate, to keep few values in registers.
    """
    columns = [transform([read(i, j) for i in range(width)]) for j in range(width)]
    for row in zip(*columns):
        yield transform(row)


def _input(size: int, x: Lanes, row: Lanes, column: Lanes, v: Lanes, point: Lanes) -> None:
    width = size + 2

    def read(i: int, j: int) -> Lanes:
        return load_lanes(x + row * i + column * j, 0)

    for i, values in enumerate(_rows(width, read, _FORMS[size][0])):
        for j, value in enumerate(values):
            store_lanes(v + point * (width * i + j), 0, value)


@vectorised
def input_tile(size: Lanes, x: Lanes, row: Lanes, column: Lanes, v: Lanes, point: Lanes) -> None:
    """Write the values at the points of the tile of that size at x; strides are in bytes."""
    chosen(size, {n: partial(_input, n, x, row, column, v, point) for n in _FORMS})


def _finish(value: Lanes, low: Lanes, high: Lanes) -> Lanes:
    """The value within bounds; NaN stays."""
    value = where(value < low, low, value)
    return where(value > high, high, value)


@vectorised
def output_tile(
    size: Lanes,
    m: Lanes,
    point: Lanes,
    bias: Lanes,
    y: Lanes,
    row: Lanes,
    column: Lanes,
    low: Lanes,
    high: Lanes,
    r: Lanes,
    row_r: Lanes,
    column_r: Lanes,
    before: Lanes,
) -> None:
    """Write the tile of that size at y: transformed products plus bias, within bounds.

    Where there is a tile at r, not 0, they are raised to `before` and added to it first.
    """

    def write(width: int, adds: bool) -> None:
        b, lowest, highest = load_lanes(bias, 0), low.cast(F32).splat(), high.cast(F32).splat()
        floor = before.cast(F32).splat()

        def read(i: int, j: int) -> Lanes:
            return load_lanes(m + point * ((width + 2) * i + j), 0)

        for i, values in enumerate(_rows(width + 2, read, _FORMS[width][1])):
            for j, value in enumerate(values):
                value = value + b
                if adds:
                    value = where(value < floor, floor, value)
                    value = value + load_lanes(r + row_r * i + column_r * j, 0)
                store_lanes(y + row * i + column * j, 0, _finish(value, lowest, highest))

    def sized(width: int) -> None:
        chosen(r.compare("!=", 0), {k: partial(write, width, bool(k)) for k in (0, 1)})

    chosen(size, {width: partial(sized, width) for width in _FORMS})


def _product(
    rows: int,
    vectors: int,
    a: Lanes,
    stride: Lanes,
    b: Lanes,
    rounds: Lanes,
    m: Lanes,
    stride_m: Lanes,
) -> None:
    """Write so many rows of so many vectors of a panel: as many as registers hold the sums of."""
    builder = a.builder

    def turn(now: Lanes, sums: list[Lanes]) -> list[Lanes]:
        sums = list(sums)
        per = LANES // STEPS
        at = a + (now >> (per.bit_length() - 1)) * stride + (now & (per - 1)) * (STEPS * 4)
        weights = b + now * (STEPS * PANEL * 4)
        for step in range(STEPS):
            for line in range(vectors):
                prefetch(weights + (2 * step + line + AHEAD) * 64)
            right = [load_lanes(weights, step * PANEL + v * LANES) for v in range(vectors)]
            for row in range(rows):
                left = load_one(at + (row * 64 + step * 4)).splat()
                for v in range(vectors):
                    place = vectors * row + v
                    sums[place] = sums[place] + left * right[v]
        return sums

    zero = Lanes(builder, ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES))
    sums = stretch(builder, (I64(0), rounds.value), 1, [zero] * (vectors * rows), turn)
    for number, total in enumerate(sums):
        row, v = divmod(number, vectors)
        store_lanes(m + stride_m * v, row * LANES, total)


def _products(
    rows: int, a: Lanes, stride: Lanes, b: Lanes, rounds: Lanes, m: Lanes, stride_m: Lanes
) -> None:
    vectors = 2 if held() >= 2 * max(ROWS) else 1
    most = (held() - 2) // vectors
    pieces = -(-rows // most)
    for first in range(0, 2, vectors):
        done = 0
        for piece in range(1, pieces + 1):
            count = rows * piece // pieces - done
            place = m + stride_m * first + done * 64
            _product(count, vectors, a + done * 64, stride, b + first * 64, rounds, place, stride_m)
            done += count


@vectorised
def product(
    rows: Lanes, a: Lanes, stride: Lanes, b: Lanes, rounds: Lanes, m: Lanes, stride_m: Lanes
) -> None:
    """Write a block of `rows` tiles, one of ROWS, by PANEL filters: m = a b.

    a: (channel blocks, tiles, 16), a block every `stride` bytes; b: (channels, PANEL); m:
    (2, tiles, 16), a half every `stride_m` bytes. A round takes STEPS channels.
    """
    operands = (a, stride, b, rounds, m, stride_m)
    chosen(rows, {count: partial(_products, count, *operands) for count in ROWS})
