"""Bags of rows of a table: their sum, mean or maximum, and the gradient of the maximum."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.kernels.cuda.elementwise.text import literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.indexing.pieces import Reader
from soapstone.kernels.cuda.indexing.puts import put_elements
from soapstone.kernels.cuda.indexing.rows import OUTSIDE, checked
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.substrate.arrays import room, views
from soapstone.kernels.cuda.substrate.element import each_element, place, read
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

_HERE = ["at_0", "at_1"]


@variant("embedding_bag", "numba", processor="cuda")
def embedding_bag(call: Call) -> DeviceEntry:
    """Return the entry of the sum, mean or maximum of the rows of a tile that each bag names."""
    (ids, table), (y,) = views(call)
    at, kind, length = call.attributes, wide(y.dtype), ids.shape[1]
    total, largest = at.get("total", table.shape[0]), at["reduction"] == "max"
    status, statuses = checked(call, total)
    absent = float("-inf") if largest and (length or "length" in at) else 0.0
    value = read("table", table, ["row", "at_1"])
    if largest:
        taken = [f"value = {value}", "if value > made or value != value: made = value"]
    else:
        taken = [f"made += {value}"]
    body = [
        f"made = {literal(absent, kind)}",
        f"for one in range({length}):",
        f"    row = int64(ids[{place('ids', ['at_0', 'one'])}])",
        f"    if row < 0 or row >= {total}: status[0] = {OUTSIDE}",
        f"    row = row - {at.get('base', 0)}",
        f"    if row >= 0 and row < {table.shape[0]}:",
        *(" " * 8 + line for line in taken),
    ]
    if at["reduction"] == "mean":
        body += [f"made = made / {literal(max(at.get('length', length), 1), kind)}"]
    body += [f"y[{place('y', _HERE)}] = {y.dtype}(made)"]
    made = each_element(body, y.shape, {"ids": ids, "table": table, "y": y}, status)
    return DeviceEntry(made.launches, status, statuses)


@variant("embedding_bag_max_grad", "numba", processor="cuda")
def embedding_bag_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy added to the first row of its bag that holds the maximum.

    Which row that is, of each bag and column, is found first.
    """
    (dy, ids, table, y), (dtable,) = views(call)
    if dtable.size == 0 or ids.size == 0:
        return fill(dtable, 0)
    rows = table.shape[0]
    status, statuses = checked(call, rows)
    chosen = room(dy.shape, "int64", call.outputs[0])
    body = [
        "chosen_row, found = int64(-1), 0",
        f"for one in range({ids.shape[1]}):",
        f"    row = int64(ids[{place('ids', ['at_0', 'one'])}])",
        f"    if row < 0 or row >= {rows}:",
        f"        status[0] = {OUTSIDE}",
        "    elif found == 0:",
        f"        if {read('table', table, ['row', 'at_1'])} == {read('y', y, _HERE)}: found = 1",
        "        if found == 1 or one == 0: chosen_row = row  # of none, the first",
        f"ids_of[{place('ids_of', _HERE)}] = chosen_row",
    ]
    operands = {"ids": ids, "table": table, "y": y, "ids_of": chosen}
    first = each_element(body, dy.shape, operands, status)
    row = [f"row = ids[{place('ids', ['at_u0', 'at_u1'])}]"]

    def value(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
        return read("dy", dy, update)

    put = put_elements(dtable, 0, chosen, row, value, {"dy": dy}, zero=True)
    made = sequence((first, fill(dtable, 0), put))
    return DeviceEntry(made.launches, status, statuses)
