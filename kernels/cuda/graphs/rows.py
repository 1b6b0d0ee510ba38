"""Products with sparse matrices, and softmax over the entries of a row.

Rows are folded by pieces of equally many entries (`entries`). Offsets of a tile need not begin at
0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.graphs.entries import (
    COLUMN,
    Fold,
    applied,
    checked,
    folded,
    largest_and_sum,
    merged,
    offsets,
    row_of,
    sums,
)
from soapstone.kernels.cuda.movement.copies import fill
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.cuda.substrate.grid import THREADS
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP
from soapstone.kernels.cuda.substrate.vectors import load, width_along
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

TOGETHER = 4 if SIMULATED else 16  # entries of a group of threads, which finds the first's row
_CHUNKS = 4  # of rows, that a thread loads at once


def _sums(
    call: Call,
    loads: dict[str, tuple[str, Sequence[str]]],
    term: Sequence[str],
    result: str,
    operands: dict[str, View],
    columns: int,
) -> DeviceEntry:
    """Return the entry of a sum, `total`, over each row's entries: what becomes of it is y."""
    y, entries = operands["y"], operands["indices"].size
    status, statuses = checked(call, columns, entries)
    fold = sums(["total"], wide(y.dtype), loads, term, {"y": result}, columns)
    return DeviceEntry(folded(call, fold, y.shape, operands, entries, status), status, statuses)


@variant("spmm", "numba", processor="cuda")
def spmm(call: Call) -> DeviceEntry:
    """Return the entry of sums, or means, of rows of x by the entries of a sparse matrix."""
    (x, indptr, indices, _, _, *weights), (y,) = views(call)
    loads = {"one": ("x", ["column", "at_1"]), **({"weight": ("w", ["e"])} if weights else {})}
    term = "total += weight * one" if weights else "total += one"
    mean = f"total / {wide(y.dtype)}(max(end - begin, 1))"
    result = mean if call.attributes["reduction"] == "mean" else "total"
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y}
    operands |= {"w": weights[0]} if weights else {}
    return _sums(call, loads, [term], result, operands, x.shape[0])


@variant("spmm_mean_grad", "numba", processor="cuda")
def spmm_mean_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy over each row's number of entries, summed by the transposed matrix."""
    (dy, counts, indptr, indices), (dx,) = views(call)
    loads = {"one": ("dy", ["column", "at_1"])}
    loads |= {"from_": ("counts", ["column"]), "to_": ("counts", ["column + 1"])}
    term = [f"total += one / {wide(dx.dtype)}(max(to_ - from_, 1))"]
    operands = {"dy": dy, "counts": counts, "indptr": indptr, "indices": indices, "y": dx}
    return _sums(call, loads, term, "total", operands, dy.shape[0])


@variant("spmm_max", "numba", processor="cuda")
def spmm_max(call: Call) -> DeviceEntry:
    """Return the entry of the largest of rows of x by a matrix's entries, and which these were."""
    (x, indptr, indices, _, _, *numbers), (y, chosen) = views(call)
    kind = wide(x.dtype)
    term = [
        "if best < 0 or one > most or (one != one and most == most):",
        "    most, best = one, int64(column)",
    ]
    better = "best < 0 or more_most > most or (more_most != more_most and most == most)"
    merge = [f"if more_best >= 0 and ({better}):", "    most, best = more_most, more_best"]
    finish = []
    if numbers:
        finish = [f"if best >= 0: best = int64(numbers[{place('numbers', ['best'])}])"]
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y, "chosen": chosen}
    operands |= {"numbers": numbers[0]} if numbers else {}
    status, statuses = checked(call, x.shape[0], indices.size)
    state = {"most": (kind, f"{kind}(0)"), "best": ("int64", "int64(-1)")}
    results, loads = {"y": "most", "chosen": "best"}, {"one": ("x", ["column", "at_1"])}
    fold = Fold(state, loads, term, merge, results, finish, x.shape[0])
    launches = folded(call, fold, y.shape, operands, indices.size, status)
    return DeviceEntry(launches, status, statuses)


