"""The loops of Winograd's convolution: tiles to points, products at each point, points to tiles.

Values are (points, channel blocks, tiles, 16), products (points, filter blocks, tiles, 16), weights
(points, panels, channels, 32). Tiles are taken by groups of blocks, of which each panel of weights
at a point is read once.
"""

from __future__ import annotations

from typing import Any

from soapstone.kernels.cpu.winograd.transforms import input_tile, output_tile, product
from soapstone.kernels.cpu.winograd.weights import weights_of_panel
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import stack
from soapstone.native.simd import load, load_first, splat, store, store_first

# tiles: of a pass, from `first` to before this one; across: of a row, each: of an image; filters:
# of y; added: the operand that is added, or 0; bias: padded to whole panels; before: the floor
# before the addition; low, high: bounds of the result; weights, values, products: at the points,
# with their steps along points, panels and blocks of channels and filters; deep: blocks of
# channels; panels: of filters; rows: tiles of a block; size: of a tile, 2 or 4; part: bytes
# between those of two parts; group: blocks that are taken together; given: the weights as they
# are, their step along co, and whether the call is a gradient.
BLOCK = Fields(
    "tiles first across each x_size(h w) channels y_size(h w) filters padding(top left) x"
    " x_step(n h w) y y_step(n h w) added added_step(n h w) bias weights values products"
    " value_step(point block) product_step(point block) weight_step(point panel) deep panels rows"
    " parts size part(values products weights) group given given_step turned",
    reals="before low high",
)
_block_of = BLOCK.at


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
    width = w.size + 2
    for i in range(width * width):
        store(buffer, i * 16, splat(0.0))
    first, last = max(0, -left), min(width, w.x_size_w - left)
    for i in range(max(0, -top), min(width, w.x_size_h - top)):
        place = buffer + (i * width + first) * 64
        for j in range(first, last):
            _copy(x + i * w.x_step_h + j * w.x_step_w, place, channels)
            place += 64


@routine
def _input_tiles(w: Any, values: int, begin: int, count: int) -> None:
    """Transform `count` tiles from number `begin` on."""
    size = w.size
    width = size + 2
    buffer = stack(2304)
    image, rest = begin // w.each, begin % w.each
    start, first, last = w.x + image * w.x_step_n, rest // w.across * size, rest % w.across * size
    for block in range(w.deep):
        channels = w.channels - block * 16
        x, down, along = start + block * 64, first, last
        v = values + block * w.value_step_block
        for _ in range(count):
            top, left = down - w.padding_top, along - w.padding_left
            row, column, source = w.x_step_h, w.x_step_w, x + top * w.x_step_h + left * w.x_step_w
            inside = (
                top >= 0 and left >= 0 and top + width <= w.x_size_h and left + width <= w.x_size_w
            )
            if not inside or channels < 16:
                _gather(w, buffer, source, top, left, channels)
                row, column, source = width * 64, 64, buffer
            input_tile(size, source, row, column, v, w.value_step_point)
            v += 64
            along += size
            if along >= w.y_size_w:
                along = 0
                down += size
                if down >= w.y_size_h:
                    down = 0
                    x += w.x_step_n


