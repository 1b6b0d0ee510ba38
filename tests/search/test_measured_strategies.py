"""Strategies simulated with measured times of tasks: looked up, kept, taken in covering steps."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from soapstone import SGD, Model
from soapstone.cache.store import Store
from soapstone.engine.expand import expand
from soapstone.engine.lower import lower, views
from soapstone.frontend.strategies import step_times
from soapstone.frontend.strategies.step_times import Run, Step, Turns
from soapstone.frontend.strategies.task_times import (
    Sample,
    configured,
    handed,
    influences,
    linked,
    measure,
    strategy_of,
    usual,
)
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Configuration
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.runtime.machines.exchanges import Exchange, exchanges
from soapstone.runtime.machines.machine import Link, Memory, Processor
from soapstone.search.cost.messages import SHORT, MessageTimes
from soapstone.search.cost.tasks import MeasuredMachine, StepTimes, TaskTimes
from soapstone.search.parallel import NAMED, Options, Simulator, search
from soapstone.search.parallel.covering import Homes, choices, covering
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.arrays import MARK, MOST_DIMS
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import prepare
from soapstone.search.parallel.problem.timing import step_kind
from soapstone.search.parallel.simulation.collectives import SUM, collective_ns, copy_ns

CPUS = tuple(Processor(f"cpu{i}", flops=50e9) for i in range(2))
MEMORIES = (Memory("system", 1 << 34, 10e9),)


def computer() -> MeasuredMachine:
    """Return a machine of two processors on which nothing has been measured yet."""
    return MeasuredMachine("here", CPUS, MEMORIES)


def perceptron() -> Graph:
    model = Model("net", seed=1)
    x = model.input("x", (8, 12))
    model.output(model.dense(model.dense(x, 16, activation="relu", name="one"), 4, name="two"))
    return training_graph(model.graph, "cross_entropy", SGD(0.1), ())


def convolutions() -> Graph:
    model = Model("net", seed=1)
    x = model.input("image", (6, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv")
    x = model.batch_norm(x)
    y = model.conv2d(x, 8, kernel=3, padding=1, name="other")
    x = model.max_pool2d(model.relu(model.add(x, y)), 2)
    model.output(model.dense(model.flatten(x), 5, name="head"))
    return training_graph(model.graph, "cross_entropy", SGD(0.1, momentum=0.9), ())


def made_up(graph: Graph, whole_ns: int, half_ns: int, begin_ns: int) -> MeasuredMachine:
    """Return a machine on which every task takes the same time, whole or as one of two points."""
    machine = computer()
    model = prepare(graph, machine)
    for strategy in covering(model):
        for kind, (degrees, devices) in zip(model.kinds, configured(model, strategy)):
            each_ns = whole_ns if len(devices) == 1 else half_ns
            machine.times.add(kind, degrees, [each_ns] * len(devices))
    machine.times.set_step(step_kind(graph), StepTimes(begin_ns))
    return machine


def ranks(machine: MeasuredMachine) -> MeasuredMachine:
    """Return a machine of two ranks, between which 512 bytes take 1 us."""
    parts = Memory("left", 1 << 34, 10e9), Memory("right", 1 << 34, 10e9)
    cpus = tuple(replace(cpu, memory=memory.name) for cpu, memory in zip(CPUS, parts))
    links = (Link("left", "right", 0.0, 512e6), Link("right", "left", 0.0, 512e6))
    return replace(machine, processors=cpus, memories=parts, links=links)


def test_a_step_is_the_sum_of_the_measured_tasks() -> None:
    graph = perceptron()
    simulator = Simulator(prepare(graph, made_up(graph, 1000, 600, 50)))
    tasks = len(simulator.model.tasks)
    whole = simulator.simulate({})
    assert whole.step_us == (50 + 1000 * tasks) / 1e3
    assert not whole.estimated and whole.bytes_moved == 0
    data = simulator.simulate(NAMED["data"](simulator.model))
    points = simulator.settled.choice.operators["points"][simulator.problem.tasks["operator"]]
    assert data.step_us == (50 + sum(1000 if n == 1 else 600 for n in points)) / 1e3
    assert not data.estimated
    assert data.lower_bound_us <= data.step_us < whole.step_us


def test_an_update_takes_longer_where_its_gradient_is_a_sum() -> None:
    """Its tiles are the same if the operator is split over samples, or over rows of weights."""
    graph, machine = perceptron(), made_up(perceptron(), 1000, 600, 0)
    model = prepare(graph, machine)
    names = [item.name for item in model.operators if item.source is None]
    tasks = [
        i
        for i, (op, _) in enumerate(model.tasks)
        if model.operators[op].name == "one.weight.update"
    ]
    found = []
    for dim in ("b0", "k"):
        strategy = {names[0]: Configuration({dim: 2}, (0, 1))}
        found.append([configured(model, strategy)[i] for i in tasks])
    (samples, rows) = (each[0][0] for each in found)
    assert samples[-1] == 2 and rows[-1] == 1 and samples[:-1] == rows[:-1]
    machine.times.add(model.kinds[tasks[0]], samples, [5600, 5600])
    simulator = Simulator(prepare(graph, machine))
    for dim, more_us in (("b0", 5.0), ("k", 0.0)):
        strategy = {names[0]: Configuration({dim: 2}, (0, 1))}
        before = Simulator(prepare(graph, made_up(graph, 1000, 600, 0))).simulate(strategy).step_us
        assert simulator.simulate(strategy).step_us == before + more_us


def test_who_receives_a_message_copies_it() -> None:
    """It is work of its device, whatever that does; where memory is shared there is none.

    The chain is by hand: each task takes 1 us, and so does each message of 8 x 16 float32.
    """
    graph = perceptron()
    simulator = Simulator(prepare(graph, ranks(made_up(graph, 1000, 600, 0))))
    names = [item.name for item in simulator.model.operators if item.source is None]
    found = simulator.simulate({n: Configuration({}, (int(n != names[0]),)) for n in names})
    taken = [
        event.end_ns - event.start_ns for event in found.timeline.events if event.category == "copy"
    ]
    assert found.bytes_moved > 512 and taken.count(1000) == 2  # what is handed on, and its gradient
    for seed in range(6):
        strategy = randomly(simulator.model, seed)
        taking = simulator.simulate(strategy)
        simulator.problem.devices["receives"] = 0
        beside = simulator.simulate(strategy)
        simulator.problem.devices["receives"] = 1
        assert taking.step_us >= beside.step_us and taking.bytes_moved == beside.bytes_moved
        together = Simulator(prepare(graph, made_up(graph, 1000, 600, 0))).simulate(strategy)
        assert together.step_us <= beside.step_us


def test_a_rank_does_what_it_can_while_it_would_wait() -> None:
    """Each task takes 1 us, and so does the copy of what `one` has made by the second rank.

    That is counted when it is sent, so `three` ends after it.
    """
    model = Model("net", seed=1)
    x = model.input("x", (8, 12))
    two = model.dense(model.dense(x, 16, name="one"), 4, name="two")
    model.output(two, model.dense(x, 4, name="three"))
    machine = made_up(model.graph, 1000, 600, 0)
    strategy = {name: Configuration({}, (int(name != "one"),)) for name in ("one", "two", "three")}
    for where, ends_us in (
        (ranks(machine), {"one": 1.0, "two": 3.0, "three": 2.0}),
        (machine, {"one": 1.0, "two": 2.0, "three": 3.0}),  # workers of a process go in order
    ):
        found = Simulator(prepare(model.graph, where)).simulate(strategy)
        tasks = [event for event in found.timeline.events if event.category == "task"]
        assert {event.name: event.end_ns / 1e3 for event in tasks} == ends_us


@pytest.mark.parametrize("seed", range(6))
def test_tasks_of_ranks_run_in_an_order_of_the_program(seed: int) -> None:
    """What a task reads is made before it, and what it overwrites is read before."""
    graph = convolutions()
    simulator = Simulator(prepare(graph, ranks(made_up(graph, 1000, 600, 0))))
    found = simulator.simulate(randomly(simulator.model, seed))
    assert found.lower_bound_us <= found.step_us
    place = {
        node.name: int(simulator.problem.tasks["place"][number])
        for number, (_, nodes) in enumerate(simulator.model.tasks)
        for node in nodes
    }
    assert sorted(set(place.values())) == list(range(len(simulator.model.tasks)))
    for name, at in place.items():
        node = graph.by_name[name]
        for value in node.inputs:
            maker = graph.producers.get(value)
            assert maker is None or place.get(maker.name, -1) <= at
            update = graph.producers.get(graph.updates.get(value, ""))
            assert update is None or at <= place.get(update.name, at)


def test_a_search_judges_by_measured_times() -> None:
    """Where splitting costs more than it saves the best strategy splits nothing."""
    graph = perceptron()
    found = search(graph, made_up(graph, 1000, 5000, 0), Options(seconds=None, proposals=200))
    assert not found.simulation.estimated
    assert all(item.points == 1 for item in found.strategy.configurations.values())


def test_configurations_that_were_not_measured_are_scaled_rooflines() -> None:
    graph, machine = perceptron(), computer()
    plain = Simulator(prepare(graph, computer()))
    model = prepare(graph, machine)
    whole, data = ({}, NAMED["data"](model))
    costs = []
    for strategy in (whole, data):
        plain.simulate(strategy)
        costs.append(plain.settled.choice.task_ns[:, :2].copy())
    dims = [len(graph.signature(item.node).dims) for item in model.operators]
    for (op, _), kind, ns in zip(model.tasks, model.kinds, costs[0][:, 0]):
        machine.times.add(kind, (1,) * dims[op], [3 * int(ns)])
    scaled = Simulator(prepare(graph, machine))
    assert not scaled.simulate(whole).estimated
    assert scaled.simulate(data).estimated
    found = scaled.settled.choice
    split = found.operators["points"][scaled.problem.tasks["operator"]] == 2
    assert split.any()
    np.testing.assert_allclose(found.task_ns[split, :2], 3 * costs[1][split], rtol=0.01, atol=4)


@pytest.mark.parametrize("name", ["p100", "here"])
def test_machines_without_measured_times_are_as_they_were(name: str) -> None:
    """Described ones have no rows of times; measured ones without any cost the same in all."""
    graph = convolutions()
    plain = load_machine("p100", 4) if name == "p100" else Machine("here", CPUS, MEMORIES)
    parts = plain.processors, plain.memories, plain.links, plain.switches
    measured = MeasuredMachine(plain.name, *parts)
    for seed in range(3):
        costs = []
        for machine in (plain, measured):
            simulator = Simulator(prepare(graph, machine))
            p = simulator.problem
            assert not len(p.times) and not p.begin_ns.any() and (p.tasks["scale"] == 1000).all()
            found = simulator.simulate(randomly(simulator.model, seed))
            assert found.estimated
            costs.append(found.compute_us)
        assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_the_gradients_of_a_measured_operator_are_tasks_of_their_own() -> None:
    """What comes before it may go on before the gradients of its weights are there."""
    graph = perceptron()
    plain = prepare(graph, Machine("here", CPUS, MEMORIES))
    model = prepare(graph, computer())
    assert all(
        len(nodes) == 1 or nodes[0] in model.operators[op].ahead for op, nodes in model.tasks
    )
    assert len(model.tasks) > len(plain.tasks)
    assert sum(len(n) for _, n in model.tasks) == sum(len(n) for _, n in plain.tasks)


def test_times_are_kept_and_found_again(tmp_path: Path) -> None:
    store = Store("cost", tmp_path / "costs.sqlite", {"name": "some computer"})
    machine, times = computer(), TaskTimes()
    times.add("product", (2, 1), [1500, 2500])
    times.set_step("step", StepTimes(7000, 0.25, 0.5))
    times.save(machine, [("product", (2, 1))], "step", store)
    wanted = [("product", (2, 1), 2), ("product", (1, 1), 1), ("sum", (2, 1), 2)]
    again = TaskTimes()
    other = Store("cost", tmp_path / "costs.sqlite", {"name": "some computer"})
    assert again.load(machine, wanted, "step", other) == [("product", (1, 1)), ("sum", (2, 1))]
    assert again.of("product") == {(2, 1): (1500, 2500)} and len(again) == 1
    assert again.step("step") == StepTimes(7000, 0.25, 0.5)
    assert again.step("another") == StepTimes()
    later = TaskTimes()
    later.add("product", (2, 1), [9, 9])
    later.save(machine, [("product", (2, 1))], "step", other)  # the first of a key stays
    assert later.of("product") == {(2, 1): (1500, 2500)}
    more = MeasuredMachine("here", (*CPUS, Processor("cpu2")), MEMORIES)
    assert TaskTimes().load(more, wanted[:1], "step", store)  # of other workers
    elsewhere = Store("cost", tmp_path / "costs.sqlite", {"name": "another computer"})
    assert TaskTimes().load(machine, wanted[:1], "step", elsewhere)


def test_times_are_checked() -> None:
    for points in ([], [5, -1]):
        with pytest.raises(ValueError, match="one from 0 a point needed"):
            TaskTimes().add("product", (1,), points)


@pytest.mark.parametrize("graph", [perceptron(), convolutions()])
def test_covering_strategies_have_every_configuration(graph: Graph) -> None:
    model = prepare(graph, computer())
    settled = Settled(model)
    seen: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    for strategy in covering(model, mixtures=0):
        settled.set(strategy)  # they are legal
        for name, item in strategy.items():
            assert len(set(item.devices)) == item.points <= 2
            seen.setdefault(name, set()).add(tuple(item.degrees.items()))
    for item in model.operators:
        if item.source is None:
            assert {tuple(c.items()) for c in choices(model, item)} == seen[item.name]
            split = {name for degrees in seen[item.name] for name, _ in degrees}
            for seed in range(8):
                assert set(randomly(model, seed)[item.name].degrees) <= split


@pytest.mark.parametrize("seed", range(3))
def test_every_launch_is_part_of_a_task(seed: int) -> None:
    """Also those of fused chains, of primitives in place of composites, and of sums."""
    graph = convolutions()
    model = prepare(graph, computer())
    settled = Settled(model)
    settled.set(randomly(model, seed))
    strategy = as_strategy(graph, model, settled.configurations(), {})
    lowered = lower(graph, strategy)
    homes = Homes(model)
    launches = expand(lowered, strategy, frozenset(), views(lowered, strategy, frozenset()))
    assert launches and all(homes.of(launch) is not None for launch in launches)


def test_measuring_fills_the_times_once(tmp_path: Path) -> None:
    """An interrupted measurement keeps what it has; afterwards nothing is estimated."""
    graph, store = perceptron(), Store("cost", tmp_path / "costs.sqlite")
    first, stages = computer(), list[str]()

    def interrupt(stage: str, done: int, total: int | None) -> None:
        stages.append(stage)
        if stages.count("measuring tasks") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(graph, first, interrupt, store=store)
    assert len(first.times) > 0
    machine = computer()
    measure(graph, machine, store=store)
    assert len(machine.times) >= len(first.times)
    assert measure(graph, machine, store=store) == 0
    again = computer()
    assert measure(graph, again, store=store) == 0  # found in the database
    for where in (machine, again):
        simulator = Simulator(prepare(graph, where))
        found = [simulator.simulate(make(simulator.model)) for make in NAMED.values()]
        found += [simulator.simulate(randomly(simulator.model, seed)) for seed in range(4)]
        assert not any(item.estimated for item in found)
        assert all(item.lower_bound_us <= item.step_us < math.inf for item in found)
        assert simulator.problem.times.shape[1] == MOST_DIMS + 2
        assert simulator.problem.begin_ns[0] >= 0  # what a step takes before its first task


@pytest.mark.parametrize("lost, kept", [(1, True), (1 << 50, False)])
def test_steps_with_few_preemptions_are_compared(
    lost: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long step is hardly ever without one; what counts is whether others want a processor."""
    model = prepare(perceptron(), computer())
    strategy = strategy_of(model, randomly(model, 0))
    counted = iter(range(0, 1 << 60, lost))
    monkeypatch.setattr(step_times, "preemptions", lambda: next(counted))
    monkeypatch.setattr(step_times, "UNDISTURBED_S", 1e-6)  # steps here are very short
    with closing(Run(model, strategy, tasks=False)) as run:
        assert (Turns({"": run}).take(3, 0.0).us > 0) == kept


