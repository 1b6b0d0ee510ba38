"""Searches by Markov chains: proposals, budgets, limits, and running what is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.parallel_problems import language_model, lenet, product
from programs import strategy_training

from soapstone import SGD, Model
from soapstone.frontend.strategies.finding import graph_of
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel import NAMED, Options, ParallelError, Simulator, search
from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.descent import Descent
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.mcmc.proposals import INFORMED
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.arrays import FREE
from soapstone.search.parallel.problem.blocks import Blocks, repeated
from soapstone.search.parallel.problem.groups import classes, sharing
from soapstone.search.parallel.problem.prepare import prepare


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
    strategy_training.compare(strategy_training.strategy_of(seed), "local", cpus=2)


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
