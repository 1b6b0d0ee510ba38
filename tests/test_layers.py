"""Every layer of the API inside a trained model, against the sequential NumPy run."""

from __future__ import annotations

import numpy as np
import pytest
from test_training import compare

from soapstone import SGD, GraphError, Model, ShapeError
from soapstone.frontend.schedules import cosine
from soapstone.frontend.state import TrainingState


def images() -> Model:
    """Layers on images, and those that move data."""
    model = Model("images", seed=2)
    x = model.input("x", (6, 4, 10, 8))
    y = model.conv2d(x, 8, kernel=(3, 1), padding="same", dilation=(1, 1), activation="gelu")
    y = model.pad(y, (0, 0, 1, 0), (0, 0, 0, 2))
    left, right = model.split(y, (3, 5), axis=1)
    y = model.concat([right, model.leaky_relu(left, 0.1)], axis=1)
    y = model.slice(y, 2, 1, 11, 2)
    y = model.transpose(y, (0, 1, 3, 2))
    pooled = model.concat([model.global_avg_pool(y), model.global_max_pool(y)])
    rows = model.reshape(model.reduce_sum(y, 3), (-1, 80))
    z = model.concat([pooled, model.tanh(model.dense(rows, 12))], axis=-1)
    z = model.sigmoid(model.dense(z, 16)) * 2.0 - 0.5
    z = (z**2.0 + 1.0) / (model.exp(-z) + 1.0)
    z = model.sqrt(model.log(z + 3.0)) @ model.transpose(model.softmax(z), (1, 0))
    model.output(model.dense(model.log_softmax(z), 5))
    return model


def test_layers_equal_the_sequential_run() -> None:
    with images() as model:
        model.compile(SGD(0.05), metrics=["accuracy"], cpus=2)
        compare(model)


@pytest.mark.parametrize("loss", ["mse", "bce_with_logits", "cross_entropy_dense"])
def test_losses_on_embeddings_fall(loss: str) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 11, (32, 4)).astype(np.int32)
    target = (ids[:, :3] > 5).astype(np.float32)
    target /= np.maximum(target.sum(1, keepdims=True), 1) if loss == "cross_entropy_dense" else 1
    with Model("ids", seed=1) as model:
        x = model.input("ids", (8, 4), dtype="int32")
        x = model.reduce_mean(model.embedding(x, 11, 6), 1) + model.flatten(
            model.reduce_max(model.embedding(x, 11, 6), 1)
        )
        model.output(model.dense(x, 3))
        model.compile(SGD(cosine(0.2, 40)), loss=loss, cpus=2)
        result = model.fit(ids, target, epochs=10, progress=False)
        assert result.epochs[-1]["loss"] < 0.95 * result.epochs[0]["loss"]
        with pytest.raises(RuntimeError, match="embedding"):
            model.trainer.step({"ids": np.full((8, 4), 11)}, target[:8], TrainingState())


def test_layers_name_what_does_not_fit() -> None:
    model = Model("bad")
    x = model.input("x", (2, 3, 4, 4))
    for call, error, message in (
        (lambda: model.conv2d(x, 4, kernel=3, groups=2), ShapeError, "groups 2"),
        (lambda: model.conv2d(x, 4, kernel=(1, 2, 3)), GraphError, "kernel"),
        (lambda: model.conv2d(x, 4, kernel=3, padding="full"), GraphError, "'full' found"),
        (lambda: model.reshape(x, (-1, -1)), ShapeError, "at most one"),
        (lambda: model.softmax(x, axis=4), ShapeError, "axis 4 found"),
        (lambda: model.dropout(x, 1.0), GraphError, "rate 1.0 found"),
        (lambda: model.slice(x, 0, 0, 1), GraphError, "axis 0"),
        (lambda: model.split(x, (1, 1)), ShapeError, "split"),
    ):
        with pytest.raises(error, match=message):
            call()
