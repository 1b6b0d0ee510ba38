"""Updates put where indices say, in the order of the updates: no two threads have one element.

Where an index names whole rows, a block owns consecutive rows of the target and its threads their
columns: it looks through all indices for those rows, a chunk at a time. Where each element has an
index of its own, a thread owns a stretch of a line, and looks through that line's indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.element import (
    compiled,
    each_element,
    numbered,
    parameters,
    place,
)
from soapstone.kernels.cuda.substrate.grid import THREADS, rounded
from soapstone.kernels.cuda.substrate.target import processors

# What becomes of an element `t` that a value `v` comes to.
_MADE = {
    "none": "{v}",
    "add": "{t} + {v}",
    "mul": "{t} * {v}",
    "max": "({t} if ({t} > {v} or {t} != {t}) else {v})",
    "min": "({t} if ({t} < {v} or {t} != {t}) else {v})",
}


def _combined(where: str, value: str, reduction: str) -> list[str]:
    """Return the statements that put a value into the operand `to`, at a place."""
    return [
        f"spot = {where}",
        f"added = {value}",
        f"to[spot] = {_MADE[reduction].format(t='to[spot]', v='added')}",
    ]


def put_rows(
    target: View,
    axis: int,
    depth: int,
    updates: Sequence[int],
    row: Sequence[str],
    value: str,
    operands: Mapping[str, View],
    reduction: str,
    status: DeviceArray | None,
) -> DeviceEntry:
    """Return the entry that combines rows of a target with what comes to them.

    Args:
        axis, depth: the axes of rows: `depth` of them, from `axis` on.
        updates: the shape of the updates of each index of the axes before, in row-major order.
        row: statements that make `row`, the row-major number of an update's row, or -1. value: what
            comes there. In both, at_u0 and so on are the update's indices, and at_0 and so on those
            of the target, of which `row` knows the ones before `axis`. operands: what they read, by
            name. status: given as `status`.
    """
    count = math.prod(updates)
    if target.size == 0 or count == 0:
        return DeviceEntry(())
    shape = target.shape
    rows, columns = math.prod(shape[axis : axis + depth]), math.prod(shape[axis + depth :])
    outer = math.prod(shape[:axis])
    names, values = parameters({**operands, "to": target})
    threads = rounded(max(columns, count))
    share = -(-rows // min(rows, max(1, 8 * processors() // outer)))
    blocks = -(-rows // share)
    at = numbered(len(shape))
    before = [(str(d), shape[d]) for d in range(axis)]
    own = [(str(d), shape[d]) for d in range(axis, axis + depth)]
    rest = [(str(d), shape[d]) for d in range(axis + depth, len(shape))]
    each = [(f"u{d}", extent) for d, extent in enumerate(updates)]
    more = ["status"] if status is not None else []
    inner = " " * 24
    lines = [
        f"def each(rows, columns, count, share, blocks, {', '.join([*names, *more])}):",
        f"    held = cuda.shared.array({threads}, int64)",
        "    first = cuda.blockIdx.x % blocks * share",
        "    last = min(first + share, rows)",
        "    thread = cuda.threadIdx.x",
        *(indices("cuda.blockIdx.x // blocks", before, "    ") if before else []),
        "    chunk = 0",
        "    while chunk < count:",
        "        n = chunk + thread",
        "        row = int64(-1)",
        "        if n < count:",
        *(indices("n", each, " " * 12) if each else []),
        *(" " * 12 + line for line in row),
        "        held[thread] = row",
        "        if cuda.syncthreads_or(1 if row >= first and row < last else 0):",
        "            for other in range(min(cuda.blockDim.x, count - chunk)):",
        "                row = held[other]",
        "                if row >= first and row < last:",
        "                    n = chunk + other",
        *(indices("n", each, " " * 20) if each else []),
        *indices("row", own, " " * 20),
        "                    column = thread",
        "                    while column < columns:",
        *(indices("column", rest, inner) if rest else []),
        *(inner + line for line in _combined(place("to", at), value, reduction)),
        f"{inner}column += cuda.blockDim.x",
        "        cuda.syncthreads()",
        "        chunk += cuda.blockDim.x",
    ]
    arguments = [rows, columns, count, share, blocks, *values]
    arguments += [status] if status is not None else []
    kernel = compiled("\n".join(lines))
    return DeviceEntry((Launch(kernel, (blocks * outer,), (threads,), tuple(arguments)),))


def put_elements(
    target: View,
    axis: int,
    ids: View,
    row: Sequence[str],
    value: str,
    operands: Mapping[str, View],
    reduction: str = "add",
    status: DeviceArray | None = None,
) -> DeviceEntry:
    """Return the entry that combines elements of a target with what comes to them.

    Args:
        axis: of the lines that indices are along. ids: of the target's rank, read as `ids`, no
            longer than it along other axes.
        row: statements that make `row`, the element of its line that update n is for, or -1. value:
            what comes there. In both, at_0 and so on are indices of the ids, but for axis, whose
            index is n. operands: what they read, by name. status: given as `status`.
    """
    lines = math.prod(extent for d, extent in enumerate(ids.shape) if d != axis)
    if target.size == 0 or ids.size == 0:
        return DeviceEntry(())
    extent = target.shape[axis]
    stretches = max(1, min(extent, 4 * THREADS * processors() // lines))
    share = -(-extent // stretches)
    at = numbered(len(target.shape))
    at[axis] = "row"
    body = [
        f"first = at_{axis} * {share}",
        f"last = min(first + {share}, {extent})",
        f"for n in range({ids.shape[axis]}):",
        *("    " + line for line in row),
        "    if row >= first and row < last:",
        *(" " * 8 + line for line in _combined(place("to", at), value, reduction)),
    ]
    shape = tuple(-(-extent // share) if d == axis else e for d, e in enumerate(ids.shape))
    return each_element(body, shape, {**operands, "ids": ids, "to": target}, status)
