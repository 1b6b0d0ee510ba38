"""Text of kernels that walk rows of items: what they are given, and where each element lies.

A row is what one warp, or one block, has in hand; its items are what the threads walk. Operands are
named; each has strides along the axes of rows and along those of items, and is read once a row
where it does not vary along the items.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.grid import walk
from soapstone.kernels.cuda.substrate.vectors import WIDTHS, aligned, load, store, width_of


class Layout:
    """Where the elements of operands lie, for a kernel over rows and items.

    operands: by name, all of one shape (broadcast, with strides of zero). items: the axes that are
    walked within a row. lead: the operand by whose strides axes are ordered.
    """

    def __init__(
        self, operands: Mapping[str, View], items: Sequence[int], lead: str | None = None
    ) -> None:
        self.operands = dict(operands)
        names = list(operands)
        shape = next(iter(operands.values())).shape
        at = names.index(lead) if lead else 0
        rows = [axis for axis in range(len(shape)) if axis not in items]
        self.outer, self.inner = (
            walk(
                [shape[axis] for axis in axes],
                [[operands[name].strides[axis] for axis in axes] for name in names],
                at,
            )
            for axes in (rows, list(items))
        )
        self.rows, self.items = self.outer.size, self.inner.size
        self._outer = dict(zip(names, self.outer.strides))
        self._inner = dict(zip(names, self.inner.strides))
        self.narrow = max(self.rows, self.items) < 2**31

    def varies(self, name: str) -> bool:
        """Return whether an operand has another element for another item."""
        return any(self._inner[name])

    def together(self, name: str, width: int) -> bool:
        """Return whether so many neighbouring items of an operand can be loaded at once, or are the
        same, whichever of them begins at a multiple of the width."""
        (*inner, step), outer = self._inner[name], self._outer[name]
        if not self.varies(name):
            return True
        if self.inner.extents[-1] % width:
            return False
        fits = step == 1 and aligned(self.operands[name], width, (*outer, *inner))
        return step == 0 or fits

    def across(self, name: str, width: int) -> bool:
        """Return the same of neighbouring rows."""
        (*outer, step), inner = self._outer[name], self._inner[name]
        if self.outer.extents[-1] % width:
            return False
        fits = step == 1 and aligned(self.operands[name], width, (*outer, *inner))
        return step == 0 or fits

    def shifted(self, names: Sequence[str], width: int) -> bool:
        """Return whether pieces of rows of operands can be loaded at once from the first boundary
        in a row on, which is at the same item in all of them."""
        views = [self.operands[name] for name in names]
        apart = [(view.offset, *self._outer[name]) for view, name in zip(views, names)]
        return (
            self.inner.rank == 1
            and self.items >= 4 * width
            and all(self._inner[name] == (1,) for name in names)
            and all(aligned(replace(view, offset=0), width) for view in views)
            and len({tuple(step % width for step in each) for each in apart}) == 1
        )

    def alike(self, name: str, rows: bool = False) -> bool:
        """Return whether neighbouring items of an operand, or rows, are the same."""
        return not (self._outer if rows else self._inner)[name][-1]

    @property
    def parameters(self) -> list[str]:
        """The names of a kernel's arguments that say where things lie."""
        made = [f"e{d}" for d in range(1, self.outer.rank)]
        made += [f"f{d}" for d in range(1, self.inner.rank)]
        for name in self.operands:
            made += [name, f"o_{name}"]
            made += [f"s_{name}_{d}" for d, _ in enumerate(self.outer.extents)]
            made += [f"t_{name}_{d}" for d, _ in enumerate(self.inner.extents)]
        return made

    @property
    def arguments(self) -> list[Any]:
        """Their values."""
        made: list[Any] = [*self.outer.extents[1:], *self.inner.extents[1:]]
        some = next(v.span for v in self.operands.values() if v.span is not None)
        for name, view in self.operands.items():
            span = some if view.span is None else view.span  # without elements it is never read
            made += [span, view.offset, *self._outer[name], *self._inner[name]]
        return made

    def row(self, row: str, indent: str, names: Sequence[str] | None = None) -> list[str]:
        """Return the statements that find a row: `b_NAME`, where an operand's first item is.

        names: the operands that are looked for, by default all.
        """
        lines = self._split(row, "e", self.outer.extents, "i")
        for name in self.operands if names is None else names:
            terms = [f"o_{name}"]
            terms += [f"i{d} * s_{name}_{d}" for d, step in enumerate(self._outer[name]) if step]
            lines.append(f"b_{name} = {' + '.join(terms)}")
        return [indent + line for line in lines]

    def item(self, item: str, indent: str, lane: str = "") -> list[str]:
        """Return the statements before the places of an item are named."""
        if self.inner.rank == 1:
            return []
        return [indent + line for line in self._split(item, "f", self.inner.extents, f"j{lane}_")]

    def place(self, name: str, item: str, lane: str = "") -> str:
        """Return the text of an element's index in the operand's span."""
        steps = self._inner[name]
        if len(steps) == 1:
            if steps[0] == 1:
                return f"b_{name} + {item}"
            return f"b_{name} + {item} * t_{name}_0" if steps[0] else f"b_{name}"
        terms = [f"b_{name}"]
        terms += [
            f"j{lane}_{d}" if step == 1 else f"j{lane}_{d} * t_{name}_{d}"
            for d, step in enumerate(steps)
            if step
        ]
        return " + ".join(terms)

    def read(self, name: str, place: str) -> str:
        """Return the text that reads an element, in the type it is computed in."""
        dtype = self.operands[name].dtype
        kind = wide(dtype)
        return f"{kind}({name}[{place}])" if kind != dtype else f"{name}[{place}]"

    def _split(self, number: str, sizes: str, extents: Sequence[int], to: str) -> list[str]:
        """Return the statements that make indices of a row-major number."""
        lines, rest = [], number
        for d in range(len(extents) - 1, 0, -1):
            if self.narrow:  # division of 64 bits is a routine of a hundred instructions
                lines.append(f"{to}q{d} = int64(uint32({rest}) // uint32({sizes}{d}))")
            else:
                lines.append(f"{to}q{d} = {rest} // {sizes}{d}")
            lines.append(f"{to}{d} = {rest} - {to}q{d} * {sizes}{d}")
            rest = f"{to}q{d}"
        return [*lines, f"{to}0 = {rest}"]


