"""Training: the graph of a step, and the loops that run it over data."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from soapstone.engine.mapper import strategy_of
from soapstone.engine.session import Bound, Session
from soapstone.frontend.arguments import count
from soapstone.frontend.data.feeding import PREDICT, Feeding
from soapstone.frontend.data.sets import Batches, DataError
from soapstone.frontend.optimization.training import Ground, Steps
from soapstone.frontend.training import checkpoint, saved
from soapstone.frontend.training.callbacks import Callback, ProgressBar, TrainingState
from soapstone.frontend.training.losses import LABELS, add_loss, add_metrics
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.frontend.training.optimizers import optimizer as as_optimizer
from soapstone.ir.autodiff import gradients
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.guard import LEARNING_RATE, STEP, guarded
from soapstone.ir.interpret import first_non_finite
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.choices import Choices
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.machines.start import machine_of, rank_of
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


P = ParamSpec("P")
T = TypeVar("T")


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite; parameters and states are as they were before the step."""


@dataclass
class TrainingResult:
    """What a fit did: one record an epoch, and the totals."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    step_us: float = 0.0
    samples_per_s: float = 0.0

    def last(self, key: str) -> float | None:
        """Return a value of the last epoch: loss, accuracy, validation_loss, …"""
        return self.epochs[-1].get(key) if self.epochs else None


def training_graph(forward: Graph, loss: str, chosen: Optimizer, metrics: tuple[str, ...]) -> Graph:
    """Return forward, backward and update operators; outputs are loss, finiteness and metrics."""
    builder = GraphBuilder(base=replace(forward, outputs=()))
    output = forward.outputs[0]
    value = add_loss(builder, output, loss)
    counts = add_metrics(builder, output, metrics)
    builder.input(LEARNING_RATE, (), role=Role.SCALAR)
    if not builder.has(STEP):
        builder.input(STEP, (), "int64", Role.SCALAR)
    finite = builder.apply("is_finite", value, name="finite")[0]
    trained = forward.inputs(Role.PARAMETER)
    if trained:
        grads = gradients(builder, value, trained)
        for name in reversed(trained):
            chosen.emit(builder, name, grads[name], finite)
    builder.output(value, finite, *counts.values())
    return guarded(builder.build(), finite).pruned()


def evaluation_graph(forward: Graph, loss: str, metrics: tuple[str, ...]) -> Graph:
    """Return forward operators, loss and metrics."""
    builder = GraphBuilder(base=replace(forward, outputs=()))
    value = add_loss(builder, forward.outputs[0], loss)
    counts = add_metrics(builder, forward.outputs[0], metrics)
    builder.output(value, *counts.values())
    return builder.build().pruned()


def _correct(counts: Sequence[Array], labels: Array) -> float:
    """Return the batch's samples times the fraction of its labels that were found."""
    return float(counts[0]) * len(labels) / max(np.size(labels), 1) if counts else 0.0


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


@dataclass
class _Position:
    """Where training is: all that a resumed run needs besides the weights."""

    epoch: int = 0
    batch: int = 0  # the next batch of the epoch
    step: int = 0  # steps done since the start of training
    loss_sum: float = 0.0
    correct: float = 0.0
    samples: int = 0

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.batch = epoch, 0
        self.loss_sum, self.correct, self.samples = 0.0, 0.0, 0


