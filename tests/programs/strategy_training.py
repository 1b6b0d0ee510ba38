"""Training under strategies of the search's space, compared with a run without one.

strategy_training.py EXECUTOR FILE...: prints how many were equal; run by test_mpi_model.py.
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np
from helpers.processes import say

from soapstone import Adam, Model
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array


def network(executor: str = "local", cpus: int = 2, strategy: Strategy | None = None) -> Model:
    """Return a small network, compiled."""
    model = Model("net", seed=1)
    x = model.input("image", (12, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv")
    x = model.batch_norm(x)
    x = model.max_pool2d(x, 2)
    model.output(model.dense(model.flatten(x), 5, name="head"))
    optimizer = Adam(1e-2)
    model.compile(optimizer, loss="cross_entropy", executor=executor, cpus=cpus, strategy=strategy)
    return model


def strategy_of(seed: int) -> Strategy:
    """Return a random strategy for the network on two devices; but for seed 0, of uneven tiles."""
    # Ranks are given files of strategies: they neither import nor compile what finds them.
    from soapstone.runtime.machines.cluster import load_machine
    from soapstone.search.parallel.mcmc import proposals
    from soapstone.search.parallel.mcmc.initial import randomly
    from soapstone.search.parallel.mcmc.walker import Walker
    from soapstone.search.parallel.problem.choice import as_strategy
    from soapstone.search.parallel.problem.prepare import prepare

    with network() as model:
        graph = model.training_graph
    prepared = prepare(graph, load_machine("p100", 2))
    walker = Walker(prepared, {proposals.UNEVEN: 1.0}, 1e9, True, seed)
    walker.begin(randomly(prepared, seed))
    if seed:
        walker.walk(200)
        assert (walker.settled.choice.operators["cut"] >= 0).any()
    found = as_strategy(graph, prepared, walker.settled.configurations(), {})
    return Strategy(configurations=found.configurations, layouts=found.layouts)


def trained(model: Model) -> dict[str, Array]:
    """Train for some steps; return the parameters."""
    random = np.random.default_rng(0)
    images = random.standard_normal((36, 3, 8, 8), np.float32)
    labels = random.integers(0, 5, 36)
    with model:
        model.fit(images, labels, epochs=2, progress=False)
        return {name: np.array(array) for name, array in model.weights().items()}


@cache
def expected() -> dict[str, Array]:
    """Return the parameters of a run without a strategy."""
    return trained(network(cpus=1))


def compare(strategy: Strategy, executor: str, cpus: int) -> None:
    """Raise an error unless a strategy on an executor gives what a run without one does."""
    for name, array in trained(network(executor, cpus, strategy)).items():
        np.testing.assert_allclose(array, expected()[name], rtol=1e-3, atol=1e-4)


def main() -> None:
    executor, *files = sys.argv[1:]
    for file in files:
        compare(Strategy.load(file), executor, cpus=1)
    say(f"{len(files)} strategies equal")


if __name__ == "__main__":
    main()
