"""Layers of one's own over edges, CommNet, residual convolutions, and several labels a vertex."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, GraphError, Model, ShapeError
from soapstone.apps.graphs import gin
from soapstone.frontend.app import train_app
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.files import write_graph
from soapstone.frontend.graphs.generate import Shape, block_model, many_graphs, rmat
from soapstone.ir.tensor import Array
from soapstone.mappers.ranges import RangesMapper

EDGES = rmat(40, 150, seed=5)  # some equal, some of a vertex to itself, some vertices without any
X = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)


def ran(layer: Callable[..., Any], *more: Any) -> tuple[Array, dict[str, Array]]:
    """Return what a layer makes of the rows, and its parameters; it is given the rest too."""
    model = Model("net")
    model.output(layer(model, model.input("x", (40, 6)), *more))
    found = model.predict(X)
    assert isinstance(found, np.ndarray)
    return found, model.weights()


def test_rows_at_the_ends_of_edges_and_what_segments_make_of_them() -> None:
    source, target = EDGES.indices, EDGES.targets
    for end, rows in (("source", source), ("target", target)):
        y, _ = ran(lambda m, x, e: m.edge_reduce(m.edge_gather(x, EDGES, e), EDGES), end)
        wanted = np.zeros_like(X)
        np.add.at(wanted, target, X[rows])
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    for reduction in ("mean", "max"):
        y, _ = ran(lambda m, x, r: m.edge_reduce(m.edge_gather(x, EDGES), EDGES, r), reduction)
        z, _ = ran(lambda m, x, r: m.aggregate(x, EDGES, r), reduction)
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-6)
    y, _ = ran(lambda m, x: m.edge_softmax(m.edge_gather(x, EDGES), EDGES))
    powers, total = np.exp(X[source]), np.zeros_like(X)
    np.add.at(total, target, powers)
    np.testing.assert_allclose(y, powers / total[target], rtol=1e-5)


def attending(model: Model, x: Any, own: bool) -> Any:
    """Return attention to neighbours, as a layer of one's own or the layer there is."""
    if not own:
        return model.gat_conv(x, EDGES, 3, slope=0.3, bias=False, name="l")
    z = model.dense(x, 3, bias=False, name="z")
    ends = {end: model.dense(z, 1, bias=False, name=end) for end in ("source", "target")}
    scores = [model.edge_gather(y, EDGES, end) for end, y in ends.items()]
    weights = model.edge_softmax(model.leaky_relu(model.add(*scores), alpha=0.3), EDGES)
    return model.edge_reduce(model.mul(model.edge_gather(z, EDGES), weights), EDGES)


def test_a_layer_of_ones_own_learns_as_the_fused_one() -> None:
    y = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    models = [Model("net", seed=own) for own in (0, 1)]
    for own, model in enumerate(models):
        model.output(attending(model, model.input("x", (40, 6)), bool(own)))
    first = models[0].weights()
    names = {"z.weight": "l.weight", "source.weight": "l.source", "target.weight": "l.target"}
    models[1].set_weights(
        {k: first[v].reshape(-1, 3 if k[0] == "z" else 1) for k, v in names.items()}
    )
    for model in models:
        model.compile(SGD(0.1), "mse")
        model.fit(X, y, batch_size=40, epochs=5, shuffle=False, progress=False)
    fused, own_weights = (model.weights() for model in models)
    for name, other in names.items():
        np.testing.assert_allclose(own_weights[name].ravel(), fused[other].ravel(), atol=1e-5)


@pytest.mark.parametrize("parts", [2, 5])
def test_layers_over_edges_train_in_parts(parts: int) -> None:
    """Vertices have their ranges; edges, of which there are others, equal parts."""
    y = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    cuts = (0, *(7 * part for part in range(1, parts)), 40)
    found = []
    each: tuple[dict[str, Any], ...] = ({}, {"cpus": 2, "mapper": RangesMapper(cuts)})
    for options in each:
        with Model("net", seed=1) as model:
            model.output(attending(model, model.input("x", (40, 6)), True))
            model.compile(SGD(0.1), "mse", **options)
            model.fit(X, y, batch_size=40, epochs=4, shuffle=False, progress=False)
            found.append(model.weights())
    for name, wanted in found[0].items():
        np.testing.assert_allclose(found[1][name], wanted, atol=1e-5)


