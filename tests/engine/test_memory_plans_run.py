"""Memory plans that are followed: real copies, as many bytes as planned, and no other bits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.training_runs import wide

from soapstone import SGD
from soapstone.deadline import Deadline
from soapstone.engine.footprint import footprint_of, footprints_of
from soapstone.engine.images import imaged
from soapstone.engine.mapper import GraphMapper, strategy_of
from soapstone.engine.prepare import prepare
from soapstone.engine.session import Session
from soapstone.frontend.app import load_app
from soapstone.frontend.memory_plans import Launches, anew, launched
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.analysis.footprint import Footprint, Touch, Touches
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.choices import Choices
from soapstone.mappers import load
from soapstone.mappers.bounded import BoundedMemoryMapper, Planner
from soapstone.runtime import Machine
from soapstone.runtime.analysis.policy import attach
from soapstone.search.placement import baselines
from soapstone.search.placement.find import memory_plan
from soapstone.search.placement.recomputation import recomputing
from soapstone.search.placement.timeline import timeline

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet": ("resnet", 0, {"image_size": 32, "width": 8, "depth": 18, "classes": 10}),
    "transformer": ("transformer", 0, {"layers": 1, "hidden": 32, "inner": 64, "heads": 2}),
    "gcn": ("gcn", 2708, {}),
}
ROOMY = 1 << 40


def fewest(footprint: Footprint, capacity: int) -> MemoryPlan:
    """Plan with a short search."""
    return memory_plan(footprint, capacity, deadline=Deadline(1.0)).plan


PLANNERS: dict[str, Planner] = {
    "dp": fewest,
    "lru": baselines.least_recently_used,
    "stream": baselines.stream,
    "belady": baselines.furthest_use,
}


@dataclass(frozen=True)
class Ran:
    """What came of some steps, and what was planned and counted."""

    values: dict[str, Array]
    planned: int
    counted: int
    offsets: dict[str, int]  # of the instances that the trace begins with in the fast memory
    used: tuple[int, ...]  # bytes of each memory
    who: dict[str, set[str]]  # the processors of operations, by kind


@dataclass
class Case:
    """A graph that runs in memories of several sizes, with the same kernels."""

    graph: Graph
    constants: dict[str, Array]
    cpus: int
    choices: Choices

    @staticmethod
    def of(graph: Graph, cpus: int, constants: dict[str, Array] | None = None) -> Case:
        """Return the case of a graph."""
        return Case(graph, constants or {}, cpus, Choices())

    @staticmethod
    def named(name: str, batch_size: int, cpus: int) -> Case:
        """Return the case of an app's training step; a whole graph has its own batch size."""
        app, known, sizes = MODELS[name]
        batch_size = known or batch_size
        graph = graph_of(app, batch_size, sizes=sizes)
        model = load_app(app).build(batch_size, **sizes)
        constants = {value: model.constants[value] for value in graph.inputs(Role.CONSTANT)}
        return Case.of(graph, cpus, constants)

    def footprint(self) -> Footprint:
        """Return what its launches touch."""
        machine, mapper = Machine.local(cpus=self.cpus), load("data_parallel")
        attach(mapper, machine)
        strategy = strategy_of(mapper, self.graph, machine)
        return footprint_of(prepare(self.graph, strategy, self.constants.keys()))

    def run(
        self,
        mapper: GraphMapper,
        capacity: int | None = None,
        steps: int = 2,
        machine: Machine | None = None,
        recomputed: Collection[str] = (),
    ) -> Ran:
        """Run it, in a memory of a capacity."""
        machine = machine or Machine.local(cpus=self.cpus)
        if capacity is not None:
            machine = machine.bounded(capacity)
        session = Session(machine, mapper, 3, choices=self.choices)
        try:
            strategy = anew(strategy_of(mapper, self.graph, machine), recomputed)
            bound = session.bind(self.graph, strategy, self.constants)
            random = np.random.default_rng(0)
            for array in bound.feeds.values():
                if array.dtype.kind == "f":
                    array[...] = random.random(array.shape) if array.shape else 0.01
            for _ in range(steps):
                session.run(bound)
            results = {name: np.array(array) for name, array in bound.results.items()}
            counted = session.runtime.statistics.bytes_replayed
            assert counted == steps * bound.trace.copied_bytes
            placed = [pair for part in bound.trace.layout.placed[1:] for pair in part]
            who: dict[str, set[str]] = {}
            for operation in bound.trace.operations:
                name = machine.processors[operation.processor].name
                who.setdefault(operation.kind, set()).add(name)
            return Ran(
                results | session.state(),
                (bound.moved_bytes or (0, 0))[0],
                bound.trace.copied_bytes,
                {storage.name: offset for storage, offset in placed},
                session.used_bytes,
                who,
            )
        finally:
            session.close()


