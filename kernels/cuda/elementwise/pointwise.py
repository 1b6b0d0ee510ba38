"""One kernel for anything that is computed element by element, from the statements that do it.

The kernel walks the elements of its outputs. What lies in one row is walked by all threads with a
stride of the grid, so that neighbouring threads touch neighbouring elements; anything else by rows,
whose place is found once a row and not once an element. Each thread loads several elements before
it stores any: loads cannot pass stores that might be to the same memory, and one load in flight a
thread does not saturate the memory. Where all operands lie side by side at boundaries of 16 bytes,
these elements are neighbours, which are loaded and stored at once (`substrate.vectors`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from soapstone.dtypes import HALVES, learn
from soapstone.kernels.cuda.elementwise.approximations import APPROXIMATIONS
from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.grid import flat_launch, joined, row_launch
from soapstone.kernels.cuda.substrate.target import Kernel, built
from soapstone.kernels.cuda.substrate.vectors import VECTORS, aligned, load, store, width_of

Writer = Callable[[Text, Sequence[Value]], Sequence[Value]]
IN_FLIGHT = 4  # elements a thread loads before it stores
# Of neighbouring elements that are loaded at once: statements, and elements of operands.
MOST_STATEMENTS, MOST_HELD = 200, 80


def numbers(shape: Sequence[int], origin: Sequence[int], whole: Sequence[int]) -> View:
    """Return the index of a tile's elements: their numbers in the whole array, row-major."""
    steps: list[int] = []
    step = 1
    for extent in whole[::-1]:
        steps.insert(0, step)
        step *= extent
    first = sum(at * own for at, own in zip(origin, steps))
    return View(None, tuple(shape), tuple(steps), "int64", first)


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `pointwise` of a source text; of one text there is one kernel."""
    return built("pointwise", source, **INTEGERS, **VECTORS, **APPROXIMATIONS)


def pointwise(
    writer: Writer, inputs: Sequence[View], outputs: Sequence[View], index: View | None = None
) -> DeviceEntry:
    """Return the entry that computes outputs from inputs, element by element.

    Args:
        writer: adds the statements of one element to a text, given its inputs' values in the types
            they are computed in, and returns the values of the outputs. It is asked once.
        inputs: their shapes broadcast to that of the outputs. outputs: of one shape.
        index: of the outputs' shape, whose places are one more value, int64: the element's number.
    """
    if outputs[0].size == 0:
        return DeviceEntry(())
    shape = outputs[0].shape
    operands = [*(each.broadcast(shape) for each in inputs), *outputs]
    lead = len(inputs)
    if index is not None:
        operands.append(index)
    extents, strides = joined(operands, lead)
    text, writes = Text(halves=all(each.dtype in HALVES for each in outputs)), []
    values = [Value(f"x{n}_u", wide(each.dtype)) for n, each in enumerate(inputs)]
    if index is not None:
        values.append(Value("at_u", "int64"))
    results = writer(text, values)
    for number, (value, view) in enumerate(zip(results, outputs, strict=True)):
        stored = text.cast(value, view.dtype).name
        writes.append((number, stored))
    if len(extents) == 1:
        made = _flat(text, writes, inputs, outputs, extents[0], [s[0] for s in strides], index)
    else:
        made = _rows(text, writes, inputs, outputs, extents, strides, index)
    nbytes = sum(map(touched, (*inputs, *outputs)))
    return DeviceEntry((replace(made, nbytes=nbytes),))


def touched(view: View) -> int:
    """Return the bytes of a view's elements, repeated ones once."""
    count = math.prod(extent for extent, step in zip(view.shape, view.strides) if step)
    return count * np.dtype(learn(view.dtype)).itemsize if view.size else 0


