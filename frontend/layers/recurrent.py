"""Recurrent layers over steps, and cells that are stepped by hand.

A layer takes samples (n, t, k) unless `time_major`, when it takes steps (t, n, k). Weights stand as
in PyTorch, but transposed: `weight_ih` (k, gates), `weight_hh` (width, gates), with gates in the
same order; where PyTorch has two biases that are only ever added, there is one. A layer's
parameters end in its number and direction, as in `weight_ih_l0_reverse`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from soapstone.frontend.layers.base import LayerBase, declare, layer_seed
from soapstone.frontend.layers.sequences import check_lengths, lengths_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Role

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor

_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_TIME = (1, 0, 2)


def _shapes(kind: str, inputs: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters' shapes in the order of the operator's inputs."""
    if kind == "sru":
        columns = 3 * width if inputs == width else 4 * width
        return {"weight": (inputs, columns), "bias": (2 * width,)}
    columns = _GATES[kind] * width
    shapes = {"weight_ih": (inputs, columns), "weight_hh": (width, columns)}
    if kind == "gru":
        return {**shapes, "bias_ih": (columns,), "bias_hh": (columns,)}
    return {**shapes, "bias": (columns,)}


@dataclass(frozen=True)
class _Stack:
    """Layers of one kind on top of each other, each in one direction or in both."""

    kind: str
    node: str
    width: int
    layers: int
    directions: tuple[bool, ...]  # whether reversed
    bias: bool
    time_major: bool
    dropout: float
    seed: int
    drawn: str  # what begins the names by which dropout draws
    lengths: bool  # whether samples have lengths
    attributes: dict[str, Any] = field(default_factory=dict)

    def emit(
        self, builder: GraphBuilder, training: bool, values: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Emit all layers; the result's values are y, then the last states."""
        x, *given = values
        lengths: tuple[str, ...] = ()
        if self.lengths:
            axis = 0 if self.time_major else 1
            lengths = (lengths_of(builder, given.pop(0), self.node, axis),)
        if not self.time_major:
            (x,) = builder.apply("transpose", x, permutation=_TIME, name=f"{self.node}.steps")
        count = len(operator(self.kind).states)
        lasts: list[str] = []
        for layer in range(self.layers):
            final = layer + 1 == self.layers and self.time_major
            made = []
            for reverse in self.directions:
                first = [given.pop(0) for _ in range(count)] if given else []
                alone = final and len(self.directions) == 1
                name = self.node if alone else self._name("", layer, reverse)
                results = self._layer(builder, x, (*first, *lengths), layer, reverse, name)
                made.append(results[0])
                lasts += results[1 : 1 + count]
            x = made[0]
            if len(made) > 1:
                name = self.node if final else self._name("both", layer, False)
                (x,) = builder.apply("concat", *made, axis=2, name=name)
            if training and self.dropout and layer + 1 < self.layers:
                x = self._dropped(builder, x, layer)
        if not self.time_major:
            (x,) = builder.apply("transpose", x, permutation=_TIME, name=self.node)
        return x, *lasts

    def _name(self, part: str, layer: int, reverse: bool) -> str:
        end = f"l{layer}_reverse" if reverse else f"l{layer}"
        return f"{self.node}.{part}_{end}" if part else f"{self.node}.{end}"

    def _layer(
        self,
        builder: GraphBuilder,
        x: str,
        given: tuple[str, ...],
        layer: int,
        reverse: bool,
        name: str,
    ) -> tuple[str, ...]:
        _, samples, inputs = builder.spec(x).shape
        weights: list[str] = []
        for part, shape in _shapes(self.kind, inputs, self.width).items():
            label = self._name(part, layer, reverse)
            if part.startswith("bias") and not self.bias:
                weights += builder.apply("full", shape=shape, name=label)
                continue
            fan = inputs if self.kind == "sru" else self.width
            initial = Initial("uniform", 1 / math.sqrt(max(fan, 1)))
            if self.kind == "sru" and part == "bias":
                initial = Initial()
            weights.append(builder.input(label, shape, role=Role.PARAMETER, initial=initial))
        if len(given) == self.lengths:
            zero = f"{name}.zero"
            (first,) = builder.apply("full", shape=(samples, self.width), name=zero)
            given = (*(first,) * len(operator(self.kind).states), *given)
        return builder.apply(
            self.kind, x, *weights, *given, name=name, reverse=reverse, **self.attributes
        )

    def _dropped(self, builder: GraphBuilder, x: str, layer: int) -> str:
        from soapstone.ir.training.guard import step_number

        step = step_number(builder)
        name = f"{self.node}.dropout_l{layer}"
        seed = layer_seed(self.seed, f"{self.drawn}.dropout_l{layer}")
        return builder.apply("dropout", x, step, name=name, rate=self.dropout, seed=seed)[0]


@dataclass(frozen=True, eq=False)
class Cell:
    """One step of a recurrent layer, whose parameters all its calls share.

    `Model.lstm_cell` and its like make one. Call it with x (n, k) and the state before, each (n,
    width), or x alone for a state of zeros; it returns the new state, whose first value is the
    output.

    Attributes:
        layers: the model. kind: the operator, such as "lstm_cell". name: of the cell.
        width: of the state. weights: the parameters, as tensors.

    Raises:
        GraphError: when called, another number of values of state.
    """

    layers: LayerBase
    kind: str
    name: str
    width: int
    weights: tuple[Tensor, ...]

    def __call__(self, x: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        count = 1 if self.kind == "gru_cell" else 2
        before = state or (self._zeros(x),) * count
        if len(before) != count:
            raise GraphError(
                f"{self.kind} {self.name!r}: {len(before)} values of state found, {count} needed"
            )
        operands = (x, *before, *self.weights)
        return self.layers.apply_all(self.kind, *operands)[:count]

    def _zeros(self, x: Tensor) -> Tensor:
        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            samples = builder.spec(values[0]).shape[0]
            return builder.apply("full", shape=(samples, self.width), name=f"{self.name}.zero")

        return self.layers.record(emit, (x,))[0]


class RecurrentLayers(LayerBase):
    """Layers and cells that carry a state from step to step."""

    def lstm(
        self,
        x: Tensor,
        width: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        reverse: bool = False,
        bias: bool = True,
        time_major: bool = False,
        dropout: float = 0.0,
        state: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        name: str | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return all outputs of a long short-term memory, and its last states.

        x: (n, t, k), or (t, n, k) if `time_major`; outputs: (n, t, width) or (t, n, width), of
        2 width if `bidirectional`.

        Args:
            width: of the state h and the cell c.
            layers: how many stand on top of each other.
            bidirectional: whether each layer also runs from the last step to the first.
            reverse: whether layers run only so.
            bias: whether gates add a trained vector.
            dropout: the rate at which outputs between layers are dropped when training.
            state: the first h and c, (n, width), of each layer and direction, in that order; zeros
                unless given. The last states are returned in the same order.
            lengths: how many steps each sample has, (n,) integers, or a mask of x's first two axes
                that is true for those, which come first. Other steps are left out, in both
                directions: outputs are 0 there, and the last states are those of a sample's own
                last step (its first one in reverse).
            name: of the node. Parameters are `name.weight_ih_l0`, (k, 4 width),
                `name.weight_hh_l0`, (width, 4 width), and `name.bias_l0`, (4 width,), of each layer
                and direction.

        Raises:
            ShapeError: x has another rank, width or layers is below 1, or lengths do not fit x.
            GraphError: another number of states, a dropout rate out of range, or both directions
                and reverse.

        Source: Hochreiter and Schmidhuber 1997; gates are in PyTorch's order.
        """
        ways = (bidirectional, reverse)
        return self._stack(
            "lstm", x, width, layers, ways, bias, time_major, dropout, state, lengths, name
        )

    def gru(
        self,
        x: Tensor,
        width: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        reverse: bool = False,
        bias: bool = True,
        time_major: bool = False,
        dropout: float = 0.0,
        linear_before_reset: bool = True,
        state: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        name: str | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return all outputs of a gated recurrent unit, and its last states.

        x, width, layers, bidirectional, reverse, bias, time_major, dropout, state, lengths, the
        results and the errors are as of `lstm`, but a state is h alone, and parameters have 3 width
        columns and two vectors, `name.bias_ih_l0` and `name.bias_hh_l0`. `linear_before_reset`,
        PyTorch's form, applies the reset gate after the state's product.

        Source: Cho et al. 2014.
        """
        extra = {"linear_before_reset": linear_before_reset}
        ways = (bidirectional, reverse)
        return self._stack(
            "gru", x, width, layers, ways, bias, time_major, dropout, state, lengths, name, **extra
        )

    def rnn(
        self,
        x: Tensor,
        width: int,
        *,
        layers: int = 1,
        activation: str = "tanh",
        bidirectional: bool = False,
        reverse: bool = False,
        bias: bool = True,
        time_major: bool = False,
        dropout: float = 0.0,
        state: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        name: str | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return all outputs of a recurrent layer of one gate, and its last states.

        A step is h' = activation(x w + h r + b).

        x, width, layers, bidirectional, reverse, bias, time_major, dropout, state, lengths, the
        results and the errors are as of `lstm`, but a state is h alone, and parameters have width
        columns.
        activation: "tanh" or "relu".

        Source: Elman 1990; ONNX's RNN.
        """
        ways = (bidirectional, reverse)
        return self._stack(
            *("rnn", x, width, layers, ways, bias, time_major, dropout, state, lengths, name),
            activation=activation,
        )

    def sru(
        self,
        x: Tensor,
        width: int,
        *,
        layers: int = 1,
        bidirectional: bool = False,
        reverse: bool = False,
        time_major: bool = False,
        dropout: float = 0.0,
        state: Sequence[Tensor] = (),
        lengths: Tensor | None = None,
        name: str | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return all outputs of a simple recurrent unit, and its last states.

        x, width, layers, bidirectional, reverse, time_major, dropout, state, lengths, the results
        and the errors are as of `lstm`, but a state is c alone, and parameters are
        `name.weight_l0`, (k, 3 width), or (k, 4 width) where k is not the width, and
        `name.bias_l0`, (2 width,).

        Source: Lei et al. 2018, as it was first published.
        """
        ways = (bidirectional, reverse)
        return self._stack(
            "sru", x, width, layers, ways, True, time_major, dropout, state, lengths, name
        )

    def _stack(
        self,
        kind: str,
        x: Tensor,
        width: int,
        layers: int,
        ways: tuple[bool, bool],
        bias: bool,
        time_major: bool,
        dropout: float,
        state: Sequence[Tensor],
        lengths: Tensor | None,
        name: str | None,
        **attributes: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        node = self._name(kind, name)
        label = f"{kind} {node!r}"
        if len(x.shape) != 3:
            needed = "t n k" if time_major else "n t k"
            raise ShapeError(f"{label}: x has shape {x.shape}; {needed} needed")
        if width < 1 or layers < 1:
            raise ShapeError(f"{label}: width {width}, {layers} layers found; 1 or more needed")
        if not 0 <= dropout < 1:
            raise GraphError(f"{label}: dropout {dropout!r} found, 0 <= dropout < 1 needed")
        both, back = ways
        if both and back:
            raise GraphError(f"{label}: bidirectional and reverse found; one of them needed")
        directions = (False, True) if both else (back,)
        count = layers * len(directions) * len(operator(kind).states)
        if len(state) not in (0, count):
            raise GraphError(f"{label}: {len(state)} values of state found, {count} needed")
        stack = _Stack(
            *(kind, node, width, layers, directions, bias, time_major, dropout, self.seed),
            *(self._drawn(node), lengths is not None, attributes),
        )
        if lengths is not None:
            check_lengths(label, lengths, x, 0 if time_major else 1)
        given = () if lengths is None else (lengths,)
        y, *lasts = self.record(stack.emit, (x, *given, *state))
        return y, tuple(lasts)

    def lstm_cell(self, inputs: int, width: int, *, name: str | None = None) -> Cell:
        """Return a cell that takes x (n, inputs) and h, c (n, width), and returns the new h, c.

        Parameters are `name.weight_ih`, (inputs, 4 width), `name.weight_hh`, (width, 4 width), and
        `name.bias`, (4 width,).

        Raises:
            ShapeError: inputs or width is below 1.

        Source: as of `lstm`.
        """
        shapes = {"weight_ih": (inputs, 4 * width), "weight_hh": (width, 4 * width)}
        return self._cell("lstm_cell", width, {**shapes, "bias": (4 * width,)}, name)

    def gru_cell(self, inputs: int, width: int, *, name: str | None = None) -> Cell:
        """Return a cell that takes x (n, inputs) and h (n, width), and returns the new h alone.

        Parameters are `name.weight_ih`, (inputs, 3 width), `name.weight_hh`, (width, 3 width),
        `name.bias_ih` and `name.bias_hh`, (3 width,).

        Raises:
            ShapeError: inputs or width is below 1.

        Source: as of `gru`.
        """
        columns = 3 * width
        shapes = {"weight_ih": (inputs, columns), "weight_hh": (width, columns)}
        biases = {"bias_ih": (columns,), "bias_hh": (columns,)}
        return self._cell("gru_cell", width, {**shapes, **biases}, name)

    def nas_cell(self, inputs: int, width: int, *, name: str | None = None) -> Cell:
        """Return a cell that takes x (n, inputs) and h, c (n, width), and returns the new h, c.

        Parameters are `name.weight_ih`, (inputs, 8 width), `name.weight_hh`, (width, 8 width), and
        `name.bias`, (8 width,).

        Raises:
            ShapeError: inputs or width is below 1.

        Source: Zoph and Le 2017, appendix A, as TensorFlow's NASCell wires it.
        """
        shapes = {"weight_ih": (inputs, 8 * width), "weight_hh": (width, 8 * width)}
        return self._cell("nas_cell", width, {**shapes, "bias": (8 * width,)}, name)

    def _cell(
        self, kind: str, width: int, shapes: dict[str, tuple[int, ...]], name: str | None
    ) -> Cell:
        node = self._name(kind, name)
        if any(extent < 1 for shape in shapes.values() for extent in shape):
            raise ShapeError(
                f"{kind} {node!r}: weights {shapes} found; extents of 1 or more needed"
            )
        initial = Initial("uniform", 1 / math.sqrt(width))

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            parameters = {part: (shape, initial) for part, shape in shapes.items()}
            return tuple(declare(builder, node, parameters))

        return Cell(self, kind, node, width, self.record(emit, ()))
