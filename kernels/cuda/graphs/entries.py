"""Folds over the entries of a sparse matrix's rows, by pieces of equally many entries.

Source: Lux (Jia et al. 2017): consecutive rows are owned together, and threads walk the range of
their entries. Here what is owned is a piece of that range, however many rows it has part of, so a
row with very many entries keeps no thread longer than others (merge-based products: Merrill and
Garland, SC 2016). A row that lies in one piece is written by it; of others each piece leaves what
it has of them, and a second launch folds these in order. So sums are the same in every run.

Neighbouring threads have neighbouring columns of a row, whose operands lie side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.entry import DeviceArray, Work
from soapstone.kernels.cuda.substrate.arrays import View, room, zeros
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.cuda.substrate.target import SIMULATED
from soapstone.kernels.entry import Call

COLUMN, OFFSET = 1, 2  # statuses
_LEAST, _MOST = (4, 8) if SIMULATED else (64, 1 << 17)  # entries of a piece; pieces


def checked(call: Call, columns: int, entries: int) -> tuple[DeviceArray, Mapping[int, str]]:
    offsets = f"offsets from 0 to {entries} that do not fall needed"
    return zeros(1, "int32", call.outputs[0]), {
        COLUMN: f"{call.operator}: an index outside found, 0 to {columns - 1} needed",
        OFFSET: f"{call.operator}: indptr: an offset outside or that falls found, {offsets}",
    }


def offsets(entries: int) -> list[str]:
    """Return the statements that find where the entries of row at_0 `begin` and `end`."""
    return [
        f"begin = int64(indptr[{place('indptr', ['at_0'])}])",
        f"end = int64(indptr[{place('indptr', ['at_0 + 1'])}])",
        f"if begin < 0 or end < begin or end > {entries}:",
        f"    status[0] = {OFFSET}",
        "    end = begin",
    ]


def column_of(columns: int, inner: Sequence[str]) -> list[str]:
    """Return the statements that find an entry's column, and run `inner` where it is one."""
    return [
        f"column = int64(indices[{place('indices', ['e'])}])",
        f"if column < 0 or column >= {columns}:",
        f"    status[0] = {COLUMN}",
        "else:",
        *("    " + line for line in inner),
    ]


def piece_of(entries: int) -> int:
    """Return how many entries a piece has: a power of two, so many that pieces are not too many."""
    found = _LEAST
    while found * _MOST < entries:
        found *= 2
    return found


def row_of(name: str, rows: int) -> list[str]:
    """Return the statements that find the row of entry `e`, or any where it has none."""
    middle = place("indptr", ["middle"])
    return [
        f"low, high = int64(0), int64({rows})",
        "while high - low > 1:",
        "    middle = (low + high) // 2",
        f"    if indptr[{middle}] <= e:",
        "        low = middle",
        "    else:",
        "        high = middle",
        f"{name} = low",
    ]


def largest_and_sum(kind: str, sums: Sequence[str]) -> list[str]:
    """Return the statements that fold `value` into `most`, and its power into the first of sums.

    Sums of powers are scaled where the largest grows. The power of `value` is `power`, of minus
    infinity 0.
    """
    return [
        "if value > most:",
        "    scale_of = exp(most - value)",
        *(f"    {name} = {name} * scale_of" for name in sums),
        "    most = value",
        f"power = exp(value - most) if value != {kind}(-inf) else {kind}(0)",
        f"{sums[0]} += power",
    ]


def merged(kind: str, sums: Sequence[str]) -> list[str]:
    """Return the statements that fold such a state of a later piece into that of earlier ones."""
    return [
        "if more_most > most:",
        "    scale_of = exp(most - more_most)",
        *(f"    {name} = {name} * scale_of" for name in sums),
        "    most = more_most",
        f"if more_{sums[0]} != {kind}(0):",
        "    scale_of = exp(more_most - most)",
        *(f"    {name} += more_{name} * scale_of" for name in sums),
    ]