def together(method: Callable[Concatenate[Trainer, P], T]) -> Callable[Concatenate[Trainer, P], T]:
    """A method that all processes of a run call alike: an error of one stops all."""

    @wraps(method)
    def guarded(self: Trainer, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if self._session is not None:
                self._session.runtime.executor.stop(error)
            raise

    return cast("Callable[Concatenate[Trainer, P], T]", guarded)


class Trainer:
    """A compiled model: its session, its bound shapes and its position in training."""

    def __init__(
        self,
        model: Model,
        *,
        optimizer: Optimizer | str,
        loss: str,
        metrics: tuple[str, ...],
        machine: Machine | None,
        executor: str,
        cpus: int | None,
        threads: int,
        mapper: object,
        strategy: Strategy | str | Path | None,
        optimize: bool,
        step: Graph | str | Path | None,
        choices: str | Path | None,
    ) -> None:
        self.model = model
        self.optimizer = as_optimizer(optimizer)
        self.loss = loss
        self.metrics = metrics
        self.executor = executor
        self.first = rank_of(executor) == 0
        if machine is None and cpus is not None and cpus * threads > usable_cores():
            warnings.warn(
                f"cpus: {cpus} processors of {threads} threads found; the {usable_cores()} cores of"
                " this computer take turns",
                stacklevel=4,
            )
        self.machine = machine or machine_of(executor, cpus, threads)
        if strategy is not None and not isinstance(strategy, Strategy):
            strategy = Strategy.load(Path(strategy))
        self.mapper = load_mapper(mapper, strategy)
        attach(self.mapper, self.machine)
        if optimize and executor != "local":
            raise GraphError(
                f"optimize: found with executor {executor!r}, whose processes would find different "
                "steps; find one with executor 'local', and give its file as step"
            )
        self.steps = Steps(self.original_graph, Ground(self.machine, self.mapper), optimize, step)
        self._strategies: dict[str, Strategy] = {}
        self._repeats = choices is not None
        self.choices = Choices() if choices is None else Choices.load(choices)
        self._bounds: dict[tuple[str, int], Bound] = {}
        self._session: Session | None = None
        self._position = _Position()
        self._shuffle_seed = model.seed
        self._result = TrainingResult()
        self._data: dict[str, int | None] = {}  # what a position counts in
        self.changed = False  # whether parameters are other than the initial ones
        forward = model.build(training=True)
        graph = training_graph(forward, loss, self.optimizer, metrics)  # everything is checked here
        self.feeding = Feeding(forward, graph.tensors[LABELS])
        self.carried = {
            name: graph.tensors[name]
            for name, role in graph.roles.items()
            if role in (Role.PARAMETER, Role.STATE)
        }
        if strategy is not None:
            if optimize:
                raise GraphError("optimize: found with a strategy, which is of the original graph")
            strategy.check(self.steps.given or graph, self.machine.describe())
            self._given: Strategy | None = strategy
        else:
            self._given = None

    # Graphs and their bound forms

    @property
    def session(self) -> Session:
        """The session, started with the first bound graph."""
        if self._session is None:
            model = self.model
            self._session = Session(
                self.machine, self.mapper, model.seed, self.executor, self.choices, model.values
            )
        return self._session

    def training_graph(self, batch_size: int) -> Graph:
        """Return the graph of a training step, optimised where that was asked for."""
        return self.steps.graph(batch_size)

    def original_graph(self, batch_size: int) -> Graph:
        """Return the graph of a training step as the model says it."""
        forward = self.model.build(batch_size, training=True)
        return training_graph(forward, self.loss, self.optimizer, self.metrics)

    def strategy_for(self, batch_size: int) -> Strategy:
        """Return the strategy of the training graph for a batch size."""
        return self._strategy(self.training_graph(batch_size))

    def _strategy(self, graph: Graph) -> Strategy:
        if self._given is not None:
            return self._given
        key = graph.structural_hash
        if key not in self._strategies:
            self._strategies[key] = strategy_of(self.mapper, graph, self.machine)
        return self._strategies[key]

    def bound(self, kind: str, batch_size: int) -> Bound:
        """Return the trace of a kind of step: train, evaluate or predict; compiled on first use."""
        key = (kind, batch_size)
        if key not in self._bounds:
            if kind == "train":
                graph = self.training_graph(batch_size)
            else:
                graph = self.model.build(batch_size)
                if kind == "evaluate":
                    graph = evaluation_graph(graph, self.loss, self.metrics)
            self._bounds[key] = self.session.bind(graph, self._strategy(graph))
        return self._bounds[key]

    # Loops

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
            result.steps = len(busy)
            result.seconds = time.perf_counter() - began
            if busy:
                result.step_us = float(np.median(busy)) * 1e6
                result.samples_per_s = size / float(np.median(busy))
            for hook in hooks:
                hook.on_train_end(state)
        return result

    def step(self, inputs: Mapping[str, Array], labels: Array, state: TrainingState) -> int:
        """Run one training step on a batch and return its sample count."""
        position = self._position
        samples = len(labels)
        bound = self.bound("train", samples)
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
        position.samples += samples
        position.loss_sum += float(loss) * samples
        position.correct += _correct(counts, labels)
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
        return {"accuracy": correct / samples} if self.metrics and samples else {}

    def _record(self) -> dict[str, float]:
        position = self._position
        samples = max(position.samples, 1)
        record = {"epoch": float(position.epoch), "loss": position.loss_sum / samples}
        return record | self._means(position.correct, position.samples)

    def _non_finite(self, bound: Bound, loss: float) -> NonFiniteLoss:
        """Find the first layer that is not finite by running the step again, sequentially."""
        values = self.session.state() | {k: np.array(v) for k, v in bound.feeds.items()}
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
            bound = self.bound("evaluate", len(labels))
            with self.session.lock:
                self._feed(bound, inputs, labels)
                self.session.run(bound)
                loss, *counts = (bound.results[name] for name in bound.graph.outputs)
                loss_sum += float(loss) * len(labels)
                correct += _correct(counts, labels)
            samples += len(labels)
        if not samples:
            raise DataError("evaluate: no samples found, 1 or more needed")
        return {"loss": loss_sum / samples} | self._means(correct, samples)

    @together
    def predict(self, x: Any, *, batch_size: int | None) -> Array | tuple[Array, ...]:
        """Return the outputs for all samples; see `Model.predict`."""
        size = self._size(batch_size)
        parts: list[list[Array]] = []
        for inputs, _ in self._batches(x, None, size, PREDICT).epoch(0):
            bound = self.bound("predict", len(next(iter(inputs.values()))))
            with self.session.lock:
                self._feed(bound, inputs, None)
                self.session.run(bound)
                parts.append([np.array(bound.results[name]) for name in bound.graph.outputs])
        if not parts:
            raise DataError("predict: no samples found, 1 or more needed")
        outputs = tuple(np.concatenate(part) for part in zip(*parts))
        return outputs[0] if len(outputs) == 1 else outputs

    # Checkpoints

    @together
    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything a resumed run needs, atomically.

        Raises:
            CheckpointError: values that are not finite, as gradients that overflow leave behind.
        """
        self.bound("train", self.model.batch_size)
        with self.session.lock:
            position = dict(vars(self._position))
            state = self.session.state()  # of all processes
        if bad := saved.infinite(state):
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r}: not written: {len(bad)} of {len(state)} arrays have"
                f" values that are not finite, {bad[0]!r} the first; what was there is as it was"
            )
        metadata = {
            "model": self.model.name,
            "seed": self.model.seed,
            "position": position,
            "choices": dict(self.choices.made),
            "made_for": self._made_for(self.model.batch_size),
            "data": dict(self._data),
            "machine": self.machine.name,
        }
        if self.first:
            checkpoint.save(path, state, metadata)

    def _made_for(self, batch_size: int) -> dict[str, Any]:
        """Return what a checkpoint of this training is for."""
        return {
            **self.model.made_for(batch_size),
            "loss": self.loss,
            "seed": self.model.seed,
            "optimizer": saved.settings(self.optimizer),
        }

    @together
    def load_checkpoint(self, path: str | Path, strict: bool = True) -> saved.Loaded:
        """Read parameters, states and position, and repeat the choices of the run that wrote them.

        Choices that cannot be repeated here are made anew, which is said (`ChoiceWarning`); those
        of a file that `compile` was given come before the checkpoint's. See also
        `Model.load_checkpoint`.
        """
        return self._load(path, strict)[0]

    def _load(self, path: str | Path, strict: bool) -> tuple[saved.Loaded, dict[str, Any]]:
        taken, metadata, done = saved.read(path, self._made_for, self.carried, strict)
        position = None
        if done.position:
            position = checkpoint.fields(metadata, "position", dict(vars(_Position())))
            self._repeat(metadata.get("choices", {}))
        with self.session.lock:
            self.session.load_state(taken)
            self.changed = True
            if position is not None:
                self._position = _Position(**position)
        return done, metadata

    def _resume(self, path: str | Path) -> None:
        """Go on where a checkpoint was; in the middle of an epoch, with as much data as there was.

        Raises:
            CheckpointError: besides those of a load, another number of batches.
        """
        _, metadata = self._load(path, True)
        made_in = metadata.get("data") or self._data
        if self._position.batch and made_in != self._data:
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r}: it is of the middle of an epoch with {made_in};"
                f" {self._data} found"
            )

    def state(self) -> dict[str, Array]:
        """Return copies of what is carried by now, by name."""
        return {} if self._session is None else self._session.state()

    def load_state(self, values: Mapping[str, Array]) -> None:
        """Replace parameters and states; their names and shapes were checked."""
        self.changed = True
        self.session.load_state(values)

    def adopt(self, other: Trainer) -> dict[str, Array]:
        """Return what the model carries on from a trainer that this one takes the place of.

        Parameters and states of the model, and those of the optimizer where it is the same.
        """
        if not other.changed or other._session is None:
            return {}
        values = other._session.state()
        kept = {name: value for name, value in values.items() if name in self.model.carried}
        self.changed = True
        if saved.settings(other.optimizer) == saved.settings(self.optimizer):
            kept |= {name: value for name, value in values.items() if name in self.carried}
            self._position.step = other._position.step
        elif len(kept) < len(values):
            warnings.warn(
                f"compile: weights are kept, but the states of {other.optimizer} are not those of"
                f" {self.optimizer}, which begins anew",
                stacklevel=4,
            )
        return kept

    def _repeat(self, given: Any) -> None:
        """Follow the choices of a checkpoint; what is bound with others is bound again."""
        texts = isinstance(given, dict) and all(isinstance(name, str) for name in given.values())
        if not texts:
            raise checkpoint.CheckpointError(
                f"checkpoint: field 'choices': {given!r} found, variants by form of call needed"
            )
        if self._repeats or given.items() <= self.choices.made.items():
            return
        self.choices = Choices(given)
        self._bounds.clear()
        if self._session is not None:
            self._session.forget()
            self._session.choices = self.choices

    def statistics(self) -> dict[str, Any]:
        """Return counters of training and of the runtime."""
        runtime = self.session.runtime.statistics
        return {
            "steps": self._result.steps,
            "step_us": self._result.step_us,
            "samples_per_s": self._result.samples_per_s,
            "peak_bytes": self.session.peak_bytes,
            "variants": dict(self._bounds[next(iter(self._bounds))].variants)
            if self._bounds
            else {},
            "runtime": dict(vars(runtime)),
        }

    def close(self) -> None:
        """Stop the workers."""
        self._bounds.clear()
        if self._session is not None:
            self._session.close()
            self._session = None
