"""The model: layers that are recorded, then compiled, trained and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from soapstone.frontend.recording import Emit, Tensor
from soapstone.frontend.trainable import Trainable
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference.session import InferenceSession
    from soapstone.frontend.training.objective import Losses, Metrics
    from soapstone.frontend.training.optimizers import Optimizer
    from soapstone.frontend.training.state import Callback
    from soapstone.frontend.training.trainer import TrainingResult
    from soapstone.kernels.choices import Tune
    from soapstone.runtime import Machine


class Model(Trainable):
    """A neural network under construction, then compiled, trained and run.

    Args:
        name: of the model and its graphs.
        seed: of initial parameters, of dropout and of the order of samples.

    Example:
        >>> model = Model("net")
        >>> x = model.input("image", (64, 784))
        >>> model.output(model.dense(model.dense(x, 1024, activation="relu"), 10))
        >>> model.compile("sgd", loss="cross_entropy", metrics=["accuracy"])
    """

    def record(self, emit: Emit, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Record a layer call and return its outputs; see `Recording.record`.

        Raises:
            GraphError: the model is compiled, or a tensor is another model's.
        """
        if self._trainer is not None:
            raise GraphError(f"model {self.name!r} is compiled; layers are added before compile")
        return super().record(emit, inputs)

    def compile(
        self,
        optimizer: Optimizer | str = "sgd",
        loss: Losses = "cross_entropy",
        metrics: Metrics = (),
        *,
        loss_weights: Mapping[str, float] | None = None,
        weighted: bool = False,
        micro_batches: int = 1,
        precision: str = "float32",
        machine: Machine | None = None,
        executor: str = "local",
        cpus: int | None = None,
        threads: int = 1,
        gpus: int = 0,
        mapper: object = "data_parallel",
        strategy: Strategy | str | Path | None = None,
        optimize: bool = False,
        step: Graph | str | Path | None = None,
        choices: str | Path | None = None,
        seed: int | None = None,
        fast_memory: int | None = None,
        plan: MemoryPlan | str | Path | None = None,
        overlap: bool = False,
    ) -> None:
        """Choose loss, optimizer, machine and mapper; nothing is allocated until the first step.

        A model that is compiled again keeps its weights, and the states of its optimizer where that
        is the same but for its learning rate; else a warning says that these begin anew.

        Args:
            optimizer: an SGD, Adam or AdamW, or its name in small letters.
            loss: of the first output, or of several outputs a dict by their layers' names; a name,
                one of `soapstone.losses` with its settings, or a function of tensors
                `loss(model, output, labels)` (docs/training.md). "cross_entropy" and "focal"
                (labels: class numbers, without the output's last axis), "masked_cross_entropy" (the
                same over the labels that are not -1), "cross_entropy_dense" (labels:
                probabilities), "mse", "mae", "huber", "bce" (of probabilities),
                "bce_with_logits" or "masked_bce" (of logits, over the labels that are not -1);
                labels of these have the output's shape.
            metrics: names, those of `soapstone.metrics`, or functions as losses are; of several
                outputs with a loss, a dict by output.
            loss_weights: by output, what its loss is multiplied by; 1 where it is left out.
            weighted: whether samples have weights, which data then need.
            micro_batches: parts in which a step computes its batch one after another, with one
                update by the sum of their gradients.
            precision: "float32", or "mixed_float16": products are computed of halves, and their
                gradients times a scale that adapts itself; weights and all else stay single
                (docs/training.md); or "tf32", on GPUs: products may round operands (docs/cuda.md).
            machine: a described machine to run on; by default this one with `cpus` processors of
                `threads` threads in each process.
            gpus: so many of this computer's NVIDIA GPUs to run on instead (docs/cuda.md).
            executor: who runs the tasks: local (threads of this process), mpi (one process a rank,
                under mpiexec: every rank runs the same program) or legate (docs/legate.md).
            mapper: a name (`soapstone.mappers` entry points), `module:Class`, or an instance.
            strategy: a strategy or the path of its file; it is checked against the model's graph.
            optimize: search for a faster training step when the first is to be run, and train with
                it where it is faster when measured (docs/optimize.md).
            step: a training step that such a search has found, or the path of its file; it is
                checked against the model, and run for batches of its size.
            choices: a file of kernel choices (`save_choices`) to repeat: with them, the same seed,
                strategy and threads give the same bits. Calls that it does not name are measured.
            seed: in place of the model's.
            fast_memory: bytes of a memory that the processors work in, with the computer's behind
                it: values are copied between the two as a memory plan says (docs/memory.md).
            plan: how that is planned: "dp" (the default), "lru", "stream" or "belady", or a plan
                or the path of its file, which is checked when the training step is bound; its
                capacity is that of the fast memory where none is given.
            overlap: let two more threads make the copies, one each way, while processors compute.

        Raises:
            ChoiceError: when bound, a choice that cannot be repeated here.
            GraphError, StrategyError, MachineError: an argument that does not fit.
        """
        options = dict(locals())  # the arguments, which travel as one record from here
        from soapstone.frontend.training.options import Options
        from soapstone.frontend.training.trainer import Trainer

        del options["self"], options["seed"]
        if seed is not None:
            self.seed = seed
        trainer = Trainer(self, Options(**options))
        if self.begun is not None and self._trainer is None:
            trainer.begin(self.begun)
        if self._trainer is not None:
            self.values.update(trainer.adopt(self._trainer))
            self._trainer.close()
        self._trainer = trainer

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        validation_data: Any = None,
        validation_split: float | None = None,
        sample_weights: Any = None,
        callbacks: Sequence[Callback] = (),
        shuffle: bool = True,
        resume: str | Path | None = None,
        progress: bool = True,
    ) -> TrainingResult:
        """Train for a number of epochs and return the history.

        Args:
            x: (samples, …) float32, a dict by input name, `Samples` or `Buckets` of
                `soapstone.data`, a folder of npz files, or an iterable of (x, y) batches; y:
                labels, (samples,) integers for `cross_entropy`, or a dict by output.
            batch_size: of a step, by default the model's; a last batch may be smaller.
            epochs: how many in all, those of a resumed run among them.
            validation_data: a pair (x, y), with weights a third, `Samples`, `Buckets`, the path of
                npz files, or batches that can be drawn again, to evaluate after each epoch.
            validation_split: which part of arrays x and y is held out for that instead, drawn by
                the seed.
            sample_weights: (samples,) or of the labels' shape, what each counts in the loss; by
                output a dict. The model is compiled `weighted`.
            callbacks: what is called as training goes (`soapstone.frontend.training.callbacks`).
            shuffle: whether each epoch has the samples in an order of its own, drawn by the seed.
            resume: a checkpoint to continue from, in the middle of an epoch if it was there.
            progress: whether a line on standard error shows how far training is.

        Raises:
            DataError: arrays that do not fit the model.
            NonFiniteLoss: the loss is NaN or infinite; names the step and the layer.
            GraphError: the model is not compiled.
        """
        options = dict(locals())
        del options["self"]
        return self.trainer.fit(**options)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weights: Any = None,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """Train one step on all samples of x, and return their loss and metrics before it.

        x, y and sample_weights are as of `fit`: arrays, or what has samples, all of which are one
        batch; an iterable has one. learning_rate: of this step, in place of the optimizer's.

        Raises:
            DataError: data that do not fit the model, or several batches.
            NonFiniteLoss: the loss is NaN or infinite; nothing is changed.
            GraphError: the model is not compiled.
        """
        return self.trainer.train_on_batch(
            x, y, sample_weights=sample_weights, learning_rate=learning_rate
        )

    def gradients(self, x: Any, y: Any = None, *, sample_weights: Any = None) -> dict[str, Array]:
        """Return the gradient of the loss by each trained parameter, over all samples of x.

        They are those of a training step (dropout drops, batch norm normalises over the batch)
        before any clipping; nothing is trained. x, y and sample_weights are as of `train_on_batch`.

        Raises:
            DataError: data that do not fit the model, or several batches.
            GraphError: the model is not compiled.
        """
        return self.trainer.gradients(x, y, sample_weights=sample_weights)

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weights: Any = None,
    ) -> dict[str, float]:
        """Return the mean "loss" over the samples of a data set, and the metrics by name.

        x, y, batch_size and sample_weights are as of `fit`. Nothing is trained, and dropout drops
        nothing.

        Raises:
            DataError: no samples or labels, or arrays that do not fit the model.
            GraphError: the model is not compiled.
        """
        return self.trainer.evaluate(x, y, batch_size=batch_size, sample_weights=sample_weights)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Array | tuple[Array, ...]:
        """Return the model's output for all samples of x, (samples, …), or a tuple of several.

        A compiled model runs with its parameters as they are between steps; one that is not runs in
        an inference session of its own. To run often, keep one: `model.inference()`. x and
        batch_size are as of `fit`.

        Raises:
            DataError: no samples, or arrays that do not fit the model.
        """
        if self._trainer is not None:
            return self.trainer.predict(x, batch_size=batch_size)
        from soapstone.frontend.inference.in_batches import predict

        with self.inference() as session:
            return predict(session, x, self.batch_size if batch_size is None else batch_size)

    def inference(
        self,
        *,
        threads: int | None = None,
        cpus: int | None = None,
        strategy: Strategy | str | Path | None = None,
        requests: int = 1,
        plain: bool = False,
        bound_shapes: int | None = None,
        fast_memory: int | None = None,
        plan: MemoryPlan | str | Path | None = None,
        tune: Tune = True,
        precision: str = "float32",
    ) -> InferenceSession:
        """Return a session that serves the model with its present weights.

        threads, cpus, strategy, requests, plain, bound_shapes, fast_memory, plan, tune and
        precision are those of `InferenceSession`.
        """
        options = dict(locals())
        from soapstone.frontend.inference.session import InferenceSession

        del options["self"]
        return InferenceSession(self, **options)

    @property
    def training_graph(self) -> Graph:
        """Forward, backward and update operators at the model's batch size.

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.training_graph(self.batch_size)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the training graph at the model's batch size.

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.strategy_for(self.batch_size)

    def save_choices(self, path: str | Path) -> None:
        """Write which kernel variant serves each form of call to a file, for `compile(choices=…)`.

        Raises:
            GraphError: the model is not compiled.
        """
        self.trainer.choices.save(path)

    @property
    def peak_bytes(self) -> int:
        """Bytes of parameters, states, inputs and the arena of the largest bound graph.

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.session.peak_bytes

    @property
    def statistics(self) -> dict[str, Any]:
        """Counters of the last fit and of the runtime.

        `steps`, `step_us` (the median), `samples_per_s`, `peak_bytes`, `peak_bytes_per_device` (of
        the memory of each processor of this process), `variants` (by launch) and `runtime`
        (`Statistics`: launches, copies, …). With a fast memory also `planned_bytes` and
        `copied_bytes`, between the memories, of a training step.

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.statistics()

    def profile(self, path: str | Path) -> AbstractContextManager[None]:
        """Return a context in which steps are timed, and written to a file as a timeline.

        The file has the trace-event format (docs/profiles.md).

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.session.profile(path)

    def close(self) -> None:
        """Stop the workers and free all memory of the compiled model, but for trained weights."""
        if self._trainer is None:
            return
        trainer, self._trainer = self._trainer, None
        try:
            if trainer.changed and trainer.executor == "local":
                kept = trainer.state()
                self.values.update((name, kept[name]) for name in self.carried if name in kept)
            elif trainer.changed:
                self._lost = trainer.executor
        finally:
            trainer.close()

    def __call__(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Refuse to be called.

        Raises:
            TypeError: says what is meant.
        """
        raise TypeError(
            f"model {self.name!r} is not called: model.predict(x) runs it on arrays, and a function"
            " of tensors makes layers that serve several models"
        )

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None and self._trainer is not None:  # what is there may be half of a step
            trainer, self._trainer = self._trainer, None
            trainer.close()
        self.close()
