"""Graphs as data: their order and transpose, normalisation, files, generators, bad input."""

from __future__ import annotations

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import PROGRAMS
from typer.testing import CliRunner

from soapstone import Model
from soapstone.apps.graphs import gcn
from soapstone.cli.main import app
from soapstone.errors import DataError
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.files import read_graph, write_graph
from soapstone.frontend.graphs.generate import Shape, block_model, many_graphs, rmat
from soapstone.ir.tensor import Array
from soapstone.native.memory import CHECKED


def dense(graph: Adjacency, transpose: bool = False) -> Array:
    """Return the matrix of the weights of edges, (target, source)."""
    pointers = (graph.indptr_t, graph.indices_t) if transpose else (graph.indptr, graph.indices)
    weights = graph.weights_t if transpose else graph.weights
    found = np.zeros((graph.vertices, graph.vertices))
    rows = np.repeat(np.arange(graph.vertices), np.diff(pointers[0]))
    np.add.at(found, (rows, pointers[1]), 1.0 if weights is None else weights)
    return found


def drawn(vertices: int = 30, edges: int = 100, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return tuple(random.integers(0, vertices - 3, (2, edges)))  # the last vertices are isolated


def test_edges_are_in_order_both_ways() -> None:
    sources, targets = drawn()
    graph = Adjacency.from_edges(sources, targets, 30)
    wanted = np.zeros((30, 30))
    np.add.at(wanted, (targets, sources), 1)
    np.testing.assert_array_equal(dense(graph), wanted)
    np.testing.assert_array_equal(dense(graph, transpose=True), wanted.T)
    for indptr, indices in ((graph.indptr, graph.indices), (graph.indptr_t, graph.indices_t)):
        assert all((np.diff(indices[a:b]) >= 0).all() for a, b in itertools.pairwise(indptr))
    assert not graph.symmetric
    both = graph.undirected()
    assert both.symmetric
    np.testing.assert_array_equal(dense(both), ((wanted + wanted.T) > 0) & ~np.eye(30, dtype=bool))


@pytest.mark.parametrize("undirected", [False, True])
def test_normalisation_is_that_of_the_dense_matrix(undirected: bool) -> None:
    graph = Adjacency.from_edges(*drawn(), 30)
    graph = graph.undirected() if undirected else graph
    wanted = dense(graph)
    wanted[np.diag(wanted) == 0] += np.eye(30)[np.diag(wanted) == 0]
    scale = 1 / np.sqrt(wanted.sum(axis=1))
    found = graph.normalised()
    np.testing.assert_allclose(dense(found), wanted * scale[:, None] * scale, rtol=1e-6)
    np.testing.assert_allclose(dense(found, transpose=True), dense(found).T, rtol=1e-6)


def test_generators_follow_from_their_seed() -> None:
    graph, again = rmat(1000, 20_000, seed=3), rmat(1000, 20_000, seed=3)
    np.testing.assert_array_equal(graph.indices, again.indices)
    assert graph.edges == 20_000
    assert graph.in_degrees.max() > 10 * graph.in_degrees.mean()
    data = block_model(Shape(700, 8000, 12, 7), seed=1)
    edges = data.adjacency
    assert edges.symmetric
    assert 0.7 * 8000 < edges.edges <= 8000
    assert data.labels is not None
    same = (data.labels[edges.indices] == data.labels[edges.targets]).mean()
    assert same > 0.7
    assert edges.in_degrees.max() > 4 * edges.in_degrees.mean()
    assert {part: len(ids) for part, ids in data.parts.items()} == {
        "train": 140,
        "val": 186,
        "test": 374,
    }


@pytest.mark.parametrize("suffix", [".npz", ".mtx", ".txt", ".csv", ".lux"])
def test_files_give_back_what_was_written(tmp_path: Path, suffix: str) -> None:
    data = block_model(Shape(50, 300, 4, 3))
    write_graph(tmp_path / f"a{suffix}", data)
    found = read_graph(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(found.adjacency.indices, data.adjacency.indices)
    if suffix in (".npz", ".lux"):
        np.testing.assert_array_equal(found.features, data.features)
        np.testing.assert_array_equal(found.labels_of("val"), data.labels_of("val"))


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", ""), ("a.csv", "source,target\n"), ("a.el", "# none\n\n")]
)
def test_a_list_without_edges_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"{name}': no edge in {len(text)} characters found; one"):
        read_graph(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name}': no edge found; one or more needed"):
        write_graph(tmp_path / name, GraphData("none", Adjacency.from_edges([], [], 3)))
    assert not (tmp_path / name).exists()


