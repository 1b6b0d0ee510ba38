"""Callbacks: what a fit calls as it goes, given the state of training."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from soapstone.files import check_targets
from soapstone.frontend.arguments import count
from soapstone.frontend.progress import ProgressBar
from soapstone.frontend.training.checkpoint import check_path
from soapstone.frontend.training.state import Callback, TrainingState

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


def _model(owner: object, state: TrainingState) -> Model:
    if state.model is None:
        raise ValueError(f"{type(owner).__name__}: the state of training names no model")
    return state.model


class EarlyStopping(Callback):
    """Stops when the monitored value has not become better for `patience` epochs in a row.

    Args:
        monitor: `loss`, or a metric of the epoch such as `validation_loss` or `accuracy`; an
            accuracy is better when it is higher, anything else when it is lower.
        minimum_delta: a smaller change is no improvement.

    Raises:
        ValueError: arguments out of range, or a value that is not measured.
    """

    def __init__(
        self, monitor: str = "validation_loss", patience: int = 3, minimum_delta: float = 0.0
    ) -> None:
        patience = count("EarlyStopping: patience", patience, error=ValueError)
        if not 0 <= minimum_delta < math.inf:
            raise ValueError(
                f"EarlyStopping: minimum_delta {minimum_delta!r} found, 0 or more needed"
            )
        self.monitor = monitor
        self.patience = patience
        self.minimum_delta = minimum_delta
        self.best: float | None = None
        self.waited = 0

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget earlier fits; refuse a value that this one does not measure."""
        self.best, self.waited = None, 0
        if state.measured:
            self._check(state.measured)

    def _check(self, names: Collection[str]) -> None:
        if self.monitor not in names:
            raise ValueError(
                f"EarlyStopping: monitor {self.monitor!r} found, one of {', '.join(names)} needed"
            )

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare the epoch with the best one, and stop when it is time."""
        values = {"loss": state.loss, **state.metrics}
        self._check(values)
        value = values[self.monitor]
        sign = 1 if "accuracy" in self.monitor else -1
        if self.best is None or sign * (value - self.best) > self.minimum_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            state.stop = True


class Checkpoint(Callback):
    """Saves a checkpoint every so many epochs (by default each) or steps.

    `saved` is the path of the last one written by this fit, None before.

    Args:
        path: of the file, which ends in .safetensors or .npz and is replaced each time.
        every_epochs, every_steps: the interval, 1 or more; one of them.

    Raises:
        CheckpointError: the path has no suffix of a checkpoint.
        ValueError: both intervals, or one below 1.
    """

    def __init__(
        self, path: str | Path, *, every_epochs: int | None = None, every_steps: int | None = None
    ) -> None:
        if every_epochs is not None and every_steps is not None:
            raise ValueError("Checkpoint: every_epochs and every_steps found, one of them needed")
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None:
                count(f"Checkpoint: {name}", value, error=ValueError)
        self.path = check_path(path)
        self.every_steps = every_steps
        self.every_epochs = every_epochs or (None if every_steps else 1)
        self.saved: Path | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget what an earlier fit saved."""
        self.saved = None

    def on_step_end(self, state: TrainingState) -> None:
        """Save, where an interval of steps is over."""
        if self.every_steps and state.step % self.every_steps == 0:
            self._save(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Save, where an interval of epochs is over."""
        if self.every_epochs and (state.epoch + 1) % self.every_epochs == 0:
            self._save(state)

    def _save(self, state: TrainingState) -> None:
        before = _identity(self.path)
        try:
            _model(self, state).save_checkpoint(self.path)
        except KeyboardInterrupt:  # it may come when the file is already there
            if _identity(self.path) != before:
                self.saved = self.path
            raise
        self.saved = self.path


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that replaces it, or None for no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


@dataclass
class History(Callback):
    """Keeps what each epoch ended with.

    Attributes:
        epochs: their numbers, from 0. values: `values["loss"]` and so on, one number an epoch.
    """

    epochs: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Keep the epoch's loss, learning rate, samples a second and metrics."""
        self.epochs.append(state.epoch)
        for name, value in _record(state).items():
            self.values.setdefault(name, []).append(value)


class CSVLogger(Callback):
    """Writes a line of comma-separated values an epoch: epoch, loss, learning rate, metrics.

    Args:
        path: of the file.
        append: add to the file that is there, as a resumed run does.

    Raises:
        ValueError: the file to append to has other columns.
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.path = Path(path)
        self.append = append
        self._columns: list[str] | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Empty the file, or read the columns of the one to append to."""
        self._columns = None
        if self.append and self.path.is_file() and self.path.stat().st_size:
            with self.path.open(newline="") as stream:
                self._columns = next(csv.reader(stream))
        else:
            self.path.write_text("")  # an old file is gone, and one that cannot be written is known

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the epoch's line, and before the first the columns' names."""
        row = {"epoch": str(state.epoch)}
        row |= {name: repr(value) for name, value in _record(state).items()}
        with self.path.open("a", newline="") as stream:
            if self._columns is None:
                self._columns = list(row)
                csv.writer(stream).writerow(self._columns)
            if self._columns != list(row):
                raise ValueError(
                    f"CSVLogger {str(self.path)!r}: columns {', '.join(self._columns)} found,"
                    f" {', '.join(row)} needed"
                )
            csv.writer(stream).writerow(row.values())


class ProfileSteps(Callback):
    """Writes a timeline of `steps` steps, after `skip` steps that warm up, to a file.

    Where the fit is known to have no more than `skip` steps, all are timed.

    Args:
        path: of the file, in the trace-event format (docs/profiles.md).

    Raises:
        ValueError: no step to time, or a negative number to skip.
    """

    def __init__(self, path: str | Path, *, skip: int = 2, steps: int = 10) -> None:
        count("ProfileSteps: skip", skip, 0, ValueError)
        count("ProfileSteps: steps", steps, error=ValueError)
        self.path = Path(path)
        self.skip = skip
        self.steps = steps
        self._left = 0
        self._until_start = 0
        self._context: AbstractContextManager[None] | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Begin to count steps."""
        check_targets(self.path)
        left = None if state.steps_per_epoch is None else state.epochs * state.steps_per_epoch
        self._left = self.steps
        self._until_start = 0 if left is not None and left <= self.skip else self.skip
        self._start(state)

    def on_step_end(self, state: TrainingState) -> None:
        """Begin or end timing, where it is time."""
        if self._context is not None:
            self._left -= 1
            if self._left == 0:
                self._finish()
        else:
            self._until_start -= 1
            self._start(state)

    def on_train_end(self, state: TrainingState) -> None:
        """Write what was timed, if training ends before the last step to time."""
        self._finish()

    def _start(self, state: TrainingState) -> None:
        if self._until_start == 0:
            self._context = _model(self, state).profile(self.path)
            self._context.__enter__()

    def _finish(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)


def _record(state: TrainingState) -> dict[str, float]:
    return {
        "loss": state.loss,
        "learning_rate": state.learning_rate,
        "samples_per_s": state.samples_per_s,
        **state.metrics,
    }


__all__ = [
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "History",
    "ProfileSteps",
    "ProgressBar",
    "TrainingState",
]
