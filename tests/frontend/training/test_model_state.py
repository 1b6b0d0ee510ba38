"""Weights that can be read and set at any time, and what a fit refuses before its first step."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, Adam, Model
from soapstone.errors import DataError
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.callbacks import EarlyStopping
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.tensor import Array


def net(seed: int = 3, activation: str = "relu", width: int = 16) -> Model:
    model = Model("net", seed=seed)
    x = model.input("x", (8, 12))
    x = model.batch_norm(model.dense(x, width, activation=activation, name="hidden"), name="norm")
    model.output(model.dense(x, 4, name="o"))
    return model


def samples(rows: int = 40) -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, 12)).astype(np.float32)
    return x, random.integers(0, 4, rows)


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def fit(model: Model, **options: Any) -> None:
    model.fit(*samples(), progress=False, **options)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(1e-2)])
def test_what_weights_returns_can_be_set_at_any_time(optimizer: Any) -> None:
    x, _ = samples()
    with net() as model:
        other = net(seed=4).weights()
        assert not same(model.weights(), other)

        def replaced() -> None:
            before = model.weights()
            model.set_weights(other)
            assert same(model.weights(), other)
            model.set_weights(before)
            assert same(model.weights(), before)

        replaced()  # before compile
        model.compile(optimizer, cpus=2)
        replaced()  # before the first step
        model.predict(x)
        replaced()
        fit(model)
        replaced()
    replaced()  # after close
    assert same(model.weights(), model.weights())


def test_weights_set_before_compile_are_trained_and_predicted_with() -> None:
    x, _ = samples()
    with net() as model:
        zero = {name: value * 0 for name, value in model.weights().items()}
        model.set_weights(zero)
        assert not model.predict(x).any()
        model.compile(SGD(0.0), cpus=1)
        assert not model.predict(x).any()


def test_compiling_again_keeps_weights_and_states_of_the_same_optimizer() -> None:
    x = samples()[0]
    states = []
    for again in (False, True):
        with net() as model:
            model.compile(Adam(1e-2), cpus=2)
            fit(model, shuffle=False)
            if again:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    model.compile(Adam(1e-2), cpus=1, metrics="accuracy")
            fit(model, shuffle=False)
            states.append(model.trainer.state())
            before = model.weights()
            with pytest.warns(UserWarning, match="begins anew"):
                model.compile(SGD(1e-2))
            assert same(model.weights(), before)
            predicted = model.predict(x)
        np.testing.assert_allclose(model.predict(x), predicted, rtol=1e-5, atol=1e-6)  # closed
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():  # another split: equal but for rounding
        np.testing.assert_allclose(states[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_an_untrained_model_follows_its_new_seed() -> None:
    with net() as model:
        model.compile("sgd", cpus=1)
        model.predict(samples()[0])
        model.compile("sgd", cpus=1, seed=9)
        assert same(model.weights(), net(seed=9).weights())


def test_weights_seen_by_another_thread_are_of_one_step() -> None:
    """With equal gradients, both weights of a sum of two layers are equal after each step."""
    model = Model("twins")
    x = model.input("x", (8, 4))
    model.output(model.add(model.dense(x, 1, name="a"), model.dense(x, 1, name="b")))
    with model:
        model.compile(SGD(1e-3), loss="mse", cpus=1)
        start = {name: np.zeros_like(value) for name, value in model.weights().items()}
        model.set_weights(start)
        done, torn, seen = threading.Event(), [], []

        def look() -> None:
            while not done.is_set():
                found = model.weights()
                seen.append(float(found["a.bias"][0]))
                if not np.array_equal(found["a.weight"], found["b.weight"]):
                    torn.append(found)

        thread = threading.Thread(target=look)
        thread.start()
        random = np.random.default_rng(0)
        data = random.standard_normal((400, 4)).astype("f4"), np.ones((400, 1), "f4")
        model.fit(*data, epochs=5, progress=False)
        done.set()
        thread.join()
        assert not torn and seen


def test_bad_weights_replace_nothing() -> None:
    with net() as model:
        before = model.weights()
        for values, message in (
            ({"o.bias": before["o.bias"], "x": np.zeros(3)}, "'x' does not exist"),
            ({"o.bias": np.ones(3)}, r"of shape \(3,\) found, float32\[4\] needed"),
            ({"o.bias": np.array(["a"] * 4)}, "found, float32"),
        ):
            with pytest.raises(GraphError, match=message):
                model.set_weights(values)
        assert same(model.weights(), before)


# ------------------------------------------------------------------------------------- labels, ids
def test_labels_and_ids_are_checked_before_they_are_cast() -> None:
    x, y = samples()
    with net() as model:
        model.compile("sgd", cpus=1)
        fit(model)
        for wrong in (13, -1, 2**32 + int(y[5])):
            labels = y.copy()
            labels[5] = wrong
            message = rf"labels: {wrong} at row 5; layer 'o' has 4 classes \(0-3\)"
            for call in (model.fit, model.evaluate):
                with pytest.raises(DataError, match=message):
                    call(x, labels)
        with pytest.raises(DataError, match="labels: 4294967"):
            model.trainer.step({"x": x[:8]}, y[:8] + 2**32, TrainingState())
        with pytest.raises(DataError, match="labels: 9 at row 2"):
            model.fit([(x[:8], y[:8]), (x[:8], np.where(np.arange(8) == 2, 9, y[:8]))])


def test_ids_are_rows_of_their_table() -> None:
    model = Model("text")
    ids = model.input("ids", (4, 3), "int32")
    model.output(model.dense(model.flatten(model.embedding(ids, 50, 8, name="words")), 2))
    with model:
        model.compile("sgd", cpus=1)
        good = np.arange(12).reshape(4, 3)
        model.fit(good, [0, 1, 0, 1], progress=False)
        for wrong in (50, -2, 2**32):
            bad = good.copy()
            bad[3, 1] = wrong
            with pytest.raises(DataError, match=rf"ids: {wrong} at row 3; layer 'words' has 50 r"):
                model.predict(bad)


# ---------------------------------------------------------------------------------- what is refused
class SetsRate(Callback):
    def __init__(self, rate: Any) -> None:
        self.rate = rate
        self.seen: list[float] = []

    def on_step_end(self, state: TrainingState) -> None:
        self.seen.append(state.learning_rate)
        if state.step == 2:
            state.learning_rate = self.rate


def test_a_callback_sets_the_rate_of_the_steps_that_follow() -> None:
    with net() as model:
        model.compile(SGD(0.1), cpus=1)
        hook = SetsRate(0.0)
        before: list[dict[str, Array]] = []

        class Look(Callback):
            def on_step_end(self, state: TrainingState) -> None:
                before.append(model.weights())

        fit(model, callbacks=[hook, Look()])
        assert hook.seen == [0.1, 0.1, 0.0, 0.0, 0.0]
        assert not np.array_equal(before[0]["o.weight"], before[1]["o.weight"])
        assert np.array_equal(before[1]["o.weight"], before[4]["o.weight"])
        with pytest.raises(ValueError, match="learning_rate: 'fast' set by a callback"):
            fit(model, callbacks=[SetsRateAt("fast")])


class SetsRateAt(Callback):
    def __init__(self, rate: Any) -> None:
        self.rate = rate

    def on_step_end(self, state: TrainingState) -> None:
        state.learning_rate = self.rate


def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    x, y = samples()
    empty: list[Any] = []
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": x[:0], "y": y[:0]}, "fit: 0 samples found"),
        ({"x": x[:, :5]}, r"'x': samples of shape \(5,\) found, \(12,\) needed"),
        ({"y": y + 0.5}, "labels"),
        ({"y": None}, "labels are missing"),
        ({"y": y[:-1]}, "rows found"),
        ({"x": empty, "y": None}, "0 samples found|found"),
        ({"x": {"image": x}}, "input 'image' is unknown, 'x' is missing; model 'net' takes 'x'"),
        ({"x": {"x": x, "z": x}}, "input 'z' is unknown"),
        ({"batch_size": 0}, "batch_size: 0 found, an integer of 1"),
        ({"batch_size": 2.5}, "batch_size: float 2.5 found, an integer needed"),
        ({"epochs": 2.5}, "epochs: float 2.5 found, an integer needed"),
        ({"epochs": -1}, "epochs: -1 found"),
        ({"validation_data": (x[:, :5], y)}, r"validation_data: input 'x': samples of shape \(5,"),
        ({"validation_data": (x, y + 4)}, r"labels: \d at row 0"),
        ({"validation_data": 3}, "validation_data: int found, a pair"),
        ({"validation_data": str(tmp_path / "no")}, "no such file or folder"),
        ({"callbacks": [EarlyStopping()]}, "monitor 'validation_loss' found, one of loss needed"),
    ]
    with net() as model:
        model.compile("sgd", cpus=1)
        before = model.weights()
        for change, message in cases:
            with pytest.raises(ValueError, match=message):
                model.fit(**{"x": x, "y": y, "progress": False, **change})
            assert same(model.weights(), before), message


def test_arguments_that_do_not_fit_are_named() -> None:
    model = Model("bad")
    x = model.input("x", (4, 6))
    y = model.input("y", (4, 7))
    image = model.input("image", (4, 3, 8, 8))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: model.add(x, y, name="sum"), ShapeError, "add 'sum': dim d1 is 7 but 6"),
        (lambda: model.conv2d(x, 3, kernel=3, name="c"), ShapeError, "conv2d 'c': x has rank 2"),
        (lambda: model.input("z", (5, 2)), GraphError, "batch size 5 found, 4 needed"),
        (lambda: model.dense(x, widht=3), TypeError, "widht"),  # type: ignore[call-arg]
        (lambda: model.apply("relu", x, name="r", slope=1), GraphError, "relu 'r': unknown attri"),
        (lambda: model.apply("rleu", x), GraphError, "operator 'rleu' is not declared"),
        (lambda: model.dense(x, 3, activation="rleu", name="r"), GraphError, "'rleu' found, one"),
        (lambda: model.dense(x, 8.7), GraphError, "dense: width: float 8.7 found, an integer"),
        (lambda: model.dense(np.ones((4, 6)), 8), GraphError, r"ndarray of shape \(4, 6\) found"),
        (lambda: model.conv2d(image, 8, 3, 1, 0, 1), TypeError, r"conv2d\(x, channels, kernel,"),
        (lambda: model.output([x]), GraphError, r"output: tensors: list \[.* found, a tensor of"),
        (lambda: model.input("z", (4, 2.5)), GraphError, "input 'z': an extent: 2.5 found"),
        (lambda: Adam("0.1"), GraphError, "Adam: learning_rate: '0.1' found, a number"),
        (lambda: SGD(momentum="0.9"), GraphError, "SGD: momentum: '0.9' found"),
        (lambda: EarlyStopping(patience=1.5), ValueError, "patience: 1.5 found, an integer"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    assert model.dense(x, np.int64(8)).shape == (4, 8)


def test_more_processors_than_cores_are_said_of_the_line_that_asked() -> None:
    with net() as model, pytest.warns(UserWarning, match="6400 processors .* take turns") as told:
        model.compile("sgd", cpus=6400)
    assert [each.filename for each in told] == [__file__]


# -------------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"c{suffix}"
    with net() as model:
        model.compile(Adam(1e-2, beta1=0.8), cpus=1)
        fit(model)
        model.save_checkpoint(path)
        trained = model.weights()
    others: list[tuple[Model, Any, str]] = [
        (
            net(activation="tanh"),
            Adam(beta1=0.8),
            "layer 'hidden': activation 'relu' found, 'tanh'",
        ),
        (net(), Adam(), r"optimizer: beta1 0\.8 found, 0\.9 needed"),
        (net(), SGD(), "optimizer: 'Adam' found, 'SGD' needed"),
        (net(seed=4), Adam(beta1=0.8), "seed 3 found, 4 needed"),
    ]
    for other, optimizer, message in others:
        with other:
            other.compile(optimizer, cpus=1)
            before = other.weights()
            with pytest.raises(CheckpointError, match=message):
                other.load_checkpoint(path)
            assert same(other.weights(), before)
            done = other.load_checkpoint(path, strict=False)
            assert same(other.weights(), trained) and not done.position
            assert set(trained) <= set(done.taken)
    with net(width=9) as wide:
        done = wide.load_checkpoint(path, strict=False)  # not compiled
        assert done.taken == ("o.bias",) and "hidden.weight" in done.missing
        assert done.left["hidden.weight"] == "shape (12, 16) found, (12, 9) needed"
        assert np.array_equal(wide.weights()["o.bias"], trained["o.bias"])


def dropping(seed: int) -> Model:
    model = Model("dropping", seed=seed)
    x = model.dropout(model.dense(model.input("x", (8, 12)), 6), 0.5)
    model.output(model.dense(x, 4, name="o"))
    return model


def test_a_seed_is_one_difference_and_none_for_prediction(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with dropping(7) as model:
        model.compile("sgd", cpus=1)
        fit(model)
        model.save_checkpoint(path)
    with dropping(0) as other:
        other.load_checkpoint(path)  # not compiled: nothing will be drawn
        assert same(other.weights(), model.weights())
        other.compile("sgd", cpus=1)
        with pytest.raises(CheckpointError, match=r"c\.npz': seed 7 found, 0 needed \("):
            other.load_checkpoint(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with net() as model:
        model.compile("sgd", cpus=1)
        model.save_checkpoint(path)
        arrays, metadata = checkpoint.load(path)
        arrays["o.bias"] = np.full_like(arrays["o.bias"], np.nan)
        checkpoint.save(path, arrays, metadata)  # as of an earlier version
        with pytest.raises(CheckpointError, match=r"'o\.bias': values that are not finite"):
            model.load_checkpoint(path)
        assert "o.bias" in model.load_checkpoint(path, strict=False).taken


class Interrupt(Callback):
    def on_step_end(self, state: TrainingState) -> None:
        state.stop = state.step == 3


def test_the_middle_of_an_epoch_is_resumed_with_as_much_data(tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    with net() as model:
        model.compile("sgd", cpus=1)
        fit(model, callbacks=[Interrupt()])
        model.save_checkpoint(path)
    with net() as model:
        model.compile("sgd", cpus=1)
        with pytest.raises(CheckpointError, match=r"middle of an epoch with .*5"):
            model.fit(*samples(24), resume=path, progress=False)
        fit(model, resume=path)
