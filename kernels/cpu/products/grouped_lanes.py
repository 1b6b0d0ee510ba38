"""The inner block of `grouped`: some pixels of one row of sixteen channels of results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from llvmlite import ir

from soapstone.native.lanes import (
    F32,
    I32,
    I64,
    LANES,
    Lanes,
    chosen,
    held,
    load_lanes,
    load_one,
    store_lanes,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

PIXELS = (14, 7, 4, 2, 1)  # of a block, or of several where registers hold fewer sums
STRIDES = (1, 2)
FEW = held() < 2 * max(PIXELS)  # whether registers hold the sums of a part of the pixels
_UNROLLED = 8  # channels of a group: of more, one at a time in a loop


def _uses(pixels: int, stride: int, window: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield the columns of x that a block reads, each with (pixel, place of the window)."""
    for column in range((pixels - 1) * stride + window):
        found = [(p, column - p * stride) for p in range(pixels)]
        found = [(p, place) for p, place in found if 0 <= place < window]
        if found:
            yield column, found


def _block(
    group: int,
    window: int,
    stride: int,
    pixels: int,
    rows: Lanes,
    count: Lanes,
    shift: Lanes,
    weights: Lanes,
    bias: Lanes,
    low: Lanes,
    high: Lanes,
    to: Lanes,
    step: Lanes,
) -> None:
    b = rows.builder

    def of_channel(x: Lanes, w: Lanes, sums: list[Lanes], numbers: list[int] | None) -> list[Lanes]:
        """Add the products of one channel of each group, or, without numbers, of the one at x."""
        sums = list(sums)
        if numbers is None and FEW:  # one tap in registers at a time leaves room for more sums
            for place in range(window):
                tap = load_lanes(w, place * LANES)
                for pixel in range(pixels):
                    column = pixel * stride + place
                    sums[pixel] += load_one(x + column * LANES * 4).splat() * tap
            return sums
        taps = [load_lanes(w, place * LANES) for place in range(window)]
        for column, uses in _uses(pixels, stride, window):
            if numbers is None:
                value = load_one(x + column * LANES * 4).splat()
            else:
                value = load_lanes(x, column * LANES)
                if group > 1:
                    order = ir.Constant(ir.VectorType(I32, LANES), numbers)
                    value = Lanes(b, b.shuffle_vector(value.value, value.value, order))
            for pixel, place in uses:
                sums[pixel] = sums[pixel] + value * taps[place]
        return sums

    def of_row(number: Lanes, sums: list[Lanes]) -> list[Lanes]:
        x = load_one(rows + number * 8, I64) + shift
        w = weights + number * (group * window * LANES * 4)
        if group > _UNROLLED:

            def turn(k: Lanes, held: list[Lanes]) -> list[Lanes]:
                return of_channel(x + k * 4, w + k * (window * LANES * 4), held, None)

            return stretch(b, (I64(0), I64(group)), 1, sums, turn)
        for k in range(group):
            numbers = [lane // group * group + k for lane in range(LANES)]
            sums = of_channel(x, w + k * window * LANES * 4, sums, numbers)
        return sums

    sums = stretch(b, (I64(0), count.value), 1, [load_lanes(bias, 0)] * pixels, of_row)
    lowest, highest = (bound.cast(F32).splat() for bound in (low, high))
    for pixel, total in enumerate(sums):
        total = where(total < lowest, lowest, total)  # NaN stays
        store_lanes(to + step * pixel, 0, where(total > highest, highest, total))


def block(group: int, window: int) -> Any:
    """Return the block for so many channels of a group and so many columns of a window."""

    def write(
        pixels: Lanes,
        stride: Lanes,
        rows: Lanes,
        count: Lanes,
        shift: Lanes,
        weights: Lanes,
        bias: Lanes,
        low: Lanes,
        high: Lanes,
        to: Lanes,
        step: Lanes,
    ) -> None:
        """Write `pixels` results, one of PIXELS, `step` bytes apart.

        stride: between their windows, one of STRIDES. rows: the addresses of as many rows of x as
        `count`, (columns, 16) each, of which windows begin `shift` bytes after. weights: (count,
        group, window, 16). low, high: bounds of the results.
        """
        most = max(PIXELS)
        if FEW:
            most = held() * 5 // 8 if group > _UNROLLED else held() // 2

        def piece(pixels: int, first: int, stride: int) -> None:
            at, target = shift + first * stride * LANES * 4, to + step * first
            given = rows, count, at, weights, bias, low, high, target, step
            _block(group, window, stride, pixels, *given)

        def strided(size: int) -> None:
            each = -(-size // -(-size // most))
            for first in range(0, size, each):
                part = min(each, size - first)
                chosen(stride, {s: partial(piece, part, first, s) for s in STRIDES})

        chosen(pixels, {size: partial(strided, size) for size in PIXELS})

    return vectorised(write)
