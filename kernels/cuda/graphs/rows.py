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
    Loads,
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


def _sums(
    call: Call,
    loads: Loads,
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
    loads: Loads = {
        "one": ("x", ["column", "at_1"]),
        **({"weight": ("w", ["e"])} if weights else {}),
    }
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
    loads: Loads = {"one": ("dy", ["column", "at_1"])}
    loads |= {"from_": ("counts", ["column"]), "to_": ("counts", ["column + 1"])}
    term = [f"total += one / {wide(dx.dtype)}(max(to_ - from_, 1))"]
    operands = {"dy": dy, "counts": counts, "indptr": indptr, "indices": indices, "y": dx}
    return _sums(call, loads, term, "total", operands, dy.shape[0])


@variant("spmm_max", "numba", processor="cuda")
def spmm_max(call: Call) -> DeviceEntry:
    """Return the entry of the largest of rows of x by a matrix's entries, and which these were."""
    (x, indptr, indices, _, _, *numbers), (y, chosen) = views(call)
    kind, index = wide(x.dtype), "int32" if x.shape[0] < 2**31 else "int64"
    better = "(best < 0) | ((most == most) & ((NEW > most) | (NEW != NEW)))"  # branches take longer
    term = [f"better = {better.replace('NEW', 'one')}"]
    term += ["most = one if better else most", f"best = {index}(column) if better else best"]
    merge = [f"better = (more_best >= 0) & ({better.replace('NEW', 'more_most')})"]
    merge += ["most = more_most if better else most", "best = more_best if better else best"]
    named = f"numbers[{place('numbers', ['best'])}] if best >= 0 else -1" if numbers else "best"
    operands = {"x": x, "indptr": indptr, "indices": indices, "y": y, "chosen": chosen}
    operands |= {"numbers": numbers[0]} if numbers else {}
    status, statuses = checked(call, x.shape[0], indices.size)
    state = {"most": (kind, f"{kind}(0)"), "best": (index, f"{index}(-1)")}
    results = {"y": "most", "chosen": named}
    loads: Loads = {"one": ("x", ["column", "at_1"])}
    fold = Fold(state, loads, term, merge, results, x.shape[0])
    launches = folded(call, fold, y.shape, operands, indices.size, status)
    return DeviceEntry(launches, status, statuses)


@variant("spmm_max_grad", "numba", processor="cuda")
def spmm_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy of the rows that chose this one; equal entries count once."""
    (dy, chosen, indptr, indices), (dx,) = views(call)
    own = f"at_0 + {call.attributes['base']}"
    again = f"e > begin and indices[{place('indices', ['e - 1'])}] == column"
    loads: Loads = {"one": ("dy", ["column", "at_1"]), "row": ("chosen", ["column", "at_1"])}
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
    held = 32 if width == 8 else 16  # elements of a row that a thread loads at once
    lanes = max(2, 8 // width, 1 << (-(-depth // held) - 1).bit_length())
    lanes = min(WARP, lanes)
    first, last = (f"indptr[{place('indptr', [at])}]" for at in ("0", str(rows)))
    ends, columns = f"indptr[uint64({place('indptr', ['row + 1'])})]", b.shape[0]
    index = "uint32" if "32" in indices.dtype else "uint64"
    begin, each = _dot(kind, (a, b), lanes, width, held // width)
    body = [
        f"scratch = cuda.shared.array({THREADS}, {kind})",
        f"begin, outside = at_0 * {TOGETHER}, 0",
        "e = begin",
        *row_of("row", rows),
        f"first, last, end = {first}, min({last}, int64({y.size})), {ends}",
        *begin,
        f"for n in range({TOGETHER}):",
        f"    e, total = begin + n, {kind}(0)",
        "    if first <= e and e < last:",
        f"        if row + 1 < {rows} and end <= e:",
        f"            while row + 1 < {rows} and end <= e:",
        "                row += 1",
        f"                end = {ends}",
        *("            " + line for line in begin),
        f"        column = {index}(indices[uint64({place('indices', ['e'])})])",
        f"        if column >= {index}({columns}): outside = 1",
        "        else:",
        *(" " * 12 + line for line in each),
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


def _dot(
    kind: str, operands: Sequence[View], lanes: int, width: int, chunks: int
) -> tuple[list[str], list[str]]:
    """Return the statements of a thread at a new row of a, and those that add its part of the
    product with a row of b to `total`.

    A row of a that a thread loads at once, `chunks` of neighbouring elements, it keeps.
    """
    (a, b), step = operands, lanes * width
    depth = a.shape[1]
    whole, rest = divmod(depth, step)
    place_of = {}
    for name, view, row in (("a", a, "row"), ("b", b, "column")):
        # A step that is a number needs products of 32 bits.
        place_of[name] = f"(o_{name} + at_1 * {width} * s_{name}_1) + {row} * {view.strides[0]}"

    def loads(name: str, n: int, chunk: int) -> list[str]:
        """Return the statements that load a chunk, of a's as it is computed."""
        names = [f"{name}{n}_{lane}" for lane in range(width)]
        where = f"at_{name} + {chunk * step} * s_{name}_1"
        one = load(names, name, where) if width > 1 else f"{names[0]} = {name}[uint64({where})]"
        return [one, *(f"{x} = {kind}({x})" for x in names)]

    def products(count: int) -> list[str]:
        pairs = [(f"a{n}_{lane}", f"b{n}_{lane}") for n in range(count) for lane in range(width)]
        return [f"total += {left} * {right}" for left, right in pairs]

    def both(count: int, name: str) -> list[str]:
        return [line for n in range(count) for line in loads(name, n, n)]

    begin, each = [f"at_a = {place_of['a']}"], [f"at_b = {place_of['b']}"]
    if whole + (rest > 0) <= chunks:
        count = whole + (rest > 0)
        for name, lines in (("a", begin), ("b", each)):
            lines += both(whole, name)
            if rest:
                lines += [
                    *(f"{name}{whole}_{lane} = {kind}(0)" for lane in range(width)),
                    f"if at_1 * {width} < {rest}:",
                    *("    " + line for line in loads(name, whole, whole)),
                ]
        return begin, [*each, *products(count)]
    turns, left = divmod(whole, chunks)
    each.append("from_a = at_a")
    parts = [*both(chunks, "a"), *both(chunks, "b"), *products(chunks)]
    each += [f"for _ in range({turns}):", *("    " + line for line in parts)]
    each += [f"    at_{name} += {chunks * step} * s_{name}_1" for name in "ab"]
    each += [*both(left, "a"), *both(left, "b"), *products(left)]
    if rest:
        tail = [*loads("a", 0, left), *loads("b", 0, left), *products(1)]
        each += [f"if at_1 * {width} < {rest}:", *("    " + line for line in tail)]
    return begin, [*each, "at_a = from_a"]


_ENTRY = ["e", "at_1"]


def _segments(
    call: Call,
    state: Mapping[str, tuple[str, str]],
    term: Sequence[str],
    merge: Sequence[str],
    results: Mapping[str, str],
    made: str,
) -> DeviceEntry:
    """Return the entry of a fold of each row's entries, and of what is made of an entry and it.

    results: by name, texts of what is kept of a row's fold. made: the text of the result, where x0
    and so on are elements of the operands.
    """
    (*reals, indptr), (y,) = views(call)
    rows, (entries, width) = max(indptr.size - 1, 0), y.shape
    if y.size == 0 or rows == 0:
        return fill(y, 0)
    status, statuses = checked(call, 1, entries)
    kind = wide(y.dtype)
    kept = {f"row_{name}": room((rows, width), kind, call.outputs[0]) for name in results}
    operands = {f"of_{n}": view for n, view in enumerate(reals)} | {"indptr": indptr, **kept}
    loads: Loads = {f"x{n}": (f"of_{n}", _ENTRY) for n, _ in enumerate(reals)}
    fold = Fold(state, loads, term, merge, {f"row_{name}": x for name, x in results.items()})
    launches = folded(call, fold, (rows, width), operands, entries, status)
    given = {name: f"row_{name}" for name in results}
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
    kept = {"most": "most", "share": f"{kind}(1) / total"}
    return _segments(call, state, term, merge, kept, "exp(x0 - most) * share")


@variant("segment_softmax_grad", "numba", processor="cuda")
def segment_softmax_grad(call: Call) -> DeviceEntry:
    """Return the entry of softmax's gradient over each row's entries."""
    kind = wide(call.inputs[0].dtype.name)
    state = {"total": (kind, f"{kind}(0)")}
    term, merge, kept = ["total += x0 * x1"], ["total += more_total"], {"total": "total"}
    return _segments(call, state, term, merge, kept, "x1 * (x0 - total)")
