"""The model: layers recorded by name, from which a graph is built for any batch size.

A graph has fixed shapes; a model does not. The model keeps the recorded layer calls and builds the
training or inference graph of a batch size when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.arguments import count
from soapstone.frontend.layers import Layers
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role, TensorSpec

if TYPE_CHECKING:
    from soapstone.frontend.inference import InferenceSession
    from soapstone.frontend.training.callbacks import Callback
    from soapstone.frontend.training.optimizers import Optimizer
    from soapstone.frontend.training.saved import Loaded
    from soapstone.frontend.training.trainer import Trainer, TrainingResult
    from soapstone.runtime import Machine

Emit = Callable[[GraphBuilder, bool, tuple[str, ...]], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of a model: what layers take and return. Arithmetic makes element-wise operators.

    Attributes:
        model: the model that made it. index: its place among the model's tensors.
        name: of the value in graphs. spec: its shape and element type at the model's batch size.
    """

    model: Model
    index: int
    name: str
    spec: TensorSpec

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents, at the model's batch size."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """The element type, such as "float32"."""
        return self.spec.dtype

    def __add__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.model.add(self, other)
        return self.model.affine(self, shift=other)

    def __sub__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.model.sub(self, other)
        return self.model.affine(self, shift=-other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.model.mul(self, other)
        return self.model.affine(self, scale=other)

    def __truediv__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.model.div(self, other)
        return self.model.affine(self, scale=1 / other)

    def __rsub__(self, other: float) -> Tensor:
        return self.model.affine(self, scale=-1.0, shift=other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Tensor:
        return self.model.neg(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.model.matmul(self, other)

    def __pow__(self, exponent: float) -> Tensor:
        return self.model.power(self, exponent)

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {self.spec})"


@dataclass(frozen=True)
class _Call:
    """One recorded layer call; the tensors it takes and makes are indices on the model's tape."""

    emit: Emit
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Model(Layers):
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
        self.name = name
        self.seed = seed
        self._builder = GraphBuilder(name)
        self._calls: list[_Call] = []
        self._tensors: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._batch_size: int | None = None
        self._trainer: Trainer | None = None
        self.values: dict[str, Array] = {}  # contents that no session has: set, or trained before
        self._lost = ""  # the executor with which trained contents went

    # Recording

    def input(self, name: str, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """Declare an input and return it; the first axis of every input runs over samples.

        Args:
            shape: the extents, the batch size first; graphs can be built for other batch sizes.
            dtype: the element type, such as "float32" or "int32".

        Raises:
            GraphError: the name is taken, or the batch size differs from another input's.
            ShapeError: a dtype that there is not.
        """
        shape = tuple(count(f"input {name!r}: an extent", extent, 0) for extent in shape)
        batch = shape[0] if shape else 0
        if not shape or batch < 1:
            raise GraphError(
                f"input {name!r}: shape {tuple(shape)} needs a first axis of 1 or more"
            )
        if self._batch_size not in (None, batch):
            raise GraphError(
                f"input {name!r}: batch size {batch} found, {self._batch_size} needed as before"
            )
        rest = shape[1:]

        def emit(builder: GraphBuilder, training: bool, inputs: tuple[str, ...]) -> tuple[str, ...]:
            size = self._building
            return (builder.input(name, (size, *rest), dtype),)

        with self.all_or_nothing():
            self._batch_size = batch
            return self.record(emit, ())[0]

    def record(self, emit: Emit, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Record a layer call and return its outputs; errors of shape appear here.

        Args:
            emit: adds the layer's nodes to a builder, given whether the graph is for training and
                the names of the inputs, and returns the names of the outputs. It is called anew for
                each batch size.
            inputs: the tensors that the layer takes.

        Raises:
            GraphError: a tensor of another model, or the model is compiled.
            ShapeError: what `emit` says of the inputs.
        """
        for tensor in inputs:
            if not isinstance(tensor, Tensor) or tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
        if self._trainer is not None:
            raise GraphError(f"model {self.name!r} is compiled; layers are added before compile")
        self._building = self._batch_size or 1
        with self.all_or_nothing():
            names = emit(self._builder, True, tuple(tensor.name for tensor in inputs))
        made = tuple(
            Tensor(self, len(self._tensors) + i, name, self._builder.spec(name))
            for i, name in enumerate(names)
        )
        self._tensors += made
        self._calls.append(
            _Call(emit, tuple(t.index for t in inputs), tuple(t.index for t in made))
        )
        self.__dict__.pop("graph", None)
        return made

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Forget what was recorded inside the block if the block raises."""
        calls, tensors, batch = len(self._calls), len(self._tensors), self._batch_size
        try:
            with self._builder.all_or_nothing():
                yield
        except BaseException:
            del self._calls[calls:], self._tensors[tensors:]
            self._batch_size = batch
            self.__dict__.pop("graph", None)
            raise

    def output(self, *tensors: Tensor) -> None:
        """Mark tensors as the model's outputs; the loss is taken of the first.

        Raises:
            GraphError: a tensor of another model.
        """
        for tensor in tensors:
            if tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
            self._outputs.append(tensor)
        self.__dict__.pop("graph", None)

    # Graphs

    @property
    def batch_size(self) -> int:
        """The batch size the model was written for.

        Raises:
            GraphError: the model has no input.
        """
        if self._batch_size is None:
            raise GraphError(f"model {self.name!r} has no input")
        return self._batch_size

    def build(self, batch_size: int | None = None, *, training: bool = False) -> Graph:
        """Return the forward graph for a batch size; training adds dropout and batch statistics.

        batch_size: by default the model's. No weights are allocated.

        Raises:
            GraphError: the model has no output.
        """
        if not self._outputs:
            raise GraphError(f"model {self.name!r} has no output; call model.output(tensor)")
        self._building = self.batch_size if batch_size is None else batch_size
        builder = GraphBuilder(self.name)
        names: dict[int, str] = {}
        for call in self._calls:
            made = call.emit(builder, training, tuple(names[i] for i in call.inputs))
            names.update(zip(call.outputs, made))
        builder.output(*(names[tensor.index] for tensor in self._outputs))
        return builder.build().pruned()

    @cached_property
    def graph(self) -> Graph:
        """The inference graph at the model's own batch size."""
        return self.build()

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained parameters, by name."""
        graph = self.graph
        return {name: graph.tensors[name].shape for name in graph.inputs(Role.PARAMETER)}

    def summary(self) -> str:
        """Return a table of layers: output shape, parameters and millions of operations of each.

        Operations are those of the inference graph at the model's batch size.
        """
        graph = self.graph
        rows = [("layer", "operator", "output", "parameters", "MFLOP")]
        counted = 0
        for node in graph.nodes:
            sizes = [
                graph.tensors[i].size for i in node.inputs if graph.roles.get(i) == "parameter"
            ]
            counted += sum(sizes)
            shape = "x".join(map(str, graph.tensors[node.outputs[0]].shape))
            flops = node.spec.flops(graph.signature(node)) / 1e6
            rows.append((node.name, node.operator, shape, f"{sum(sizes):,}", f"{flops:,.2f}"))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(f"{counted:,} parameters, {graph.flops() / 1e6:,.1f} MFLOP forward")
        return "\n".join([f"model {self.name}, batch size {self.batch_size}", *lines])

    # Training and running

    def compile(
        self,
        optimizer: Optimizer | str = "sgd",
        loss: str = "cross_entropy",
        metrics: str | Iterable[str] = (),
        *,
        machine: Machine | None = None,
        executor: str = "local",
        cpus: int | None = None,
        threads: int = 1,
        mapper: object = "data_parallel",
        strategy: Strategy | str | Path | None = None,
        optimize: bool = False,
        step: Graph | str | Path | None = None,
        choices: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        """Choose loss, optimizer, machine and mapper; nothing is allocated until the first step.

        A model that is compiled again keeps its weights, and the states of its optimizer where that
        is the same but for its learning rate; else a warning says that these begin anew.

        Args:
            optimizer: an SGD, Adam or AdamW, or its name in small letters.
            loss: of the first output. "cross_entropy" (labels: class numbers, without the output's
                last axis), "cross_entropy_dense" (labels: probabilities), "mse", "bce" (of
                probabilities) or "bce_with_logits"; labels of these have the output's shape.
            metrics: "accuracy", where labels are class numbers, or none.
            machine: a described machine to run on; by default this one with `cpus` processors of
                `threads` threads in each process.
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
            metrics=(metrics,) if isinstance(metrics, str) else tuple(metrics),
            machine=machine,
            executor=executor,
            cpus=cpus,
            threads=threads,
            mapper=mapper,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices,
        )
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
        validation_data: tuple[Any, Any] | str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        shuffle: bool = True,
        resume: str | Path | None = None,
        progress: bool = True,
    ) -> TrainingResult:
        """Train for a number of epochs and return the history.

        Args:
            x: (samples, …) float32, a dict by input name, a folder of npz files, or an iterable of
                (x, y) batches; y: labels, (samples,) integers for `cross_entropy`.
            batch_size: of a step, by default the model's; a last batch may be smaller.
            epochs: how many in all, those of a resumed run among them.
            validation_data: a pair (x, y), or the path of npz files, to evaluate after each epoch.
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
            callbacks=callbacks,
            shuffle=shuffle,
            resume=resume,
            progress=progress,
        )

    def evaluate(self, x: Any, y: Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the mean "loss" over the samples of a data set, and "accuracy" (0 to 1) if asked.

        x, y and batch_size are as of `fit`. Nothing is trained, and dropout drops nothing.

        Raises:
            DataError: no samples or labels, or arrays that do not fit the model.
            GraphError: the model is not compiled.
        """
        return self.trainer.evaluate(x, y, batch_size=batch_size)

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

        found = dict(self.values)
        if self._trainer is not None:
            found.update(self._trainer.state())
        elif self._lost:
            raise GraphError(
                f"model {self.name!r}: its weights went with executor {self._lost!r} when it was"
                " closed; take them before"
            )
        graph, result = self.graph, {}
        for name in self.carried:
            if name in found:
                result[name] = np.array(found[name], graph.tensors[name].dtype)
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
        self, *, threads: int | None = None, plain: bool = False, bound_shapes: int = 8
    ) -> InferenceSession:
        """Return a session that serves the model with its present weights.

        threads, plain and bound_shapes are those of `InferenceSession`.
        """
        from soapstone.frontend.inference import InferenceSession

        return InferenceSession(self, threads=threads, plain=plain, bound_shapes=bound_shapes)

    def set_weights(self, values: Mapping[str, Array]) -> None:
        """Replace parameters or states by name, at any time: what `weights` returns always fits.

        values: arrays of the shapes of `parameters`; other types are converted.

        Raises:
            GraphError: an unknown name, another shape, or no numbers; then nothing is replaced.
        """
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
                found = f"{array.dtype} of shape {array.shape}"
                raise GraphError(f"parameter {name!r}: {found} found, {spec} needed")
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
        (`Statistics`: launches, copies, …).

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
