"""Products with sparse matrices, and softmax over the entries of a row.

Sums are over pieces of equally many entries (`entries`). Of others a thread walks a row's entries
in order; neighbouring threads have neighbouring columns. Offsets of a tile need not begin at 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.graphs.entries import (
    checked,
    column_of,
    offsets,
    over_entries,
    row_of,
    summed,
)
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

_HERE = ["at_0", "at_1"]


def _rows(
    call: Call,
    body: Sequence[str],
    shape: Sequence[int],
    operands: dict[str, View],
    columns: int,
    entries: int,
) -> DeviceEntry:
    status, statuses = checked(call, columns, entries)
    made = each_element(body, shape, operands, status)
    return DeviceEntry(made.launches, status, statuses)


def _sums(
    call: Call,
    kind: str,
    inner: Sequence[str],
    finish: Sequence[str],
    shape: Sequence[int],
    operands: dict[str, View],
    columns: int,
) -> DeviceEntry:
    """Return the entry of a sum, `total`, over each row's entries."""
    entries = operands["indices"].size
    status, statuses = checked(call, columns, entries)
    term = column_of(columns, inner)
    given = shape, operands, entries, status
    return DeviceEntry(summed(call, ["total"], kind, term, finish, *given), status, statuses)


@variant("spmm", "numba", processor="cuda")
def spmm(call: Call) -> DeviceEntry:
    """Return the entry of sums, or means, of rows of x by the entries of a sparse matrix."""
    (x, indptr, indices, _, _, *weights), (y,) = views(call)
    kind = wide(y.dtype)
    term = f"{kind}(x[{place('x', ['column', 'at_1'])}])"
    if weights:
        term = f"{kind}(w[{place('w', ['e'])}]) * {term}"
    found = "total"
    if call.attributes["reduction"] == "mean":
        found = f"total / {kind}(max(end - begin, 1))"
    finish = [f"y[{place('y', _HERE)}] = {y.dtype}({found})"]
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y}
    operands |= {"w": weights[0]} if weights else {}
    return _sums(call, kind, [f"total += {term}"], finish, y.shape, operands, x.shape[0])


@variant("spmm_mean_grad", "numba", processor="cuda")
def spmm_mean_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy over each row's number of entries, summed by the transposed matrix."""
    (dy, counts, indptr, indices), (dx,) = views(call)
    kind = wide(dx.dtype)
    ends = [f"counts[{place('counts', [at])}]" for at in ("column + 1", "column")]
    inner = [f"share = {kind}(max({ends[0]} - {ends[1]}, 1))"]
    inner += [f"total += {kind}(dy[{place('dy', ['column', 'at_1'])}]) / share"]
    finish = [f"dx[{place('dx', _HERE)}] = {dx.dtype}(total)"]
    operands = {"dy": dy, "counts": counts, "indptr": indptr, "indices": indices, "dx": dx}
    return _sums(call, kind, inner, finish, dx.shape, operands, dy.shape[0])


@variant("spmm_max", "numba", processor="cuda")
def spmm_max(call: Call) -> DeviceEntry:
    """Return the entry of the largest of rows of x by a matrix's entries, and which these were."""
    (x, indptr, indices, _, _, *numbers), (y, chosen) = views(call)
    kind = wide(x.dtype)
    inner = [
        f"value = {kind}(x[{place('x', ['column', 'at_1'])}])",
        "if best < 0 or value > most or (value != value and most == most):",
        "    most = value",
        "    best = column",
    ]
    body = [f"most = {kind}(0)", "best = int64(-1)"]
    body += over_entries(column_of(x.shape[0], inner), indices.size)
    body += [f"y[{place('y', _HERE)}] = {y.dtype}(most)"]
    if numbers:
        body += [f"if best >= 0: best = int64(numbers[{place('numbers', ['best'])}])"]
    body += [f"chosen[{place('chosen', _HERE)}] = {chosen.dtype}(best)"]
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y, "chosen": chosen}
    operands |= {"numbers": numbers[0]} if numbers else {}
    return _rows(call, body, y.shape, operands, x.shape[0], indices.size)


