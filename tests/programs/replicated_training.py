"""Training where operators compute the same on several devices, against training on one.

replicated_training.py EXECUTOR COUNT: prints how many strategies were equal; see
test_replicas.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from helpers.processes import say
from programs.carried_training import (
    Change,
    all_recomputed,
    compiled,
    kept,
    moved_again,
    routed,
    trained,
)

from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Copies, Strategy
from soapstone.ir.strategy.configuration import check_replicated
from soapstone.ir.tensor import Array
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import prepare


def in_copies(graph: Graph, strategy: Strategy, share: float = 1.0, seed: int = 0) -> Strategy:
    """Compute what may be in copies on all devices of some of its dims."""
    random, made = np.random.default_rng(seed), dict(strategy.configurations)
    for name, item in made.items():
        split = [dim for dim, degree in item.degrees.items() if degree > 1]
        taken = tuple(dim for dim in split if random.random() < share)
        try:
            found = replace(item, replicated=taken)
            if name in graph.by_name and taken:
                check_replicated(graph, graph.by_name[name], found)
                made[name] = found
        except StrategyError:
            continue
    return replace(strategy, configurations=made)


def at_random(seed: int, devices: int = 2) -> Change:
    """Change a strategy to a random one, with copies of two thirds of what may be."""

    def change(graph: Graph, strategy: Strategy) -> Strategy:
        model = prepare(graph, load_machine("p100", devices))
        settled = Settled(model)
        settled.set(randomly(model, seed))
        found = as_strategy(graph, model, settled.configurations(), {})
        found = replace(found, machine={}, layouts=strategy.layouts)
        return in_copies(graph, found, 0.67, seed)

    return change


def along(change: Change) -> Change:
    """Change a strategy, and compute in copies what it moves or keeps otherwise."""

    def both(graph: Graph, strategy: Strategy) -> Strategy:
        return in_copies(graph, change(graph, strategy))

    return both


def close(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Raise an error unless both are the same up to the order of sums."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


WAYS = (in_copies, *map(along, (all_recomputed, moved_again, *map(routed, Copies))))


def main() -> None:
    executor, count = sys.argv[1], int(sys.argv[2])
    cpus = 1 if executor == "mpi" else 2  # of each process
    wanted = trained(compiled(kept))
    ways = [*WAYS, *map(at_random, range(count))]
    for change in ways:
        close(trained(compiled(change, executor, cpus)), wanted)
    say(f"{len(ways)} strategies equal")


if __name__ == "__main__":
    main()
