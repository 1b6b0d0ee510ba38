"""Graphs of one model for several extents: whether they are alike, and the graph for yet another.

Where two graphs differ in extents alone, the graph for a third is the first with other shapes:
those of values follow from its operators, and what attributes say of shapes lies on the line
through both.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node, inferred
from soapstone.ir.tensor import Array, Role, TensorSpec


def differs(one: Graph, other: Graph, weights: Mapping[str, Array]) -> str:
    """Return where two graphs of a model for inputs of other extents are not alike; "" for nowhere.

    They may differ in extents, and in how far weights go along such; not in numbers.

    weights: the contents of parameters, states and constants of both, by name.
    """
    if len(one.nodes) != len(other.nodes):
        return f"graph {one.name!r}, of {len(one.nodes)} and of {len(other.nodes)} operators,"
    names = {name: name for name in one.inputs(Role.INPUT)}
    for a, b in zip(one.nodes, other.nodes):
        same = a.operator == b.operator and len(a.inputs) == len(b.inputs)
        if not same or not _same_attributes(one, other, a, b):
            return a.label
        for x, y in zip(a.inputs, b.inputs):
            known = names.get(x) == y or (x == y and x in weights)
            if not known and not (
                x in weights and y in weights and _same_contents(weights[x], weights[y])
            ):
                return a.label
            names[x] = y
        names.update(zip(a.outputs, b.outputs))
    for x, y in zip(one.outputs, other.outputs):
        if names.get(x, x) != y:
            return f"output {x!r}"
    for x, y in zip(one.roles, other.roles):
        # One that no node reads may be gone for what it says, which is known of those alone.
        if x not in names and x in weights and not np.array_equal(weights[x], weights[y]):
            return f"weight {x!r}"
    return ""


def same(one: Graph, other: Graph, weights: Mapping[str, Array]) -> bool:
    """Return whether two graphs compute the same, operator by operator, whatever values are called.

    weights: as of `differs`.
    """
    return not differs(one, other, weights) and all(
        a.items == b.items
        and all(
            one.tensors[x] == other.tensors[y]
            for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs))
        )
        for a, b in zip(one.nodes, other.nodes)
    )


def _same_attributes(one: Graph, other: Graph, a: Node, b: Node) -> bool:
    """Return whether attributes are the same but for what they say of shapes."""
    if a.items == b.items:
        return True
    shaped = a.spec.view == "reshape" or a.operator == "broadcast" or not a.inputs
    if a.operator == "slice":  # all of an axis, whatever its extent is
        whole = [
            node.attributes["stops"][axis] == graph.tensors[node.inputs[0]].shape[axis]
            for graph, node in ((one, a), (other, b))
            for axis, (p, q) in enumerate(zip(a.attributes["stops"], b.attributes["stops"]))
            if p != q
        ]
        rest = ("starts", "steps")
        return all(whole) and all(a.attributes[name] == b.attributes[name] for name in rest)
    return shaped and all(p == q for p, q in zip(a.items, b.items) if p[0] != "shape")


def _same_contents(a: Array, b: Array) -> bool:
    """Return whether weights are the same as far as both go."""
    if a is b:
        return True
    if a.ndim != b.ndim or a.dtype != b.dtype:
        return False
    cut = tuple(slice(min(extents)) for extents in zip(a.shape, b.shape))
    return bool(np.array_equal(a[cut], b[cut]))


Ints = tuple[int, ...]


class Between:
    """The graphs of a model that differ in extents of its inputs, by those for two.

    The model must be known to depend on these extents in no way but by shapes.

    Args:
        one, other: graphs whose inputs differ in some extents, all of 2 or more.
        weights: the contents of parameters, states and constants of both, by name.

    Raises:
        GraphError: they differ in more than extents.
    """

    def __init__(self, one: Graph, other: Graph, weights: Mapping[str, Array]) -> None:
        if len(one.nodes) != len(other.nodes):
            raise GraphError(f"{len(one.nodes)} and {len(other.nodes)} operators found")
        self.graph = one
        self._inputs = one.inputs(Role.INPUT)
        if self._inputs != other.inputs(Role.INPUT):
            raise GraphError("other inputs found")
        pairs = [
            pair
            for name in self._inputs
            for pair in zip(one.tensors[name].shape, other.tensors[name].shape)
            if pair[0] != pair[1]
        ]
        # One number that extents depend on; of several, nothing but shapes of values may.
        self._ends = pairs[0] if len(set(pairs)) == 1 else None
        self._free = {
            name: [a != b for a, b in zip(one.tensors[name].shape, other.tensors[name].shape)]
            for name in self._inputs
        }
        if any(min(pair) < 2 for pair in pairs):
            raise GraphError("extents of less than 2 found")  # what repeats is written otherwise
        self._items: dict[str, tuple[str, Ints, Ints]] = {}  # by node: an attribute that differs
        self._cut: dict[str, tuple[Array, Ints, Ints]] = {}  # by weight: the longer, both shapes
        self._match(one, other, weights)
        if (self._items or self._cut) and self._ends is None:
            raise GraphError("several extents found that attributes depend on")

    @property
    def one_number(self) -> bool:
        """Whether all extents that differ are the same number."""
        return self._ends is not None

    def _match(self, one: Graph, other: Graph, weights: Mapping[str, Array]) -> None:
        names = {name: name for name in self._inputs}
        fixed = set(one.roles) - set(self._inputs)  # what no input determines
        for a, b in zip(one.nodes, other.nodes):
            if (a.operator, len(a.inputs), len(a.outputs)) != (
                b.operator,
                len(b.inputs),
                len(b.outputs),
            ):
                raise GraphError(f"{a.label} and {b.label} found")
            for x, y in zip(a.inputs, b.inputs):
                if names.setdefault(x, y) != y:
                    raise GraphError(f"{a.label}: {x!r} and {y!r} found")
                if x in one.roles and x not in self._inputs:
                    self._weight(x, y, weights)
            if a.items != b.items:
                self._attribute(one, other, a, b, fixed)
            if fixed.issuperset(a.inputs):
                fixed.update(a.outputs)
            names.update(zip(a.outputs, b.outputs))
        if len(one.roles) != len(other.roles):
            raise GraphError("another number of weights found")
        for x, y in zip(one.roles, other.roles):
            if names.setdefault(x, y) == y and x not in self._inputs:
                self._weight(x, y, weights)  # no node may read it, for what it was found to say
        if len(set(names.values())) < len(names):
            raise GraphError("a value that is two others found")
        if tuple(names.get(name, name) for name in one.outputs) != other.outputs:
            raise GraphError("other outputs found")

    def _weight(self, x: str, y: str, weights: Mapping[str, Array]) -> None:
        a, b = weights[x], weights[y]
        if a is b or x in self._cut:
            return
        if not _same_contents(a, b):
            raise GraphError(f"weights {x!r} and {y!r}, of other contents, found")
        if a.shape != b.shape:
            longer = a if all(p >= q for p, q in zip(a.shape, b.shape)) else b
            self._cut[x] = longer, a.shape, b.shape

    def _attribute(self, one: Graph, other: Graph, a: Node, b: Node, fixed: Set[str]) -> None:
        """Take note of the one attribute that differs, where it says shapes."""
        differing = [(name, p, q) for (name, p), (_, q) in zip(a.items, b.items) if p != q]
        name, p, q = differing[0]
        cut = (a.operator, name) == ("slice", "stops") and a.inputs[0] in fixed
        fits = cut or _same_attributes(one, other, a, b)
        if len(differing) > 1 or not fits or len(p) != len(q):
            raise GraphError(f"{a.label}: attributes {differing} found")
        self._items[a.name] = name, p, q

    def at(self, shapes: Mapping[str, Ints]) -> tuple[Graph, dict[str, Array]]:
        """Return the graph for inputs of these shapes, and the weights that are others in it.

        Raises:
            GraphError: it is not known.
        """
        known = self.graph
        tensors, numbers = dict[str, TensorSpec](), set[int]()
        for name in self._inputs:
            spec, shape = known.tensors[name], shapes[name]
            if len(shape) != spec.rank:
                raise GraphError(f"input {name!r}: another rank found")
            for free, before, now in zip(self._free[name], spec.shape, shape):
                if free:
                    numbers.add(now)
                elif before != now:
                    raise GraphError(f"input {name!r}: another extent found")
            tensors[name] = replace(spec, shape=shape)
        if min(numbers, default=0) < 2 or (self._ends is not None and len(numbers) > 1):
            raise GraphError("other extents found")
        number, weights = min(numbers), dict[str, Array]()
        for name in known.roles:
            if name in self._cut:
                longer, one, other = self._cut[name]
                shape = self._line(one, other, number)
                if any(now > most for now, most in zip(shape, longer.shape)):
                    raise GraphError(f"weight {name!r}: more rows needed")
                weights[name] = longer[tuple(map(slice, shape))]
                tensors[name] = replace(known.tensors[name], shape=shape)
            elif name not in tensors:
                tensors[name] = known.tensors[name]
        nodes = []
        for node in known.nodes:
            if node.name in self._items:
                name, one, other = self._items[node.name]
                value = self._line(one, other, number)
                items = tuple((n, value if n == name else v) for n, v in node.items)
                node = replace(node, items=items)
            nodes.append(node)
            for name, spec in zip(node.outputs, inferred(node, [tensors[i] for i in node.inputs])):
                # What repeats is written otherwise.
                if any(now < 2 <= was for now, was in zip(spec.shape, known.tensors[name].shape)):
                    raise GraphError(f"{node.label}: an extent of less than 2 found")
                tensors[name] = spec
        return replace(known, nodes=tuple(nodes), tensors=tensors), weights

    def _line(self, one: Ints, other: Ints, number: int) -> Ints:
        """Return what lies for a number on the line through what two graphs have."""
        if self._ends is None:
            return one
        first, second = self._ends
        found = []
        for a, b in zip(one, other):
            part, rest = divmod((b - a) * (number - first), second - first)
            if rest or a + part < 0:
                raise GraphError("no whole extent found")
            found.append(a + part)
        return tuple(found)
