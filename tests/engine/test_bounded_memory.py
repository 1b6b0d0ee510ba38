"""Models larger than the memory they run in: plans that replay, and training with equal numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from helpers.ir_examples import training
from helpers.training_runs import wide

from soapstone import SGD
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.ir.tensor import Array
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import Machine, MemoryExhausted
from soapstone.search.placement.baselines import least_recently_used, stream


@dataclass(frozen=True)
class Run:
    """What came of a few training steps."""

    state: dict[str, Array]
    graph: Graph
    evictions: int
    bytes_copied: int
    used: list[int]  # bytes of each memory


def _trained(machine: Machine, mapper: object) -> Run:
    random = np.random.default_rng(0)
    x = random.standard_normal((96, 64)).astype(np.float32)
    with wide() as model:
        model.compile(SGD(0.05, momentum=0.9), machine=machine, mapper=mapper)
        model.fit(x, random.integers(0, 5, 96), batch_size=32, epochs=2, progress=False)
        runtime, count = model.trainer.session.runtime, len(machine.memories)
        return Run(
            model.trainer.session.state(),
            model.training_graph,
            runtime.statistics.evictions,
            runtime.statistics.bytes_copied,
            [runtime.memory.used(memory) for memory in range(count)],
        )


def _largest(graph: Graph) -> int:
    """The bytes of the node that uses most at once."""
    sizes = {name: -(-spec.nbytes // 64) * 64 for name, spec in graph.tensors.items()}
    return max(sum(sizes[name] for name in {*node.inputs, *node.outputs}) for node in graph.nodes)


def _total(graph: Graph) -> int:
    return sum(spec.nbytes for spec in graph.tensors.values())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_plans_replay_and_lru_moves_no_more_than_streaming(share: float) -> None:
    graph = training()
    capacity = int(
        _largest(graph) * (1 - share) + (_total(graph) + 64 * len(graph.tensors)) * share
    )
    streamed, lru = stream(graph, capacity), least_recently_used(graph, capacity)
    for plan in (streamed, lru):
        plan.check(graph)
        assert plan.peak_bytes <= capacity
        assert [s.name for s in plan.steps if s.action is Action.RUN] == [
            node.name for node in graph.nodes
        ]
        assert MemoryPlan.from_json(plan.to_json()) == plan
    assert lru.moved_bytes <= streamed.moved_bytes
    if share == 1:  # all fits: what is read comes once, what is kept leaves once
        made = {name for node in graph.nodes for name in node.outputs}
        read = {name for node in graph.nodes for name in node.inputs} - made
        sizes = {name: spec.nbytes for name, spec in graph.tensors.items()}
        assert lru.moved_bytes == sum(sizes[n] for n in (*read, *made.intersection(graph.results)))


def test_a_plan_for_too_little_memory_names_the_node_that_needs_most() -> None:
    graph = training()
    with pytest.raises(GraphError, match=r"bytes at once, 100 found in the memory") as refused:
        least_recently_used(graph, 100)
    more = int(str(refused.value).split(" more needed")[0].split()[-1])
    least_recently_used(graph, 100 + more)
    with pytest.raises(GraphError, match="1 more needed"):
        least_recently_used(graph, 99 + more)


@pytest.mark.parametrize("share", [0.35, 0.5])
def test_a_model_larger_than_its_memory_trains_to_the_same_bits(share: float) -> None:
    machine = Machine.local(cpus=2)
    wanted = _trained(machine, "data_parallel")
    capacity = int(_total(wanted.graph) * share)
    assert capacity > _largest(wanted.graph)
    with pytest.raises(MemoryExhausted, match=r"memory 'system.bounded'"):
        _trained(machine.bounded(capacity // 4), "data_parallel")
    found = _trained(machine.bounded(capacity), BoundedMemoryMapper())
    _equal(found, wanted)
    assert found.evictions > 0
    assert found.used[1] == capacity  # one arena for all traces, and no more


def _equal(found: Run, wanted: Run) -> None:
    assert found.state.keys() == wanted.state.keys()
    for name, array in wanted.state.items():
        np.testing.assert_array_equal(found.state[name], array, err_msg=name)


def test_following_a_plan_moves_fewer_bytes_than_evicting_blindly() -> None:
    machine = Machine.local(cpus=2)
    wanted = _trained(machine, "data_parallel")
    capacity = int(_total(wanted.graph) * 0.5)
    moved = []
    for planner in (None, least_recently_used):
        found = _trained(machine.bounded(capacity), BoundedMemoryMapper(planner))
        _equal(found, wanted)
        moved.append(found.bytes_copied)
    assert moved[1] < moved[0]
