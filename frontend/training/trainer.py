"""The loops of training: steps over the batches of epochs, evaluation and prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.engine.session import Bound
from soapstone.errors import DataError
from soapstone.frontend.arguments import count
from soapstone.frontend.data.batches import Batches
from soapstone.frontend.data.feeding import PREDICT
from soapstone.frontend.inference import concatenated
from soapstone.frontend.training.callbacks import Callback, ProgressBar, TrainingState
from soapstone.frontend.training.compiled import Compiled, together
from soapstone.frontend.training.losses import LABELS, labelled
from soapstone.ir.guard import LEARNING_RATE, STEP
from soapstone.ir.interpret import first_non_finite
from soapstone.ir.tensor import Array


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite; parameters and states are as they were before the step."""


@dataclass
class TrainingResult:
    """What a fit did.

    Attributes:
        epochs: a record of each: "epoch", "loss", "accuracy", "validation_loss" and so on.
        steps: how many. seconds: of the whole fit.
        step_us: the median time of a step. samples_per_s: the batch size over that.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    step_us: float = 0.0
    samples_per_s: float = 0.0

    def ended(self, seconds: float, busy: Sequence[float], size: int) -> None:
        """Take what a fit took.

        seconds: of the whole fit; busy: the seconds of each step; size: samples of a step.
        """
        self.steps, self.seconds = len(busy), seconds
        if busy:
            self.step_us = float(np.median(busy)) * 1e6
            self.samples_per_s = size / float(np.median(busy))

    def last(self, key: str) -> float | None:
        """Return a value of the last epoch, None where there is none.

        key: loss, accuracy, validation_loss, …
        """
        return self.epochs[-1].get(key) if self.epochs else None


def _correct(counts: Sequence[Array], samples: int, labels: int) -> float:
    """Return the samples times the fraction of the labels that were found."""
    return float(counts[0]) * samples / max(labels, 1) if counts else 0.0


def _pair(data: object) -> tuple[Any, Any]:
    """Return the x and the y of a data set."""
    if isinstance(data, str | Path):
        return data, None
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    raise DataError(
        f"validation_data: {type(data).__name__} found, a pair (x, y) or the path of npz files"
        " needed"
    )


class Trainer(Compiled):
    """A compiled model with the loops that train, evaluate and run it; see `Model.compile`."""

    _result = TrainingResult()  # of the last fit

    @together
    def fit(
        self,
        x: Any,
        y: Any,
        *,
        batch_size: int | None,
        epochs: int,
        validation_data: object,
        callbacks: Sequence[Callback],
        shuffle: bool,
        resume: str | Path | None,
        progress: bool,
    ) -> TrainingResult:
        """Train; see `Model.fit`."""
        count("epochs", epochs, 0, DataError)
        size = self._size(batch_size)
        batches = self._batches(x, y, size, "fit", shuffle)
        held_out = None
        if validation_data is not None:
            held_out = _pair(validation_data)
            self._batches(*held_out, size, "validation_data")
        self.steps.expect(size, progress)
        self._data = {"batch_size": size, "steps_per_epoch": batches.steps}
        if resume is not None:
            self._resume(resume)
        else:
            self._position.start_epoch(0)
        self.bound("train", size)
        result = self._result = TrainingResult()
        state = TrainingState(epochs=epochs, steps_per_epoch=batches.steps, model=self.model)
        state.measured = self._measured(validation_data is not None)
        state.ran(self.optimizer.rate(self._position.step))
        hooks = [*callbacks, *([ProgressBar()] if progress and self.first else [])]
        began = time.perf_counter()
        busy: list[float] = []
        for hook in hooks:
            hook.on_train_begin(state)
        position = self._position
        try:
            while position.epoch < epochs and not state.stop:
                state.epoch = position.epoch
                for hook in hooks:
                    hook.on_epoch_begin(state)
                for inputs, labels in batches.epoch(position.epoch, position.batch):
                    if labels is None:
                        raise DataError("fit: labels are missing; y, or files with y, needed")
                    start = time.perf_counter()
                    samples = self.step(inputs, labels, state)
                    spent = time.perf_counter() - start
                    busy.append(spent)
                    state.step_us = spent * 1e6
                    state.samples_per_s = samples / spent
                    for hook in hooks:
                        hook.on_step_end(state)
                    if state.stop:
                        return result
                if not position.samples:
                    raise DataError("fit: 0 samples found, 1 or more needed")
                record = self._record()
                if held_out is not None:
                    scores = self.evaluate(*held_out, batch_size=size)
                    record.update({f"validation_{k}": v for k, v in scores.items()})
                state.loss = record["loss"]
                state.metrics = {k: v for k, v in record.items() if k not in ("epoch", "loss")}
                result.epochs.append(record)
                position.start_epoch(position.epoch + 1)
                for hook in hooks:
                    hook.on_epoch_end(state)
        finally:
            result.ended(time.perf_counter() - began, busy, size)
            for hook in hooks:
                hook.on_train_end(state)
        return result

    def step(self, inputs: Mapping[str, Array], labels: Array, state: TrainingState) -> int:
        """Run one training step on a batch and return its sample count.

        Args:
            inputs: an array (samples, …) of each, by name. labels: (samples, …).
            state: what callbacks see; loss, metrics and learning rate are put there.

        Raises:
            DataError: an array is missing, or has another shape or type.
            NonFiniteLoss: the loss is NaN or infinite; nothing is changed.
        """
        position = self._position
        samples = len(labels)
        bound = self.bound("train", samples)
        counted, known = labelled(self.loss, labels)
        rate = state.rate()
        if rate is None:
            rate = self.optimizer.rate(position.step)
        with self.session.lock:
            self._feed(bound, inputs, labels)
            bound.feeds[LEARNING_RATE][...] = rate
            if STEP in bound.feeds:
                bound.feeds[STEP][...] = position.step + 1
            self.changed = True
            self.session.run(bound)
            loss, finite, *counts = (bound.results[name] for name in bound.graph.outputs)
            if not finite:
                raise self._non_finite(bound, float(loss))
            position.step += 1
        position.batch += 1
        position.samples += counted
        position.loss_sum += float(loss) * counted
        position.correct += _correct(counts, counted, known)
        state.step, state.loss = position.step, float(loss)
        state.ran(rate)
        state.metrics = self._means(position.correct, position.samples)
        return samples

    def _feed(self, bound: Bound, inputs: Mapping[str, Array], labels: Array | None) -> None:
        given = inputs if labels is None else {**inputs, LABELS: labels}
        for name in bound.batch:
            if name not in given:
                raise DataError(f"input {name!r} is missing; found {', '.join(given)}")
            array = given[name]
            if not hasattr(array, "__legate_data_interface__"):
                array = np.asarray(array)
            target = bound.feeds[name]
            if array.shape != target.shape:
                raise DataError(f"input {name!r}: shape {array.shape} found, {target.shape} needed")
            if array.dtype.kind not in "iufb" or (
                array.dtype.kind == "f" and target.dtype.kind == "i"
            ):
                raise DataError(f"input {name!r}: {array.dtype} found, {target.dtype} needed")
            if array.dtype != target.dtype and array.dtype.kind in "iu":
                limits = self.feeding.ranges.get(name)
                if limits is not None:
                    limits.check(name, array)
            self.session.feed(bound, name, array)

    def _means(self, correct: float, samples: int) -> dict[str, float]:
        return {self.metrics[0]: correct / samples} if self.metrics and samples else {}

    def _record(self) -> dict[str, float]:
        position = self._position
        samples = max(position.samples, 1)
        record = {"epoch": float(position.epoch), "loss": position.loss_sum / samples}
        return record | self._means(position.correct, position.samples)

    def _non_finite(self, bound: Bound, loss: float) -> NonFiniteLoss:
        """Find the first layer that is not finite by running the step again, sequentially."""
        values = self.session.state() | {k: np.array(v) for k, v in bound.feeds.items()}
        values |= self.model.constants
        missing = [name for name in bound.graph.roles if name not in values]
        where = None if missing else first_non_finite(bound.graph, values)
        return NonFiniteLoss(
            f"step {self._position.step}: loss is {loss}; the first value that is not finite is"
            f" made by {where or 'an operator that the sequential run cannot name'};"
            " parameters and states are as they were before this step"
        )

    def _size(self, batch_size: int | None) -> int:
        if batch_size is None:
            return self.model.batch_size
        return count("batch_size", batch_size, error=DataError)

    def _batches(self, x: Any, y: Any, size: int, what: str, shuffle: bool = False) -> Batches:
        """Return the batches of a data set that was checked against the model."""
        batches = Batches(x, y, size, shuffle=shuffle, seed=self._shuffle_seed if shuffle else 0)
        self.feeding.check(batches, what)
        batches.convert(self.feeding.converted)
        return batches

    def _measured(self, validation: bool) -> tuple[str, ...]:
        """Return the names of what each epoch ends with."""
        names = ("loss", *self.metrics)
        return (*names, *(f"validation_{name}" for name in names)) if validation else names

    @together
    def evaluate(self, x: Any, y: Any, *, batch_size: int | None) -> dict[str, float]:
        """Return mean loss and metrics; see `Model.evaluate`."""
        size = self._size(batch_size)
        loss_sum = correct = 0.0
        samples = 0
        for inputs, labels in self._batches(x, y, size, "evaluate").epoch(0):
            if labels is None:
                raise DataError("evaluate: labels are missing; y, or files with y, needed")
            loss, *counts = self._run("evaluate", inputs, labels, len(labels))
            counted, known = labelled(self.loss, labels)
            loss_sum += float(loss) * counted
            correct += _correct(counts, counted, known)
            samples += counted
        if not samples:
            raise DataError("evaluate: no samples found, 1 or more needed")
        return {"loss": loss_sum / samples} | self._means(correct, samples)

    @together
    def predict(self, x: Any, *, batch_size: int | None) -> Array | tuple[Array, ...]:
        """Return the outputs for all samples; see `Model.predict`."""
        batches = self._batches(x, None, self._size(batch_size), PREDICT)
        return concatenated(
            self._run("predict", inputs, None, len(next(iter(inputs.values()))))
            for inputs, _ in batches.epoch(0)
        )

    def _run(
        self, kind: str, inputs: Mapping[str, Array], labels: Array | None, samples: int
    ) -> list[Array]:
        """Return copies of the outputs of one run of a graph that trains nothing."""
        bound = self.bound(kind, samples)
        with self.session.lock:
            self._feed(bound, inputs, labels)
            self.session.run(bound)
            return [np.array(bound.results[name]) for name in bound.graph.outputs]

    def statistics(self) -> dict[str, Any]:
        """Return counters of training and of the runtime."""
        runtime = self.session.runtime.statistics
        return {
            "steps": self._result.steps,
            "step_us": self._result.step_us,
            "samples_per_s": self._result.samples_per_s,
            "peak_bytes": self.session.peak_bytes,
            "peak_bytes_per_device": self.session.peak_bytes_per_device,
            "variants": dict(self._bounds[next(iter(self._bounds))].variants)
            if self._bounds
            else {},
            "runtime": dict(vars(runtime)),
            **dict(zip(("planned_bytes", "copied_bytes"), self.moved_bytes or ())),
        }
