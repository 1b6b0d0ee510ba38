"""3x3 convolutions of stride 1 by Winograd's minimal filtering, where the weights are constant.

F(2x2, 3x3) multiplies 2.25 times less than the direct form, F(4x4, 3x3) 4 times; each is a variant,
and measured cost decides. Weights are transformed when the entry is made. Infinity or NaN in x
makes NaN of the results of its whole tile, not only of those whose window holds it.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from soapstone.kernels.cpu.copies import copy
from soapstone.kernels.cpu.layout import is_float32
from soapstone.kernels.cpu.native import pack, parallel_for, sequence, useful_threads
from soapstone.kernels.cpu.winograd_kernels import (
    panels_of_weights,
    parts_of_panels,
    parts_of_tiles,
    values_of_tiles,
)
from soapstone.kernels.cpu.winograd_lanes import PANEL, ROWS, filter_transform
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_LANES = 16
_FEWEST = 16  # channels and filters
# Transformed weights are 16 or 36 numbers for 9. On fewer pixels, a network's weights, which come
# from memory on each run, cost more than is saved, though a measurement finds them in a cache.
_FEWEST_PIXELS = {2: 196, 4: 784}
_FEWEST_CHANGING = 64  # pixels where weights change, which the direct form, too, has to reorder
_KEPT = 2 << 20  # bytes of transformed weights that every block of tiles may read again
_FEWEST_VALUES = 12288  # pixels of the fewer of channels and filters: else transforms cost too much


@dataclass(frozen=True)
class Finish:
    """What is done to a sum: raised to `before`, `added` to, and kept within bounds."""

    before: float = -math.inf
    added: Array | None = None
    low: float = -math.inf
    high: float = math.inf


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
    """Return the weights at the points: (points, panels, channels, PANEL), padded with zeros."""
    filters, channels = w.shape[:2]
    points = (size + 2) ** 2
    panels, deep = _ceil(filters, PANEL), _ceil(channels, _LANES) * _LANES
    taps = np.zeros((3, 3, deep, panels * PANEL))
    taps[:, :, :channels, :filters] = w.transpose(2, 3, 1, 0)
    form = np.array(filter_transform(size))
    made = np.kron(form, form) @ taps.reshape(9, -1)
    made = made.reshape(points, deep, panels, PANEL).transpose(0, 2, 1, 3)
    store = _zeros(made.size).reshape(made.shape)
    store[...] = made
    return store


def _zeros(size: int) -> Array:
    """Return zeros on a cache line's bound."""
    store = np.zeros(size + 16, np.float32)
    start = -store.ctypes.data % 64 // 4
    return store[start : start + size]


def _spread(lines: int) -> int:
    """Return the bytes of so many cache lines, and one more if that is needed to make them odd.

    What lies a power of two apart competes for the same places of a cache.
    """
    return (lines | 1) * 64


@dataclass(frozen=True)
class Problem:
    """A convolution: of x, (n, channels, h, w), to y, (n, filters, h', w'), with its finish.

    `w` is (filters, channels, 3, 3), and `turned` for the gradient of an input: (channels, filters,
    3, 3), each with its taps in the opposite order. `padding` is (top, left).
    """

    x: Array
    w: Array
    y: Array
    bias: Array | None
    padding: tuple[int, int]
    finish: Finish
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
        images = [a for a in (self.x, self.y, self.finish.added) if a is not None]
        if any(a.strides[1] != 4 for a in images) or _overlapping(self.y):
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