Names = Sequence[Callable[[str], str]]  # what renames a statement, for each of some items
Ahead = Callable[[Names], Sequence[str]]
IN_FLIGHT = 4  # items that a thread loads before it computes, or pieces of all operands
# Of a loop: statements of the items that are loaded together, and their elements.
MOST_STATEMENTS, MOST_HELD = 400, 64


@dataclass(frozen=True)
class Pieces:
    """How a thread takes neighbours at once: so many `items` of a row, or `rows` at one item.

    Attributes:
        width: how many.
        rows: whether they are rows; else they are items.
        shifted: whether the first boundary of a row is not its first item, nor the last its end.
    """

    width: int = 1
    rows: bool = False
    shifted: bool = False


def pieces(layout: Layout, names: Sequence[str], statements: int, rows: bool = False) -> Pieces:
    """Return how neighbours of operands are taken at once: 16 bytes of most where it is possible.

    names: operands that are read, or written. statements: of one item. rows: whether neighbouring
    rows are, and not items.
    """
    views = [layout.operands[name] for name in names if rows or layout.varies(name)]
    for width in sorted({width_of(views), min(WIDTHS)}, reverse=True):
        if not views or width * statements > MOST_STATEMENTS or width * len(views) > MOST_HELD:
            continue
        fits = layout.across if rows else layout.together
        if all(fits(name, width) for name in names):
            if any(not layout.alike(name, rows) for name in names):
                return Pieces(width, rows)
        elif not rows and layout.shifted([n for n in names if layout.varies(n)], width):
            return Pieces(width, shifted=True)
    return Pieces(rows=rows)


