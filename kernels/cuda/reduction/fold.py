"""Folds over any axes: what is computed of each element, folded, and finished, in one pass.

Where the innermost axis is folded, a warp or a block has an output and its threads walk the
elements; where it is kept, a warp has 32 neighbouring outputs and warps share the elements out.
What has too few outputs for the GPU is cut into parts, whose partial results a second launch folds
in order: no result depends on which block ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.pointwise import pointwise, touched
from soapstone.kernels.cuda.elementwise.text import Text, Value
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.substrate.arrays import View, scratch
from soapstone.kernels.cuda.substrate.folds import MOST, combined, folds, identity, lane_folds
from soapstone.kernels.cuda.substrate.grid import THREADS, resident, rounded
from soapstone.kernels.cuda.substrate.source import (
    IN_FLIGHT,
    Layout,
    Pieces,
    constant,
    element,
    loaded,
    loop,
    pieces,
)
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, processors
from soapstone.kernels.cuda.substrate.vectors import VECTORS

Monoids = Sequence[tuple[str, str]]  # of each folded value: sum, prod, max or min, and its type
# Of each element's operands to what is folded; of what was folded and the kept operands to outputs.
Prologue = Callable[[Text, Sequence[Value]], Sequence[Value]]
Epilogue = Callable[[Text, Sequence[Value]], Sequence[Value]]


@cache
def compiled(source: str, lanes: int) -> Kernel:
    """Return the kernel `fold` of a source text; lanes: threads that fold, more than a warp's are a
    block's."""
    scratch_words = MOST if SIMULATED else WARP
    made = lane_folds(lanes) if lanes <= WARP else folds(by_warp=False)
    return built("fold", source, SCRATCH=scratch_words, **INTEGERS, **VECTORS, **made)


def unchanged(text: Text, values: Sequence[Value]) -> Sequence[Value]:
    """Return the values."""
    return values


def fold(
    inputs: Sequence[View],
    axes: Sequence[int],
    monoids: Monoids,
    outputs: Sequence[View],
    prologue: Prologue = unchanged,
    epilogue: Epilogue = unchanged,
    kept: Sequence[View] = (),
) -> DeviceEntry:
    """Return the entry of a fold.

    Args:
        inputs: their shapes broadcast together. axes: those that are folded, of that shape.
        outputs, kept: of that shape, with extents of one at the folded axes, or less axes.
        prologue: statements of one element: the inputs' values to those that are folded.
        epilogue: statements of one output: folded values, then kept ones, to those written.
    """
    rank = max(len(view.shape) for view in inputs)
    shape = [max_extent([view.shape for view in inputs], rank, axis) for axis in range(rank)]
    if any(shape[axis] == 0 for axis in range(rank) if axis not in axes):
        return DeviceEntry(())
    if 0 in shape:
        once = [max(extent, 1) for extent in shape]
        before, after = ([spread(view, once, axes) for view in side] for side in (kept, outputs))
        return _empty(monoids, before, after, axes, epilogue)
    folded = {f"x{n}": view.broadcast(shape) for n, view in enumerate(inputs)}
    small = {f"k{n}": spread(view, shape, axes) for n, view in enumerate(kept)}
    made = {f"y{n}": spread(view, shape, axes) for n, view in enumerate(outputs)}
    layout = Layout({**folded, **small, **made}, axes)
    text = Text()
    values = prologue(text, [element(layout, name) for name in folded])
    taken = [text.cast(value, kind).name for value, (_, kind) in zip(values, monoids, strict=True)]
    item = text, taken
    geometry = _geometry(layout, item, len(monoids))
    if geometry.parts == 1:
        return _launch(layout, monoids, geometry, item, epilogue, inputs, (*kept, *outputs))
    count = geometry.parts * layout.rows
    partial = [scratch(count, kind, inputs[0].span) for _, kind in monoids]
    first = _launch(layout, monoids, geometry, item, None, inputs, partial)
    wide = (geometry.parts, *layout.outer.extents)
    steps = [1]
    for extent in wide[:0:-1]:
        steps.insert(0, steps[0] * extent)
    again = [View(view.span, wide, tuple(steps), view.dtype) for view in partial]
    flat = dict(zip(layout.operands, layout.outer.strides))

    def along(name: str) -> View:
        view = layout.operands[name]
        return View(view.span, (1, *wide[1:]), (0, *flat[name]), view.dtype, view.offset)

    second = fold(
        again,
        (0,),
        monoids,
        [along(name) for name in made],
        unchanged,
        epilogue,
        [along(name) for name in small],
    )
    return DeviceEntry((*first.launches, *second.launches))


def max_extent(shapes: Sequence[Sequence[int]], rank: int, axis: int) -> int:
    """Return the extent of an axis that shapes broadcast to."""
    found = [shape[axis - rank + len(shape)] for shape in shapes if axis - rank + len(shape) >= 0]
    return 0 if 0 in found else max(found, default=1)