@routine
def _output_tiles(
    w: Any, products: int, begin: int, count: int, first_block: int, last_block: int
) -> None:
    """Write the results of `count` tiles from number `begin` on, of these filter blocks."""
    size = w.size
    buffer = stack(1024)
    added = stack(1024)
    before, low, high = w.before, w.low, w.high
    image, rest = begin // w.each, begin % w.each
    first, last = rest // w.across * size, rest % w.across * size
    for block in range(first_block, min((w.filters + 15) // 16, last_block)):
        filters = w.filters - block * 16
        y, r = w.y + image * w.y_step_n + block * 64, w.added + image * w.added_step_n + block * 64
        down, along = first, last
        m, bias = products + (block - first_block) * w.product_step_block, w.bias + block * 64
        for _ in range(count):
            to = y + down * w.y_step_h + along * w.y_step_w
            other = r + down * w.added_step_h + along * w.added_step_w
            row, column, target = w.y_step_h, w.y_step_w, to
            row_r, column_r, source = w.added_step_h, w.added_step_w, other
            rows, columns = min(size, w.y_size_h - down), min(size, w.y_size_w - along)
            whole = rows == size and columns == size and filters >= 16
            if not whole:
                row, column, target = size * 64, 64, buffer
                if w.added != 0:
                    row_r, column_r, source = size * 64, 64, added
                    for i in range(rows):
                        for j in range(columns):
                            place = added + (i * size + j) * 64
                            _copy(other + i * w.added_step_h + j * w.added_step_w, place, filters)
            output_tile(
                size,
                m,
                w.product_step_point,
                bias,
                target,
                row,
                column,
                low,
                high,
                source if w.added != 0 else 0,
                row_r,
                column_r,
                before,
            )
            if not whole:
                for i in range(rows):
                    for j in range(columns):
                        _copy(
                            buffer + (i * size + j) * 64,
                            to + i * w.y_step_h + j * w.y_step_w,
                            filters,
                        )
            m += 64
            along += size
            if along >= w.y_size_w:
                along = 0
                down += size
                if down >= w.y_size_h:
                    down = 0
                    y += w.y_step_n
                    r += w.added_step_n


@routine
def _multiply(w: Any, values: int, b: int, products: int, blocks: int) -> None:
    """Multiply blocks of tiles by one panel at one point."""
    rows, rounds = w.rows, w.deep * 4
    for block in range(blocks):
        a, m = values + block * rows * 64, products + block * rows * 64
        product(rows, a, w.value_step_block, b, rounds, m, w.product_step_block)


@native("body")
def parts_of_tiles(block: Any, begin: int, end: int) -> int:
    """Items: parts of the tiles. Each goes all the way with one group of tiles after another."""
    w = _block_of(block)
    size, rows, parts, panels, group = w.size, w.rows, w.parts, w.panels, w.group
    blocks = (w.tiles + rows - 1) // rows
    for part in range(begin, end):
        values, products = w.values + part * w.part_values, w.products + part * w.part_products
        index, last = part * blocks // parts, (part + 1) * blocks // parts
        while index < last:
            taken, first = min(group, last - index), index * rows
            count = min(taken * rows, w.tiles - first)
            _input_tiles(w, values, first, count)
            for point in range((size + 2) * (size + 2)):
                weights, m = (
                    w.weights + point * w.weight_step_point,
                    products + point * w.product_step_point,
                )
                for _ in range(panels):
                    _multiply(w, values + point * w.value_step_point, weights, m, taken)
                    weights += w.weight_step_panel
                    m += 2 * w.product_step_block
            _output_tiles(w, products, first, count, 0, 2 * panels)
            index += taken
    return 0


@native("body")
def panels_of_weights(block: Any, begin: int, end: int) -> int:
    """Items: sixteen channels of a panel of weights, which are put where the products want them."""
    w = _block_of(block)
    filters, channels, deep = w.filters, w.channels, w.deep
    for item in range(begin, end):
        panel, part = item // deep, item % deep
        to = w.weights + panel * w.weight_step_panel + part * 2048
        weights_of_panel(
            w.given, w.given_step, w.turned, filters, channels, panel, part, to, w.weight_step_point
        )
    return 0


@native("body")
def values_of_tiles(block: Any, begin: int, end: int) -> int:
    """Items: parts of the tiles of a pass, whose values at the points are computed."""
    w = _block_of(block)
    tiles = w.tiles - w.first
    for part in range(begin, end):
        first, last = part * tiles // w.parts, (part + 1) * tiles // w.parts
        _input_tiles(w, w.values + first * 64, w.first + first, last - first)
    return 0


@native("body")
def parts_of_panels(block: Any, begin: int, end: int) -> int:
    """Items: parts of the panels. Each goes all the way with one panel of weights after another.

    The values of the pass's tiles are there already.
    """
    w = _block_of(block)
    rows, group, filters, channels, deep = w.rows, w.group, w.filters, w.channels, w.deep
    tiles = w.tiles - w.first
    blocks = (tiles + rows - 1) // rows
    for part in range(begin, end):
        weights, products = w.weights + part * w.part_weights, w.products + part * w.part_products
        for panel in range(part * w.panels // w.parts, (part + 1) * w.panels // w.parts):
            for k in range(deep):
                to = weights + k * 2048
                weights_of_panel(
                    w.given,
                    w.given_step,
                    w.turned,
                    filters,
                    channels,
                    panel,
                    k,
                    to,
                    w.weight_step_point,
                )
            index = 0
            while index < blocks:
                taken, first = min(group, blocks - index), index * rows
                values = w.values + first * 64
                for point in range(16):
                    place, m = (
                        weights + point * w.weight_step_point,
                        products + point * w.product_step_point,
                    )
                    _multiply(w, values + point * w.value_step_point, place, m, taken)
                count = min(taken * rows, tiles - first)
                _output_tiles(w, products, w.first + first, count, 2 * panel, 2 * panel + 2)
                index += taken
    return 0
