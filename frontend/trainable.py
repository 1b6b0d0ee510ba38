"""The contents of a model's parameters and states: read, set, in files, and which are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.arguments import OnnxFile, number
from soapstone.frontend.recording import Recording, Tensor
from soapstone.frontend.training.names import matching
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.training.saved import Loaded
    from soapstone.frontend.training.trainer import Trainer


class Trainable(Recording):
    """Layers whose parameters and states have contents: the initial ones, set, or trained.

    Args:
        name: of the model and its graphs.
        seed: of initial parameters, of dropout and of the order of samples.
    """

    def __init__(self, name: str = "model", seed: int = 0) -> None:
        super().__init__(name, seed)
        self._trainer: Trainer | None = None
        self.values: dict[str, Array] = {}  # contents that no session has: set, or trained before
        self.frozen: frozenset[str] = frozenset()  # parameters that are not trained
        self.penalties: dict[str, tuple[float, float]] = {}  # l1 and l2
        self.begun: tuple[dict[str, Any], int] | None = None  # settings and steps of an optimizer
        self._lost = ""  # the executor with which trained contents went

    @property
    def trainer(self) -> Trainer:
        """The compiled model's trainer.

        Raises:
            GraphError: the model is not compiled.
        """
        if self._trainer is None:
            raise GraphError(f"model {self.name!r} is not compiled; call model.compile(…) first")
        return self._trainer

    def onnx(
        self,
        file: OnnxFile,
        *inputs: Tensor,
        outputs: str | Sequence[str] | None = None,
        name: str | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what an ONNX file makes of tensors, as layers with the file's weights.

        Weights have the file's names and are trained as any; those of it that no output needs are
        left out. Weights are floating-point initializers with an axis; freeze those that are
        none. Batch norm keeps the statistics of the file, and dropout drops nothing.

        Args:
            file: the path of an .onnx file, its bytes, or what `soapstone.from_onnx` returns.
            inputs: a tensor for each of the file's inputs, in order.
            outputs: the name of a value inside, or several, such as what the last layer is applied
                to (`OnnxModel.values` lists them); by default the file's outputs.
            name: what stands, with a dot, before names of the file.

        Raises:
            GraphError: other inputs than the file's, a value that it does not have, or names that
                exist already.
            OnnxError: a malformed file, or a node that is not supported; names it.
            ShapeError: extents that do not fit the file's.

        Example:
            >>> image = model.input("image", (32, 3, 224, 224))
            >>> body = model.onnx("resnet18.onnx", image, outputs="/Flatten_output_0")
            >>> model.freeze("*")
            >>> model.output(model.dense(body, 5, name="head"))
        """
        from soapstone.frontend.onnx.trained import record

        return record(self, file, inputs, outputs, name)

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
