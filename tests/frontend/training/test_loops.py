"""Loops: best weights, plateaus, event files, splits, and steps of one's own."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, DataError, Model
from soapstone.callbacks import (
    Callback,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    ReduceOnPlateau,
    TensorBoard,
    TrainingState,
)
from soapstone.frontend.training.events import crc32c
from soapstone.frontend.training.trainer import TrainingResult

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((60, 5)).astype(np.float32)
Y = RANDOM.integers(0, 3, 60)


def net(rate: float = 0.3, metrics: str | tuple[str, ...] = "accuracy") -> Model:
    model = Model("net", seed=1)
    model.output(model.dense(model.input("x", (16, 5)), 3, name="o"))
    model.compile(SGD(rate), metrics=metrics, cpus=1)
    return model


class Worse(Callback):
    """Makes epochs worse from one on, and keeps the weights that each ended with."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.weights: list[np.ndarray] = []
        self.rates: list[float] = []

    def on_epoch_begin(self, state: TrainingState) -> None:
        if state.epoch >= self.epoch and state.model is not None:
            state.model.set_weights({"o.weight": 5 * RANDOM.standard_normal((5, 3))})

    def on_step_end(self, state: TrainingState) -> None:
        self.rates.append(state.learning_rate)

    def on_epoch_end(self, state: TrainingState) -> None:
        assert state.model is not None
        self.weights.append(state.model.weights()["o.weight"])


