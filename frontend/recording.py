"""Recording of layer calls, from which graphs are built for any batch size.

A graph has fixed shapes and a model has not. So the layer calls are recorded, and the training or
inference graph of a batch size is built when it is first needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from soapstone.frontend.arguments import DType, count, meant
from soapstone.frontend.arithmetic import Arithmetic
from soapstone.frontend.layers import Layers
from soapstone.frontend.layers.base import Naming
from soapstone.frontend.script import Script
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec

Emit = Callable[[GraphBuilder, bool, tuple[str, ...]], tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Tensor(Arithmetic):
    """A value of a model, which layers take and return; arithmetic makes element-wise operators.

    Attributes:
        model: the model that made it. index: its place among the model's tensors.
        name: of the value in graphs. spec: its shape and element type at the model's batch size.
    """

    model: Recording
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

    def __repr__(self) -> str:
        return f"Tensor({self.name}: {self.spec})"

    def _contents(self, *_: Any, **__: Any) -> Any:
        """Refuse an operation that needs contents; without this every tensor would be true."""
        raise GraphError(
            f"{self!r} has no contents where layers are recorded; a condition or a number needs a"
            " value of a dynamic session, outside of its cells"
        )

    __bool__ = __float__ = __array__ = _contents

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name, name=name, obj=self)
            known = [each for each in (*dir(type(self)), *dir(type(self.model))) if each[0] != "_"]
            raise AttributeError(
                f"Tensor has no {name!r}; layers are methods of its model, such as model.relu(t)"
                f"{meant(name, known)}"
            )


@dataclass(frozen=True)
class Call:
    """One recorded layer call; tensors are given by their indices on the model's tape."""

    emit: Emit
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _repeated(emit: Emit) -> Emit:
    """Return an emitter of the same layer again, with the parameters and states it has."""

    def again(builder: GraphBuilder, training: bool, inputs: tuple[str, ...]) -> tuple[str, ...]:
        with builder.repeated():
            return emit(builder, training, inputs)

    return again


