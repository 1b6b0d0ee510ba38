"""Strategies whose runs measure tasks: together they contain each operator in each configuration.

Jia, section 3.4.1, measures an operator once for each configuration. Here that happens inside whole
steps, with caches and neighbours as in real runs: a few strategies cover everything.
"""

from __future__ import annotations

import math

import numpy as np

from soapstone.engine.expand import NodeLaunch
from soapstone.engine.parallelism import legal
from soapstone.ir.dims import Kind
from soapstone.ir.strategy.configuration import Configuration
from soapstone.search.parallel.mcmc.initial import Parallel, kinds_of_dims
from soapstone.search.parallel.problem.operators import Operator
from soapstone.search.parallel.problem.prepare import Model

_ORDER = (Parallel.SAMPLE, Parallel.PARAMETER, Parallel.ATTRIBUTE, Parallel.REDUCED)
MOST = 24  # strategies: more configurations than a machine of few devices has


def choices(model: Model, item: Operator) -> list[dict[str, int]]:
    """Return the legal degrees of an operator with at most one point for each device, whole first.

    Degrees that split the same kind of dim (samples, parameters, attributes, sums) have equal
    positions for all operators.
    """
    signature = model.graph.signature(item.node)
    kinds = kinds_of_dims(model.graph, item.node)
    dims = [d for d in signature.dims if d.kind is not Kind.WHOLE and d.extent > 1]
    dims.sort(key=lambda dim: _ORDER.index(kinds[dim.name]))
    found: list[dict[str, int]] = [{}]
    for dim in dims:
        for degrees in tuple(found):
            room = len(model.machine.processors) // math.prod(degrees.values())
            for degree in range(2, min(room, dim.extent) + 1):
                more = degrees | {dim.name: degree}
                if legal(model.graph, item.node, more):
                    found.append(more)
    order = [dim.name for dim in signature.dims]
    return [dict(sorted(f.items(), key=lambda pair: order.index(pair[0]))) for f in found]


def covering(model: Model, mixtures: int = 3, seed: int = 0) -> list[dict[str, Configuration]]:
    """Return strategies in which every operator has each of its configurations at least once.

    Args:
        mixtures: the number of further strategies with random configurations on random devices, so
            that an operator is also measured next to operators that are split differently.
    """
    free = [item for item in model.operators if item.source is None]
    known = {item.name: choices(model, item) for item in free}
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
    """Finds the task of a model to which a launched node belongs, whatever lowering made of it."""

    def __init__(self, model: Model) -> None:
        self.graph = model.graph
        self.task_of = {node.name: i for i, (_, nodes) in enumerate(model.tasks) for node in nodes}

    def of(self, launch: NodeLaunch) -> int | None:
        """Return the number of a launch's task, or None if it belongs to none."""
        node = launch.node
        for name in sorted(node.work_of, key=lambda source: source != node.name):
            for near in (name, *self._readers(name)):
                if near in self.task_of:
                    return self.task_of[near]
        return None

    def _readers(self, name: str) -> list[str]:
        """Return the readers of a node's results, to which gradient sums and constants belong."""
        made = self.graph.by_name[name].outputs if name in self.graph.by_name else ()
        return [reader.name for output in made for reader in self.graph.consumers[output]]
