"""Plans that compute values twice: the best set on small graphs, and times as the steps tell."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from soapstone.engine.carry import carry_out
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Initial
from soapstone.ir.plan import Action, MemoryPlan, Step
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.strategy.recomputation import recomputable
from soapstone.ir.tensor import Role
from soapstone.ir.training.autodiff import gradients
from soapstone.search.placement.find import memory_plan, orders
from soapstone.search.placement.optimal import fewest_bytes
from soapstone.search.placement.recomputation import FEW, recomputing
from soapstone.search.placement.timeline import Gap, Timeline, timeline
from soapstone.search.placement.timing import Times, step_us


def chain(seed: int, layers: int) -> Graph:
    """Return a training step of products and pointwise operators of random widths."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"chain{seed}")
    value, width, weights = builder.input("x", (48, 8)), 8, []
    for number in range(layers):
        wide = int(random.integers(1, 5)) * 8
        initial = Initial("uniform", 0.5)
        name = f"w{number}"
        builder.input(name, (width, wide), role=Role.PARAMETER, initial=initial)
        (value,) = builder.apply("matmul", value, name, name=f"fc{number}")
        (value,) = builder.apply("tanh", value, name=f"tanh{number}")
        weights.append(name)
        width = wide
    (loss,) = builder.apply("reduce_sum", value, name="loss", axes=(0, 1))
    builder.input("lr", (), role=Role.SCALAR, initial=Initial("constant", 0.1))
    grads = gradients(builder, loss, weights)
    (ok,) = builder.apply("is_finite", loss, name="ok")
    for name in weights:
        made = builder.apply("sgd", name, grads[name], "lr", ok, name=f"{name}.sgd", momentum=0.0)
        builder.update(name, made[0])
    builder.output(loss)
    return builder.build()


def carried(graph: Graph, values: Collection[str]) -> Footprint:
    """Return the footprint of a graph that recomputes values."""
    return Footprint.of(
        carry_out(graph, Strategy(tensors=dict.fromkeys(values, Keep.RECOMPUTE)))[0]
    )


def untimed(graph: Graph, values: Collection[str]) -> tuple[Footprint, None]:
    return carried(graph, values), None


def values_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    known = recomputable(graph)
    inputs = {value: graph.producers[value].inputs for value in known}
    return {v: tuple(x for x in inputs[v] if x in inputs) for v in known}


def brute_force(known: Timeline) -> int:
    """Return the fewest bytes that any choice of gaps moves that fits."""
    gaps = sorted(known.gaps, key=lambda gap: gap.last - gap.first)
    free = known.capacity_bytes - known.needs
    best = known.moved_bytes(set())

    def decided(number: int, kept: set[Gap], room: np.ndarray[Any, Any], lost: int) -> None:
        nonlocal best
        if known.least_bytes + lost >= best:
            return
        if number == len(gaps):
            best = min(best, known.moved_bytes(kept))
            return
        gap = gaps[number]
        left = room.copy()
        left[gap.first + 1 : gap.last] -= known.padded[gap.value]
        if (left >= 0).all():
            decided(number + 1, kept | {gap}, left, lost)
            if gap.last == gap.first + 1:
                return
        decided(number + 1, kept, room, lost + known.prices[gap].fetch)

    decided(0, set(), free, 0)
    return best


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_few_values_are_recomputed_as_brute_force_has_it(seed: int) -> None:
    graph = chain(seed, 2)
    values = values_of(graph)
    assert 0 < len(values) <= FEW
    known = timeline(carried(graph, ()), 1 << 40)
    least, most = int(known.needs.max()), known.working_set_bytes
    capacity = least + (most - least) * (seed % 3) // 4
    found = recomputing(values, partial(untimed, graph), capacity)
    moved = {}
    for size in range(len(values) + 1):
        for some in combinations(values, size):
            try:
                tried = orders(timeline(carried(graph, some), capacity))
            except GraphError:
                continue
            fewest = [brute_force(order) for order in tried]
            assert fewest == [fewest_bytes(order, set()).moved_bytes for order in tried]
            moved[some] = memory_plan(carried(graph, some), capacity).transfer_bytes
            assert min(fewest) <= moved[some]  # which is packed too
    assert found.all_sets and found.sets == 2 ** len(values)
    assert found.transfer_bytes == min(moved.values())
    assert found.without_bytes == moved[()]
    found.plan.check(carried(graph, found.plan.recomputed))
    assert MemoryPlan.from_json(found.plan.to_json()) == found.plan


