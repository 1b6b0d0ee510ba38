"""Exhaustive search and dynamic programming find what trying everything finds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.parallel_problems import GRAPHS, lenet, product, walker_of

from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel import Options, ParallelError, Simulator, method_named
from soapstone.search.parallel.exact.optcnn import costs_of, solve
from soapstone.search.parallel.exact.optimum import Exhaustive
from soapstone.search.parallel.exact.space import Space
from soapstone.search.parallel.exact.tables import NEVER, Pair
from soapstone.search.parallel.methods import exhaustive
from soapstone.search.parallel.problem.prepare import prepare


def small() -> Graph:
    return product(8, 12, 4)


def slowed(machine: Machine, bytes_per_s: float) -> Machine:
    links = tuple(replace(link, bytes_per_s=bytes_per_s) for link in machine.links)
    return replace(machine, links=links)


def test_delays_are_as_long_as_messages_take() -> None:
    """Least times between points of two operators grow with the slowness of links, to minutes."""
    found = []
    for bytes_per_s in (1e6, 10.0):
        model = prepare(small(), slowed(load_machine("p100", 3), bytes_per_s))
        space = Space(model)
        ends = space.free[0], space.free[1]
        mine, others = (space.choices[space.kind(op)] for op in ends)
        found.append(Pair(model, ends).delays(mine, others))
    fast, slow = found
    assert slow.max() > 1 << 31 and ((slow >= 0) | (slow == NEVER)).all()
    assert ((fast == NEVER) == (slow == NEVER)).all()
    assert slow.max() == pytest.approx(1e5 * fast.max(), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("bytes_per_s", [None, 50.0])
def test_exhaustive_search_finds_what_trying_everything_finds(bytes_per_s: float | None) -> None:
    """Each pair of configurations of two products, on three devices that are alike.

    Where links are slow, messages take more nanoseconds than 32 bits hold, and bounds stay bounds.
    """
    machine = load_machine("p100", 3)
    if bytes_per_s is not None:
        machine = slowed(machine, bytes_per_s)
    graph = small()
    model = prepare(graph, machine)
    simulator = Simulator(model)
    space = Space(model)
    assert len(space.renamings) == 6
    tables = [space.choices[space.kind(op)] for op in space.free]
    costs = []
    c = simulator.settled.choice
    for rows in itertools.product(*(range(len(table)) for table in tables)):
        for op, table, row in zip(space.free, tables, rows):
            c.operators[op], c.placed[op] = table.degrees[row], table.placed[row]
        simulator.settled.settle()
        costs.append(simulator.settled_ns())
    walker = walker_of(model, 0)
    walker.begin({})
    said = Exhaustive(model, walker, lambda visited, bound: True).run()
    assert said.complete and said.inside
    assert said.space == len(costs)
    assert said.bound_ns == walker.best_ns == min(costs)
    assert (max(costs) > 1 << 31) == (bytes_per_s is not None)
    alone = method_named("optimum")(graph, machine)
    assert alone.certificate is not None and alone.certificate.inside
    assert alone.simulation.step_us == min(costs) / 1e3


@pytest.mark.long
@pytest.mark.parametrize("method", ["exhaustive", "optimum"])
def test_an_exhaustive_search_that_is_stopped_says_how_far_it_is(method: str) -> None:
    result = method_named(method)(lenet(64), load_machine("p100", 2), Options(seconds=0.0))
    assert result.simulation.step_us <= min(result.initial_us.values())
    assert result.certificate is not None and not result.certificate.complete
    assert result.certificate.bound_ns / 1e3 <= result.simulation.step_us
    assert "not searched to the end" in str(result)
    with pytest.raises(ParallelError, match=r"configurations on 16 devices found, 20,000 at most"):
        exhaustive(lenet(64), load_machine("p100", 16), Options(seconds=0.0))


def test_an_interrupt_before_there_are_tables_gives_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Space, "__init__", interrupted)
    result = exhaustive(lenet(64), load_machine("p100", 2), Options(seconds=5.0))
    assert result.certificate is None
    assert result.simulation.step_us <= min(result.initial_us.values())


def test_an_interrupt_ends_all_that_comes_before_tables() -> None:
    said: list[int] = []

    def progress(seconds: float, proposals: int, best_us: float) -> None:
        said.append(proposals)
        if len(said) == 20:
            raise KeyboardInterrupt

    graph, machine = lenet(64), load_machine("p100", 2)
    found = method_named("exhaustive")(graph, machine, Options(seconds=60.0), progress=progress)
    assert found.interrupted and found.certificate is None and len(said) == 20


@pytest.mark.parametrize(("graph", "devices"), [("lenet", 2), ("rnnlm", 2), ("rnnlm", 3)])
def test_bounds_of_the_exhaustive_search_are_never_passed(graph: str, devices: int) -> None:
    """For random strategies, good ones too, what is taken for a lower bound is one at each step."""
    model = prepare(GRAPHS[graph](), load_machine("p100", devices))
    walker = walker_of(model, 0)
    walker.begin({})
    under_way = Exhaustive(model, walker, lambda visited, bound: True)
    under_way.narrow(1 << 50)
    tree, space = under_way.tree, under_way.space
    random = np.random.default_rng(devices)
    simulator = Simulator(model)
    now, best = np.zeros(len(under_way.order), np.int64), 1 << 60
    for _ in range(400):
        rows = now.copy()
        for i in random.integers(len(rows), size=2):
            rows[i] = random.integers(space.size(under_way.order[i]))
        c = simulator.settled.choice
        for op, row in zip(under_way.order, rows.tolist()):
            table = space.choices[space.kind(op)]
            c.operators[op], c.placed[op] = table.degrees[row], table.placed[row]
        simulator.settled.settle()
        step = simulator.settled_ns()
        kinds = tree.kept_first[:-1] + tree.kind[tree.first[:-1] + rows]
        counts = tree.points[tree.first[:-1] + rows]
        ways = [
            (tree.reach[kind, :n, :n] + tree.rest[kind, :n, :n]).max()
            for kind, n in zip(kinds, counts)
        ]
        assert max(ways) <= step
        assert under_way.bounds(rows).max() <= step
        for level, sieve in zip(under_way.levels, under_way.sieves):
            begun = (tree.first[:-1] + rows)[None, :level]
            assert sieve.keep(under_way.degrees, tree.placed, begun, step + 1).all()
        if step < best or random.random() < 0.02:
            now, best = rows, step


def test_dynamic_programming_finds_the_least_sum() -> None:
    """On a chain of three products, against every combination."""
    machine = load_machine("k80", 4)
    builder = GraphBuilder("chain")
    x = builder.input("x", (16, 24))
    for i, columns in enumerate((24, 32, 8)):
        rows = (24, 24, 32)[i]
        w = builder.input(f"w{i}", (rows, columns), role=Role.PARAMETER)
        (x,) = builder.apply("matmul", x, w, name=f"product{i}")
    builder.output(x)
    model = prepare(builder.build(), machine)
    cost, tables, _ = costs_of(model)
    picked, total = solve(cost, tables)
    brute = min(
        sum(cost[op][row] for op, row in zip(cost, rows))
        + sum(
            table[rows[list(cost).index(a)], rows[list(cost).index(b)]]
            for (a, b), table in tables.items()
        )
        for rows in itertools.product(*(range(len(each)) for each in cost.values()))
    )
    assert total == brute
    assert set(picked) == set(cost)


def test_dynamic_programming_takes_networks_with_branches_only() -> None:
    machine = load_machine("p100", 2)
    result = method_named("optcnn")(graph_of("resnet", 8, sizes={"depth": 18}), machine, Options())
    assert result.initial_us["optcnn"] >= result.simulation.step_us
    result.strategy.check(graph_of("resnet", 8, sizes={"depth": 18}), machine.describe())
    sizes = {"unrolled": True, "length": 4, "hidden": 16, "vocabulary": 40}
    with pytest.raises(ParallelError, match="a linear graph needed by optcnn"):
        method_named("optcnn")(graph_of("nmt", 8, sizes=sizes), machine, Options())
    with pytest.raises(ParallelError, match="'dance' found, one of mcmc, optcnn, exhaustive"):
        method_named("dance")
