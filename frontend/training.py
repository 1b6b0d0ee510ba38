"""Training: the graph of a step, and the loops that run it over data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from soapstone.frontend import checkpoint
from soapstone.frontend.callbacks import Callback, ProgressBar, TrainingState
from soapstone.frontend.data import Batches, DataError
from soapstone.frontend.losses import LABELS, add_loss, add_metrics
from soapstone.frontend.optimize_training import Ground, Steps
from soapstone.frontend.optimizers import LEARNING_RATE, STEP, Optimizer
from soapstone.frontend.optimizers import optimizer as as_optimizer
from soapstone.frontend.session import Bound, Session
from soapstone.ir.autodiff import gradients
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.guard import guarded
from soapstone.ir.interpret import first_non_finite
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.choices import Choices
from soapstone.mappers import load as load_mapper
from soapstone.mappers.base import strategy_of
from soapstone.runtime import Machine
from soapstone.runtime.policy import attach
from soapstone.runtime.start import machine_of, rank_of

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
        graph = self.original_graph(model.batch_size)  # shapes, loss and metrics are checked here
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
            self._session = Session(
                self.machine, self.mapper, self.model.seed, self.executor, self.choices
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
        validation_data: tuple[Any, Any] | None,
        callbacks: Sequence[Callback],
        shuffle: bool,
        resume: str | Path | None,
        progress: bool,
    ) -> TrainingResult:
        """Train; see `Model.fit`."""
        if epochs < 0:
            raise DataError(f"epochs: {epochs} found, 0 or more needed")
        size = batch_size or self.model.batch_size
        batches = Batches(x, y, size, shuffle=shuffle, seed=self._shuffle_seed)
        self.steps.expect(size, progress)
        if resume is not None:
            self.load_checkpoint(resume)
        else:
            self._position.start_epoch(0)
        self.bound("train", size)
        result = self._result = TrainingResult()
        state = TrainingState(epochs=epochs, steps_per_epoch=batches.steps, model=self.model)
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
                    count = self.step(inputs, labels, state)
                    spent = time.perf_counter() - start
                    busy.append(spent)
                    state.step_us = spent * 1e6
                    state.samples_per_s = count / spent
                    for hook in hooks:
                        hook.on_step_end(state)
                    if state.stop:
                        return result
                record = self._record()
                if validation_data is not None:
                    scores = self.evaluate(*validation_data, batch_size=size)
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
        count = len(labels)
        bound = self.bound("train", count)
        rate = self.optimizer.rate(position.step)
        self._feed(bound, inputs, labels)
        bound.feeds[LEARNING_RATE][...] = rate
        if STEP in bound.feeds:
            bound.feeds[STEP][...] = position.step + 1
        self.session.run(bound)
        loss, finite, *counts = (bound.results[name] for name in bound.graph.outputs)
        if not finite:
            raise self._non_finite(bound, float(loss))
        position.step += 1
        position.batch += 1
        position.samples += count
        position.loss_sum += float(loss) * count
        position.correct += _correct(counts, labels)
        state.step, state.loss, state.learning_rate = position.step, float(loss), rate
        state.metrics = self._means(position.correct, position.samples)
        return count

    def _feed(self, bound: Bound, inputs: Mapping[str, Array], labels: Array | None) -> None:
        given = dict(inputs) if labels is None else {**inputs, LABELS: labels}
        wanted = [name for name, role in bound.graph.roles.items() if role is Role.INPUT]
        if len(wanted) == len(given) and set(given) != set(wanted) and len(inputs) == 1:
            (only,) = inputs.values()
            given = {wanted[0]: only} | {k: v for k, v in given.items() if k == LABELS}
        for name in wanted:
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

    @together
    def evaluate(self, x: Any, y: Any, *, batch_size: int | None) -> dict[str, float]:
        """Return mean loss and metrics; see `Model.evaluate`."""
        size = batch_size or self.model.batch_size
        loss_sum = correct = 0.0
        samples = 0
        for inputs, labels in Batches(x, y, size, shuffle=False, seed=0).epoch(0):
            if labels is None:
                raise DataError("evaluate: labels are missing; y, or files with y, needed")
            bound = self.bound("evaluate", len(labels))
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
        size = batch_size or self.model.batch_size
        parts: list[list[Array]] = []
        for inputs, _ in Batches(x, None, size, shuffle=False, seed=0).epoch(0):
            count = len(next(iter(inputs.values())))
            bound = self.bound("predict", count)
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
        """Write everything a resumed run needs, atomically."""
        self.bound("train", self.model.batch_size)
        position = self._position
        metadata = {
            "model": self.model.name,
            "model_hash": self.original_graph(self.model.batch_size).structural_hash,
            "seed": self.model.seed,
            "position": dict(vars(position)),
            "choices": dict(self.choices.made),
        }
        state = self.session.state()  # of all processes
        if self.first:
            checkpoint.save(path, state, metadata)

    @together
    def load_checkpoint(self, path: str | Path) -> None:
        """Read parameters, states and position, and repeat the choices of the run that wrote them.

        Choices that cannot be repeated here are made anew, which is said (`ChoiceWarning`); those
        of a file that `compile` was given come before the checkpoint's.

        Raises:
            CheckpointError: truncated, foreign, or of another model.
        """
        arrays, metadata = checkpoint.load(path)
        self._repeat(metadata.get("choices", {}))
        self.bound("train", self.model.batch_size)  # makes the parameters that a checkpoint fills
        expected = self.session.state()
        checkpoint.check(arrays, {n: (v.shape, v.dtype.name) for n, v in expected.items()})
        position = checkpoint.fields(metadata, "position", dict(vars(_Position())))
        seed = metadata.get("seed")
        if seed != self.model.seed:
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r}: seed {seed!r} found, {self.model.seed} needed"
            )
        self.session.load_state(arrays)
        self._position = _Position(**position)

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