def summed(
    call: Call,
    sums: Sequence[str],
    kind: str,
    term: Sequence[str],
    finish: Sequence[str],
    shape: Sequence[int],
    operands: Mapping[str, View],
    entries: int,
    status: DeviceArray,
) -> tuple[Work, ...]:
    """Return the launches of sums over each row's entries; arguments: see `folded`.

    sums: names of what is added up, from zero, in the type `kind`.
    """
    state = dict.fromkeys(sums, (kind, f"{kind}(0)"))
    merge = [f"{name} += more_{name}" for name in sums]
    return folded(call, state, term, merge, finish, shape, operands, entries, status)


def folded(
    call: Call,
    state: Mapping[str, tuple[str, str]],
    term: Sequence[str],
    merge: Sequence[str],
    finish: Sequence[str],
    shape: Sequence[int],
    operands: Mapping[str, View],
    entries: int,
    status: DeviceArray,
) -> tuple[Work, ...]:
    """Return the launches of folds over each row's entries, for each index of the other axes.

    Args:
        state: names of what is folded, with their types and texts of what they begin with. term:
            statements that fold entry e of row at_0 into them, which begins at `begin`; merge:
            those that fold in what a later piece has of a row, called more_NAME; finish: those that
            write them, where `begin` and `end` are the row's offsets. shape: rows, and the other
            axes, whose indices are at_1 and so on.
    """
    rows, *others = shape
    if 0 in shape:
        return ()
    piece = piece_of(entries)
    pieces = max(1, -(-entries // piece))
    parts = {
        f"part_{name}": room((pieces, 2, *others), kind, call.outputs[0])
        for name, (kind, _) in state.items()
    }
    rest = [f"at_{axis + 1}" for axis in range(len(others))]

    def part(name: str, at: Sequence[str]) -> str:
        return f"part_{name}[{place(f'part_{name}', [*at, *rest])}]"

    zero = [f"{name} = {initial}" for name, (_, initial) in state.items()]
    offset, ends = (f"indptr[{place('indptr', [at])}]" for at in ("at_0", "at_0 + 1"))
    first, last = (f"int64(indptr[{place('indptr', [at])}])" for at in ("0", str(rows)))
    walk = [
        "piece = at_0",
        f"start = piece * {piece}",
        f"e, stop = max(start, {first}), min(start + {piece}, min({last}, int64({entries})))",
        "if e < stop:",
        *("    " + line for line in row_of("at_0", rows)),
        f"    while e < stop and at_0 < {rows}:",
        f"        begin, end = int64({offset}), int64({ends})",
        *("        " + line for line in zero),
        "        upto = min(end, stop)",
        "        while e < upto:",
        *("            " + line for line in term),
        "            e += 1",
        "        if begin >= start and end <= stop:",
        *("            " + line for line in finish),
        "        else:",
        "            slot = 0 if begin < start else 1",
        *(f"            {part(name, ['piece', 'slot'])} = {name}" for name in state),
        "        at_0 += 1",
        f"        while at_0 < {rows} and {ends} <= e:",
        "            at_0 += 1",
    ]
    join = [
        *offsets(entries),
        f"piece, final = begin // {piece}, (end - 1) // {piece}",
        "if begin == end or piece < final:",
        *("    " + line for line in zero),
        "    if begin < end:",
        *(f"        {name} = {part(name, ['piece', '1'])}" for name in state),
        "    while begin < end and piece < final:",
        "        piece += 1",
        *(f"        more_{name} = {part(name, ['piece', '0'])}" for name in state),
        *("        " + line for line in merge),
        *("    " + line for line in finish),
    ]
    given = {**operands, **parts}
    one = each_element(walk, (pieces, *others), given, status, "sums")
    other = each_element(join, shape, given, status, "sums")
    return (*one.launches, *other.launches)
