"""The simulator of strategies: tiles, movement of data, times, and what it leaves out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.parallel_problems import GRAPHS, language_model, lenet, product, walker_of

from soapstone.frontend.strategies.finding import simulated
from soapstone.ir.strategy import Configuration
from soapstone.ir.tensor import Role
from soapstone.runtime.machines.cluster import load_machine
from soapstone.runtime.observe.profile import Profile
from soapstone.runtime.observe.summary import summarise
from soapstone.search.parallel import NAMED, Simulator
from soapstone.search.parallel.bounds.step import lower_bound
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.arrays import BOX
from soapstone.search.parallel.problem.choice import Settled, as_strategy, empty
from soapstone.search.parallel.problem.geometry import tile
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model as Prepared, prepare
from soapstone.search.parallel.simulation import schedule


@pytest.fixture(scope="module", params=list(GRAPHS))
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return prepare(GRAPHS[request.param](), load_machine("p100", 8))


def settled(model: Prepared, configurations: Any) -> Settled:
    made = Settled(model)
    made.set(configurations)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_tiles_are_those_of_expand(prepared: Prepared, seed: int) -> None:
    """Degrees, devices and boxes of every node are what its exported strategy says."""
    graph, p = prepared.graph, prepared.problem
    made = settled(prepared, randomly(prepared, seed))
    if seed % 2:
        made = unevenly(prepared, made, seed)
    if seed > 3:
        made.choice.operators["replicated"][p.free] = -1  # all dims, where that may be
        made.settle()
        assert made.choice.nodes["replicated"].any()
    strategy = as_strategy(graph, prepared, made.configurations(), {})
    strategy.check(graph)
    c = made.choice
    (box,), index = np.zeros(1, BOX), np.zeros(12, np.int64)
    for number, node in enumerate(prepared.nodes):
        signature = graph.signature(node)
        found = strategy.configuration(graph, node)
        row = c.nodes[number]
        degrees = {
            dim.name: degree
            for dim, degree in zip(signature.dims, row["degrees"].tolist())
            if degree > 1
        }
        assert dict(found.degrees) == degrees, node.label
        whole = [dim.name for i, dim in enumerate(signature.dims) if row["replicated"] >> i & 1]
        assert list(found.replicated) == whole, node.label
        op = int(p.nodes["operator"][number])
        devices = tuple(int(c.placed[op, at]) for at in c.node_at[number, : row["points"]])
        assert (found.devices or (int(c.placed[op, 0]),) * found.points) == devices
        _, lo, hi = signature.points(*found.cutting)
        operands = range(*p.nodes[number]["operands"])
        for operand, shaped in zip(operands, (*signature.inputs, *signature.outputs)):
            low, high = shaped.tiles(lo, hi, found.points)
            for point in range(found.points):
                call(tile, p, c, operand, point, box, index)
                rank = len(shaped.axes)
                np.testing.assert_array_equal(box["low"][:rank], low[point])
                np.testing.assert_array_equal(box["high"][:rank], high[point])


def unevenly(model: Prepared, made: Settled, seed: int) -> Settled:
    """Boundaries between tiles moved at random."""
    walker = walker_of(model, seed, UNEVEN=1.0)
    walker.begin(made.configurations())
    walker.walk(200)
    assert (walker.settled.choice.operators["cut"] >= 0).any()
    return walker.settled


def moved(made: Settled) -> int:
    live = made.choice.live
    return int(live["moved"][(live["source"] != live["target"]) | (live["source"] < 0)].sum())


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


def test_copies_save_messages_and_cost_work() -> None:
    """Two products, by hand: halves of the first are sent, or each device computes all of it."""
    model = prepare(product(8192, 256, 512), load_machine("p100", 2))
    second = Configuration({"n": 2}, (0, 1))
    halves = settled(model, {"first": Configuration({"m": 2}, (0, 1)), "second": second})
    both = settled(model, {"first": Configuration({"m": 2}, (0, 1), {}, ("m",)), "second": second})
    alone = settled(model, {"first": Configuration(), "second": second})

    def step(made: Settled) -> int:
        state = schedule.room(model.problem, len(made.choice.messages))
        return int(call(schedule.simulate, model.problem, made.choice, state, 0, -1))

    (half, _, _), (last, _, _) = halves.choice.task_ns.tolist()
    ((whole, other, _), again), once = both.choice.task_ns.tolist(), alone.choice.task_ns[0, 0]
    assert whole == other == once > half and again[:2] == [last, last]
    assert moved(halves) == 8192 * 256 * 4 and moved(both) == 0
    (sent,) = {int(row["busy"] + row["latency"]) for row in halves.choice.live}
    assert (step(halves), step(both)) == (half + sent + last, whole + last)


def test_what_is_not_at_hand_comes_from_the_nearest_copy() -> None:
    """Copies on each of two computers: parts are gathered inside of them."""
    model = prepare(product(256, 64, 512), load_machine("p100", 8))
    eight = tuple(range(8))
    made = settled(
        model,
        {
            "first": Configuration({"m": 4, "n": 2}, (0, 4, 1, 5, 2, 6, 3, 7), {}, ("n",)),
            "second": Configuration({"n": 8}, eight),
        },
    )
    live = made.choice.live
    assert len(live) == 2 and moved(made) == 2 * 3 * 256 * 64 * 4
    channels = [made.choice.channels[row["channels"] :] for row in live]
    one, two = (set(each[: each.tolist().index(-1)].tolist()) for each in channels)
    assert one and two and not one & two


def test_data_parallel_sums_and_spreads_every_parameter_once() -> None:
    """A reduction and a gather of n devices move n - 1 times the parameters each."""
    graph = lenet(16)
    simulator = Simulator(prepare(graph, load_machine("p100", 4)))
    found = simulator.simulate(NAMED["data"](simulator.model))
    parameters = graph.nbytes(Role.PARAMETER)
    assert 2 * 3 * parameters <= found.bytes_moved <= 2 * 3 * parameters * 1.05


@pytest.mark.parametrize("machine", ["p100", "k80"])
def test_delta_simulation_equals_full(prepared: Prepared, machine: str) -> None:
    """The same proposals give the same costs, bit by bit; so does a simulation from scratch."""
    model = prepare(prepared.graph, load_machine(machine, 8))
    walkers = []
    for simulation in ("delta", "full"):
        walker = walker_of(model, 7, simulation == "delta")
        walker.begin(NAMED["data"](model))
        walkers.append(walker)
    for _ in range(12):
        for walker in walkers:
            walker.walk(50)
        one, other = walkers
        assert one.run[["cost", "best"]] == other.run[["cost", "best"]]
        np.testing.assert_array_equal(one.settled.choice.operators, other.settled.choice.operators)
        fresh = Settled(model)
        chosen = one.settled.choice
        fresh.restore(*chosen.chosen)
        state = schedule.room(model.problem, len(fresh.choice.messages))
        cost = call(schedule.simulate, model.problem, fresh.choice, state, 0, -1)
        assert cost == one.run["cost"]
    assert walkers[0].run["skipped"] > 0  # some passes did not begin at the beginning
    assert walkers[0].run["accepted"] > 10


def test_pools_grow_when_they_are_full(prepared: Prepared) -> None:
    """A chain that begins with too little room ends, and costs what a fresh simulation says."""
    walker = walker_of(prepared, 5)
    walker.settled.choice = empty(prepared.problem, 2)
    walker._room()
    walker.begin(randomly(prepared, 5))
    walker.walk(300)
    chosen = walker.settled.choice
    assert len(chosen.messages) > 2
    simulator = Simulator(prepared)
    simulator.settled.restore(*chosen.chosen)
    assert simulator.settled_ns() == walker.run["cost"]


def test_what_devices_hold_is_never_forgotten(prepared: Prepared) -> None:
    """A table of boxes that is too small grows: else a box would be sent to a device again."""
    given = randomly(prepared, 5)
    roomy, tight = Settled(prepared), Settled(prepared)
    tight.scratch = tight.scratch._replace(holdings=tight.scratch.holdings[:1].copy())
    for each in (roomy, tight):
        each.set(given)
    assert len(tight.scratch.holdings) > 1
    costs = []
    for each in (roomy, tight):
        state = schedule.room(prepared.problem, len(each.choice.messages))
        costs.append(call(schedule.simulate, prepared.problem, each.choice, state, 0, -1))
        costs.append((len(each.choice.live), int(each.choice.live["moved"].sum())))
    assert costs[:2] == costs[2:]


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
    simulator = Simulator(prepared)
    bound = lower_bound(prepared)
    step = simulator.step_ns(randomly(prepared, seed))
    assert step / 1e3 >= bound.us
    assert bound.us >= max(bound.path_us, bound.work_us) > 0


def test_strategies_are_simulated_by_name_and_from_files(tmp_path: Any) -> None:
    graph, machine = lenet(), load_machine("p100", 4)
    named = simulated(graph, machine, "data")
    simulator = Simulator(prepare(graph, machine))
    simulator.simulate(NAMED["data"](simulator.model))
    path = tmp_path / "strategy.json"
    as_strategy(graph, simulator.model, simulator.settled.configurations(), {}).save(path)
    assert simulated(graph, machine, path) == named
    summary = summarise(Profile.from_json(named.timeline.to_json()))
    assert summary.wall_ns / 1e3 == pytest.approx(named.step_us)
    assert 0 < summary.bound_ns <= summary.wall_ns
    ends = {event.number: event.end_ns for event in named.timeline.events}
    after = [(event, ends[n]) for event in named.timeline.events for n in event.after]
    assert len(after) > len(ends) and all(end <= event.start_ns for event, end in after)
    assert sum(link.nbytes for link in summary.links) == named.bytes_moved