def test_recomputation_copies_less_in_some_of_these() -> None:
    better = 0
    for seed in range(2):
        graph = chain(seed, 8)
        values = values_of(graph)
        assert len(values) > FEW
        known = timeline(carried(graph, ()), 1 << 40)
        capacity = (int(known.needs.max()) + known.working_set_bytes) // 2
        found = recomputing(values, partial(untimed, graph), capacity, "belady")
        assert found.without_bytes is not None and not found.all_sets
        assert found.transfer_bytes <= found.without_bytes
        better += found.transfer_bytes < found.without_bytes
    assert better


def timed(footprint: Footprint, us: float, rate: float, overlapped: bool = False) -> Times:
    return Times({node.name: us for node in footprint.nodes}, 0.5, rate, overlapped)


def test_time_is_minimised_where_nodes_cost_more_than_copies() -> None:
    graph = chain(1, 2)
    values = values_of(graph)
    known = timeline(carried(graph, ()), 1 << 40)
    capacity = (int(known.needs.max()) + known.working_set_bytes) // 2

    def best(us: float, rate: float) -> tuple[int, float, float]:
        found = recomputing(
            values,
            lambda some: (carried(graph, some), timed(carried(graph, some), us, rate)),
            capacity,
            minimize="time",
        )
        assert found.step_us is not None and found.without_us is not None
        assert found.least_us is not None and found.least_us <= found.step_us <= found.without_us
        return len(found.plan.recomputed), found.step_us, found.without_us

    slow_nodes, cheap_nodes = best(1e6, 1e6), best(1e-3, 1.0)
    assert slow_nodes[0] == 0
    assert cheap_nodes[0] > 0 and cheap_nodes[1] < cheap_nodes[2]


def test_copies_run_beside_nodes_once_their_bytes_are_free() -> None:
    def plan(second: int) -> MemoryPlan:
        return MemoryPlan(
            300,
            (
                Step(Action.FETCH, "a", 100, 0),
                Step(Action.ALLOCATE, "b", 100, 100),
                Step(Action.RUN, "one"),
                Step(Action.FREE, "a", 100, 0),
                Step(Action.FETCH, "c", 100, second),
                Step(Action.RUN, "two"),
                Step(Action.EVICT, "b", 100, 100),
                Step(Action.FREE, "c", 100, second),
            ),
        )

    alone = Times({"one": 30.0, "two": 5.0}, 0.0, 10.0)
    beside = replace(alone, overlapped=True)
    assert step_us(plan(0), alone) == step_us(plan(200), alone) == 30 + 5 + 3 * 10
    assert step_us(plan(0), beside) == 10 + 30 + 10 + 5 + 10  # the bytes of a are free after one
    assert step_us(plan(200), beside) == 10 + 30 + 5 + 10  # c comes while one runs
    assert alone.least_us(300) <= 65 and beside.least_us(300) <= 55


@pytest.mark.long
def test_bytes_wait_for_copies_where_that_saves_time() -> None:
    graph = chain(3, 4)
    footprint = carried(graph, ())
    known = timeline(footprint, 1 << 40)
    capacity = (int(known.needs.max()) + known.working_set_bytes) // 2
    times = timed(footprint, 20.0, 100.0, overlapped=True)
    by_bytes = memory_plan(footprint, capacity, times=times)
    by_time = memory_plan(footprint, capacity, minimize="time", times=times)
    assert by_time.step_us is not None and by_bytes.step_us is not None
    assert (
        by_time.step_us
        <= by_bytes.step_us
        < step_us(by_bytes.plan, replace(times, overlapped=False))
    )
    assert by_bytes.transfer_bytes <= by_time.transfer_bytes


def test_time_without_times_is_refused() -> None:
    with pytest.raises(GraphError, match="minimize 'time' found; bytes, or time and times"):
        memory_plan(carried(chain(0, 2), ()), 1 << 20, minimize="time")
    with pytest.raises(GraphError, match="minimize 'speed' found"):
        memory_plan(carried(chain(0, 2), ()), 1 << 20, minimize="speed")
