"""The single-token step of a model without past inputs, derived from its graph for all tokens.

If a value's row for a token depends only on that token and earlier ones, existing rows never change
when tokens are appended. A step then makes the new row of each value, and the values that other
tokens read, keys and values, are kept in buffers of all rows.

This is derived from signatures, node by node. An operator makes rows one by one if all operands
with a row for each token are indexed by one free dim along which it treats all indices alike.
Tokens meet in attention alone: a causal `attention` or `hide_later`; or a product of rows by all
rows, of which a constant hides the later ones before a softmax, followed by a product by all rows
again. Which rows a constant hides is read from its contents, for each pair of tokens. If anything
else is found, the model is run on all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from soapstone.frontend.generation.kept import STARTS
from soapstone.ir.analysis.samples import aligned, differs_by_place
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

_PLACES, _HIDDEN, _SEEN, _SAMPLES, _ONE = (
    f"generation.{name}" for name in ("places", "hidden", "seen", "samples", "one")
)
_HIDES = -1e4  # what is added to a score, or stands in its place, at most, where a key is hidden
_ROWS, _SCORES, _MASKED, _SHARES, _NANS = "rows", "scores", "masked", "shares", "nans"
_JOINED, _MERGED = "joined", "merged"


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
class _Value:
    """A value of the graph for all tokens: its new row's name in the step, its axis of rows.

    samples: the axis of samples. kind: rows; scores of keys along axis `keys`, of all or of those
    that are not hidden; or shares of these, which are zero for hidden ones; or which shares are
    NaN, as they are of a token that sees no key. Joined are rows
    whose axes of samples and of tokens a reshape has made one, the first. Merged is what any other
    reshape, whose label is in place of the name, makes of rows, and another one may undo.
    """

    name: str
    axis: int
    kind: str = _ROWS
    keys: int = -1
    samples: int = 0


# Of recurrent operators: the inputs of the state before, and for each the output of it after each
# step.
_STATES = {"rnn": {"h0": "y"}, "gru": {"h0": "y"}, "lstm": {"h0": "y", "c0": "cells"}}


class _Unknown(Exception):
    """An operator that is not known to make rows from their own and earlier tokens alone."""


def appended(graph: Graph, ids: str, logits: str, weights: Mapping[str, Array]) -> Step | str:
    """Return the step of a graph for all tokens, or why none is known.

    Args:
        graph: with an input of tokens (samples, tokens). ids: this input. logits: its output.
        weights: the contents of parameters, states and constants, by name.
    """
    try:
        return _Steps(replace(graph, outputs=(logits,), updates={}).pruned(), ids, weights).made()
    except _Unknown as error:
        return str(error)


class _Steps:
    def __init__(self, graph: Graph, ids: str, weights: Mapping[str, Array]) -> None:
        self.graph, self.weights = graph, weights
        self.samples, self.tokens = graph.tensors[ids].shape
        self.builder = builder = GraphBuilder(graph.name)
        for name, role in graph.roles.items():
            spec = graph.tensors[name]
            builder.input(name, (self.samples, 1) if name == ids else spec.shape, spec.dtype, role)
        builder.input(STARTS, (self.samples,), "int64")
        self.values = {ids: _Value(ids, 1)}
        self.fixed = {name: name for name in graph.roles if name != ids}  # what no token changes
        self.kept: dict[str, Kept] = {}
        self.whole: dict[str, str] = {}  # values of all tokens, in the step's graph
        self.rows: dict[tuple[str, int, int, int], str] = {}  # of constants
        self.constants: dict[str, Array] = {}

    def made(self) -> Step:
        for node in self.graph.nodes:
            if not any(name in self.values for name in node.inputs):
                names = self.builder.add(
                    replace(node, inputs=tuple(self.fixed[name] for name in node.inputs))
                )
                self.fixed.update(zip(node.outputs, names))
                continue
            try:
                self.values.update(self._after(node))
            except GraphError:  # which does not fit of one row
                raise _Unknown(node.label) from None
        (logits,) = self.graph.outputs
        found = self.values.get(logits)
        if found is None or (found.samples, found.axis, found.kind) != (0, 1, _ROWS):
            raise _Unknown(f"output {logits!r}")
        self.builder.output(found.name)
        graph = self.builder.build().pruned()
        return Step(graph, self.kept, self.constants)

    def _after(self, node: Node) -> dict[str, _Value]:
        """Return a node's results in the step."""
        for name in node.inputs:
            value = self.values.get(name)
            if value is not None and value.kind == _MERGED and node.spec.view != "reshape":
                raise _Unknown(value.name)
        if node.operator == "attention":
            return self._attention(node)
        if node.operator in _STATES:
            return self._recurrent(node)
        if node.spec.view == "reshape":
            return self._reshaped(node)
        given = [self.values.get(name) for name in node.inputs]
        known = [value for value in given if value is not None]
        if node.operator == "matmul" and None not in given:
            return self._product(node, known)
        kinds = {value.kind for value in known}
        if kinds <= {_ROWS, _JOINED} and len(kinds) == 1:
            return self._by_rows(node, kinds.pop())
        return self._scored(node, known)

    def _by_rows(self, node: Node, kind: str = _ROWS) -> dict[str, _Value]:
        """Return the results of an operator that makes rows one by one."""
        signature = self.graph.signature(node)
        operands = list(zip(node.inputs, signature.inputs))
        dims = {
            aligned(operand.axes[self.values[name].axis], signature)
            for name, operand in operands
            if name in self.values
        }
        dim = dims.pop()
        if dims or dim is None or signature.by_name[dim].kind is not Kind.FREE:
            raise _Unknown(node.label)
        if differs_by_place(node, signature, dim):
            raise _Unknown(node.label)
        whose = {
            aligned(operand.axes[self.values[name].samples], signature)
            for name, operand in operands
            if name in self.values
        }
        if any(each is None or signature.by_name[each].kind is not Kind.FREE for each in whose):
            raise _Unknown(node.label)
        sample = whose.pop()
        axes, samples = {}, {}
        for name, operand in zip(node.outputs, signature.outputs):
            along = [aligned(axis, signature) for axis in operand.axes]
            if along.count(dim) != 1 or whose or sample not in along:
                raise _Unknown(node.label)
            axes[name], samples[name] = along.index(dim), along.index(sample)
        inputs = []
        for name, operand in operands:
            places = [p for p, axis in enumerate(operand.axes) if dim in axis.dims]
            if name in self.values:
                if places != [self.values[name].axis]:
                    raise _Unknown(node.label)
                inputs.append(self.values[name].name)
            elif places:
                if len(places) > 1 or not node.spec.elementwise or kind == _JOINED:
                    raise _Unknown(node.label)
                rank = self.graph.tensors[node.outputs[0]].rank
                inputs.append(self._row_of(node, name, places[0], rank, samples[node.outputs[0]]))
            else:
                inputs.append(self.fixed[name])
        names = self._apply(node, inputs, axes[node.outputs[0]], kind)
        found_keys = [value.keys for name in node.inputs if (value := self.values.get(name))]
        keys = max(found_keys)
        made = {}
        for name, new in zip(node.outputs, names):
            self._check(node, name, new, axes[name], kind)
            made[name] = _Value(new, axes[name], kind, keys, samples[name])
        return made

    def _extents(self, kind: str) -> tuple[int, int]:
        """Return the extents of one row and of all along the axis of rows."""
        times = self.samples if kind == _JOINED else 1
        return times, times * self.tokens

    def _apply(
        self, node: Node, inputs: Sequence[str], axis: int, kind: str = _ROWS
    ) -> tuple[str, ...]:
        """Return the outputs of an operator on one row, with extents in its attributes adjusted."""
        attributes = dict(node.attributes)
        one, extent = self._extents(kind)
        if node.operator == "broadcast":
            attributes["shape"] = _with(attributes["shape"], axis, one)
        elif node.operator == "slice":
            whole = (0, extent, 1)
            if tuple(attributes[n][axis] for n in ("starts", "stops", "steps")) != whole:
                raise _Unknown(node.label)
            attributes["stops"] = _with(attributes["stops"], axis, one)
        items = tuple(sorted(node.spec.normalise(attributes).items()))
        return self.builder.add(replace(node, inputs=tuple(inputs), items=items))

    def _check(self, node: Node, name: str, new: str, axis: int, kind: str = _ROWS) -> None:
        """Check that one row was made where all were."""
        shape, (one, extent) = self.graph.tensors[name].shape, self._extents(kind)
        if self.builder.spec(new).shape != _with(shape, axis, one) or shape[axis] != extent:
            raise _Unknown(node.label)

    def _reshaped(self, node: Node) -> dict[str, _Value]:
        whole, (name,) = node.inputs[0], node.outputs
        while self.values[whole].kind == _MERGED:
            whole = self.graph.producers[whole].inputs[0]
        value, after = self.values[whole], self.graph.tensors[name].shape
        before, kind = self.graph.tensors[whole].shape, value.kind
        axis, samples = (_same_place(before, after, at) for at in (value.axis, value.samples))
        if kind not in (_ROWS, _JOINED):
            raise _Unknown(node.label)
        if kind == _JOINED and after[:2] == (self.samples, self.tokens):
            kind, axis, samples = _ROWS, 1, 0
        elif (value.samples, value.axis) == (0, 1) and after[:1] == self._extents(_JOINED)[1:]:
            kind, axis, samples = _JOINED, 0, 0
        if axis is None or samples is None:
            return {name: _Value(node.label, -1, _MERGED)}
        shape = _with(after, axis, self._extents(kind)[0])
        (new,) = self.builder.apply("reshape", value.name, shape=shape, name=node.name)
        return {name: _Value(new, axis, kind, samples=samples)}

    # Where tokens meet

    def _product(self, node: Node, given: Sequence[_Value]) -> dict[str, _Value]:
        """Return scores, for a product of rows by all rows; rows, for one of shares by all rows."""
        signature, (name,) = self.graph.signature(node), node.outputs
        (one, all_rows), (a, b) = given, signature.inputs
        if all_rows.kind != _ROWS or one.kind not in (_ROWS, _SHARES):
            raise _Unknown(node.label)
        dims = [
            aligned(operand.axes[axis], signature)
            for operand, axis in ((a, one.axis), (b, all_rows.axis))
        ]
        places = {
            aligned(axis, signature): place for place, axis in enumerate(signature.outputs[0].axes)
        }
        first = _first(signature, a) and _first(signature, b)
        first = first and one.samples == all_rows.samples == 0
        if None in dims or dims[0] == dims[1] or dims[0] not in places or not first:
            raise _Unknown(node.label)
        inputs = (one.name, self._whole(node.inputs[1]))
        (new,) = self.builder.add(replace(node, inputs=inputs))
        axis = places[dims[0]]
        self._check(node, name, new, axis)
        if one.kind == _ROWS and dims[1] in places:
            return {name: _Value(new, axis, _SCORES, places[dims[1]])}
        summed = one.kind == _SHARES and aligned(a.axes[one.keys], signature) == dims[1]
        if not summed or dims[1] in places:
            raise _Unknown(node.label)
        return {name: _Value(new, axis)}

    def _scored(self, node: Node, given: Sequence[_Value]) -> dict[str, _Value]:
        """Return the result of a node on scores: changed one by one, some hidden, or a softmax."""
        value = given[0]
        if self._without_nans(node):
            return self._by_rows(node, _SHARES)
        if len(given) != 1:
            raise _Unknown(node.label)
        if node.operator == "hide_later" and value.kind == _SCORES:
            (new,) = self.builder.apply("add", value.name, self._seen("float32"))
            return {node.outputs[0]: replace(value, name=new, kind=_MASKED)}
        if node.operator == "softmax" and value.kind == _MASKED:
            if node.attributes["axis"] != value.keys:
                raise _Unknown(node.label)
            return self._by_rows(node, _SHARES)
        if node.operator == "is_nan" and value.kind == _SHARES:
            return self._by_rows(node, _NANS)
        shape = self.graph.tensors[node.inputs[node.inputs.index(self._only(node))]].shape
        kept_shape = all(self.graph.tensors[name].shape == shape for name in node.outputs)
        if not node.spec.elementwise or not kept_shape or value.kind != _SCORES:
            raise _Unknown(node.label)
        return self._by_rows(node, _MASKED if self._hides(node, value, shape) else _SCORES)

    def _without_nans(self, node: Node) -> bool:
        """Return whether a node makes zeros of those shares that are NaN."""
        if node.operator != "where" or node.inputs[1] in self.values:
            return False
        condition, zero, shares = node.inputs
        nans = self.values.get(condition)
        if nans is None or nans.kind != _NANS:
            return False
        of_these = self.graph.producers[condition].inputs == (shares,)
        return of_these and not self._contents(zero).any()

    def _only(self, node: Node) -> str:
        return next(name for name in node.inputs if name in self.values)

    def _hides(self, node: Node, value: _Value, shape: tuple[int, ...]) -> bool:
        """Return whether a node sets the scores of all later keys to those of hidden ones."""
        if node.operator == "add":
            mask = self._contents(next(n for n in node.inputs if n not in self.values))
            return self._later(np.broadcast_to(mask <= _HIDES, shape), value)
        if node.operator == "where" and node.inputs[0] not in self.values:
            condition, first, second = node.inputs
            hidden = self._contents(condition).astype(bool)
            if first in self.values:
                hidden = ~hidden
            other = self._contents(second if first in self.values else first)
            hidden, low = (np.broadcast_to(each, shape) for each in (hidden, other <= _HIDES))
            return self._later(hidden & low, value)
        return False

    def _later(self, hidden: Array, value: _Value) -> bool:
        """Return whether all later keys are among the hidden ones."""
        pairs = np.moveaxis(hidden, (value.axis, value.keys), (-2, -1))
        later = np.triu(np.ones(pairs.shape[-2:], bool), 1)
        return bool(pairs[..., later].all())

    def _attention(self, node: Node) -> dict[str, _Value]:
        given = [self.values.get(name) for name in node.inputs]
        q, k, v, *mask = given
        if any(x is None or (x.samples, x.axis, x.kind) != (0, 1, _ROWS) for x in (q, k, v)) or any(
            mask
        ):
            raise _Unknown(node.label)
        assert q is not None
        read = set(self.graph.outputs).union(*(each.inputs for each in self.graph.nodes))
        if node.outputs[1] in read:
            raise _Unknown(node.label)
        added = []
        causal = node.attributes["causal"]
        heads = self.graph.tensors[node.inputs[0]].shape[2]
        if mask:
            name = node.inputs[3]
            spec = self.graph.tensors[name]
            shape = (self.samples, heads, self.tokens, self.tokens)
            if not causal:
                hidden = np.broadcast_to(self._contents(name) <= _HIDES, shape)
                causal = self._later(hidden, _Value("", 2, keys=3))
            by_row = spec.rank > 1 and spec.shape[-2] > 1
            added.append(self._row_of(node, name, spec.rank - 2, 4) if by_row else self.fixed[name])
        if not causal:
            raise _Unknown(node.label)
        if node.attributes["causal"]:
            added.append(self._seen(self.graph.tensors[node.inputs[0]].dtype))
        if len(added) == 2:
            added = [*self.builder.apply("add", *added)]
        held = [self._whole(name) for name in node.inputs[1:3]]
        attributes = {**node.attributes, "causal": False}
        new, _ = self.builder.apply(
            "attention", q.name, *held, *added, name=node.name, **attributes
        )
        self._check(node, node.outputs[0], new, 1)
        return {node.outputs[0]: _Value(new, 1)}

    def _recurrent(self, node: Node) -> dict[str, _Value]:
        """Return the outputs of a recurrent layer, which continues from the previous step."""
        value, rest = self.values.get(node.inputs[0]), node.inputs[1:]
        known = [each.removesuffix("?") for each in node.spec.inputs[: len(node.inputs)]]
        forward = not node.attributes["reverse"] and "lengths" not in known
        if value is None or (value.samples, value.axis, value.kind) != (1, 0, _ROWS) or not forward:
            raise _Unknown(node.label)
        if any(name in self.values for name in rest):
            raise _Unknown(node.label)
        inputs = dict(zip(known, (value.name, *(self.fixed[name] for name in rest))))
        outputs = dict(zip(node.spec.outputs, node.outputs))
        states = _STATES[node.operator]
        buffers = {}
        for state, output in states.items():
            buffers[output] = self._buffer(outputs[output], 1)
            inputs[state] = self._row_before(buffers[output])
        names = self.builder.add(replace(node, inputs=tuple(inputs.values())))
        made = dict(zip(node.spec.outputs, names))
        found = {}
        for output, buffer in buffers.items():
            name = outputs[output]
            self._check(node, name, made[output], 0)
            found[name] = _Value(made[output], 0, samples=1)
            self._write(name, buffer, found[name])
        return found

    def _row_before(self, buffer: str) -> str:
        """Return the row before the new one of a buffer (samples, tokens, d): (samples, d)."""
        one = self._constant(_ONE, np.array(1))
        (before,) = self.builder.apply("sub", STARTS, one)
        (before,) = self.builder.apply("reshape", before, shape=(self.samples, 1))
        (places,) = self.builder.apply("concat", self._numbers(), before, axis=1)
        return self.builder.apply("gather_nd", buffer, places)[0]

    def _numbers(self) -> str:
        """Return the number of each sample, (samples, 1)."""
        return self._constant(_SAMPLES, np.arange(self.samples).reshape(-1, 1))

    # What a step reads

    def _whole(self, name: str) -> str:
        """Return a value's rows for all tokens: a buffer, or one whose elements are moved."""
        if name in self.whole:
            return self.whole[name]
        node, value = self.graph.producers.get(name), self.values[name]
        moved = node is not None and (node.operator in ("transpose", "broadcast") or node.spec.view)
        if (
            node is not None
            and moved
            and len(node.inputs) == 1
            and self.values[node.inputs[0]].kind != _JOINED
        ):
            made = self.builder.add(replace(node, inputs=(self._whole(node.inputs[0]),)))
            self.whole.update(zip(node.outputs, made))
        else:
            if value.samples:
                raise _Unknown(f"value {name!r}")
            self.whole[name] = self._write(name, self._buffer(name, 0), value)
        return self.whole[name]

    def _write(self, name: str, buffer: str, value: _Value) -> str:
        """Return a buffer with the new row of its value written to it."""
        order = _samples_first(value.samples, len(self.builder.spec(value.name).shape))
        (row,) = self.builder.apply("transpose", value.name, permutation=order)
        axis = order.index(value.axis)
        (made,) = self.builder.apply("write_at", buffer, row, STARTS, axis=axis)
        self.builder.update(buffer, made)
        self.kept[name] = Kept(buffer, axis, value.samples)
        self.whole[name] = made
        return made

    def _buffer(self, name: str, samples: int) -> str:
        """Return an input for all rows of a value, samples first."""
        spec = self.graph.tensors[name]
        shape = (spec.shape[at] for at in _samples_first(samples, spec.rank))
        return self.builder.input(f"{name}.kept", tuple(shape), spec.dtype)

    def _seen(self, dtype: str) -> str:
        """Return the mask of later keys for a new token, (samples, 1, 1, tokens)."""
        key = (f"{_SEEN}.{dtype}", 0, 4, 0)
        if key not in self.rows:
            places = self._constant(_PLACES, np.arange(self.tokens).reshape(1, 1, 1, -1))
            hidden = self._constant(f"{_HIDDEN}.{dtype}", np.array(-np.inf, dtype))
            seen = self._constant(f"{_SEEN}.{dtype}", np.array(0, dtype))
            (start,) = self.builder.apply("reshape", STARTS, shape=(self.samples, 1, 1, 1))
            (later,) = self.builder.apply("less", start, places)
            (self.rows[key],) = self.builder.apply("where", later, hidden, seen)
        return self.rows[key]

    def _constant(self, name: str, contents: Array) -> str:
        if name in self.constants:
            return name
        self.constants[name] = contents
        return self.builder.input(name, contents.shape, contents.dtype.name, Role.CONSTANT)

    def _row_of(self, node: Node, name: str, axis: int, rank: int, samples: int = 0) -> str:
        """Return the new tokens' rows of a value independent of tokens, aligned to a result."""
        key = (name, axis, rank, samples)
        if key in self.rows:
            return self.rows[key]
        shape = self.graph.tensors[name].shape
        full = (*(1,) * (rank - len(shape)), *shape)
        at = axis + rank - len(shape)
        last = _with(full, at, 1)
        each = full[samples] != 1  # whether samples have rows of their own
        fits = full[samples] in (1, self.samples) and full[at] == self.tokens
        if not fits or np.prod(last[:samples]) != 1 or samples == at:
            raise _Unknown(node.label)
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
        (made,) = self.builder.apply("reshape", made, shape=_with(last, samples, self.samples))
        self.rows[key] = made
        return made

    def _contents(self, name: str) -> Array:
        """Return the contents of a value that does not depend on tokens."""
        if name in self.weights:
            return np.asarray(self.weights[name])
        least = replace(self.graph, outputs=(name,)).pruned()
        read = {each for node in least.nodes for each in node.inputs} & least.roles.keys()
        if not read <= self.weights.keys():
            raise _Unknown(f"value {name!r}")
        least = replace(least, roles={each: least.roles[each] for each in read})
        return interpret(least, {each: self.weights[each] for each in read})[name]


def _samples_first(samples: int, rank: int) -> tuple[int, ...]:
    """Return the permutation that moves the axis of samples to the front."""
    return (samples, *(axis for axis in range(rank) if axis != samples))


def _first(signature: Signature, operand: Operand) -> bool:
    """Return whether samples are along the first axis of an operand, and of all results."""
    axes = (each.axes[0] for each in (operand, *signature.outputs))
    return len({aligned(axis, signature) for axis in axes} | {None}) == 2


def _same_place(before: Sequence[int], after: Sequence[int], at: int) -> int | None:
    """Return the axis of a reshaped value that corresponds to an axis before, or None."""
    size = int(np.prod(before[:at]))
    fits = (
        axis
        for axis, extent in enumerate(after)
        if extent == before[at] and int(np.prod(after[:axis])) == size
    )
    return next(fits, None)


def _with(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """Return a shape with another extent along an axis."""
    return (*shape[:axis], extent, *shape[axis + 1 :])
