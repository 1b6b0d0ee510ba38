"""Strategies found by simulation: geometry, movement, simulation, search, and their execution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from soapstone import Adam, Model
from soapstone.frontend.strategies import graph_of, simulated
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.cluster import load_machine
from soapstone.search.parallel import (
    NAMED,
    Options,
    ParallelError,
    Simulator,
    chain,
    schedule,
    search,
)
from soapstone.search.parallel.arrays import (
    DEGREES,
    FROM_DEVICE,
    MESSAGE,
    MOST_RANK,
    MOVED,
    OPERANDS,
    POINTS,
    TO_DEVICE,
)
from soapstone.search.parallel.bound import lower_bound
from soapstone.search.parallel.choice import Settled, as_strategy
from soapstone.search.parallel.compiling import call
from soapstone.search.parallel.geometry import tile
from soapstone.search.parallel.initial import randomly
from soapstone.search.parallel.problem import Model as Prepared
from soapstone.search.parallel.problem import prepare
from soapstone.search.parallel.search import Walker


def lenet(samples: int = 16) -> Graph:
    return graph_of("lenet", samples)


def language_model(samples: int = 16) -> Graph:
    sizes = {"unrolled": True, "length": 2, "hidden": 16, "vocabulary": 40}
    return graph_of("rnnlm", samples, sizes=sizes)


GRAPHS = {"lenet": lenet, "rnnlm": language_model}


@pytest.fixture(scope="module", params=list(GRAPHS))
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(GRAPHS[request.param](), load_machine("p100", 8))


def settled(model: Prepared, configurations: Any) -> Settled:
    made = Settled(model)
    made.set(configurations)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_tiles_are_those_of_expand(prepared: Prepared, seed: int) -> None:
    """Degrees, devices and boxes of every node are what its exported strategy says."""
    graph, p = prepared.graph, prepared.problem
    made = settled(prepared, randomly(prepared, seed))
    strategy = as_strategy(graph, prepared, made.configurations(), {})
    strategy.check(graph)
    c = made.choice
    box, index = np.zeros(2 * MOST_RANK, np.int64), np.zeros(12, np.int64)
    for number, node in enumerate(prepared.nodes):
        signature = graph.signature(node)
        found = strategy.configuration(graph, node)
        row = c.nodes[number]
        degrees = {
            dim.name: int(row[DEGREES + j])
            for j, dim in enumerate(signature.dims)
            if row[DEGREES + j] > 1
        }
        assert dict(found.degrees) == degrees, node.label
        op = int(p.nodes[number, 0])
        devices = tuple(int(c.placed[op, at]) for at in c.node_at[number, : row[POINTS]])
        assert (found.devices or (int(c.placed[op, 0]),) * found.points) == devices
        _, lo, hi = signature.points(found.degrees)
        operands = range(int(p.nodes[number, OPERANDS]), int(p.nodes[number, OPERANDS + 1]))
        for operand, shaped in zip(operands, (*signature.inputs, *signature.outputs)):
            low, high = shaped.tiles(lo, hi, found.points)
            for point in range(found.points):
                call(tile, p, c, operand, point, box, index)
                rank = len(shaped.axes)
                np.testing.assert_array_equal(box[:rank], low[point])
                np.testing.assert_array_equal(box[MOST_RANK : MOST_RANK + rank], high[point])


def product(rows: int, inner: int, columns: int) -> Graph:
    """Two products one after the other: x w, then v."""
    builder = GraphBuilder("two")
    x = builder.input("x", (rows, inner))
    w = builder.input("w", (inner, inner), role=Role.PARAMETER)
    v = builder.input("v", (inner, columns), role=Role.PARAMETER)
    (y,) = builder.apply("matmul", x, w, name="first")
    builder.output(*builder.apply("matmul", y, v, name="second"))
    return builder.build()


def moved(made: Settled) -> int:
    live = made.choice.messages[: made.choice.top[MESSAGE]]
    return int(live[live[:, FROM_DEVICE] != live[:, TO_DEVICE]][:, MOVED].sum()) + int(
        live[live[:, FROM_DEVICE] < 0][:, MOVED].sum()
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"m": 2}, {"m": 2}, 0),  # tiles stay where they are
        ({"n": 2}, {"m": 2}, 8 * 12 * 4 // 2),  # a quarter of the matrix each way
        ({"m": 2}, {"n": 2}, 8 * 12 * 4),  # each half to the other
        ({"k": 2}, {"m": 2}, 8 * 12 * 4),  # partial sums: half of each to the other
        ({}, {"m": 2}, 8 * 12 * 4 // 2),
    ],
)
def test_bytes_moved_between_two_products(
    first: dict[str, int], second: dict[str, int], expected: int
) -> None:
    model = prepare(product(8, 12, 4), load_machine("p100", 2))
    made = settled(
        model,
        {
            "first": Configuration(first, tuple(range(math.prod(first.values())))),
            "second": Configuration(second, tuple(range(math.prod(second.values())))),
        },
    )
    assert moved(made) == expected


def test_data_parallel_sums_and_spreads_every_parameter_once() -> None:
    """A reduction and a gather of n devices move n - 1 times the parameters each."""
    graph = lenet(16)
    simulator = Simulator(graph, load_machine("p100", 4))
    found = simulator.simulate(NAMED["data"](simulator.model))
    parameters = graph.nbytes(Role.PARAMETER)
    assert 2 * 3 * parameters <= found.bytes_moved <= 2 * 3 * parameters * 1.05


@pytest.mark.parametrize("machine", ["p100", "k80"])
def test_delta_simulation_equals_full(prepared: Prepared, machine: str) -> None:
    """The same proposals give the same costs, bit by bit; so does a simulation from scratch."""
    model = prepare(prepared.graph, load_machine(machine, 8))
    walkers = []
    for simulation in ("delta", "full"):
        walker = Walker(model, Options(simulation=simulation, temperature=2.0), 7)
        walker.begin(NAMED["data"](model))
        walkers.append(walker)
    for _ in range(12):
        for walker in walkers:
            walker.walk(50)
        one, other = walkers
        np.testing.assert_array_equal(one.chain.cost, other.chain.cost)
        np.testing.assert_array_equal(one.settled.choice.operators, other.settled.choice.operators)
        fresh = Settled(model)
        fresh.choice.operators[:] = one.settled.choice.operators
        fresh.choice.placed[:] = one.settled.choice.placed
        fresh.settle()
        state = schedule.room(model.problem, len(fresh.choice.messages))
        cost = call(schedule.simulate, model.problem, fresh.choice, state, 0, -1)
        assert cost == one.chain.cost[0]
    assert walkers[0].chain.counts[5] > 0  # some passes did not begin at the beginning
    assert walkers[0].chain.counts[1] > 10


def test_stopped_passes_would_have_passed_the_limit() -> None:
    model = prepare(language_model(), load_machine("p100", 4))
    for seed in range(6):
        made = settled(model, randomly(model, seed))
        state = schedule.room(model.problem, len(made.choice.messages))
        cost = call(schedule.simulate, model.problem, made.choice, state, 0, -1)
        for limit in (cost - 1, cost // 2):
            assert call(schedule.simulate, model.problem, made.choice, state, 0, limit) == -1
        assert call(schedule.simulate, model.problem, made.choice, state, 0, cost) == cost


@pytest.mark.parametrize("seed", range(5))
def test_no_strategy_passes_the_lower_bound(prepared: Prepared, seed: int) -> None:
    simulator = Simulator(prepared.graph, prepared.machine, prepared)
    bound = lower_bound(prepared)
    step = simulator.step_ns(randomly(prepared, seed))
    assert step / 1e3 >= bound.us
    assert bound.us >= max(bound.path_us, bound.work_us) > 0


def test_proposals_reach_every_legal_configuration() -> None:
    """All degrees with at most one point a device are drawn, reduced dims among them."""
    model = prepare(product(4, 6, 3), load_machine("p100", 4))
    walker = Walker(model, Options(moves={chain.RANDOM: 1.0}, temperature=1e9), 3)
    walker.begin({})
    seen: dict[str, set[tuple[tuple[str, int], ...]]] = {"first": set(), "second": set()}
    for _ in range(3000):
        walker.walk(1)
        for op, item in enumerate(model.operators):
            row = walker.settled.choice.operators[op]
            dims = model.graph.signature(item.node).dims
            seen[item.name].add(tuple((d.name, int(row[DEGREES + j])) for j, d in enumerate(dims)))
    for item in model.operators:
        signature = model.graph.signature(item.node)
        expected = {
            tuple((dim.name, found.get(dim.name, 1)) for dim in signature.dims)
            for found in signature.configurations(4, item.node.spec.lower is not None)
        }
        assert seen[item.name] == expected


def test_search_is_repeatable_and_never_worse_than_its_beginnings() -> None:
    machine = load_machine("k80", 8)
    graph = language_model(64)
    options = Options(proposals=400, seconds=None, seed=5)
    one, other = search(graph, machine, options), search(graph, machine, options)
    assert one.strategy.to_json() == other.strategy.to_json()
    assert one.simulation.step_us <= min(one.initial_us.values())
    assert one.proposals == 400
    one.strategy.check(graph, machine.describe())
    again = search(
        graph,
        machine,
        Options(proposals=0, seconds=None, initial=()),
        start=dict(one.strategy.configurations),
    )
    assert again.simulation.step_us == one.simulation.step_us


def test_limits_and_modes_are_checked() -> None:
    with pytest.raises(ParallelError, match="neither seconds nor proposals"):
        search(lenet(), load_machine("p100"), Options(seconds=None))
    with pytest.raises(ParallelError, match="'lazy' found, one of delta, full needed"):
        search(lenet(), load_machine("p100"), Options(simulation="lazy"))
    builder = GraphBuilder("none")
    builder.output(builder.input("x", (2,)))
    with pytest.raises(ParallelError, match="no operators"):
        prepare(builder.build(), load_machine("p100"))


def test_an_unknown_processor_needs_its_rates() -> None:
    with pytest.raises(ParallelError, match="flops None"):
        prepare(lenet(), Machine.local(2))


def trained(strategy: Strategy | None) -> dict[str, np.ndarray[Any, Any]]:
    """Train a small network for some steps under a strategy; return its parameters."""
    model = Model("net", seed=1)
    x = model.input("image", (12, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv")
    x = model.batch_norm(x)
    x = model.max_pool2d(x, 2)
    model.output(model.dense(model.flatten(x), 5, name="head"))
    model.compile(Adam(1e-2), loss="cross_entropy", cpus=2, strategy=strategy)
    random = np.random.default_rng(0)
    images = random.standard_normal((36, 3, 8, 8), np.float32)
    labels = random.integers(0, 5, 36)
    with model:
        model.fit(images, labels, epochs=2, progress=False)
        return {name: np.array(array) for name, array in model.weights().items()}


def described_pair() -> Machine:
    return load_machine("p100", 2)


@pytest.mark.parametrize("seed", range(3))
def test_found_strategies_train_to_the_same_numbers(seed: int) -> None:
    """A strategy of the search runs on the local executor, equal to the run without one."""
    model = Model("net", seed=1)
    x = model.input("image", (12, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv")
    x = model.batch_norm(x)
    x = model.max_pool2d(x, 2)
    model.output(model.dense(model.flatten(x), 5, name="head"))
    model.compile(Adam(1e-2), loss="cross_entropy", cpus=2)
    with model:
        graph = model.training_graph
    prepared = prepare(graph, described_pair())
    made = settled(prepared, randomly(prepared, seed))
    found = as_strategy(graph, prepared, made.configurations(), {})
    strategy = Strategy(configurations=found.configurations, layouts=found.layouts)
    expected = trained(None)
    for name, array in trained(strategy).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-3, atol=1e-4)


def test_strategies_are_simulated_by_name_and_from_files(tmp_path: Any) -> None:
    graph, machine = lenet(), load_machine("p100", 4)
    named = simulated(graph, machine, "data")
    simulator = Simulator(graph, machine)
    simulator.simulate(NAMED["data"](simulator.model))
    path = tmp_path / "strategy.json"
    as_strategy(graph, simulator.model, simulator.settled.configurations(), {}).save(path)
    assert simulated(graph, machine, path) == named
    assert named.timeline.to_json()["traceEvents"]
