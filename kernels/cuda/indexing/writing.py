"""Rows written into a longer array, from a place of each sample's own."""

from __future__ import annotations

from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.indexing.rows import OUTSIDE
from soapstone.kernels.cuda.substrate.arrays import views, zeros
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


@variant("write_at", "numba", processor="cuda")
def write_at(call: Call) -> DeviceEntry:
    """Return the entry of x with rows from a place on, which may be where x lies."""
    (x, rows, starts), (y,) = views(call)
    axis = call.attributes["axis"]
    count, extent = rows.shape[axis], x.shape[axis]
    status = zeros(1, "int32", call.outputs[0])
    here = numbered(len(y.shape))
    source = ["row" if d == axis else at for d, at in enumerate(here)]
    body = [
        f"row = int64(starts[{place('starts', ['at_0'])}])",
        f"if row < 0 or row > {extent - count}: status[0] = {OUTSIDE}",
        f"row = at_{axis} - row",
        f"value = x[{place('x', here)}]",
        f"if row >= 0 and row < {count}: value = rows[{place('rows', source)}]",
        f"y[{place('y', here)}] = value",
    ]
    made = each_element(body, y.shape, {"x": x, "rows": rows, "starts": starts, "y": y}, status)
    needed = f"0 to {extent - count} needed for {count} of {extent} rows"
    text = f"write_at: operand 'starts': a place outside found, {needed}"
    return DeviceEntry(made.launches, status, {OUTSIDE: text})
