"""Embedding and gathers by index: a thread an element of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, views, zeros
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

OUTSIDE = 1  # the status of an index that is none of the rows


def checked(call: Call, total: int) -> tuple[DeviceArray, Mapping[int, str]]:
    """Return a status word, and what it means where an index is outside of `total` rows."""
    needed = f"0 to {total - 1} needed" if total else "but there are no rows"
    text = f"{call.operator}: operand 'ids': an index outside found, {needed}"
    return zeros(1, "int32", call.outputs[0]), {OUTSIDE: text}


def checked_axes(call: Call, extents: Sequence[int]) -> tuple[DeviceArray, Mapping[int, str]]:
    """Return a status word, and what it means where an index is outside of its axis."""
    text = f"{call.operator}: operand 'ids': an index outside found, below {tuple(extents)} needed"
    return zeros(1, "int32", call.outputs[0]), {OUTSIDE: text}


def row_of(ids: View, lead: Sequence[str], extents: Sequence[int]) -> list[str]:
    """Return the statements that make `row`, the row-major number of what several indices name.

    It is -1 where one is outside, which the status tells. lead: the axes of ids before them.
    """
    lines = ["row = int64(0)", "outside = 0"]
    for k, extent in enumerate(extents):
        lines += [
            f"one = int64(ids[{place('ids', [*lead, str(k)])}])",
            f"if one < 0: one = one + {extent}",
            f"if one < 0 or one >= {extent}: outside = 1",
            f"row = row * {extent} + one",
        ]
    return [*lines, "if outside != 0:", f"    status[0] = {OUTSIDE}", "    row = int64(-1)"]


def found(total: int, base: int, wraps: bool) -> list[str]:
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
    index = numbered(len(y.shape))
    of_ids = index if elements else index[axis : axis + depth]
    source = [*index[:axis], "row", *index[axis + (1 if elements else depth) :]]
    kind = y.dtype
    zero = "False" if kind == "bool" else f"{kind}(0)"
    body = [
        f"row = int64(ids[{place('ids', of_ids)}])",
        *found(total, base, wraps),
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


@variant("gather_nd", "numba", processor="cuda")
def gather_nd(call: Call) -> DeviceEntry:
    """Return the entry of the slices that the last axis of ids names by their first indices."""
    (x, ids), (y,) = views(call)
    batch, lead = call.attributes["batch_dims"], len(ids.shape) - 1
    index = numbered(len(y.shape))
    extents = x.shape[batch : batch + ids.shape[-1]]
    status, statuses = checked_axes(call, extents)
    source = [*index[:batch], *(f"at_r{d}" for d, _ in enumerate(extents)), *index[lead:]]
    body = [
        *row_of(ids, index[:lead], extents),
        f"value = {'False' if y.dtype == 'bool' else f'{y.dtype}(0)'}",
        "if row >= 0:",
        *indices("row", [(f"r{d}", e) for d, e in enumerate(extents)], "    "),
        f"    value = x[{place('x', source)}]",
        f"y[{place('y', index)}] = value",
    ]
    made = each_element(body, y.shape, {"x": x, "ids": ids, "y": y}, status)
    return DeviceEntry(made.launches, status, statuses)
