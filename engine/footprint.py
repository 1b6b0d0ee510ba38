"""The memory that the launches of a prepared graph access; see `ir/plan.py` for plans of it.

A region is one value, whichever views of it are read: views are in the memory of their root, and an
update in place in its parameter's. Constants are in no region, and offloaded values stay where they
are. If processors work in several memories, each has a footprint of its own, in which a value is
the box around the tiles accessed there, and values made elsewhere count as coming from behind the
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from soapstone.engine.carry.traffic import processors_of
from soapstone.engine.expand import Argument, NodeLaunch
from soapstone.engine.images import Images
from soapstone.engine.lower import in_place
from soapstone.engine.prepare import Prepared
from soapstone.ir.analysis.footprint import Footprint, Touch, Touches
from soapstone.ir.dims import Ints
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.tensor import TensorSpec
from soapstone.runtime import Machine, Read, ReadWrite, Write
from soapstone.runtime.analysis.reduction import plan
from soapstone.runtime.model.tiling import Box, contains, intern
from soapstone.runtime.tracing.arena import ALIGNMENT


@dataclass(frozen=True)
class Share:
    """What launches access in one memory.

    extents: the box of each value that is kept there; values that are not named are kept whole.
    """

    footprint: Footprint
    extents: Mapping[str, Box] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """The boxes of a value that an argument reads or writes in one memory, and its workspace."""

    value: str
    reads: bool
    writes: bool
    lo: Ints
    hi: Ints
    workspace: int = 0  # bytes of partial results


@dataclass(frozen=True)
class _Values:
    """The values by the regions that hold them, those that are elsewhere, and their types."""

    old: Mapping[str, str]
    away: Set[str]
    specs: Mapping[str, TensorSpec]

    @staticmethod
    def of(prepared: Prepared, images: Mapping[str, TensorSpec]) -> _Values:
        """Return the values of a graph and of packed rows."""
        graph, old = prepared.graph, in_place(prepared.graph)
        kept = prepared.strategy.tensors.items()
        specs = {old.get(name, name): prepared.region(name) for name in graph.tensors}
        away = {value for value, keep in kept if keep is Keep.OFFLOAD}
        return _Values(old, away, specs | dict(images))


def footprint_of(prepared: Prepared) -> Footprint:
    """Return what the launches of a graph access, in their order, in one memory."""
    values = _Values.of(prepared, {})
    some = [(item, _parts(values, item)) for item in prepared.launches]
    return _footprint(prepared.graph, values, some)


def footprints_of(prepared: Prepared, machine: Machine, images: Images) -> Mapping[str, Share]:
    """Return what launches access in each memory in which processors of a machine work.

    images: the launches, some of which gather from images.
    """
    memories = list(dict.fromkeys(processor.memory for processor in machine.processors))
    if len(memories) == 1:
        return {memories[0]: Share(footprint_of(prepared))}
    values, found = _Values.of(prepared, images.regions), {}
    for memory in memories:
        some = [(item, _parts(values, item, machine, memory)) for item in images.launches]
        extents = _extents([part for _, parts in some for part in parts])
        found[memory] = Share(_footprint(prepared.graph, values, some, extents), extents)
    return found


def _parts(
    values: _Values, item: NodeLaunch, machine: Machine | None = None, memory: str = ""
) -> list[_Part]:
    """Return what a launch accesses in a machine's memory; None: in one that has everything."""
    found = []
    for argument in item.arguments:
        value = values.old.get(argument.region, argument.region)
        if value in values.away:
            continue
        spec = values.specs[value]
        reads = argument.privilege in (Read, ReadWrite)
        if reads or argument.privilege is Write:
            here = np.ones(item.points, bool)
            if machine is not None:
                homes = [machine.processors[p].memory for p in processors_of(machine, item)]
                here = np.array([home == memory for home in homes])
                here &= (argument.hi > argument.lo).all(axis=1)
            lo, hi = argument.lo[here], argument.hi[here]
            found.append(_Part(value, reads, argument.privilege is not Read, lo, hi))
        elif machine is None:  # a part of it for each point
            workspace = _bytes(argument.lo, argument.hi, np.dtype(spec.dtype).itemsize)
            shape = np.array([spec.shape], np.int64)
            found.append(_Part(value, False, True, 0 * shape, shape, workspace))
        else:
            found.append(_folded(item, argument, value, spec, machine, memory))
    return found


