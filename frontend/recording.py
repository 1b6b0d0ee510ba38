"""Layers recorded by name, from which a graph is built for any batch size.

A graph has fixed shapes; a model does not. The recorded layer calls are kept, and the training or
inference graph of a batch size is built when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from soapstone.frontend.arguments import count
from soapstone.frontend.layers import Layers
from soapstone.frontend.script import Script
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec

Emit = Callable[[GraphBuilder, bool, tuple[str, ...]], tuple[str, ...]]


class Arithmetic:
    """What Python's operators work on: each is an element-wise layer of its `model`."""

    __slots__ = ()
    __array_ufunc__ = None  # NumPy's functions would compute on contents, which no gradient passes
    model: Any  # whose methods are layers

    def _layer(self, name: str, *operands: Self, **attributes: float) -> Self:
        made: Self = getattr(self.model, name)(self, *operands, **attributes)
        return made

    def __add__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("add", other)
        return self._layer("affine", shift=other)

    def __sub__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("sub", other)
        return self._layer("affine", shift=-other)

    def __mul__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("mul", other)
        return self._layer("affine", scale=other)

    def __truediv__(self, other: Self | float) -> Self:
        if isinstance(other, Arithmetic):
            return self._layer("div", other)
        return self._layer("affine", scale=1 / other)

    def __rsub__(self, other: float) -> Self:
        return self._layer("affine", scale=-1.0, shift=other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Self:
        return self._layer("neg")

    def __matmul__(self, other: Self) -> Self:
        return self._layer("matmul", other)

    def __pow__(self, exponent: float) -> Self:
        return self._layer("power", exponent=exponent)


@dataclass(frozen=True, eq=False)
class Tensor(Arithmetic):
    """A value of a model: what layers take and return. Arithmetic makes element-wise operators.

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
        """Refuse what needs contents: without this every tensor would be true."""
        raise GraphError(
            f"{self!r} has no contents where layers are recorded; a condition or a number needs a"
            " value of a dynamic session, outside of its cells"
        )

    __bool__ = __float__ = __array__ = _contents


@dataclass(frozen=True)
class Call:
    """One recorded layer call; the tensors it takes and makes are indices on the model's tape."""

    emit: Emit
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Recording(Layers):
    """The layers of a model, as they were called.

    Args:
        name: of the model and its graphs.
        seed: of initial parameters, of dropout and of the order of samples.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.seed = seed
        self._builder = self._new_builder()
        self.calls: list[Call] = []
        self._tensors: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._batch_size: int | None = None
        self._matrices = {}
        self.constants: dict[str, Array] = {}  # the contents of values that never change
        self.script = Script()  # the layers as they were called, for files

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which they were made."""
        return tuple(self._tensors)

    def _new_builder(self) -> GraphBuilder:
        return GraphBuilder(self.name)

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
            GraphError: a tensor of another model.
            ShapeError: what `emit` says of the inputs.
        """
        for tensor in inputs:
            if not isinstance(tensor, Tensor) or tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
        self._building = self._batch_size or 1
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

    def output(self, *tensors: Tensor) -> None:
        """Mark tensors as the model's outputs; by default the loss is taken of the first.

        A loss of each is given to `compile` by the names of the layers that make them.

        Raises:
            GraphError: a tensor of another model.
        """
        for tensor in tensors:
            if tensor.model is not self:
                raise GraphError(f"model {self.name!r}: {tensor!r} is not a tensor of this model")
            self._outputs.append(tensor)
        self.__dict__.pop("graph", None)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What losses and metrics call the outputs: the names of their layers."""
        return tuple(tensor.name for tensor in self._outputs)

    @property
    def output_indices(self) -> tuple[int, ...]:
        """The places of the outputs among the tensors."""
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

    def build(self, batch_size: int | None = None, *, training: bool = False) -> Graph:
        """Return the forward graph for a batch size; training adds dropout and batch statistics.

        batch_size: by default the model's. No weights are allocated.

        Raises:
            GraphError: the model has no output.
        """
        if not self._outputs:
            raise GraphError(f"model {self.name!r} has no output; call model.output(tensor)")
        self._building = self.batch_size if batch_size is None else batch_size
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
