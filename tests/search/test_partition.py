"""Cuts of graphs: features by prefix sums, regression, splits against brute force, learning."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.generate import rmat
from soapstone.ir.tensor import Array
from soapstone.search.partition import features as features_module
from soapstone.search.partition.costs import Costs
from soapstone.search.partition.cuts import (
    PartitionError,
    equal_edges,
    equal_vertices,
    least_largest,
)
from soapstone.search.partition.features import FEATURES, LINE, Features
from soapstone.search.partition.partitioner import Partitioner, slowest
from soapstone.search.partition.regression import Regression, nonnegative


def features_of(graph: Adjacency, *widths: int) -> Features:
    forward, backward = (graph.indptr, graph.indices), (graph.indptr_t, graph.indices_t)
    return Features.of(forward, backward, widths)


def shuffled(graph: Adjacency, seed: int = 0) -> Adjacency:
    ids = np.random.default_rng(seed).permutation(graph.vertices)
    return Adjacency.from_edges(ids[graph.indices], ids[graph.targets], graph.vertices)


# -- features


def lines(words: int) -> int:
    return -(-words // LINE)


def of_vertex(ids: list[int], width: int) -> list[int]:
    """Return the neighbours, blocks, and lines of a vertex, one neighbour after the other."""
    blocks: list[list[int]] = []
    for one in ids:
        if blocks and one == blocks[-1][-1] + 1:
            blocks[-1].append(one)
        else:
            blocks.append([one])
    sizes = [len(block) for block in blocks]
    by_row = sum(lines(size * width) for size in sizes)
    return [len(ids), len(blocks), sum(lines(size) for size in sizes), by_row]


def by_hand(graph: Adjacency, first: int, past: int, width: int) -> Array:
    total = np.zeros(len(FEATURES))
    sides = ((graph.indptr, graph.indices), (graph.indptr_t, graph.indices_t))
    for vertex in range(first, past):
        found = [1]
        for indptr, indices in sides:
            found += of_vertex(indices[indptr[vertex] : indptr[vertex + 1]].tolist(), width)
        total[:-2] += found
    total[-2:] = 1
    return total


@pytest.mark.parametrize("at_once", [1, 7, 1 << 22])
def test_features_of_ranges_are_sums_over_vertices(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "_AT_ONCE", at_once)
    random = np.random.default_rng(1)
    sources, targets = random.integers(0, 37, (2, 400))
    graph = Adjacency.from_edges(sources, np.minimum(targets, 30), 40)  # equal edges, none to many
    found = features_of(graph, 5, 16, 5)
    cuts = (0, 3, 3, 21, 40)
    for layer, width in enumerate((5, 16, 5)):
        wanted = [by_hand(graph, a, b, width) for a, b in pairwise(cuts)]
        np.testing.assert_array_equal(found.parts(cuts)[layer], wanted)
    firsts = found.parts(cuts, [True, False, True, False])[1, :, -2:]
    assert firsts.T.tolist() == [[1, 0, 1, 0], [1, 1, 1, 1]]


def test_features_of_the_example_of_the_thesis() -> None:
    graph = Adjacency.from_edges([3, 4, 6, 8], [1, 1, 1, 1], 9)
    found = dict(zip(FEATURES, features_of(graph, 32).parts((1, 2))[0, 0]))
    assert (found["neighbours"], found["blocks"]) == (4, 3)
    assert found["lines of rows"] == 4 * 32 / LINE


def test_a_graph_without_edges_has_vertices() -> None:
    none = features_of(Adjacency.from_edges([], [], 5), 3)
    np.testing.assert_array_equal(none.parts((0, 2, 5))[0, :, 0], [2, 3])
    assert none.sums[0][:, 1:].max() == 0
    assert none.parts((0, 2, 5))[0, :, -1].tolist() == [1, 1]
    assert Partitioner(none, 5, "edge").cuts == (0, 1, 2, 3, 4, 5)


# -- cuts


def brute(sums: Array, own: Array) -> float:
    inner = combinations(range(1, len(sums) - 1), len(own) - 1)
    return min((np.diff(sums[[0, *cuts, len(sums) - 1]]) + own).max() for cuts in inner)


@pytest.mark.parametrize("seed", range(40))
def test_largest_part_is_that_of_all_cuts(seed: int) -> None:
    random = np.random.default_rng(seed)
    vertices = int(random.integers(1, 13))
    kind = seed % 4
    costs = random.random(vertices) ** 6 if kind < 2 else random.integers(0, 4, vertices)
    if kind == 3:
        costs = np.where(random.random(vertices) < 0.8, 0, costs)
    sums = np.concatenate([[0], np.cumsum(costs)])
    for parts in range(1, vertices + 1):
        cuts = least_largest(sums, parts)
        assert cuts[0] == 0 and cuts[-1] == vertices and len(cuts) == parts + 1
        assert min(np.diff(cuts)) >= 1
        least = brute(sums, np.zeros(parts))
        assert np.diff(sums[list(cuts)]).max() == pytest.approx(least, rel=1e-9)


def test_what_parts_cost_besides_their_vertices_counts() -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        sums = np.concatenate([[0], np.cumsum(random.random(12) + 0.5)])
        own = random.random(3)
        cuts = list(least_largest(sums, 3, own))
        assert (np.diff(sums[cuts]) + own).max() == pytest.approx(brute(sums, own), rel=1e-9)


def test_baselines_have_as_many_vertices_or_edges() -> None:
    graph = rmat(500, 20_000)
    assert equal_vertices(500, 4) == (0, 125, 250, 375, 500)
    edges = np.diff(graph.indptr[list(equal_edges(graph.indptr, 4))])
    assert edges.max() <= graph.edges / 4 + graph.in_degrees.max()


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda: equal_vertices(3, 4), "4 parts found for 3 vertices"),
        (lambda: equal_edges(np.array([0, 2, 5]), 0), "0 parts found for 2 vertices; 1 to 2"),
        (lambda: least_largest(np.zeros(1), 1), "1 parts found for 0 vertices"),
        (lambda: least_largest(np.array([0.0, 2.0, 1.0]), 2), "cost -1.0 of vertex 1"),
        (lambda: least_largest(np.array([0.0, np.nan, 1.0]), 2), "of vertex 0"),
        (lambda: Partitioner(features_of(rmat(4, 9), 2), 5), "5 parts found for 4 vertices"),
        (lambda: Partitioner(features_of(rmat(4, 9), 2), 2, "metis"), "partitioner 'metis'"),
        (
            lambda: Partitioner(features_of(rmat(4, 9), 2), 2, costs=Costs.of(3)),
            "those of 3 layers found, of 1 needed",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(cut: Callable[[], Any], said: str) -> None:
    with pytest.raises(PartitionError, match=said):
        cut()


# -- regression


@pytest.mark.parametrize("seed", range(30))
def test_weights_are_the_best_of_all_that_are_not_negative(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, columns = random.standard_normal((20, 6)), 6
    if seed % 3 == 0:
        rows[:, 3] = 2 * rows[:, 1]  # collinear
    wanted = random.standard_normal(20)
    rows = np.vstack([rows, 0.03 * np.eye(columns)])  # a ridge
    wanted = np.append(wanted, np.zeros(columns))
    found = nonnegative(rows.T @ rows, rows.T @ wanted)
    assert found.min() >= 0
    best = float(wanted @ wanted)
    for free in product((False, True), repeat=columns):
        tried, *_ = np.linalg.lstsq(rows[:, free], wanted, rcond=None)
        if tried.min(initial=0) >= 0:
            best = min(best, float(((rows[:, free] @ tried - wanted) ** 2).sum()))
    assert float(((rows @ found - wanted) ** 2).sum()) == pytest.approx(best, rel=1e-9)


def learned(graph: Adjacency, true: Array, width: int) -> tuple[Regression, Array]:
    """Return what is learned of a few partitions of a graph whose costs are linear, and those."""
    found = features_of(graph, width)
    regression = Regression.of(len(FEATURES))
    for parts in (2, 3):
        for cuts in (equal_vertices(graph.vertices, parts), equal_edges(graph.indptr, parts)):
            for each in found.parts(cuts)[0]:
                regression = regression.seen(each, float(each @ true))
    return regression, found.sums[0]


@pytest.mark.parametrize("width", [5, 32])  # whole lines: rows of lines are 2 of neighbours
@pytest.mark.parametrize("shuffle", [False, True])  # no neighbours are consecutive
def test_collinear_features_predict_other_graphs(width: int, shuffle: bool) -> None:
    true = np.array([900.0, 20, 40, 0, 3, 15, 0, 0, 2, 0, 0])
    graphs = rmat(3000, 60_000), rmat(5000, 40_000, seed=5)
    one, other = (shuffled(graph) if shuffle else graph for graph in graphs)
    regression, sums = learned(one, true, width)
    assert regression.weights.min() >= 0
    for found in (sums, features_of(other, width).sums[0]):
        wanted = found[-1] @ true
        assert found[-1] @ regression.weights == pytest.approx(wanted, rel=0.05)


def test_full_rank_is_least_squares() -> None:
    random = np.random.default_rng(0)
    rows, true = random.random((30, len(FEATURES))) + 0.1, random.random(len(FEATURES)) + 0.5
    regression = Regression.of(len(FEATURES))
    for row in rows:
        regression = regression.seen(row, float(row @ true))
    np.testing.assert_allclose(regression.weights, true, rtol=1e-3)
    reference, *_ = np.linalg.lstsq(rows / (rows @ true)[:, None], np.ones(30), rcond=None)
    np.testing.assert_allclose(regression.weights, reference, rtol=1e-3)


# -- learning

_TRUE = np.array(
    [[200.0, 9, 14, 1, 6, 5, 3, 0, 2, 0, 4e4], [150.0, 3, 4, 0, 1, 2, 3, 0, 1, 0, 3e4]]
)  # two layers


def run(partitioner: Partitioner, noise: float = 0.0) -> int:
    """Observe steps until cuts are settled; return how many steps that took."""
    random, steps = np.random.default_rng(0), 0
    while not partitioner.settled:
        ns = np.einsum("lpf,lf->lp", partitioner.features.parts(partitioner.cuts), _TRUE)
        partitioner.observe(ns * (1 + noise * random.random(ns.shape)))
        steps += 1
    return steps


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("parts", [2, 8])
def test_cuts_settle_where_parts_take_as_long(parts: int, shuffle: bool) -> None:
    graph = rmat(6000, 120_000, seed=3)
    graph = shuffled(graph) if shuffle else graph
    partitioner = Partitioner(features_of(graph, 16, 7), parts)
    assert run(partitioner) <= 60
    measured = {cuts: slowest(ns) for cuts, ns in partitioner.measured.items()}
    assert measured[partitioner.cuts] == min(measured.values())
    np.testing.assert_allclose(
        partitioner.predicted(), partitioner.measured[partitioner.cuts], rtol=0.1
    )
    if parts == 2:
        sums = np.stack([s @ w for s, w in zip(partitioner.features.sums, _TRUE)])
        steps = np.maximum(sums, sums[:, -1:] - sums).sum(axis=0)  # of all places to cut at
        assert measured[partitioner.cuts] <= 1.03 * steps.min()
    if not shuffle:
        simple = slowest(partitioner.measured[equal_vertices(6000, parts)])
        assert simple > 1.2 * measured[partitioner.cuts]


def test_a_processors_first_part_may_take_longer() -> None:
    partitioner = Partitioner(features_of(rmat(6000, 120_000, seed=3), 16, 7), 8)
    partitioner.processors, true = 2, _TRUE.copy()
    true[:, -2] = 2e5  # what equal parts of a layer take is 4e5
    first = [part % 4 == 0 for part in range(8)]
    while not partitioner.settled:
        rows = partitioner.features.parts(partitioner.cuts, first)
        partitioner.observe(np.einsum("lpf,lf->lp", rows, true))
    spent = partitioner.measured[partitioner.cuts]
    np.testing.assert_allclose(partitioner.predicted(), spent, rtol=0.05)
    assert slowest(spent) < 1.1 * spent.mean(axis=1).sum()


def test_noise_leaves_the_best_that_was_measured() -> None:
    partitioner = Partitioner(features_of(rmat(2000, 30_000), 16, 7), 4)
    run(partitioner, noise=0.5)
    best = min(map(slowest, partitioner.measured.values()))
    assert slowest(partitioner.measured[partitioner.cuts]) == best
    assert str(partitioner).count("\n") == 5


def test_disturbed_steps_are_not_learned_from() -> None:
    partitioner = Partitioner(features_of(rmat(2000, 30_000), 16, 7), 2)
    first, steps = partitioner.cuts, 0
    ns = np.einsum("lpf,lf->lp", partitioner.features.parts(first), _TRUE)
    while not partitioner.measured:
        quiet = steps % 2 == 0
        partitioner.observe(ns * (1 + steps if quiet else 0.5), disturbed=not quiet)
        steps += 1
    assert steps == 9  # one to warm up, and of those that follow every other
    np.testing.assert_array_equal(partitioner.measured[first], 3 * ns)
    again, steps = Partitioner(partitioner.features, 2), 0
    while not again.measured:
        again.observe(ns * (40 - steps), disturbed=True)
        steps += 1
    np.testing.assert_array_equal(again.measured[first], (41 - steps) * ns)


def test_a_partition_that_is_not_understood_is_run_again() -> None:
    partitioner = Partitioner(features_of(rmat(2000, 30_000), 16, 7), 2)
    seen = list[tuple[int, ...]]()
    while not partitioner.settled:
        seen.append(partitioner.cuts)
        ns = np.ones((2, 2))
        ns[:, len(set(seen)) % 2] = 5.0  # costs that no features have
        partitioner.observe(ns)
    assert len(set(seen)) < 12
    assert len(seen) == 12 * 5  # all that there are: predictions stay far off


def test_what_was_learned_cuts_another_graph_at_once(tmp_path: Path) -> None:
    teacher = Partitioner(features_of(rmat(6000, 120_000), 16, 7), 2)
    run(teacher)
    teacher.costs.save(tmp_path / "costs.json")
    other = features_of(rmat(4000, 50_000, seed=9), 16, 7)
    pupil = Partitioner(other, 8, costs=Costs.load(tmp_path / "costs.json"))
    spent = np.einsum("lpf,lf->p", other.parts(pupil.cuts), _TRUE)
    assert spent.max() <= 1.1 * spent.mean()
    simple = np.einsum("lpf,lf->p", other.parts(equal_vertices(4000, 8)), _TRUE)
    assert simple.max() > 1.2 * spent.max()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(layers=[]), "'layers'"),
        (lambda d: d.update(features=["vertices"]), "'features'"),
        (lambda d: d["layers"][0].update(products=[1.0]), r"layers\[0\].*'products'.*11 finite"),
        (lambda d: d["layers"][0]["squares"].__setitem__(0, [1.0] * 11), "symmetric"),
        (lambda d: d["layers"][1].pop("count"), "'count' is missing"),
        (lambda d: d.update(version=9), "'version'"),
    ],
)
def test_wrong_files_of_costs_are_refused(
    tmp_path: Path, change: Callable[[Any], object], said: str
) -> None:
    path = tmp_path / "costs.json"
    teacher = Partitioner(features_of(rmat(100, 900), 16, 7), 2)
    run(teacher)
    teacher.costs.save(path)
    data = json.loads(path.read_text())
    assert Costs.load(path).weights.tolist() == teacher.costs.weights.tolist()
    path.write_text(path.read_text().replace('"count": ', '"count": 1'))
    with pytest.raises(PartitionError, match="damaged"):
        Costs.load(path)
    del data["checksum"]
    change(data)
    path.write_text(json.dumps(data))
    with (
        pytest.warns(UserWarning, match="no checksum"),
        pytest.raises(PartitionError, match=rf"costs.json.*{said}"),
    ):
        Costs.load(path)