def bind(call: Call, size: int, finish: Finish, plan: Plan | None = None) -> Entry | None:
    """Return the entry of finish(conv2d(x, w) + b) by tiles of `size`, or None where unserved."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    at = call.attributes
    constant = 1 in call.constants
    if x.ndim != 4 or w.shape[2:] != (3, 3) or not (constant or size == 2):
        return None
    if int(at["groups"]) != 1 or (*at["stride"], *at["dilation"]) != (1, 1, 1, 1):
        return None
    top, left, bottom, right = map(int, at["padding"])
    if y.shape[2:] != (x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2):
        return None
    if min(bottom, right) < 0 or len(rest) != bool(at.get("bias", False)):
        return None
    bias = rest[0] if rest else None
    problem = Problem(x, w, y, bias, (top, left), finish, call.threads, constant)
    return _entry(problem, size, plan) if problem.served() else None


@variant("conv2d_grad_input", "winograd2")
def grad_input(call: Call, plan: Plan | None = None) -> Entry | None:
    """Return the entry of dx: the convolution of dy with the weights turned by half a turn."""
    dy, w = call.inputs
    (dx,) = call.outputs
    at = call.attributes
    if dy.ndim != 4 or w.shape[2:] != (3, 3):
        return None
    if int(at["groups"]) != 1 or (*at["stride"], *at["dilation"]) != (1, 1, 1, 1):
        return None
    top, left, bottom, right = (2 - int(pad) for pad in at["padding"])
    if dx.shape[2:] != (dy.shape[2] + top + bottom - 2, dy.shape[3] + left + right - 2):
        return None
    if min(bottom, right) < 0:
        return None
    problem = Problem(dy, w, dx, None, (top, left), Finish(), call.threads, turned=True)
    return _entry(problem, 2, plan) if problem.served() else None


def _overlapping(array: Array) -> bool:
    """Whether elements of the array may share memory."""
    reach = 4
    for stride, extent in sorted((s, e) for s, e in zip(array.strides, array.shape) if e > 1):
        if stride < reach:
            return True
        reach += stride * (extent - 1)
    return False


def _plan(problem: Problem, size: int, tiles: int) -> Plan | None:
    """Return how to cut the work, or None where the direct form is known to be faster."""
    pixels, filters = problem.y.size // problem.y.shape[1], problem.y.shape[1]
    depth = min(problem.x.shape[1], filters)
    if problem.constant:
        if pixels < _FEWEST_PIXELS[size] or pixels * depth < _FEWEST_VALUES:
            return None
        return Plan(rows_of_block(tiles, problem.threads))
    if pixels < _FEWEST_CHANGING or pixels * depth < _FEWEST_VALUES:
        return None
    if 16 * 4 * problem.w.size // 9 <= _KEPT:
        return Plan(rows_of_block(tiles, problem.threads))
    return Plan(rows_of_block(tiles, 1), 8, by_panels=True)


def _entry(problem: Problem, size: int, plan: Plan | None) -> Entry | None:
    x, y, finish, threads = problem.x, problem.y, problem.finish, problem.threads
    filters, channels = y.shape[1], x.shape[1]
    across, down = _ceil(y.shape[3], size), _ceil(y.shape[2], size)
    tiles = y.shape[0] * across * down
    plan = plan or _plan(problem, size, tiles)
    if plan is None:
        return None
    rows, points = plan.rows, (size + 2) ** 2
    blocks = _ceil(tiles, rows)
    deep, panels = _ceil(channels, _LANES), _ceil(filters, PANEL)
    bias = _zeros(panels * PANEL)
    entries: list[Entry] = []
    if problem.bias is not None:
        filled = copy(bias[:filters], problem.bias, 1)
        if filled is None:
            return None
        entries.append(filled)
    parts = min(threads, panels if plan.by_panels else blocks)
    group = min(plan.group, blocks)
    held, wide = rows * (blocks if plan.by_panels else group), 2 * (1 if plan.by_panels else panels)
    strides = (_spread(deep * held), 64 * held, _spread(wide * rows * group), 64 * rows * group)
    sizes = strides[0] * points, strides[2] * points
    values = _zeros((1 if plan.by_panels else parts) * sizes[0] // 4)
    products = _zeros(parts * sizes[1] // 4)
    if problem.constant:
        weights = _weights(problem.w, size)
        steps, size_w = (weights.strides[0], weights.strides[1]), 0
    else:
        one = deep * _LANES * PANEL * 4
        steps = (_spread(one // 64 * (1 if plan.by_panels else panels)), one)
        size_w = steps[0] * points
        weights = _zeros((parts if plan.by_panels else 1) * size_w // 4)
    added = finish.added
    block = pack(
        *(tiles, across, across * down, x.shape[2:], channels, y.shape[2:], filters),
        *(problem.padding, x, _steps(x), y, _steps(y)),
        *((0, (0, 0, 0)) if added is None else (added, _steps(added))),
        *(bias, finish.before, finish.low, finish.high),
        *(weights, values, products, strides),
        *(deep, panels, rows, parts, size, sizes, group, steps),
        *(problem.w, problem.w.strides[0], problem.turned, size_w),
    )
    if plan.by_panels:
        entries.append(parallel_for(values_of_tiles, block, parts, parts))
        entries.append(parallel_for(parts_of_panels, block, parts, parts))
        return sequence(entries)
    if not problem.constant:
        several = useful_threads(threads, weights.nbytes)
        entries.append(parallel_for(panels_of_weights, block, panels * deep, several))
    entries.append(parallel_for(parts_of_tiles, block, parts, parts))
    return sequence(entries)


def _steps(array: Array) -> tuple[int, ...]:
    """Return the strides along n, h and w."""
    return array.strides[0], array.strides[2], array.strides[3]


_OWN = {None: Finish(), "relu": Finish(low=0.0)}


@variant("conv2d", "winograd2")
def conv2d_2(call: Call) -> Entry | None:
    """Return the entry of a convolution by F(2x2, 3x3)."""
    return _plain(call, 2)


@variant("conv2d", "winograd4")
def conv2d_4(call: Call) -> Entry | None:
    """Return the entry of a convolution by F(4x4, 3x3)."""
    return _plain(call, 4)


@variant("with_epilogue", "winograd2")
def fused_2(call: Call) -> Entry | None:
    """Return the entry of a convolution by F(2x2, 3x3) with the steps on its results."""
    return _fused(call, 2)


@variant("with_epilogue", "winograd4")
def fused_4(call: Call) -> Entry | None:
    """Return the entry of a convolution by F(4x4, 3x3) with the steps on its results."""
    return _fused(call, 4)


def _plain(call: Call, size: int) -> Entry | None:
    finish = _OWN.get(call.attributes.get("activation"))
    return None if finish is None else bind(call, size, finish)


def _fused(call: Call, size: int) -> Entry | None:
    at = call.attributes
    if at["operator"] != "conv2d":
        return None
    arity = at["arity"]
    inner = replace(
        call,
        operator="conv2d",
        attributes=dict(at["items"]),
        inputs=call.inputs[:arity],
        constants=frozenset(index for index in call.constants if index < arity),
    )
    finish = _OWN.get(inner.attributes.get("activation"))
    for step in _chain(call):
        finish = None if finish is None or step is None else _after(finish, step)
    return None if finish is None else bind(inner, size, finish)


_Step: TypeAlias = Array | tuple[float, float]  # what is added to the result, or its bounds


def _chain(call: Call) -> Iterator[_Step | None]:
    """Yield the steps on the result; None is one that no `Finish` can hold."""
    y, operands = call.outputs[0], call.inputs[call.attributes["arity"] :]
    result = 0
    for index, (name, numbers, items) in enumerate(call.attributes["program"]):
        settings = dict(items)
        others = [number for number in numbers if number != result]
        if numbers == (result,) and name == "relu":
            yield 0.0, math.inf
        elif numbers == (result,) and name == "clip":
            low, high = settings.get("low"), settings.get("high")
            yield -math.inf if low is None else low, math.inf if high is None else high
        elif name == "add" and len(others) == 1 and len(numbers) == 2:
            known = 1 <= others[0] <= len(operands)
            operand = operands[others[0] - 1] if known else None
            yield operand if operand is not None and operand.shape == y.shape else None
        else:
            yield None
        result = len(operands) + index + 1


def _after(finish: Finish, step: _Step) -> Finish | None:
    """Return the finish with one more step, or None where it has no place for that."""
    if isinstance(step, np.ndarray):
        if finish.added is not None or finish.high != math.inf:
            return None
        return Finish(before=finish.low, added=step)
    low, high = (min(max(bound, step[0]), step[1]) for bound in (finish.low, finish.high))
    return replace(finish, low=low, high=high)
