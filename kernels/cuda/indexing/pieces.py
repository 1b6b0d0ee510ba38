"""Updates folded by pieces of equally many, in the order of the rows that they come to.

A row that lies inside of a piece is written by it. Of its first and of its last row a piece leaves
what it has: these are again values of rows in order, which are folded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.indexing.sorting import ordered
from soapstone.kernels.cuda.products.operands import Axes
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, room
from soapstone.kernels.cuda.substrate.element import compiled, numbered, parameters, place, read
from soapstone.kernels.cuda.substrate.grid import flat_launch
from soapstone.kernels.cuda.substrate.target import SIMULATED
from soapstone.kernels.cuda.substrate.vectors import aligned, load, store, width_of

Reader = Callable[[str, View, Sequence[str]], str]
# Of the indices of an update, those of the element it comes to, and how operands are read, the text
# of what it puts there.
Put = Callable[[Sequence[str], Sequence[str], Reader], str]

# What becomes of an element `t` that a value `v` comes to.
MADE = {
    "none": "{v}",
    "add": "{t} + {v}",
    "mul": "{t} * {v}",
    "max": "({t} if ({t} > {v} or {t} != {t}) else {v})",
    "min": "({t} if ({t} < {v} or {t} != {t}) else {v})",
}
# Entries of a piece of updates, of one of what pieces leave, and of a last one.
_FIRST, _LATER, _LAST = (4, 8, 8) if SIMULATED else (32, 64, 128)
# Elements, and entries, that a thread loads before it folds them.
_HELD, _TOGETHER = (8, 4) if SIMULATED else (32, 8)


class Reads:
    """How operands are read by several neighbouring columns: together, where they lie so.

    Attributes:
        lines: statements that load what was read so far.
    """

    def __init__(self, column: str, width: int) -> None:
        self.column, self.width = column, width
        self.lines: list[str] = []
        self._names: dict[str, list[str]] = {}

    def lane(self, number: int) -> str:
        """Return the index of a column."""
        return f"({self.column} + {number})" if number else self.column

    def together(self, view: View, at: Sequence[str]) -> bool:
        """Return whether neighbouring columns of a view can be loaded at once, or are the same."""
        if self.column not in at:
            return True
        *steps, step = view.strides
        return at[-1] == self.column and step == 1 and aligned(view, self.width, steps)

    def read(self, name: str, view: View, at: Sequence[str]) -> str:
        """Return the text of an element, in the type in which it is computed."""
        lane = next((n for n in range(1, self.width) if self.lane(n) in at), 0)
        first = [self.column if each == self.lane(lane) else each for each in at]
        if self.width == 1 or self.column not in first:
            return read(name, view, at)
        where, kind = place(name, first), wide(view.dtype)
        if where not in self._names:
            made = [f"{name}_{len(self._names)}_{n}" for n in range(self.width)]
            self._names[where] = made
            self.lines.append(load(made, name, where))
        return f"{kind}({self._names[where][lane]})"


@dataclass(frozen=True)
class _Fold:
    """What pieces do with values of rows.

    Attributes:
        axes: of the target's rows, with their extents; rest: its other ones. width: neighbouring
            columns that a thread has. zero: whether the target holds zeros.
    """

    target: View
    axes: Axes
    rest: Axes
    width: int
    reduction: str
    zero: bool

    @property
    def rows(self) -> int:
        """How many rows there are; the number of what is none."""
        return math.prod(extent for _, extent in self.axes)

    @property
    def columns(self) -> int:
        """How many elements a row has."""
        return math.prod(extent for _, extent in self.rest)

    def names(self, name: str) -> list[str]:
        """Return the names of a thread's columns of something."""
        return [f"{name}_{lane}" for lane in range(self.width)]

    def load(self, names: Sequence[str], view: str, where: str) -> str:
        """Return the statement that reads a thread's columns."""
        return load(names, view, where) if self.width > 1 else f"{names[0]} = {view}[{where}]"

    def store(self, view: str, where: str, values: Sequence[str]) -> str:
        """Return the statement that writes a thread's columns."""
        return store(view, where, values) if self.width > 1 else f"{view}[{where}] = {values[0]}"

    def write(self) -> list[str]:
        """Return the statements that combine a row of the target with its total."""
        kind, dtype = wide(self.target.dtype), self.target.dtype
        spot = place("to", numbered(len(self.target.shape)))
        lines, made = [*indices("row", self.axes, ""), f"spot = {spot}"], self.names("total")
        if not (self.zero or self.reduction == "none"):
            lines.append(self.load(self.names("old"), "to", "spot"))
            text, pairs = MADE[self.reduction], zip(self.names("old"), made)
            made = [text.format(t=f"{kind}({old})", v=total) for old, total in pairs]
        return [*lines, self.store("to", "spot", [f"{dtype}({one})" for one in made])]

    def leave(self, slot: int) -> list[str]:
        """Return the statements that leave the total of a piece's first or last row."""
        where = f"at_piece * 2 + {slot}"
        return [
            f"if at_group == 0: left_row[{where}] = row",
            self.store("left", f"({where}) * {self.columns} + column", self.names("total")),
        ]

    def launch(
        self,
        entry: Callable[[int], Sequence[str]],
        entries: int,
        piece: int,
        pieces: int,
        operands: Mapping[str, View],
        left: Mapping[str, View],
    ) -> Launch:
        """Return the launch that folds entries.

        Args:
            entry: statements that load entry e + n: row_n, and vn_0 and so on of a thread's
                columns. operands: what these read. left: where pieces leave rows; of one piece,
                nothing.
        """
        totals, kind, rows = self.names("total"), wide(self.target.dtype), self.rows
        flush, end = self.write(), [f"if row < {rows}:", *("    " + x for x in self.write())]
        if left:
            first = ["if first == 1:", *("    " + line for line in self.leave(0))]
            flush = [*first, "    first = 0", "else:", *("    " + line for line in flush)]
            none = [f"row = int64({rows})", "if at_group == 0: left_row[at_piece * 2 + 1] = row"]
            end = [*first, *("    " + line for line in none)]
            end += ["else:", *("    " + line for line in self.leave(1))]
        together, groups = together_of(self.width), self.columns // self.width
        inner = [line for n in range(together) for line in entry(n)]
        for n in range(together):
            values = self.names(f"v{n}")
            text, pairs = MADE[self.reduction], zip(totals, values)
            inner += [
                f"if row_{n} < {rows}:",
                f"    if row_{n} != row:",
                f"        if row < {rows}:",
                *(" " * 12 + line for line in flush),
                f"        row = row_{n}",
                *(f"        {total} = {value}" for total, value in zip(totals, values)),
                "    else:",
                *(f"        {t} = {kind}({text.format(t=t, v=v)})" for t, v in pairs),
            ]
        names, values = parameters({**operands, "to": self.target, **left})
        lines = [
            f"def puts({', '.join(names)}):",
            "    item = cuda.grid(1)",
            f"    if item < {pieces * groups}:",
            *indices("item", [("piece", pieces), ("group", groups)], " " * 8),
            f"        column = at_group * {self.width}",
            *(indices("column", self.rest, " " * 8) if self.rest else []),
            f"        row, first = int64({rows}), 1",
            *(f"        {total} = {kind}(0)" for total in totals),
            f"        e = at_piece * {piece}",
            f"        stop = min(e + {piece}, {entries})",
            "        while e < stop:",
            *(" " * 12 + line for line in inner),
            f"            e += {together}",
            *(" " * 8 + line for line in end),
        ]
        threads = flat_launch(pieces * groups)[1]
        grid = (-(-pieces * groups // threads),)
        moved = (entries + min(entries, rows)) * self.columns * self.target.span.dtype.itemsize
        kernel = compiled("\n".join(lines), "puts")
        return Launch(kernel, grid, (threads,), tuple(values), nbytes=moved)


def together_of(width: int) -> int:
    """Return how many entries a thread of so many columns loads before it folds them."""
    return min(_TOGETHER, _HELD // width)


def folded(
    target: View,
    own: Sequence[int],
    updates: Sequence[int],
    row: Sequence[str],
    value: Put,
    operands: Mapping[str, View],
    reduction: str,
    status: DeviceArray | None,
    zero: bool,
) -> DeviceEntry:
    """Return the entry that sorts updates by their rows, and folds these; see `puts.put`."""
    axes = [(str(d), target.shape[d]) for d in own]
    rest = [(str(d), extent) for d, extent in enumerate(target.shape) if d not in own]
    each = [(f"u{d}", extent) for d, extent in enumerate(updates)]
    update, spot = [f"at_u{d}" for d, _ in enumerate(updates)], numbered(len(target.shape))
    column = f"at_{rest[-1][0]}" if rest else ""
    width = _width(target, column, value, update, spot, operands)
    fold = _Fold(target, axes, rest, width, reduction, zero)
    of_row = {"ids": operands["ids"]}
    keys, ordering = ordered(updates, fold.rows, row, of_row, status, target.span)

    def of_keys(n: int) -> list[str]:
        reads = Reads(column, width)

        def lane_of(at: Sequence[str], lane: int) -> list[str]:
            return [reads.lane(lane) if column and one == column else one for one in at]

        texts = [
            value(lane_of(update, lane), lane_of(spot, lane), reads.read) for lane in range(width)
        ]
        return [
            f"key = keys[e + {n}]",
            f"row_{n} = key >> 32",
            f"n = key & 0xFFFFFFFF if row_{n} < {fold.rows} else int64(0)",
            f"row_of = row_{n} if row_{n} < {fold.rows} else int64(0)",
            *(indices("n", each, "") if each else []),
            *indices("row_of", axes, ""),
            *reads.lines,
            *(f"{name} = {text}" for name, text in zip(fold.names(f"v{n}"), texts)),
        ]

    def of_left(n: int) -> list[str]:
        where = f"(e + {n}) * {fold.columns} + column"
        return [f"row_{n} = given_row[e + {n}]", fold.load(fold.names(f"v{n}"), "given", where)]

    launches, entry, entries, piece = [*ordering], of_keys, keys.size, _FIRST
    given = {**operands, "keys": keys}
    while entries > _LAST:
        pieces = -(-entries // piece)
        pieces += -pieces % max(1, together_of(width) // 2)  # as what is loaded together
        left = {
            "left": room((2 * pieces, fold.columns), wide(target.dtype), target.span),
            "left_row": room((2 * pieces,), "int64", target.span),
        }
        launches.append(fold.launch(entry, entries, piece, pieces, given, left))
        given = {"given": left["left"], "given_row": left["left_row"]}
        entry, entries, piece = of_left, 2 * pieces, _LATER
    launches.append(fold.launch(entry, entries, entries, 1, given, {}))
    return DeviceEntry(tuple(launches))


def _width(
    target: View,
    column: str,
    value: Put,
    update: Sequence[str],
    spot: Sequence[str],
    operands: Mapping[str, View],
) -> int:
    """Return how many neighbouring columns a thread has: several, where all can be loaded so."""
    if not column:
        return 1
    width = width_of([target, *operands.values()])
    reads, seen = Reads(column, width), [(target, spot)]

    def note(name: str, view: View, at: Sequence[str]) -> str:
        seen.append((view, at))
        return read(name, view, at)

    value(update, spot, note)
    last = target.shape[-1] % width == 0 and spot[-1] == column
    return width if last and all(reads.together(*one) for one in seen) else 1