def same(found: Ran, wanted: Ran) -> None:
    """Check that all values are equal, bit by bit."""
    assert found.values.keys() == wanted.values.keys()
    for name, array in wanted.values.items():
        np.testing.assert_array_equal(found.values[name], array, err_msg=name)


def random_graph(seed: int) -> Graph:
    """Return a graph of pointwise operators, sums, slices and concatenations of several sizes."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"random{seed}")
    values = []
    for number in range(int(random.integers(2, 4))):
        builder.input(f"x{number}", (int(random.integers(1, 6)), 16))
        values.append(f"x{number}")
    for number in range(10):
        one, other = (str(v) for v in random.choice(values, 2))
        kind = random.choice(["relu", "exp", "add", "concat", "slice", "matmul"])
        rows = builder.spec(one).shape[0]
        name = f"n{number}"
        if kind == "slice":
            cut = {"starts": (0, 0), "stops": (int(random.integers(1, rows + 1)), 16)}
            (value,) = builder.apply("slice", one, name=name, steps=(1, 1), **cut)
        elif kind == "concat" and one != other:
            (value,) = builder.apply("concat", one, other, name=name, axis=0)
        elif kind == "add":
            (value,) = builder.apply("add", one, one, name=name)
        elif kind == "matmul":
            turned = builder.apply("transpose", other, name=f"{name}.t", permutation=(1, 0))[0]
            square = builder.apply("matmul", turned, other, name=f"{name}.s")[0]
            (value,) = builder.apply("matmul", one, square, name=name)
        else:
            (value,) = builder.apply("relu", one, name=name)
        values.append(value)
    read = {value for node in builder.nodes for value in node.inputs}
    builder.output(*(v for v in values[3:] if v not in read or random.random() < 0.2))
    return builder.build()


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_copy_what_was_planned(seed: int) -> None:
    case = Case.of(random_graph(seed), cpus=1 + seed % 2)
    wanted, footprint = case.run(load("data_parallel")), case.footprint()
    least = int(timeline(footprint, ROOMY).needs.max())
    for name, planner in PLANNERS.items():
        found = case.run(BoundedMemoryMapper(planner), least + 512 * (seed % 3))
        same(found, wanted)
        assert found.counted == found.planned, name


@pytest.mark.parametrize("seed", range(4))
def test_copiers_copy_the_same_beside_what_is_computed(seed: int) -> None:
    case = Case.of(random_graph(seed), cpus=1 + seed % 2)
    wanted, footprint = case.run(load("data_parallel")), case.footprint()
    least = int(timeline(footprint, ROOMY).needs.max())
    for name, planner in PLANNERS.items():
        machine = Machine.local(cpus=case.cpus).bounded(least + 512 * (seed % 3), copiers=True)
        found = case.run(BoundedMemoryMapper(planner), machine=machine)
        same(found, wanted)
        assert found.counted == found.planned, name
        assert found.who.pop("copy") == {"system.in", "system.out"}
        assert set().union(*found.who.values()) <= {"cpu0", "cpu1"}


@pytest.mark.parametrize(("name", "overlap"), [("resnet", False), ("transformer", True)])
def test_steps_that_recompute_follow_their_plan(name: str, overlap: bool) -> None:
    case = Case.named(name, 2, 2)
    launches = Launches(case.graph, 2)
    known = timeline(launches(())[0], ROOMY)
    capacity = max(int(known.needs.max()), known.working_set_bytes // 2)
    wanted = case.run(load("data_parallel"))
    sizes = {value: case.graph.tensors[value].nbytes for value in launches.values}
    largest = sorted(sizes, key=lambda value: -sizes[value])[:3]
    values = {value: launches.values[value] for value in largest}
    chosen = recomputing(values, launches, capacity, "belady")
    assert chosen.plan.recomputed and chosen.transfer_bytes < (chosen.without_bytes or 0)
    found = case.run(
        BoundedMemoryMapper(chosen.plan),
        machine=Machine.local(cpus=2).bounded(capacity, copiers=overlap),
        recomputed=chosen.plan.recomputed,
    )
    same(found, wanted)
    assert found.counted == found.planned == chosen.transfer_bytes


@pytest.mark.parametrize("name", MODELS)
def test_training_steps_copy_what_was_planned(name: str) -> None:
    case = Case.named(name, 2, 2)
    known = timeline(case.footprint(), ROOMY)
    capacity = max(int(known.needs.max()), known.working_set_bytes // 2)
    wanted = case.run(load("data_parallel"))
    moved = {}
    for kind in ("dp", "lru"):
        plan = PLANNERS[kind](known.footprint, capacity)
        found = case.run(BoundedMemoryMapper(plan), capacity)
        same(found, wanted)
        assert found.counted == found.planned == plan.moved_bytes
        last = {s.name: s.offset for s in plan.steps if s.action in (Action.ALLOCATE, Action.FETCH)}
        assert last.items() <= found.offsets.items()
        moved[kind] = plan.moved_bytes
    assert moved["dp"] <= moved["lru"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "cpus"), [("resnet", 4), ("transformer", 2), ("gcn", 2)])
def test_each_of_two_memories_has_a_plan(name: str, cpus: int) -> None:
    case = Case.named(name, 4, cpus)
    machine, mapper = Machine.local(cpus=cpus, memories=2), load("data_parallel")
    wanted = case.run(mapper, machine=machine)
    constants = case.constants
    prepared = prepare(case.graph, strategy_of(mapper, case.graph, machine), constants.keys())
    images = imaged(prepared, constants, machine, range(cpus))
    shares = footprints_of(prepared, machine, images)
    capacity = max(int(timeline(share.footprint, ROOMY).needs.max()) for share in shares.values())
    for planner in (PLANNERS["lru"], PLANNERS["stream"]):
        found = case.run(BoundedMemoryMapper(planner), machine=machine.bounded(capacity))
        same(found, wanted)
        assert found.used[2:] == (capacity, capacity)
        assert found.planned > 0
    with pytest.raises(GraphError, match=rf"uses {capacity} bytes at once.*: 64 more needed"):
        case.run(BoundedMemoryMapper(PLANNERS["lru"]), machine=machine.bounded(capacity - 64))


def test_a_value_in_parts_takes_the_bytes_of_its_part_in_each_memory() -> None:
    builder = GraphBuilder("parts")
    builder.input("x", (8, 16))
    builder.input("w", (16, 4), role=Role.PARAMETER)
    builder.output(*builder.apply("matmul", "x", "w", name="y"))
    graph, machine = builder.build(), Machine.local(cpus=2, memories=2)
    mapper = load("data_parallel")
    attach(mapper, machine)
    prepared = prepare(graph, strategy_of(mapper, graph, machine))
    shares = footprints_of(prepared, machine, imaged(prepared, {}, machine, range(2)))
    value = graph.outputs[0]
    for part, share in enumerate(shares.values()):
        assert share.footprint.sizes == {"x": 4 * 16 * 4, "w": 16 * 4 * 4, value: 4 * 4 * 4}
        assert share.extents["x"] == ((4 * part, 0), (4 * part + 4, 16))
        assert share.footprint.results == {value}


def _fitted(choices: Path | None, steps: int = 3, **options: Any) -> tuple[dict[str, Array], Any]:
    """Train on batches of which the last is smaller, evaluate, and return weights and figures."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((80, 64)).astype(np.float32), random.integers(0, 5, 80)
    with wide() as model:
        model.compile(SGD(0.05, momentum=0.9), cpus=2, choices=choices, **options)
        model.fit(x, y, batch_size=32, epochs=2, progress=False)
        model.evaluate(x, y)
        if choices is None:
            model.save_choices("choices.json")
        return model.weights(), model.statistics


