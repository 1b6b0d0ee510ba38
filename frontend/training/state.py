"""Where training is, as callbacks see it and as it is saved; the callback that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


@dataclass
class Position:
    """Where training is: all that a resumed run needs besides the weights."""

    epoch: int = 0
    batch: int = 0  # the next batch of the epoch
    step: int = 0  # steps done since the start of training
    loss_sum: float = 0.0
    correct: float = 0.0
    samples: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch: no batch of it is done."""
        self.epoch, self.batch = epoch, 0
        self.loss_sum, self.correct, self.samples = 0.0, 0.0, 0


@dataclass
class TrainingState:
    """Where training is. Setting `stop` ends it after the step, or the epoch, that is running.

    Attributes:
        epoch: number of the epoch, from 0; epochs: how many there will be.
        step: steps done since the start of training, resumed ones included.
        steps_per_epoch: None when the data do not tell.
        loss: of the step at `on_step_end`; the mean over the epoch at `on_epoch_end`.
        metrics: by name, over the epoch so far; at its end `validation_…` as well.
        learning_rate: of the last step; set by a callback, that of all steps that follow.
        samples_per_s, step_us: of the last step.
        stop: set by a callback to end training.
        model: the model that is trained; where its graph changes, the session, which saves alike.
        measured: the names of what each epoch ends with; empty when that is not known.
        higher: those of metrics that are better when they are higher.
    """

    epoch: int = 0
    epochs: int = 1
    step: int = 0
    steps_per_epoch: int | None = None
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    learning_rate: float = 0.0
    samples_per_s: float = 0.0
    step_us: float = 0.0
    stop: bool = False
    model: Model | None = None
    measured: tuple[str, ...] = ()
    higher: tuple[str, ...] = ()
    _ran: float = 0.0  # the rate that the last step had
    _set: bool = False
    _later: list[Callable[[TrainingState], None]] = field(default_factory=list)

    def afterwards(self, action: Callable[[TrainingState], None]) -> None:
        """Have something done once all callbacks have been called, as saving what they count is.

        action: what is done, given the state.
        """
        self._later.append(action)

    def called(self) -> None:
        """Do what callbacks have put off until all of them were called."""
        later, self._later = self._later, []
        for action in later:
            action(self)

    def ran(self, rate: float) -> None:
        """Say the rate of a step."""
        self.learning_rate = self._ran = rate

    def goes_on(self, rate: float) -> None:
        """Have the steps that follow go on at a rate that a callback had set before."""
        self.learning_rate, self._set = rate, True

    def rate(self) -> float | None:
        """Return the rate that a callback has set, None where none has.

        Raises:
            ValueError: it is no number of 0 or more.
        """
        rate = self.learning_rate
        if not self._set and rate == self._ran:
            return None
        if isinstance(rate, bool | str) or not 0 <= rate < float("inf"):
            raise ValueError(f"learning_rate: {rate!r} set by a callback, 0 or more needed")
        self._set = True
        return float(rate)


class Callback:
    """Hooks that a fit calls; those that are not overridden do nothing.

    An exception in a hook ends the fit. `on_train_end` is called in any case. Every hook is given
    state: where training is, and how to stop it (`TrainingState`). What a callback counts goes on
    in a resumed run if `save_state` returns it and `load_state` takes it.
    """

    def __repr__(self) -> str:
        """Return the call that makes one: the settings that are not the defaults."""
        shown = []
        for name, setting in signature(type(self)).parameters.items():
            value = getattr(self, name, setting.default)
            value = str(value) if isinstance(value, Path) else value
            if repr(value) != repr(setting.default):
                shown.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def on_train_begin(self, state: TrainingState) -> None:
        """Called before the first step; a resumed run has loaded its checkpoint."""

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Called before the first step of an epoch."""

    def on_step_end(self, state: TrainingState) -> None:
        """Called after each step."""

    def on_epoch_end(self, state: TrainingState) -> None:
        """Called after the last step of an epoch and its validation."""

    def on_train_end(self, state: TrainingState) -> None:
        """Called when training ends, be it by an exception."""

    def save_state(self) -> dict[str, Any]:
        """Return what a checkpoint has of the callback, for `load_state`; by default nothing.

        Values are arrays, and what JSON can say. Of several callbacks of a class, `monitor` tells
        one from the other; those that are alike are told by their order.
        """
        return {}

    def load_state(self, saved: Mapping[str, Any], state: TrainingState) -> None:
        """Go on from what a checkpoint has of the callback, after `on_train_begin`.

        Args:
            saved: what `save_state` returned; only if it was not empty. state: that of hooks.
        """
