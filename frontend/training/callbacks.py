"""Callbacks: what a fit calls as it goes, given the state of training."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.files import check_targets
from soapstone.frontend.arguments import count, meant, named_arguments, number
from soapstone.frontend.training.checkpoint import check_path
from soapstone.frontend.training.events import Events
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


def _model(owner: object, state: TrainingState) -> Model:
    if state.model is None:
        raise ValueError(f"{type(owner).__name__}: the state of training names no model")
    return state.model


class Monitored(Callback):
    """A callback that watches one value of each epoch for improvement.

    Args:
        monitor: `loss`, or a metric of the epoch such as `validation_loss` or `accuracy`; metrics
            that say so (accuracies, F1, AUC) are better when higher, anything else when lower.
        minimum_delta: a smaller change is no improvement. owner: what errors call it.

    Raises:
        ValueError: arguments out of range, or a value that is not measured.
    """

    def __init__(self, monitor: str, minimum_delta: float = 0.0, owner: str | None = None) -> None:
        owner = owner or type(self).__name__
        number(f"{owner}: minimum_delta", minimum_delta, ValueError)
        if minimum_delta < 0:
            raise ValueError(f"{owner}: minimum_delta {minimum_delta!r} found, 0 or more needed")
        self._owner = owner
        self.monitor = monitor
        self.minimum_delta = minimum_delta
        self.best: float | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget earlier fits; refuse a value that this one does not measure."""
        self.best = None
        if state.measured:
            self._check(state.measured)

    def _check(self, names: Collection[str]) -> None:
        if self.monitor not in names:
            raise ValueError(
                f"{self._owner}: monitor {self.monitor!r} found, one of {', '.join(names)}"
                f" needed{self._unmeasured(names) or meant(self.monitor, names)}"
            )

    def _unmeasured(self, names: Collection[str]) -> str:
        held_out = self.monitor.startswith("val") and "validation_loss" not in names
        return "; fit has no validation_data or validation_split" if held_out else ""

    def improved(self, state: TrainingState) -> bool:
        """Return whether the epoch is the best one so far, which it then is."""
        values = {"loss": state.loss, **state.metrics}
        self._check(values)
        value = float(values[self.monitor])
        if not math.isfinite(value):
            return False
        higher = self.monitor.removeprefix("validation_") in (*state.higher, "accuracy")
        gain = 0.0 if self.best is None else (value - self.best) * (1 if higher else -1)
        if self.best is not None and not gain > self.minimum_delta:
            return False
        self.best = value
        return True

    def save_state(self) -> dict[str, Any]:
        """Return the best value so far."""
        return {"monitor": self.monitor, "best": self.best}

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Go on comparing with the best value of the run that is resumed."""
        self.best = saved["best"]


@named_arguments
class EarlyStopping(Monitored):
    """Stops when the monitored value has not improved for `patience` epochs in a row.

    Args:
        monitor, minimum_delta: those of `Monitored`.
        restore_best: whether training ends with the weights of the best epoch.

    Raises:
        ValueError: arguments out of range, or a value that is not measured.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        patience: int = 3,
        minimum_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        super().__init__(monitor, minimum_delta)
        self.patience = count("EarlyStopping: patience", patience, error=ValueError)
        self.restore_best = restore_best
        self.waited = 0
        self._weights: dict[str, Array] | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget earlier fits; refuse a value that this one does not measure."""
        self.waited, self._weights = 0, None
        super().on_train_begin(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare the epoch with the best one, and stop when it is time."""
        if self.improved(state):
            self.waited = 0
            if self.restore_best:
                self._weights = _model(self, state).weights()
            return
        self.waited += 1
        if self.waited >= self.patience:
            state.stop = True

    def on_train_end(self, state: TrainingState) -> None:
        """Put the best weights back, where that was asked for."""
        weights, self._weights = self._weights, None
        if weights is not None:
            _model(self, state).set_weights(weights)

    def save_state(self) -> dict[str, Any]:
        """Return what it compares with, how long it has waited, and the best weights."""
        return {**super().save_state(), "waited": self.waited, "weights": self._weights}

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Go on waiting; a run that had stopped is over."""
        super().load_state(saved, state)
        self.waited = saved["waited"]
        self._weights = saved["weights"] if self.restore_best else None
        if self.waited >= self.patience:
            state.stop = True


@named_arguments
class ReduceOnPlateau(Monitored):
    """Multiplies the learning rate by `factor` when `patience` epochs have brought no improvement.

    From then on the rate is what it has set, in place of a schedule's.

    Args:
        monitor, minimum_delta: those of `Monitored`.
        factor: between 0 and 1. minimum_rate: where it ends.

    Raises:
        ValueError: arguments out of range, or a value that is not measured.
    """

    def __init__(
        self,
        monitor: str = "validation_loss",
        factor: float = 0.1,
        patience: int = 5,
        minimum_delta: float = 0.0,
        minimum_rate: float = 0.0,
    ) -> None:
        super().__init__(monitor, minimum_delta)
        if not 0 < factor < 1:
            raise ValueError(f"ReduceOnPlateau: factor {factor!r} found, between 0 and 1 needed")
        if not 0 <= minimum_rate < math.inf:
            raise ValueError(
                f"ReduceOnPlateau: minimum_rate {minimum_rate!r} found, 0 or more needed"
            )
        self.factor = factor
        self.patience = count("ReduceOnPlateau: patience", patience, error=ValueError)
        self.minimum_rate = minimum_rate
        self.waited = 0

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget earlier fits; refuse a value that this one does not measure."""
        self.waited = 0
        super().on_train_begin(state)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Compare the epoch with the best one, and lower the rate when it is time."""
        self.waited = 0 if self.improved(state) else self.waited + 1
        if self.waited >= self.patience:
            self.waited = 0
            lower = max(state.learning_rate * self.factor, self.minimum_rate)
            state.learning_rate = min(lower, state.learning_rate)

    def save_state(self) -> dict[str, Any]:
        """Return what it compares with, and how long it has waited."""
        return {**super().save_state(), "waited": self.waited}

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Go on waiting."""
        super().load_state(saved, state)
        self.waited = saved["waited"]


