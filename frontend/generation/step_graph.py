"""The graph of a step for one token: its inputs, the buffers of rows, masks and constants.

A rule of an operator (`appended.py`) asks it for what the operator reads: the new rows of a value,
or the rows of all tokens, which are in a buffer to which the step writes the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from soapstone.frontend.generation.kept import STARTS
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role

_PLACES, _HIDDEN, _SEEN, _SAMPLES, _ONE = (
    f"generation.{name}" for name in ("places", "hidden", "seen", "samples", "one")
)
ROWS, SCORES, MASKED, SHARES, NANS = "rows", "scores", "masked", "shares", "nans"
JOINED = "joined"
_MOVES = ("transpose", "broadcast", "concat", "affine")  # of one value


@dataclass(frozen=True)
class Kept:
    """A buffer of a value's rows: its name, its axis of rows, and the value's axis of samples."""

    buffer: str
    axis: int
    samples: int


@dataclass(frozen=True)
class Step:
    """A graph for one token, with buffers for what it needs of earlier tokens.

    Attributes:
        graph: its inputs are the tokens (samples, 1), `STARTS` and the buffers.
        kept: the buffer of each value that has one.
        constants: what the graph reads besides the model's weights.
    """

    graph: Graph
    kept: Mapping[str, Kept]
    constants: Mapping[str, Array]


@dataclass(frozen=True)
class Value:
    """A value of the graph for all tokens: its new row's name in the step, its axis of rows.

    samples: the axis along which samples lie, each in an equal part of it. kind: rows; scores of
    keys along axis `keys`, of all or of those that are not hidden; or shares of these, which are
    zero for hidden ones; or which shares are NaN, as they are of a token that sees no key. Joined
    are rows whose axes of samples and of tokens a reshape has made one, the first.
    """

    name: str
    axis: int
    kind: str = ROWS
    keys: int = -1
    samples: int = 0


class Unknown(Exception):
    """An operator that is not known to make rows from their own and earlier tokens alone."""


class StepGraph:
    """The step of a graph for all tokens, while it is written.

    Args:
        graph: for all tokens. ids: its input of tokens (samples, tokens).

    Attributes:
        values: what is known of values with a row for each token, by their name in `graph`.
        fixed: the names in the step of values that no token changes, by those in `graph`.
        kept, constants: as of `Step`.
    """

    def __init__(self, graph: Graph, ids: str) -> None:
        self.graph = graph
        self.samples, self.tokens = graph.tensors[ids].shape
        self.builder = builder = GraphBuilder(graph.name)
        for name, role in graph.roles.items():
            spec = graph.tensors[name]
            builder.input(name, (self.samples, 1) if name == ids else spec.shape, spec.dtype, role)
        builder.input(STARTS, (self.samples,), "int64")
        self.values = {ids: Value(ids, 1)}
        self.fixed = {name: name for name in graph.roles if name != ids}  # what no token changes
        self.kept: dict[str, Kept] = {}
        self._whole: dict[str, str] = {}  # values of all tokens, in the step's graph
        self._rows: dict[tuple[str, int, int, int], str] = {}  # of constants
        self.constants: dict[str, Array] = {}

    def extents(self, kind: str) -> tuple[int, int]:
        """Return the extents of one row and of all along the axis of rows."""
        times = self.samples if kind == JOINED else 1
        return times, times * self.tokens

    def leads(self, value: Value, shape: Sequence[int]) -> bool:
        """Return whether a value's first two axes are samples and tokens. shape: of all rows."""
        return (value.samples, value.axis, *shape[:1]) == (0, 1, self.samples)

    def check(self, node: Node, name: str, new: str, axis: int, kind: str = ROWS) -> None:
        """Check that one row was made where all were.

        Raises:
            Unknown: another number of them was.
        """
        shape, (one, extent) = self.graph.tensors[name].shape, self.extents(kind)
        if self.builder.spec(new).shape != with_extent(shape, axis, one) or shape[axis] != extent:
            raise Unknown(node.label)

    def whole(self, name: str) -> str:
        """Return a value's rows for all tokens: a buffer, or one moved, repeated or scaled.

        The least is kept, and products of few rows read it as it is (`grouped`).
        """
        if name not in self._whole:
            node, value = self.graph.producers.get(name), self.values[name]
            if (
                node is not None
                and (node.operator in _MOVES or node.spec.view)
                and len(set(node.inputs)) == 1
                and self.values[node.inputs[0]].kind != JOINED
            ):
                inputs = tuple(map(self.whole, node.inputs))
                made = self.builder.add(replace(node, inputs=inputs))
                self._whole.update(zip(node.outputs, made))
            else:
                self.write(name, self.buffer(name, value.samples), value)
        return self._whole[name]

    def write(self, name: str, buffer: str, value: Value) -> None:
        """Write the new row of a value to its buffer.

        Raises:
            Unknown: there are several parts of each sample.
        """
        if self.builder.spec(buffer).shape[0] != self.samples:
            raise Unknown(f"value {name!r}")
        order = _samples_first(value.samples, len(self.builder.spec(value.name).shape))
        (row,) = self.builder.apply("transpose", value.name, permutation=order)
        axis = order.index(value.axis)
        (made,) = self.builder.apply("write_at", buffer, row, STARTS, axis=axis)
        self.builder.update(buffer, made)
        self.kept[name] = Kept(buffer, axis, value.samples)
        if value.samples:
            back = tuple(sorted(range(len(order)), key=order.__getitem__))
            (made,) = self.builder.apply("transpose", made, permutation=back)
        self._whole[name] = made

    def buffer(self, name: str, samples: int) -> str:
        """Return an input for all rows of a value, samples first."""
        spec = self.graph.tensors[name]
        shape = (spec.shape[at] for at in _samples_first(samples, spec.rank))
        return self.builder.input(f"{name}.kept", tuple(shape), spec.dtype)

    def seen(self, dtype: str) -> str:
        """Return the mask of later keys for a new token, (samples, 1, 1, tokens)."""
        key = (f"{_SEEN}.{dtype}", 0, 4, 0)
        if key not in self._rows:
            places = self._constant(_PLACES, np.arange(self.tokens).reshape(1, 1, 1, -1))
            hidden = self._constant(f"{_HIDDEN}.{dtype}", np.array(-np.inf, dtype))
            seen = self._constant(f"{_SEEN}.{dtype}", np.array(0, dtype))
            (start,) = self.builder.apply("reshape", STARTS, shape=(self.samples, 1, 1, 1))
            (later,) = self.builder.apply("less", start, places)
            (self._rows[key],) = self.builder.apply("where", later, hidden, seen)
        return self._rows[key]

    def _constant(self, name: str, contents: Array) -> str:
        if name in self.constants:
            return name
        self.constants[name] = contents
        return self.builder.input(name, contents.shape, contents.dtype.name, Role.CONSTANT)

    def row_of(self, node: Node, name: str, axis: int, rank: int, samples: int = 0) -> str:
        """Return the new tokens' rows of a value independent of tokens, aligned to a result."""
        key = (name, axis, rank, samples)
        if key in self._rows:
            return self._rows[key]
        shape = self.graph.tensors[name].shape
        full = (*(1,) * (rank - len(shape)), *shape)
        at = axis + rank - len(shape)
        last = with_extent(full, at, 1)
        each = full[samples] != 1  # whether samples have rows of their own
        fits = full[samples] in (1, self.samples) and full[at] == self.tokens
        if not fits or np.prod(last[:samples]) != 1 or samples == at:
            raise Unknown(node.label)
        table = (self.samples, self.tokens)[not each :]
        first = (samples + len(shape) - rank, axis)[not each :]
        order = (*first, *(place for place in range(len(shape)) if place not in first))
        (turned,) = self.builder.apply("transpose", self.fixed[name], permutation=order)
        rest = int(np.prod(full)) // max(1, int(np.prod(table)))
        (turned,) = self.builder.apply("reshape", turned, shape=(*table, rest))
        (places,) = self.builder.apply("reshape", STARTS, shape=(self.samples, 1))
        if each:
            (places,) = self.builder.apply("concat", self._numbers(), places, axis=1)
        (made,) = self.builder.apply("gather_nd", turned, places)
        (made,) = self.builder.apply(
            "reshape", made, shape=with_extent(last, samples, self.samples)
        )
        self._rows[key] = made
        return made

    def row_before(self, buffer: str) -> str:
        """Return the row before the new one of a buffer (samples, tokens, d): (samples, d)."""
        one = self._constant(_ONE, np.array(1))
        (before,) = self.builder.apply("sub", STARTS, one)
        (before,) = self.builder.apply("reshape", before, shape=(self.samples, 1))
        (places,) = self.builder.apply("concat", self._numbers(), before, axis=1)
        return self.builder.apply("gather_nd", buffer, places)[0]

    def _numbers(self) -> str:
        """Return the number of each sample, (samples, 1)."""
        return self._constant(_SAMPLES, np.arange(self.samples).reshape(-1, 1))

    def finish(self, output: str) -> Step:
        """Return the step, whose output is a value of its graph."""
        self.builder.output(output)
        return Step(self.builder.build().pruned(), self.kept, self.constants)


def _samples_first(samples: int, rank: int) -> tuple[int, ...]:
    """Return the permutation that moves the axis of samples to the front."""
    return (samples, *(axis for axis in range(rank) if axis != samples))


def with_extent(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """Return a shape with another extent along an axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])
