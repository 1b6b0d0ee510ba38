"""The entries of Winograd's convolutions: what they are given, how work is cut, their memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.kernels.cpu.products.conv_epilogue import ConvEpilogue
from soapstone.kernels.cpu.substrate.layout import is_float32, overlaps
from soapstone.kernels.cpu.winograd.loops import (
    BLOCK,
    panels_of_weights,
    parts_of_panels,
    parts_of_tiles,
    values_of_tiles,
)
from soapstone.kernels.cpu.winograd.transforms import PANEL, ROWS, filter_transform
from soapstone.kernels.entry import Array, Entry
from soapstone.native import promises
from soapstone.native.copies import copy
from soapstone.native.entries import sequence
from soapstone.native.memory import Block, aligned_array, scratch_array
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.records import dataclass

_LANES = 16
_FEWEST = 16  # channels and filters
# Transformed weights are 16 or 36 numbers for 9. On fewer pixels, a network's weights, which come
# from memory on each run, cost more than is saved, though a measurement finds them in a cache.
_FEWEST_PIXELS = {2: 196, 4: 784}
# Where weights change, the direct form, too, has to reorder them.
_FEWEST_CHANGING, _FEWEST_DEEP, _FEWEST_PRODUCTS = 16, 32, 8192
_KEPT = 2 << 20  # bytes of transformed weights that every block of tiles may read again
_FEW_TILES = 64  # so many, or fewer, do not pay for storing all transformed weights
_PASS = 4 << 20  # bytes of values for which weights are transformed once
_FEWEST_VALUES = 12288  # pixels of the fewer of channels and filters: else transforms cost too much


def _ceil(value: int, step: int) -> int:
    return -(-value // step)


def rows_of_block(tiles: int, threads: int) -> int:
    """Return how many tiles are taken at once, so that the threads end together.

    Each block reads all weights, which costs about what two more tiles would.
    """

    def cost(rows: int) -> int:
        return _ceil(_ceil(tiles, rows), threads) * (rows + 2)

    return min(reversed(ROWS), key=cost)


def _weights(w: Array, size: int) -> Array:
    """Return the weights at the points: (points, panels, channels, PANEL), padded with zeros.

    They are made in small products: of larger ones NumPy's library would wake its own threads.
    """
    filters, channels = w.shape[:2]
    points, blocks = (size + 2) ** 2, _ceil(channels, _LANES)
    store = aligned_array((points, _ceil(filters, PANEL), blocks * _LANES, PANEL), np.float32)
    form = np.array(filter_transform(size))
    both = np.kron(form, form)
    for panel in range(store.shape[1]):
        part = w[panel * PANEL : (panel + 1) * PANEL].reshape(-1, channels, 9)
        taps = np.zeros((blocks * _LANES, 9, PANEL))
        taps[:channels, :, : len(part)] = part.transpose(1, 2, 0)
        taps = taps.reshape(blocks, _LANES, 9, PANEL).swapaxes(1, 2).reshape(blocks, 9, -1)
        made = store[:, panel].reshape(points, blocks, -1)
        made[...] = (both @ taps).swapaxes(0, 1)
    return store


def _spread(lines: int) -> int:
    """Return the bytes of so many cache lines, and one more if that is needed to make them odd.

    What lies a power of two apart competes for the same places of a cache.
    """
    return (lines | 1) * 64


@dataclass(frozen=True)
class Problem:
    """A convolution: of x, (n, channels, h, w), to y, (n, filters, h', w'), with its epilogue.

    `w` is (filters, channels, 3, 3), and `turned` for the gradient of an input: (channels, filters,
    3, 3), each with its taps in the opposite order. `padding` is (top, left).
    """

    x: Array
    w: Array
    y: Array
    bias: Array | None
    padding: tuple[int, int]
    epilogue: ConvEpilogue
    threads: int
    constant: bool = False
    turned: bool = False

    def served(self) -> bool:
        """Whether the kernels take the types, sizes and strides."""
        w = self.w.swapaxes(0, 1) if self.turned else self.w
        (n, channels), (filters, given) = self.x.shape[:2], w.shape[:2]
        if given != channels or self.y.shape[:2] != (n, filters) or 0 in self.y.shape:
            return False
        if min(self.padding) < 0 or min(channels, filters) < _FEWEST:
            return False
        images = [a for a in (self.x, self.y, self.epilogue.added) if a is not None]
        if any(a.strides[1] != 4 for a in images) or overlaps(self.y):
            return False
        if not self.constant and self.w.strides[1:] != (36, 12, 4):
            return False
        return is_float32(*images, self.w, *(() if self.bias is None else (self.bias,)))


@dataclass(frozen=True)
class Plan:
    """How the work is cut.

    The product takes `rows` tiles, and `group` such blocks one after another by each panel of
    weights. `by_panels`: all tiles by one panel after another, which is transformed just before;
    else all weights are there when the first tiles come.
    """

    rows: int
    group: int = 1
    by_panels: bool = False


def _plan(problem: Problem, size: int, tiles: int) -> Plan | None:
    """Return how to cut the work, or None where the direct form is known to be faster."""
    filters, threads = problem.y.shape[1], problem.threads
    pixels, depth = problem.y.size // filters, min(problem.x.shape[1], filters)
    together = Plan(rows_of_block(tiles, threads))
    if problem.constant:
        enough = pixels >= _FEWEST_PIXELS[size] and pixels * depth >= _FEWEST_VALUES
        return together if enough else None
    if pixels < _FEWEST_CHANGING or depth < _FEWEST_DEEP or pixels * depth < _FEWEST_PRODUCTS:
        return None
    made = (size + 2) ** 2 * problem.w.nbytes // 9
    if _ceil(filters, PANEL) < threads or (made <= _KEPT and tiles > _FEW_TILES):
        return together
    return Plan(rows_of_block(min(tiles, _FEW_TILES), 1), 8, by_panels=True)


def entry(problem: Problem, size: int, plan: Plan | None) -> Entry | None:
    """Return the entry by tiles of `size`, which must be 2 where weights change, or None.

    Without a plan, the sizes decide how the work is cut, and whether it pays at all.
    """
    y = problem.y
    tiles = y.shape[0] * _ceil(y.shape[2], size) * _ceil(y.shape[3], size)
    plan = plan or _plan(problem, size, tiles)
    if plan is None:
        return None
    bias = aligned_array((_ceil(y.shape[1], PANEL) * PANEL,), np.float32, zero=True)
    entries: list[Entry | None] = []
    if problem.bias is not None:
        entries.append(copy(bias[: y.shape[1]], problem.bias, 1))
    make = _by_panels if plan.by_panels else _by_tiles
    entries.extend(make(problem, size, plan, bias, tiles))
    return sequence(entries)


@dataclass(frozen=True)
class _Buffers:
    """Private memory: of weights, values and products, with the strides the kernels want.

    `strides`: of values along points and channel blocks, then of products; of weights along points
    and panels. `sizes`: bytes from one part's values, products and weights to the next part's.
    """

    weights: Array
    values: Array
    products: Array
    strides: tuple[int, int, int, int]
    steps: tuple[int, int]
    sizes: tuple[int, int, int]


def _block(
    problem: Problem,
    size: int,
    plan: Plan,
    bias: Array,
    buffers: _Buffers,
    parts: int,
    tiles: tuple[int, int],
) -> Block:
    """Return the kernels' words for the tiles from the first number to before the second."""
    x, y, added = problem.x, problem.y, problem.epilogue.added
    epilogue, filters, channels = problem.epilogue, y.shape[1], x.shape[1]
    across, down = _ceil(y.shape[3], size), _ceil(y.shape[2], size)
    value_step, product_step = buffers.strides[:2], buffers.strides[2:]
    return BLOCK.pack(
        tiles=tiles[1],
        first=tiles[0],
        across=across,
        each=across * down,
        x_size=x.shape[2:],
        channels=channels,
        y_size=y.shape[2:],
        filters=filters,
        padding=problem.padding,
        x=x,
        x_step=_steps(x),
        y=y,
        y_step=_steps(y),
        added=0 if added is None else added,
        added_step=(0, 0, 0) if added is None else _steps(added),
        bias=bias,
        weights=buffers.weights,
        values=buffers.values,
        products=buffers.products,
        value_step=value_step,
        product_step=product_step,
        weight_step=buffers.steps,
        deep=_ceil(channels, _LANES),
        panels=_ceil(filters, PANEL),
        rows=plan.rows,
        parts=parts,
        size=size,
        part=buffers.sizes,
        group=plan.group,
        given=0 if problem.constant else problem.w,
        given_step=problem.w.strides[0],
        turned=problem.turned,
        before=epilogue.before,
        low=epilogue.low,
        high=epilogue.high,
    )