def loop(
    layout: Layout,
    text: Text,
    reads: Sequence[str],
    after: Sequence[str],
    threads: tuple[str, str],
    indent: str,
    of: Pieces = Pieces(),
    stores: Sequence[tuple[str, str]] = (),
    ahead: Ahead | None = None,
    part: str = "",
) -> list[str]:
    """Return the loop of a thread over items: loads, the statements of `text`, then `after`.

    Statements name an operand's element `NAME_u`, and results of the text `v0` and so on; those
    that do not vary along the items are `NAME_s`, read before. Several items are loaded at once.

    Args:
        reads: the operands that are read. after: statements of one item after the others, in which
            ITEM is its number, and LANE, of neighbouring rows, the row's.
        threads: the texts of the thread's number, and of how many there are.
        of: what is taken at once. stores: operands that are written, and their values.
        ahead: makes statements before those of all items that are loaded at once, given what
            renames a statement for each.
        part: the number of the part of a row to walk, which has `each` steps; by default all.
    """
    used = [name for name in reads if layout.varies(name)]
    thread, step = threads
    lines = []

    def body(positions: Sequence[str], deeper: str, of: Pieces) -> list[str]:
        loads, writes = [], []
        names: list[Callable[[str], str]] = []
        for number, position in enumerate(positions):
            first = number * of.width
            lanes = range(first, first + of.width)
            item = position if of.rows or of.width == 1 else f"at{number}"
            if item != position:
                loads.append(f"{item} = {position} * {of.width}{' + head' if of.shifted else ''}")
            loads += layout.item(item, "", str(first))
            for name in used:
                own = [f"{name}_{lane}" for lane in lanes]
                loads += loaded(layout, name, item, own, str(first), of.rows)
            for lane in lanes:
                at = item if of.rows or lane == first else f"({item} + {lane - first})"
                names.append(partial(_named, layout, at, lane, of))
            for name, value in stores:
                values = [names[lane](value) for lane in lanes]
                writes.append(stored(name, layout.place(name, item, str(first)), values))
        first_of_all = ahead(names) if ahead is not None else ()
        sums = [rename(line) for rename in names for line in (*text.lines, *after)]
        return [deeper + line for line in (*loads, *first_of_all, *sums, *writes)]

    count = "items" if of.width == 1 or of.rows else f"items // {of.width}"
    if of.shifted:
        first = next(name for name in (*used, *(name for name, _ in stores)))
        lines += [
            f"head = (-b_{first}) & {of.width - 1}",
            f"many = (items - head) // {of.width}",
            f"i = {thread}",
            f"while {f'{part} == 0 and ' if part else ''}i < items - many * {of.width}:",
            f"    rest = i if i < head else i + many * {of.width}",
            *body(["rest"], "    ", Pieces()),
            f"    i += {step}",
        ]
        count = "many"
    lines += [f"end = {count}"]
    if part:
        lines += [f"i = {part} * each", "end = min(i + each, end)", f"i += {thread}"]
    else:
        lines += [f"i = {thread}"]
    lanes = IN_FLIGHT if of.width == 1 else max(1, IN_FLIGHT // max(1, len(used)))
    while lanes > 1 and lanes * of.width * len(text.lines) > 24 * IN_FLIGHT:
        lanes //= 2
    if lanes > 1:
        lines.append(f"while i + {lanes - 1} * {step} < end:")
        positions = ["i", *(f"(i + {lane} * {step})" for lane in range(1, lanes))]
        lines += body(positions, "    ", of)
        lines.append(f"    i += {lanes} * {step}")
    lines.append("while i < end:")
    lines += body(["i"], "    ", of)
    lines.append(f"    i += {step}")
    return [indent + line for line in lines]


def loaded(
    layout: Layout,
    name: str,
    item: str,
    own: Sequence[str],
    lane: str = "",
    rows: bool = False,
) -> list[str]:
    """Return the statements that read neighbours of an operand, of which the first is an item's.

    own: what they are called. rows: whether they are rows, and not items.
    """
    place = layout.place(name, item, lane)
    if len(own) == 1 or layout.alike(name, rows):
        return [f"{own[0]} = {layout.read(name, place)}"]
    dtype = layout.operands[name].dtype
    lines = [load(own, name, place)]
    if wide(dtype) != dtype:
        lines += [f"{each} = {wide(dtype)}({each})" for each in own]
    return lines


def stored(name: str, place: str, values: Sequence[str]) -> str:
    """Return the statement that writes neighbours of an operand, or one element."""
    return store(name, place, values) if len(values) > 1 else f"{name}[{place}] = {values[0]}"


def _named(layout: Layout, item: str, lane: int, of: Pieces, line: str) -> str:
    """Return a statement of one item, for one of several that are computed together."""

    def name(match: re.Match[str]) -> str:
        found = match.group()
        if not found.endswith("_u"):
            return f"{found}_{lane}"
        operand = found[:-2]
        if not layout.varies(operand):
            own = of.rows and of.width > 1 and not layout.alike(operand, rows=True)
            return f"{operand}_s{lane % of.width if own else ''}"
        return f"{operand}_{lane - lane % of.width if layout.alike(operand, of.rows) else lane}"

    line = line.replace("ITEM", item).replace("LANE", str(lane % of.width))
    return re.sub(r"\b[a-z]\w*_u\b|\bv\d+\b", name, line)


def unit(line: str, lane: int, item: str, layout: Layout, width: int) -> str:
    """Return a statement of one item, for one of several that are kept."""
    return _named(layout, item, lane, Pieces(width), line)


def element(layout: Layout, name: str) -> Value:
    """Return an operand's element as statements of an item name it."""
    return Value(f"{name}_u", wide(layout.operands[name].dtype))


def constant(layout: Layout, name: str) -> Value:
    """Return an operand's element that does not vary along the items, as a row's statements do."""
    return Value(f"{name}_s", wide(layout.operands[name].dtype))
