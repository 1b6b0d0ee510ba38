"""Folds over the entries of a sparse matrix's rows, by pieces of equally many entries.

Source: Lux (Jia et al. 2017): consecutive rows are owned together, and threads walk the range of
their entries. Here what is owned is a piece of that range, however many rows it has part of, so a
row with very many entries keeps no thread longer than others (merge-based products: Merrill and
Garland, SC 2016). A row that lies in one piece is written by it; of others each piece leaves what
it has of them, and a second launch folds these in order. So sums are the same in every run.

Neighbouring threads have neighbouring columns of a row, whose operands lie side by side: several
each, where they can be loaded at once. What several entries are folded from is loaded before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceArray, Work
from soapstone.kernels.cuda.substrate.arrays import View, room, zeros
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP
from soapstone.kernels.cuda.substrate.vectors import load, store, width_along
from soapstone.kernels.entry import Call

COLUMN, OFFSET = 1, 2  # statuses
# Entries of a piece, and of the least; pieces; threads that have enough under way.
_USUAL, _LEAST, _MOST, _BUSY = (4, 4, 8, 64) if SIMULATED else (64, 16, 1 << 17, 1 << 16)
_TOGETHER, _LINES = (2, 8) if SIMULATED else (4, 32)  # entries loaded at once; statements


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


def piece_of(entries: int, groups: int = WARP) -> int:
    """Return how many entries a piece has: a power of two, so many that pieces are not too many.

    groups: threads of an entry; few of them have smaller pieces.
    """
    found = _USUAL
    while found * _MOST < entries:
        found *= 2
    while found > _LEAST and entries * groups < found * _BUSY:
        found //= 2
    return found


def row_of(name: str, rows: int) -> list[str]:
    """Return the statements that find the row of entry `e`, or any where it has none."""
    middle = place("indptr", ["middle"])
    return [
        f"low, high = int64(0), int64({rows})",
        "while high - low > 1:",
        "    middle = (low + high) // 2",
        f"    if indptr[uint64({middle})] <= e:",
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


Loads = dict[str, tuple[str, Sequence[str]]]  # operands and indices, by name


@dataclass(frozen=True)
class Fold:
    """A fold over the entries of each row, as statements of one column.

    Attributes:
        state: names of what entries are folded into, with types and texts of what these begin with.
        loads: names of what an entry is folded from, with the operand and its indices: at_0 is the
            row, at_1 and so on the other ones, `e` the entry's number, `column` its column.
        term: statements that fold an entry into the state, of a row that begins at `begin`; merge:
            those that fold in what a later piece has of a row, called more_NAME.
        results: texts of what is written then, by operand, of a row from `begin` to `end`.
        columns: how many columns entries can have; None where they have none.
    """

    state: Mapping[str, tuple[str, str]]
    loads: Loads
    term: Sequence[str]
    merge: Sequence[str]
    results: Mapping[str, str]
    columns: int | None = None


def sums(
    names: Sequence[str],
    kind: str,
    loads: Loads,
    term: Sequence[str],
    results: Mapping[str, str],
    columns: int | None,
) -> Fold:
    """Return a fold that adds up, from zero, in the type `kind`."""
    state = dict.fromkeys(names, (kind, f"{kind}(0)"))
    merge = [f"{name} += more_{name}" for name in names]
    return Fold(state, loads, term, merge, results, columns=columns)


class _Text:
    """Statements of a thread that has neighbouring columns.

    shape: of rows and the other axes; written: operands of results and their indices.
    """

    def __init__(
        self,
        fold: Fold,
        shape: Sequence[int],
        operands: Mapping[str, View],
        entries: int,
        written: Mapping[str, Sequence[str]],
    ) -> None:
        self.fold, self.operands, self.entries = fold, operands, entries
        self.last = f"at_{len(shape) - 1}" if len(shape) > 1 else ""
        self.written, self.width, self.rest = written, 1, numbered(len(shape))[1:]
        seen = [(operands[name], at) for name, at in (*fold.loads.values(), *written.items())]
        seen = [(view, at) for view, at in seen if self.along(at)]
        if all(at[-1] == self.last for _, at in seen) and self.last:
            self.width = width_along((view for view, _ in seen), shape[-1], (8, 4, 2))
        self.axes = (*shape[1:-1], shape[-1] // self.width) if self.last else ()
        narrow = "indices" in operands and "32" in operands["indices"].dtype
        self.kind = "uint32" if narrow else "uint64"  # of an entry's column
        self.piece = piece_of(entries, math.prod(self.axes))
        lines = len(fold.term) * self.width
        self.together = _TOGETHER if lines <= _LINES else 1

    def along(self, at: Sequence[str]) -> bool:
        """Return whether indices name another element for another column."""
        return any(re.search(rf"\b{self.last}\b", one) for one in at) if self.last else False

    def lane(self, line: str, lane: int, entry: int = 0) -> str:
        """Return a statement as that of a lane, and of one of the entries that are loaded."""

        def named(match: re.Match[str]) -> str:
            name = match.group()
            if name in self.fold.loads:
                along = self.along(self.fold.loads[name][1])
                return f"{name}_{entry}_{lane}" if along else f"{name}_{entry}"
            if name in ("column", "e"):
                return f"{name}_{entry}"
            if name == self.last:
                return f"({name} + {lane})" if lane else name
            return f"{name}_{lane}" if name.removeprefix("more_") in self.fold.state else name

        return re.sub(r"\b[a-z]\w*\b", named, line)

    def lanes(self, lines: Iterable[str], entry: int = 0) -> list[str]:
        """Return statements of all lanes."""
        lines = list(lines)
        return [self.lane(line, lane, entry) for lane in range(self.width) for line in lines]

    def where(self, name: str, at: Sequence[str], entry: int = 0) -> str:
        """Return the text of an element's index; what does not vary by entry is added first.

        The steps of what does are numbers, so that products of 32 bits suffice.
        """
        first, then = [f"o_{name}"], []
        for axis, one in enumerate(at):
            index = f"({self.lane(one, 0, entry)})"
            if re.search(r"\b(column|e)\b", one):
                then.append(f"{index} * {self.operands[name].strides[axis]}")
            else:
                first.append(f"{index} * s_{name}_{axis}")
        return " + ".join([f"({' + '.join(first)})", *then])

    def load(self, names: Sequence[str], view: str, where: str) -> str:
        """Return the statement that reads as many elements as there are names.

        An index without a sign is not looked whether it counts from the end.
        """
        one = f"{names[0]} = {view}[uint64({where})]"
        return load(names, view, where) if len(names) > 1 else one

    def store(self, view: str, where: str, values: Sequence[str]) -> str:
        """Return the statement that writes a thread's columns."""
        one = f"{view}[uint64({where})] = {values[0]}"
        return store(view, where, values) if len(values) > 1 else one

    def read(self, entry: int) -> list[str]:
        """Return the statements that load what an entry is folded from."""
        lines, columns, kind = [], self.fold.columns, self.kind
        if columns is not None:
            lines = [
                f"column_{entry} = {kind}(indices[uint64({self.where('indices', ['e'], entry)})])",
                f"outside = max(outside, column_{entry})",
                f"column_{entry} = min(column_{entry}, {kind}({columns - 1}))",
            ]
        for name, (operand, at) in self.fold.loads.items():
            dtype = self.operands[operand].dtype
            lanes = range(self.width if self.along(at) else 1)
            names = [self.lane(name, lane, entry) for lane in lanes]
            lines.append(self.load(names, operand, self.where(operand, at, entry)))
            if wide(dtype) != dtype:
                lines += [f"{one} = {wide(dtype)}({one})" for one in names]
        return lines

    def results(self, texts: Mapping[str, str], entry: int = 0) -> list[str]:
        """Return the statements that write results of all lanes."""
        lines = []
        for name, text in texts.items():
            at, dtype = self.written[name], self.operands[name].dtype
            lanes = range(self.width if self.along(at) else 1)
            values = [f"{dtype}({self.lane(text, lane, entry)})" for lane in lanes]
            lines.append(self.store(name, self.where(name, at, entry), values))
        return lines

    def walk(
        self,
        rows: int,
        before: Sequence[str],
        each: Mapping[str, str],
        after: Sequence[str],
    ) -> list[str]:
        """Return the statements of a thread that walks a piece's entries.

        before, after: statements before and after the entries of row at_0. each: what is written of
        each entry, by operand, of those of no row zero.
        """
        first, last = (f"int64(indptr[{place('indptr', [at])}])" for at in ("0", str(rows)))
        ends, columns = f"int64(indptr[uint64({place('indptr', ['at_0 + 1'])})])", self.fold.columns
        piece, kind = self.piece, self.kind

        def folded(count: int) -> list[str]:
            """Return the statements that fold so many entries, all of which are loaded before."""
            if columns == 0:
                return ["outside = uint64(1)"]
            read = [[f"e_{n} = e + {n}", *self.read(n)] for n in range(count)]
            term = [[*self.lanes(self.fold.term, n), *self.results(each, n)] for n in range(count)]
            return [line for lines in (*read, *term) for line in lines]

        clear = []
        if each:
            nothing = dict.fromkeys(each, "0")
            zeros_of = ["e_0 = other", *self.results(nothing)]
            clear = [
                f"for other in range(start, min({first}, upto)):",
                *("    " + line for line in zeros_of),
                f"for other in range(max({last}, start), upto):",
                *("    " + line for line in zeros_of),
            ]
        walked = [
            "piece = at_0",
            f"start, outside = piece * {piece}, {kind}(0)",
            f"upto = min(start + {piece}, int64({self.entries}))",
            *clear,
            f"e, stop = max(start, {first}), min(upto, {last})",
            "if e < stop:",
            *("    " + line for line in row_of("at_0", rows)),
            f"    begin, end = int64(indptr[{place('indptr', ['at_0'])}]), {ends}",
            f"    while e < stop and at_0 < {rows}:",
            *("        " + line for line in before),
            "        upto = min(end, stop)",
            *(
                "        " + line
                for count in ([self.together, 1] if self.together > 1 else [1])
                for line in (
                    f"while e + {count} <= upto:",
                    *("    " + one for one in folded(count)),
                    f"    e += {count}",
                )
            ),
            *("        " + line for line in after),
            "        at_0, begin = at_0 + 1, end",
            f"        while at_0 < {rows}:",
            f"            end = {ends}",
            "            if end > e: break",
            "            at_0, begin = at_0 + 1, end",
            f"    if outside >= {kind}({columns}): status[0] = {COLUMN}"
            if columns is not None
            else "",
        ]
        return [*self.head(), *filter(None, walked)]

    def head(self) -> list[str]:
        """Return the statement that finds a thread's first column."""
        return [f"{self.last} = {self.last} * {self.width}"] if self.width > 1 else []


