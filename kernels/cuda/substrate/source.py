"""Text of kernels that walk rows of items: what they are given, and where each element lies.

A row is what one warp, or one block, has in hand; its items are what the threads walk. Operands are
named; each has strides along the axes of rows and along those of items, and is read once a row
where it does not vary along the items.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.grid import walk
from soapstone.kernels.cuda.substrate.vectors import aligned


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
        """Return whether an operand's items can be loaded so many at a time, or are the same."""
        steps, fits = self._inner[name], self.items % width == 0
        if not self.varies(name):
            return True
        return fits and steps == (1,) and aligned(self.operands[name], width, self._outer[name])

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

    def row(self, row: str, indent: str) -> list[str]:
        """Return the statements that find a row: `b_NAME`, where an operand's first item is."""
        lines = self._split(row, "e", self.outer.extents, "i")
        for name in self.operands:
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


IN_FLIGHT = 4  # items that a thread loads before it computes


def loop(
    layout: Layout,
    text: Text,
    reads: Sequence[str],
    after: Sequence[str],
    span: tuple[str, str, str],
    indent: str,
) -> list[str]:
    """Return the loop of a thread over items: loads, the statements of `text`, then `after`.

    Statements name an operand's element `NAME_u`, and results of the text `v0` and so on; those
    that do not vary along the items are `NAME_s`, read before. Several items are loaded at once.

    Args:
        reads: the operands that are read. after: statements of one item after the others, in which
            ITEM is its number and PLACE_NAME an operand's index.
        span: the texts of the first item, of the one after the last, and of the step.
    """
    begin, end, step = span
    used = [name for name in reads if layout.varies(name)]
    lanes = IN_FLIGHT if len(text.lines) <= 24 else 1

    def body(positions: Sequence[str], deeper: str) -> list[str]:
        loads, sums = [], []
        for lane, position in enumerate(positions):
            loads += layout.item(position, deeper, str(lane))
            for name in used:
                place = layout.place(name, position, str(lane))
                loads.append(f"{deeper}{name}_{lane} = {layout.read(name, place)}")
        for lane, position in enumerate(positions):
            for line in (*text.lines, *after):
                line = unit(line, lane, layout).replace("ITEM", position)
                for name in re.findall(r"PLACE_(\w+)", line):
                    place = layout.place(name, position, str(lane))
                    line = line.replace(f"PLACE_{name}", place)
                sums.append(deeper + line)
        return [*loads, *sums]

    lines = [f"{indent}i = {begin}"]
    if lanes > 1:
        lines.append(f"{indent}while i + {lanes - 1} * {step} < {end}:")
        positions = ["i", *(f"(i + {lane} * {step})" for lane in range(1, lanes))]
        lines += body(positions, indent + "    ")
        lines.append(f"{indent}    i += {lanes} * {step}")
    lines.append(f"{indent}while i < {end}:")
    lines += body(["i"], indent + "    ")
    lines.append(f"{indent}    i += {step}")
    return lines


def unit(line: str, lane: int, layout: Layout) -> str:
    """Return a statement of one item, for one of several that are computed together."""

    def name(match: re.Match[str]) -> str:
        found = match.group()
        if not found.endswith("_u"):
            return f"{found}_{lane}"
        operand = found[:-2]
        return f"{operand}_{lane}" if layout.varies(operand) else f"{operand}_s"

    return re.sub(r"\b[a-z]\w*_u\b|\bv\d+\b", name, line)


def element(layout: Layout, name: str) -> Value:
    """Return an operand's element as statements of an item name it."""
    return Value(f"{name}_u", wide(layout.operands[name].dtype))


def constant(layout: Layout, name: str) -> Value:
    """Return an operand's element that does not vary along the items, as a row's statements do."""
    return Value(f"{name}_s", wide(layout.operands[name].dtype))
