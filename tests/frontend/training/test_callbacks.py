"""Callbacks, driven by hand through epochs and steps as a fit drives them."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from soapstone.frontend.progress import ProgressBar
from soapstone.frontend.training.callbacks import (
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    History,
    ProfileSteps,
    ReduceOnPlateau,
    TensorBoard,
)
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.hooks import Hooks
from soapstone.frontend.training.state import Callback, TrainingState


class Recorder:
    """Stands for a model: records what callbacks ask of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.step = 0

    def save_checkpoint(self, path: Path) -> None:
        self.events.append(("save", self.step))

    @contextmanager
    def profile(self, path: Path) -> Iterator[None]:
        self.events.append(("begin", self.step))
        yield
        self.events.append(("end", self.step))


def drive(
    hooks: Sequence[Callback],
    losses: Sequence[float],
    steps: int = 3,
    fail_at: int | None = None,
    known: bool = True,
    saved: object = None,
) -> tuple[TrainingState, Recorder]:
    """Call the hooks as a fit does: one epoch for each loss."""
    recorder = Recorder()
    state = TrainingState(epochs=len(losses), steps_per_epoch=steps if known else None)
    state.model = cast(Any, recorder)
    every = Hooks(hooks)
    every.begin(state, saved)
    try:
        for epoch, loss in enumerate(losses):
            if state.stop:
                break
            state.epoch = epoch
            every.call("on_epoch_begin", state)
            for _ in range(steps):
                if state.step == fail_at:
                    raise KeyboardInterrupt
                state.step += 1
                recorder.step = state.step
                state.loss, state.learning_rate = loss, 0.1
                state.samples_per_s, state.step_us = 1234.5, 1e5
                state.metrics = {"accuracy": 1 - loss}
                every.call("on_step_end", state)
            state.metrics["validation_loss"] = 2 * loss
            every.call("on_epoch_end", state)
    finally:
        every.end(state)
    return state, recorder


def test_the_base_does_nothing() -> None:
    state, recorder = drive([Callback()], [0.5, 0.4])
    assert state.step == 6 and not recorder.events


@pytest.mark.parametrize(
    ("monitor", "patience", "delta", "losses", "epochs"),
    [
        ("loss", 2, 0.0, [0.5, 0.4, 0.45, 0.41, 0.1], 4),
        ("loss", 2, 0.0, [0.5, 0.4, 0.45, 0.39, 0.1], 5),
        ("loss", 1, 0.0, [0.5, 0.5, 0.4], 2),
        ("loss", 1, 0.05, [0.5, 0.47, 0.1], 2),
        ("validation_loss", 1, 0.05, [0.5, 0.47, 0.1], 3),
        ("accuracy", 1, 0.0, [0.5, 0.4, 0.3, 0.3, 0.1], 4),
    ],
)
def test_early_stopping(
    monitor: str, patience: int, delta: float, losses: list[float], epochs: int
) -> None:
    history = History()
    stopping = EarlyStopping(monitor, patience, delta)
    for _ in range(2):  # a second fit starts anew
        history = History()
        drive([stopping, history], losses)
        assert len(history.epochs) == epochs


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({}, [3, 6, 9, 12]),
        ({"every_epochs": 2}, [6, 12]),
        ({"every_epochs": 5}, []),
        ({"every_steps": 4}, [4, 8, 12]),
    ],
)
def test_checkpoints_are_saved_when_due(options: dict[str, int], saves: list[int]) -> None:
    callback = Checkpoint("a.npz", **cast(Any, options))
    _, recorder = drive([callback], [0.4, 0.3, 0.2, 0.1])
    assert recorder.events == [("save", step) for step in saves]
    assert callback.saved == (Path("a.npz") if saves else None)


