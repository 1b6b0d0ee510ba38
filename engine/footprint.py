"""What the launches of a prepared graph touch in memory: what memory plans are of (`ir/plan.py`).

A region is one value, whoever looks at it: views are the memory of their root, and an update in
place is its parameter's. Constants are in no region, and what is offloaded stays where it is.
"""

from __future__ import annotations

import numpy as np

from soapstone.engine.expand import Argument, NodeLaunch
from soapstone.engine.lower import in_place
from soapstone.engine.prepare import Prepared
from soapstone.ir.footprint import Footprint, Touch, Touches
from soapstone.ir.strategy.configuration import Keep
from soapstone.runtime import Read, ReadWrite, Write
from soapstone.runtime.model.tiling import intern
from soapstone.runtime.tracing.arena import ALIGNMENT


def footprint_of(prepared: Prepared) -> Footprint:
    """Return what is touched by the launches of a graph, in their order."""
    graph, old = prepared.graph, in_place(prepared.graph)
    specs = {old.get(name, name): prepared.region(name) for name in graph.tensors}
    away = {value for value, keep in prepared.strategy.tensors.items() if keep is Keep.OFFLOAD}

    def touched(item: NodeLaunch) -> Touches:
        found: dict[str, Touch] = {}
        workspace = 0
        for argument in item.arguments:
            name = old.get(argument.region, argument.region)
            if name in away:
                continue
            spec = specs[name]
            before = found.get(name, Touch(name, False))
            reads = argument.privilege in (Read, ReadWrite)
            written = 0 if argument.privilege is Read else _written(argument, spec.shape)
            written *= np.dtype(spec.dtype).itemsize
            found[name] = Touch(
                name, before.reads or reads, min(spec.nbytes, before.written + written)
            )
            if argument.privilege not in (Read, ReadWrite, Write):  # a part of it for each point
                itemsize = np.dtype(spec.dtype).itemsize
                volumes = np.prod(argument.hi - argument.lo, axis=1) * itemsize
                workspace += int((-(-volumes // ALIGNMENT) * ALIGNMENT).sum())
        node = item.node
        return Touches(node.name, node.label, tuple(found.values()), workspace)

    nodes = tuple(touched(item) for item in prepared.launches)
    used = {touch.value for node in nodes for touch in node.touches}
    made = {touch.value for node in nodes for touch in node.touches if touch.written}
    outlive = {old.get(name, name) for name in (*graph.roles, *graph.outputs)} & used
    sizes = {name: specs[name].nbytes for name in sorted(used)}
    return Footprint(nodes, sizes, frozenset(outlive), frozenset(outlive & made))


def _written(argument: Argument, shape: tuple[int, ...]) -> int:
    """Return how many elements the points of a launch write together."""
    tiling = intern(shape, argument.lo, argument.hi)
    size = int(np.prod(shape, dtype=np.int64))
    whole = argument.privilege not in (Write, ReadWrite) or tiling.complete
    return size if whole else min(size, int(tiling.volume.sum()))


__all__ = ["footprint_of"]