def _folded(
    item: NodeLaunch,
    argument: Argument,
    value: str,
    spec: TensorSpec,
    machine: Machine,
    memory: str,
) -> _Part:
    """Return what partial results and their folds access in a memory."""
    processors = list(processors_of(machine, item))
    homes = [processor.memory for processor in machine.processors]
    itemsize, tiling = np.dtype(spec.dtype).itemsize, intern(spec.shape, argument.lo, argument.hi)
    spread = len({homes[p] for p in processors}) > 1
    reduction = argument.privilege.reduction or ""
    made = plan(tiling, itemsize, reduction, True, processors, spread)
    held: list[list[Box]] = [  # of each bucket, in the order in which they come
        [b.tiling.boxes[n] for n, p in enumerate(b.points) if homes[processors[p]] == memory]
        for b in made.buckets
    ]
    out: list[Box] = []
    for fold in made.folds:
        here = [n for n, p in enumerate(fold.processors.tolist()) if homes[p] == memory]
        out += [fold.out.boxes[n] for n in here]
        for bucket, tiles in fold.reads:
            for n in here:
                box = tiles.boxes[n]
                if tiles.volume[n] and not any(contains(other, box) for other in held[bucket]):
                    held[bucket].append(box)
    workspace = sum(_bytes(*_ends(boxes, spec.rank + 1), itemsize) for boxes in held)
    return _Part(value, False, True, *_ends(out, spec.rank), workspace)


def _ends(boxes: Sequence[Box], rank: int) -> tuple[Ints, Ints]:
    """Return the first and past-the-end indices of boxes: int64 (boxes, rank) each."""
    lo, hi = (np.array([box[e] for box in boxes], np.int64) for e in (0, 1))
    return lo.reshape(len(boxes), rank), hi.reshape(len(boxes), rank)


def _bytes(lo: Ints, hi: Ints, itemsize: int) -> int:
    """Return the bytes that boxes take in an arena."""
    return int((-(-np.prod(hi - lo, axis=1) * itemsize // ALIGNMENT) * ALIGNMENT).sum())


def _extents(parts: Sequence[_Part]) -> dict[str, Box]:
    """Return the box around everything that is accessed of each value."""
    boxes: dict[str, list[_Part]] = {}
    for part in parts:
        if len(part.lo):
            boxes.setdefault(part.value, []).append(part)
    return {
        value: (
            tuple(np.min([part.lo.min(axis=0) for part in some], axis=0).tolist()),
            tuple(np.max([part.hi.max(axis=0) for part in some], axis=0).tolist()),
        )
        for value, some in boxes.items()
    }


def _footprint(
    graph: Graph,
    values: _Values,
    launches: Sequence[tuple[NodeLaunch, Sequence[_Part]]],
    extents: Mapping[str, Box] | None = None,
) -> Footprint:
    """Return what launches access in a memory. extents: of values there; None: all of each."""
    old, specs, nodes = values.old, values.specs, []
    for item, parts in launches:
        found: dict[str, Touch] = {}
        for part in parts:
            if extents is not None and not len(part.lo):
                continue
            spec = specs[part.value]
            size = _size(spec, extents, part.value)
            before = found.get(part.value, Touch(part.value, False))
            written = _written(part, spec, size) if part.writes else 0
            found[part.value] = Touch(
                part.value, before.reads or part.reads, min(size, before.written + written)
            )
        workspace = sum(part.workspace for part in parts)
        nodes.append(Touches(item.node.name, item.node.label, tuple(found.values()), workspace))
    first = {t.value: t for node in reversed(nodes) for t in node.touches}
    made = {touch.value for node in nodes for touch in node.touches if touch.written}
    outlive = {old.get(name, name) for name in (*graph.roles, *graph.outputs)} & first.keys()
    others = {value for value, touch in first.items() if touch.reads and extents is not None}
    sizes = {name: _size(specs[name], extents, name) for name in sorted(first)}
    given, results = frozenset(outlive | others), frozenset(outlive & made)
    return Footprint(tuple(nodes), sizes, given, results, fixed=extents is not None)


def _size(spec: TensorSpec, extents: Mapping[str, Box] | None, value: str) -> int:
    """Return the bytes of a value in a memory."""
    if extents is None:
        return spec.nbytes
    low, high = extents[value]
    return math.prod(b - a for a, b in zip(low, high)) * np.dtype(spec.dtype).itemsize


def _written(part: _Part, spec: TensorSpec, size: int) -> int:
    """Return the number of bytes of a value that a launch writes."""
    tiling = intern(spec.shape, part.lo, part.hi)
    volume = int(tiling.volume.sum()) * np.dtype(spec.dtype).itemsize
    return size if tiling.complete else min(size, volume)