def test_values_of_edges_are_operands() -> None:
    values = np.random.default_rng(2).standard_normal((EDGES.edges, 6)).astype(np.float32)
    y, _ = ran(
        lambda m, x: m.edge_reduce(
            m.mul(m.edge_gather(x, EDGES), m.constant("values", values)), EDGES
        )
    )
    wanted = np.zeros_like(X)
    np.add.at(wanted, EDGES.targets, X[EDGES.indices] * values)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_commnet_and_residual_layers() -> None:
    matrix = np.zeros((40, 40), np.float32)
    np.add.at(matrix, (EDGES.targets, EDGES.indices), 1)
    mean = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    for width in (4, 9):
        y, w = ran(lambda m, x, w: m.comm_conv(x, EDGES, w, first=x, name="l"), width)
        y_ = X @ (w["l.own.weight"] + w["l.first.weight"]) + mean @ X @ w["l.neighbours.weight"]
        np.testing.assert_allclose(y, np.tanh(y_ + w["l.own.bias"]), atol=1e-5)
    edges = EDGES.normalised()
    a = np.zeros((40, 40), np.float32)
    np.add.at(a, (edges.targets, edges.indices), edges.weights)
    for width in (6, 4):
        y, w = ran(lambda m, x, w: m.residual_gcn_conv(x, edges, w, name="l"), width)
        passed = X if width == 6 else X @ w["l.pass.weight"]
        convolved = np.maximum(a @ X @ w["l.conv.weight"] + w["l.conv.bias"], 0)
        np.testing.assert_allclose(y, passed + convolved, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda m, x: m.edge_gather(x, EDGES, "middle"), "end 'middle'"),
        (lambda m, x: m.edge_gather(x, Adjacency.from_edges([0], [1], 2)), "with 2 vertices"),
        (lambda m, x: m.edge_reduce(x, EDGES), "with 150 edges"),
        (lambda m, x: m.edge_softmax(x, EDGES), "with 150 edges"),
        (lambda m, x: m.edge_reduce(m.edge_gather(x, EDGES), EDGES, "min"), "reduction 'min'"),
    ],
)
def test_layers_name_what_does_not_fit(layer: Callable[[Model, Any], Any], said: str) -> None:
    with pytest.raises((GraphError, ShapeError), match=said):
        ran(layer)


def test_loss_and_score_of_several_labels() -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal((7, 4)).astype(np.float32)
    labels = random.integers(0, 2, (7, 4)).astype(np.float32)
    labels[2] = labels[5, 1] = -1
    model = Model("net")
    model.output(model.affine(model.input("x", (7, 4)), scale=1.0))
    with model:
        model.compile("sgd", "masked_bce", "micro_f1")
        found = model.evaluate(logits, labels)
    shown = labels >= 0
    p = 1 / (1 + np.exp(-logits[shown].astype(np.float64)))
    wanted = -np.mean(np.log(np.where(labels[shown] == 1, p, 1 - p)))
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    guesses, ones = (logits > 0) & shown, labels == 1
    f1 = 2 * (guesses & ones).sum() / (guesses.sum() + ones.sum())
    assert found["micro_f1"] == pytest.approx(f1, rel=1e-5)
    with pytest.raises(GraphError, match="several labels"):
        model.compile("sgd", "cross_entropy", "micro_f1")


def test_apps_learn_several_labels_and_go_on_to_graphs_they_have_not_seen(tmp_path: Path) -> None:
    data = many_graphs(Shape(240, 3000, 16, 9, graphs=6), signal=1.0, seed=1)
    write_graph(tmp_path / "a.npz", data)
    result = train_app(
        "commnet", graph=tmp_path / "a.npz", epochs=150, learning_rate=0.03, cpus=1, progress=False
    )
    assert result.test_accuracy is None
    assert result.test_micro_f1 is not None and result.test_micro_f1 > 0.6
    with gin.build(240, data) as model, gin.build(40, other := _last(data)) as unseen:
        model.compile("adam", "masked_bce")
        splits = data.splits()
        model.fit(splits.train_x, splits.train_y, epochs=3, shuffle=False, progress=False)
        unseen.set_weights(model.weights())
        np.testing.assert_allclose(
            unseen.predict(other.features), model.predict(data.features)[200:], atol=1e-4
        )


def _last(data: GraphData) -> GraphData:
    """Return the last of six graphs of 40 vertices."""
    assert data.features is not None and data.labels is not None
    edges = data.adjacency
    held = edges.targets >= 200
    alone = Adjacency.from_edges(edges.indices[held] - 200, edges.targets[held] - 200, 40)
    return GraphData("last", alone, data.features[200:], data.labels[200:])


@pytest.mark.parametrize("app", ["commnet", "deepgcn"])
def test_apps_learn_from_a_graph_in_a_file(tmp_path: Path, app: str) -> None:
    write_graph(tmp_path / "a.npz", block_model(Shape(90, 600, 12, 3), signal=1.0, seed=2))
    result = train_app(app, graph=tmp_path / "a.npz", epochs=60, cpus=1, progress=False)
    assert result.test_accuracy is not None and result.test_accuracy > 0.8
