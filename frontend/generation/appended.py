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
from dataclasses import replace

import numpy as np

from soapstone.frontend.generation.step_graph import (
    JOINED,
    MASKED,
    NANS,
    ROWS,
    SCORES,
    SHARES,
    Step,
    StepGraph,
    Unknown,
    Value,
    with_extent,
)
from soapstone.ir.analysis.samples import aligned, differs_by_place
from soapstone.ir.dims import Kind, Operand, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array

_HIDES = -1e4  # what is added to a score, or stands in its place, at most, where a key is hidden


def appended(graph: Graph, ids: str, logits: str, weights: Mapping[str, Array]) -> Step | str:
    """Return the step of a graph for all tokens, or why none is known.

    Args:
        graph: with an input of tokens (samples, tokens). ids: this input. logits: its output.
        weights: the contents of parameters, states and constants, by name.
    """
    try:
        only = replace(graph, outputs=(logits,), updates={}).pruned()
        return _Rules(StepGraph(only, ids), weights).made()
    except Unknown as error:
        return str(error)


class _Rules:
    """What operators make in the step of a graph.

    graph: for all tokens. step: the graph that is written. weights: as of `appended`.
    """

    def __init__(self, step: StepGraph, weights: Mapping[str, Array]) -> None:
        self.graph, self.step, self.weights = step.graph, step, weights
        self.builder, self.values, self.fixed = step.builder, step.values, step.fixed

    def made(self) -> Step:
        """Return the step.

        Raises:
            Unknown: what an operator makes of new rows is not known.
        """
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
                raise Unknown(node.label) from None
        (logits,) = self.graph.outputs
        found = self.values.get(logits)
        if found is None or (found.samples, found.axis, found.kind) != (0, 1, ROWS):
            raise Unknown(f"output {logits!r}")
        return self.step.finish(found.name)

    def _after(self, node: Node) -> dict[str, Value]:
        """Return a node's results in the step."""
        if node.operator == "attention":
            return self._attention(node)
        if node.spec.states:
            return self._recurrent(node)
        if node.spec.view == "reshape":
            return self._reshaped(node)
        given = [self.values.get(name) for name in node.inputs]
        known = [value for value in given if value is not None]
        if node.operator == "matmul" and None not in given:
            return self._product(node, known)
        kinds = {value.kind for value in known}
        if kinds <= {ROWS, JOINED} and len(kinds) == 1:
            return self._by_rows(node, kinds.pop())
        return self._scored(node, known)

    def _by_rows(self, node: Node, kind: str = ROWS) -> dict[str, Value]:
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
            raise Unknown(node.label)
        if differs_by_place(node, signature, dim):
            raise Unknown(node.label)
        whose = {
            aligned(operand.axes[self.values[name].samples], signature)
            for name, operand in operands
            if name in self.values
        }
        if any(each is None or signature.by_name[each].kind is not Kind.FREE for each in whose):
            raise Unknown(node.label)
        sample = whose.pop()
        axes, samples = {}, {}
        for name, operand in zip(node.outputs, signature.outputs):
            along = [aligned(axis, signature) for axis in operand.axes]
            if along.count(dim) != 1 or whose or sample not in along:
                raise Unknown(node.label)
            axes[name], samples[name] = along.index(dim), along.index(sample)
        inputs = []
        for name, operand in operands:
            places = [p for p, axis in enumerate(operand.axes) if dim in axis.dims]
            if name in self.values:
                if places != [self.values[name].axis]:
                    raise Unknown(node.label)
                inputs.append(self.values[name].name)
            elif places:
                if len(places) > 1 or not node.spec.elementwise or kind == JOINED:
                    raise Unknown(node.label)
                rank = self.graph.tensors[node.outputs[0]].rank
                sample_axis = samples[node.outputs[0]]
                inputs.append(self.step.row_of(node, name, places[0], rank, sample_axis))
            else:
                inputs.append(self.fixed[name])
        names = self._apply(node, inputs, axes[node.outputs[0]], kind)
        found_keys = [value.keys for name in node.inputs if (value := self.values.get(name))]
        keys = max(found_keys)
        made = {}
        for name, new in zip(node.outputs, names):
            self.step.check(node, name, new, axes[name], kind)
            made[name] = Value(new, axes[name], kind, keys, samples[name])
        return made

    def _apply(
        self, node: Node, inputs: Sequence[str], axis: int, kind: str = ROWS
    ) -> tuple[str, ...]:
        """Return the outputs of an operator on one row, with extents in its attributes adjusted."""
        attributes = dict(node.attributes)
        one, extent = self.step.extents(kind)
        if node.operator == "broadcast":
            attributes["shape"] = with_extent(attributes["shape"], axis, one)
        elif node.operator == "slice":
            whole = (0, extent, 1)
            if tuple(attributes[n][axis] for n in ("starts", "stops", "steps")) != whole:
                raise Unknown(node.label)
            attributes["stops"] = with_extent(attributes["stops"], axis, one)
        items = tuple(sorted(node.spec.normalise(attributes).items()))
        return self.builder.add(replace(node, inputs=tuple(inputs), items=items))

    def _reshaped(self, node: Node) -> dict[str, Value]:
        (whole,), (name,) = node.inputs, node.outputs
        before, after = (self.graph.tensors[each].shape for each in (whole, name))
        value, samples, joined = self.values[whole], self.step.samples, self.step.extents(JOINED)[1]
        kind, axis = value.kind, _same_place(before, after, value.axis)
        place = _same_place(before, after, value.samples, samples)
        keys = -1 if value.keys < 0 else _same_place(before, after, value.keys)
        if kind == JOINED and after[:2] == (samples, self.step.tokens):
            kind, axis, place = ROWS, 1, 0
        elif (kind, *after[:1]) == (ROWS, joined) and self.step.leads(value, before):
            kind, axis, place = JOINED, 0, 0
        if axis is None or place is None or keys is None or (axis == place and kind != JOINED):
            raise Unknown(node.label)
        shape = with_extent(after, axis, self.step.extents(kind)[0])
        (new,) = self.builder.apply("reshape", value.name, shape=shape, name=node.name)
        return {name: Value(new, axis, kind, keys, place)}

    # Where tokens meet

    def _product(self, node: Node, given: Sequence[Value]) -> dict[str, Value]:
        """Return scores, for a product of rows by all rows; rows, for one of shares by all rows."""
        signature, (name,) = self.graph.signature(node), node.outputs
        (one, all_rows), (a, b) = given, signature.inputs
        if all_rows.kind != ROWS or one.kind not in (ROWS, SHARES):
            raise Unknown(node.label)
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
            raise Unknown(node.label)
        inputs = (one.name, self.step.whole(node.inputs[1]))
        (new,) = self.builder.add(replace(node, inputs=inputs))
        axis = places[dims[0]]
        self.step.check(node, name, new, axis)
        if one.kind == ROWS and dims[1] in places:
            return {name: Value(new, axis, SCORES, places[dims[1]])}
        summed = one.kind == SHARES and aligned(a.axes[one.keys], signature) == dims[1]
        if not summed or dims[1] in places:
            raise Unknown(node.label)
        return {name: Value(new, axis)}

    def _scored(self, node: Node, given: Sequence[Value]) -> dict[str, Value]:
        """Return the result of a node on scores: changed one by one, some hidden, or a softmax."""
        value = given[0]
        if self._without_nans(node):
            return self._by_rows(node, SHARES)
        if len(given) != 1:
            raise Unknown(node.label)
        if node.operator == "hide_later" and (value.axis, value.keys, value.kind) == (2, 3, SCORES):
            (new,) = self.builder.apply("add", value.name, self.step.seen("float32"))
            return {node.outputs[0]: replace(value, name=new, kind=MASKED)}
        if node.operator == "softmax" and value.kind == MASKED:
            if node.attributes["axis"] != value.keys:
                raise Unknown(node.label)
            return self._by_rows(node, SHARES)
        if node.operator == "is_nan" and value.kind == SHARES:
            return self._by_rows(node, NANS)
        shape = self.graph.tensors[node.inputs[node.inputs.index(self._only(node))]].shape
        kept_shape = all(self.graph.tensors[name].shape == shape for name in node.outputs)
        if not node.spec.elementwise or not kept_shape or value.kind not in (SCORES, MASKED):
            raise Unknown(node.label)
        hides = self._hides(node, value, shape)
        if value.kind == MASKED and not hides:
            raise Unknown(node.label)
        return self._by_rows(node, MASKED if hides else SCORES)

    def _without_nans(self, node: Node) -> bool:
        """Return whether a node makes zeros of those shares that are NaN."""
        if node.operator != "where" or node.inputs[1] in self.values:
            return False
        condition, zero, shares = node.inputs
        nans = self.values.get(condition)
        if nans is None or nans.kind != NANS:
            return False
        of_these = self.graph.producers[condition].inputs == (shares,)
        return of_these and not self._contents(zero).any()

    def _only(self, node: Node) -> str:
        return next(name for name in node.inputs if name in self.values)

    def _hides(self, node: Node, value: Value, shape: tuple[int, ...]) -> bool:
        """Return whether what a node makes of scores of later keys is that of hidden ones."""
        already = value.kind == MASKED  # so that it need not raise them
        if node.operator == "add" or (node.operator == "maximum" and already):
            mask = self._contents(next(n for n in node.inputs if n not in self.values))
            most = 0 if already and node.operator == "add" else _HIDES
            return self._later(np.broadcast_to(mask <= most, shape), value)
        if node.operator == "where" and node.inputs[0] not in self.values:
            condition, first, second = node.inputs
            hidden = self._contents(condition).astype(bool)
            if first in self.values:
                hidden = ~hidden
            other = self._contents(second if first in self.values else first)
            hidden, low = (np.broadcast_to(each, shape) for each in (hidden, other <= _HIDES))
            return self._later(np.where(hidden, low, already), value)
        return False

    def _later(self, hidden: Array, value: Value) -> bool:
        """Return whether all later keys are among the hidden ones."""
        pairs = np.moveaxis(hidden, (value.axis, value.keys), (-2, -1))
        later = np.triu(np.ones(pairs.shape[-2:], bool), 1)
        return bool(pairs[..., later].all())

    def _attention(self, node: Node) -> dict[str, Value]:
        given = [self.values.get(name) for name in node.inputs]
        q, k, v, *mask = given
        if any(x is None or (x.samples, x.axis, x.kind) != (0, 1, ROWS) for x in (q, k, v)) or any(
            mask
        ):
            raise Unknown(node.label)
        assert q is not None
        read = set(self.graph.outputs).union(*(each.inputs for each in self.graph.nodes))
        if node.outputs[1] in read:
            raise Unknown(node.label)
        added = []
        causal = node.attributes["causal"]
        heads = self.graph.tensors[node.inputs[0]].shape[2]
        if mask:
            name = node.inputs[3]
            spec = self.graph.tensors[name]
            shape = (self.step.samples, heads, self.step.tokens, self.step.tokens)
            if not causal:
                hidden = np.broadcast_to(self._contents(name) <= _HIDES, shape)
                causal = self._later(hidden, Value("", 2, keys=3))
            by_row = spec.rank > 1 and spec.shape[-2] > 1
            added.append(
                self.step.row_of(node, name, spec.rank - 2, 4) if by_row else self.fixed[name]
            )
        if not causal:
            raise Unknown(node.label)
        if node.attributes["causal"]:
            added.append(self.step.seen(self.graph.tensors[node.inputs[0]].dtype))
        if len(added) == 2:
            added = [*self.builder.apply("add", *added)]
        held = [self.step.whole(name) for name in node.inputs[1:3]]
        attributes = {**node.attributes, "causal": False}
        new, _ = self.builder.apply(
            "attention", q.name, *held, *added, name=node.name, **attributes
        )
        self.step.check(node, node.outputs[0], new, 1)
        return {node.outputs[0]: Value(new, 1)}

    def _recurrent(self, node: Node) -> dict[str, Value]:
        """Return the outputs of a recurrent layer, which continues from the previous step."""
        value, rest = self.values.get(node.inputs[0]), node.inputs[1:]
        known = [each.removesuffix("?") for each in node.spec.inputs[: len(node.inputs)]]
        forward = not node.attributes["reverse"] and "lengths" not in known
        if value is None or (value.samples, value.axis, value.kind) != (1, 0, ROWS) or not forward:
            raise Unknown(node.label)
        if any(name in self.values for name in rest):
            raise Unknown(node.label)
        inputs = dict(zip(known, (value.name, *(self.fixed[name] for name in rest))))
        outputs = dict(zip(node.spec.outputs, node.outputs))
        buffers = {}
        for state, output in node.spec.states.items():
            buffers[output] = self.step.buffer(outputs[output], 1)
            inputs[state] = self.step.row_before(buffers[output])
        names = self.builder.add(replace(node, inputs=tuple(inputs.values())))
        made = dict(zip(node.spec.outputs, names))
        found = {}
        for output in dict.fromkeys((node.spec.outputs[0], *buffers)):
            name = outputs[output]
            self.step.check(node, name, made[output], 0)
            found[name] = Value(made[output], 0, samples=1)
            if output in buffers:
                self.step.write(name, buffers[output], found[name])
        return found

    def _contents(self, name: str) -> Array:
        """Return the contents of a value that does not depend on tokens."""
        if name in self.weights:
            return np.asarray(self.weights[name])
        least = replace(self.graph, outputs=(name,)).pruned()
        read = {each for node in least.nodes for each in node.inputs} & least.roles.keys()
        if not read <= self.weights.keys():
            raise Unknown(f"value {name!r}")
        least = replace(least, roles={each: least.roles[each] for each in read})
        return interpret(least, {each: self.weights[each] for each in read})[name]


def _first(signature: Signature, operand: Operand) -> bool:
    """Return whether samples are along the first axis of an operand, and of all results."""
    axes = (each.axes[0] for each in (operand, *signature.outputs))
    return len({aligned(axis, signature) for axis in axes} | {None}) == 2


def _same_place(before: Sequence[int], after: Sequence[int], at: int, parts: int = 0) -> int | None:
    """Return the axis of a reshaped value that corresponds to an axis before, or None.

    parts: where only equal parts of the axis need to be in order, how many; 0: each element.
    """
    size = int(np.prod(before[:at]))
    fits = (
        axis
        for axis, extent in enumerate(after)
        if (extent % parts == 0 if parts else extent == before[at])
        and int(np.prod(after[:axis])) == size
    )
    return next(fits, None)
