"""Every layer of the API inside a trained model, against the sequential NumPy run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.session_runs import ran
from helpers.training_runs import compare

from soapstone import SGD, GraphError, Model, ShapeError
from soapstone.frontend.training.schedules import cosine
from soapstone.frontend.training.state import TrainingState


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


def vision() -> Model:
    """Convolutions of every rank, windows and the norms of images."""
    model = Model("vision", seed=3)
    x = model.input("x", (6, 4, 10, 8))
    y = model.separable_conv2d(x, 6, kernel=3, padding="same", initial="he")
    y = model.depthwise_conv2d(model.group_norm(y, 3), kernel=3, multiplier=2, activation="relu")
    y = model.conv_transpose(model.instance_norm(y), 4, kernel=3, stride=2, output_padding=1)
    y = model.lrn(model.resize(y, (9, 7), "linear"), 3)
    rows = model.reshape(model.pad(y, (0, 0, 1, 0), (0, 0, 0, 1), mode="reflect"), (-1, 4, 80))
    rows = model.max_pool(model.conv1d(rows, 3, kernel=4, stride=2), 3, stride=2, ceil_mode=True)
    rows = model.rms_norm(model.avg_pool(rows, 2, ceil_mode=True, include_pad=False))
    deep = model.reshape(model.prelu(y), (-1, 1, 4, 9, 7))
    deep = model.avg_pool(model.conv3d(deep, 2, kernel=(2, 3, 3)), (1, 2, 2))
    joined = model.concat([model.flatten(rows), model.flatten(deep)])
    model.output(model.dense(joined, 5))
    return model


def activations() -> Model:
    """Element-wise layers and choices."""
    model = Model("activations", seed=4)
    x = model.input("x", (6, 7))
    y = model.dense(x, 8)
    parts = [
        model.silu(y),
        model.elu(y),
        model.celu(y, 0.5),
        model.selu(y),
        model.mish(y),
        model.softplus(y),
        model.softsign(y),
        model.hard_sigmoid(y),
        model.hard_swish(y),
        model.erf(y),
        model.clip(y, -0.3, 0.4),
        model.abs(y),
        model.sin(y) * model.cos(y),
        model.reciprocal(y**2.0 + 1.0),
        model.maximum(y, model.minimum(y * 2.0, y - 0.1)),
        model.where(model.greater(y, y * 0.5), y, model.exp(y)),
    ]
    model.output(model.dense(model.concat(parts), 5))
    return model


def movement() -> Model:
    """Layers that index, move and reduce."""
    model = Model("movement", seed=5)
    x = model.input("x", (6, 4, 6))
    y = model.reshape(model.dense(x, 8), (-1, 8, 2, 2))
    y = model.space_to_depth(model.tile(model.depth_to_space(y, 2), (1, 2, 1, 2)), 2)
    y = model.reverse(model.reshape(y, (-1, 16, 8)), 2)
    y = model.cumsum(model.trilu(y, upper=False), 1) + model.expand(
        model.reduce_l2(y, 2, keepdims=True), (6, 16, 8)
    )
    values, indices = model.top_k(y, 3, 1)
    parts = [
        model.reshape(values, (-1, 24)),
        model.reshape(model.gather_elements(y, indices, 1), (-1, 24)),
        model.reduce_min(y, 1),
        model.reduce_l1(y, 1),
        model.reduce_sum_square(y, 1),
        model.reduce_log_sum_exp(y, 1),
        model.reduce_prod(model.sigmoid(model.slice(y, 1, 0, 3)), 1),
        model.reduce_log_sum(model.exp(y), 1),
        model.reshape(model.einsum("nij,nik->njk", y, y), (-1, 64)),
        model.lp_norm(model.reduce_max(y, 2)),
    ]
    model.output(model.dense(model.concat(parts) * 0.1, 5))
    return model


@pytest.mark.parametrize("build", [images, vision, activations, movement])
def test_layers_equal_the_sequential_run(build: Callable[[], Model]) -> None:
    with build() as model:
        model.compile(SGD(0.02), metrics=["accuracy"], cpus=2)
        compare(model)


def test_layers_of_whole_numbers_and_truth_values() -> None:
    random = np.random.default_rng(3)
    x = random.integers(-3, 4, (4, 5)).astype(np.float32)
    ids = random.integers(0, 4, (4, 5)).astype(np.int32)
    with Model("truth") as model:
        a, i = model.input("a", (4, 5)), model.input("i", (4, 5), "int32")
        zero = a * 0.0
        positive, small = model.greater_equal(a, zero), model.less(model.abs(a), zero + 2.0)
        pairs = {
            "equal": (model.equal(a, zero), x == 0),
            "order": (model.less_equal(a, zero), x <= 0),
            "and": (model.logical_and(positive, small), (x >= 0) & (np.abs(x) < 2)),
            "or": (model.logical_or(positive, small), (x >= 0) | (np.abs(x) < 2)),
            "xor": (model.logical_xor(positive, small), (x >= 0) ^ (np.abs(x) < 2)),
            "not": (model.logical_not(positive), x < 0),
            "cast": (model.cast(a, "int32"), x.astype(np.int32)),
            "round": (model.round(a * 0.5), np.round(x / 2)),
            "floor": (model.floor(a * 0.5) + model.ceil(a * 0.5), np.floor(x / 2) + np.ceil(x / 2)),
            "sign": (model.sign(a), np.sign(x)),
            "argmax": (model.argmax(a, 1), x.argmax(1)),
            "argmin": (model.argmin(a, 1, keepdims=True), x.argmin(1)[:, None]),
            "gather": (model.gather(a, i), x[ids]),
            "scatter": (
                model.scatter_elements(zero, i, a, 1, "add"),
                np.stack([np.bincount(r, v, 5) for r, v in zip(ids, x)]),
            ),
        }
        model.output(model.reduce_sum(a, 1), *(found for found, _ in pairs.values()))
        graph = model.build()
        results, _ = ran(graph, {"a": x, "i": ids})
        found = [results[output] for output in graph.outputs[1:]]
    for (name, (_, wanted)), value in zip(pairs.items(), found, strict=True):
        np.testing.assert_array_equal(value, wanted, err_msg=name)


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
            model.trainer.step({"ids": np.full((8, 4), 11, np.int32)}, target[:8], TrainingState())


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
        (lambda: model.conv1d(x, 4, kernel=3), ShapeError, "n c l needed"),
        (lambda: model.conv2d(x, 4, kernel=3, initial="ones"), GraphError, "'ones' found"),
        (lambda: model.conv_transpose(x, 4, kernel=3, groups=2), ShapeError, "groups 2"),
        (lambda: model.max_pool(model.flatten(x), 2), ShapeError, "max_pool: x has shape"),
        (lambda: model.group_norm(x, 2), ShapeError, "multiple of 2"),
        (lambda: model.instance_norm(model.flatten(x)), ShapeError, "n c l"),
        (lambda: model.resize(x, (2,)), ShapeError, "resize"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("layer", "wrong", "right"),
    [
        ("dense", {"width": 3, "activation": "rele"}, {"width": 3}),
        ("conv2d", {"channels": 3, "kernel": 9}, {"channels": 3, "kernel": 2}),
        (
            "separable_conv2d",
            {"channels": 3, "kernel": 2, "activation": "rele"},
            {"channels": 3, "kernel": 2},
        ),
        ("group_norm", {"groups": 3}, {"groups": 2}),
        ("lstm", {"width": 3, "layers": 2, "dropout": 1.5}, {"width": 3, "layers": 2}),
        ("rnn", {"width": 3, "layers": 2, "activation": "rele"}, {"width": 3, "layers": 2}),
    ],
)
def test_a_refused_layer_leaves_nothing(
    layer: str, wrong: dict[str, object], right: dict[str, object]
) -> None:
    """The same name is free again, and the model is what it is without the refused calls."""
    shape = (2, 4, 5, 5) if layer in ("conv2d", "separable_conv2d", "group_norm") else (2, 5, 4)
    texts = []
    for refused in (False, True):
        model = Model("m")
        x = model.tanh(model.input("x", shape))
        if refused:
            for arguments in (wrong, {**wrong, "name": "here"}):
                with pytest.raises((GraphError, ShapeError)):
                    getattr(model, layer)(x, **arguments)
        y = getattr(model, layer)(x, **right, name="here")
        z = getattr(model, layer)(x, **right)
        model.output(*(made[0] if isinstance(made, tuple) else made for made in (y, z)))
        texts.append(f"{model.graph} {model.parameters()}")
    assert texts[0] == texts[1]


def test_a_refused_input_leaves_its_batch_size_open() -> None:
    model = Model("m")
    with pytest.raises(GraphError):
        model.input("x", (3, 4), "float31")
    assert model.input("x", (5, 4)).shape == (5, 4) and model.batch_size == 5


def test_functions_of_numpy_are_the_layers_of_their_names() -> None:
    model = Model("net")
    t = model.input("t", (2, 3))
    made = (np.exp(t), np.float32(2) - t, np.maximum(t, 0.5), np.power(t, 2), np.abs(t), 1 / t)
    model.output(*made)
    x = np.array([[1, 2, 3], [-1, 0.25, 4]], np.float32)
    expected = (np.exp(x), 2 - x, np.maximum(x, 0.5), x**2, np.abs(x), 1 / x)
    for found, value in zip(model.predict(x), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5)
