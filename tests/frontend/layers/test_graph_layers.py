"""Layers over neighbours, the loss over labelled vertices, and apps over a whole graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, Adam, GraphError, Model, ShapeError
from soapstone.apps.graphs import gat, gcn, sage
from soapstone.errors import DataError
from soapstone.frontend.app import AppError, train_app
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.files import write_graph
from soapstone.frontend.graphs.generate import Shape, block_model
from soapstone.ir.tensor import Array
from soapstone.runtime import Machine

DATA = block_model(Shape(90, 600, 12, 3), signal=1.0, seed=2)


def matrix(graph: Adjacency) -> Array:
    """Return the dense matrix of the weights of edges, (target, source)."""
    found = np.zeros((graph.vertices, graph.vertices), np.float32)
    np.add.at(found, (graph.targets, graph.indices), 1 if graph.weights is None else graph.weights)
    return found


def ran(layer: Callable[[Model, Any], Any]) -> tuple[Array, dict[str, Array]]:
    """Return what a layer makes of the features, and its parameters by their last names."""
    model = Model("net")
    model.output(layer(model, model.input("x", (90, 12))))
    weights = {name.split(".", 1)[-1]: array for name, array in model.weights().items()}
    found = model.predict(DATA.features)
    assert isinstance(found, np.ndarray)
    return found, weights


@pytest.mark.parametrize("width", [5, 20])
def test_convolutions_are_products_with_the_matrix(width: int) -> None:
    x, plain, edges = DATA.features, DATA.adjacency, DATA.adjacency.normalised()
    assert x is not None
    a, mean = matrix(edges), matrix(plain) / np.maximum(plain.in_degrees, 1)[:, None]
    y, w = ran(lambda m, x: m.gcn_conv(x, edges, width, activation="relu", name="l"))
    np.testing.assert_allclose(y, np.maximum(a @ x @ w["weight"] + w["bias"], 0), atol=1e-4)
    y, w = ran(lambda m, x: m.sage_conv(x, plain, width, name="l"))
    wanted = x @ w["own.weight"] + w["own.bias"] + mean @ x @ w["neighbours.weight"]
    np.testing.assert_allclose(y, wanted, atol=1e-4)
    y, w = ran(lambda m, x: m.gin_conv(x, plain, width, name="l"))
    inner = np.maximum((x + matrix(plain) @ x) @ w["inner.weight"] + w["inner.bias"], 0)
    np.testing.assert_allclose(y, inner @ w["weight"] + w["bias"], atol=1e-3)
    y, _ = ran(lambda m, x: m.aggregate(x, plain, "max", name="l"))
    rows = [x[plain.indices[p:q]] for p, q in pairwise(plain.indptr)]
    np.testing.assert_array_equal(y, [r.max(axis=0) if len(r) else np.zeros(12) for r in rows])


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("concat", [True, False])
def test_attention_is_softmax_over_neighbours_and_learns_as_torch_does(
    heads: int, concat: bool
) -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed (pip install soapstone[torch])"
    )
    assert DATA.features is not None and DATA.labels is not None
    edges = DATA.adjacency
    model = Model("net", seed=4)
    x = model.input("x", (90, 12))
    model.output(model.gat_conv(x, edges, 3, heads, concat=concat, activation="elu", name="l"))
    w = {name: torch.tensor(array, requires_grad=True) for name, array in model.weights().items()}
    z = (torch.tensor(DATA.features) @ w["l.weight"]).reshape(90, heads, 3)
    near, far = ((z * w[f"l.{end}"]).sum(2) for end in ("target", "source"))
    scores = torch.nn.functional.leaky_relu(near[:, None] + far[None], 0.2)
    lacking = torch.tensor(matrix(edges) == 0)[:, :, None]
    weights = torch.softmax(scores.masked_fill(lacking, -torch.inf), dim=1).nan_to_num()
    y = torch.einsum("vuh,uhd->vhd", weights, z)
    y = torch.nn.functional.elu((y.reshape(90, -1) if concat else y.mean(1)) + w["l.bias"])
    loss = torch.nn.functional.cross_entropy(y, torch.tensor(DATA.labels, dtype=torch.long))
    loss.backward()
    with model:
        model.compile(SGD(1.0), "cross_entropy")
        np.testing.assert_allclose(model.predict(DATA.features), y.detach(), atol=1e-5)
        model.fit(DATA.features, DATA.labels, batch_size=90, shuffle=False, progress=False)
        for name, array in model.weights().items():
            wanted = (w[name] - w[name].grad).detach()
            np.testing.assert_allclose(array, wanted, atol=2e-5, err_msg=name)


def gat_small() -> Model:
    return gat.build(90, DATA, hidden=4, heads=2)


def gcn_small() -> Model:
    return gcn.build(90, DATA, hidden=4)


def sage_small() -> Model:
    return sage.build(90, DATA, hidden=4, reduction="max")


def trained(build: Callable[[], Model], **how: Any) -> tuple[list[float], Array]:
    splits = DATA.splits()
    with build() as model:
        model.compile(Adam(0.05), "masked_cross_entropy", ["accuracy"], seed=3, **how)
        result = model.fit(splits.train_x, splits.train_y, epochs=6, shuffle=False, progress=False)
        scores = model.evaluate(splits.test_x, splits.test_y)
        found = model.predict(splits.test_x)
    assert DATA.labels is not None
    right = found.argmax(axis=1) == DATA.labels
    assert scores["accuracy"] == pytest.approx(right[DATA.parts["test"]].mean())
    return [record["loss"] for record in result.epochs], found


@pytest.mark.parametrize("build", [gcn_small, sage_small, gat_small])
def test_workers_and_threads_compute_what_one_does(build: Callable[[], Model]) -> None:
    losses, found = trained(build, cpus=1)
    assert losses[-1] < losses[0]
    for how in (
        {"machine": Machine.local(cpus=2)},
        {"machine": Machine.local(cpus=3)},
        {"machine": Machine.local(cpus=1, threads=2)},
    ):
        others, other = trained(build, **how)
        np.testing.assert_allclose(others, losses, rtol=1e-5)
        np.testing.assert_allclose(other, found, atol=1e-4)


def test_loss_is_the_mean_over_labelled_samples() -> None:
    x = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    labels = np.array([0, -1, 2, -1, -1, 1, 1, -1], np.int32)
    found = []
    for loss, rows in (("masked_cross_entropy", slice(None)), ("cross_entropy", labels >= 0)):
        model = Model("net", seed=1)
        size = len(x[rows])
        model.output(model.dense(model.input("x", (size, 3)), 3))
        with model:
            model.compile("sgd", loss, "accuracy")
            before = model.evaluate(x[rows], labels[rows])
            model.fit(x[rows], labels[rows], epochs=2, progress=False, shuffle=False)
            found.append((before, model.weights()["dense.weight"]))
    assert found[0][0] == pytest.approx(found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)
    with model, pytest.raises(DataError, match="-1 at row 1"):
        model.compile("sgd")
        model.fit(x[:4], labels[:4])


def test_only_named_parameters_decay() -> None:
    with gcn.build(90, DATA) as model:
        model.compile(Adam(0.1, weight_decay=0.5, decayed=("conv1.w*",)))
        found = {
            node.name: node.attributes["weight_decay"]
            for node in model.training_graph.nodes
            if node.operator == "adam"
        }
    assert found.pop("conv1.weight.update") == 0.5
    assert set(found.values()) == {0.0}
    with pytest.raises(GraphError, match="a tuple of names"):
        Adam(decayed="conv1")  # type: ignore[arg-type]


def test_apps_learn_from_a_graph_in_a_file(tmp_path: Path) -> None:
    write_graph(tmp_path / "a.npz", DATA)
    runs = (("gcn", 60, 0.1), ("sage", 30, 0.01), ("gin", 60, 0.01), ("gat", 60, 0.02))
    for app, epochs, rate in runs:
        result = train_app(
            app,
            graph=tmp_path / "a.npz",
            epochs=epochs,
            learning_rate=rate,
            cpus=1,
            progress=False,
        )
        assert result.test_accuracy is not None
        assert result.test_accuracy > 0.8, app
    for app, more, said in (
        ("gcn", {"batch_size": 7}, "a step is over all 90 vertices"),
        ("digits", {}, "a.npz' found of an app without one"),
        ("gcn", {"data": tmp_path}, "--data, which has no graph"),
    ):
        with pytest.raises((AppError, GraphError), match=said):
            train_app(app, graph=tmp_path / "a.npz", progress=False, **more)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda m, x: m.gcn_conv(x, DATA.adjacency, 3), "normalised"),
        (lambda m, x: m.gcn_conv(x, DATA.adjacency.normalised(), 0), "width 0"),
        (lambda m, x: m.gat_conv(x, DATA.adjacency.normalised(), 3), "edges with weights found"),
        (lambda m, x: m.gat_conv(x, DATA.adjacency, 3, heads=0), "width 3 and 0 heads"),
        (lambda m, x: m.gat_conv(x, DATA.adjacency, 3, dropout=1.0), "dropout 1.0 found"),
        (lambda m, x: m.aggregate(x, Adjacency.from_edges([0], [1], 2)), "with 2 vertices"),
        (lambda m, x: m.aggregate(x, DATA.adjacency.normalised(), "max"), "a max has none"),
        (lambda m, x: m.aggregate(x, DATA.adjacency, "min"), "reduction 'min'"),
    ],
)
def test_layers_name_what_does_not_fit(layer: Callable[[Model, Any], Any], said: str) -> None:
    with pytest.raises((GraphError, ShapeError), match=said):
        ran(layer)


def test_layers_have_names_of_their_own() -> None:
    model = Model("net")
    x, edges = model.input("x", (90, 12)), DATA.adjacency
    for _ in range(2):
        x = model.gcn_conv(x, edges.normalised(), 8)
        x = model.gin_conv(model.sage_conv(model.aggregate(x, edges), edges, 8), edges, 8)
    model.output(x)
    assert len(model.parameters()) == 2 * (2 + 4 + 3)
    assert len(model.constants) == 3 * 2 + 2


def test_a_constant_keeps_its_contents_through_compiling_again() -> None:
    values = np.arange(3, dtype=np.float32)
    model = Model("net")
    x = model.input("x", (2, 3))
    model.output(model.dense(model.mul(x, model.constant("c", values)), 1))
    one = np.ones((2, 3), np.float32)
    with model:
        first = model.predict(one)
        for _ in range(2):
            model.compile("sgd", "mse")
            np.testing.assert_allclose(model.predict(one), first, rtol=1e-6)


def test_data_without_labels_says_so() -> None:
    bare = GraphData("bare", DATA.adjacency, DATA.features)
    with pytest.raises(GraphError, match="0 classes"):
        gcn.build(90, bare)
    with pytest.raises(DataError, match="no labels found"):
        bare.splits()