def _by_tiles(problem: Problem, size: int, plan: Plan, bias: Array, tiles: int) -> Sequence[Entry]:
    """Return the entries that take groups of tiles all the way, once the weights are there."""
    points, held = (size + 2) ** 2, plan.rows * plan.group
    deep, panels = _ceil(problem.x.shape[1], _LANES), _ceil(problem.y.shape[1], PANEL)
    parts = min(problem.threads, _ceil(tiles, plan.rows))
    strides = (_spread(deep * held), 64 * held, _spread(2 * panels * held), 64 * held)
    sizes = strides[0] * points, strides[2] * points
    if problem.constant:
        w = problem.w
        weights = packed(w, ("winograd", size), lambda w: _weights(promises.held(w), size))
        steps = weights.strides[0], weights.strides[1]
    else:
        panel = deep * _LANES * PANEL * 4
        steps = _spread(panels * panel // 64), panel
        weights = _working(steps[0] * points)
    values, products = (_working(parts * nbytes) for nbytes in sizes)
    buffers = _Buffers(weights, values, products, strides, steps, (*sizes, 0))
    block = _block(problem, size, plan, bias, buffers, parts, (0, tiles))
    entries = []
    if not problem.constant:
        several = useful_threads(problem.threads, weights.nbytes)
        entries.append(parallel_for(panels_of_weights, block, panels * deep, several))
    return *entries, parallel_for(parts_of_tiles, block, parts, parts)


def _by_panels(problem: Problem, size: int, plan: Plan, bias: Array, tiles: int) -> Sequence[Entry]:
    """Return the entries of passes: the values of many tiles, then one panel after another."""
    points, rows = (size + 2) ** 2, plan.rows
    deep, panels = _ceil(problem.x.shape[1], _LANES), _ceil(problem.y.shape[1], PANEL)
    parts = min(problem.threads, panels)
    blocks = min(_ceil(tiles, rows), _ceil(_PASS, points * deep * 64 * rows))
    held, group = blocks * rows, min(plan.group, blocks) * rows
    strides = _spread(deep * held), 64 * held, _spread(2 * group), 64 * group
    panel = deep * _LANES * PANEL * 4
    step = _spread(panel // 64)
    sizes = 0, strides[2] * points, step * points
    buffers = _Buffers(
        *(_working(parts * sizes[2]), _working(strides[0] * points), _working(parts * sizes[1])),
        *(strides, (step, panel), sizes),
    )
    entries = []
    for first in range(0, tiles, held):
        ends = first, min(tiles, first + held)
        block = _block(problem, size, plan, bias, buffers, parts, ends)
        entries.append(parallel_for(values_of_tiles, block, parts, parts))
        entries.append(parallel_for(parts_of_panels, block, parts, parts))
    return entries


def _working(nbytes: int) -> Array:
    """Return memory of floats that entries work in."""
    return scratch_array((nbytes // 4,), np.float32)


def _steps(array: Array) -> tuple[int, ...]:
    """Return the strides along n, h and w."""
    return array.strides[0], array.strides[2], array.strides[3]
