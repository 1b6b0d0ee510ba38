"""The loops of Winograd's convolution: tiles to points, products at each point, points to tiles.

Words of the block: 0 tiles, 1 tiles across, 2 tiles of an image; 3-4 rows and columns of x, 5 its
channels; 6-7 rows and columns of y, 8 its channels; 9-10 padding (top, left); 11-14 x and its
strides along n, h, w in bytes; 15-18 y and its own; 19-22 the operand that is added (or 0) and its
own; 23 bias, padded to whole panels; 24 the floor before the addition, 25-26 bounds of the result;
27 weights, 28 values at the points, 29 products; 30-31 the strides of the values along points and
channel blocks, 32-33 those of the products along points and filter blocks; 34 channel blocks,
35 panels of filters, 36 tiles of a block, 37 parts, 38 the size of a tile: 2 or 4; 39-40 bytes
between the values, and the products, of two parts; 41 blocks of a group; 42-43 the strides of the
weights along points and panels; 44-46 weights as they are given, the stride along co, and whether
the call is a gradient; 47 bytes between the weights of two parts;
48 the first tile of a pass.

Values are (points, channel blocks, tiles, 16), products (points, filter blocks, tiles, 16), weights
(points, panels, channels, 32). Tiles are taken by groups of blocks, of which each panel of weights
at a point is read once.
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.winograd.transforms import (
    input2,
    input4,
    output2,
    output2_add,
    output4,
    output4_add,
    product4,
    product7,
    product8,
    product10,
    product12,
    product13,
    product14,
)
from soapstone.kernels.cpu.winograd.weights import weights_of_panel
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import as_float, stack, words
from soapstone.native.simd import load, load_first, splat, store, store_first


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
def _output_tiles(
    w: Any, products: int, begin: int, count: int, first_block: int, last_block: int
) -> None:
    """Write the results of `count` tiles from number `begin` on, of these filter blocks."""
    size = w[38]
    buffer = stack(1024)
    added = stack(1024)
    before, low, high = as_float(w[24]), as_float(w[25]), as_float(w[26])
    image, rest = begin // w[2], begin % w[2]
    first, last = rest // w[1] * size, rest % w[1] * size
    for block in range(first_block, min((w[8] + 15) // 16, last_block)):
        filters = w[8] - block * 16
        y, r = w[15] + image * w[16] + block * 64, w[19] + image * w[20] + block * 64
        down, along = first, last
        m, bias = products + (block - first_block) * w[33], w[23] + block * 64
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
def _multiply(w: Any, values: int, b: int, products: int, blocks: int) -> None:
    """Multiply blocks of tiles by one panel at one point."""
    rows, rounds = w[36], w[34] * 4
    for block in range(blocks):
        a, m = values + block * rows * 64, products + block * rows * 64
        if rows == 14:
            product14(a, w[31], b, rounds, m, w[33])
        elif rows == 13:
            product13(a, w[31], b, rounds, m, w[33])
        elif rows == 12:
            product12(a, w[31], b, rounds, m, w[33])
        elif rows == 10:
            product10(a, w[31], b, rounds, m, w[33])
        elif rows == 8:
            product8(a, w[31], b, rounds, m, w[33])
        elif rows == 7:
            product7(a, w[31], b, rounds, m, w[33])
        else:
            product4(a, w[31], b, rounds, m, w[33])


@native("body")
def parts_of_tiles(block: Any, begin: int, end: int) -> int:
    """Items: parts of the tiles. Each goes all the way with one group of tiles after another."""
    w = words(block)
    size, rows, parts, panels, group = w[38], w[36], w[37], w[35], w[41]
    blocks = (w[0] + rows - 1) // rows
    for part in range(begin, end):
        values, products = w[28] + part * w[39], w[29] + part * w[40]
        index, last = part * blocks // parts, (part + 1) * blocks // parts
        while index < last:
            taken, first = min(group, last - index), index * rows
            count = min(taken * rows, w[0] - first)
            _input_tiles(w, values, first, count)
            for point in range((size + 2) * (size + 2)):
                weights, m = w[27] + point * w[42], products + point * w[32]
                for _ in range(panels):
                    _multiply(w, values + point * w[30], weights, m, taken)
                    weights += w[43]
                    m += 2 * w[33]
            _output_tiles(w, products, first, count, 0, 2 * panels)
            index += taken
    return 0


@native("body")
def panels_of_weights(block: Any, begin: int, end: int) -> int:
    """Items: sixteen channels of a panel of weights, which are put where the products want them."""
    w = words(block)
    filters, channels, deep = w[8], w[5], w[34]
    for item in range(begin, end):
        panel, part = item // deep, item % deep
        to = w[27] + panel * w[43] + part * 2048
        weights_of_panel(w[44], w[45], w[46], filters, channels, panel, part, to, w[42])
    return 0


@native("body")
def values_of_tiles(block: Any, begin: int, end: int) -> int:
    """Items: parts of the tiles of a pass, whose values at the points are computed."""
    w = words(block)
    tiles = w[0] - w[48]
    for part in range(begin, end):
        first, last = part * tiles // w[37], (part + 1) * tiles // w[37]
        _input_tiles(w, w[28] + first * 64, w[48] + first, last - first)
    return 0


@native("body")
def parts_of_panels(block: Any, begin: int, end: int) -> int:
    """Items: parts of the panels. Each goes all the way with one panel of weights after another.

    The values of the pass's tiles are there already.
    """
    w = words(block)
    rows, group, filters, channels, deep = w[36], w[41], w[8], w[5], w[34]
    tiles = w[0] - w[48]
    blocks = (tiles + rows - 1) // rows
    for part in range(begin, end):
        weights, products = w[27] + part * w[47], w[29] + part * w[40]
        for panel in range(part * w[35] // w[37], (part + 1) * w[35] // w[37]):
            for k in range(deep):
                to = weights + k * 2048
                weights_of_panel(w[44], w[45], w[46], filters, channels, panel, k, to, w[42])
            index = 0
            while index < blocks:
                taken, first = min(group, blocks - index), index * rows
                values = w[28] + first * 64
                for point in range(16):
                    place, m = weights + point * w[42], products + point * w[32]
                    _multiply(w, values + point * w[30], place, m, taken)
                count = min(taken * rows, tiles - first)
                _output_tiles(w, products, w[48] + first, count, 2 * panel, 2 * panel + 2)
                index += taken
    return 0
