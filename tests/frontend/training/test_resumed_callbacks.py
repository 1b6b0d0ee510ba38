"""A run that is interrupted and resumed ends as one that was not: what callbacks count goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone import SGD, Model
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.callbacks import (
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    History,
    Monitored,
    ReduceOnPlateau,
)
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.tensor import Array

EPOCHS, STEPS = 12, 4


class Falling(Callback):
    """Interrupts a run after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: TrainingState) -> None:
        if state.step == self.step:
            raise KeyboardInterrupt


class Waiting(Callback):
    """A callback of a user's, which counts."""

    def __init__(self) -> None:
        self.epochs, self.sums = 0, np.zeros(2, np.float32)

    def on_epoch_end(self, state: TrainingState) -> None:
        self.epochs += 1
        self.sums = self.sums + np.float32(state.loss)

    def save_state(self) -> dict[str, Any]:
        return {"epochs": self.epochs, "sums": self.sums}

    def load_state(self, saved: Any, state: TrainingState) -> None:
        self.epochs, self.sums = saved["epochs"], saved["sums"]


def callbacks(folder: Path, first: bool, every_steps: int | None, suffix: str) -> dict[str, Any]:
    last = Checkpoint(folder / f"last{suffix}", every_steps=every_steps)
    found = {
        "stopping": EarlyStopping("validation_loss", patience=4, restore_best=True),
        "reducing": ReduceOnPlateau("validation_loss", 0.5, patience=2),
        "best": Checkpoint(folder / "best.npz", best="validation_accuracy"),
        "second": EarlyStopping("loss", patience=EPOCHS),
        "waiting": Waiting(),
    }
    return {"last": last, **found} if first else {**found, "last": last}


def trained(hooks: dict[str, Any], *more: Callback, resume: Path | None = None) -> dict[str, Array]:
    """Return the weights that a fit ends with, which overfits: its best epoch is in the midst."""
    random = np.random.default_rng(1)
    x = random.standard_normal((60, 10)).astype(np.float32)
    y = random.integers(0, 3, 60)
    with Model("net", seed=1) as model:
        h = model.dense(model.input("x", (10, 10)), 32, activation="relu", name="h")
        model.output(model.dense(h, 3, name="o"))
        model.compile(SGD(0.5, momentum=0.9), metrics="accuracy", cpus=1)
        try:
            model.fit(
                *(x[:40], y[:40]),
                epochs=EPOCHS,
                validation_data=(x[40:], y[40:]),
                callbacks=[*hooks.values(), *more],
                resume=resume,
                progress=False,
            )
        except KeyboardInterrupt:
            return {}
        return model.weights()


@pytest.mark.parametrize(
    ("first", "every_steps", "suffix"),
    [(False, None, ".safetensors"), (True, None, ".npz"), (True, 3, ".safetensors")],
)
def test_an_interrupt_changes_nothing(
    first: bool, every_steps: int | None, suffix: str, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    whole = callbacks(tmp_path / "whole", first, every_steps, suffix)
    history = History()
    needed = trained(whole, history)
    assert STEPS < len(history.epochs) < EPOCHS  # it was stopped
    assert len(set(history.values["learning_rate"])) > 1
    best, _ = checkpoint.load(tmp_path / "whole" / "best.npz")
    stopped = len(history.epochs) * STEPS
    for step in range(STEPS + 1, stopped + 1, 3):
        folder = tmp_path / str(step)
        folder.mkdir()
        trained(callbacks(folder, first, every_steps, suffix), Falling(step))
        parts = callbacks(folder, first, every_steps, suffix)
        found = trained(parts, resume=folder / f"last{suffix}")
        for name, value in needed.items():
            assert np.array_equal(found[name], value), (step, name)
        for name, value in checkpoint.load(folder / "best.npz")[0].items():
            assert np.array_equal(best[name], value), (step, name)
        for name in ("stopping", "reducing"):
            assert (parts[name].best, parts[name].waited) == (whole[name].best, whole[name].waited)
        assert parts["waiting"].epochs == whole["waiting"].epochs
        assert np.array_equal(parts["waiting"].sums, whole["waiting"].sums)


def test_a_run_that_was_stopped_is_over(tmp_path: Path) -> None:
    whole = callbacks(tmp_path, True, None, ".safetensors")
    needed = trained(whole)
    history = History()
    again = callbacks(tmp_path, True, None, ".safetensors")
    found = trained(again, history, resume=tmp_path / "last.safetensors")
    assert not history.epochs and all(np.array_equal(found[n], needed[n]) for n in needed)
    patient = callbacks(tmp_path, True, None, ".safetensors")
    patient["stopping"].patience = EPOCHS  # waits on from where it was
    trained(patient, history, resume=tmp_path / "last.safetensors")
    assert history.epochs and history.epochs[-1] == EPOCHS - 1


def test_other_callbacks_begin_anew(tmp_path: Path) -> None:
    trained(callbacks(tmp_path, True, None, ".npz"), Falling(3 * STEPS + 1))
    other = {"other": EarlyStopping("validation_accuracy", 9), "new": ReduceOnPlateau("loss")}
    trained(other, Falling(3 * STEPS + 2), resume=tmp_path / "last.npz")
    assert other["other"].best is None and other["other"].waited == 0


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.npz"
    trained(callbacks(tmp_path, True, None, ".npz"), Falling(2 * STEPS))
    arrays, metadata = checkpoint.load(path)
    for found, message in (
        (3, "field 'callbacks': 3 found"),
        ([{"name": "EarlyStopping loss", "state": {"best": 1.0}}], "callback 'EarlyStopping loss'"),
    ):
        checkpoint.save(path, arrays, {**metadata, "callbacks": found})
        with pytest.raises(CheckpointError, match=message):
            trained({"stopping": EarlyStopping("loss")}, resume=path)


def test_arrays_of_metadata_are_apart_from_others(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    trained(callbacks(tmp_path, True, None, ".safetensors"), Falling(2 * STEPS))
    with Model("net", seed=2) as model:
        h = model.dense(model.input("x", (10, 10)), 32, activation="relu", name="h")
        model.output(model.dense(h, 3, name="o"))
        assert not model.load_weights(path, strict=False).missing
        model.load_checkpoint(path, strict=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_the_best(value: float) -> None:
    monitored = Monitored("loss")
    for loss, better in ((value, False), (1.0, True), (value, False), (0.5, True)):
        assert monitored.improved(TrainingState(loss=loss)) is better


@pytest.mark.parametrize("every_steps", [None, 3])
def test_a_resumed_run_writes_no_line_twice(tmp_path: Path, every_steps: int | None) -> None:
    """A run that ends after its last checkpoint has written lines of epochs that come again."""

    def hooks(name: str, checkpoint: Path | None = None) -> dict[str, Any]:
        log: dict[str, Any] = {"log": CSVLogger(tmp_path / name, append=True)}
        return (
            {**log, "last": Checkpoint(checkpoint, every_steps=every_steps)} if checkpoint else log
        )

    trained(hooks("whole.csv"))
    last, kept = tmp_path / "last.npz", tmp_path / "kept.npz"
    trained(hooks("log.csv", last), Falling(2 * STEPS + 1))
    kept.write_bytes(last.read_bytes())
    trained(hooks("log.csv", last), Falling(5 * STEPS + 2), resume=last)
    trained(hooks("log.csv"), resume=kept)

    def epochs(name: str) -> list[tuple[str, str]]:
        return [tuple(line.split(",")[:2]) for line in (tmp_path / name).read_text().splitlines()]

    assert epochs("log.csv") == epochs("whole.csv")
