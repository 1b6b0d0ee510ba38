"""The frontier of made-up problems, against trying everything."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers.frontier_models import rnn, transformer
from helpers.frontier_problems import SHAPES, brute, checked, small

from soapstone.search.parallel.frontier import algebra, tracking
from soapstone.search.parallel.frontier.spine import marked_spine
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Edge, Monoid, Operator, Problem
from soapstone.search.parallel.frontier.tracking import track
from soapstone.search.parallel.problem.operators import ParallelError

MONOIDS: list[tuple[Monoid, ...]] = [
    ("sum",),
    ("sum", "max"),
    ("sum", "sum", "max"),
    ("sum", "sum", "sum"),
    ("sum", "max", "sum", "max"),
]


@pytest.mark.parametrize("seed", range(60))
def test_the_frontier_is_that_of_all_strategies(seed: int) -> None:
    problem = small(seed)
    needed = brute(problem)
    for method, prune in itertools.product(("linear", "elimination"), (False, True)):
        result = track(problem, method=method, prune=prune, threads=1 + seed % 2)
        assert checked(problem, list(result)) == needed
        assert result.exact and result.error == 0


def test_every_elimination_is_exercised() -> None:
    counts: dict[str, int] = {}
    for seed in range(len(SHAPES)):
        for kind, many in track(small(seed), prune=False).eliminations.items():
            counts[kind] = counts.get(kind, 0) + many
    assert all(counts[kind] for kind in ("node", "edge", "branch", "linear")), counts


@pytest.mark.parametrize("monoids", MONOIDS, ids="-".join)
@pytest.mark.parametrize("shape", ["chain", "residual", "branches", "apart", "far"])
def test_other_costs_and_the_largest_of_blocks(shape: str, monoids: tuple[Monoid, ...]) -> None:
    problem = small(len(shape), SHAPES[shape], monoids, largest=6)
    needed = brute(problem)
    for method, prune in itertools.product(("linear", "elimination"), (False, True)):
        assert checked(problem, list(track(problem, method=method, prune=prune))) == needed
    apart = dataclasses.replace(problem, blocks=tuple(i % 2 for i in range(len(problem.operators))))
    assert checked(apart, list(track(apart))) == brute(apart)


@pytest.mark.parametrize("seed", range(12))
def test_coordinates_that_are_added_up_at_the_end(seed: int) -> None:
    monoids: tuple[Monoid, ...] = ("sum", "sum", "max")
    problem = small(seed, SHAPES[("residual", "far")[seed % 2]], monoids)
    problem = dataclasses.replace(problem, totals=((0,), (1, 2)))
    needed = brute(problem)
    for prune in (False, True):
        assert checked(problem, list(track(problem, prune=prune))) == needed


@pytest.mark.parametrize("seed", range(5, 30))
def test_an_error_that_is_certified_holds(seed: int) -> None:
    problem = small(seed, infeasible=0.05, largest=1000)
    needed = brute(problem)
    for prune, eps in itertools.product((False, True), (0.01, 0.1, 0.5)):
        result = track(problem, eps=eps, prune=prune)
        assert result.error <= eps
        points = np.array(checked(problem, list(result))).reshape(-1, 2)
        for point in needed:
            assert (points <= np.array(point) * (1 + result.error) + 1e-6).all(1).any()
        assert {tuple(row) for row in points.tolist()} == set(needed) or not result.exact


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [None, 20])
def test_an_error_that_is_certified_holds_where_the_largest_block_counts(
    seed: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is left is too much to go through, and bounds alone say what the error is."""
    if most is not None:
        monkeypatch.setattr(tracking, "STEPS", most)
        monkeypatch.setattr(tracking, "SPLITS", 0)
    shape = SHAPES[("chain", "residual", "far", "grid")[seed % 4]]
    problem = small(seed, shape, ("sum", "sum", "max"), infeasible=0.05, largest=1000)
    problem = dataclasses.replace(problem, totals=((0, 2), (1,)))
    needed = brute(problem)
    for eps in (0.02, 0.2):
        result = track(problem, eps=eps)
        assert most is not None or result.error <= eps
        points = np.array(checked(problem, list(result))).reshape(-1, 2)
        for point in needed if result.error < math.inf else ():
            assert (points <= np.array(point) * (1 + result.error) + 1e-6).all(1).any()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 7, 8, 9, 11])