def spread(view: View, shape: Sequence[int], axes: Sequence[int]) -> View:
    """Return a view of an output, which may lack the folded axes, repeated along them."""
    if len(view.shape) != len(shape):
        extents, strides = list(view.shape), list(view.strides)
        for axis in sorted(axes):
            extents.insert(axis, 1)
            strides.insert(axis, 0)
        view = View(view.span, tuple(extents), tuple(strides), view.dtype, view.offset)
    return view.broadcast(shape)


def _step(strides: Sequence[int]) -> int:
    return min((step for step in strides if step), default=1 << 60)


Item = tuple[Text, Sequence[str]]  # statements of an element, and the values that are folded


@dataclass(frozen=True)
class _Geometry:
    """How a fold is cut.

    Attributes:
        of: what a thread takes at once; of rows, where neighbouring threads have neighbouring rows.
        across: blocks that share rows out. block: threads along x, along y.
        parts: of a row, each of so many `steps` of a thread but the last.
    """

    of: Pieces
    across: int
    block: tuple[int, int]
    parts: int = 1
    steps: int = 0

    @property
    def span(self) -> int:
        """Neighbouring rows that a block has at a time."""
        wide, high = self.block
        return wide * self.of.width if self.of.rows else high


def _geometry(layout: Layout, item: Item, folded: int) -> _Geometry:
    """Return how a fold is cut; folded: how many values are."""
    text, _ = item
    names = [name for name in layout.operands if name[0] == "x"]
    statements = len(text.lines) + folded
    rows = layout.rows > 1 and _step(layout.inner.strides[0]) > _step(layout.outer.strides[0])
    of = pieces(layout, names, statements, rows)
    if not rows:
        return _along(layout, of)
    found = _across(layout, of)
    if found.across * found.parts < processors():  # there is little to read
        found = _across(layout, Pieces(rows=True))
    return found