def test_usual_times_sum_to_a_usual_step() -> None:
    chance = np.random.default_rng(0)
    points_ns = chance.lognormal(8, 0.3, (9, 40, 2))
    points_ns[3, 7] += 1e6  # one that was disturbed
    found = usual(points_ns)
    assert found.sum() == pytest.approx(np.median(points_ns.sum(axis=(1, 2))))
    np.testing.assert_allclose(
        found / np.median(points_ns, 0), found.sum() / np.median(points_ns, 0).sum()
    )
    assert not usual(np.zeros((3, 2, 2))).any()


def test_influences_are_the_slopes_that_made_the_times() -> None:
    chance = np.random.default_rng(0)
    classes = []
    for _ in range(30):
        alone_ns, share = chance.uniform(1e4, 1e6), chance.uniform(0, 1, (5, 1))
        read = chance.choice([0.0, 1e5, 1e6], (5, 1))
        ns = alone_ns * (1 + 0.2 * share) + 0.05 * read
        classes.append([Sample(*each, np.zeros(1)) for each in zip(ns, share, read)])
    slower, ns_per_byte = influences(classes)
    assert slower == pytest.approx(0.2, rel=0.15) and ns_per_byte == pytest.approx(0.05, rel=0.05)
    same = [[Sample(np.full(2, 1e5), *np.zeros((3, 2)))] * 3]
    assert influences(same) == (0.0, 0.0)


