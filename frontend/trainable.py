"""Parameters and states of a model: reading, setting, saving and freezing them."""

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
    from soapstone.frontend.training.compatibility import Loaded
    from soapstone.frontend.training.trainer import Trainer


class Trainable(Recording):
    """Layers with the contents of their parameters and states: initial, set, or trained.

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
        """Apply an ONNX file to tensors, as layers with the file's weights; return its outputs.

        Weights keep the file's names and are trained like others; those that no output needs are
        left out. A weight is a floating-point initializer with at least one axis; use `freeze` for
        constants among them. Batch norm keeps the file's statistics, and dropout drops nothing.

        Args:
            file: the path of an .onnx file, its bytes, or what `soapstone.from_onnx` returns.
            inputs: a tensor for each of the file's inputs, in order.
            outputs: the name of an intermediate value, or several, such as the input of the last
                layer (`OnnxModel.values` lists them); by default the file's outputs.
            name: a prefix for the names of the file, followed by a dot.

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
        """Stop training parameters from the next `compile` on: they get no gradient and no update.

        patterns: names or patterns of layers or parameters (`conv1`, `conv1.bias`, `conv*`). The
        running statistics of a frozen batch norm still follow its batches.

        Raises:
            GraphError: a pattern that matches no parameter.
        """
        self.frozen |= self._matching("freeze", patterns)

    def unfreeze(self, *patterns: str) -> None:
        """Train frozen parameters again from the next `compile` on: all, or those of some patterns.

        Raises:
            GraphError: a pattern that matches no parameter.
        """
        self.frozen -= self._matching("unfreeze", patterns or ("*",))

    def regularize(self, *patterns: str, l1: float = 0.0, l2: float = 0.0) -> None:
        """Add l1 * sum |w| and l2 * sum w^2 of parameters to the loss, from the next `compile` on.

        patterns: names or patterns of layers or parameters, as of `freeze`. Of several calls that
        match a parameter, the last one counts.

        Raises:
            GraphError: a pattern that matches no parameter, or a negative number.
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
        """Save layers, parameters and states to a file, which `soapstone.load` makes a model of.

        path: of a file that ends in .safetensors or .npz. optimizer: whether the state and step of
        the optimizer are saved too, so that one with the same settings can continue.

        Raises:
            GraphError: layers that cannot be saved, or no optimizer where one is asked for.
            CheckpointError: another ending of the path, or values that are not finite.
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
        """Load parameters and states by name; return what was loaded.

        Args:
            source: a file of `save` or `save_checkpoint`; a state dict of PyTorch, or its file
                (.pt, .pth, .safetensors); an .onnx file; or arrays by name. PyTorch's names are
                translated (`weight` of a batch norm is `gamma`) and weights of its linear layers
                transposed, but not those of recurrent and attention layers.
            strict: whether anything missing, unknown or of another shape is an error; otherwise
                what fits is loaded.
            skip: names or patterns of layers or parameters that are left as they are (`head*`).
            names: the names of layers or parameters in the source, where they differ from those
                here.

        Raises:
            CheckpointError: a file that cannot be read or, if strict, does not fit; names what.
            GraphError: a layer of `skip` or `names` that the model does not have.
        """
        from soapstone.frontend.training.weights import given, take

        taken, done = take(
            self.graph, self.carried, given(source), strict=strict, skip=skip, names=names or {}
        )
        self.set_weights(taken)
        return done

    def save_checkpoint(self, path: str | Path) -> None:
        """Save parameters, optimizer state, step and position in the data, atomically.

        path: of a file that ends in .safetensors or .npz.

        Raises:
            CheckpointError: another ending of the path, or values that are not finite.
            GraphError: the model is not compiled.
        """
        self.trainer.save_checkpoint(path)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> Loaded:
        """Load a checkpoint from a file; return what was loaded.

        A model that is not compiled takes its parameters and states alone.

        Args:
            strict: whether a checkpoint of another model, optimizer or seed, or values that are not
                finite, are errors; otherwise whatever matches a parameter or state in name and
                shape is loaded.

        Raises:
            CheckpointError: a file that is truncated, altered or no checkpoint, or of another
                model; names what differs.
        """
        if self._trainer is not None:
            return self._trainer.load_checkpoint(path, strict)
        from soapstone.frontend.training import compatibility

        graph = self.graph
        specs = {name: graph.tensors[name] for name in self.carried}
        taken, _, done = compatibility.read(path, self.made_for, specs, strict)
        self.values.update(taken)
        return done

    def made_for(self, batch_size: int) -> dict[str, Any]:
        """Return what a checkpoint records of the model: layers, its graph's hash at batch_size.

        Raises:
            GraphError: the model has no output.
        """
        from soapstone.frontend.training.compatibility import layers

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
        """Return copies of the parameters and states, by name.

        They are the initial ones if nothing was trained or set yet. If another thread trains, all
        are taken between the same two steps.

        Raises:
            GraphError: the model was closed under mpi or legate, which discards its weights.
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
        """Return the parameters and states of a model compiled for Legate, as data of Legate.

        `cupynumeric.asarray` takes them without a copy, and writes to them reach the model.

        Raises:
            GraphError: another executor, or the model is not compiled.
        """
        self.trainer.bound("train", self.batch_size)
        return self.trainer.session.shared()

    def set_weights(self, values: Mapping[str, Array]) -> None:
        """Replace parameters or states by name; it may be called at any time.

        values: arrays of the shapes of `parameters`, such as `weights` returns; other types are
        converted.

        Raises:
            GraphError: an unknown name, another shape, or values that are no numbers; then nothing
                is replaced.
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
