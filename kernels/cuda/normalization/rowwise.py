"""Kernels over rows that are folded before they are mapped: a warp or a block has a row at a time.

A row is read from memory by the first fold; the others, and the map at the end, find it in the
first-level cache, which holds what a multiprocessor's rows take up to some thousand elements each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from soapstone.kernels.cuda.elementwise.text import Text, Value
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.reduction.fold import max_extent, spread
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.folds import MOST, combined, folds, identity
from soapstone.kernels.cuda.substrate.grid import THREADS, blocks_of, rounded
from soapstone.kernels.cuda.substrate.source import Layout, constant, element, loop
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built

Item = Callable[[Text, Sequence[Value], Sequence[Value]], Sequence[Value]]
Row = Callable[[Text, Sequence[Value], Sequence[Value], Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True)
class Phase:
    """One fold of a row.

    Attributes:
        monoids: of each value that is folded, sum, prod, max or min, and its type.
        item: statements of one element: (text, operands, statistics so far) to what is folded.
        row: (text, folded values, operands that do not vary along the row, statistics so far) to
            statistics that are added; by default the folded values. Operands that vary are not to
            be read there.
    """

    monoids: Sequence[tuple[str, str]]
    item: Item
    row: Row = field(default=lambda text, folded, operands, known: folded)


@cache
def compiled(source: str, by_warp: bool) -> Kernel:
    """Return the kernel `rows` of a source text."""
    return built("rows", source, SCRATCH=MOST if SIMULATED else WARP, **folds(by_warp))


def rowwise(
    inputs: Sequence[View],
    axes: Sequence[int],
    phases: Sequence[Phase],
    outputs: Sequence[View],
    item: Item,
    row_outputs: Sequence[View] = (),
    row: Row | None = None,
    status: DeviceArray | None = None,
) -> DeviceEntry:
    """Return the entry that folds rows and maps their elements.

    Args:
        inputs: their shapes broadcast together. axes: those of a row.
        phases: folds in order. item: statements of an element of the outputs, given the operands
            and all statistics. outputs: of the whole shape.
        row_outputs: values of a row, without the row's axes or with extents of one there; `row`
            returns them, given operands that do not vary along a row and all statistics.
        status: given to the kernel as `status`, where statements are to set it.
    """
    rank = max(len(view.shape) for view in inputs)
    shape = [max_extent([view.shape for view in inputs], rank, axis) for axis in range(rank)]
    if any(shape[axis] == 0 for axis in range(rank) if axis not in axes):
        return DeviceEntry(())
    folded = {f"x{n}": view.broadcast(shape) for n, view in enumerate(inputs)}
    made = {f"y{n}": view for n, view in enumerate(outputs)}
    small = {f"z{n}": spread(view, shape, axes) for n, view in enumerate(row_outputs)}
    layout = Layout({**folded, **made, **small}, axes)
    names = list(folded)
    if layout.items == 0 and not small:
        return DeviceEntry(())
    splats = [name for name in names if not layout.varies(name)]
    fixed = [constant(layout, name) for name in names]
    known: list[Value] = []
    by_warp, grid, block = _geometry(layout)
    more = ["status"] if status is not None else []
    lines = [f"def rows(rows, items, {', '.join([*layout.parameters, *more])}):"]
    kinds = sorted({kind for phase in phases for _, kind in phase.monoids})
    lines += [f"    s_{kind} = cuda.shared.array(SCRATCH, {kind})" for kind in kinds]
    lines += ["    first = cuda.blockIdx.x * cuda.blockDim.y", "    while first < rows:"]
    lines += ["        row = min(first + cuda.threadIdx.y, rows - 1)"]
    lines += ["        inside = first + cuda.threadIdx.y < rows"]
    lines += layout.row("row", " " * 8)
    read = [name for name in splats if folded[name].span is not None]
    lines += [f"        {name}_s = {layout.read(name, f'b_{name}')}" for name in read]
    span = ("cuda.threadIdx.x", "items", "cuda.blockDim.x")
    for number, phase in enumerate(phases):
        text = Text()
        values = phase.item(text, [element(layout, name) for name in names], known)
        after, totals = [], []
        for n, (value, (monoid, kind)) in enumerate(zip(values, phase.monoids, strict=True)):
            total = f"a{number}_{n}"
            totals.append(Value(total, kind))
            lines.append(f"        {total} = {identity(monoid, kind)}")
            after.append(combined(total, text.cast(value, kind).name, monoid))
        lines += loop(layout, text, names, after, span, " " * 8)
        for made_of, (monoid, kind) in zip(totals, phase.monoids):
            lines.append(f"        {made_of.name} = fold_{monoid}({made_of.name}, s_{kind})")
        end = Text(f"w{number}_")
        known = [*known, *phase.row(end, totals, fixed, known)]
        lines += [" " * 8 + line for line in end.lines]
    if outputs:
        text = Text()
        results = item(text, [element(layout, name) for name in names], known)
        stores = []
        for n, value in enumerate(results):
            stored = text.cast(value, outputs[n].dtype).name
            stores.append(f"y{n}[PLACE_y{n}] = {stored}")
        lines += ["        if inside:"]
        lines += loop(layout, text, names, stores, span, " " * 12)
    if row is not None:
        end = Text("r")
        values = row(end, known, fixed, known)
        writes = [
            f"z{n}[b_z{n}] = {end.cast(value, view.dtype).name}"
            for n, (value, view) in enumerate(zip(values, row_outputs, strict=True))
        ]
        lines += ["        if cuda.threadIdx.x == 0 and inside:"]
        lines += [" " * 12 + line for line in (*end.lines, *writes)]
    lines += ["        first += cuda.gridDim.x * cuda.blockDim.y"]
    arguments = [layout.rows, layout.items, *layout.arguments]
    arguments += [status] if status is not None else []
    kernel = compiled("\n".join(lines), by_warp)
    return DeviceEntry((Launch(kernel, grid, block, tuple(arguments)),))


def _geometry(layout: Layout) -> tuple[bool, tuple[int, ...], tuple[int, int]]:
    """Return whether a warp has a row, the grid, and the block (threads of a row, rows)."""
    if layout.items <= (64 if SIMULATED else 1024):
        high = max(1, min(THREADS // WARP, layout.rows))
        return True, (blocks_of(-(-layout.rows // high) * WARP * high, WARP * high),), (WARP, high)
    threads = rounded(-(-layout.items // 4))
    return False, (blocks_of(layout.rows * threads, threads),), (threads, 1)