def test_tasks_beside_others_are_slower_and_bytes_of_others_cost_time() -> None:
    """Of data parallelism both devices are busy all the time, and of one device none is beside."""
    graph = perceptron()
    model = prepare(graph, computer())
    data, whole = NAMED["data"](model), {}
    steps_us = []
    for slower, ns_per_byte in ((0.0, 0.0), (0.25, 0.0), (0.0, 1.0)):
        machine = made_up(graph, 1000, 600, 0)
        machine.times.set_step(step_kind(graph), StepTimes(0.0, slower, ns_per_byte))
        simulator = Simulator(prepare(graph, machine))
        moved = [simulator.simulate(item) for item in (data, whole)]
        steps_us.append([item.step_us for item in moved])
        assert part_of(graph, machine).problem.slower[0] == 0  # a bound for the whole
    (plain, one), (beside, still), (reading, again) = steps_us
    assert one == still == again
    assert beside == pytest.approx(1.25 * plain, rel=0.02)
    read, left = handed(model, data)
    assert plain < reading <= plain + (read.sum() + left.sum()) / 1e3
    assert read.sum() > 0 and left.sum() > 0 and not np.any(handed(model, whole))


def part_of(graph: Graph, machine: MeasuredMachine) -> Simulator:
    """Return a simulator of a graph's first operator alone."""
    name = prepare(graph, machine).operators[0].name
    return Simulator(prepare(graph, machine, only=[name]))