@pytest.mark.parametrize("monitor", ["validation_loss", "validation_accuracy"])
def test_the_best_weights_are_restored_and_saved(monitor: str, tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    with net() as model:
        worse, best = Worse(4), Checkpoint(path, best=monitor)
        stop = EarlyStopping(monitor, patience=2, restore_best=True)
        result = model.fit(
            *(X, Y), epochs=12, validation_split=0.25, progress=False, callbacks=[worse, best, stop]
        )
        values = [epoch[monitor] for epoch in result.epochs]
        chosen = int(np.argmin(values) if "loss" in monitor else np.argmax(values))
        assert chosen < 4 and len(values) == chosen + 3
        found = model.weights()["o.weight"]
        np.testing.assert_array_equal(found, worse.weights[chosen])
        model.load_weights(path)
        np.testing.assert_array_equal(model.weights()["o.weight"], found)
        for callback in (stop, ReduceOnPlateau("f1")):
            callback.monitor = "f1"
            with pytest.raises(ValueError, match="monitor 'f1' found, one of loss, accuracy"):
                model.fit(X, Y, progress=False, callbacks=[callback])


def test_the_rate_falls_on_a_plateau() -> None:
    with net(0.0) as still, net(0.4) as model:  # a rate of 0 never gets better
        still.fit(X, Y, epochs=3, progress=False, callbacks=[ReduceOnPlateau("loss", patience=1)])
        watch = Worse(1)
        plateau = ReduceOnPlateau("loss", 0.5, patience=2, minimum_rate=0.15)
        model.fit(X, Y, epochs=9, progress=False, callbacks=[watch, plateau])
        assert np.unique(watch.rates)[::-1].tolist() == pytest.approx([0.4, 0.2, 0.15])
        first = [watch.rates[4 * epoch] for epoch in range(9)]
        assert first == sorted(first, reverse=True)
    for options in ({"factor": 1.0}, {"patience": 0}, {"minimum_rate": -1}):
        with pytest.raises(ValueError, match="ReduceOnPlateau: "):
            ReduceOnPlateau(**options)  # type: ignore[arg-type]


def events(path: Path) -> list[bytes]:
    """Return the records of an event file, whose checksums are right."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, sum_at in ((data[:8], 8), (data[12 : 12 + length], 12 + length)):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert data[sum_at : sum_at + 4] == struct.pack("<I", masked)
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_curves_for_tensorboard(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    table = CSVLogger(tmp_path / "log.csv")
    with net() as model:
        board = TensorBoard(tmp_path / "run" / "1", every_steps=4)
        result = model.fit(X, Y, epochs=2, progress=False, callbacks=[board, table])
    (path,) = (tmp_path / "run" / "1").iterdir()
    records = events(path)
    assert b"brain.Event:2" in records[0] and len(records) == 1 + 2 + 2
    for record, epoch in zip([records[2], records[4]], result.epochs):
        value = struct.pack("<f", epoch["loss"])
        assert b"\x0a\x04loss\x15" + value in record
        assert b"\x0a\x08accuracy\x15" + struct.pack("<f", epoch["accuracy"]) in record
    assert b"step/loss" in records[1]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def test_a_split_is_drawn_by_the_seed_and_held_out() -> None:
    class Seen(Callback):
        rows = 0

        def on_step_end(self, state: TrainingState) -> None:
            self.rows += round(state.samples_per_s * state.step_us / 1e6)

    def ran() -> tuple[float | None, int]:
        with net(metrics=()) as model:
            seen = Seen()
            options = {"validation_split": 0.2, "progress": False, "callbacks": [seen]}
            return model.fit(X, Y, **options).last("validation_loss"), seen.rows  # type: ignore[arg-type]

    assert ran() == ran() and ran()[1] == 48
    with net() as model:
        for share, message in ((0.0, "between 0 and 1"), (1, "between"), (0.001, "one part empty")):
            with pytest.raises(DataError, match=f"validation_split: .*{message}"):
                model.fit(X, Y, validation_split=share, progress=False)
        with pytest.raises(DataError, match="beside validation_data"):
            model.fit(X, Y, validation_split=0.1, validation_data=(X, Y), progress=False)
        with pytest.raises(DataError, match="arrays x and y needed"):
            model.fit([(X, Y)], validation_split=0.1, progress=False)


def test_a_loop_of_ones_own_is_a_fit() -> None:
    with net() as model, net() as other:
        result = other.fit(X, Y, batch_size=20, epochs=2, shuffle=False, progress=False)
        for _ in range(2):
            seen = [model.train_on_batch(X[i : i + 20], Y[i : i + 20]) for i in (0, 20, 40)]
        for name, value in other.weights().items():
            np.testing.assert_array_equal(model.weights()[name], value)
        for name in ("loss", "accuracy"):
            mean = np.mean([each[name] for each in seen])
            assert result.last(name) == pytest.approx(mean, rel=1e-6)
        before = model.weights()["o.weight"]
        grad = model.gradients(X, Y)["o.weight"]
        model.train_on_batch(X, Y, learning_rate=0.01)
        after = model.weights()["o.weight"]
        np.testing.assert_allclose(after, before - 0.01 * grad, rtol=1e-5, atol=1e-6)
        with pytest.raises(DataError, match=r"samples of shape \(4,\) found, \(5,\) needed"):
            model.train_on_batch(X[:, :4], Y)
        with pytest.raises(DataError, match="labels are missing"):
            model.gradients(X)


def test_notebooks_show_tables_and_curves() -> None:
    model = Model("net")
    model.output(model.dense(model.input("x", (8, 6)), 4, name="<o>"))
    assert repr(model) == "Model('net', 1 operators, 28 parameters)"
    shown: Any = model
    assert "&lt;o&gt;" in shown._repr_html_() and "28 parameters" in shown._repr_html_()
    model.compile("sgd", metrics="accuracy")
    assert repr(model.graph) == "Graph('net': 1 operators, 3 inputs, 1 outputs)"
    graph, strategy = model.graph, model.strategy
    assert len(repr(strategy)) < 80 and "<pre>" in strategy._repr_html_()
    assert "&lt;o&gt;" in graph._repr_html_()
    x, y = np.zeros((16, 6), np.float32), np.arange(16) % 4
    result = model.fit(x, y, epochs=3, validation_split=0.25, progress=False)
    assert result.history["loss"] == [record["loss"] for record in result.epochs]
    assert result.history.keys() == result.epochs[0].keys()
    picture = result._repr_html_()
    for name in ("validation_loss", "validation_accuracy"):
        assert picture.count(f">{name}<") == 1
    assert "0 steps" in TrainingResult()._repr_html_()
