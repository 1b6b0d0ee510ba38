"""Training through every stage against the sequential NumPy run of the same graph."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.training_runs import (
    BATCH,
    BUILDERS,
    OPTIMIZERS,
    cnn,
    compare,
    data,
    mlp,
    train,
)

from soapstone import SGD, Adam, Machine, Model, NonFiniteLoss, Strategy
from soapstone.callbacks import Callback
from soapstone.engine.mapper import GraphMapper
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.state import TrainingState
from soapstone.ir.strategy import Configuration
from soapstone.ir.tensor import Array
from soapstone.runtime import Launch


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_default_mapper_equals_the_sequential_run(kind: str, optimizer: str) -> None:
    with BUILDERS[kind]() as model:
        model.compile(OPTIMIZERS[optimizer], metrics=["accuracy"], cpus=2)
        compare(model)


@pytest.mark.parametrize("mapper", ["sequential", "round_robin"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_other_mappers_equal_the_sequential_run(kind: str, mapper: str) -> None:
    with BUILDERS[kind]() as model:
        model.compile("sgd", cpus=3, mapper=mapper)
        compare(model)


class Scattered(GraphMapper):
    """Puts every point on a pseudo-random processor."""

    def place_all(self, launch: Launch) -> Array:
        key = sum(map(ord, launch.name))
        return np.arange(key, key + launch.points) * 7 % len(self.machine.processors)


def random_strategy(model: Model, seed: int) -> Strategy:
    """Return a random legal configuration, up to 4 points, for every operator of the graph."""
    graph = model.training_graph
    random = np.random.default_rng(seed)
    configurations = {}
    for node in graph.nodes:
        choices = list(graph.signature(node).configurations(4))
        configurations[node.name] = Configuration(choices[random.integers(len(choices))])
    return Strategy(
        configurations=configurations,
        model=graph.name,
        model_hash=graph.structural_hash,
        machine=model.trainer.machine.describe(),
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", BUILDERS)
def test_random_strategies_equal_the_sequential_run(kind: str, seed: int) -> None:
    machine = Machine.local(cpus=1 + seed % 3, memories=1 + seed % 3 // 2)
    with BUILDERS[kind]() as model:
        model.compile("sgd", machine=machine)
        strategy = random_strategy(model, seed)
    with BUILDERS[kind]() as model:
        model.compile(OPTIMIZERS["nesterov"], machine=machine)
        strategy = random_strategy(model, seed)
        model.compile(OPTIMIZERS["nesterov"], machine=machine, strategy=strategy)
        compare(model)


@pytest.mark.parametrize("kind", BUILDERS)
def test_placement_does_not_change_a_bit(kind: str) -> None:
    states = []
    for mapper in (None, Scattered()):
        with BUILDERS[kind]() as model:
            machine = Machine.local(cpus=2)
            model.compile("adam", machine=machine)
            strategy = model.strategy
            if mapper is not None:
                mapper.strategy = lambda graph, machine, s=strategy: Strategy(  # type: ignore[method-assign]
                    configurations={
                        n: Configuration(c.degrees) for n, c in s.configurations.items()
                    },
                    layouts=s.layouts,
                )
                model.compile("adam", machine=machine, mapper=mapper)
            states.append(train(model, *data(model), 4))
    assert states[0][0] == states[1][0]
    for name, value in states[0][1].items():
        np.testing.assert_array_equal(value, states[1][1][name], err_msg=name)


def test_a_nan_names_step_and_layer_and_leaves_the_parameters() -> None:
    with mlp() as model:
        model.compile(SGD(0.1), cpus=2)
        x, y = data(model)
        train(model, x, y, 2)
        weights = model.weights()
        weights["fc2.weight"][0, 0] = np.nan
        model.set_weights(weights)
        with pytest.raises(NonFiniteLoss, match=r"step 2: .*fc2"):
            train(model, x, y, 1)
        for name, value in model.weights().items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_fewer_samples_than_a_batch_are_counted_as_they_are() -> None:
    with Model("few") as model:
        model.output(model.dense(model.input("x", (64, 3)), 2))
        model.compile(SGD(0.1), cpus=1)
        samples, targets = np.ones((5, 3), np.float32), np.zeros(5, np.int32)
        result = model.fit(samples, targets, batch_size=64, progress=False)
    assert result.samples_per_s * result.step_us * 1e-6 == pytest.approx(5)


def test_a_value_that_overflows_is_told_without_warnings_of_numpy() -> None:
    with Model("steep") as model:
        model.output(model.dense(model.dense(model.input("x", (2, 3)), 3, name="a"), 2, name="b"))
        model.compile(SGD(0.1), cpus=1)
        weights = {name: np.full_like(value, 1e30) for name, value in model.weights().items()}
        model.set_weights(weights)
        samples, targets = np.ones((2, 3), np.float32), np.zeros(2, np.int32)
        with warnings.catch_warnings(), pytest.raises(NonFiniteLoss, match="made by linear 'b"):
            warnings.simplefilter("error")
            model.fit(samples, targets, batch_size=2, progress=False)


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adam(1e-3)])
def test_weights_that_overflow_are_named_and_never_saved(
    optimizer: SGD | Adam, tmp_path: Path
) -> None:
    with Model("steep") as model:
        x = model.input("x", (4, 3))
        model.output(model.dense(model.dense(x, 3, name="a"), 1, name="b"))
        model.compile(optimizer, loss="mse", cpus=1)
        good = model.weights()
        model.save_checkpoint(tmp_path / "good.npz")
        before = (tmp_path / "good.npz").read_bytes()
        steep = {"a.weight": np.full((3, 3), 1e-30), "b.weight": np.full((3, 1), 1e30)}
        zeros = {name: np.zeros_like(value) for name, value in good.items() if "bias" in name}
        model.set_weights({n: v.astype(np.float32) for n, v in {**steep, **zeros}.items()})
        samples, targets = np.full((4, 3), 1e10, np.float32), np.zeros((4, 1), np.float32)
        history = model.fit(samples, targets, batch_size=4, progress=False)
        assert np.isfinite(history.last("loss"))  # and yet the gradient of a is not
        assert not np.isfinite(model.weights()["a.weight"]).any()
        with pytest.raises(CheckpointError, match=r"not written: .* values that are not finite"):
            model.save_checkpoint(tmp_path / "good.npz")
        assert (tmp_path / "good.npz").read_bytes() == before
        with pytest.raises(NonFiniteLoss, match=r"made by input 'a.weight'"):
            model.fit(samples, targets, batch_size=4, progress=False)
        model.load_checkpoint(tmp_path / "good.npz")
        np.testing.assert_array_equal(model.weights()["a.weight"], good["a.weight"])


def normalised(batch: int = BATCH) -> Model:
    """Two batch norms, whose states a forward pass makes, before an optimiser with states."""
    model = Model("normalised", seed=2)
    x = model.input("x", (batch, 3, 6, 6))
    x = model.relu(model.batch_norm(model.conv2d(x, 8, kernel=3, padding=1), name="bn1"))
    x = model.batch_norm(model.dense(model.flatten(x), 16), name="bn2")
    model.output(model.dense(x, 5))
    return model


SPLITS: dict[str, dict[str, int]] = {"samples": {"n": 2}, "channels": {"c": 2}, "whole": {}}


@pytest.mark.parametrize("split", SPLITS)
def test_a_refused_step_leaves_every_state_as_it_was(split: str) -> None:
    with normalised() as model:
        model.compile(OPTIMIZERS["adam"], cpus=2)
        norms = dict.fromkeys(("bn1", "bn2"), Configuration(SPLITS[split]))
        strategy = Strategy({"*": Configuration(), **norms})
        model.compile(OPTIMIZERS["adam"], cpus=2, strategy=strategy)
        x, y = data(model)
        train(model, x, y, 2)
        before = model.trainer.session.state()
        bad = x.copy()
        bad[1, 2] = np.nan
        with pytest.raises(NonFiniteLoss):
            train(model, bad, y, 1)
        after = model.trainer.session.state()
        assert {"bn1.mean", "bn2.variance"} <= before.keys() == after.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
        launches = model.trainer.bound("train", BATCH).program.launches
        stores = sum(item.node.operator == "store" for item in launches)
        assert stores == (4 if split == "channels" else 1)


def test_a_label_out_of_range_is_one_error_and_training_goes_on() -> None:
    with mlp() as model:
        model.compile("sgd", cpus=2)
        x, y = data(model)
        before = train(model, x, y, 1)[1]
        with pytest.raises(RuntimeError, match="label"):
            train(model, x, np.full_like(y, 5), 1)
        assert np.isfinite(train(model, x, y, 1)[0]).all()
        assert before.keys() == model.weights().keys()


def test_steps_after_the_first_allocate_nothing() -> None:
    with cnn() as model:
        model.compile("sgd", cpus=2)
        x, y = data(model)
        train(model, x, y, 1)
        before = model.peak_bytes
        counted = model.statistics["runtime"]["allocations"]
        train(model, x, y, 3)
        assert model.peak_bytes == before
        assert model.statistics["runtime"]["allocations"] == counted


class Halve(Callback):
    """Halves the learning rate after each epoch."""

    def on_epoch_end(self, state: TrainingState) -> None:
        state.learning_rate /= 2


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_resumed_run_goes_on_at_the_rate_that_a_callback_set(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"c{suffix}"

    def fit(epochs: int, **options: Any) -> dict[str, Array]:
        with mlp() as model:
            model.compile(SGD(0.5, momentum=0.9), cpus=1)
            x, y = data(model)
            model.fit(x, y, epochs=epochs, callbacks=[Halve()], progress=False, **options)
            model.save_checkpoint(path)
            return model.weights()

    wanted = fit(6)
    fit(2)
    fit(4, resume=path)
    for name, value in fit(6, resume=path).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_a_batch_of_more_samples_than_there_are_is_one_of_all() -> None:
    """Nothing is bound, whose kernels would be measured, for samples that there are not."""
    runs = []
    for size in (BATCH, 100_000):
        with mlp() as model:
            x, y = (each[:BATCH] for each in data(model))
            model.compile("sgd", cpus=1)
            result = model.fit(x, y, batch_size=size, epochs=2, shuffle=False, progress=False)
            runs.append((result.history["loss"], [key[1] for key in model.trainer._bounds]))
    assert runs[0] == runs[1]
