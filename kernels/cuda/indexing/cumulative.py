"""Sums of all elements of a line up to each.

Where neighbouring lines lie side by side, a thread has a line; else a block has one, and its
threads neighbouring elements of it. Few lines are cut into parts, of which a launch before finds
the sums; then a part begins with those of the parts before it, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.kernels.cuda.entry import DeviceEntry, Work
from soapstone.kernels.cuda.indexing.lines import block_a_line
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place
from soapstone.kernels.cuda.substrate.folds import accumulator
from soapstone.kernels.cuda.substrate.grid import THREADS
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, processors
from soapstone.kernels.cuda.substrate.vectors import aligned, load, store, width_of
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

_PART = 64 if SIMULATED else 4096  # elements of a block's part, at least
_STEPS = 4 if SIMULATED else 8  # elements that a thread loads before it adds
_SHORT = 16  # elements of a line that no block is for


@variant("cumsum", "numba", processor="cuda")
def cumsum(call: Call) -> DeviceEntry:
    """Return the entry of the sums of all elements up to each one."""
    (x,), (y,) = views(call)
    axis = call.attributes["axis"]
    if y.size == 0:
        return DeviceEntry(())
    beside = any(0 < x.strides[d] < x.strides[axis] for d, e in enumerate(x.shape) if e >= WARP)
    made = _by_threads if beside or x.shape[axis] <= _SHORT else _by_blocks
    return made(call, x, y, axis)


def _totals(call: Call, x: View, axis: int, parts: int) -> View:
    shape = [parts if d == axis else extent for d, extent in enumerate(x.shape)]
    return room(shape, accumulator(x.dtype), call.outputs[0])


def _by_threads(call: Call, x: View, y: View, axis: int) -> DeviceEntry:
    """Return the entry of threads that each walk a part of a line."""
    at, kind, extent = call.attributes, accumulator(x.dtype), x.shape[axis]
    wanted = -(-2 * THREADS * processors() * x.shape[axis] // x.size)
    # As many loads are of the parts before as of a part, at most.
    parts = max(1, min(wanted, math.isqrt(2 * extent), extent // _STEPS))
    part = -(-extent // parts)
    parts = -(-extent // part)
    totals, here = _totals(call, x, axis, parts), numbered(len(x.shape))
    own = [*here[:axis], "other", *here[axis + 1 :]]
    element = [*here[:axis], f"{extent - 1} - (n)" if at["reverse"] else "(n)", *here[axis + 1 :]]

    def placed(name: str, step: int) -> str:
        return place(name, element).replace("(n)", f"(n + {step})" if step else "n")

    def walk(each: Sequence[str], write: bool) -> list[str]:
        """Return the statements that add a part to `total`, and write what `each` makes `made`."""

        def steps(count: int) -> list[str]:
            lines = [f"value_{s} = {kind}(x[{placed('x', s)}])" for s in range(count)]
            for s in range(count):
                lines += [line.replace("VALUE", f"value_{s}") for line in each]
                lines += [f"made_{s} = made"] if write else []
            spots = [placed("y", s) for s in range(count)] if write else []
            return [*lines, *(f"y[{z}] = {y.dtype}(made_{s})" for s, z in enumerate(spots))]

        return [
            f"n = at_{axis} * {part}",
            f"stop = min(n + {part}, {extent})",
            f"while n + {_STEPS} <= stop:",
            *("    " + line for line in steps(_STEPS)),
            f"    n += {_STEPS}",
            "while n < stop:",
            *("    " + line for line in steps(1)),
            "    n += 1",
        ]

    add = "total = total + VALUE"
    shape, start = totals.shape, [f"total = {kind}(0)"]
    launches: tuple[Work, ...] = ()
    if parts > 1:
        first = [*start, *walk([add], False), f"totals[{place('totals', here)}] = total"]
        launches = each_element(first, shape, {"x": x, "totals": totals}).launches
        start.append(f"for other in range(at_{axis}):")
        start.append(f"    total = total + totals[{place('totals', own)}]")
    made = ["made = total", add] if at["exclusive"] else [add, "made = total"]
    operands = {"x": x, "y": y, "totals": totals}
    last = each_element([*start, *walk(made, True)], shape, operands)
    return DeviceEntry((*launches, *last.launches))


def _by_blocks(call: Call, x: View, y: View, axis: int) -> DeviceEntry:
    """Return the entry of blocks that each have a part of a line."""
    at, kind, extent = call.attributes, accumulator(x.dtype), x.shape[axis]
    width, lines = _width((x, y), axis), x.size // extent
    parts = max(1, min(4 * processors() // lines, extent // _PART))
    part = -(-extent // (parts * width)) * width
    parts = -(-extent // part)
    totals, here = _totals(call, x, axis, parts), numbered(len(x.shape))
    own = [*here[:axis], "other", *here[axis + 1 :]]
    element = [*here[:axis], f"{extent - width} - n" if at["reverse"] else "n", *here[axis + 1 :]]
    names = [f"value_{lane}" for lane in range(width)]

    def loaded(indent: str) -> list[str]:
        where, given = place("x", element), names[::-1] if at["reverse"] else names
        one = load(given, "x", where) if width > 1 else f"{given[0]} = x[{where}]"
        return [indent + one, *(f"{indent}{name} = {kind}({name})" for name in names)]

    head = [f"scratch = cuda.shared.array(SCRATCH, {kind})"]
    begin = [f"first = at_{axis} * {part}", f"stop = min(first + {part}, {extent})"]
    step = f"cuda.blockDim.x * {width}"
    launches: tuple[Work, ...] = ()
    before = [*begin, f"before = {kind}(0)"]
    if parts > 1:
        body = [
            *begin,
            f"n, total = first + thread * {width}, {kind}(0)",
            "while n < stop:",
            *loaded("    "),
            *(f"    total = total + {name}" for name in names),
            f"    n += {step}",
            "total = fold_sum(total, scratch)",
            f"if thread == 0: totals[{place('totals', here)}] = total",
        ]
        given = {"x": x, "totals": totals}
        launches = block_a_line(head, body, axis, given, x.shape, parts, width).launches
        before += [
            "other = thread",
            f"while other < at_{axis}:",
            f"    before = before + totals[{place('totals', own)}]",
            "    other += cuda.blockDim.x",
            "before = fold_sum(before, scratch)",
        ]
    adds = [f"running = running + {name}" for name in names]
    keeps = [f"made_{lane} = {y.dtype}(running)" for lane in range(width)]
    pairs = zip(keeps, adds) if at["exclusive"] else zip(adds, keeps)
    made = [f"made_{lane}" for lane in range(width)]
    made = made[::-1] if at["reverse"] else made
    where = place("y", element)
    body = [
        *before,
        "chunk = first",
        "while chunk < stop:",
        f"    n = chunk + thread * {width}",
        *(f"    {name} = {kind}(0)" for name in names),
        "    if n < stop:",
        *loaded("        "),
        f"    lead, total = scan_sum({' + '.join(names)}, {kind}(0), scratch)",
        "    running = before + lead",
        *("    " + line for pair in pairs for line in pair),
        "    if n < stop: " + (store("y", where, made) if width > 1 else f"y[{where}] = {made[0]}"),
        "    before = before + total",
        f"    chunk += {step}",
    ]
    given = {"x": x, "y": y, "totals": totals}
    last = block_a_line(head, body, axis, given, x.shape, parts, width)
    return DeviceEntry((*launches, *last.launches))


def _width(both: Sequence[View], axis: int) -> int:
    """Return how many neighbouring elements of a line can be loaded at once."""
    width = width_of(both)
    for view in both:
        steps = [step for d, step in enumerate(view.strides) if d != axis]
        if view.strides[axis] != 1 or not aligned(view, width, steps) or view.shape[axis] % width:
            return 1
    return width
