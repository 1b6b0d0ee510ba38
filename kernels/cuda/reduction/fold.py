"""Folds over any axes: what is computed of each element, folded, and finished, in one pass.

Where the innermost axis is folded, a warp or a block has an output and its threads walk the
elements; where it is kept, a warp has 32 neighbouring outputs and warps share the elements out.
What has too few outputs for the GPU is cut into parts, whose partial results a second launch folds
in order: no result depends on which block ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.substrate.arrays import View, scratch
from soapstone.kernels.cuda.substrate.folds import MOST, combined, folds, identity
from soapstone.kernels.cuda.substrate.grid import THREADS, rounded
from soapstone.kernels.cuda.substrate.source import Layout, constant, element, loop
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, processors

Monoids = Sequence[tuple[str, str]]  # of each folded value: sum, prod, max or min, and its type
# Of each element's operands to what is folded; of what was folded and the kept operands to outputs.
Prologue = Callable[[Text, Sequence[Value]], Sequence[Value]]
Epilogue = Callable[[Text, Sequence[Value]], Sequence[Value]]


@cache
def compiled(source: str, by_warp: bool) -> Kernel:
    """Return the kernel `fold` of a source text."""
    scratch_words = MOST if SIMULATED else WARP
    return built("fold", source, SCRATCH=scratch_words, **INTEGERS, **folds(by_warp))


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
    inner = _step(layout.inner.strides[0]) <= _step(layout.outer.strides[0])
    parts, grid, block = _geometry(layout, inner or layout.rows == 1)
    if parts == 1:
        return _launch(layout, monoids, (parts, grid, block), prologue, epilogue, len(made))
    count = parts * layout.rows
    partial = [scratch(count, kind, inputs[0].span) for _, kind in monoids]
    first = _launch(layout, monoids, (parts, grid, block), prologue, None, 0, partial)
    wide = (parts, *layout.outer.extents)
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


def _geometry(layout: Layout, inner: bool) -> tuple[int, tuple[int, ...], tuple[int, int]]:
    """Return parts, grid (outputs, parts) and block (threads along x, along y)."""
    full = processors() * (2 if SIMULATED else 8)  # blocks that fill the GPU
    if not inner:
        across = min(-(-layout.rows // WARP), full)
        high = max(1, min(THREADS // WARP, layout.items))
        parts = max(1, min(full // across, layout.items // (4 * high)))
        return parts, (across, parts), (WARP, high)
    if layout.items <= (64 if SIMULATED else 512) and layout.rows > 1:
        high = max(1, min(THREADS // WARP, layout.rows))
        return 1, (min(-(-layout.rows // high), full), 1), (WARP, high)
    threads = rounded(-(-layout.items // 4))
    across = min(layout.rows, full)
    parts = max(1, min(full // across, layout.items // (4 * threads)))
    return parts, (across, parts), (threads, 1)


def _launch(
    layout: Layout,
    monoids: Monoids,
    geometry: tuple[int, tuple[int, ...], tuple[int, int]],
    prologue: Prologue,
    epilogue: Epilogue | None,
    outputs: int,
    partial: Sequence[View] = (),
) -> DeviceEntry:
    """Return the launch of one stage; without an epilogue, that of partial results."""
    parts, grid, block = geometry
    wide, high = block
    by_rows = wide == WARP and _is_outer(layout)
    names = list(layout.operands)
    inputs = [name for name in names if name[0] == "x"]
    kept = [name for name in names if name[0] == "k"]
    text, end = Text(), Text("w")
    values = prologue(text, [element(layout, name) for name in inputs])
    taken = [text.cast(value, kind) for value, (_, kind) in zip(values, monoids, strict=True)]
    after = [combined(f"a{n}", taken[n].name, m) for n, (m, _) in enumerate(monoids)]
    if epilogue is None:
        writes = [f"p{n}[cuda.blockIdx.y * rows + row] = a{n}" for n in range(len(monoids))]
    else:
        ends = [Value(f"a{n}", kind) for n, (_, kind) in enumerate(monoids)]
        made = epilogue(end, [*ends, *(constant(layout, name) for name in kept)])
        writes = []
        for n, value in enumerate(made):
            stored = end.cast(value, layout.operands[f"y{n}"].dtype).name
            writes.append(f"y{n}[b_y{n}] = {stored}")
        assert len(made) == outputs
    head = ["rows", "items", "parts", *layout.parameters, *(f"p{n}" for n, _ in enumerate(partial))]
    lines = [f"def fold({', '.join(head)}):"]
    kinds = sorted({kind for _, kind in monoids})
    if by_rows:
        size = wide * high
        lines += [f"    s_{n} = cuda.shared.array({size}, {k})" for n, (_, k) in enumerate(monoids)]
    else:
        lines += [f"    s_{kind} = cuda.shared.array(SCRATCH, {kind})" for kind in kinds]
    if parts == 1:
        lines += ["    begin = 0", "    end = items"]
    else:
        lines += ["    begin = items * cuda.blockIdx.y // parts"]
        lines += ["    end = items * (cuda.blockIdx.y + 1) // parts"]
    own, step = ("x", "y") if by_rows else ("y", "x")
    lines += [
        f"    first = cuda.blockIdx.x * cuda.blockDim.{own}",
        "    while first < rows:",
        f"        row = min(first + cuda.threadIdx.{own}, rows - 1)",
        *layout.row("row", " " * 8),
    ]
    used = [*inputs, *(kept if epilogue is not None else [])]
    lines += [
        f"        {name}_s = {layout.read(name, f'b_{name}')}"
        for name in used
        if not layout.varies(name)
    ]
    lines += [f"        a{n} = {identity(m, kind)}" for n, (m, kind) in enumerate(monoids)]
    span = (f"begin + cuda.threadIdx.{step}", "end", f"cuda.blockDim.{step}")
    lines += loop(layout, text, inputs, after, span, " " * 8)
    inside = f"cuda.threadIdx.{step} == 0 and first + cuda.threadIdx.{own} < rows"
    if by_rows:
        lines += [
            f"        s_{n}[cuda.threadIdx.y * {wide} + cuda.threadIdx.x] = a{n}"
            for n, _ in enumerate(monoids)
        ]
        lines += ["        cuda.syncthreads()", f"        if {inside}:"]
        lines += [f"            for other in range(1, {high}):"]
        for n, (monoid, _) in enumerate(monoids):
            other = f"s_{n}[other * {wide} + cuda.threadIdx.x]"
            lines += [f"                c{n} = {other}"]
            lines += [f"                {combined(f'a{n}', f'c{n}', monoid)}"]
    else:
        lines += [f"        a{n} = fold_{m}(a{n}, s_{kind})" for n, (m, kind) in enumerate(monoids)]
        lines += [f"        if {inside}:"]
    lines += [" " * 12 + line for line in (*end.lines, *writes)]
    lines += ["        cuda.syncthreads()"] if by_rows else []
    lines += [f"        first += cuda.gridDim.x * cuda.blockDim.{own}"]
    arguments = [layout.rows, layout.items, parts, *layout.arguments]
    arguments += [view.span for view in partial]
    kernel = compiled("\n".join(lines), wide == WARP)
    return DeviceEntry((Launch(kernel, grid, block, tuple(arguments)),))


def _is_outer(layout: Layout) -> bool:
    return layout.rows > 1 and not (
        _step(layout.inner.strides[0]) <= _step(layout.outer.strides[0])
    )


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
