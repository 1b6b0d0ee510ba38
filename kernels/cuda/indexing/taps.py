"""Elements that are weighted sums of a few of another array's, along each axis by a table.

Resizing and its gradient, borders and theirs: each axis has, for each element of the result, which
elements of x it is made of, and by what weights. The tables are in the device's memory. A gradient
has the transposed tables, so it gathers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.ir.ops.movement.slicing import border_indices, border_maps
from soapstone.ir.ops.windows.resize import Taps, axis_taps
from soapstone.ir.tensor import Array
from soapstone.kernels.cuda.elementwise.text import literal, wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import View, constant, views
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


@dataclass(frozen=True)
class Table:
    """Of one axis: element i is made of index[starts[i] : starts[i + 1]], times those weights.

    Attributes:
        weight: None where all are one. hidden: which elements are not made of x at all.
    """

    starts: Array
    index: Array
    weight: Array | None = None
    hidden: Array | None = None

    @staticmethod
    def choosing(index: Array) -> Table:
        """Return the table of an axis whose elements are each one of x."""
        return Table(np.arange(len(index) + 1), index)

    @staticmethod
    def of(taps: Taps) -> Table:
        """Return the table of resized elements."""
        count = taps.index.shape[1]
        starts = np.arange(len(taps.index) + 1) * count
        weight = None if (taps.weight == 1).all() else taps.weight.ravel()
        return Table(
            starts, taps.index.ravel(), weight, taps.outside if taps.outside.any() else None
        )

    @property
    def single(self) -> bool:
        """Whether each element is one of x."""
        return self.weight is None and bool((np.diff(self.starts) == 1).all())

    def transposed(self, size: int) -> Table:
        """Return the table of the gradient, of `size` elements."""
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        kept = np.ones(len(rows), bool) if self.hidden is None else ~self.hidden[rows]
        order = np.argsort(self.index[kept], kind="stable")
        starts = np.searchsorted(self.index[kept][order], np.arange(size + 1))
        weight = None if self.weight is None else self.weight[kept][order]
        return Table(starts, rows[kept][order], weight)


def weighted(
    x: View, y: View, tables: Sequence[Table | None], beside: DeviceArray, hidden: float = 0.0
) -> DeviceEntry:
    """Return the entry that makes y of x by a table an axis; without one, an axis is as it is.

    beside: an array where the tables are to be. hidden: what elements are that are not made of x.
    """
    if y.size == 0:
        return DeviceEntry(())
    kind, used = wide(y.dtype), [(d, table) for d, table in enumerate(tables) if table is not None]
    single = all(table.single for _, table in used)
    operands, lines, indent = {"x": x, "y": y}, [], ""
    source, factors, tests = numbered(len(y.shape)), [], []
    for d, table in used:
        operands[f"index{d}"] = constant(table.index.astype(np.int32), beside)
        if single:
            lines.append(f"p{d} = int64(index{d}[{place(f'index{d}', [f'at_{d}'])}])")
        else:
            operands[f"starts{d}"] = constant(table.starts.astype(np.int64), beside)
            ends = [f"starts{d}[{place(f'starts{d}', [at])}]" for at in (f"at_{d}", f"at_{d} + 1")]
            lines.append(f"{indent}for e{d} in range({ends[0]}, {ends[1]}):")
            indent += "    "
            lines.append(f"{indent}p{d} = int64(index{d}[{place(f'index{d}', [f'e{d}'])}])")
        source[d] = f"p{d}"
        if table.weight is not None:
            operands[f"weight{d}"] = constant(table.weight.astype(kind), beside)
            lines.append(f"{indent}w{d} = weight{d}[{place(f'weight{d}', [f'e{d}'])}]")
            factors.append(f"w{d}")
        if table.hidden is not None:
            operands[f"hidden{d}"] = constant(table.hidden.astype(np.uint8), beside)
            tests.append(f"hidden{d}[{place(f'hidden{d}', [f'at_{d}'])}] != 0")
    read = f"x[{place('x', source)}]"
    if single:
        body = [*lines, f"made = {read}"]
    else:
        product = " * ".join([*factors, f"{kind}({read})"])
        body = [
            f"made = {kind}(0)",
            *lines,
            f"{indent}made += {product}",
            f"made = {y.dtype}(made)",
        ]
    body += [f"if {' or '.join(tests)}: made = {literal(hidden, y.dtype)}"] if tests else []
    body += [f"y[{place('y', [f'at_{d}' for d, _ in enumerate(y.shape)])}] = made"]
    return each_element(body, y.shape, operands)


@variant("resize", "numba", processor="cuda")
def resize(call: Call) -> DeviceEntry:
    """Return the entry of an image of another size."""
    (x,), (y,) = views(call)
    at = call.attributes
    taps = [axis_taps(at, axis, size) for axis, size in enumerate(x.shape)]
    tables = [None if _same(each) else Table.of(each) for each in taps]
    return weighted(x, y, tables, call.outputs[0], at["extrapolation_value"])


def _same(taps: Taps) -> bool:
    return taps.identity and (len(taps.index) == 0 or taps.index[0, 0] == 0)


@variant("resize_grad", "numba", processor="cuda")
def resize_grad(call: Call) -> DeviceEntry:
    """Return the entry of what each element adds to those that are made of it."""
    (dy,), (dx,) = views(call)
    sizes = list(enumerate(call.attributes["size"]))
    taps = [axis_taps(call.attributes, axis, size) for axis, size in sizes]
    tables = [
        None if _same(each) and len(each.index) == size else Table.of(each).transposed(size)
        for each, (_, size) in zip(taps, sizes)
    ]
    return weighted(dy, dx, tables, call.outputs[0])


def bordered(call: Call, x: View, y: View) -> DeviceEntry:
    """Return the entry of a border made of x itself."""
    maps = border_maps(call.attributes, x.shape)
    tables = [
        None if np.array_equal(each, np.arange(size)) else Table.choosing(each)
        for each, size in zip(maps, x.shape)
    ]
    return weighted(x, y, tables, call.outputs[0])


@variant("pad_grad", "numba", processor="cuda")
def pad_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy, each element of the border added to where it is from."""
    (dy,), (dx,) = views(call)
    at = call.attributes
    tables = [
        Table.choosing(border_indices(at["mode"], size, low, high)).transposed(size)
        if low or high
        else None
        for size, low, high in zip(dx.shape, at["low"], at["high"])
    ]
    return weighted(dy, dx, tables, call.outputs[0])
