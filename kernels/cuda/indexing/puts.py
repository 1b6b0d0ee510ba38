"""Updates put where indices say, those of one element in order: no two threads have one element.

Few updates are looked through by every block, which owns rows of the target; and those of many
short lines by every thread, which owns a stretch of a line. Others are put into the order of their
rows (`sorting`), and folded by pieces of equally many: a row that lies inside of a piece is written
by it, and of its first and last row a piece leaves what it has, which are folded in the same way.
So a row of very many updates keeps no thread longer than others, and the work is that of reading
the updates and of writing the rows that have some.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch, sequence
from soapstone.kernels.cuda.indexing.pieces import MADE, Put, folded
from soapstone.kernels.cuda.movement.copies import copy
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, room
from soapstone.kernels.cuda.substrate.element import (
    compiled,
    each_element,
    numbered,
    parameters,
    place,
    read,
)
from soapstone.kernels.cuda.substrate.grid import THREADS, rounded
from soapstone.kernels.cuda.substrate.target import SIMULATED, processors

FEW = 8 if SIMULATED else 64  # updates that every block looks through
_STRETCHES, _LONG = 64, 16 if SIMULATED else 4096  # of a line; updates of one


def put(
    target: View,
    own: Sequence[int],
    updates: Sequence[int],
    row: Sequence[str],
    value: Put,
    operands: Mapping[str, View],
    reduction: str,
    status: DeviceArray | None,
    *,
    zero: bool = False,
) -> DeviceEntry:
    """Return the entry that combines rows of a target with what comes to them.

    Args:
        own: the axes of rows; others are columns. updates: the shape of the indices of updates, in
            row-major order.
        row: statements that make `row`, the row-major number of an update's row, or -1, of its
            indices, at_u0 and so on. value: what comes there. In it at_0 and so on are the indices
            in the target. operands: what both read, by name, `row` of them `ids` alone.
        status: given as `status`. zero: whether the target holds zeros, to which sums are added.
    """
    count, rows = math.prod(updates), math.prod(target.shape[axis] for axis in own)
    if target.size == 0 or count == 0:
        return DeviceEntry(())
    given = own, updates, row, value, operands, reduction, status
    if count <= FEW or max(count, rows) >= 2**31 - 1:
        return _kept_wide(target, reduction, lambda to: _looked_through(to, *given))
    return folded(target, *given, zero)


def _kept_wide(target: View, reduction: str, made: Callable[[View], DeviceEntry]) -> DeviceEntry:
    """Return the entry that combines into a target one by one; of halves, into a wide copy."""
    kind = wide(target.dtype)
    if kind == target.dtype or reduction == "none":
        return made(target)
    total = room(target.shape, kind, target.span)
    return sequence((copy(target, total), made(total), copy(total, target)))


def _looked_through(
    target: View,
    own: Sequence[int],
    updates: Sequence[int],
    row: Sequence[str],
    value: Put,
    operands: Mapping[str, View],
    reduction: str,
    status: DeviceArray | None,
) -> DeviceEntry:
    """Return the entry of blocks that look through all updates for their rows; see `put`."""
    shape, count = target.shape, math.prod(updates)
    axes = [(str(d), shape[d]) for d in own]
    rest = [(str(d), extent) for d, extent in enumerate(shape) if d not in own]
    rows, columns = (math.prod(extent for _, extent in some) for some in (axes, rest))
    names, values = parameters({**operands, "to": target})
    threads = rounded(max(columns, count))
    share = -(-rows // min(rows, 8 * processors()))
    each = [(f"u{d}", extent) for d, extent in enumerate(updates)]
    spot = numbered(len(shape))
    text = value([f"at_u{d}" for d, _ in enumerate(updates)], spot, read)
    made = MADE[reduction].format(t="to[spot]", v="added")
    more = ["status"] if status is not None else []
    lines = [
        f"def each(rows, columns, count, share, {', '.join([*names, *more])}):",
        f"    held = cuda.shared.array({threads}, int64)",
        "    first = cuda.blockIdx.x * share",
        "    last = min(first + share, rows)",
        "    thread = cuda.threadIdx.x",
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
        *indices("row", axes, " " * 20),
        "                    column = thread",
        "                    while column < columns:",
        *(indices("column", rest, " " * 24) if rest else []),
        f"                        spot = {place('to', spot)}",
        f"                        added = {text}",
        f"                        to[spot] = {made}",
        "                        column += cuda.blockDim.x",
        "        cuda.syncthreads()",
        "        chunk += cuda.blockDim.x",
    ]
    arguments = [rows, columns, count, share, *values]
    arguments += [status] if status is not None else []
    launch = Launch(compiled("\n".join(lines)), (-(-rows // share),), (threads,), tuple(arguments))
    return DeviceEntry((launch,))


def put_elements(
    target: View,
    axis: int,
    ids: View,
    row: Sequence[str],
    value: Put,
    operands: Mapping[str, View],
    reduction: str = "add",
    status: DeviceArray | None = None,
    *,
    zero: bool = False,
) -> DeviceEntry:
    """Return the entry that combines elements of a target with what comes to them.

    Args:
        axis: of the lines that indices are along. ids: of the target's rank, read as `ids`, no
            longer than it along other axes.
        row: statements that make `row`, the element of its line that an update is for, or -1, of
            its indices, at_u0 and so on. value: what comes there; see `put`. operands: what it
            reads, by name. status: given as `status`. zero: see `put`.
    """
    lines = math.prod(extent for d, extent in enumerate(ids.shape) if d != axis)
    if target.size == 0 or ids.size == 0:
        return DeviceEntry(())
    extent, operands, rank = target.shape[axis], {**operands, "ids": ids}, len(target.shape)
    update, spot = [f"at_u{d}" for d in range(rank)], numbered(rank)
    stretches = max(1, min(extent, THREADS * processors() // lines))
    short = stretches <= _STRETCHES and ids.shape[axis] <= _LONG
    if not (short or ids.size <= FEW):
        whole = ["row" if d == axis else at for d, at in enumerate(update)]
        number = "int64(0)"
        for at, size in zip(whole, target.shape):
            number = f"({number} * {size} + {at})"
        found = [*row, f"row = {number} if row >= 0 and row < {extent} else int64(-1)"]
        own = target, range(rank), ids.shape, found
        return put(*own, value, operands, reduction, status, zero=zero)
    share = -(-extent // stretches)
    made = MADE[reduction].format(t="to[spot]", v="added")
    body = [
        *(f"at_u{d} = at_{d}" for d in range(rank) if d != axis),
        f"first = at_{axis} * {share}",
        f"last = min(first + {share}, {extent})",
        f"for at_u{axis} in range({ids.shape[axis]}):",
        *("    " + line for line in row),
        "    if row >= first and row < last:",
        f"        at_{axis} = row",
        f"        spot = {place('to', spot)}",
        f"        added = {value(update, spot, read)}",
        f"        to[spot] = {made}",
    ]
    shape = tuple(-(-extent // share) if d == axis else e for d, e in enumerate(ids.shape))

    def walked(to: View) -> DeviceEntry:
        return each_element(body, shape, {**operands, "to": to}, status)

    return _kept_wide(target, reduction, walked)
