"""Images: parts whose memories are apart get the rows that their edges name, and no others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from soapstone import Adam, Model
from soapstone.apps.graphs import gat, gcn, sage
from soapstone.engine.images import Image
from soapstone.engine.required_memory import required_memory
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.generate import Shape, block_model
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select
from soapstone.mappers.ranges import RangesMapper
from soapstone.native.memory import run
from soapstone.runtime import Machine

DATA = block_model(Shape(90, 200, 12, 3), signal=1.0, skew=1.8, seed=2)
CUTS = (0, 20, 45, 46, 90)


def random_graph(seed: int) -> Adjacency:
    random = np.random.default_rng(seed)
    vertices = int(random.integers(2, 40))
    sources, targets = random.integers(0, vertices, (2, int(random.integers(0, 120))))
    return Adjacency.from_edges(sources, targets, vertices)


@pytest.mark.parametrize("seed", range(20))
def test_images_are_the_rows_that_edges_name(seed: int) -> None:
    graph, random = random_graph(seed), np.random.default_rng(seed)
    inner = np.sort(random.integers(0, graph.vertices + 1, 3)).tolist()
    cuts, moved = (0, *inner, graph.vertices), 0
    image = Image.of(graph.indptr, graph.indices, cuts)
    for part, (first, past) in enumerate(pairwise(cuts)):
        held = slice(graph.indptr[first], graph.indptr[past])
        rows = image.rows[image.starts[part] : image.starts[part + 1]]
        assert rows.tolist() == sorted(set(graph.indices[held].tolist()))
        np.testing.assert_array_equal(rows[image.entries[held]], graph.indices[held])
        for home, (a, b) in enumerate(pairwise(cuts)):
            own = image.rows[image.homes[part, home] : image.homes[part, home + 1]]
            assert own.tolist() == [row for row in rows if a <= row < b]
            moved += len(own) * (home != part)
    assert image.moved == moved
    one = Image.of(graph.indptr, graph.indices, cuts, mine={2})
    held = slice(graph.indptr[cuts[2]], graph.indptr[cuts[3]])
    np.testing.assert_array_equal(one.entries[held], image.entries[held])


NETWORKS: dict[str, Callable[[int, GraphData], Model]] = {
    "gcn": lambda count, data: gcn.build(count, data, hidden=4),
    "mean": lambda count, data: sage.build(count, data, hidden=4, reduction="mean"),
    "max": lambda count, data: sage.build(count, data, hidden=4, reduction="max"),
    "gat": lambda count, data: gat.build(count, data, hidden=4, heads=2),
    "gat, nothing dropped": lambda count, data: gat.build(
        count, data, hidden=4, heads=2, dropout=0.0
    ),
}


def trained(
    data: GraphData, memories: int, cuts: tuple[int, ...], cpus: int = 2, network: str = "gcn"
) -> Any:
    """Return losses, what a step copies of images, and the bytes of memories: used, planned."""
    splits, machine = data.splits(), Machine.local(cpus=cpus, memories=memories)
    copied: dict[str, int] = {}
    with NETWORKS[network](data.adjacency.vertices, data) as model:
        mapper = RangesMapper(cuts)
        model.compile(Adam(0.02), "masked_cross_entropy", mapper=mapper, machine=machine, seed=3)
        given = {"epochs": 4, "shuffle": False, "progress": False}
        found = model.fit(splits.train_x, splits.train_y, **given)
        bound = model.trainer.bound("train", model.batch_size)
        packed = {a.region for launch in bound.program.launches for a in launch.arguments}
        names = {f"copy {name}": name for name in packed if name.endswith(".image")}
        timeline = bound.trace.replay(profile=True)
        assert timeline is not None
        for event in timeline.events:
            if event.category == "copy" and event.name in names:
                copied[names[event.name]] = copied.get(names[event.name], 0) + event.nbytes
        used = model.trainer.session.used_bytes
        planned = required_memory(model.training_graph, model.strategy, machine, model.constants)
    return [record["loss"] for record in found.epochs], copied, used, planned


def test_memories_apart_give_the_same_bits_for_the_rows_needed() -> None:
    losses, copied, *_ = trained(DATA, 1, CUTS)
    assert copied == {}
    found, copied, used, planned = trained(DATA, 2, CUTS)
    assert found == losses
    assert planned == used
    edges = DATA.adjacency.normalised()
    counts = np.diff(Image.of(edges.indptr, edges.indices, CUTS).homes, axis=1)
    rows = counts[:2, 2:].sum() + counts[2:, :2].sum()  # parts 0 and 1 share a memory
    assert sorted(copied.values()) == sorted(rows * 4 * width for width in (4, 3, 3, 4))


@pytest.mark.parametrize("network", list(NETWORKS)[1:])
def test_maxima_means_and_attention_copy_images_alone(network: str) -> None:
    losses, copied, *_ = trained(DATA, 1, CUTS, network=network)
    assert copied == {}
    found, copied, used, planned = trained(DATA, 2, CUTS, network=network)
    assert found == losses and planned == used
    edges = DATA.adjacency if network in ("mean", "max") else DATA.adjacency.with_self_edges()
    moved = []
    for indptr, indices in ((edges.indptr, edges.indices), (edges.indptr_t, edges.indices_t)):
        counts = np.diff(Image.of(indptr, indices, CUTS).homes, axis=1)
        moved.append(counts[:2, 2:].sum() + counts[2:, :2].sum())
    assert copied
    for name, nbytes in copied.items():
        rows = moved[".grad" in name.split(".image")[0]]
        assert nbytes % (4 * rows) == 0 and nbytes // (4 * rows) <= 12, name


@pytest.mark.parametrize("name", ["spmm_max", "graph_attention"])
def test_rows_in_other_places_count_by_their_numbers(name: str) -> None:
    """Kernels and references give for rows with numbers what they give for rows at those places."""
    random, graph = np.random.default_rng(4), DATA.adjacency
    x = random.standard_normal((90, 2, 3)).astype(np.float32)
    scores = random.standard_normal((2, 90, 2)).astype(np.float32)
    spec, rows = operator(name), np.flatnonzero(random.random(90) < 0.6).astype(np.int32)
    kept = np.isin(graph.indices, rows)
    indptr = np.concatenate([[0], np.cumsum(kept)])[graph.indptr]
    indices = graph.indices[kept]
    near = np.searchsorted(rows, indices).astype(np.int32)
    matrices = [(indptr, indices, indptr, indices), (indptr, near, indptr, near)]
    given: list[tuple[Array, ...]]
    if name == "spmm_max":
        attributes: Any = {}
        given = [(x[:, 0], *matrices[0]), (x[rows, 0], *matrices[1], rows)]
    else:
        attributes, step = spec.normalise({"rate": 0.4, "seed": 7}), np.array(3)
        given = [
            (x, scores[0], scores[1], *matrices[0], step),
            (x[rows], scores[0][rows], scores[1], *matrices[1], step, rows),
        ]
    for number, made in enumerate(zip(*(spec.compute(attributes, *each) for each in given))):
        np.testing.assert_array_equal(*made)
        for place, each in enumerate(given):
            outputs = tuple(np.zeros_like(array) for array in spec.compute(attributes, *each))
            variant, entry = select(Call(name, attributes, each, outputs, 1, frozenset()))
            assert entry is not None and variant == "numba"
            run(entry)
            np.testing.assert_allclose(outputs[number], made[place], rtol=1e-5, atol=1e-6)


def ring(vertices: int, ids: Array) -> GraphData:
    """Return a ring whose vertices have these ids."""
    edges = Adjacency.from_edges(ids, np.roll(ids, 1), vertices).undirected()
    random = np.random.default_rng(0)
    features = random.standard_normal((vertices, 5)).astype(np.float32)
    labels = (np.arange(vertices) % 3).astype(np.int32)
    every = np.arange(vertices)
    return GraphData("ring", edges, features, labels, {"train": every, "test": every})


def test_neighbours_that_are_near_need_little_memory() -> None:
    order = np.arange(3000)
    mixed = np.random.default_rng(1).permutation(3000)
    cuts = (0, 700, 1500, 2200, 3000)
    _, few, used, _ = trained(ring(3000, order), 4, cuts, cpus=4)
    _, many, others, _ = trained(ring(3000, mixed), 4, cuts, cpus=4)
    assert sum(few.values()) == (4 + 3 + 3 + 4) * 4 * 2 * 4  # two rows from each of two sides
    assert sum(many.values()) > 100 * sum(few.values())
    assert all(one < other for one, other in zip(used[1:], others[1:]))


def test_a_graph_without_edges_has_no_images() -> None:
    with Model("none") as model:
        x = model.input("x", (9, 3))
        model.output(model.aggregate(model.relu(x), Adjacency.from_edges([], [], 9)))
        machine = Machine.local(cpus=2, memories=2)
        model.compile("sgd", "mse", mapper=RangesMapper((0, 4, 9)), machine=machine)
        np.testing.assert_array_equal(model.predict(np.ones((9, 3), np.float32)), np.zeros((9, 3)))