def test_an_interrupted_fit_saves_no_half_step() -> None:
    callback = Checkpoint("a.npz")
    with pytest.raises(KeyboardInterrupt):
        drive([callback], [0.4, 0.3], fail_at=4)
    assert callback.saved == Path("a.npz")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Checkpoint("a.pt"), CheckpointError, "suffix"),
        (lambda: Checkpoint("a.npz", every_epochs=1, every_steps=1), ValueError, "one of them nee"),
        (lambda: Checkpoint("a.npz", every_steps=0), ValueError, "every_steps: 0 found"),
        (lambda: EarlyStopping("f1"), ValueError, "'f1' found, one of loss, accuracy, validation_"),
        (lambda: EarlyStopping(patience=0), ValueError, "an integer of 1 or more"),
        (lambda: EarlyStopping(minimum_delta=-1.0), ValueError, "0 or more needed"),
        (lambda: ProfileSteps("t.json", skip=-1), ValueError, "skip: -1 found, an integer of 0 or"),
        (lambda: Checkpoint("/absent/c.npz"), FileNotFoundError, "folder .* does not exist"),
        (lambda: ProfileSteps("/absent/t.json"), FileNotFoundError, "folder .* does not exist"),
    ],
)
def test_bad_arguments(make: Callable[[], Callback], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        drive([make()], [0.5])


def test_history_keeps_what_epochs_ended_with() -> None:
    history = History()
    drive([history], [0.5, 0.25])
    assert history.epochs == [0, 1]
    assert history.values == {
        "loss": [0.5, 0.25],
        "learning_rate": [0.1, 0.1],
        "samples_per_s": [1234.5, 1234.5],
        "accuracy": [0.5, 0.75],
        "validation_loss": [1.0, 0.5],
    }


def test_csv_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("old contents")
    drive([CSVLogger(path)], [0.5, 0.25])
    lines = path.read_text().splitlines()
    assert lines[0] == "epoch,loss,learning_rate,samples_per_s,accuracy,validation_loss"
    assert lines[1:] == ["0,0.5,0.1,1234.5,0.5,1.0", "1,0.25,0.1,1234.5,0.75,0.5"]
    drive([CSVLogger(path, append=True)], [0.1])
    assert path.read_text().splitlines() == [*lines, "0,0.1,0.1,1234.5,0.9,0.2"]
    path.write_text("epoch,other\n")
    with pytest.raises(ValueError, match=r"log\.csv.*columns epoch, other found"):
        drive([CSVLogger(path, append=True)], [0.1])
    with pytest.raises(OSError):
        drive([CSVLogger(tmp_path / "absent" / "log.csv")], [0.1])


@pytest.mark.parametrize(
    ("skip", "steps", "known", "events"),
    [
        (2, 3, True, [("begin", 2), ("end", 5)]),
        (0, 2, True, [("begin", 0), ("end", 2)]),
        (2, 100, True, [("begin", 2), ("end", 6)]),
        (6, 2, True, [("begin", 0), ("end", 2)]),
        (6, 2, False, [("begin", 6), ("end", 6)]),
    ],
)
def test_profiled_steps(
    skip: int, steps: int, known: bool, events: list[tuple[str, int]], tmp_path: Path
) -> None:
    callback = ProfileSteps(tmp_path / "t.json", skip=skip, steps=steps)
    _, recorder = drive([callback], [0.5, 0.4], known=known)
    assert recorder.events == events


def test_progress_off_a_terminal_is_a_line_an_epoch() -> None:
    stream = io.StringIO()
    drive([ProgressBar(stream)], [0.5, 0.25])
    first, second = stream.getvalue().splitlines()
    assert first == (
        "epoch 1/2  loss 0.5000  accuracy 0.5000  validation_loss 1.0000  1,234 samples/s  0.3 s"
    )
    assert second.startswith("epoch 2/2  loss 0.2500  accuracy 0.7500")
    assert "\x1b" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("known", [True, False])
def test_progress_on_a_terminal_is_a_bar(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    drive([ProgressBar(stream)], [0.5, 0.25], known=known)
    text = stream.getvalue()
    assert "epoch 1/2" in text and "epoch 2/2" in text and "loss 0.2500" in text
    assert ("3/3" if known else "3/?") in text
    assert text.rstrip("\n").endswith("\x1b[?25h")  # the cursor is back


def test_the_bar_is_taken_down_when_training_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt):
        drive([ProgressBar(stream)], [0.5, 0.25], fail_at=2)
    assert stream.getvalue().rstrip("\n").endswith("\x1b[?25h")


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    drive([ProgressBar()], [0.5])
    captured = capsys.readouterr()
    assert captured.out == "" and "epoch 1/1" in captured.err


class Named(Callback):
    """A callback of a user's, one of whose settings is kept."""

    def __init__(self, word: str, other: int = 2, *more: int) -> None:
        self.word = word


@pytest.mark.parametrize(
    ("callback", "shown"),
    [
        (
            EarlyStopping("loss", restore_best=True),
            "EarlyStopping(monitor='loss', restore_best=True)",
        ),
        (ReduceOnPlateau(), "ReduceOnPlateau()"),
        (
            Checkpoint(Path("a.npz"), best="loss"),
            "Checkpoint(path='a.npz', every_epochs=1, best='loss')",
        ),
        (CSVLogger("a.csv"), "CSVLogger(path='a.csv')"),
        (TensorBoard("runs", every_steps=5), "TensorBoard(folder='runs', every_steps=5)"),
        (ProfileSteps("a.json", steps=3), "ProfileSteps(path='a.json', steps=3)"),
        (ProgressBar(), "ProgressBar()"),
        (Named("a", 3), "Named(word='a')"),
    ],
)
def test_a_callback_shows_its_settings(callback: Callback, shown: str) -> None:
    assert repr(callback) == shown