def test_a_lux_file_leaves_nothing_of_an_earlier_graph_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lux"
    write_graph(path, block_model(Shape(50, 300, 4, 3)))
    (tmp_path / "a.feats.csv").write_text("1,2\n" * 50)
    (tmp_path / "a.other").write_text("not of the layout")
    write_graph(path, GraphData("bare", Adjacency.from_edges(*drawn(50), 50)))
    found = read_graph(path)
    assert found.features is None
    assert found.labels is None
    assert not found.parts
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.lux", "a.other"]


def test_lux_files_are_laid_out_as_published(tmp_path: Path) -> None:
    path = tmp_path / "a.add_self_edge.lux"
    head = struct.pack("<IQ", 3, 4) + struct.pack("<3Q", 2, 2, 4) + struct.pack("<4I", 2, 0, 1, 1)
    path.write_bytes(head)
    (tmp_path / "a.label").write_text("1\n0\n2\n")
    (tmp_path / "a.mask").write_text("Train\nNone\nTest\n")
    (tmp_path / "a.feats.csv").write_text("1,2\n3,4\n5,6\n")
    found = read_graph(path)
    np.testing.assert_array_equal(dense(found.adjacency), [[1, 0, 1], [0, 0, 0], [0, 2, 0]])
    np.testing.assert_array_equal(found.labels, [1, 0, 2])
    assert {part: ids.tolist() for part, ids in found.parts.items()} == {
        "train": [0],
        "val": [],
        "test": [2],
    }
    np.testing.assert_array_equal(found.features, [[1, 2], [3, 4], [5, 6]])
    write_graph(tmp_path / "b.lux", found)
    assert (tmp_path / "b.lux").read_bytes()[:36] == head[:36]
    assert (tmp_path / "b.feats.bin").stat().st_size == 24
    for contents, said in (
        (head[:-1], "51 bytes found, 52 needed for 3 vertices and 4 edges"),
        (head[:5], "5 bytes found, 12 or more"),
        (head[:12] + struct.pack("<3Q", 2, 1, 4) + head[36:], "do not fall"),
        (head[:-4] + struct.pack("<I", 3), "edge 3: source 3 found"),
    ):
        path.write_bytes(contents)
        with pytest.raises(DataError, match=f"lux'.*{said}"):
            read_graph(path)
    path.write_bytes(head)
    for name, text, said in (
        ("label", "1\nx\n2\n", "could not convert"),
        ("mask", "Train\nNone\n", "2 lines found, 3 lines of Train"),
        ("mask", "Train\nNone\nRest\n", "'Rest' found"),
        ("feats.csv", "1,2\n3\n", "columns"),
        ("feats.bin", "12345", "5 bytes found, float32 for each of 3"),
    ):
        (tmp_path / f"a.{name}").write_text(text)
        with pytest.raises(DataError, match=f"a.{name}'.*{said}"):
            read_graph(path)
        (tmp_path / f"a.{name}").unlink()


def test_features_beside_a_file_stay_there_until_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0 1\n2 1\n")
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "a.features.npy", values)
    found = read_graph(tmp_path / "a.txt")
    assert isinstance(found.features, np.memmap)
    np.testing.assert_array_equal(found.features, values)
    for wrong, said in (
        (values[:2], "features of shape .2, 2. found, a row"),
        (values.astype(np.float64), "float64 of shape"),
        (np.array([[1, 2], [3, np.nan], [1, 1]], np.float32), "features of vertex 1 are not fin"),
    ):
        np.save(tmp_path / "a.features.npy", wrong)
        with pytest.raises(DataError, match=said):
            read_graph(tmp_path / "a.txt")


