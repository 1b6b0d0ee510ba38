"""Embedding and gathers by index, and the gradient of an embedding's table.

The gradient adds in the order of ids, whatever the blocks do: a block owns consecutive rows of the
table, its threads their columns, and looks through all ids for those rows, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.substrate.arrays import View, views, zeros
from soapstone.kernels.cuda.substrate.element import compiled, each_element, parameters, place
from soapstone.kernels.cuda.substrate.grid import rounded
from soapstone.kernels.cuda.substrate.target import processors
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

OUTSIDE = 1  # the status of an index that is none of the rows


def checked(call: Call, total: int) -> tuple[DeviceArray, Mapping[int, str]]:
    """Return a status word, and what it means where an index is outside of `total` rows."""
    needed = f"0 to {total - 1} needed" if total else "but there are no rows"
    text = f"{call.operator}: operand 'ids': an index outside found, {needed}"
    return zeros(1, "int32", call.outputs[0]), {OUTSIDE: text}


def _flat(view: View) -> View:
    return view.reshaped((view.size,))


def _found(total: int, base: int, wraps: bool) -> list[str]:
    """Return the statements that make a `row` of a tile of one of the whole; `wraps`: from its end.

    One outside of the whole is taken down in the status.
    """
    return [
        *([f"if row < 0: row = row + {total}"] if wraps else []),
        f"if row < 0 or row >= {total}: status[0] = {OUTSIDE}",
        f"row = row - {base}",
    ]


def _taken(
    call: Call, x: View, ids: View, y: View, axis: int, *, wraps: bool, elements: bool = False
) -> DeviceEntry:
    """Return the entry of slices of x along an axis; of those that a tile does not hold, zeros.

    wraps: whether ids below zero count from the end. elements: whether ids name single elements.
    """
    at = call.attributes
    rows, base = x.shape[axis], at.get("base", 0)
    total = at.get("total", rows)
    status, statuses = checked(call, total)
    if x.size == 0:
        return fill(y, 0)
    depth = len(ids.shape)
    index = [f"at_{d}" for d in range(len(y.shape))]
    of_ids = index if elements else index[axis : axis + depth]
    source = [*index[:axis], "row", *index[axis + (1 if elements else depth) :]]
    kind = y.dtype
    zero = "False" if kind == "bool" else f"{kind}(0)"
    body = [
        f"row = int64(ids[{place('ids', of_ids)}])",
        *_found(total, base, wraps),
        f"value = {zero}",
        f"if row >= 0 and row < {rows}: value = x[{place('x', source)}]",
        f"y[{place('y', index)}] = value",
    ]
    made = each_element(body, y.shape, {"x": x, "ids": ids, "y": y}, status)
    return DeviceEntry(made.launches, status, statuses)


@variant("embedding", "numba", processor="cuda")
def embedding(call: Call) -> DeviceEntry:
    """Return the entry of rows of a table."""
    (ids, table), (y,) = views(call)
    return _taken(call, table, ids, y, 0, wraps=False)


@variant(("gather", "gather_elements"), "numba", processor="cuda")
def gather(call: Call) -> DeviceEntry:
    """Return the entry of slices, or of single elements, along an axis by index."""
    (x, ids), (y,) = views(call)
    elements = call.operator == "gather_elements"
    return _taken(call, x, ids, y, call.attributes["axis"], wraps=True, elements=elements)


@variant("embedding_grad", "numba", processor="cuda")
def embedding_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of dy added up by the row of the table that it came from."""
    (dy, ids), (dtable,) = views(call)
    rows, columns = dtable.shape
    if dtable.size == 0:
        return DeviceEntry(())
    if dy.size == 0:
        return fill(dtable, 0)
    count, kind = ids.size, wide(dtable.dtype)
    if kind != dtable.dtype:
        return None  # sums of halves are kept in single precision, which the table has no room for
    given = {"dy": dy.reshaped((count, columns)), "ids": _flat(ids), "dtable": dtable}
    names, values = parameters(given)
    threads = rounded(columns)
    lines = [
        f"def each(rows, columns, count, share, base, {', '.join(names)}):",
        f"    held = cuda.shared.array({threads}, int64)",
        "    first = cuda.blockIdx.x * share",
        "    last = min(first + share, rows)",
        "    thread = cuda.threadIdx.x",
        "    for row in range(first, last):",
        "        column = thread",
        "        while column < columns:",
        f"            dtable[{place('dtable', ['row', 'column'])}] = {kind}(0)",
        "            column += cuda.blockDim.x",
        "    chunk = 0",
        "    while chunk < count:",
        "        row = int64(-1)",
        "        if chunk + thread < count:",
        f"            row = int64(ids[{place('ids', ['chunk + thread'])}]) - base",
        "        held[thread] = row",
        "        if cuda.syncthreads_or(1 if row >= first and row < last else 0):",
        "            for n in range(min(cuda.blockDim.x, count - chunk)):",
        "                row = held[n]",
        "                if row >= first and row < last:",
        "                    column = thread",
        "                    while column < columns:",
        f"                        dtable[{place('dtable', ['row', 'column'])}] += "
        f"dy[{place('dy', ['(chunk + n)', 'column'])}]",
        "                        column += cuda.blockDim.x",
        "        cuda.syncthreads()",
        "        chunk += cuda.blockDim.x",
    ]
    blocks = min(rows, 8 * processors())
    share = -(-rows // blocks)
    arguments = (rows, columns, count, share, call.attributes.get("base", 0), *values)
    grid = (-(-rows // share),)
    return DeviceEntry((Launch(compiled("\n".join(lines)), grid, (threads,), arguments),))