def two_ranks(known: dict[Exchange, dict[int, float]]) -> MeasuredMachine:
    """Return a machine of two ranks, between which links are slow."""
    ends = ("rank0", "rank1"), ("rank1", "rank0")
    return MeasuredMachine(
        "here",
        tuple(replace(cpu, memory=ends[i][0], node="node") for i, cpu in enumerate(CPUS)),
        tuple(Memory(name, 1 << 30, 10e9) for name, _ in ends),
        tuple(Link(*each, 1e-3, 1e6) for each in ends),
        messages=MessageTimes(known),
    )


def test_messages_are_as_fast_as_in_steps() -> None:
    sizes = np.array([8, 40, 100_000, 400_000, 1000])
    pair = Exchange("copy", (0, 1))
    machine = two_ranks({pair: {8: 1000.0, 1 << 20: 1000.0 + (1 << 20) - 8}})
    alone = np.array([machine.messages.ns(pair, n) for n in sizes])
    longer = alone * np.where(sizes < SHORT, 3, 2)
    steps = [Step(1.0, messages=np.stack([sizes, longer * by], 1)) for by in (1, 1, 50)]
    found = linked(machine, [steps, []]).messages
    assert found.factors == (pytest.approx(3.0), pytest.approx(2.0))
    assert [found.ns(pair, n) for n in sizes] == pytest.approx(longer.tolist())
    assert linked(machine, [[Step(1.0)]]) is machine
    assert linked(computer(), [steps]).messages == MessageTimes()