@pytest.mark.long
def test_a_model_is_trained_in_a_fast_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted, _ = _fitted(None)
    choices = tmp_path / "choices.json"
    graph = _training_graph()
    plan = memory_plan(launched(graph, 2), 260_000).plan
    plan.save("plan.json")
    given: tuple[dict[str, Any], ...] = (
        {"fast_memory": 260_000},
        {"fast_memory": 300_000, "plan": "lru"},
        {"plan": "plan.json"},
        {"plan": plan, "fast_memory": 270_000},
    )
    for options in given:
        found, statistics = _fitted(choices, **options)
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert statistics["planned_bytes"] == statistics["copied_bytes"] > 0
        if "plan.json" in options.values():
            assert statistics["planned_bytes"] == plan.moved_bytes


def _training_graph() -> Graph:
    with wide() as model:
        model.compile(SGD(0.05, momentum=0.9), cpus=2)
        return model.training_graph


def test_what_cannot_be_followed_is_refused() -> None:
    lenet = memory_plan(launched(graph_of("lenet", 8), 2), 4_000_000).plan
    own = memory_plan(launched(_training_graph(), 2), 260_000).plan
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"fast_memory": 1000},
            r"'.*': uses \d+ bytes at once, 1000 found in the memory: \d+ more",
        ),
        ({"plan": lenet}, r"graph 'wide' is not what the plan is of: .*step 0 .*does not exist"),
        ({"plan": own, "fast_memory": 100_000}, r"plan: for 260000 bytes, 100000 found in memory"),
        ({"plan": "best", "fast_memory": 10}, r"plan 'best' found; one of dp, lru, .* or a plan's"),
        ({"plan": "lru"}, r"plan 'lru' found without a fast memory"),
        ({"fast_memory": 10, "mapper": "locality"}, r"mapper 'locality'; the default one"),
        (
            {"plan": own, "machine": Machine.local(cpus=2, memories=2)},
            r"its part in memory '.*' is not what the plan is of: .* found, \d+ needed",
        ),
    ]
    for options, message in cases:
        with pytest.raises(GraphError, match=message):
            _fitted(None, **options)


