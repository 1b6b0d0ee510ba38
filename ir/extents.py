"""Graphs of one model for several extents: whether they are alike, and the graph for yet another.

Where two graphs differ in extents alone, the graph for a third is the first with other shapes:
those of values follow from its operators, and what attributes say of shapes lies on the line
through both; where several extents differ, it is a multiple of one, or of a product of some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from itertools import combinations

import numpy as np

from soapstone.ir.dims import Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node, bound
from soapstone.ir.tensor import Array, Role


def differs(
    one: Graph,
    other: Graph,
    weights: Mapping[str, Array],
    others: Mapping[str, Array] | None = None,
) -> str:
    """Return where two graphs of a model for inputs of other extents are not alike; "" for nowhere.

    They may differ in extents, and in how far weights go along such; not in numbers.

    weights: the contents of parameters, states and constants of both, by name. others: those of the
        other, where one name may have several.
    """
    others = weights if others is None else others
    if len(one.nodes) != len(other.nodes):
        return f"graph {one.name!r}, of {len(one.nodes)} and of {len(other.nodes)} operators,"
    names = {name: name for name in one.inputs(Role.INPUT)}
    for a, b in zip(one.nodes, other.nodes):
        same = a.operator == b.operator and len(a.inputs) == len(b.inputs)
        if not same or not _same_attributes(one, other, a, b):
            return a.label
        for x, y in zip(a.inputs, b.inputs):
            if names.get(x) != y and not (
                x in weights and y in others and _same_contents(weights[x], others[y])
            ):
                return a.label
            names[x] = y
        names.update(zip(a.outputs, b.outputs))
    for x, y in zip(one.outputs, other.outputs):
        if names.get(x, x) != y:
            return f"output {x!r}"
    for x, y in zip(one.roles, other.roles):
        # One that no node reads may be gone for what it says, which is known of those alone.
        if x not in names and x in weights and not np.array_equal(weights[x], others[y]):
            return f"weight {x!r}"
    return ""


def same(
    one: Graph, other: Graph, weights: Mapping[str, Array], others: Mapping[str, Array]
) -> bool:
    """Return whether two graphs compute the same, operator by operator, whatever values are called.

    weights, others: as of `differs`.
    """
    return not differs(one, other, weights, others) and all(
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
        self._numbers = list(dict.fromkeys(pairs))  # that extents depend on, in both graphs
        self._free = {
            name: [*zip(one.tensors[name].shape, other.tensors[name].shape)]
            for name in self._inputs
        }
        if any(min(pair) < 2 for pair in pairs):
            raise GraphError("extents of less than 2 found")  # what repeats is written otherwise
        if any(a * d == b * c for (a, b), (c, d) in combinations(self._numbers, 2)):
            raise GraphError("extents in one ratio found")  # a sum of such looks like a multiple
        self._items: dict[str, tuple[str, Ints, Ints]] = {}  # by node: an attribute that differs
        self._cut: dict[str, tuple[Array, Ints, Ints]] = {}  # by weight: the longer, both shapes
        self.names: Mapping[str, str] = self._match(one, other, weights)
        for _, before, after in (*self._items.values(), *self._cut.values()):
            self.check(before, after)

    @property
    def one_number(self) -> bool:
        """Whether all extents that differ are the same number."""
        return len(self._numbers) == 1

    @property
    def cut(self) -> Set[str]:
        """The weights that are longer in one graph than in the other."""
        return self._cut.keys()

    @property
    def changed(self) -> Set[str]:
        """The nodes of which an attribute is another in the other graph."""
        return self._items.keys()

    def check(self, one: Ints, other: Ints) -> None:
        """Check that it is known which multiples numbers are that stand in both graphs.

        Raises:
            GraphError: it is not.
        """
        for ends in zip(one, other, strict=True) if not self.one_number else ():
            self._multiple(*ends)

    @property
    def ends(self) -> list[tuple[int, ...]]:
        """The numbers in both graphs."""
        return list(zip(*self._numbers))

    def numbers(self, shapes: Mapping[str, Ints]) -> tuple[int, ...]:
        """Return the numbers for inputs of shapes.

        Raises:
            GraphError: no graph is known for these.
        """
        found = dict[tuple[int, int], int]()
        for name in self._inputs:
            if len(shapes[name]) != len(self._free[name]):
                raise GraphError(f"input {name!r}: another rank found")
            for ends, now in zip(self._free[name], shapes[name]):
                if (found.setdefault(ends, now) if ends[0] != ends[1] else ends[0]) != now:
                    raise GraphError(f"input {name!r}: another extent found")
        if min(found.values(), default=0) < 2:
            raise GraphError("other extents found")
        return tuple(found[ends] for ends in self._numbers)

    def _match(self, one: Graph, other: Graph, weights: Mapping[str, Array]) -> dict[str, str]:
        """Return what values of the first graph are called in the other."""
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
        return names

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

    def at(self, shapes: Mapping[str, Ints], first: int = 0) -> tuple[Graph, dict[str, Array]]:
        """Return the graph for inputs of these shapes, and the weights that are others in it.

        first: of the nodes that may be others than in the first graph.

        Raises:
            GraphError: it is not known.
        """
        known = self.graph
        numbers, weights = self.numbers(shapes), dict[str, Array]()
        tensors = {n: replace(known.tensors[n], shape=shapes[n]) for n in self._inputs}
        for name in known.roles:
            if name in self._cut:
                longer, one, other = self._cut[name]
                shape = self.extents(one, other, numbers)
                if any(now > most for now, most in zip(shape, longer.shape)):
                    raise GraphError(f"weight {name!r}: more rows needed")
                weights[name] = longer[tuple(map(slice, shape))]
                tensors[name] = replace(known.tensors[name], shape=shape)
            elif name not in tensors:
                tensors[name] = known.tensors[name]
        nodes, signatures = list(known.nodes[:first]), dict[str, Signature]()
        tensors.update((name, known.tensors[name]) for node in nodes for name in node.outputs)
        for node in known.nodes[first:]:
            if node.name in self._items:
                name, one, other = self._items[node.name]
                value = self.extents(one, other, numbers)
                items = tuple((n, value if n == name else v) for n, v in node.items)
                node = replace(node, items=items)
            nodes.append(node)
            made = signatures[node.name] = bound(node, [tensors[i] for i in node.inputs])
            for name, spec in zip(node.outputs, made.output_specs):
                # What repeats is written otherwise.
                if any(now < 2 <= was for now, was in zip(spec.shape, known.tensors[name].shape)):
                    raise GraphError(f"{node.label}: an extent of less than 2 found")
                tensors[name] = spec
        found = replace(known, nodes=tuple(nodes), tensors=tensors)
        found.know(signatures)
        return found, weights

    def extents(self, one: Ints, other: Ints, numbers: Ints) -> Ints:
        """Return what is to stand where two graphs have other extents.

        On the line through both, if they depend on one number; of several, multiples of products.

        one, other: what stands in them. numbers: those that inputs have (`numbers`).

        Raises:
            GraphError: it is not known.
        """
        found, by_ends = list[int](), dict(zip(self._numbers, numbers))
        for a, b in zip(one, other):
            if not self.one_number:
                times, of = self._multiple(a, b)
                found.append(times * math.prod(by_ends[each] for each in of))
                continue
            ((first, second),), number = self._numbers, numbers[0]
            part, rest = divmod((b - a) * (number - first), second - first)
            if rest or a + part < 0:
                raise GraphError("no whole extent found")
            found.append(a + part)
        return tuple(found)

    def _multiple(self, a: int, b: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return which multiple of a product of numbers two extents are, in their graphs.

        Raises:
            GraphError: of none, or of several.
        """
        if a == b:
            return a, ()
        found = []
        for count in range(1, len(self._numbers) + 1):
            for of in combinations(self._numbers, count):
                before, after = (math.prod(side) for side in zip(*of))
                if a % before == 0 and a // before * after == b:
                    found.append((a // before, of))
        if len(found) != 1:
            raise GraphError(f"extents {a} and {b} found, which several numbers determine")
        return found[0]
