"""Products with sparse matrices, and softmax over the entries of a row.

Rows are folded by pieces of equally many entries (`entries`). Offsets of a tile need not begin at
0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.graphs.entries import (
    checked,
    column_of,
    folded,
    largest_and_sum,
    merged,
    offsets,
    row_of,
    summed,
)
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.cuda.substrate.grid import THREADS
from soapstone.kernels.cuda.substrate.target import WARP
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

_HERE = ["at_0", "at_1"]
TOGETHER = 8  # entries of a group of threads, which looks for the row of the first


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
        "    most, best = value, column",
    ]
    better = "best < 0 or more_most > most or (more_most != more_most and most == most)"
    merge = [f"if more_best >= 0 and ({better}):", "    most, best = more_most, more_best"]
    finish = [f"y[{place('y', _HERE)}] = {y.dtype}(most)"]
    if numbers:
        finish += [f"if best >= 0: best = int64(numbers[{place('numbers', ['best'])}])"]
    finish += [f"chosen[{place('chosen', _HERE)}] = {chosen.dtype}(best)"]
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y, "chosen": chosen}
    operands |= {"numbers": numbers[0]} if numbers else {}
    status, statuses = checked(call, x.shape[0], indices.size)
    state = {"most": (kind, f"{kind}(0)"), "best": ("int64", "int64(-1)")}
    term = column_of(x.shape[0], inner)
    given = y.shape, operands, indices.size, status
    return DeviceEntry(folded(call, state, term, merge, finish, *given), status, statuses)


@variant("spmm_max_grad", "numba", processor="cuda")
def spmm_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy of the rows that chose this one; equal entries count once."""
    (dy, chosen, indptr, indices), (dx,) = views(call)
    kind = wide(dx.dtype)
    own = f"at_0 + {call.attributes['base']}"
    again = f"e > begin and indices[{place('indices', ['e - 1'])}] == column"
    inner = [
        f"if chosen[{place('chosen', ['column', 'at_1'])}] == {own} and not ({again}):",
        f"    total += {kind}(dy[{place('dy', ['column', 'at_1'])}])",
    ]
    finish = [f"dx[{place('dx', _HERE)}] = {dx.dtype}(total)"]
    operands = {"dy": dy, "chosen": chosen, "indptr": indptr, "indices": indices, "dx": dx}
    return _sums(call, kind, inner, finish, dx.shape, operands, dy.shape[0])


@variant("sddmm", "numba", processor="cuda")
def sddmm(call: Call) -> DeviceEntry:
    """Return the entry of products of rows of a and b, one for each entry of a sparse matrix.

    Neighbouring threads read neighbouring elements of both rows, of several entries in turn.
    """
    (a, b, indptr, indices), (y,) = views(call)
    kind, depth, rows = wide(y.dtype), a.shape[1], max(indptr.size - 1, 0)
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    lanes = min(WARP, 1 << max(depth - 1, 1).bit_length())
    product = f"{kind}(a[{place('a', ['row', 'd'])}]) * {kind}(b[{place('b', ['column', 'd'])}])"
    first, last = (f"indptr[{place('indptr', [at])}]" for at in ("0", str(rows)))
    dots = ["d = at_1", f"while d < {depth}:", f"    total += {product}", f"    d += {lanes}"]
    body = [
        f"scratch = cuda.shared.array({THREADS}, {kind})",
        f"begin = at_0 * {TOGETHER}",
        "e = begin",
        *row_of("row", rows),
        f"for e in range(begin, begin + {TOGETHER}):",
        f"    total = {kind}(0)",
        f"    if {first} <= e and e < {last} and e < {y.size}:",
        f"        while row + 1 < {rows} and indptr[{place('indptr', ['row + 1'])}] <= e:",
        "            row += 1",
        *("        " + line for line in column_of(b.shape[0], dots)),
        "    total = fold_sum(total, scratch)",
        f"    if at_1 == 0 and e < {y.size}: y[{place('y', ['e'])}] = {y.dtype}(total)",
    ]
    status, statuses = checked(call, b.shape[0], indices.size)
    operands = {"a": a, "b": b, "indptr": indptr, "indices": indices, "y": y}
    looked = each_element(offsets(indices.size), (rows,), {"indptr": indptr}, status)
    whole = THREADS // lanes  # all threads of a block take as many turns, since they fold together
    groups = -(-y.size // (TOGETHER * whole)) * whole
    made = each_element(body, (groups, lanes), operands, status, lanes=lanes)
    return DeviceEntry((*looked.launches, *made.launches), status, statuses)


_ENTRY = ["e", "at_1"]


def _segments(
    call: Call,
    state: Mapping[str, tuple[str, str]],
    term: Sequence[str],
    merge: Sequence[str],
    made: str,
) -> DeviceEntry:
    """Return the entry of a fold of each row's entries, and of what is made of an entry and it.

    made: the text of that, where x0 and so on are the operands; entries of no row are zero.
    """
    (*reals, indptr), (y,) = views(call)
    rows, (entries, width) = max(indptr.size - 1, 0), y.shape
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    status, statuses = checked(call, 1, entries)
    kept = {
        f"row_{n}": room((rows, width), kind, call.outputs[0]) for n, (kind, _) in state.items()
    }
    keep = [f"row_{name}[{place(f'row_{name}', _HERE)}] = {name}" for name in state]
    operands = {f"x{n}": view for n, view in enumerate(reals)} | {"indptr": indptr, **kept}
    given = (rows, width), operands, entries, status
    launches = folded(call, state, term, merge, keep, *given)
    first, last = (f"indptr[{place('indptr', [at])}]" for at in ("0", str(rows)))
    body = [
        "e = at_0",
        f"found = {y.dtype}(0)",
        f"if {first} <= e and e < {last}:",
        *("    " + line for line in row_of("row", rows)),
        *(f"    {name} = row_{name}[{place(f'row_{name}', ['row', 'at_1'])}]" for name in state),
        f"    found = {y.dtype}({made})",
        f"y[{place('y', _ENTRY)}] = found",
    ]
    other = each_element(body, y.shape, {**operands, "y": y}, status)
    return DeviceEntry((*launches, *other.launches), status, statuses)


@variant("segment_softmax", "numba", processor="cuda")
def segment_softmax(call: Call) -> DeviceEntry:
    """Return the entry of softmax over each row's entries, column by column."""
    kind = wide(call.inputs[0].dtype.name)
    x = f"{kind}(x0[{place('x0', _ENTRY)}])"
    term = [f"value = {x}", *largest_and_sum(kind, ["total"])]
    state = {"most": (kind, f"{kind}(-inf)"), "total": (kind, f"{kind}(0)")}
    merge = merged(kind, ["total"])
    return _segments(call, state, term, merge, f"exp({x} - most) / total")


@variant("segment_softmax_grad", "numba", processor="cuda")
def segment_softmax_grad(call: Call) -> DeviceEntry:
    """Return the entry of softmax's gradient over each row's entries."""
    kind = wide(call.inputs[0].dtype.name)
    dy, y = (f"{kind}(x{n}[{place(f'x{n}', _ENTRY)}])" for n in (0, 1))
    state = {"total": (kind, f"{kind}(0)")}
    term, merge = [f"total += {dy} * {y}"], ["total += more_total"]
    return _segments(call, state, term, merge, f"{y} * ({dy} - total)")
