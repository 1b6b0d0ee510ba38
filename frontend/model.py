"""The model: layers that are recorded, then compiled, trained and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.arguments import number
from soapstone.frontend.recording import Emit, Recording, Tensor
from soapstone.frontend.training.names import matching
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.data.samples import Samples
    from soapstone.frontend.inference import InferenceSession
    from soapstone.frontend.training.callbacks import Callback
    from soapstone.frontend.training.objective import Losses, Metrics
    from soapstone.frontend.training.optimizers import Optimizer
    from soapstone.frontend.training.saved import Loaded
    from soapstone.frontend.training.trainer import Trainer, TrainingResult
    from soapstone.runtime import Machine


class Model(Recording):
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

    def __init__(self, name: str = "model", seed: int = 0) -> None:
        super().__init__(name, seed)
        self._trainer: Trainer | None = None
        self.values: dict[str, Array] = {}  # contents that no session has: set, or trained before
        self.frozen: frozenset[str] = frozenset()  # parameters that are not trained
        self.penalties: dict[str, tuple[float, float]] = {}  # l1 and l2
        self.begun: tuple[dict[str, Any], int] | None = None  # settings and steps of an optimizer
        self._lost = ""  # the executor with which trained contents went

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
        from soapstone.frontend.training.trainer import Trainer

        if seed is not None:
            self.seed = seed
        trainer = Trainer(
            self,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
            weighted=weighted,
            micro_batches=micro_batches,
            machine=machine,
            executor=executor,
            cpus=cpus,
            threads=threads,
            gpus=gpus,
            mapper=mapper,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices,
            fast_memory=fast_memory,
            plan=plan,
            overlap=overlap,
        )
        if self.begun is not None and self._trainer is None:
            trainer.begin(self.begun)
        if self._trainer is not None:
            self.values.update(trainer.adopt(self._trainer))
            self._trainer.close()
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The compiled model's trainer.

        Raises:
            GraphError: the model is not compiled.
        """
        if self._trainer is None:
            raise GraphError(f"model {self.name!r} is not compiled; call model.compile(…) first")
        return self._trainer

    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        validation_data: tuple[Any, ...] | Samples | str | Path | None = None,
        validation_split: float | None = None,
        sample_weights: Any = None,
        callbacks: Sequence[Callback] = (),
        shuffle: bool = True,
        resume: str | Path | None = None,
        progress: bool = True,
    ) -> TrainingResult:
        """Train for a number of epochs and return the history.

        Args:
            x: (samples, …) float32, a dict by input name, `soapstone.data.Samples`, a folder of npz
                files, or an iterable of (x, y) batches; y: labels, (samples,) integers for
                `cross_entropy`, or a dict by output.
            batch_size: of a step, by default the model's; a last batch may be smaller.
            epochs: how many in all, those of a resumed run among them.
            validation_data: a pair (x, y), with weights a third, `Samples`, or the path of npz
                files, to evaluate after each epoch.
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
        return self.trainer.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            validation_data=validation_data,
            validation_split=validation_split,
            sample_weights=sample_weights,
            callbacks=callbacks,
            shuffle=shuffle,
            resume=resume,
            progress=progress,
        )

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weights: Any = None,
        learning_rate: float | None = None,
    ) -> dict[str, float]:
        """Train one step on all samples of x, and return their loss and metrics before it.

        x, y and sample_weights are arrays as of `fit`. learning_rate: of this step, in place of
        the optimizer's.

        Raises:
            DataError: arrays that do not fit the model.
            NonFiniteLoss: the loss is NaN or infinite; nothing is changed.
            GraphError: the model is not compiled.
        """
        return self.trainer.train_on_batch(
            x, y, sample_weights=sample_weights, learning_rate=learning_rate
        )

    def gradients(self, x: Any, y: Any = None, *, sample_weights: Any = None) -> dict[str, Array]:
        """Return the gradient of the loss by each trained parameter, over all samples of x.

        They are those of a training step (dropout drops, batch norm normalises over the batch)
        before any clipping; nothing is trained. x, y and sample_weights are arrays as of `fit`.

        Raises:
            DataError: arrays that do not fit the model.
            GraphError: the model is not compiled.
        """
        return self.trainer.gradients(x, y, sample_weights=sample_weights)

    def freeze(self, *patterns: str) -> None:
        """Keep parameters as they are from the next compile on: no gradient, no update.

        patterns: layers or parameters by name or pattern (`conv1`, `conv1.bias`, `conv*`). Running
        statistics of a frozen batch norm still follow its batches.

        Raises:
            GraphError: a pattern that fits no parameter.
        """
        self.frozen |= self._matching("freeze", patterns)

    def unfreeze(self, *patterns: str) -> None:
        """Train frozen parameters again from the next compile on; all of them without patterns.

        Raises:
            GraphError: a pattern that fits no parameter.
        """
        self.frozen -= self._matching("unfreeze", patterns or ("*",))

    def regularize(self, *patterns: str, l1: float = 0.0, l2: float = 0.0) -> None:
        """Add l1 times the sum of |w| and l2 times the sum of w^2 of parameters to the loss.

        patterns: layers or parameters by name or pattern, as of `freeze`; a later one replaces what
        an earlier one says of a parameter. It counts from the next compile on.

        Raises:
            GraphError: a pattern that fits no parameter, or a number below 0.
        """
        for name, value in (("l1", l1), ("l2", l2)):
            if number(f"regularize: {name}", value) < 0:
                raise GraphError(
                    f"regularize: {name} {value!r} found, a number of 0 or more needed"
                )
        for name in sorted(self._matching("regularize", patterns)):
            self.penalties[name] = (l1, l2)

    def _matching(self, what: str, patterns: Sequence[str]) -> frozenset[str]:
        roles = self._builder.build().roles
        known = [name for name, role in roles.items() if role is Role.PARAMETER]
        return frozenset(name for each in patterns for name in matching(what, each, known))

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
        from soapstone.frontend.inference import predict

        with self.inference() as session:
            return predict(session, x, self.batch_size if batch_size is None else batch_size)

    def save(self, path: str | Path, *, optimizer: bool = False) -> None:
        """Write layers, parameters and states to a file, of which `soapstone.load` makes a model.

        path: of a file that ends in .safetensors or .npz. optimizer: whether the states of the
        optimizer are written too, and its step, from which one with the same settings goes on.

        Raises:
            GraphError: layers that no file can have, or no optimizer where one is asked for.
            CheckpointError: a path that does not serve, or values that are not finite.
        """
        from soapstone.frontend.training.models import save

        save(self, path, optimizer)

    def load_weights(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        strict: bool = True,
        skip: Sequence[str] = (),
        names: Mapping[str, str] | None = None,
    ) -> Loaded:
        """Take parameters and states by name, and return what was taken.

        Args:
            source: a file of `save` or `save_checkpoint`; a state dict of PyTorch, or its file
                (.pt, .pth, .safetensors); an .onnx file; or arrays by name. PyTorch's names of
                parts are translated (`weight` of a batch norm is `gamma`), and weights of its
                linear layers transposed; those of recurrent and attention layers are not.
            strict: refuse what is missing, unknown or of another shape; else take what fits.
            skip: layers or parameters to leave as they are, by name or pattern (`head*`).
            names: what layers, or parameters, are called there, where it is not as here.

        Raises:
            CheckpointError: a file that cannot be read or, strict, that does not fit; names what.
            GraphError: a layer of skip or names that the model does not have.
        """
        from soapstone.frontend.training.weights import given, take

        taken, done = take(
            self.graph, self.carried, given(source), strict=strict, skip=skip, names=names or {}
        )
        self.set_weights(taken)
        return done

    def save_checkpoint(self, path: str | Path) -> None:
        """Write parameters, optimizer state, step and position in the data, atomically.

        path: of a file that ends in .safetensors or .npz.

        Raises:
            CheckpointError: a path that does not serve, or values that are not finite.
            GraphError: the model is not compiled.
        """
        self.trainer.save_checkpoint(path)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> Loaded:
        """Read a checkpoint file, and return what was taken of it.

        A model that is not compiled takes its parameters and states.

        Args:
            strict: refuse a checkpoint of another model, optimizer or seed, and values that are not
                finite; else take whatever has the name and the shape of a parameter or state here.

        Raises:
            CheckpointError: truncated, changed, foreign, or of another model: names what differs.
        """
        if self._trainer is not None:
            return self._trainer.load_checkpoint(path, strict)
        from soapstone.frontend.training import saved

        graph = self.graph
        specs = {name: graph.tensors[name] for name in self.carried}
        taken, _, done = saved.read(path, self.made_for, specs, strict)
        self.values.update(taken)
        return done

    def made_for(self, batch_size: int) -> dict[str, Any]:
        """Return what a checkpoint says of the model at a batch_size: its layers, its graph's hash.

        Raises:
            GraphError: the model has no output.
        """
        from soapstone.frontend.training.saved import layers

        graph = self.build(batch_size, training=True)
        return {
            "batch_size": batch_size,
            "model_hash": graph.structural_hash,
            "layers": layers(graph),
            "weights": list(self.carried),
        }

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self._trainer is None or self._trainer.first

    @property
    def carried(self) -> tuple[str, ...]:
        """The names of the parameters, and of states such as running statistics."""
        return (*self.graph.inputs(Role.PARAMETER), *self.graph.inputs(Role.STATE))

    def weights(self) -> dict[str, Array]:
        """Return copies of the parameters and of states such as running statistics, by name.

        They are the initial ones where nothing has been trained or set yet, and those of one moment
        between two steps where another thread trains.

        Raises:
            GraphError: the model was closed under mpi or legate, and its weights with it.
        """
        from soapstone.engine.initial import materialise

        known = dict(self.values)
        if self._trainer is not None:
            known.update(self._trainer.state())
        elif self._lost:
            raise GraphError(
                f"model {self.name!r}: its weights went with executor {self._lost!r} when it was"
                " closed; take them before"
            )
        graph, result = self.graph, {}
        for name in self.carried:
            if name in known:
                result[name] = np.array(known[name], graph.tensors[name].dtype)
            else:
                initial = graph.initials.get(name)
                result[name] = materialise(initial, graph.tensors[name], self.seed, name)
        return result

    def shared_weights(self) -> dict[str, Any]:
        """Return the parameters and states of a model compiled for Legate as data of Legate.

        `cupynumeric.asarray` takes them without a copy; what it writes is what the model uses next.

        Raises:
            GraphError: the executor is another, or the model is not compiled.
        """
        self.trainer.bound("train", self.batch_size)
        return self.trainer.session.shared()

    def inference(
        self,
        *,
        threads: int | None = None,
        plain: bool = False,
        bound_shapes: int = 8,
        fast_memory: int | None = None,
        plan: MemoryPlan | str | Path | None = None,
    ) -> InferenceSession:
        """Return a session that serves the model with its present weights.

        threads, plain, bound_shapes, fast_memory and plan are those of `InferenceSession`.
        """
        from soapstone.frontend.inference import InferenceSession

        return InferenceSession(
            self,
            threads=threads,
            plain=plain,
            bound_shapes=bound_shapes,
            fast_memory=fast_memory,
            plan=plan,
        )

    def set_weights(self, values: Mapping[str, Array]) -> None:
        """Replace parameters or states by name, at any time: what `weights` returns always fits.

        values: arrays of the shapes of `parameters`; other types are converted.

        Raises:
            GraphError: an unknown name, another shape, or no numbers; then nothing is replaced.
        """
        if not isinstance(values, Mapping):
            raise GraphError(f"set_weights: {type(values).__name__} found, arrays by name needed")
        known = {name: self.graph.tensors[name] for name in self.carried}
        if self._trainer is not None:
            known |= self._trainer.carried
        given = {}
        for name, value in values.items():
            spec = known.get(name)
            if spec is None:
                raise GraphError(f"parameter {name!r} does not exist in model {self.name!r}")
            array = np.asarray(value)
            fits = array.shape == spec.shape and np.can_cast(array.dtype, spec.dtype, "same_kind")
            if not fits:
                told = f"{array.dtype} of shape {array.shape}"
                raise GraphError(f"parameter {name!r}: {told} found, {spec} needed")
            given[name] = array.astype(spec.dtype)
        if self._trainer is not None:
            self._trainer.load_state(given)
        else:
            self.values.update(given)

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

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None and self._trainer is not None:  # what is there may be half of a step
            trainer, self._trainer = self._trainer, None
            trainer.close()
        self.close()
