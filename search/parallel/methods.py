"""The methods to find a strategy: Markov chains, dynamic programming, branch and bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Configuration
from soapstone.runtime import Machine
from soapstone.search.parallel.exact.optcnn import optcnn
from soapstone.search.parallel.exact.optimum import Exhaustive
from soapstone.search.parallel.exact.space import check_space
from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.options import Options
from soapstone.search.parallel.mcmc.search import Progress, StrategyResult, search
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.choice import as_strategy
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import prepare
from soapstone.search.parallel.simulation.simulate import Simulator

BEFORE = 15_000  # proposals of each Markov chain before an exhaustive search
SEEDS = 4  # of those

Method = Callable[..., StrategyResult]


def dynamic_programming(
    graph: Graph,
    machine: Machine,
    options: Options | None = None,
    *,
    start: Mapping[str, Configuration] | None = None,
    progress: Progress | None = None,
) -> StrategyResult:
    """Return OptCNN's strategy, or the best initial candidate if the simulation prefers that.

    Raises:
        ParallelError: the graph is not (almost) linear.
    """
    options = options or Options()
    begin = time.perf_counter()
    model = prepare(graph, machine)
    found = optcnn(model)
    none = replace(options, proposals=0, seconds=None, blocks=False)
    result = search(graph, machine, none, start=start, progress=progress)
    simulation = Simulator(model).simulate(found.configurations)
    initial = {**result.initial_us, "optcnn": simulation.step_us}
    if simulation.step_us < result.simulation.step_us:
        strategy = as_strategy(graph, model, found.configurations, {})
        result = replace(result, strategy=strategy, simulation=simulation)
    return _told(result, begin, search="optcnn", sum_us=found.cost_us, initial_us=initial)


def exhaustive(
    graph: Graph,
    machine: Machine,
    options: Options | None = None,
    *,
    start: Mapping[str, Configuration] | None = None,
    progress: Progress | None = None,
    inside: bool = False,
) -> StrategyResult:
    """Return the best strategy with equal tiles of results, or a better one, with a certificate.

    Markov chains run first; they may find a faster strategy with uneven tiles, or with partial
    sums. When the time is over, or at Ctrl-C, it returns the best strategy known, with its distance
    to the bound if the tables are complete by then.

    Args:
        inside: whether only strategies with equal tiles of results count, once one is found; the
            best of them may be slower than an initial one of another kind.

    Raises:
        ParallelError: an operator has too many configurations.
    """
    options = options or Options()
    begin = time.perf_counter()
    model = prepare(graph, machine)
    check_space(model)
    share = None if options.seconds is None else options.seconds / (2 * SEEDS)
    first = replace(options, proposals=BEFORE, seconds=share, chains=1, patience=1.0)
    if inside:
        first = replace(first, proposals=0)
    seeds = range(options.seed, options.seed + (1 if inside else SEEDS))
    found = list[StrategyResult]()
    for seed in seeds:
        chains = replace(first, seed=seed)
        found.append(search(graph, machine, chains, start=start, progress=progress))
        if found[-1].interrupted:
            break
    result = min(found, key=lambda each: each.simulation.step_us)
    if found[-1].interrupted:
        return replace(result, interrupted=True)
    walker = Walker(model, proposals.INFORMED, options.temperature, True, options.seed)
    walker.begin(result.strategy.configurations)

    def go_on(visited: int, bound_ns: int) -> bool:
        now = time.perf_counter() - ready
        if progress is not None:
            progress(now, visited, walker.best_ns / 1e3)
        return options.seconds is None or now < options.seconds

    try:
        under_way = Exhaustive(model, walker, go_on)
    except KeyboardInterrupt:
        return result
    ready = time.perf_counter()  # the budget is of the search, when there are tables
    certificate = under_way.run(options.seed if inside else None)
    simulator = Simulator(model)
    walker.restore(simulator.settled)
    simulation = simulator.summary(simulator.settled_ns())
    bound = max(simulation.lower_bound_us, certificate.bound_ns / 1e3)
    simulation = replace(
        simulation, lower_bound_us=bound, gap=max(0.0, simulation.step_us / bound - 1.0)
    )
    strategy = as_strategy(graph, model, simulator.settled.configurations(), {})
    return _told(
        replace(
            result,
            strategy=strategy,
            simulation=simulation,
            proposals=result.proposals + certificate.visited + certificate.simulated,
            certificate=certificate,
        ),
        begin,
        search="optimum" if inside else "exhaustive",
        complete=certificate.complete,
        strategies=certificate.space,
    )


def _told(result: StrategyResult, begin: float, **said: Any) -> StrategyResult:
    """Return a result whose strategy records its provenance."""
    initial = said.pop("initial_us", result.initial_us)
    found = result.simulation
    provenance = said | {
        "step_us": found.step_us,
        "lower_bound_us": found.lower_bound_us,
        "estimated": found.estimated,
    }
    strategy = replace(result.strategy, provenance=provenance)
    seconds = time.perf_counter() - begin
    return replace(result, strategy=strategy, initial_us=initial, seconds=seconds)


METHODS: Mapping[str, Method] = {
    "mcmc": search,
    "optcnn": dynamic_programming,
    "exhaustive": exhaustive,
    "optimum": partial(exhaustive, inside=True),
}


def method_named(method: str) -> Method:
    """Return the method of a name.

    Raises:
        ParallelError: an unknown method.
    """
    if method not in METHODS:
        raise ParallelError(f"method {method!r} found, one of {', '.join(METHODS)} needed")
    return METHODS[method]
