"""Strategies found by simulation: geometry, movement, simulation, search, and their execution."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from programs import strategy_training

from soapstone import SGD, Model
from soapstone.frontend.strategies.finding import graph_of, simulated
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.strategy import Configuration
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.runtime.observe.profile import Profile
from soapstone.runtime.observe.summary import summarise
from soapstone.search.parallel import NAMED, Options, ParallelError, Simulator, method_named, search
from soapstone.search.parallel.bounds.step import lower_bound
from soapstone.search.parallel.exact.optcnn import costs_of, solve
from soapstone.search.parallel.exact.optimum import Exhaustive
from soapstone.search.parallel.exact.space import Space
from soapstone.search.parallel.exact.tables import NEVER, Pair
from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.descent import Descent
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.mcmc.proposals import INFORMED
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.methods import exhaustive
from soapstone.search.parallel.problem.arrays import BOX, FREE
from soapstone.search.parallel.problem.blocks import Blocks, repeated
from soapstone.search.parallel.problem.choice import Settled, as_strategy, empty
from soapstone.search.parallel.problem.geometry import tile
from soapstone.search.parallel.problem.groups import classes, sharing
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model as Prepared
from soapstone.search.parallel.problem.prepare import prepare
from soapstone.search.parallel.simulation import schedule


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
    if seed % 2:
        made = unevenly(prepared, made, seed)
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
        op = int(p.nodes["operator"][number])
        devices = tuple(int(c.placed[op, at]) for at in c.node_at[number, : row["points"]])
        assert (found.devices or (int(c.placed[op, 0]),) * found.points) == devices
        _, lo, hi = signature.points(found.degrees, found.cuts)
        operands = range(*p.nodes[number]["operands"])
        for operand, shaped in zip(operands, (*signature.inputs, *signature.outputs)):
            low, high = shaped.tiles(lo, hi, found.points)
            for point in range(found.points):
                call(tile, p, c, operand, point, box, index)
                rank = len(shaped.axes)
                np.testing.assert_array_equal(box["low"][:rank], low[point])
                np.testing.assert_array_equal(box["high"][:rank], high[point])


def walker_of(model: Prepared, seed: int, delta: bool = True, **moves: float) -> Walker:
    """A walker whose moves are those named, or the informed ones, at a high temperature."""
    shares = {getattr(proposals, name): share for name, share in moves.items()}
    return Walker(model, shares or proposals.INFORMED, 2.0, delta, seed)


def unevenly(model: Prepared, made: Settled, seed: int) -> Settled:
    """Boundaries between tiles moved at random."""
    walker = walker_of(model, seed, UNEVEN=1.0)
    walker.begin(made.configurations())
    walker.walk(200)
    assert (walker.settled.choice.operators["cut"] >= 0).any()
    return walker.settled


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


def test_proposals_reach_every_legal_configuration() -> None:
    """All degrees with at most one point a device are drawn, reduced dims among them."""
    model = prepare(product(4, 6, 3), load_machine("p100", 4))
    walker = Walker(model, {proposals.RANDOM: 1.0}, 1e9, True, 3)
    walker.begin({})
    seen: dict[str, set[tuple[tuple[str, int], ...]]] = {"first": set(), "second": set()}
    for _ in range(3000):
        walker.walk(1)
        for op, item in enumerate(model.operators):
            degrees = walker.settled.choice.operators[op]["degrees"].tolist()
            names = [dim.name for dim in model.graph.signature(item.node).dims]
            seen[item.name].add(tuple(zip(names, degrees)))
    for item in model.operators:
        signature = model.graph.signature(item.node)
        expected = {
            tuple((dim.name, found.get(dim.name, 1)) for dim in signature.dims)
            for found in signature.configurations(4, item.node.spec.lower is not None)
        }
        assert seen[item.name] == expected


def test_two_dims_that_follow_one_leave_no_more_points_than_devices() -> None:
    """In a product of a value with itself rows and columns are both aligned with its maker's."""
    builder = GraphBuilder("itself")
    x = builder.input("x", (12, 5))
    w = builder.input("w", (5, 7), role=Role.PARAMETER)
    (y,) = builder.apply("matmul", x, w, name="first")
    builder.output(*builder.apply("matmul", y, y, transpose_b=True, name="second"))
    model = prepare(builder.build(), load_machine("p100", 6))
    shares = {proposals.RANDOM: 0.4, proposals.ALONG: 0.4, proposals.COPY: 0.2}
    walker = Walker(model, shares, 1e9, True, 0)
    walker.begin({})
    most = 0
    for _ in range(500):
        walker.walk(1)
        most = max(most, int(walker.settled.choice.operators["points"].max()))
    assert most == 6


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
    assert again.proposals == 0
    nothing = search(graph, machine, Options(seconds=0.0, patience=1.0))
    assert nothing.proposals == 0
    assert nothing.simulation.step_us == min(nothing.initial_us.values())


def test_a_search_begins_anew_until_its_budget_is_spent() -> None:
    graph, machine = lenet(64), load_machine("p100", 4)
    short = Options(seconds=None, proposals=3000, seed=1)
    once = search(graph, machine, replace(short, least=0))
    rounds = [search(graph, machine, replace(short, patience=1.0)) for _ in range(2)]
    assert once.proposals < 3000 and [each.proposals for each in rounds] == [3000, 3000]
    assert rounds[0].strategy.to_json() == rounds[1].strategy.to_json()
    assert rounds[0].simulation.step_us <= once.simulation.step_us
    assert rounds[0].initial_us == once.initial_us
    costs = [us for _, us in rounds[0].history]
    assert costs == sorted(costs, reverse=True) and costs[-1] == rounds[0].simulation.step_us


