"""The bytes that a strategy moves, from the tiles, privileges and memories of its launches.

Executors move the same bytes: an element that a launch reads is copied once to the memory of each
processor that reads it, unless it was written or read there before; partial results are copied to
where they are folded. So the bytes of a path are those that its copies read, and then its consumer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soapstone.engine.expand import Argument, NodeLaunch
from soapstone.engine.prepare import prepare
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.movement import Held, Tiles
from soapstone.ir.tensor import TensorSpec
from soapstone.runtime import Machine, Read, ReadWrite, Write
from soapstone.runtime.analysis.reduction import folds
from soapstone.runtime.model import tiling


def traffic_bytes(
    graph: Graph, strategy: Strategy, machine: Machine
) -> Mapping[tuple[str, str], int]:
    """Return the bytes that are copied between memories, by value and the launch that reads it.

    The steps of a path of `x` to `fc` read `x`, `x.to.fc.1`, ... Bytes of partial results, copied
    to where they are folded, are listed by the value and the launch that makes them. Inputs of the
    graph are left out, since their initial place is not part of the strategy.

    Raises:
        StrategyError: the strategy cannot be carried out.
    """
    prepared = prepare(graph, strategy)
    uses: dict[str, list[tuple[NodeLaunch, Argument]]] = {}
    for item in prepared.launches:
        for argument in item.arguments:
            if argument.region not in graph.roles:
                uses.setdefault(argument.region, []).append((item, argument))
    found: dict[tuple[str, str], int] = {}
    for value, some in uses.items():
        spec = prepared.region(value)
        done = [_done(machine, spec, item, argument) for item, argument in some]
        held = Held(spec, [tiles for tiles, _ in done])
        for (item, argument), (tiles, folded) in zip(some, done):
            key = value, item.node.name
            if argument.privilege in (Read, ReadWrite):
                folded = sum(held.get(tiles).values())
            if argument.privilege is not Read:
                held.put(tiles)
            if folded:
                found[key] = found.get(key, 0) + folded
    return found


def _done(
    machine: Machine, spec: TensorSpec, item: NodeLaunch, argument: Argument
) -> tuple[Tiles, int]:
    """Return the tiles that an argument reads or completes, and the bytes of its folds."""
    processors = processors_of(machine, item)
    memories = [processor.memory for processor in machine.processors]
    if argument.privilege in (Read, ReadWrite, Write):
        return Tiles(argument.lo, argument.hi, [memories[p] for p in processors]), 0
    itemsize, moved = np.dtype(spec.dtype).itemsize, 0
    some = folds(tiling.intern(spec.shape, argument.lo, argument.hi), itemsize, processors)
    for fold in some:
        for point in fold.members:
            if memories[processors[point]] != memories[fold.processor]:
                low = np.maximum(fold.out[0], argument.lo[point])
                high = np.minimum(fold.out[1], argument.hi[point])
                moved += int(np.maximum(high - low, 0).prod()) * itemsize
    ends = (np.array([fold.out[side] for fold in some], np.int64) for side in (0, 1))
    lo, hi = (end.reshape(len(some), spec.rank) for end in ends)
    return Tiles(lo, hi, [memories[fold.processor] for fold in some]), moved


def processors_of(machine: Machine, item: NodeLaunch) -> Sequence[int]:
    """Return the processor of each point, as the default placement has it.

    machine: where they run. item: a launch.
    """
    count = len(machine.workers)
    devices = item.configuration.devices
    return devices or [point * count // item.points for point in range(item.points)]