def test_halves_of_a_problem_leave_out_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is left is too much to go through, until halves are not."""
    monkeypatch.setattr(tracking, "STEPS", 12)
    shape = SHAPES[("residual", "far", "grid", "full")[seed % 4]]
    problem = small(seed, shape, infeasible=0.05, largest=1000)
    needed = brute(problem)
    assert checked(problem, list(track(problem))) == needed
    for eps in (0.005, 0.05):
        result = track(problem, eps=eps)
        assert result.error <= eps
        points = np.array(checked(problem, list(result))).reshape(-1, 2)
        for point in needed:
            assert (points <= np.array(point) * (1 + result.error) + 1e-6).all(1).any()


@pytest.mark.parametrize("shape", ["residual", "branches", "parallel"])
def test_halves_have_bounds_of_each_total_alone_first(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning goes by them; halves whose bounds were in another order left out whole points."""
    monkeypatch.setattr(tracking, "STEPS", 5)
    monkeypatch.setattr(tracking, "WEIGHTS", (1,))
    for seed, eps in itertools.product(range(3), (0.02, 0.1)):
        problem = small(seed, SHAPES[shape], infeasible=0.05, largest=40)
        result = track(problem, eps=eps)
        assert result.error <= eps
        points = np.array(checked(problem, list(result))).reshape(-1, 2)
        for point in brute(problem):
            assert (points <= np.array(point) * (1 + result.error) + 1e-6).all(1).any()


def test_nothing_is_feasible() -> None:
    never = np.full((2, 2, 1, 2), INFEASIBLE)
    free = np.zeros((2, 1, 2), np.int64)
    both = np.array([0, 1])
    operators = [Operator("a", free), Operator("b", free)]
    for problem in (
        Problem(operators, [Edge(0, 1, both, both, never)]),
        Problem([Operator("a", never[0]), operators[1]], []),
    ):
        for prune in (False, True):
            result = track(problem, prune=prune)
            assert len(result) == 0 and result.exact


def test_threads_and_repetitions_change_nothing() -> None:
    problem = rnn(1, 3)
    one, two = (track(problem, eps=0.05, threads=threads) for threads in (1, 2))
    assert list(one) == list(two)
    assert checked(problem, list(one)) == [point.costs for point in two]


@pytest.mark.parametrize("seed", range(20))
def test_operators_are_split_where_tables_are_too_large(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "STEPS", 20)
    monkeypatch.setattr(tracking, "WEIGHTS", (1,))
    problem = small(seed)
    assert checked(problem, list(track(problem))) == brute(problem)


def test_what_many_blocks_read_is_halved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encoder's result, which each layer of a decoder reads: it is what makes it large."""
    monkeypatch.setattr(tracking, "STEPS", 20)
    monkeypatch.setattr(tracking, "WEIGHTS", (1,))
    halve, halved = tracking.Tracker._halved, list[int]()

    def noted(*args: Any) -> Any:
        op, better = halve(*args)
        halved.append(op)
        return op, better

    monkeypatch.setattr(tracking.Tracker, "_halved", noted)
    random = np.random.default_rng(0)
    own = [Operator(f"op{i}", random.integers(0, 90, (4, 1, 2))) for i in range(5)]
    each = np.arange(4)
    ends = [(0, 1), (1, 2), (2, 3), (3, 4), (1, 3), (1, 4)]
    edges = [Edge(i, j, each, each, random.integers(0, 90, (4, 4, 1, 2))) for i, j in ends]
    problem = Problem(own, edges)
    assert checked(problem, list(track(problem))) == brute(problem)
    assert halved[0] == 1


