"""Small networks, and training them through every stage against the sequential NumPy run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapstone import SGD, Adam, AdamW, Model
from soapstone.engine.initial import materialise
from soapstone.frontend.training.state import TrainingState
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

BATCH = 6


def mlp(batch: int = BATCH) -> Model:
    model = Model("mlp", seed=3)
    x = model.input("x", (batch, 12))
    x = model.dense(x, 33, activation="relu", name="fc1")
    x = model.layer_norm(x, name="norm")
    x = model.dropout(x, 0.3, name="drop")
    x = model.gelu(model.dense(x, 20, name="fc2"))
    model.output(model.dense(x, 5, name="fc3"))
    return model


def wide() -> Model:
    model = Model("wide", seed=3)
    x = model.input("x", (32, 64))
    for number, width in enumerate((96, 160, 128, 96)):
        x = model.dense(x, width, activation="relu", name=f"fc{number}")
    model.output(model.dense(x, 5, name="last"))
    return model


def cnn(batch: int = BATCH) -> Model:
    model = Model("cnn", seed=1)
    x = model.input("x", (batch, 2, 9, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv1")
    # A bias before batch norm has no gradient but rounding, which nothing can compare.
    y = model.conv2d(x, 8, kernel=3, padding=1, groups=2, bias=False, name="conv2")
    x = model.relu(model.add(model.batch_norm(y, name="bn"), x), name="relu")
    x = model.max_pool2d(x, 3, stride=2, padding=1, name="pool")
    x = model.avg_pool2d(x, 2, name="avg")
    x = model.dense(model.flatten(x), 16, activation="tanh", name="fc1")
    model.output(model.dense(x, 5, name="fc2"))
    return model


BUILDERS: dict[str, Callable[[], Model]] = {"mlp": mlp, "cnn": cnn}
OPTIMIZERS = {
    "sgd": SGD(0.05),
    "nesterov": SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": Adam(1e-3),
    "adamw": AdamW(1e-3, weight_decay=0.1),
}


def data(model: Model, seed: int = 0) -> tuple[Array, Array]:
    graph = model.build()
    random = np.random.default_rng(seed)
    x = random.standard_normal(graph.tensors["x"].shape).astype(np.float32)
    return x, random.integers(0, 5, len(x)).astype(np.int32)


def sequential(
    model: Model, x: Array, y: Array, steps: int
) -> tuple[list[float], dict[str, Array]]:
    """Return the losses and the final state of the sequential NumPy run."""
    graph = model.training_graph
    state = {
        name: materialise(graph.initials.get(name), graph.tensors[name], model.seed, name)
        for role in (Role.PARAMETER, Role.STATE)
        for name in graph.inputs(role)
    }
    losses = []
    rate = model.trainer.optimizer.rate(0)
    for step in range(1, steps + 1):
        scalars = {"learning_rate": np.float32(rate), "step": np.int64(step)}
        given = state | {"x": x, "labels": y} | scalars
        found = interpret(graph, {name: np.asarray(given[name]) for name in graph.roles})
        losses.append(float(found[graph.outputs[0]]))
        state = {name: found.get(graph.updates.get(name, ""), state[name]) for name in state}
    return losses, state


def train(model: Model, x: Array, y: Array, steps: int) -> tuple[list[float], dict[str, Array]]:
    """Return the losses and the final state on the runtime."""
    state = TrainingState(model=model)
    losses = []
    for _ in range(steps):
        model.trainer.step({"x": x}, y, state)
        losses.append(state.loss)
    return losses, model.trainer.state()


def compare(model: Model, steps: int = 3) -> None:
    x, y = data(model)
    want_losses, want_state = sequential(model, x, y, steps)
    losses, found = train(model, x, y, steps)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    for name, value in want_state.items():
        scale = max(float(np.abs(value).max()), 1e-3)
        assert np.abs(found[name] - value).max() <= 2e-5 * scale, name