class Recording(Layers):
    """The layers of a model, as they were called.

    Args:
        name: of the model and its graphs.
        seed: of initial parameters, of dropout and of the order of samples.
    """

    def __init__(self, name: str, seed: int) -> None:
        if not isinstance(name, str):
            raise GraphError(f"model: name {name!r} found, a string needed")
        self.name = name
        self.seed = count(f"model {name!r}: seed", seed, 0)
        self._builder = self._new_builder()
        self.calls: list[Call] = []
        self._tensors: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._batch_size: int | None = None
        self._extents: dict[str, int] = {}  # other ones, in the graph that is built
        self.varying: dict[str, int] = {}  # inputs of which batches may have less, and their extent
        self._matrices = {}
        self.constants: dict[str, Array] = {}  # the contents of values that never change
        self.script = Script()  # the layers as they were called, for files

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which they were made."""
        return tuple(self._tensors)

    def _new_builder(self) -> GraphBuilder:
        return GraphBuilder(self.name)

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DType = "float32",
        *,
        varying: bool = False,
    ) -> Tensor:
        """Declare an input and return it; the first axis of every input runs over samples.

        Args:
            shape: the extents, the batch size first; graphs can be built for other batch sizes.
            dtype: the element type, such as "float32" or "int32", or NumPy's.
            varying: whether batches may be shorter along the second axis, such as shorter
                sequences; a graph is built for each extent that they have.

        Raises:
            GraphError: the name is taken, the batch size differs from another input's, or there is
                no second axis to vary.
            ShapeError: an unknown dtype.
        """
        if not isinstance(shape, Iterable) or isinstance(shape, str):
            raise GraphError(
                f"input {name!r}: shape {shape!r} found; extents needed, the batch size first"
            )
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
        if varying and not rest:
            raise GraphError(f"input {name!r}: varying found; a second axis needed in {shape}")
        if self._builder.has(name):
            raise GraphError(f"input {name!r}: the name is taken")

        def emit(builder: GraphBuilder, training: bool, inputs: tuple[str, ...]) -> tuple[str, ...]:
            size, extents = self._building, rest
            if name in self._extents:
                extents = (self._extents[name], *rest[1:])
            return (builder.input(name, (size, *extents), dtype),)

        with self.all_or_nothing():
            self._batch_size = batch
            made = self.record(emit, ())[0]
        if varying:
            self.varying[name] = rest[0]
        return made

    def record(self, emit: Emit, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Record a layer call and return its outputs; errors of shape are raised here.

        Args:
            emit: adds the layer's nodes to a builder and returns the names of the outputs, given
                whether the graph is for training and the names of the inputs. It is called again
                for each batch size.
            inputs: the tensors that the layer takes.

        Raises:
            GraphError: a tensor of another model.
            ShapeError: raised by `emit` for these inputs.
        """
        for tensor in inputs:
            if not isinstance(tensor, Tensor) or tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
        self._building = self._batch_size or 1
        self._extents = {}
        if self.given is not None and self.given.calls:
            emit = _repeated(emit)
        with self.all_or_nothing():
            names = emit(self._builder, True, tuple(tensor.name for tensor in inputs))
        made = tuple(
            Tensor(self, len(self._tensors) + i, name, self._builder.spec(name))
            for i, name in enumerate(names)
        )
        self._tensors += made
        self.calls.append(Call(emit, tuple(t.index for t in inputs), tuple(t.index for t in made)))
        self.__dict__.pop("graph", None)
        return made

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Forget what was recorded inside the block if the block raises."""
        calls, tensors, batch = len(self.calls), len(self._tensors), self._batch_size
        try:
            with self._builder.all_or_nothing():
                yield
        except BaseException:
            del self.calls[calls:], self._tensors[tensors:]
            self._batch_size = batch
            self.__dict__.pop("graph", None)
            raise

    @contextmanager
    def naming(
        self, known: tuple[tuple[str, str], ...] | None, calls: int, label: str
    ) -> Iterator[list[tuple[str, str]]]:
        """Name what is recorded in the block as an earlier call did, and yield the list of names.

        known: the kinds and names of that call; None in the first call, which fills the list.
        calls: the number of calls so far. label: the layer's name in errors.
        """
        outer, self.given = self.given, Naming(label, known, calls)
        try:
            with self.all_or_nothing():
                yield self.given.names
        finally:
            inner, self.given = self.given, outer
        if outer is not None:
            outer.names += inner.names

    def output(self, *tensors: Tensor) -> None:
        """Mark tensors as the model's outputs; by default the loss is taken of the first.

        `compile` takes a loss for each of several outputs, by the names of the layers that make
        them.

        Raises:
            GraphError: a tensor of another model.
        """
        if not tensors:
            raise GraphError(f"model {self.name!r}: output of no tensors found, 1 or more needed")
        for tensor in tensors:
            if tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
            self._outputs.append(tensor)
        self.__dict__.pop("graph", None)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs for losses and metrics: those of their layers."""
        return tuple(tensor.name for tensor in self._outputs)

    @property
    def output_indices(self) -> tuple[int, ...]:
        """The indices of the outputs among the tensors."""
        return tuple(tensor.index for tensor in self._outputs)

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

    def build(
        self,
        batch_size: int | None = None,
        *,
        training: bool = False,
        lengths: Sequence[int] = (),
    ) -> Graph:
        """Return the forward graph for a batch size, without allocating weights.

        batch_size: by default the model's. training: whether dropout drops, and batch norm uses the
        statistics of the batch. lengths: the extents of inputs that vary, in their order; by
        default those of the model.

        Raises:
            GraphError: the model has no output, or a layer cannot have other lengths.
        """
        if lengths:
            try:
                return self._built(batch_size, training, dict(zip(self.varying, lengths)))
            except ShapeError as error:
                said = ", ".join(f"{n} of {name!r}" for name, n in zip(self.varying, lengths))
                raise GraphError(f"model {self.name!r} at length {said}: {error}") from None
        return self._built(batch_size, training, {})

    def _built(self, batch_size: int | None, training: bool, extents: dict[str, int]) -> Graph:
        if not self._outputs:
            raise GraphError(f"model {self.name!r} has no output; call model.output(tensor)")
        self._building = self.batch_size if batch_size is None else batch_size
        self._extents = extents
        builder = self._new_builder()
        names: dict[int, str] = {}
        for call in self.calls:
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
        """Return a table of the layers: output shape, parameters and millions of operations.

        The parameters of a shared layer are counted at its first call. Operations are those of the
        inference graph at the model's batch size.
        """
        from soapstone.text_table import lines_of

        rows, total = self._summary()
        lines = lines_of(rows, texts=3, rule=True)
        return "\n".join([f"model {self.name}, batch size {self.batch_size}", *lines, total])

    def _summary(self) -> tuple[list[tuple[str, ...]], str]:
        """Return the rows of the summary's table, with a heading, and the line below it."""
        graph = self.graph
        rows: list[tuple[str, ...]] = [("layer", "operator", "output", "parameters", "MFLOP")]
        parameters = graph.inputs(Role.PARAMETER)
        fresh = dict.fromkeys(parameters)  # of a shared layer, the first call's
        for node in graph.nodes:
            own = [name for name in dict.fromkeys(node.inputs) if name in fresh]
            size = sum(graph.tensors[name].size for name in own)
            for name in own:
                del fresh[name]
            shape = "x".join(map(str, graph.tensors[node.outputs[0]].shape))
            flops = graph.flops(node) / 1e6
            rows.append((node.name, node.operator, shape, f"{size:,}", f"{flops:,.2f}"))
        counted = sum(graph.tensors[name].size for name in parameters)
        return rows, f"{counted:,} parameters, {graph.flops() / 1e6:,.1f} MFLOP forward"

    def __repr__(self) -> str:
        made = f"{type(self).__name__}({self.name!r}"
        if not self._outputs:
            return f"{made}, {len(self.calls)} layers, no output yet)"
        sizes = [math.prod(shape) for shape in self.parameters().values()]
        return f"{made}, {len(self.graph.nodes)} operators, {sum(sizes):,} parameters)"

    def _repr_html_(self) -> str | None:
        if not self._outputs:
            return None
        from soapstone.frontend.notebook import table

        rows, total = self._summary()
        return table(rows, f"model {self.name}, batch size {self.batch_size}: {total}")