def _body(
    text: Text,
    writes: Sequence[tuple[int, str]],
    inputs: Sequence[View],
    places: Callable[[str, int, str], str],
    splats: frozenset[int],
    lanes: Sequence[str],
    indent: str,
    index: str,
    together: bool = False,
) -> list[str]:
    """Return the statements of several elements: loads, then arithmetic, then stores.

    together: whether they are neighbours, which are loaded at once, and stored.
    """
    loads, sums, stores = [], [], []
    if together:
        for number, view in enumerate(inputs):
            if number not in splats:
                names = [f"x{number}_{lane}" for lane, _ in enumerate(lanes)]
                loads.append(load(names, f"x{number}", places("x", number, lanes[0])))
                if wide(view.dtype) != view.dtype:
                    loads += [f"{name} = {_read(name, view.dtype)}" for name in names]
        for number, stored in writes:
            values = [_renamed(stored, lane, splats) for lane, _ in enumerate(lanes)]
            stores.append(store(f"y{number}", places("y", number, lanes[0]), values))
    for lane, position in enumerate(lanes):
        for number, view in enumerate(inputs):
            if number in splats or together:
                continue
            read = f"x{number}[{places('x', number, position)}]"
            loads.append(f"x{number}_{lane} = {_read(read, view.dtype)}")
        if index:
            loads.append(f"at_{lane} = {index.format(position)}")
        for line in text.lines:
            sums.append(_renamed(line, lane, splats))
        for number, stored in [] if together else writes:
            value = _renamed(stored, lane, splats)
            stores.append(f"y{number}[{places('y', number, position)}] = {value}")
    return [indent + line for line in (*loads, *sums, *stores)]


def _read(place: str, dtype: str) -> str:
    return f"{wide(dtype)}({place})" if wide(dtype) != dtype else place