def test_several_graphs_lie_beside_each_other(tmp_path: Path) -> None:
    data = many_graphs(Shape(240, 3000, 6, 9, graphs=6), seed=1)
    edges = data.adjacency
    assert edges.symmetric
    assert ((edges.targets // 40) == (edges.indices // 40)).all()
    assert {part: set((ids // 40).tolist()) for part, ids in data.parts.items()} == {
        "train": {0, 1, 2, 3},
        "val": {4},
        "test": {5},
    }
    assert (data.several, data.classes) == (True, 9)
    shown = data.labels_of("val")
    assert shown.shape == (240, 9)
    assert (shown[:160] == -1).all() and set(np.unique(shown[160:200])) == {0, 1}
    write_graph(tmp_path / "a.npz", data)
    np.testing.assert_array_equal(read_graph(tmp_path / "a.npz").labels, data.labels)
    for made, said in (
        (GraphData("a", Adjacency.from_edges([], [], 0)).splits, "0 vertices found, 1 or more"),
        (lambda: many_graphs(Shape(100, 10, 3, 3, graphs=2)), "3 or more"),
        (lambda: write_graph(tmp_path / "a.lux", data), "one label"),
        (lambda: GraphData("a", edges, labels=np.full((240, 2), 2)), "not 0 or 1"),
    ):
        with pytest.raises(DataError, match=said):
            made()


def arrays(**changed: Any) -> dict[str, Any]:
    given = {"edges": np.array([[0, 1], [1, 2]]), "labels": np.array([0, 1, -1])}
    given |= {"features": np.ones((3, 2), np.float32), "train": np.array([0, 1])}
    return given | changed


SPARSE: dict[str, Any] = {
    "edges": np.array([[0, 1]]),
    "feature_data": np.ones(2),
    "num_features": np.array(2),
    "feature_indices": np.array([0, 1]),
    "feature_indptr": np.array([0, 1, 1, 2]),
}


def unlabelled() -> GraphData:
    """Return a graph in which no vertex to train on has a label."""
    parts = {"train": np.array([0, 1]), "test": np.array([2])}
    edges = Adjacency.from_edges([0], [1], 3)
    return GraphData("a", edges, np.ones((3, 2), np.float32), np.array([-1, -1, 1]), parts)


def labelled(labels: list[float]) -> GraphData:
    return GraphData("a", Adjacency.from_edges([], [], 2), None, np.array(labels))


BAD: dict[str, tuple[str, Any, str]] = {
    "outside": ("a.npz", arrays(edges=[[0, 3]]), "edge 0: target 3 found, 0 to 2 needed"),
    "negative": ("a.npz", arrays(edges=[[1, 1], [-1, 0]]), "edge 1: source -1 found"),
    "flat": ("a.npz", arrays(edges=[0, 1]), r"field 'edges': int64 of shape \(2,\) found"),
    "real": ("a.npz", arrays(edges=[[0.5, 1.0]]), r"field 'edges': float64 of shape \(1, 2\)"),
    "large": ("a.npz", arrays(edges=np.array([[0, 2**63]], np.uint64)), "'edges': 9223.* found"),
    "wide": ("a.npz", arrays(labels=[0, 2**32, 1]), "label 4294967296 of vertex 1 found"),
    "label": ("a.npz", arrays(labels=np.int64(1)), r"field 'labels': int64 of shape \(\) found"),
    "text": ("a.npz", arrays(features=np.array([["a"]] * 3)), "<U1"),
    **{
        f"sparse {field}": ("a.npz", {**SPARSE, field: np.array(value)}, f"'{field}': {said}")
        for field, value, said in (
            ("feature_indptr", 3, "int64 of shape"),
            ("feature_indptr", [0.0, 1.0, 1.0, 2.0], "float64 of shape"),
            ("feature_indices", [True, False], "bool of shape"),
            ("feature_data", 1.0, "float64 of shape"),
            ("num_features", 2.0, "float64 of shape"),
        )
    },
    "rows": ("a.npz", arrays(features=np.ones((2, 2))), r"features of shape \(2, 2\) found, a row"),
    "nan": ("a.npz", arrays(features=[[1.0], [np.nan], [0.0]]), "features of vertex 1 are not fin"),
    "labels": ("a.npz", arrays(labels=[0, -2, 1]), "label -2 of vertex 1"),
    "part": ("a.npz", arrays(val=[0, 3]), "val: ids from 0 to 2 needed"),
    "vertices": ("a.npz", arrays(vertices=np.int64(-1)), "-1 vertices found"),
    "sparse": (
        "a.npz",
        {"edges": [[0, 0]], "feature_data": [1.0]},
        "'feature_indices': nothing found",
    ),
    "nothing": ("a.npz", {"edges": np.zeros((0, 2), int)}, "'edges': no edge found; .*'vertices'"),
    "unknown": ("a.npz", arrays(train_mask=[1]), "'train_mask': .*did you mean 'train'"),
    "words": ("a.txt", "0 1\n1 x\n", "line 2: '1 x' found"),
    "three": ("a.txt", "0 1 5\n", "line 1: '0 1 5' found; a source and a target"),
    "commas": ("a.txt", "# edges\n0,1\n", "line 2: '0,1' found; .*blanks between"),
    "names": ("a.csv", "from,to\n0,1\nanna,otto\n", "line 3: 'anna,otto' found; .*a comma"),
    "zero": (
        "a.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n0 1\n",
        "id 0 found; ids from 1",
    ),
    "below": ("a.txt", "# edges\n0 -1\n", "target -1 found"),
    "values": ("a.mtx", "%%MatrixMarket matrix coordinate real general\n", "pattern"),
    "count": (
        "a.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 2 2\n1 2\n",
        "1 entries found, 2 needed",
    ),
    "gap": ("a.txt", "0 1\n1 500000000\n", "500,000,001 vertices found with 2 edges; ids counted"),
    "lone": (
        "a.npz",
        {"edges": [[0, 1]], "vertices": 1 << 29},
        "536,870,912 vertices found with 1",
    ),
    "oblong": (
        "a.mtx",
        "%%MatrixMarket matrix coordinate pattern general\n2 3 0\n",
        "2 rows and 3 columns",
    ),
}


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64", "int16"])
def test_arrays_may_be_of_any_integers(tmp_path: Path, dtype: str) -> None:
    fields = ("edges", "feature_indices", "feature_indptr", "num_features")
    made = {name: array.astype(dtype) for name, array in SPARSE.items() if name in fields}
    parts = {"labels": np.array([0, 1, 1], dtype), "train": np.array([0, 2], dtype)}
    np.savez(tmp_path / "a.npz", **SPARSE | made | parts)
    graph = read_graph(tmp_path / "a.npz")
    assert str(graph.adjacency) == "3 vertices, 1 edges"
    assert graph.labels is not None and graph.labels.dtype == np.int32
    np.testing.assert_array_equal(graph.features, [[1, 0], [0, 0], [0, 1]])
    np.testing.assert_array_equal(graph.parts["train"], [0, 2])


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused(tmp_path: Path, kind: str) -> None:
    name, contents, said = BAD[kind]
    path = tmp_path / name
    if isinstance(contents, str):
        path.write_text(contents)
    else:
        np.savez(path, **contents)
    with pytest.raises(DataError, match=f"a{path.suffix}.*{said}"):
        read_graph(path)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: read_graph("nowhere"), "graph 'nowhere' found"),
        (lambda: read_graph("reddit-like:0"), "scale '0' found"),
        (lambda: read_graph("reddit-like:1e9"), "scale '1e9' found, above 0 to 1000 needed"),
        (lambda: read_graph("cora-like:"), "scale '' found"),
        (lambda: rmat(0, 3), "vertices: 0 found"),
        (lambda: rmat(3, -1), "edges: -1 found, 0 or more needed"),
        (lambda: block_model(Shape(0, 9, 3, 4)), "vertices"),
        (lambda: rmat(9, 1 << 60), "rmat: .* edges needs .* bytes"),
        (lambda: block_model(Shape(1 << 30, 9, 1 << 30, 4)), "block_model: .* needs .* bytes"),
        (lambda: GraphData("a", Adjacency.from_edges([], [], 2)).splits(), "no features"),
        (lambda: labelled([0.5, 1.0]), "label 0.5 of vertex 0 found"),
        (lambda: labelled([0, 2**31]), "label 2147483648 of vertex 1 found"),
        (lambda: unlabelled().splits(), "part 'train' of 2 vertices, none of which has a label"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        call()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "source,target\n0,1\n1, 2\n"),
        ("a.csv", "0,1\n1,2"),
        ("a.csv", "# edges\n0,1\n1,2\n"),
        ("a.tsv", "source\ttarget\n0\t1\n1\t2\n"),
    ],
)
def test_lists_of_edges_may_have_names_of_columns(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    edges = read_graph(tmp_path / name).adjacency
    assert [*zip(edges.indices.tolist(), edges.targets.tolist())] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("suffix", [".npz", ".mtx", ".lux"])
def test_graphs_without_edges_are_graphs(tmp_path: Path, suffix: str) -> None:
    bare = Adjacency.from_edges([], [], 3)
    write_graph(tmp_path / f"a{suffix}", GraphData("a", bare))
    assert read_graph(tmp_path / f"a{suffix}").adjacency.vertices == 3
    np.testing.assert_array_equal(dense(bare.normalised()), np.eye(3))
    assert rmat(3, 0).edges == 0


def test_a_label_that_no_memory_has_room_for_is_named_before_it_is_asked_for() -> None:
    edges = Adjacency.from_edges([0, 1], [1, 2], 3)
    features, labels = np.ones((3, 4), np.float32), np.array([0, 1, 10**9])
    graph = GraphData("a", edges, features, labels, {"train": np.arange(3), "test": np.arange(3)})
    with pytest.warns(UserWarning, match="label 1000000000 of vertex 2 found: .*1,000,000,001 cl"):
        graph.splits()
    model = Model("net")
    x = model.input("features", (3, 4))
    model.output(model.dense(x, graph.classes * 1000, bias=False))
    model.compile("sgd", loss="cross_entropy", cpus=1)
    with pytest.raises(
        DataError, match=r"parameters .* float32\[4, 1000000001000\], needs .* bytes"
    ):
        model.fit(features, np.zeros(3, np.int32), batch_size=3)


def test_the_command_line_makes_shows_and_converts(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        found = CliRunner().invoke(app, ["graph", *words])
        return json.loads(found.stdout) if "--json" in words and not found.exit_code else found

    made, other = str(tmp_path / "a.npz"), str(tmp_path / "a.mtx")
    told = run("generate", "blocks", made, "--vertices", "80", "--edges", "400", "--json")
    assert told["vertices"] == 80
    assert run("convert", made, other, "--json") == {**told, "name": "a"}
    shown = run("info", other, "--json")
    assert (shown["edges"], shown["features"]) == (told["edges"], 0)
    assert "both ways" in run("info", made).stdout
    assert "one of cora-like" in run("generate", "elsewhere", made).stderr
    assert "suffix '.png' found" in run("convert", made, str(tmp_path / "a.png")).stderr


@pytest.mark.long
@pytest.mark.skipif(CHECKED, reason="checked mode copies what an entry is given")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_features_in_a_file_are_read_there(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "mapped_features.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    held, mapped = done.stdout.splitlines()
    assert held == mapped


def test_features_may_be_of_another_file_in_the_next_run(tmp_path: Path) -> None:
    graph = block_model(Shape(vertices=60, edges=300, features=16, classes=3))
    splits = graph.splits()
    for number, factor in enumerate((1, 2)):
        np.save(tmp_path / f"{number}.npy", graph.features * np.float32(factor))
    mapped = [np.load(tmp_path / f"{number}.npy", mmap_mode="r") for number in (0, 1)]
    runs = (mapped[0], mapped[1], np.array(mapped[0]), mapped[0], mapped[0][:60])
    found = []
    for arrays in (runs, list(map(np.array, runs))):
        with gcn.build(60, graph, dropout=0.0) as model:
            model.compile("adam", loss="masked_cross_entropy")
            fit = partial(model.fit, y=splits.train_y, epochs=2, shuffle=False, progress=False)
            found.append([fit(x).last("loss") for x in arrays])
            if arrays is runs:
                assert model.predict(mapped[0]).tobytes() == model.predict(runs[2]).tobytes()
    assert found[0] == found[1]
