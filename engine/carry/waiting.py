"""Delays for work that is repeated for the backward pass, until the backward pass needs it.

A worker that takes whatever is ready (a rank that would otherwise wait for a message,
`runtime/tracing/list_scheduling.py`) might recompute a value in the forward pass, and hold it as
long as if it had been kept. TensorOpt (section 4.2) inserts "extra dependencies": here each point
reads one element of what the backward pass has made last before it on the same processor, which
moves nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from soapstone.engine.expand import Argument, NodeLaunch
from soapstone.ir.graph import Graph
from soapstone.ir.training.backward import backward
from soapstone.runtime import Read, Write

_NEAR = 64  # launches before it among which one is looked for


def waiting(graph: Graph, launches: Sequence[NodeLaunch]) -> tuple[NodeLaunch, ...]:
    """Return the launches of a lowered graph, the late ones with an argument that delays them."""
    if not any(item.node.late for item in launches):
        return tuple(launches)
    back = backward(graph)
    begun: set[str] = set()  # regions that there are only once the backward pass has begun
    made: list[NodeLaunch] = []  # launches that write such regions, but those that wait themselves
    found: list[NodeLaunch] = []
    for item in launches:
        read = {a.region for a in item.arguments if a.privilege is not Write}
        if item.node.late and begun.isdisjoint(read):
            trigger = next(filter(None, (_trigger(item, last) for last in made[:-_NEAR:-1])), None)
            if trigger is not None:
                item = replace(item, arguments=(*item.arguments, trigger))
        if item.node.name in back and (not read or not begun.isdisjoint(read) or item.node.late):
            begun.update(a.region for a in item.arguments if a.privilege is not Read)
            if read and not item.node.late:
                made.append(item)
        found.append(item)
    return tuple(found)


def _trigger(item: NodeLaunch, last: NodeLaunch) -> Argument | None:
    """Return an argument that makes a launch wait for another, at each point on its processor."""
    place = {where: point for point, where in enumerate(_processors(last))}
    points = [place[where] for where in _processors(item) if where in place]
    if len(points) < item.points:
        return None
    for argument in last.arguments:
        if argument.privilege is Write:
            lo, hi = argument.lo[points], argument.hi[points]
            if (lo < hi).all():
                return Argument(argument.region, lo, np.minimum(lo + 1, hi), Read)
    return None


def _processors(item: NodeLaunch) -> list[Hashable]:
    """Return the processor of each point, or its relative position in the default order."""
    devices = item.configuration.devices
    if devices:
        return [*devices]
    from fractions import Fraction

    return [Fraction(p, item.points) for p in range(item.points)]