@pytest.mark.parametrize("prune", [False, True])
def test_heuristic_eliminations_are_reported(prune: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "STEPS", 20)
    monkeypatch.setattr(tracking, "SPLITS", 0)
    monkeypatch.setattr(tracking, "MOST_STEPS", 20)
    monkeypatch.setattr(tracking, "WEIGHTS", (1,))
    problem = small(4, SHAPES["full"], infeasible=0)
    result = track(problem, prune=prune)
    assert result.eliminations["heuristic"] and not result.exact and result.error == math.inf
    assert checked(problem, list(result))


def test_the_spine_passes_what_is_read_in_many_blocks() -> None:
    problem = transformer(3)
    edges = [(edge.writer, edge.reader) for edge in problem.edges]
    spine = marked_spine(len(problem.operators), edges)
    layers, decoders = 2 * 3, 3 * 3  # attention and feed-forward parts
    assert 1 in spine.far and len(spine.far) == 2
    assert len(spine.marked) >= layers + decoders
    assert marked_spine(3, [(0, 1), (1, 2)]).marked == (0, 1, 2)
    assert marked_spine(4, [(0, 1), (1, 2), (0, 2), (2, 3)]).blocks == (0, 1, 1, 2)


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_keeps_the_points_that_are_known(seed: int) -> None:
    problem, joins = small(seed), list[int]()
    whole = list(track(problem, progress=lambda done, of, points: joins.append(done)))
    for stop in range(1, len(joins) + 1, max(1, len(joins) // 10)):
        seen = list[int]()

        def interrupt(
            done: int, of: int, points: int, seen: list[int] = seen, stop: int = stop
        ) -> None:
            seen.append(done)
            if len(seen) == stop:
                raise KeyboardInterrupt

        found = track(problem, progress=interrupt)
        assert checked(problem, list(found)) and not found.exact and found.error == np.inf
        for point in found:  # a trade-off that there is, no better than the frontier
            assert any(
                all(one <= other for one, other in zip(each.costs, point.costs)) for each in whole
            )
    assert checked(problem, list(track(problem))) == brute(problem)


def test_bad_input_is_named() -> None:
    own = np.zeros((2, 1, 2), np.int64)
    operators = [Operator("fc1", own), Operator("fc2", own)]
    both = np.array([0, 1])
    table = np.zeros((2, 2, 1, 2), np.int64)
    for make, text in (
        (lambda: Problem([], []), "found none"),
        (lambda: Problem(operators, [], ("sum",)), r"'fc1': costs of shape \(2, 1, 2\)"),
        (lambda: Problem(operators, [Edge(1, 0, both, both, table)]), "from operator 1 to 0"),
        (lambda: Problem(operators, [Edge(0, 1, both + 1, both, table)]), "rows of numbers 1 to 2"),
        (lambda: Problem([Operator("x", own - 1)], []), "cost of -1"),
        (lambda: Problem(operators, [], totals=((0,),)), "totals"),
        (lambda: Problem(operators, [], blocks=(0,)), "1 blocks found, 2"),
        (lambda: Problem([Operator("x", own + (1 << 59))], []), "use larger units"),
        (lambda: track(Problem(operators, []), eps=2.0), "eps of 2.0"),
        (lambda: track(Problem(operators, []), threads=0), "0 threads"),
        (lambda: track(Problem(operators, []), method="best"), "method 'best'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ParallelError, match=text):
            make()


@pytest.mark.parametrize("coordinates", [1, 2, 3, 4])
def test_reduce_keeps_one_of_equal_vectors_and_none_that_is_covered(coordinates: int) -> None:
    random = np.random.default_rng(coordinates)
    for count in (0, 1, 7, 60):
        costs = random.integers(0, 9, (count, coordinates))
        rows = sorted({tuple(row) for row in costs.tolist()})
        needed = [
            row
            for row in rows
            if not any(o != row and all(a <= b for a, b in zip(o, row)) for o in rows)
        ]
        assert [tuple(row) for row in costs[algebra.reduce(costs)].tolist()] == needed
