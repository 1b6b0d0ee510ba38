"""Training over a graph in parts, on workers and ranks: one worker's numbers, and moving cuts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import mpiexec, ranks

from soapstone import Adam, GraphError, Model
from soapstone.apps.graphs import gat, gcn, gin, sage
from soapstone.frontend import memory_plans
from soapstone.frontend.app import AppError, train_app
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.files import write_graph
from soapstone.frontend.graphs.generate import Shape, block_model
from soapstone.frontend.graphs.metis import renumbered_by_metis
from soapstone.frontend.graphs.partitioned import Partitioned, layers_of
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.errors import StrategyError
from soapstone.mappers.ranges import RangesMapper
from soapstone.runtime import Machine
from soapstone.search.partition import partitioner
from soapstone.search.partition.cuts import PartitionError, equal_edges, equal_vertices

DATA = block_model(Shape(90, 600, 12, 3), signal=1.0, skew=1.8, seed=2)
APPS: dict[str, Callable[[], Model]] = {
    "gcn": lambda: gcn.build(90, DATA, hidden=4),
    "gin": lambda: gin.build(90, DATA, hidden=8),
    "gat": lambda: gat.build(90, DATA),
    "sage": lambda: sage.build(90, DATA, hidden=4, reduction="max"),
}


def losses(model: Model, epochs: int = 6, callbacks: Any = (), **how: Any) -> list[float]:
    splits = DATA.splits()
    with model:
        model.compile(Adam(0.02), "masked_cross_entropy", seed=3, **how)
        given = {"epochs": epochs, "shuffle": False, "progress": False, "callbacks": callbacks}
        found = model.fit(splits.train_x, splits.train_y, **given)
    return [record["loss"] for record in found.epochs]


@pytest.mark.parametrize("app", APPS)
def test_parts_compute_what_one_worker_does(app: str) -> None:
    wanted = losses(APPS[app](), cpus=1)
    assert wanted[-1] < wanted[0]
    for cuts in ((0, 90), (0, 1, 90), (0, 20, 45, 46, 90)):
        mapper, machine = RangesMapper(cuts), Machine.local(cpus=2)
        found = losses(APPS[app](), mapper=mapper, machine=machine)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_parts_work_in_a_fast_memory() -> None:
    cuts, machine = (0, 20, 45, 46, 90), Machine.local(cpus=2)
    wanted = losses(APPS["gcn"](), mapper=RangesMapper(cuts), machine=machine)
    how: dict[str, Any] = {"fast_memory": 26_000, "plan": "lru", "machine": machine}
    mapper = RangesMapper(cuts)
    assert losses(APPS["gcn"](), mapper=mapper, **how) == wanted
    with APPS["gcn"]() as model:
        model.compile("adam", "masked_cross_entropy", mapper=mapper, **how)
        moved = []
        for at in (cuts, (0, 60, 90)):
            mapper.cuts = at
            model.trainer.rebind()
            model.trainer.bound("train", 90)
            moved.append(model.trainer.moved_bytes)
    assert all(each is not None and each[0] == each[1] > 0 for each in moved)


def test_plans_are_searched_for_once_cuts_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "_ROUNDS", 2)
    steps = 2 * (partitioner._WARM + partitioner._MOST) + 1
    methods, real = list[str](), memory_plans.memory_plan

    def noted(footprint: Footprint, capacity: int, method: str, **more: Any) -> Any:
        methods.append(method)
        return real(footprint, capacity, method, **more)

    monkeypatch.setattr(memory_plans, "memory_plan", noted)
    model = APPS["gcn"]()
    split = Partitioned(model, DATA.adjacency, 2)
    how: dict[str, Any] = {"fast_memory": 40_000, "plan": "dp", "machine": Machine.local(cpus=2)}
    losses(model, steps, [split], mapper=split.mapper, **how)
    assert split.partitioner.settled
    assert methods == ["lru"] * (len(methods) - 1) + ["dp"] and len(methods) >= 3


def test_every_operator_on_vertices_has_its_range() -> None:
    with gcn.build(90, DATA) as model:
        cuts = (0, 13, 30, 90)
        model.compile("sgd", "masked_cross_entropy", mapper=RangesMapper(cuts), cpus=2)
        graph, strategy = model.training_graph, model.strategy
    samples = graph.sample_dims
    assert {node.operator for node in graph.nodes} >= {"spmm", "dropout", "linear"}
    for node in graph.nodes:
        item = strategy.configurations.get(node.name)
        if node.name in samples:
            assert item is not None, node.label
            assert item.cuts[samples[node.name]] == cuts, node.label
            assert item.devices == (0, 0, 1)
    for node in graph.nodes:
        rows = [graph.tensors[name].shape[:1] == (90,) for name in (*node.inputs, *node.outputs)]
        assert node.name in samples or not any(rows[: len(node.inputs)]), node.label


def test_cuts_move_while_a_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "_ROUNDS", 3)
    steps = 3 * (partitioner._WARM + partitioner._MOST)  # however disturbed they are
    wanted = losses(APPS["gcn"](), epochs=steps, cpus=1)
    model = APPS["gcn"]()
    split = Partitioned(model, DATA.adjacency, 2, costs=tmp_path / "costs.json")
    found = losses(model, steps, [split], mapper=split.mapper, machine=Machine.local(cpus=2))
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
    learning = split.partitioner
    simple = {equal_vertices(90, 2), equal_edges(DATA.adjacency.indptr, 2)}
    assert simple <= set(learning.measured)
    assert learning.settled
    assert split.mapper.cuts == learning.cuts
    assert all((ns > 0).all() and ns.shape == (2, 2) for ns in learning.measured.values())
    split.save()
    again = Partitioned(APPS["gcn"](), DATA.adjacency, 7, costs=tmp_path / "costs.json")
    assert again.partitioner.costs.count == learning.costs.count > 0
    assert len(again.mapper.cuts) == 8
    with pytest.raises(PartitionError, match="of 2 layers found, of 3 needed"):
        Partitioned(gcn.build(90, DATA, layers=3), DATA.adjacency, 2, costs=split.path)


@pytest.mark.parametrize("memories", [1, 2])
def test_cuts_that_moved_leave_nothing_behind(memories: int) -> None:
    splits, mapper, used = DATA.splits(), RangesMapper((0, 45, 90)), []
    with APPS["gcn"]() as model:
        machine = Machine.local(cpus=2, memories=memories)
        model.compile("sgd", "masked_cross_entropy", mapper=mapper, machine=machine)
        for cut in (45, 20, 70, 45, 45):
            mapper.cuts = (0, cut, 90)
            model.trainer.rebind()
            model.fit(splits.train_x, splits.train_y, epochs=1, shuffle=False, progress=False)
            used.append(model.trainer.session.used_bytes)
    assert used[0] == used[3] == used[4]


def test_layers_end_with_what_gathers() -> None:
    with gcn.build(90, DATA, hidden=5) as model:
        model.compile("sgd", "masked_cross_entropy")
        graph = model.training_graph
    layers, widths = layers_of(graph)
    assert widths == (5, 3)
    assert layers["conv1.linear"] == layers["conv1.spmm"] == 0
    assert layers["drop2"] == layers["conv2.linear"] == layers["conv2"] == 1
    origins = {n.origin: n.name for n in graph.nodes if n.origin in ("conv1.spmm", "conv2")}
    assert layers[origins["conv1.spmm"]] == 0
    assert layers[origins["conv2"]] == 1
    assert layers_of(model.build(training=True))[1] == widths


@pytest.mark.long
def test_two_ranks_compute_what_one_worker_does(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    if mpiexec() is None:
        pytest.skip("there is no mpiexec")
    write_graph(tmp_path / "a.npz", DATA)
    command = ["train", "gcn", "--graph", tmp_path / "a.npz", "--epochs", 20, "--json"]
    wanted = train_app("gcn", graph=tmp_path / "a.npz", epochs=20, cpus=1, progress=False)
    more = ["--parts", 3, "--partition-costs", tmp_path / "costs.json"]
    done = ranks(2, "-m", "soapstone.cli.main", *command, *more, timeout_s=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss"] == pytest.approx(wanted.loss, rel=1e-3)
    assert all(a < b for a, b in pairwise(found["cuts"]))
    assert (tmp_path / "costs.json").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"parts": 91}, "91 parts found for 90 vertices"),
        ({"parts": 2, "partitioner": "best"}, "partitioner 'best' found, one of learned"),
        ({"parts": 2, "graph": None}, "2 parts found; --graph needed"),
        ({"parts": 2, "mapper": "sequential"}, "no --mapper needed"),
        ({"parts": 2, "profile": "a.json"}, "no --profile needed"),
        ({"partition_costs": "costs.json"}, "--parts needed"),
        ({"partitioner": "metis"}, "partitioner 'metis' found; --parts needed"),
        (
            {"parts": 2, "partitioner": "edge", "partition_costs": "costs.json"},
            "--partitioner learned for --partition-costs needed",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    write_graph(tmp_path / "a.npz", DATA)
    given = {"graph": tmp_path / "a.npz", "epochs": 1, "progress": False} | how
    with pytest.raises((AppError, GraphError), match=said):
        train_app("gcn", **given)


def test_cuts_of_other_vertices_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"dim \w+: cuts \(0, 5, 80\) found, ascending.* 90"):
        losses(APPS["gcn"](), mapper=RangesMapper((0, 5, 80)), cpus=2)
    dense = Model("dense")
    dense.output(dense.dense(dense.input("x", (8, 3)), 2))
    with pytest.raises(PartitionError, match="'dense' gathers nothing"):
        Partitioned(dense, DATA.adjacency, 2)


def test_vertices_in_another_order_are_the_same_graph() -> None:
    order = np.random.default_rng(5).permutation(90)
    moved = DATA.renumbered(order)
    assert moved.features is not None and moved.labels is not None and DATA.features is not None
    np.testing.assert_array_equal(moved.features, DATA.features[order])
    pairs = [
        sorted(zip(names[each.indices].tolist(), names[each.targets].tolist()))
        for each, names in ((moved.adjacency, order), (DATA.adjacency, np.arange(90)))
    ]
    assert pairs[0] == pairs[1]
    for part, ids in DATA.parts.items():
        assert sorted(order[moved.parts[part]]) == sorted(ids)


def test_metis_cuts_fewer_edges_and_trains_the_same(tmp_path: Path) -> None:
    pytest.importorskip("pymetis", reason="pip install soapstone[metis]")
    mixed = DATA.renumbered(np.random.default_rng(5).permutation(90))
    found, cuts = renumbered_by_metis(mixed, 3)

    def between(data: GraphData, at: Sequence[int]) -> int:
        ends = (data.adjacency.indices, data.adjacency.targets)
        one, other = (np.searchsorted(at, each, side="right") for each in ends)
        return int((one != other).sum())

    assert cuts[0] == 0 and cuts[-1] == 90 and min(np.diff(cuts)) > 0
    assert between(found, cuts) < between(mixed, equal_vertices(90, 3))
    files = tmp_path / "mixed.npz", tmp_path / "found.npz"
    for file, data in zip(files, (mixed, found)):
        write_graph(file, data)
    given: dict[str, Any] = {"epochs": 3, "progress": False}
    parts = train_app("gcn", graph=files[0], **given, parts=3, partitioner="metis")
    whole = train_app("gcn", graph=files[1], **given)  # draws of dropout are by vertex
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4) and parts.cuts == cuts


def test_metis_that_is_not_there_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(PartitionError, match=r"'metis' needs pymetis \(pip install soapstone\[met"):
        renumbered_by_metis(DATA, 2)
    with gcn.build(90, DATA) as model, pytest.raises(PartitionError, match="'metis' found without"):
        Partitioned(model, DATA.adjacency, 2, "metis")