def test_messages_among_ranks_take_what_was_measured() -> None:
    """Between sizes in proportion; a sum is work of both."""
    everybody = 0, 1
    known = {
        Exchange("copy", everybody): {8: 100.0, 1024: 1116.0, 2048: 5000.0},
        Exchange("scatter", everybody): {8: 500.0, 1 << 20: 500.0},
        Exchange("sum", everybody): {8: 900.0, 1 << 20: 900.0},
    }
    p = prepare(perceptron(), two_ranks(known)).problem
    for nbytes, ns in ((8, 100), (512, 604), (1024, 1116), (1536, 3058), (4096, 10_000)):
        assert call(copy_ns, p, 0, 1, nbytes) == (ns, 0) == call(copy_ns, p, 1, 0, nbytes)
    marks = np.zeros(2, MARK)
    marks["member"] = everybody
    assert call(collective_ns, p, marks, 2, 4096.0, SUM, 2048.0) == 500
    assert call(collective_ns, p, marks, 2, 4096.0, SUM, 4096.0) == 900
    graph, step_us = perceptron(), []
    for ns in (500.0, 50_500.0):
        both = {Exchange(kind, everybody): {8: ns} for kind in ("scatter", "sum")}
        machine = two_ranks(known | both)
        simulator = Simulator(prepare(graph, machine))
        step_us.append(simulator.simulate(NAMED["data"](simulator.model)).step_us)
    assert step_us[1] >= step_us[0] + 2 * 50  # two layers' gradients, one after the other


def test_what_ranks_exchange_is_along_lines_of_arrays_of_them() -> None:
    names = [f"rank{i}" for i in range(4)]
    processors = tuple(Processor(f"{name}.cpu0", memory=name) for name in names)
    found = exchanges(Machine("four", processors, tuple(Memory(name, 1) for name in names)))
    assert {each.members for each in found if each.kind == "copy"} == {
        (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)
    }  # fmt: skip
    lines = {(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)}
    assert {each.members for each in found if each.kind == "sum"} == lines
    assert {each.members for each in found if each.kind == "scatter"} == lines
    assert [each.members for each in found if each.kind == "gather"] == [(0, 1, 2, 3)]


def test_devices_of_whole_operators_need_no_further_times() -> None:
    graph = perceptron()
    simulator = Simulator(prepare(graph, made_up(graph, 1000, 600, 0)))
    names = [item.name for item in simulator.model.operators if item.source is None]
    placed = {name: Configuration({}, (i % 2,)) for i, name in enumerate(names)}
    found = simulator.simulate(placed)
    assert not found.estimated and found.compute_us == len(simulator.model.tasks)