@named_arguments
class Checkpoint(Callback):
    """Saves a checkpoint every so many epochs (by default each) or steps, or of the best epoch.

    It does so once all callbacks have been called, so that it has what each of them has counted.
    `saved` is the path of the last one written by this fit, None before.

    Args:
        path: of the file, which ends in .safetensors or .npz and is replaced each time.
        every_epochs, every_steps: the interval, 1 or more; one of them.
        best: a value as of `Monitored`: of these epochs only those are saved that are the best so
            far by it.

    Raises:
        CheckpointError: the path has no suffix of a checkpoint.
        ValueError: both intervals, or one below 1.
        OSError: when training begins, its folder is not there or may not be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
        best: str | None = None,
    ) -> None:
        if best is not None and every_steps is not None:
            raise ValueError("Checkpoint: best and every_steps found; epochs have a best one")
        if every_epochs is not None and every_steps is not None:
            raise ValueError("Checkpoint: every_epochs and every_steps found, one of them needed")
        for name, value in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if value is not None:
                count(f"Checkpoint: {name}", value, error=ValueError)
        self.path = check_path(path)
        self.every_steps = every_steps
        self.every_epochs = every_epochs or (None if every_steps else 1)
        self.saved: Path | None = None
        self.best = best
        self._monitored = None if best is None else Monitored(best, owner="Checkpoint")

    def on_train_begin(self, state: TrainingState) -> None:
        """Forget what an earlier fit saved; refuse a file that cannot be written."""
        check_targets(self.path)
        self.saved = None
        if self._monitored is not None:
            self._monitored.on_train_begin(state)

    def on_step_end(self, state: TrainingState) -> None:
        """Save, where an interval of steps is over."""
        if self.every_steps and state.step % self.every_steps == 0:
            state.afterwards(self._save)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Save, where an interval of epochs is over."""
        due = self.every_epochs and (state.epoch + 1) % self.every_epochs == 0
        if due and (self._monitored is None or self._monitored.improved(state)):
            state.afterwards(self._save)

    def save_state(self) -> dict[str, Any]:
        """Return the best value so far, where only the best epochs are saved."""
        return {} if self._monitored is None else self._monitored.save_state()

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Go on comparing with the best value of the run that is resumed."""
        if self._monitored is not None:
            self._monitored.load_state(saved, state)

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


@named_arguments
class CSVLogger(Callback):
    """Writes a line of comma-separated values an epoch: epoch, loss, learning rate, metrics.

    Args:
        path: of the file.
        append: add to the file that is there; a resumed run goes on behind the lines that were
            there when its checkpoint was written.

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
        check_targets(self.path)
        self._columns = None
        if self.append and self.path.is_file() and self.path.stat().st_size:
            with self.path.open(newline="") as stream:
                self._columns = next(csv.reader(stream))
        else:
            self.path.write_text("")  # an old file is gone, and one that cannot be written is known

    def save_state(self) -> dict[str, Any]:
        """Return how many lines the file has."""
        return {"lines": len(self._lines())}

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Take back lines of epochs that come again."""
        lines = self._lines()
        if len(lines) > saved["lines"]:
            self.path.write_text("".join(lines[: saved["lines"]]), newline="")
        if not saved["lines"]:
            self._columns = None

    def _lines(self) -> list[str]:
        with suppress(FileNotFoundError), self.path.open(newline="") as stream:
            return stream.readlines()
        return []

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


@named_arguments
class TensorBoard(Callback):
    """Writes what each epoch ends with to an event file, which TensorBoard shows as curves.

    Args:
        folder: where a file of its own is begun by each fit; made where it is not there.
        every_steps: also write loss, metrics and rate after every so many steps, as `step/…`.

    Raises:
        ValueError: an interval below 1, or no path.
    """

    def __init__(self, folder: str | Path, *, every_steps: int | None = None) -> None:
        if every_steps is not None:
            count("TensorBoard: every_steps", every_steps, error=ValueError)
        if not isinstance(folder, str | Path):
            raise ValueError(f"TensorBoard: folder {folder!r} found, a path needed")
        self.folder = Path(folder)
        self.every_steps = every_steps
        self._events: Events | None = None

    def on_train_begin(self, state: TrainingState) -> None:
        """Begin a file; of several processes, the first one does."""
        first = getattr(state.model, "first", True)
        self._events = Events(self.folder) if first else None

    def on_step_end(self, state: TrainingState) -> None:
        """Write a step's values, where an interval of steps is over."""
        if self._events is not None and self.every_steps and state.step % self.every_steps == 0:
            values = {f"step/{name}": value for name, value in _record(state).items()}
            self._events.write(state.step, values)

    def on_epoch_end(self, state: TrainingState) -> None:
        """Write the epoch's values, by the number of the epoch from 1."""
        if self._events is not None:
            self._events.write(state.epoch + 1, _record(state))


@named_arguments
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
