"""Kernels over rows that are folded before they are mapped: a warp or a block has a row at a time.

A row that fits is kept in registers: it is read once, 16 bytes at a time where it lies so, and
written once. Of a longer one the first fold reads memory; the others, and the map at the end, find
it in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from soapstone.kernels.cuda.elementwise.text import Text, Value
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.reduction.fold import max_extent, spread
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.folds import MOST, combined, folds, identity
from soapstone.kernels.cuda.substrate.grid import THREADS, blocks_of, resident, rounded
from soapstone.kernels.cuda.substrate.source import (
    Ahead,
    Layout,
    Names,
    constant,
    element,
    loaded,
    loop,
    pieces,
    stored,
    unit,
)
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built
from soapstone.kernels.cuda.substrate.vectors import VECTORS, width_of

# Of a row that is kept: items of a thread, and threads; items of all operands, and statements.
LANES, WIDEST = (8, THREADS) if SIMULATED else (16, MOST)
MOST_HELD, MOST_STATEMENTS = 64, 400
Item = Callable[[Text, Sequence[Value], Sequence[Value]], Sequence[Value]]
Row = Callable[[Text, Sequence[Value], Sequence[Value], Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True)
class Phase:
    """One fold of a row.

    Attributes:
        monoids: of each value that is folded, sum, prod, max or min, and its type.
        item: statements of one element: (text, operands, statistics so far) to what is folded.
        row: (text, folded values, operands that do not vary along the row, statistics so far) to
            statistics that are added; by default the folded values. Of operands that vary only
            `taken` is to be read there.
        powers: whether it is the sum of e to the power of elements less the greatest of them, which
            the phase before is the fold to: of rows that are not kept both are found at once.
        places: whether only elements count that are the result of the phase before, or no numbers:
            threads that have none of them skip it.
    """

    monoids: Sequence[tuple[str, str]]
    item: Item
    row: Row = field(default=lambda text, folded, operands, known: folded)
    powers: bool = False
    places: bool = False


@cache
def compiled(name: str, source: str, by_warp: bool) -> Kernel:
    """Return the kernel of a name in a source text."""
    values = {**folds(by_warp), **VECTORS}
    return built(name, source, SCRATCH=MOST if SIMULATED else WARP, **values)


@dataclass(frozen=True)
class _Pass:
    """A walk over a row.

    Attributes:
        text, after: statements of an item, and those after them. stores: of each output.
        begin, end: statements before and after the walk. condition: of threads that walk.
        ahead: see `loop`.
    """

    text: Text
    after: Sequence[str] = ()
    stores: Sequence[tuple[str, str]] = ()
    begin: Sequence[str] = ()
    end: Sequence[str] = ()
    condition: str = ""
    ahead: Ahead | None = None

    def reads(self, layout: Layout) -> list[str]:
        """Return the operands that vary along a row, of which it needs elements."""
        lines = [*self.text.lines, *self.after, *(value for _, value in self.stores)]
        found = dict.fromkeys(re.findall(r"\b([a-z]\w*)_u\b", "\n".join(lines)))
        return [name for name in found if layout.varies(name)]


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
    passes = []
    for number, phase in enumerate(phases):
        text = Text()
        values = phase.item(text, [element(layout, name) for name in names], known)
        begin, after, end = [], [], []
        of_places = any(following.places for following in phases[number + 1 : number + 2])
        totals = [Value(f"a{number}_{n}", kind) for n, (_, kind) in enumerate(phase.monoids)]
        for value, total, (monoid, kind) in zip(values, totals, phase.monoids, strict=True):
            begin.append(f"{total.name} = {identity(monoid, kind)}")
            after.append(combined(total.name, text.cast(value, kind).name, monoid))
            end += [f"own = {total.name}"] if of_places else []
            end.append(f"{total.name} = fold_{monoid}({total.name}, s_{kind})")
        last = Text(f"w{number}_")
        condition = f"own == {known[-1].name} or own != own" if phase.places else ""
        known = [*known, *phase.row(last, totals, fixed, known)]
        passes.append(_Pass(text, after, (), begin, [*end, *last.lines], condition))
    if outputs:
        text = Text()
        results = item(text, [element(layout, name) for name in names], known)
        stores = [
            (f"y{n}", text.cast(value, outputs[n].dtype).name) for n, value in enumerate(results)
        ]
        passes.append(_Pass(text, (), stores, condition="inside"))
    fit = _fitting(layout, passes, list(made))
    if fit is None:
        passes = _at_once(phases, passes, [element(layout, name) for name in names])
    by_warp, grid, block = _geometry(layout, fit)
    name = "rows" if fit is None else "kept"
    more = ["status"] if status is not None else []
    lines = [f"def {name}(rows, items, {', '.join([*layout.parameters, *more])}):"]
    kinds = sorted({kind for phase in phases for _, kind in phase.monoids})
    lines += [f"    s_{kind} = cuda.shared.array(SCRATCH, {kind})" for kind in kinds]
    lines += ["    first = cuda.blockIdx.x * cuda.blockDim.y", "    while first < rows:"]
    lines += ["        row = min(first + cuda.threadIdx.y, rows - 1)"]
    lines += ["        inside = first + cuda.threadIdx.y < rows"]
    lines += layout.row("row", " " * 8)
    read = [name for name in splats if folded[name].span is not None]
    lines += [f"        {name}_s = {layout.read(name, f'b_{name}')}" for name in read]
    held: set[str] = set()
    for walk in passes:
        test = [f"if {walk.condition}:"] if walk.condition else []
        lines += [" " * 8 + line for line in (*walk.begin, *test)]
        indent = " " * (12 if test else 8)
        if fit is not None:
            lines += _unrolled(layout, walk, fit, held, indent)
        else:
            reads, threads = walk.reads(layout), ("cuda.threadIdx.x", str(block[0]))
            used = [*reads, *(name for name, _ in walk.stores)]
            of = pieces(layout, used, len(walk.text.lines) + len(walk.after))
            about = layout, walk.text, reads, walk.after, threads, indent
            lines += loop(*about, of, walk.stores, walk.ahead)
        lines += [" " * 8 + line for line in walk.end]
    if row is not None:
        last = Text("r")
        values = row(last, known, fixed, known)
        writes = [
            f"z{n}[b_z{n}] = {last.cast(value, view.dtype).name}"
            for n, (value, view) in enumerate(zip(values, row_outputs, strict=True))
        ]
        lines += ["        if cuda.threadIdx.x == 0 and inside:"]
        lines += [" " * 12 + line for line in (*last.lines, *writes)]
    lines += ["        first += cuda.gridDim.x * cuda.blockDim.y"]
    arguments = [layout.rows, layout.items, *layout.arguments]
    arguments += [status] if status is not None else []
    kernel = compiled(name, "\n".join(lines), by_warp)
    return DeviceEntry((Launch(kernel, grid, block, tuple(arguments)),))


def taken(operand: int, item: str) -> str:
    """Return the text that reads an item of a row of one axis, of an operand by its number."""
    return f"x{operand}[b_x{operand} + {item} * t_x{operand}_0]"


def _at_once(
    phases: Sequence[Phase], passes: Sequence[_Pass], elements: Sequence[Value]
) -> list[_Pass]:
    """Return the walks in which a sum of powers is found together with the greatest element.

    A thread's sum is of powers less the greatest element so far, `base`, which is looked for among
    those that are loaded at once, and multiplied by what it is off when there is a greater one. Of
    a number that is none, or no limit, the sum is none.
    """
    made = list(passes)
    for number in range(len(phases) - 1, 0, -1):
        if not phases[number].powers:
            continue
        (_, kind), most, total = phases[number].monoids[0], f"a{number - 1}_0", f"a{number}_0"
        text = Text()
        greatest = phases[number - 1].item(text, elements, [])[0].name
        power = phases[number].item(text, elements, [Value("base", kind)])[0].name

        def ahead(names: Names, of: str = greatest, m: str = most, s: str = total) -> list[str]:
            lines = [f"top = {names[0](of)}"]
            lines += [combined("top", rename(of), "greatest") for rename in names[1:]]
            off = f"    {s} *= exp({m} - top)"
            return [*lines, f"if top > {m}:", off, f"    {m} = top", "    base = top"]

        first, second = made[number - 1 : number + 1]
        begin = [*first.begin, *second.begin, f"base = {kind}(0)"]
        own = [f"base = {most}", *first.end, f"{total} *= exp(base - {most})"]
        after = [combined(total, power, "sum")]
        joint = _Pass(text, after, (), begin, [*own, *second.end], ahead=ahead)
        made[number - 1 : number + 1] = [joint]
    return made


@dataclass(frozen=True)
class _Fit:
    """How the threads of a row keep it: each has `groups` of `width` neighbours.

    Attributes:
        exact: whether all of them are there.
    """

    threads: int
    groups: int
    width: int
    exact: bool


def _fitting(layout: Layout, passes: Sequence[_Pass], outputs: Sequence[str]) -> _Fit | None:
    """Return how a row is kept in registers, or None: it does not fit, or is read only once."""
    held = list(dict.fromkeys(name for walk in passes for name in walk.reads(layout)))
    if len(passes) < 2 or not held or layout.items == 0:
        return None
    threads = WARP
    while threads * LANES < layout.items:
        threads *= 2
    views = [layout.operands[name] for name in (*held, *outputs)]
    width = width_of(views)
    if not all(layout.together(name, width) for name in (*held, *outputs)):
        width = 1
    groups = -(-layout.items // (threads * width))
    if width == 1:  # of each number another kernel would be made
        groups = 1 << (groups - 1).bit_length()
    lanes, statements = groups * width, sum(len(w.text.lines) + len(w.after) for w in passes)
    if threads > WIDEST or len(held) * lanes > MOST_HELD or statements * lanes > MOST_STATEMENTS:
        return None
    return _Fit(threads, groups, width, threads * lanes == layout.items)


def _unrolled(layout: Layout, walk: _Pass, fit: _Fit, held: set[str], indent: str) -> list[str]:
    """Return the statements of a thread for all of its items; adds what they load to `held`."""
    lines = []
    reads = walk.reads(layout)
    for group in range(fit.groups):
        at = f"at{group}"
        lines.append(f"{indent}{at} = (cuda.threadIdx.x + {group * fit.threads}) * {fit.width}")
        deeper = indent
        if not fit.exact:
            lines.append(f"{indent}if {at} < items:")
            deeper = indent + "    "
        lanes = range(group * fit.width, (group + 1) * fit.width)
        lines += layout.item(at, deeper, str(lanes[0]))
        for name in reads:
            if name not in held:
                own = [f"{name}_{n}" for n in lanes]
                lines += [deeper + line for line in loaded(layout, name, at, own, str(lanes[0]))]
        for lane in lanes:
            item = at if lane == lanes[0] else f"({at} + {lane - lanes[0]})"
            for line in (*walk.text.lines, *walk.after):
                lines.append(deeper + unit(line, lane, item, layout, fit.width))
        for name, value in walk.stores:
            values = [unit(value, lane, "", layout, fit.width) for lane in lanes]
            lines.append(deeper + stored(name, layout.place(name, at, str(lanes[0])), values))
    held.update(reads)
    return lines


def _geometry(layout: Layout, fit: _Fit | None) -> tuple[bool, tuple[int, ...], tuple[int, int]]:
    """Return whether a warp has a row, the grid, and the block (threads of a row, rows)."""
    few = layout.items <= (64 if SIMULATED else 1024)
    if few if fit is None else fit.threads == WARP:
        high = max(1, min(THREADS // WARP, layout.rows))
        return True, (blocks_of(-(-layout.rows // high) * WARP * high, WARP * high),), (WARP, high)
    threads = rounded(-(-layout.items // 4)) if fit is None else fit.threads
    if fit is None:  # few rows have more threads each
        most = min(WIDEST, layout.items // LANES)
        while 2 * threads <= most and 2 * layout.rows <= resident(threads):
            threads *= 2
    return False, (blocks_of(layout.rows * threads, threads),), (threads, 1)