def test_an_order_that_writes_too_early_is_refused() -> None:
    nodes = (
        Touches("read", "read 'read'", (Touch("w", True), Touch("y", False, 64))),
        Touches("update", "sgd 'update'", (Touch("w", True, 64), Touch("y", True))),
        Touches("look", "read 'look'", (Touch("w", True), Touch("z", False, 64))),
    )
    sizes = {"w": 64, "y": 64, "z": 64}
    footprint = Footprint(nodes, sizes, frozenset({"w", "z"}), frozenset({"w", "z"}))
    plan = baselines.stream(footprint, 192)
    assert plan.moved_bytes == 64 * (1 + 1 + 1 + 1 + 1 + 1 + 1)
    early = baselines.stream(footprint.ordered((0, 2, 1)), 192)
    with pytest.raises(GraphError, match=r"read 'look' touches 'w' after 0 writes, 1 needed"):
        early.check(footprint)


def test_parts_of_a_value_are_copied_out_once_each() -> None:
    nodes = (
        Touches("a", "a", (Touch("v", False, 64),)),
        Touches("b", "b", (Touch("v", False, 64),)),
        Touches("big", "big", (Touch("x", False, 192), Touch("y", False, 64))),
        Touches("c", "c", (Touch("v", True), Touch("y", True), Touch("r", False, 64))),
    )
    sizes = {"v": 128, "x": 192, "y": 64, "r": 64}
    footprint = Footprint(nodes, sizes, frozenset({"r"}), frozenset({"r"}))
    found = memory_plan(footprint, 256)
    assert found.exact and found.transfer_bytes == 128 + 128 + 64
    assert memory_plan(footprint, 256, "stream").transfer_bytes == (
        64 + 64 + 64 + 128 + 64 + 64 + 64
    )