@variant("spmm_max_grad", "numba", processor="cuda")
def spmm_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy of the rows that chose this one; equal entries count once."""
    (dy, chosen, indptr, indices), (dx,) = views(call)
    kind = wide(dx.dtype)
    own = f"at_0 + {call.attributes['base']}"
    inner = [
        f"if column != before and chosen[{place('chosen', ['column', 'at_1'])}] == {own}:",
        f"    total += {kind}(dy[{place('dy', ['column', 'at_1'])}])",
        "before = column",
    ]
    body = [f"total = {kind}(0)", "before = int64(-1)"]
    body += over_entries(column_of(dy.shape[0], inner), indices.size)
    body += [f"dx[{place('dx', _HERE)}] = {dx.dtype}(total)"]
    operands = {"dy": dy, "chosen": chosen, "indptr": indptr, "indices": indices, "dx": dx}
    return _rows(call, body, dx.shape, operands, dy.shape[0], indices.size)


@variant("sddmm", "numba", processor="cuda")
def sddmm(call: Call) -> DeviceEntry:
    """Return the entry of products of rows of a and b, one for each entry of a sparse matrix."""
    (a, b, indptr, indices), (y,) = views(call)
    kind, depth = wide(y.dtype), a.shape[1]
    product = f"{kind}(a[{place('a', ['at_1', 'd'])}]) * {kind}(b[{place('b', ['column', 'd'])}])"
    rows = max(indptr.size - 1, 0)
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    first, last = (f"indptr[{place('indptr', [at])}]" for at in ("0", str(rows)))
    dots = [f"for d in range({depth}):", f"    total += {product}"]
    entry = [
        "e = at_0",
        f"total = {kind}(0)",
        f"if {first} <= e and e < {last}:",
        *("    " + line for line in [*row_of("at_1", rows), *column_of(b.shape[0], dots)]),
        f"y[{place('y', ['e'])}] = {y.dtype}(total)",
    ]
    status, statuses = checked(call, b.shape[0], indices.size)
    operands = {"a": a, "b": b, "indptr": indptr, "indices": indices, "y": y}
    looked = each_element(offsets(indices.size), (rows,), {"indptr": indptr}, status)
    made = each_element(entry, y.shape, operands, status)
    return DeviceEntry((*looked.launches, *made.launches), status, statuses)


def _segments(call: Call, first: Sequence[str], sums: Sequence[str], last: str) -> DeviceEntry:
    """Return the entry of loops over each row's entries, for each column; the others are zero."""
    inputs, (y,) = views(call)
    *reals, indptr = inputs
    rows, entries = max(indptr.size - 1, 0), y.shape[0]
    if y.size == 0:
        return DeviceEntry(())
    body = [*first, *over_entries(sums, entries), "for e in range(begin, end):", f"    {last}"]
    operands = {f"x{n}": view for n, view in enumerate(reals)} | {"indptr": indptr, "y": y}
    made = _rows(call, body, (rows, y.shape[1]), operands, 1, entries)
    return sequence((fill(y, 0), made))


_ENTRY = ["e", "at_1"]


@variant("segment_softmax", "numba", processor="cuda")
def segment_softmax(call: Call) -> DeviceEntry:
    """Return the entry of softmax over each row's entries, column by column.

    The largest and the sum are found in one pass: the sum is scaled where the largest grows.
    """
    kind = wide(call.inputs[0].dtype.name)
    x = f"{kind}(x0[{place('x0', _ENTRY)}])"
    sums = [
        f"value = {x}",
        "if value > most:",
        "    total = total * exp(most - value)",
        "    most = value",
        "total += exp(value - most)",
    ]
    last = f"y[{place('y', _ENTRY)}] = {call.outputs[0].dtype.name}(exp({x} - most) / total)"
    return _segments(call, [f"most = {kind}(-inf)", f"total = {kind}(0)"], sums, last)


@variant("segment_softmax_grad", "numba", processor="cuda")
def segment_softmax_grad(call: Call) -> DeviceEntry:
    """Return the entry of softmax's gradient over each row's entries."""
    kind = wide(call.inputs[0].dtype.name)
    dy, y = (f"{kind}(x{n}[{place(f'x{n}', _ENTRY)}])" for n in (0, 1))
    last = f"y[{place('y', _ENTRY)}] = {call.outputs[0].dtype.name}({y} * ({dy} - total))"
    return _segments(call, [f"total = {kind}(0)"], [f"total += {dy} * {y}"], last)