def folded(
    call: Call,
    fold: Fold,
    shape: Sequence[int],
    operands: Mapping[str, View],
    entries: int,
    status: DeviceArray,
) -> tuple[Work, ...]:
    """Return the launches of a fold over each row's entries, for each index of the other axes.

    shape: rows, and the other axes, whose indices are at_1 and so on, and in which results lie.
    """
    if 0 in shape:
        return ()
    text = _Text(fold, shape, operands, entries, dict.fromkeys(fold.results, numbered(len(shape))))
    rows, piece = shape[0], text.piece
    pieces = max(1, -(-entries // piece))
    parts = {
        f"part_{name}": room((pieces, 2, *shape[1:]), kind, call.outputs[0])
        for name, (kind, _) in fold.state.items()
    }
    text.operands = given = {**operands, **parts}

    def of(name: str) -> list[str]:
        return [text.lane(name, lane) for lane in range(text.width)]

    def part(name: str, at: Sequence[str]) -> str:
        return text.where(f"part_{name}", [*at, *text.rest])

    zero = text.lanes(f"{name} = {initial}" for name, (_, initial) in fold.state.items())
    write = text.results(fold.results)
    leave = [text.store(f"part_{n}", part(n, ["piece", "slot"]), of(n)) for n in fold.state]
    after = [
        "if begin >= start and end <= stop:",
        *("    " + line for line in write),
        "else:",
        "    slot = 0 if begin < start else 1",
        *("    " + line for line in leave),
    ]
    walk = text.walk(rows, zero, {}, after)
    join = [
        *text.head(),
        *offsets(entries),
        f"piece, final = begin // {piece}, (end - 1) // {piece}",
        "if begin == end or piece < final:",
        *("    " + line for line in zero),
        "    if begin < end:",
        *(
            "        " + text.load(of(name), f"part_{name}", part(name, ["piece", "1"]))
            for name in fold.state
        ),
        "    while begin < end and piece < final:",
        "        piece += 1",
        *(
            "        " + text.load(of(f"more_{name}"), f"part_{name}", part(name, ["piece", "0"]))
            for name in fold.state
        ),
        *("        " + line for line in text.lanes(fold.merge)),
        *("    " + line for line in write),
    ]
    one = each_element(walk, (pieces, *text.axes), given, status, "sums")
    other = each_element(join, (rows, *text.axes), given, status, "sums")
    return (*one.launches, *other.launches)


def applied(
    loads: Loads,
    kept: Mapping[str, str],
    results: Mapping[str, str],
    shape: Sequence[int],
    operands: Mapping[str, View],
    entries: int,
    status: DeviceArray,
) -> tuple[Work, ...]:
    """Return the launch that writes what is made of each entry and of what its row was folded to.

    Args:
        loads: see `Fold`. kept: names of that, and the operand that has it by row.
        results: texts by the operand that has them by entry, which are zero of entries of no row.
        shape: see `folded`.
    """
    own = numbered(len(shape))
    fold = Fold(dict.fromkeys(kept, ("", "")), loads, [], [], {})
    written = {name: ["e", *own[1:]] for name in results}
    text = _Text(fold, shape, operands, entries, written)
    before = []
    for name, operand in kept.items():
        names = [text.lane(name, lane) for lane in range(text.width)]
        before.append(text.load(names, operand, text.where(operand, own)))
    walk = text.walk(shape[0], before, results, [])
    pieces = max(1, -(-entries // text.piece))
    return each_element(walk, (pieces, *text.axes), operands, status, "sums").launches