def _renamed(line: str, lane: int, splats: frozenset[int]) -> str:
    """Return a statement for one of several elements: its names get the element's number."""

    def name(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == "x":
            number = int(found[1:-2])
            return f"x{number}_s" if number in splats else f"x{number}_{lane}"
        return f"at_{lane}" if found == "at_u" else f"{found}_{lane}"

    return re.sub(r"\bx\d+_u\b|\bat_u\b|\bv\d+\b", name, line)


def _unroll(text: Text, operands: int) -> int:
    by_lines = IN_FLIGHT if len(text.lines) <= 24 else 2 if len(text.lines) <= 48 else 1
    return max(1, min(by_lines, MOST_HELD // (4 * operands)))


def _together(
    text: Text,
    views: Sequence[View],
    strides: Sequence[Sequence[int]],
    columns: int,
    tail: bool,
) -> int:
    """Return how many neighbouring elements are loaded at once, or 0: they cannot be.

    strides: of each view, the innermost last. tail: whether what is left of a row has its own loop.
    """
    width = width_of(views)
    if len(text.lines) * width > MOST_STATEMENTS or len(views) * width > MOST_HELD:
        width = 4
    fits = (
        columns >= width
        and (tail or columns % width == 0)
        and len(text.lines) * width <= MOST_STATEMENTS
        and len(views) * width <= MOST_HELD
        and all(
            own[-1] == 0 or (own[-1] == 1 and aligned(view, width, own[:-1]))
            for view, own in zip(views, strides)
        )
    )
    return width if fits and any(own[-1] for own in strides) else 0


def _flat(
    text: Text,
    writes: Sequence[tuple[int, str]],
    inputs: Sequence[View],
    outputs: Sequence[View],
    items: int,
    strides: Sequence[int],
    index: View | None,
) -> Launch:
    """Return the launch over elements in one row."""
    count = len(inputs)
    splats = frozenset(n for n in range(count) if strides[n] == 0 and items > 1)
    names = [f"x{n}" for n in range(count)] + [f"y{n}" for n in range(len(outputs))]
    of = dict(zip(names, strides))

    def place(side: str, number: int, position: str) -> str:
        name = f"{side}{number}"
        return f"o{name} + {position}" if of[name] == 1 else f"o{name} + ({position}) * s{name}"

    views = [*inputs, *outputs]
    width = _together(text, views, [(step,) for step in strides[: len(views)]], items, tail=True)
    lanes = width or _unroll(text, len(views))
    lines = [
        f"def pointwise(items, first_at, step_at, {', '.join(f'{n}, o{n}, s{n}' for n in names)}):"
    ]
    lines += [f"    x{n}_s = {_read(f'x{n}[ox{n}]', inputs[n].dtype)}" for n in sorted(splats)]
    lines += ["    i = cuda.grid(1)", "    step = cuda.gridsize(1)"]
    at = "first_at + ({}) * step_at" if index is not None else ""
    if width:
        positions = ["first", *(f"(first + {n})" for n in range(1, lanes))]
        lines += [
            f"    many = items // {width}",
            "    while i < many:",
            f"        first = i * {width}",
        ]
        lines += _body(text, writes, inputs, place, splats, positions, " " * 8, at, together=True)
        lines += ["        i += step", f"    i += many * {width - 1}"]
    elif lanes > 1:
        positions = ["i", *(f"(i + {n} * step)" for n in range(1, lanes))]
        lines += [f"    while i + {lanes - 1} * step < items:"]
        lines += _body(text, writes, inputs, place, splats, positions, " " * 8, at)
        lines += [f"        i += {lanes} * step"]
    lines += ["    while i < items:"]
    lines += _body(text, writes, inputs, place, splats, ["i"], " " * 8, at)
    lines += ["        i += step"]
    arguments: list[object] = [items, index.offset if index else 0, strides[-1]]
    for view, stride in zip((*inputs, *outputs), strides):
        arguments += [view.span, view.offset, stride]
    grid, block = flat_launch(items, lanes)
    return Launch(compiled("\n".join(lines)), (grid,), (block,), tuple(arguments))


def _rows(
    text: Text,
    writes: Sequence[tuple[int, str]],
    inputs: Sequence[View],
    outputs: Sequence[View],
    extents: Sequence[int],
    strides: Sequence[Sequence[int]],
    index: View | None,
) -> Launch:
    """Return the launch over rows, of which each has its place."""
    *outer, columns = extents
    rank, count = len(outer), len(inputs)
    rows = 1
    for extent in outer:
        rows *= extent
    inner = [s[-1] for s in strides]
    splats = frozenset(n for n in range(count) if inner[n] == 0)
    names = [f"x{n}" for n in range(count)] + [f"y{n}" for n in range(len(outputs))]
    names += ["at"] if index is not None else []
    of = dict(zip(names, inner))

    def place(side: str, number: int, position: str) -> str:
        name = f"{side}{number}"
        return f"b{name} + {position}" if of[name] == 1 else f"b{name} + ({position}) * s{name}"

    sizes = [f"e{d}" for d in range(1, rank)]
    per = [
        f"{'' if name == 'at' else name + ', '}o{name}, s{name}"
        + "".join(f", s{name}_{d}" for d in range(rank))
        for name in names
    ]
    lines = [f"def pointwise(rows, columns, {', '.join([*sizes, *per])}):"]
    lines += ["    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y"]
    lines += ["    step = cuda.blockDim.x * cuda.gridDim.y", "    while row < rows:"]
    lines += ["        rest = row"]
    for d in range(rank - 1, 0, -1):
        lines += [f"        i{d} = rest % e{d}", f"        rest = rest // e{d}"]
    lines += ["        i0 = rest"]
    for name in names:
        terms = " + ".join([f"o{name}", *(f"i{d} * s{name}_{d}" for d in range(rank))])
        lines += [f"        b{name} = {terms}"]
    lines += [f"        x{n}_s = {_read(f'x{n}[bx{n}]', inputs[n].dtype)}" for n in sorted(splats)]
    lines += ["        i = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x"]
    at = "bat + ({}) * sat" if index else ""
    views = [*inputs, *outputs]
    width = _together(text, views, strides[: len(views)], columns, tail=False)
    lanes = width or min(_unroll(text, len(views)), 2)
    if width:
        positions = ["first", *(f"(first + {n})" for n in range(1, lanes))]
        lines += [f"        while i * {width} < columns:", f"            first = i * {width}"]
        lines += _body(text, writes, inputs, place, splats, positions, " " * 12, at, together=True)
        lines += ["            i += step"]
    elif lanes > 1:
        lines += [f"        while i + {lanes - 1} * step < columns:"]
        positions = ["i", *(f"(i + {n} * step)" for n in range(1, lanes))]
        lines += _body(text, writes, inputs, place, splats, positions, " " * 12, at)
        lines += [f"            i += {lanes} * step"]
    if not width:
        lines += ["        while i < columns:"]
        lines += _body(text, writes, inputs, place, splats, ["i"], " " * 12, at)
        lines += ["            i += step"]
    lines += ["        row += cuda.gridDim.x * cuda.blockDim.y"]
    arguments: list[object] = [rows, columns, *outer[1:]]
    for view, own in zip((*inputs, *outputs), strides):
        arguments += [view.span, view.offset, own[-1], *own[:-1]]
    if index is not None:
        arguments += [index.offset, strides[-1][-1], *strides[-1][:-1]]
    grid, block = row_launch(rows, -(-columns // width) if width else columns, bool(width))
    return Launch(compiled("\n".join(lines)), grid, block, tuple(arguments))
