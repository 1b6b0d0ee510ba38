"""Moving the elements of index sets: gathers into packed tiles, scatters back, and reductions.

Each is a task of the runtime on boxes. A gather reads the smallest box around each set. A scatter
turns the work round: its points own disjoint boxes of the region and fetch what goes there from
the packed tiles, so that sets whose boxes overlap are written side by side. Where the boxes around
the sets are disjoint already, each is a point of its own, and dependences are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import code_of
from soapstone.native.memory import Array, Entry
from soapstone.native.walks import moved, walk
from soapstone.records import dataclass
from soapstone.runtime.analysis.transfer import NATIVE_FOLDS, combine, folded
from soapstone.runtime.model.sparse import IndexSets
from soapstone.runtime.model.task import PointContext, Read, ReadWrite, Task, Write
from soapstone.runtime.model.tiling import Shape, Tiling, intern

BLOCK_BYTES = 1 << 16  # a scatter of less than this is not cut over processors


@dataclass(frozen=True, eq=False)
class Scatter:
    """How packed tiles go back to a region: a box of it for each point, and what it reads.

    task: reads its box of the packed region and updates its box of the region.
    """

    task: Task
    out: Tiling
    packed: Tiling


def gather_task(sets: IndexSets) -> Task:
    """The task that packs a set at each point: (its smallest box: Read, its packed tile: Write)."""
    found = sets.tasks.get("gather")
    if found is None:
        lo, _ = sets.bounds()

        def local(context: PointContext) -> tuple[Array, ...]:
            point = context.point
            whole = sets.coordinates(sets.tile(point))
            return tuple(axis - low for axis, low in zip(whole, lo[point].tolist()))

        def body(context: PointContext, source: Array, packed: Array) -> None:
            packed[...] = source[local(context)]

        def bind(context: PointContext, arrays: Sequence[Array]) -> Entry:
            source, packed = arrays
            entry = _move(packed, None, source, local(context))
            assert entry is not None  # any dtype can be moved
            return entry

        found = Task("gather", (Read, Write), body=body, bind=bind, context=True, kind="gather")
        sets.tasks["gather"] = found
    return found


def scatter(sets: IndexSets, rest: Shape, blocks: int, reduction: str | None) -> Scatter:
    """How to write packed tiles back, or to combine them in the order of points.

    rest: the extents of the region's other axes. blocks: into how many boxes a region is cut where
    the boxes around the sets overlap.
    """
    key = (rest, blocks, reduction)
    found: Scatter | None = sets.tasks.get(key)
    if found is None:
        out = sets.boxes(rest)
        if out.disjoint:
            work = [np.arange(a, b) for a, b in zip(sets.starts[:-1], sets.starts[1:])]
        else:
            out, work = _blocks(sets, rest, blocks)
        found = _plan(sets, rest, out, work, reduction)
        sets.tasks[key] = found
    return found


def _blocks(sets: IndexSets, rest: Shape, blocks: int) -> tuple[Tiling, list[Array]]:
    """Boxes that cut the hull of all sets along the first axis, and what goes into each."""
    shape = sets.shape
    lo, hi = sets.bounds()
    filled = sets.sizes > 0
    low, high = lo[filled].min(axis=0), hi[filled].max(axis=0)
    blocks = max(1, min(blocks, int(high[0] - low[0])))
    faces = [int(low[0] + (high[0] - low[0]) * i // blocks) for i in range(blocks + 1)]
    lows = np.tile(np.array([*low, *[0] * len(rest)], dtype=np.int64), (blocks, 1))
    highs = np.tile(np.array([*high, *rest], dtype=np.int64), (blocks, 1))
    lows[:, 0], highs[:, 0] = faces[:-1], faces[1:]
    block = np.searchsorted(np.array(faces), sets.coordinates(sets.indices)[0], side="right") - 1
    work = [np.nonzero(block == number)[0] for number in range(blocks)]
    return intern(shape + rest, lows, highs), work


def _plan(
    sets: IndexSets, rest: Shape, out: Tiling, work: Sequence[Array], reduction: str | None
) -> Scatter:
    total = int(sets.starts[-1])
    spans = [(int(w[0]), int(w[-1]) + 1) if w.size else (0, 0) for w in work]
    lo = np.zeros((len(work), 1 + len(rest)), dtype=np.int64)
    hi = np.tile(np.array((0, *rest), dtype=np.int64), (len(work), 1))
    lo[:, 0], hi[:, 0] = [a for a, _ in spans], [b for _, b in spans]
    packed = intern((total, *rest), lo, hi)
    axes = len(sets.shape)
    cells = np.prod(out.hi[:, :axes] - out.lo[:, :axes], axis=1)
    written = [np.unique(sets.indices[positions]).size for positions in work]
    covers = bool((cells == written).all())

    def where(context: PointContext) -> tuple[tuple[Array, ...], Array]:
        positions = work[context.point]
        whole = sets.coordinates(sets.indices[positions])
        low = out.lo[context.point].tolist()
        places = tuple(axis - base for axis, base in zip(whole, low))
        return places, positions - spans[context.point][0]

    def body(context: PointContext, packed: Array, target: Array) -> None:
        places, rows = where(context)
        if reduction is None:
            target[places] = packed[rows]
            return
        positions = work[context.point]
        cuts = np.searchsorted(positions, sets.starts)
        with folded(target) as out:
            for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist()):  # tiles, in order of points
                if a < b:
                    some = tuple(axis[a:b] for axis in places)
                    held = out[some]
                    combine(reduction, held, packed[rows[a:b]])
                    out[some] = held

    def bind(context: PointContext, arrays: Sequence[Array]) -> Entry | None:
        packed, target = arrays
        places, rows = where(context)
        return _move(target, places, packed, (rows,), reduction)

    name = "scatter" if reduction is None else f"scatter.{reduction}"
    privilege = Write if covers and reduction is None else ReadWrite
    task = Task(name, (Read, privilege), body=body, bind=bind, context=True, kind="scatter")
    return Scatter(task, out, packed)


def _move(
    target: Array,
    to: tuple[Array, ...] | None,
    source: Array,
    by: tuple[Array, ...],
    reduction: str | None = None,
) -> Entry | None:
    """The native entry that moves or combines rows, or None for a dtype without a kernel.

    to, by: coordinates of the rows along the first axes of target and source; None for all rows of
    the target in order.

    Raises: ValueError for coordinates outside an array: entries check nothing.
    """
    from soapstone.native import gathers

    count = by[0].size
    if to is None:
        to = (np.arange(count, dtype=np.int64),)
    if target.shape[len(to) :] != source.shape[len(by) :]:
        raise ValueError(f"rows of {source.shape} do not fit into {target.shape}")
    ends: dict[str, Any] = {}
    for side, places, array in (("target", to, target), ("source", by, source)):
        ends[f"{side}_at"], ends[f"{side}_step"] = _offsets(places, array)
    inner = [target.reshape(-1)[:0]] * 2
    if count:
        inner = [array[(0,) * len(p) + (...,)] for array, p in ((target, to), (source, by))]
    kernel = gathers.move_rows
    if reduction is None:
        inner = moved(*inner)
    elif code_of(target.dtype)[1:] not in NATIVE_FOLDS or not target.dtype.isnative:
        return None
    else:
        kernel = gathers.combine_rows(target.dtype.str, reduction)
    extents, strides = walk(inner[0].shape, inner)
    block = gathers.ROWS.pack(
        *(extents, *strides),
        rows=count,
        unit=inner[0].itemsize,
        target=target,
        source=source,
        axes=len(extents),
        keep=(kernel,),
        **ends,
    )
    return Entry(kernel.address, block)


def _offsets(places: tuple[Array, ...], array: Array) -> tuple[Array | int, int]:
    """Where rows of an array lie: their offsets, or 0 and the step of rows that are in order.

    Raises: ValueError for coordinates outside the array.
    """
    count = places[0].size
    for axis, extent in zip(places, array.shape):
        if count and not 0 <= int(axis.min()) <= int(axis.max()) < extent:
            raise ValueError(
                f"rows {int(axis.min())}..{int(axis.max())} of an array of shape {array.shape}"
            )
    rows = places[0]
    if len(places) == 1 and count and rows[0] == 0 and bool((np.diff(rows) == 1).all()):
        return 0, array.strides[0]
    offset = np.zeros(count, dtype=np.int64)
    for axis, step in zip(places, array.strides):
        offset += axis * step
    return offset, 0
