"""Layers that are called twice, and operators of Python on tensors, against torch and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import soapstone
from soapstone import SGD, GraphError, Model, ShapeError

RANDOM = np.random.default_rng(0)
A, B = (RANDOM.standard_normal((8, 6)).astype(np.float32) for _ in range(2))
LABELS = RANDOM.integers(0, 3, 8)


def siamese() -> Model:
    """A model that embeds two inputs by one tower, and tells their difference."""
    model = Model("siamese", seed=0)
    tower = model.shared(lambda x: model.batch_norm(model.dense(x, 5, "tanh", name="embed")))
    left, right = (tower(model.input(name, (8, 6))) for name in "ab")
    model.output(model.dense(abs(left - right), 3, name="head"))
    return model


def test_a_layer_that_is_called_twice_has_one_set_of_parameters(tmp_path: Path) -> None:
    model = siamese()
    weights = {name: torch.tensor(value) for name, value in model.weights().items()}
    linear, norm, head = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
    with torch.no_grad():
        for layer, name in ((linear, "embed"), (head, "head")):
            layer.weight.copy_(weights[f"{name}.weight"].T)
            layer.bias.copy_(weights[f"{name}.bias"])

    def tower(x: Any) -> torch.Tensor:
        return norm(torch.tanh(linear(torch.tensor(x))))

    loss = torch.nn.functional.cross_entropy(
        head((tower(A) - tower(B)).abs()), torch.tensor(LABELS)
    )
    loss.backward()
    model.compile(SGD(0.1))
    inputs = {"a": A, "b": B}
    grads = model.gradients(inputs, LABELS)
    assert grads.keys() == model.parameters().keys()
    np.testing.assert_allclose(grads["embed.weight"], linear.weight.grad.T, atol=1e-6)
    np.testing.assert_allclose(grads["head.weight"], head.weight.grad.T, atol=1e-6)
    assert model.train_on_batch(inputs, LABELS)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    # Running statistics have followed one call after the other.
    np.testing.assert_allclose(model.weights()["batch_norm.mean"], norm.running_mean, atol=1e-6)
    np.testing.assert_allclose(model.weights()["batch_norm.variance"], norm.running_var, atol=1e-6)
    model.save(tmp_path / "m.safetensors")
    again = soapstone.load(tmp_path / "m.safetensors")
    assert again.parameters() == model.parameters()
    np.testing.assert_allclose(again.predict(inputs), model.predict(inputs), atol=1e-6)
    assert f"{sum(value.size for value in grads.values()):,} parameters" in model.summary()


def test_dropout_of_a_shared_layer_draws_for_each_call() -> None:
    model = Model("net")
    x = model.input("x", (4, 100))
    drop = model.shared(model.dropout, 0.5)
    model.output(model.concat([drop(x), drop(x)]))
    nodes = [node for node in model.build(training=True).nodes if node.operator == "dropout"]
    assert len({dict(node.attributes)["seed"] for node in nodes}) == 2


def test_a_shared_layer_refuses_what_does_not_fit_its_first_call() -> None:
    model = Model("net")
    x, y = model.input("x", (4, 6)), model.input("y", (4, 7))
    h = model.shared(model.dense, 3, name="h")
    h(x)
    with pytest.raises(ShapeError, match=r"'h.weight': shape \(7, 3\) found, \(6, 3\) needed"):
        h(y)
    layers = iter([model.relu, model.tanh])
    changing = model.shared(lambda t: next(layers)(t))
    changing(x)
    with pytest.raises(GraphError, match="tanh found, relu as in its first call needed"):
        changing(x)
    model.output(h(x))
    assert model.parameters() == {"h.weight": (6, 3), "h.bias": (3,)}


T = RANDOM.uniform(0.5, 2, (3, 4, 5)).astype(np.float32)
S = np.s_
OPERATORS: list[Callable[[Any], Any]] = [
    lambda t: 1 - t * 2 + t / 4,
    lambda t: 2 / t - abs(-t),
    lambda t: t**2 + t**t,
    lambda t: t.sum(1) + t.mean((1,)) - t.max(1) * t.min(1),
    lambda t: t.reshape(3, -1).transpose(1, 0),
]
CUTS = [
    S[:, 0],
    S[..., -1],
    S[:, 1:3, ::2],
    S[:, None, 2],
    S[:, ::-1],
    S[:, :, -2:, None],
    S[:, 3:1],
    S[:, 1, 2],
]


@pytest.mark.parametrize("key", CUTS, ids=str)
def test_brackets_cut_as_numpys_do(key: Any) -> None:
    model = Model("net")
    model.output(model.input("t", T.shape)[key])
    with model.inference() as session:
        (found,) = session.run({"t": T}).values()
    np.testing.assert_array_equal(found, T[key])


@pytest.mark.parametrize("function", OPERATORS)
def test_operators_take_numbers_as_numpys_do(function: Callable[[Any], Any]) -> None:
    model = Model("net")
    model.output(function(model.input("t", T.shape)))
    with model.inference() as session:
        (found,) = session.run({"t": T}).values()
    np.testing.assert_allclose(found, function(T), rtol=1e-5)


def test_layers_of_several_operands_take_numbers() -> None:
    model = Model("net")
    t = model.input("t", T.shape)
    model.output(model.where(t > 1, model.mul(t, 2.0), model.maximum(0.75, t)))
    with model.inference() as session:
        (found,) = session.run({"t": T}).values()
    np.testing.assert_allclose(found, np.where(T > 1, T * 2, np.maximum(0.75, T)))
    with pytest.raises(GraphError, match="add: numbers alone found"):
        model.add(1, 2)


def test_arguments_stand_where_other_libraries_have_them() -> None:
    model = Model("net")
    x = model.input("x", (2, 3, 8, 8))
    assert model.conv2d(x, 8, 3).shape == (2, 8, 6, 6)
    assert model.conv2d(x, 8, 3, 2, 1).shape == (2, 8, 4, 4)
    assert model.max_pool2d(x, 3, 2, 1).shape == (2, 3, 4, 4)
    assert model.dense(model.flatten(x), 4, "relu").shape == (2, 4)
