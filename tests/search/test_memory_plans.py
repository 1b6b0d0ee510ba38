"""Memory plans by a search: optimal, packed, never worse than the baselines, honest about gaps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.ir_examples import training
from helpers.memory_optimum import optimum, random_graph

from soapstone.deadline import Deadline
from soapstone.frontend.memory_plans import launched
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.errors import GraphError
from soapstone.ir.plan import Action
from soapstone.search.placement import baselines
from soapstone.search.placement.find import METHODS, memory_plan
from soapstone.search.placement.neighbourhood import improved
from soapstone.search.placement.optimal import Problem, fewest_bytes, search
from soapstone.search.placement.timeline import Timeline, timeline

ROOMY = 1 << 40


def tight(graph_seed: int, share: float = 0.3, workspace: int = 0) -> Timeline:
    """Return the timeline of a random graph, little above what its largest node needs."""
    graph = random_graph(graph_seed)
    beside = {graph.nodes[0].name: workspace}
    roomy = timeline(graph, ROOMY, workspace=beside)
    least, most = int(roomy.needs.max()), sum(roomy.padded.values())
    return roomy.within(int(least + share * max(0, most - least)) // 64 * 64)


@pytest.mark.parametrize("seed", range(24))
def test_the_bytes_are_the_optimum_of_single_copies(seed: int) -> None:
    known = tight(seed, (0.0, 0.15, 0.4)[seed % 3], workspace=64 * (seed % 2))
    found = fewest_bytes(known, set())
    assert found.exact
    graph = random_graph(seed)
    beside = {graph.nodes[0].name: 64 * (seed % 2)}
    wanted = optimum(graph, known.capacity_bytes, beside, any_order=False)
    assert found.moved_bytes == wanted


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_plans_run_every_node_in_the_capacity(method: str, share: float) -> None:
    graph = training()
    roomy = timeline(graph, ROOMY)
    least, most = int(roomy.needs.max()), sum(roomy.padded.values())
    found = memory_plan(graph, int(least + share * (most - least)), method)
    assert found.plan.peak_bytes <= found.plan.capacity_bytes
    assert found.lower_bound_bytes <= found.transfer_bytes <= found.streaming_bytes
    if method == "dp":
        assert found.transfer_bytes <= found.lru_bytes
    ran = [step.name for step in found.plan.steps if step.action is Action.RUN]
    assert sorted(ran) == sorted(node.name for node in graph.nodes)
    if share == 1 and method != "stream":
        assert found.exact and found.transfer_bytes == roomy.least_bytes
    for name in ran:
        assert name in str(found)


def test_a_narrow_search_tells_a_bound_below_the_optimum() -> None:
    gaps = 0
    for seed in range(8):
        known = tight(seed, 0.1)
        best = fewest_bytes(known, set())
        beam = fewest_bytes(known, set(), widths=(1,))
        assert beam.lower_bound_bytes <= best.moved_bytes <= beam.moved_bytes
        gaps += not beam.exact
    assert gaps  # some were cut, or nothing was shown


def test_a_search_without_time_returns_the_best_known() -> None:
    known = tight(3, 0.1)
    start = baselines.kept_by(known, baselines.latest)
    found = fewest_bytes(known, start, deadline=Deadline(0.0))
    assert found.moved_bytes <= known.moved_bytes(start)
    assert found.lower_bound_bytes >= known.least_bytes


@pytest.mark.parametrize("seed", range(8))
def test_choices_near_another_are_better_and_fit(seed: int) -> None:
    known = tight(seed, 0.2)
    best = fewest_bytes(known, set())
    found = improved(known, set(), best.lower_bound_bytes, deadline=Deadline(5.0))
    assert best.moved_bytes <= known.moved_bytes(set(found)) <= known.moved_bytes(set())
    assert improved(known, best.gaps, best.lower_bound_bytes, deadline=Deadline()) == best.gaps
    taken = np.zeros(len(known.order), np.int64)
    for gap in found:
        taken[gap.first + 1 : gap.last] += known.padded[gap.value]
    assert (taken + known.needs <= known.capacity_bytes).all()


def test_a_choice_by_worth_is_near_the_best_and_nothing_worse_is_found_after_it() -> None:
    moved = {"greedy": 0, "best": 0, "none": 0}
    for seed in range(20):
        known = tight(seed, 0.2)
        best = fewest_bytes(known, set())
        problem = Problem(known)
        prices, _ = problem.prices(known.moved_bytes(set()), 25, Deadline())
        greedy = problem.greedy(prices)
        limit = known.moved_bytes(greedy)
        assert (
            search(problem, prices, problem.bound(prices), best.moved_bytes, 64, Deadline())[0]
            is None
        )
        moved["greedy"] += limit
        moved["best"] += best.moved_bytes
        moved["none"] += known.moved_bytes(set())
    assert moved["best"] <= moved["greedy"] < moved["none"]


def test_results_and_values_copied_out_before_are_written_once() -> None:
    for seed in range(10):
        known = tight(seed, 0.0)
        plan = memory_plan(known.footprint, known.capacity_bytes).plan
        out = [step.name for step in plan.steps if step.action is Action.EVICT]
        assert len(out) == len(set(out))
        assert known.footprint.results <= set(out)


def test_too_little_memory_and_unknown_methods_are_named() -> None:
    graph = training()
    with pytest.raises(GraphError, match=r"'w1.sgd': uses 768 bytes .* 600 found .* 168 more"):
        memory_plan(graph, 600)
    with pytest.raises(GraphError, match=r"'fc1': uses 1\d{5} bytes"):
        memory_plan(graph, 100_000, workspace={"fc1": 100_000})
    with pytest.raises(GraphError, match=r"method 'mru' found; dp, lru, stream, belady needed"):
        memory_plan(graph, 100_000, "mru")


def test_lru_without_liveness_copies_out_what_is_dead() -> None:
    moved = {True: 0, False: 0}
    for seed in range(20):
        known = tight(seed, 0.1)
        for liveness in moved:
            plan = baselines.least_recently_used(
                known.footprint, known.capacity_bytes, liveness=liveness
            )
            moved[liveness] += plan.moved_bytes
    assert moved[True] < moved[False]


def test_where_one_node_fills_the_memory_others_still_keep_what_they_share() -> None:
    footprint = launched(graph_of("gat", 200, sizes={"hidden": 16}), 2)
    capacity = int(timeline(footprint, 1 << 40).needs.max())
    streamed = baselines.stream(footprint, capacity).moved_bytes
    for plan in (baselines.least_recently_used, baselines.furthest_use):
        assert plan(footprint, capacity).moved_bytes < streamed / 2