def two_layers() -> Graph:
    """Return a step of two dense layers, for which the first chain ends early."""
    model = Model("two")
    hidden = model.dense(model.input("x", (256, 1024)), 4096, activation="relu")
    model.output(model.dense(hidden, 1024))
    return training_graph(model.build(training=True), "mse", SGD(0.1), ())


def test_a_small_model_is_searched_beyond_the_end_of_its_first_chain() -> None:
    """One chain ends at 665 us after 155 proposals, where 661 is to be had."""
    graph, machine = two_layers(), load_machine("p100", 4)
    options = Options(seconds=None, proposals=20_000)
    first = search(graph, machine, replace(options, least=0))
    found = search(graph, machine, options)
    longest = search(graph, machine, replace(options, patience=1.0))
    assert first.proposals < 1_000 and 5_000 <= found.proposals < 20_000
    assert longest.proposals == 20_000
    assert found.simulation.step_us < 0.995 * first.simulation.step_us
    assert found.simulation.step_us < 1.001 * longest.simulation.step_us
    near = search(graph, machine, replace(options, patience=1.0, enough=1.0))
    assert near.proposals == first.proposals and near.simulation.gap < 1.0  # nothing to gain


def test_a_descent_tries_every_placement_on_few_devices() -> None:
    model = prepare(two_layers(), load_machine("p100", 2))
    walker = Walker(model, INFORMED, 0.05, True, 0)
    descent = Descent(walker, 0)
    op = next(op for op, row in enumerate(model.problem.operators) if row["kind"] == FREE)
    degrees, placed = descent._table(op)
    several = degrees["points"] == 2
    assert {tuple(row) for row in placed[several]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {tuple(row) for row in placed[~several]} == {(0, 0), (1, 0)}


@pytest.mark.parametrize("calls", [2, 6, 30, 200])
def test_an_interrupt_ends_a_search_with_the_best_so_far(calls: int) -> None:
    """Among the beginnings, in the first round and in later ones."""
    said: list[float] = []

    def progress(seconds: float, proposals: int, best_us: float) -> None:
        said.append(best_us)
        if len(said) == calls:
            raise KeyboardInterrupt

    options = Options(seconds=None, proposals=1_000_000, patience=1.0)
    found = search(lenet(64), load_machine("p100", 4), options, progress=progress)
    assert len(said) == calls and found.proposals < 1_000_000
    assert found.simulation.step_us <= said[-1] == min(said)


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


@pytest.mark.parametrize("seed", range(3))
def test_strategies_train_to_the_same_numbers(seed: int) -> None:
    strategy_training.compare(seed, "local", cpus=2)


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


def test_steps_of_a_recurrent_layer_are_changed_together() -> None:
    """Also the first one, which is of another class."""
    sizes = {"unrolled": True, "length": 3, "hidden": 16, "vocabulary": 40}
    model = prepare(graph_of("rnnlm", 8, sizes=sizes), load_machine("p100", 2))
    number = {item.name: op for op, item in enumerate(model.operators)}
    shared, equal = sharing(model), classes(model)
    for layer in ("lstm1", "lstm2"):
        steps = [number[f"{layer}.{step}"] for step in range(3)]
        assert len({shared[op] for op in steps}) == 1
        assert len({equal[op] for op in steps}) == 2
    assert shared[number["lstm1.1"]] != shared[number["lstm2.1"]]


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


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([1, 2, 3], [0, 1, 2]),
        ([7, 1, 2, 1, 2, 1, 2, 9], [0, 1, 2, 3, 4, 3, 4, 7]),
        ([5, 5, 5, 5], [0, 1, 1, 1]),
        ([1, 2, 1, 2], [0, 1, 2, 3]),  # twice is not often enough
    ],
)
def test_repeated_blocks(classes: list[int], expected: list[int]) -> None:
    assert repeated(classes) == expected


def test_a_model_of_two_blocks_stands_for_all_of_them() -> None:
    sizes = {"layers": 5, "hidden": 16, "heads": 2, "vocabulary": 40}
    graph = graph_of("transformer", 8, sizes=sizes)
    machine = load_machine("p100", 4)
    full = prepare(graph, machine)
    blocks = Blocks(full)
    assert blocks.model is not None
    assert len(blocks.model.operators) < len(full.operators)
    found = blocks.spread(randomly(blocks.model, 1))
    result = Simulator(full).simulate(found)
    assert result.step_us > 0
    searched = search(graph, machine, Options(proposals=400, seconds=None))
    assert "blocks" in searched.initial_us


def test_a_device_too_small_is_a_limit() -> None:
    """The search takes a slower strategy that fits, and says so if none can."""
    graph = lenet(64)
    machine = load_machine("p100", 4)
    free = search(graph, machine, Options(proposals=600, seconds=None, seed=1))
    most = max(free.simulation.peak_bytes_per_device)
    least = min(
        max(Simulator(prepare(graph, machine)).simulate(NAMED[name](prepare(graph, machine)))
            .peak_bytes_per_device)
        for name in NAMED
    )  # fmt: skip
    limit = (most + least) // 2 if least < most else int(most * 0.9)
    found = search(graph, shrunk(machine, limit), Options(proposals=1500, seconds=None, seed=1))
    assert max(found.simulation.peak_bytes_per_device) <= limit
    assert found.simulation.missing_bytes == 0
    with pytest.raises(ParallelError, match=r"are missing; the largest: .* MB"):
        search(graph, shrunk(machine, 1000), Options(proposals=1, seconds=None))


def shrunk(machine: Machine, nbytes: int) -> Machine:
    memories = tuple(replace(memory, capacity_bytes=nbytes) for memory in machine.memories)
    return replace(machine, memories=memories)