def _across(layout: Layout, of: Pieces) -> _Geometry:
    """Return how a fold is cut whose neighbouring threads have neighbouring rows."""
    wide = WARP
    while wide > 4 and wide * of.width >= 2 * layout.rows:
        wide //= 2
    high = max(1, min(THREADS // wide, layout.items))
    across = -(-layout.rows // (wide * of.width))
    return _parted(_Geometry(of, across, (wide, high)), layout.items)


def _along(layout: Layout, of: Pieces) -> _Geometry:
    """Return how a fold is cut whose neighbouring threads have neighbouring items."""
    steps = -(-layout.items // of.width)
    if steps <= (64 if SIMULATED else 128) and layout.rows > 1:
        wide = 8
        while wide < WARP and wide * IN_FLIGHT < steps:
            wide *= 2
        high = max(WARP // wide, min(THREADS // wide, layout.rows))
        return _parted(_Geometry(of, -(-layout.rows // high), (wide, high)), 1)
    threads = rounded(-(-steps // IN_FLIGHT))
    return _parted(_Geometry(of, layout.rows, (threads, 1)), steps)


def _parted(of: _Geometry, steps: int) -> _Geometry:
    """Return a cut of no more blocks than are resident, and parts where there are fewer.

    steps: of all threads that share a row.
    """
    wide, high = of.block
    full, threads = resident(wide * high), high if of.of.rows else wide
    across, at_once = min(of.across, full), IN_FLIGHT * threads
    parts = max(1, min(full // across, steps // (2 * at_once)))
    each = -(-steps // (parts * at_once)) * at_once
    return replace(of, across=across, parts=-(-steps // each), steps=each)


def _launch(
    layout: Layout,
    monoids: Monoids,
    geometry: _Geometry,
    item: Item,
    epilogue: Epilogue | None,
    inputs: Sequence[View],
    others: Sequence[View],
) -> DeviceEntry:
    """Return the launch of one stage; without an epilogue, that of partial results.

    inputs: as they were given; others: what else is read or written; the partial results.
    """
    text, taken = item
    of, (wide, high), parted = geometry.of, geometry.block, geometry.parts > 1
    names = [name for name in layout.operands if name[0] == "x"]
    kept = [name for name in layout.operands if name[0] == "k"]
    end = Text("w")
    if epilogue is None:
        writes = [f"p{n}[cuda.blockIdx.y * rows + row] = a{n}" for n in range(len(monoids))]
    else:
        ends = [Value(f"a{n}", kind) for n, (_, kind) in enumerate(monoids)]
        made = epilogue(end, [*ends, *(constant(layout, name) for name in kept)])
        results = [
            end.cast(value, layout.operands[f"y{n}"].dtype).name for n, value in enumerate(made)
        ]
        writes = [f"{name}_s = {layout.read(name, f'b_{name}')}" for name in kept]
        writes += end.lines
        writes += [f"y{n}[b_y{n}] = {result}" for n, result in enumerate(results)]
    partial = [f"p{n}" for n, _ in enumerate(others)] if epilogue is None else []
    lines = [f"def fold({', '.join(['rows', 'items', 'each', *layout.parameters, *partial])}):"]
    if of.rows:
        size = geometry.span * high
        lines += [f"    s_{n} = cuda.shared.array({size}, {k})" for n, (_, k) in enumerate(monoids)]
    else:
        kinds = sorted({kind for _, kind in monoids})
        lines += [f"    s_{kind} = cuda.shared.array(SCRATCH, {kind})" for kind in kinds]
    lines += [
        f"    first = cuda.blockIdx.x * {geometry.span}",
        "    while first < rows:",
    ]
    own = f"cuda.threadIdx.x * {of.width}" if of.rows else "cuda.threadIdx.y"
    inner = [f"row = min(first + {own}, rows - {of.width if of.rows else 1})"]
    inner += layout.row("row", "", names)
    width = of.width if of.rows else 1
    for name in names:
        if not layout.varies(name):
            alike = width == 1 or layout.alike(name, rows=True)
            lanes = [f"{name}_s{'' if alike else n}" for n in range(1 if alike else width)]
            inner += loaded(layout, name, "0", lanes, rows=of.rows)
    suffixes = [f"_{lane}" for lane in range(width)] if of.rows else [""]
    inner += [
        f"a{n}{suffix} = {identity(m, kind)}"
        for n, (m, kind) in enumerate(monoids)
        for suffix in suffixes
    ]
    suffix = "_LANE" if of.rows else ""
    after = [combined(f"a{n}{suffix}", taken[n], m) for n, (m, _) in enumerate(monoids)]
    thread = ("cuda.threadIdx.y", str(high)) if of.rows else ("cuda.threadIdx.x", str(wide))
    part = "cuda.blockIdx.y" if parted else ""
    inner += loop(layout, text, names, after, thread, "", of, part=part)
    if of.rows:
        place = f"cuda.threadIdx.x * {width}"
        inner += [
            f"s_{n}[cuda.threadIdx.y * {geometry.span} + {place} + {lane}] = a{n}_{lane}"
            for n in range(len(monoids))
            for lane in range(width)
        ]
        inner += ["cuda.syncthreads()", f"column = cuda.threadIdx.y * {wide} + cuda.threadIdx.x"]
        inner += [f"while column < {geometry.span}:", "    row = first + column"]
        inner += ["    if row < rows:"]
        final = [f"a{n} = s_{n}[column]" for n, _ in enumerate(monoids)]
        final += [f"for other in range(1, {high}):"] if high > 1 else []
        for n, (monoid, _) in enumerate(monoids if high > 1 else []):
            final += [f"    c{n} = s_{n}[other * {geometry.span} + column]"]
            final += [f"    {combined(f'a{n}', f'c{n}', monoid)}"]
        tail = [f"    column += {wide * high}", "cuda.syncthreads()"]
    else:
        inner += [f"a{n} = fold_{m}(a{n}, s_{kind})" for n, (m, kind) in enumerate(monoids)]
        inner += ["row = first + cuda.threadIdx.y"]
        inner += ["if cuda.threadIdx.x == 0 and row < rows:"]
        final, tail = [], []
    if epilogue is not None:
        final += layout.row("row", "", [name for name in layout.operands if name[0] != "x"])
    indent = " " * (8 if of.rows else 4)
    inner += [*(indent + line for line in (*final, *writes)), *tail]
    inner += [f"first += cuda.gridDim.x * {geometry.span}"]
    lines += [" " * 8 + line for line in inner]
    arguments = [layout.rows, layout.items, geometry.steps, *layout.arguments]
    arguments += [view.span for view in others] if epilogue is None else []
    kernel = compiled("\n".join(lines), WARP if of.rows else wide)
    nbytes = sum(map(touched, (*inputs, *others)))
    grid = (geometry.across, geometry.parts)
    return DeviceEntry((Launch(kernel, grid, (wide, high), tuple(arguments), nbytes=nbytes),))


def _empty(
    monoids: Monoids,
    kept: Sequence[View],
    outputs: Sequence[View],
    axes: Sequence[int],
    epilogue: Epilogue,
) -> DeviceEntry:
    """Return the entry of a fold of no elements: identities, finished."""

    def alone(view: View) -> View:
        for axis in axes:
            view = view.cut(axis, 0, 1)
        return view

    def write(text: Text, values: Sequence[Value]) -> Sequence[Value]:
        ends = [text.set(identity(monoid, kind), kind) for monoid, kind in monoids]
        return epilogue(text, [*ends, *values])

    return pointwise(write, [alone(view) for view in kept], [alone(view) for view in outputs])
