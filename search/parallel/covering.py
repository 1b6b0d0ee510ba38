"""Strategies whose runs measure tasks: together they have each operator in each configuration.

Jia, section 3.4.1: an operator is measured once for each configuration. Here that is done inside
whole steps, where caches and neighbours are as they will be: a few strategies cover everything.
"""

from __future__ import annotations

import math

import numpy as np

from soapstone.engine.expand import NodeLaunch
from soapstone.ir.configuration import Configuration
from soapstone.ir.dims import Kind
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.search.parallel.mcmc.initial import Parallel, kinds_of_dims
from soapstone.search.parallel.problem.operators import Operator
from soapstone.search.parallel.problem.prepare import Model

_ORDER = (Parallel.SAMPLE, Parallel.PARAMETER, Parallel.ATTRIBUTE, Parallel.REDUCED)
MOST = 24  # strategies: more configurations than a machine of few devices has


def choices(model: Model, item: Operator, sample: str | None) -> list[dict[str, int]]:
    """Return the legal degrees of an operator with at most one point a device, whole first.

    Those that split alike (samples, parameters, attributes, sums) are at like places.
    """
    signature = model.graph.signature(item.node)
    kinds = kinds_of_dims(model.graph, item.node, sample)
    dims = [d for d in signature.dims if d.kind is not Kind.WHOLE and d.extent > 1]
    dims.sort(key=lambda dim: _ORDER.index(kinds[dim.name]))
    found: list[dict[str, int]] = [{}]
    for dim in dims:
        for degrees in tuple(found):
            room = len(model.machine.processors) // math.prod(degrees.values())
            for degree in range(2, min(room, dim.extent) + 1):
                more = degrees | {dim.name: degree}
                try:
                    signature.check(more, item.node.spec.lower is not None)
                except StrategyError:
                    continue
                found.append(more)
    order = [dim.name for dim in signature.dims]
    return [dict(sorted(f.items(), key=lambda pair: order.index(pair[0]))) for f in found]


def covering(model: Model, mixtures: int = 3, seed: int = 0) -> list[dict[str, Configuration]]:
    """Return strategies in which every operator has each of its configurations at least once.

    Args:
        mixtures: how many more have random configurations on random devices, so that an operator is
            also measured next to others that are split in other ways, and beside others' work.
    """
    samples = model.graph.sample_dims
    free = [item for item in model.operators if item.source is None]
    known = {item.name: choices(model, item, samples.get(item.name)) for item in free}
    count = min(MOST, max(map(len, known.values()), default=1))
    random = np.random.default_rng(seed)
    found = []
    for number in range(count + mixtures):
        strategy = {}
        for name, options in known.items():
            at = number % len(options) if number < count else int(random.integers(len(options)))
            points = math.prod(options[at].values())
            devices = np.arange(len(model.machine.processors))
            if number >= count:
                devices = random.permutation(devices)
            strategy[name] = Configuration(options[at], tuple(devices[:points].tolist()))
        found.append(strategy)
    return found


class Homes:
    """Which task of a model a launched node is part of, whatever lowering made of it.

    Args:
        lowered: the graph as it is launched.
    """

    def __init__(self, model: Model, lowered: Graph) -> None:
        self.graph, self.lowered = model.graph, lowered
        self.task_of = {node.name: i for i, (_, nodes) in enumerate(model.tasks) for node in nodes}

    def of(self, launch: NodeLaunch) -> int | None:
        """Return the number of a launch's task, or None where it is part of none."""
        node = launch.node
        names = [node.name, *self._prefixes(node.name), *([node.origin] if node.origin else [])]
        for name in names:
            found = self._task(name)
            if found is not None:
                return found
        for name in (*node.outputs, *node.inputs):
            for near in (*self.lowered.consumers.get(name, ()), self.lowered.producers.get(name)):
                if near is not None and near.name in self.task_of:
                    return self.task_of[near.name]
        return None

    @staticmethod
    def _prefixes(name: str) -> list[str]:
        """Return what a name may have been before lowering: `x`, of `x.matmul.copy`."""
        parts = name.split(".")
        return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]

    def _task(self, name: str) -> int | None:
        """Return the task of a node of the graph, or of what makes a value's next contents."""
        if name in self.task_of:
            return self.task_of[name]
        node = self.graph.by_name.get(name) or self.graph.producers.get(name)
        if node is None and name in self.graph.updates:
            node = self.graph.producers.get(self.graph.updates[name])
        if node is None:
            return None
        if node.name in self.task_of:
            return self.task_of[node.name]
        for output in node.outputs:  # sums of gradients, constants: part of what reads them
            for reader in self.graph.consumers[output]:
                if reader.name in self.task_of:
                    return self.task_of[reader.name]
        return None


__all__ = ["Homes", "choices", "covering"]
