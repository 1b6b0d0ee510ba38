"""Models: layers that are recorded, then compiled, trained and run."""

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

        A model that is compiled again keeps its weights. The optimizer's state is kept if it is the
        same optimizer except for the learning rate; otherwise a warning says that it is reset.

        Args:
            optimizer: an SGD, Adam or AdamW, or its name in lower case.
            loss: of the first output, or for several outputs a dict by the names of their layers: a
                name, one of `soapstone.losses` with its settings, or a function of tensors
                `loss(model, output, labels)` (docs/training.md). "cross_entropy" and "focal" take
                class numbers, without the output's last axis; "masked_cross_entropy" is the same
                over the labels that are not -1; "cross_entropy_dense" takes probabilities. "mse",
                "mae", "huber", "bce" (of probabilities), "bce_with_logits" and "masked_bce" (of
                logits, over the labels that are not -1) take labels of the output's shape.
            metrics: names, those of `soapstone.metrics`, or functions like those of losses; for
                several outputs with a loss, a dict by output.
            loss_weights: by output, a factor of its loss; by default 1.
            weighted: whether samples have weights, which data must then include.
            micro_batches: the number of parts in which a step computes its batch one after another,
                with one update by the sum of their gradients.
            precision: "float32"; or "mixed_float16": products are computed from halves, and
                gradients with an adaptive loss scale, while weights and everything else stay single
                (docs/training.md); or "tf32", on GPUs: products may round their operands
                (docs/cuda.md).
            machine: a described machine to run on; by default this computer, with `cpus` processors
                of `threads` threads in each process.
            gpus: the number of this computer's NVIDIA GPUs to run on instead (docs/cuda.md).
            executor: local (threads of this process), mpi (one process for each rank, under
                mpiexec: every rank runs the same program) or legate (docs/legate.md).
            mapper: a name (`soapstone.mappers` entry points), `module:Class`, or an instance.
            strategy: a strategy or the path of its file; it is checked against the model's graph.
            optimize: whether to search for a faster training step before the first one, and train
                with it if it is measured to be faster (docs/optimize.md).
            step: a training step that such a search has found, or the path of its file; it is
                checked against the model, and used for batches of its size.
            choices: a file of kernel choices (`save_choices`) to repeat: together with the same
                seed, strategy and threads they give the same bits. Calls that it does not contain
                are measured.
            seed: in place of the model's.
            fast_memory: bytes of a memory that the processors work in, backed by the computer's
                memory; values are copied between the two by a memory plan (docs/memory.md).
            plan: how that is planned: "dp" (the default), "lru", "stream" or "belady", or a plan or
                the path of its file, which is checked when the training step is bound; without
                `fast_memory` the plan's capacity is used.
            overlap: whether two more threads make the copies, one in each direction, while
                processors compute.

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
                `soapstone.data`, a folder of npz files, or an iterable of (x, y) batches.
            y: labels, (samples,) integers for `cross_entropy`, or a dict by output.
            batch_size: of a step, by default the model's; the last batch may be smaller.
            epochs: the total number, including those of a resumed run.
            validation_data: evaluated after each epoch: a pair (x, y), with weights a triple,
                `Samples`, `Buckets`, the path of npz files, or batches that can be iterated again.
            validation_split: the share of arrays x and y that is held out for that instead, drawn
                by the seed.
            sample_weights: (samples,) or of the labels' shape, the weight of each in the loss; a
                dict for several outputs. The model must be compiled `weighted`.
            callbacks: called during training (`soapstone.frontend.training.callbacks`).
            shuffle: whether each epoch has a new order of the samples, drawn by the seed.
            resume: a checkpoint to continue from, also from the middle of an epoch.
            progress: whether a progress line is shown on standard error.

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
        """Train one step on all samples of x; return their loss and metrics before the update.

        x, y and sample_weights are as of `fit`: arrays, or data whose samples make one batch; an
        iterable must have one batch. learning_rate: of this step, in place of the optimizer's.

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

        It is that of a training step (dropout drops, batch norm uses the statistics of the batch)
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

        x, y, batch_size and sample_weights are as of `fit`. Nothing is trained, and dropout is off.

        Raises:
            DataError: no samples or labels, or arrays that do not fit the model.
            GraphError: the model is not compiled.
        """
        return self.trainer.evaluate(x, y, batch_size=batch_size, sample_weights=sample_weights)

    def predict(self, x: Any, *, batch_size: int | None = None) -> Array | tuple[Array, ...]:
        """Return the model's output for all samples of x, (samples, …), or a tuple of several.

        A compiled model runs with its present parameters; another model runs in a new inference
        session. For many calls, keep a session: `model.inference()`. x and batch_size are as of
        `fit`.

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
        """Return an inference session of the model with its present weights.

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
        """Save the kernel variant of each form of call to a file, for `compile(choices=…)`.

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
        `copied_bytes` of a training step.

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.statistics()

    def profile(self, path: str | Path) -> AbstractContextManager[None]:
        """Time the steps inside the block, and write a timeline to a file.

        The file has the trace-event format (docs/profiles.md).

        Raises:
            GraphError: the model is not compiled.
        """
        return self.trainer.session.profile(path)

    def close(self) -> None:
        """Stop the workers and free all memory of the compiled model, except trained weights."""
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
        """Raise an error: a model is not a function.

        Raises:
            TypeError: names the methods to use instead.
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