@variant("spmm_max_grad", "numba", processor="cuda")
def spmm_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy of the rows that chose this one; equal entries count once."""
    (dy, chosen, indptr, indices), (dx,) = views(call)
    own = f"at_0 + {call.attributes['base']}"
    again = f"e > begin and indices[{place('indices', ['e - 1'])}] == column"
    loads = {"one": ("dy", ["column", "at_1"]), "row": ("chosen", ["column", "at_1"])}
    term = [f"if row == {own} and not ({again}): total += one"]
    operands = {"dy": dy, "chosen": chosen, "indptr": indptr, "indices": indices, "y": dx}
    return _sums(call, loads, term, "total", operands, dy.shape[0])


@variant("sddmm", "numba", processor="cuda")
def sddmm(call: Call) -> DeviceEntry:
    """Return the entry of products of rows of a and b, one for each entry of a sparse matrix.

    Neighbouring threads read neighbouring elements of both rows, of several entries in turn.
    """
    (a, b, indptr, indices), (y,) = views(call)
    kind, depth, rows = wide(y.dtype), a.shape[1], max(indptr.size - 1, 0)
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    width = width_along((a, b), depth, (8, 4, 2))
    lanes = min(WARP, max(2, 1 << (-(-depth // (_CHUNKS * width)) - 1).bit_length()))
    first, last = (f"indptr[{place('indptr', [at])}]" for at in ("0", str(rows)))
    ends, columns = f"indptr[{place('indptr', ['row + 1'])}]", b.shape[0]
    body = [
        f"scratch = cuda.shared.array({THREADS}, {kind})",
        f"begin, outside = at_0 * {TOGETHER}, int64(0)",
        "e = begin",
        *row_of("row", rows),
        f"first, last, end = {first}, min({last}, int64({y.size})), {ends}",
        f"for e in range(begin, begin + {TOGETHER}):",
        f"    total = {kind}(0)",
        "    if first <= e and e < last:",
        f"        while row + 1 < {rows} and end <= e:",
        "            row += 1",
        f"            end = {ends}",
        f"        column = int64(indices[{place('indices', ['e'])}])",
        f"        if column < 0 or column >= {columns}: outside = int64(1)",
        "        else:",
        *(" " * 12 + line for line in _dot(kind, depth, lanes, width)),
        "    total = fold_sum(total, scratch)",
        f"    if at_1 == 0 and e < {y.size}: y[{place('y', ['e'])}] = {y.dtype}(total)",
        f"if outside != 0: status[0] = {COLUMN}",
    ]
    status, statuses = checked(call, b.shape[0], indices.size)
    operands = {"a": a, "b": b, "indptr": indptr, "indices": indices, "y": y}
    looked = each_element(offsets(indices.size), (rows,), {"indptr": indptr}, status)
    whole = THREADS // lanes  # all threads of a block take as many turns, since they fold together
    groups = -(-y.size // (TOGETHER * whole)) * whole
    made = each_element(body, (groups, lanes), operands, status, lanes=lanes)
    return DeviceEntry((*looked.launches, *made.launches), status, statuses)


def _dot(kind: str, depth: int, lanes: int, width: int) -> list[str]:
    """Return the statements that add a thread's part of a product of two rows to `total`.

    What several products are made of is loaded before.
    """
    step, lines = lanes * width, []
    whole, rest = divmod(depth, step)
    for name, row in (("a", "row"), ("b", "column")):
        lines.append(f"at_{name} = {place(name, [row, f'at_1 * {width}'])}")

    def parts(count: int, indent: str) -> list[str]:
        loads, sums_of = [], []
        for n in range(count):
            for name in "ab":
                names = [f"{name}{n}_{lane}" for lane in range(width)]
                where = f"at_{name} + {n * step} * s_{name}_1"
                one = load(names, name, where) if width > 1 else f"{names[0]} = {name}[{where}]"
                loads.append(indent + one)
            pairs = [(f"{kind}(a{n}_{lane})", f"{kind}(b{n}_{lane})") for lane in range(width)]
            sums_of += [f"{indent}total += {left} * {right}" for left, right in pairs]
        return [*loads, *sums_of]

    turns, left = divmod(whole, _CHUNKS)
    if turns:
        lines += [f"for _ in range({turns}):", *parts(_CHUNKS, "    ")]
        lines += [f"    at_{name} += {_CHUNKS * step} * s_{name}_1" for name in "ab"]
    lines += parts(left, "")
    if rest:
        for name in "ab":
            lines.append(f"at_{name} += {left * step} * s_{name}_1")
        lines += [f"if at_1 * {width} < {rest}:", *parts(1, "    ")]
    return lines


_ENTRY = ["e", "at_1"]


def _segments(
    call: Call,
    state: Mapping[str, tuple[str, str]],
    term: Sequence[str],
    merge: Sequence[str],
    made: str,
) -> DeviceEntry:
    """Return the entry of a fold of each row's entries, and of what is made of an entry and it.

    made: the text of that, where x0 and so on are elements of the operands.
    """
    (*reals, indptr), (y,) = views(call)
    rows, (entries, width) = max(indptr.size - 1, 0), y.shape
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    status, statuses = checked(call, 1, entries)
    kept = {
        f"row_{n}": room((rows, width), kind, call.outputs[0]) for n, (kind, _) in state.items()
    }
    operands = {f"of_{n}": view for n, view in enumerate(reals)} | {"indptr": indptr, **kept}
    loads = {f"x{n}": (f"of_{n}", _ENTRY) for n, _ in enumerate(reals)}
    fold = Fold(state, loads, term, merge, {f"row_{name}": name for name in state})
    launches = folded(call, fold, (rows, width), operands, entries, status)
    given = {name: (kind, f"row_{name}") for name, (kind, _) in state.items()}
    about = (rows, width), {**operands, "y": y}, entries, status
    launches += applied(loads, given, {"y": made}, *about)
    return DeviceEntry(launches, status, statuses)


@variant("segment_softmax", "numba", processor="cuda")
def segment_softmax(call: Call) -> DeviceEntry:
    """Return the entry of softmax over each row's entries, column by column."""
    kind = wide(call.inputs[0].dtype.name)
    term = ["value = x0", *largest_and_sum(kind, ["total"])]
    state = {"most": (kind, f"{kind}(-inf)"), "total": (kind, f"{kind}(0)")}
    merge = merged(kind, ["total"])
    return _segments(call, state, term, merge, "exp(x0 - most) / total")


@variant("segment_softmax_grad", "numba", processor="cuda")
def segment_softmax_grad(call: Call) -> DeviceEntry:
    """Return the entry of softmax's gradient over each row's entries."""
    kind = wide(call.inputs[0].dtype.name)
    state = {"total": (kind, f"{kind}(0)")}
    return _segments(
        call, state, ["total += x0 * x1"], ["total += more_total"], "x1 * (x0 - total)"
    )
