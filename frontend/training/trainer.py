"""The loops of training: steps over the batches of epochs, evaluation and prediction."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.engine.session import Bound
from soapstone.errors import DataError
from soapstone.frontend.arguments import count
from soapstone.frontend.data.batches import Batches, Labels, named_labels, rows_of
from soapstone.frontend.data.feeding import PREDICT
from soapstone.frontend.inference.in_batches import concatenated, in_order
from soapstone.frontend.progress import compiling
from soapstone.frontend.training.compiled import together
from soapstone.frontend.training.held_out import held_out_of, split
from soapstone.frontend.training.hooks import Hooks
from soapstone.frontend.training.resumable import Resumable
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.frontend.training.step_graph import KEEP
from soapstone.ir.errors import GraphError
from soapstone.ir.interpret import first_non_finite
from soapstone.ir.tensor import Array
from soapstone.ir.training.guard import LEARNING_RATE, STEP


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite; parameters and states are as before the step."""


@dataclass
class TrainingResult:
    """The record of a fit.

    Attributes:
        epochs: a record of each epoch: "epoch", "loss", "accuracy", "validation_loss" and so on.
        steps: the number of steps. seconds: of the whole fit.
        step_us: the median time of a step. samples_per_s: its samples over that.
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    step_us: float = 0.0
    samples_per_s: float = 0.0

    @property
    def history(self) -> dict[str, list[float]]:
        """The values of all epochs by name, such as `history["loss"]`."""
        names = dict.fromkeys(name for record in self.epochs for name in record)
        return {name: [record[name] for record in self.epochs if name in record] for name in names}

    def _repr_html_(self) -> str:
        from soapstone.frontend.notebook import curves

        title = f"{self.steps} steps in {self.seconds:.1f} s"
        return curves(self.history, title) if self.epochs else f"<p>{title}</p>"

    def ended(self, seconds: float, busy: Sequence[float], size: int) -> None:
        """Record the times of a fit that has ended.

        seconds: of the whole fit. busy: of each step. size: the number of samples of a step.
        """
        self.steps, self.seconds = len(busy), seconds
        if busy:
            self.step_us = float(np.median(busy)) * 1e6
            self.samples_per_s = size / float(np.median(busy))

    def last(self, key: str) -> float | None:
        """Return a value of the last epoch; None if there is none.

        key: loss, accuracy, validation_loss, …
        """
        return self.epochs[-1].get(key) if self.epochs else None


def accumulate(sums: dict[str, list[Any]], name: str, counted: list[Any]) -> None:
    """Add what a batch has counted to the sums of an epoch; both are lists of numbers or arrays."""
    before = sums.get(name)
    sums[name] = counted if before is None else [a + b for a, b in zip(before, counted)]


class Trainer(Resumable):
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
        validation_split: float | None,
        sample_weights: Any,
        callbacks: Sequence[Callback],
        shuffle: bool,
        resume: str | Path | None,
        progress: bool,
    ) -> TrainingResult:
        """Train; see `Model.fit`."""
        count("epochs", epochs, 0, DataError)
        hooks = Hooks(callbacks, progress and self.first)
        size = self._size(batch_size)
        self._check_trained("fit")
        held_out = None
        if validation_split is not None:
            if validation_data is not None:
                raise DataError("validation_split: found beside validation_data; one needed")
            (x, y, sample_weights), held_out = split(
                x, y, sample_weights, validation_split, self._shuffle_seed
            )
        batches = self._batches(x, y, size, "fit", shuffle, sample_weights, epochs)
        if validation_data is not None:
            held_out = held_out_of(validation_data)
            own = self._batches(*held_out[:2], size, "validation_data", weights=held_out[2])
            self._check_last(own, size)
        self._check_last(batches, size)
        self.steps.expect(self.part_size(size), progress)
        self._data = {"batch_size": size, "steps_per_epoch": batches.steps}
        rate, counted = None, None
        if resume is not None:
            rate, counted = self._resume(resume)
        else:
            self._start_epoch(0)
        with compiling(self.session.runtime) if progress and self.first else nullcontext():
            whole = batches.whole if self.parts == 1 else {}
            lengths = self.feeding.lengths((batches.specs() or ({}, None))[0])
            first = (batches.steps == 1 and batches.last) or size  # there may be fewer samples
            self.bound("train", self.part_size(first), whole, lengths)
        result = self._result = TrainingResult()
        state = TrainingState(epochs=epochs, steps_per_epoch=batches.steps, model=self.model)
        self._fitted, self._hooks = state, hooks
        state.measured = self._measured(held_out is not None)
        state.higher = tuple(n for n, m in self.objective.by_name.items() if m and m.higher)
        state.ran(self.optimizer.rate(self._position.step))
        if rate is not None:
            state.goes_on(rate)
        began = time.perf_counter()
        busy: list[float] = []
        hooks.begin(state, counted)
        try:
            while self._position.epoch < epochs and not state.stop:
                state.epoch = self._position.epoch
                hooks.call("on_epoch_begin", state)
                if self._steps_of_epoch(batches, state, busy):
                    result.epochs.append(self._end_epoch(state, held_out, size))
                    hooks.call("on_epoch_end", state)
        finally:
            batches.close()
            result.ended(time.perf_counter() - began, busy, first)
            hooks.end(state)
        return result

    def _steps_of_epoch(self, batches: Batches, state: TrainingState, busy: list[float]) -> bool:
        """Run the remaining steps of an epoch; return False if a callback stopped it.

        busy: receives the seconds of each step.
        """
        position = self._position
        for inputs, labels in batches.epoch(position.epoch, position.batch):
            if labels is None:
                raise DataError("fit: labels are missing; y, or files with y, needed")
            start = time.perf_counter()
            samples = self.step(inputs, labels, state)
            spent = time.perf_counter() - start
            busy.append(spent)
            state.step_us = spent * 1e6
            state.samples_per_s = samples / spent
            self._hooks.call("on_step_end", state)
            if state.stop:
                return False
        if not position.samples:
            raise DataError("fit: 0 samples found, 1 or more needed")
        return True

    def _end_epoch(
        self, state: TrainingState, held_out: tuple[Any, ...] | None, size: int
    ) -> dict[str, float]:
        """Return the record of an epoch, with that of held-out samples, and begin the next one."""
        record = {"epoch": float(self._position.epoch)} | self.objective.results(self._sums)
        if held_out is not None:
            x, y, weights = held_out
            scores = self.evaluate(x, y, batch_size=size, sample_weights=weights)
            record.update({f"validation_{k}": v for k, v in scores.items()})
        state.loss = record["loss"]
        state.metrics = {k: v for k, v in record.items() if k not in ("epoch", "loss")}
        self._start_epoch(self._position.epoch + 1)
        return record

    def _check_trained(self, what: str) -> None:
        """Check that there are trained parameters, and that they are those that were compiled.

        Raises:
            GraphError: otherwise; `what` names the caller.
        """
        if self.frozen != self.model.frozen:
            raise GraphError(f"{what}: layers were frozen or thawed after compile; compile again")
        if not self.trains:
            found = "the model has no parameters"
            if self.frozen:
                found = "all its parameters are frozen; unfreeze some, and compile again"
            raise GraphError(f"{what}: model {self.model.name!r} has nothing to train: {found}")

    def _check_last(self, batches: Batches, size: int) -> None:
        """Check that the model has a graph for the last batch, if that is known to be smaller.

        Raises:
            GraphError: a layer that is for one batch size only.
        """
        last = batches.last
        if last not in (None, size):
            try:
                self.model.build(last)
            except GraphError as error:
                raise GraphError(f"fit: a last batch of {last}: {error}") from None

    def _start_epoch(self, epoch: int) -> None:
        self._position.start_epoch(epoch)
        self._sums = {}

    def step(self, inputs: Mapping[str, Array], labels: Labels, state: TrainingState) -> int:
        """Run one training step on a batch and return its number of samples.

        Args:
            inputs: an array (samples, …) for each input, by name.
            labels: (samples, …), or several by the names of the graph's inputs, with weights.
            state: what callbacks see; receives loss, metrics and learning rate.

        Raises:
            DataError: an array is missing, or has another shape or type.
            NonFiniteLoss: the loss is NaN or infinite; nothing is changed.
        """
        position, aim = self._position, self.objective
        given = self._targets(inputs, labels)
        samples = rows_of(inputs)
        rate = state.rate()
        if rate is None:
            rate = self.optimizer.rate(position.step)
        size = -(-samples // self.parts)
        loss, sums = 0.0, dict(self._sums)
        for low in range(0, samples, size):
            last = low + size >= samples
            rows, part = inputs, given
            if self.parts > 1:
                rows = {name: array[low : low + size] for name, array in inputs.items()}
                part = {name: array[low : low + size] for name, array in given.items()}
            kind, lengths = "train" if last else "part", self.feeding.lengths_of(inputs)
            bound = self.bound(kind, min(size, samples - low), rows, lengths)
            scalars = {LEARNING_RATE: rate, STEP: position.step + 1, KEEP: float(low > 0)}
            if self.parts > 1:
                scalars |= dict(aim.shares(part, given))
            with self.session.lock:
                self._feed(bound, rows, part)
                for name in scalars.keys() & bound.feeds.keys():
                    bound.feeds[name][...] = scalars[name]
                self.changed = True
                self.session.run(bound)
                own, finite, *values = (bound.results[name] for name in bound.graph.outputs)
                if not finite:
                    raise self._non_finite(bound, float(own))
                loss += float(own)
                for name, counted in aim.counts(values, part):
                    accumulate(sums, name, counted)
                if last:
                    position.step += 1
        accumulate(sums, "loss", aim.of_loss(loss, given))
        self._sums = sums
        position.batch += 1
        position.samples += samples
        state.step, state.loss = position.step, loss
        state.ran(rate)
        state.metrics = aim.results(sums, ended=False)
        del state.metrics["loss"]
        return samples

    def _targets(self, inputs: Mapping[str, Array], labels: Labels) -> dict[str, Array]:
        """Return labels and weights by the names of the graph's inputs."""
        given = named_labels(labels)
        taken = {*self.feeding.labels, *(term.weights for term in self.objective.terms)} - {None}
        if given.keys() == taken:
            return given
        return self.feeding.targets(labels, self.feeding.lengths_of(inputs)) or {}

    @together
    def train_on_batch(
        self, x: Any, y: Any, *, sample_weights: Any, learning_rate: float | None
    ) -> dict[str, float]:
        """Run one step; see `Model.train_on_batch`."""
        self._check_trained("train_on_batch")
        state = TrainingState(model=self.model)
        if learning_rate is not None:
            state.learning_rate = learning_rate
        self._start_epoch(self._position.epoch)
        self.step(*self._one("train_on_batch", x, y, sample_weights), state)
        found = self.objective.results(self._sums)
        self._start_epoch(self._position.epoch)
        return found

    @together
    def gradients(self, x: Any, y: Any, *, sample_weights: Any) -> dict[str, Array]:
        """Return the gradient of each parameter; see `Model.gradients`."""
        self._check_trained("gradients")
        inputs, given = self._one("gradients", x, y, sample_weights)
        _, *grads = self._run("gradients", inputs, given, rows_of(inputs))
        return dict(zip(self.gradients_of, grads))

    def _one(self, what: str, x: Any, y: Any, weights: Any) -> tuple[Any, dict[str, Array]]:
        """Return all samples of x as one checked batch, with their labels and weights.

        Raises:
            DataError: as of `_batches`; or x makes no batch, or several.
        """
        batches = self._batches(x, y, sys.maxsize, what, weights=weights)
        drawn = list(islice(batches.epoch(0), 2))
        if len(drawn) != 1:
            found = "several batches" if drawn else "no batch"
            raise DataError(f"{what}: {found} found, one needed")
        inputs, given = drawn[0]
        if given is None:
            raise DataError(f"{what}: labels are missing; y needed")
        return inputs, given

    def _feed(self, bound: Bound, inputs: Mapping[str, Array], labels: Mapping[str, Array]) -> None:
        given = {**inputs, **labels}
        for name in bound.batch:
            if name not in given:
                raise DataError(f"input {name!r} is missing; found {', '.join(given)}")
            array = given[name]
            if not hasattr(array, "__legate_data_interface__"):
                array = np.asarray(array)
            target = bound.feeds[name]
            if array.shape != target.shape:
                raise DataError(f"input {name!r}: shape {array.shape} found, {target.shape} needed")
            if kind_of(array.dtype) not in "iufb" or (
                kind_of(array.dtype) == "f" and kind_of(target.dtype) == "i"
            ):
                raise DataError(f"input {name!r}: {array.dtype} found, {target.dtype} needed")
            if array.dtype != target.dtype and kind_of(array.dtype) in "iu":
                limits = self.feeding.ranges.get(name)
                if limits is not None:
                    limits.check(name, array)
            self.session.feed(bound, name, array)

    def _non_finite(self, bound: Bound, loss: float) -> NonFiniteLoss:
        """Find the first layer whose output is not finite, by a sequential run of the step."""
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

    def _batches(
        self,
        x: Any,
        y: Any,
        size: int,
        what: str,
        shuffle: bool = False,
        weights: Any = None,
        epochs: int = 0,
    ) -> Batches:
        """Return the batches of a data set, checked against the model."""
        seed = self._shuffle_seed if shuffle else 0
        try:
            batches = Batches(
                *(x, y, size), shuffle=shuffle, seed=seed, weights=weights, epochs=epochs
            )
        except DataError as error:
            raise DataError(f"{what}: {error}") from None
        self.feeding.check(batches, what)
        try:
            batches.convert(self.feeding.converted)
        except DataError as error:
            raise DataError(f"{what}: {error}") from None
        return batches

    def _measured(self, validation: bool) -> tuple[str, ...]:
        """Return the names of the values that an epoch's record has."""
        names = self.objective.names
        return (*names, *(f"validation_{name}" for name in names)) if validation else names

    @together
    def evaluate(
        self, x: Any, y: Any, *, batch_size: int | None, sample_weights: Any = None
    ) -> dict[str, float]:
        """Return mean loss and metrics; see `Model.evaluate`."""
        size, aim = self._size(batch_size), self.objective
        sums: dict[str, list[Any]] = {}
        batches = self._batches(x, y, size, "evaluate", weights=sample_weights)
        for inputs, given in batches.epoch(0):
            if given is None:
                raise DataError("evaluate: labels are missing; y, or files with y, needed")
            samples = rows_of(inputs)
            loss, *values = self._run("evaluate", inputs, given, samples)
            accumulate(sums, "loss", aim.of_loss(float(loss), given))
            for name, counted in aim.counts(values, given):
                accumulate(sums, name, counted)
        if not sums:
            raise DataError("evaluate: no samples found, 1 or more needed")
        return aim.results(sums)

    @together
    def predict(self, x: Any, *, batch_size: int | None) -> Array | tuple[Array, ...]:
        """Return the outputs for all samples; see `Model.predict`."""
        in_order(x)
        batches = self._batches(x, None, self._size(batch_size), PREDICT)
        return concatenated(
            self._run("predict", inputs, {}, rows_of(inputs)) for inputs, _ in batches.epoch(0)
        )

    def _run(
        self, kind: str, inputs: Mapping[str, Array], labels: Mapping[str, Array], samples: int
    ) -> list[Array]:
        """Return copies of the outputs of one run of a graph without updates."""
        bound = self.bound(kind, samples, inputs, self.feeding.lengths_of(inputs))
        with self.session.lock:
            self._feed(bound, inputs, labels)
            if STEP in bound.feeds:
                bound.feeds[STEP][...] = self._position.step + 1
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
