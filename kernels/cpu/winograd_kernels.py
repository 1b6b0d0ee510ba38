"""The loops of Winograd's convolution: tiles to points, products at each point, points to tiles.

Words of the block: 0 tiles, 1 tiles across, 2 tiles of an image; 3-4 rows and columns of x, 5 its
channels; 6-7 rows and columns of y, 8 its channels; 9-10 padding (top, left); 11-14 x and its
strides along n, h, w in bytes; 15-18 y and its own; 19-22 the operand that is added (or 0) and its
own; 23 bias, padded to whole panels; 24 the floor before the addition, 25-26 bounds of the result;
27 weights, 28 values at the points, 29 products; 30-31 the strides of the values along points and
channel blocks, 32-33 those of the products along points and filter blocks; 34 channel blocks,
35 panels of filters, 36 tiles of a block, 37 parts, 38 the size of a tile: 2 or 4; 39-40 bytes
between the values, and the products, of two parts.

Values are (points, channel blocks, tiles, 16), products (points, filter blocks, tiles, 16), weights
(points, panels, channels, 32).
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.native import as_float, helper, native, routine, stack, words
from soapstone.kernels.cpu.simd import load, load_first, splat, store, store_first
from soapstone.kernels.cpu.winograd_lanes import (
    input2,
    input4,
    output2,
    output2_add,
    output4,
    output4_add,
    product4,
    product7,
    product10,
    product12,
    product13,
    product14,
)


@helper
def _copy(source: int, target: int, count: int) -> None:
    """Copy up to sixteen floats."""
    if count >= 16:
        store(target, 0, load(source, 0))
    else:
        store_first(target, 0, load_first(source, 0, count), count)


@helper
def _gather(w: Any, buffer: int, x: int, top: int, left: int, channels: int) -> None:
    """Copy a tile of x to the buffer, with zeros where it has no pixels or channels."""
    width = w[38] + 2
    for i in range(width * width):
        store(buffer, i * 16, splat(0.0))
    first, last = max(0, -left), min(width, w[4] - left)
    for i in range(max(0, -top), min(width, w[3] - top)):
        place = buffer + (i * width + first) * 64
        for j in range(first, last):
            _copy(x + i * w[13] + j * w[14], place, channels)
            place += 64


@routine
def _input_tiles(w: Any, values: int, begin: int, count: int) -> None:
    """Transform `count` tiles from number `begin` on."""
    size = w[38]
    width = size + 2
    buffer = stack(2304)
    image, rest = begin // w[2], begin % w[2]
    start, first, last = w[11] + image * w[12], rest // w[1] * size, rest % w[1] * size
    for block in range(w[34]):
        channels = w[5] - block * 16
        x, down, along = start + block * 64, first, last
        v = values + block * w[31]
        for _ in range(count):
            top, left = down - w[9], along - w[10]
            row, column, source = w[13], w[14], x + top * w[13] + left * w[14]
            inside = top >= 0 and left >= 0 and top + width <= w[3] and left + width <= w[4]
            if not inside or channels < 16:
                _gather(w, buffer, source, top, left, channels)
                row, column, source = width * 64, 64, buffer
            if size == 4:
                input4(source, row, column, v, w[30])
            else:
                input2(source, row, column, v, w[30])
            v += 64
            along += size
            if along >= w[7]:
                along = 0
                down += size
                if down >= w[6]:
                    down = 0
                    x += w[12]


@routine
def _output_tiles(w: Any, products: int, begin: int, count: int) -> None:
    """Write the results of `count` tiles from number `begin` on."""
    size = w[38]
    buffer = stack(1024)
    added = stack(1024)
    before, low, high = as_float(w[24]), as_float(w[25]), as_float(w[26])
    image, rest = begin // w[2], begin % w[2]
    first, last = rest // w[1] * size, rest % w[1] * size
    for block in range((w[8] + 15) // 16):
        filters = w[8] - block * 16
        y, r = w[15] + image * w[16] + block * 64, w[19] + image * w[20] + block * 64
        down, along = first, last
        m, bias = products + block * w[33], w[23] + block * 64
        for _ in range(count):
            to, other = y + down * w[17] + along * w[18], r + down * w[21] + along * w[22]
            row, column, target = w[17], w[18], to
            row_r, column_r, source = w[21], w[22], other
            rows, columns = min(size, w[6] - down), min(size, w[7] - along)
            whole = rows == size and columns == size and filters >= 16
            if not whole:
                row, column, target = size * 64, 64, buffer
                if w[19] != 0:
                    row_r, column_r, source = size * 64, 64, added
                    for i in range(rows):
                        for j in range(columns):
                            place = added + (i * size + j) * 64
                            _copy(other + i * w[21] + j * w[22], place, filters)
            if w[19] == 0:
                if size == 4:
                    output4(m, w[32], bias, target, row, column, low, high)
                else:
                    output2(m, w[32], bias, target, row, column, low, high)
            elif size == 4:
                output4_add(
                    m, w[32], bias, target, row, column, low, high, source, row_r, column_r, before
                )
            else:
                output2_add(
                    m, w[32], bias, target, row, column, low, high, source, row_r, column_r, before
                )
            if not whole:
                for i in range(rows):
                    for j in range(columns):
                        _copy(buffer + (i * size + j) * 64, to + i * w[17] + j * w[18], filters)
            m += 64
            along += size
            if along >= w[7]:
                along = 0
                down += size
                if down >= w[6]:
                    down = 0
                    y += w[16]
                    r += w[20]


@routine
def _multiply(w: Any, values: int, products: int, panels: int) -> None:
    """Multiply one block of tiles by all panels, which are numbered through the points."""
    rows, rounds = w[36], w[34] * 4
    weights = w[34] * 16 * 128
    for item in range(panels):
        point, panel = item // w[35], item % w[35]
        a, b = values + point * w[30], w[27] + item * weights
        m = products + point * w[32] + 2 * panel * w[33]
        if rows == 14:
            product14(a, w[31], b, rounds, m, w[33])
        elif rows == 13:
            product13(a, w[31], b, rounds, m, w[33])
        elif rows == 12:
            product12(a, w[31], b, rounds, m, w[33])
        elif rows == 10:
            product10(a, w[31], b, rounds, m, w[33])
        elif rows == 7:
            product7(a, w[31], b, rounds, m, w[33])
        else:
            product4(a, w[31], b, rounds, m, w[33])


@native("body")
def parts_of_tiles(block: Any, begin: int, end: int) -> int:
    """Items: parts of the tiles. Each goes all the way with one block of tiles after another."""
    w = words(block)
    size, rows, parts = w[38], w[36], w[37]
    panels = (size + 2) * (size + 2) * w[35]
    blocks = (w[0] + rows - 1) // rows
    for part in range(begin, end):
        values, products = w[28] + part * w[39], w[29] + part * w[40]
        for index in range(part * blocks // parts, (part + 1) * blocks // parts):
            first = index * rows
            count = min(rows, w[0] - first)
            _input_tiles(w, values, first, count)
            _multiply(w, values, products, panels)
            _output_tiles(w, products, first, count)
    return 0
