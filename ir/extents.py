"""Families: graphs of one model for several extents, and the graph derived for further ones.

If graphs differ in extents alone, the graph for other extents is the first one with other shapes.
The shapes of values follow from its operators, and numbers in attributes from extents met earlier
(`extent_terms.py`). Extents behind strides are no linear function of those of inputs; they are
extents of their own, which operators give.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from soapstone.ir.analysis.samples import aligned
from soapstone.ir.dims import Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.extent_terms import Ints, Numbers, Term
from soapstone.ir.graph import Graph, Items, Node, bound
from soapstone.ir.tensor import Array, Role, TensorSpec


def differs(
    one: Graph,
    other: Graph,
    weights: Mapping[str, Array],
    others: Mapping[str, Array] | None = None,
) -> str:
    """Return where two graphs of a model for other extents are not alike; "" for nowhere.

    They may differ in extents, and in the lengths of weights along them, but not in other numbers.

    weights: the contents of parameters, states and constants of both, by name. others: those of the
    other graph, where one name may have several.
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


def _same_attributes(one: Graph, other: Graph, a: Node, b: Node) -> bool:
    """Return whether attributes are equal but for extents, which show in shapes of results too.

    They do where they are the result's shape, and where they are those of an axis that is kept
    whole in both graphs.
    """
    both = (one, a), (other, b)
    for (name, p), (_, q) in zip(a.items, b.items):
        if p == q:
            continue
        if not a.spec.attributes[name].extents:
            return False
        shown = all(g.tensors[n.outputs[0]].shape == v for (g, n), v in zip(both, (p, q)))
        others = [axis for axis, numbers in enumerate(zip(p, q)) if len({*numbers}) > 1]
        if not shown and not all(_kept(*each, axis) for each in both for axis in others):
            return False
    return True


def _kept(graph: Graph, node: Node, axis: int) -> bool:
    """Return whether a result has the operand's elements along an axis, each where it was."""
    signature = graph.signature(node)
    dims = {
        aligned(each[0].axes[axis], signature) for each in (signature.inputs, signature.outputs)
    }
    return len(dims) == 1 and None not in dims


def _same_contents(a: Array, b: Array) -> bool:
    """Return whether weights are equal as far as both extend."""
    if a is b:
        return True
    if a.ndim != b.ndim or a.dtype != b.dtype:
        return False
    cut = tuple(slice(min(extents)) for extents in zip(a.shape, b.shape))
    return bool(np.array_equal(a[cut], b[cut]))


class Family:
    """Graphs of a model that differ in extents of its inputs, from which others are derived.

    The model must be known to depend on these extents only through shapes. Two graphs show where
    extents are; a third shows which extents are multiples of which.

    Args:
        graphs: two or more, whose inputs differ in some extents, all of 2 or more.
        weights: the contents of parameters, states and constants, by name, of each.

    Attributes:
        numbers: of which extents are composed, those of inputs first.

    Raises:
        GraphError: they differ in more than extents.
    """

    def __init__(self, graphs: Sequence[Graph], weights: Sequence[Mapping[str, Array]]) -> None:
        one = dict[TensorSpec, TensorSpec]()  # equal types are one object, by which `at` knows them
        tensors = {name: one.setdefault(spec, spec) for name, spec in graphs[0].tensors.items()}
        first = replace(graphs[0], tensors=tensors)
        if len({len(graph.nodes) for graph in graphs}) > 1:
            raise GraphError(f"{[len(graph.nodes) for graph in graphs]} operators found")
        self.graph, self.numbers = first, Numbers()
        self._inputs = first.inputs(Role.INPUT)
        if any(self._inputs != graph.inputs(Role.INPUT) for graph in graphs):
            raise GraphError("other inputs found")
        self.names: list[dict[str, str]] = [{name: name for name in self._inputs} for _ in graphs]
        self._items: dict[str, dict[str, list[Term]]] = {}  # by node: attributes that differ
        self._cut: dict[str, tuple[list[Array], list[Term]]] = {}  # by weight: longest first
        self._checks: dict[str, Ints] = {}  # of values: places of extents, or -1 - extents
        self._alike: list[int] = []  # of nodes: the first that does the same to equal types
        self._slots: dict[str, int] = {}  # of values: those of one type, for all extents, have one
        for name in self._inputs:
            self._met(name, graphs)
        self._given = len(self.numbers.columns)
        if self.numbers.proportional:
            raise GraphError("extents in one ratio found")
        self._match(graphs, weights)

    @property
    def cut(self) -> Set[str]:
        """The weights whose lengths differ between graphs."""
        return self._cut.keys()

    @property
    def changed(self) -> Set[str]:
        """The nodes with an attribute that differs between graphs."""
        return self._items.keys()

    @property
    def given(self) -> list[Ints]:
        """The columns of numbers that inputs have."""
        return self.numbers.columns[: self._given]

    def _met(self, name: str, graphs: Sequence[Graph]) -> None:
        """Record the extents of a value of the first graph."""
        shapes = [graph.tensors[names[name]].shape for graph, names in zip(graphs, self.names)]
        if len({len(shape) for shape in shapes}) > 1:
            raise GraphError(f"value {name!r}: shapes {shapes} found")
        columns = zip(*shapes)
        self._checks[name] = tuple(
            -1 - column[0] if len(set(column)) == 1 else self.numbers.add(column)
            for column in columns
        )

    def _check(self, name: str, shape: Ints, numbers: list[int]) -> None:
        """Check the extents of a value, and record those that are new.

        Raises:
            GraphError: an extent that is constant, or equal to another, in all graphs is not so
                here.
        """
        places = self._checks[name]
        if len(places) != len(shape):
            raise GraphError(f"value {name!r}: another rank found")
        for place, now in zip(places, shape):
            if place < 0:
                fits = now == -1 - place
            elif place < len(numbers):
                fits = now == numbers[place]
            else:
                numbers.append(now)
                fits = now >= 2  # what repeats is written otherwise
            if not fits:
                raise GraphError(f"value {name!r}: another extent found, {now}")

    def _match(self, graphs: Sequence[Graph], weights: Sequence[Mapping[str, Array]]) -> None:
        """Find the names of the first graph's values in the others, and what differs."""
        first = graphs[0]
        for nodes in zip(*(graph.nodes for graph in graphs)):
            node = nodes[0]
            if len({(n.operator, len(n.inputs), len(n.outputs)) for n in nodes}) > 1:
                raise GraphError(f"{', '.join(n.label for n in nodes)} found")
            for values in zip(*(n.inputs for n in nodes)):
                self._called(values)
                if values[0] in first.roles and values[0] not in self._inputs:
                    self._weight(values, weights)
            if any(n.items != node.items for n in nodes):
                self._attributes(nodes)
            for values in zip(*(n.outputs for n in nodes)):
                self._called(values)
                self._met(values[0], graphs)
        if len({len(graph.roles) for graph in graphs}) > 1:
            raise GraphError("another number of weights found")
        for values in zip(*(graph.roles for graph in graphs)):
            given = values[0] in self._inputs
            if self._called(values, new=True) and not given:
                self._weight(values, weights)  # no node may read it, for what it was found to say
        for names, graph in zip(self.names, graphs):
            if len(set(names.values())) < len(names):
                raise GraphError("a value that is two others found")
            if tuple(names.get(name, name) for name in first.outputs) != graph.outputs:
                raise GraphError("other outputs found")
        self._group()

    def _group(self) -> None:
        """Find the nodes that are alike, so that what is known of a layer is known of the others.

        They say the same, of values of the same types, for all extents.
        """
        slots, firsts = dict[Hashable, int](), dict[Hashable, int]()
        for name, spec in self.graph.tensors.items():
            shape = self._checks.get(name, tuple(-1 - extent for extent in spec.shape))
            of = name if name in self._cut else (spec.dtype, shape)
            self._slots[name] = slots.setdefault(of, len(slots))
        for place, node in enumerate(self.graph.nodes):
            said = self._items.get(node.name, {})
            says = ((n, tuple(said.get(n, ())) or v) for n, v in node.items)
            reads = [self._slots[name] for name in node.inputs]
            self._alike.append(firsts.setdefault((node.operator, *says, *reads), place))

    def _called(self, values: tuple[str, ...], new: bool = False) -> bool:
        """Record that values of the graphs correspond; return whether they do.

        Raises:
            GraphError: they correspond to others, unless that may be.
        """
        same = [names.setdefault(values[0], y) == y for names, y in zip(self.names, values)]
        if not all(same) and not new:
            raise GraphError(f"values {values} found")
        return all(same)

    def _weight(self, values: tuple[str, ...], weights: Sequence[Mapping[str, Array]]) -> None:
        arrays = [held[name] for held, name in zip(weights, values)]
        if values[0] in self._cut or all(array is arrays[0] for array in arrays):
            return
        longest = sorted(arrays, key=lambda array: -array.size)
        if not all(_same_contents(longest[0], array) for array in arrays):
            raise GraphError(f"weights {values}, of other contents, found")
        shapes = [array.shape for array in arrays]
        if len(set(shapes)) > 1:
            self._cut[values[0]] = longest, [self.numbers.term(column) for column in zip(*shapes)]

    def _attributes(self, nodes: Sequence[Node]) -> None:
        """Record the attributes that differ, if they are shapes or positions.

        Raises:
            GraphError: they are something else.
        """
        node = nodes[0]
        found = self._items[node.name] = {}
        for items in zip(*(n.items for n in nodes)):
            name, values = items[0][0], [value for _, value in items]
            if all(item == items[0] for item in items):
                continue
            extents = node.spec.attributes[name].extents
            if not extents or len({len(value) for value in values}) > 1:
                raise GraphError(f"{node.label}: attributes {items} found")
            found[name] = [self.numbers.term(column) for column in zip(*values)]

    def given_at(self, shapes: Mapping[str, Ints]) -> list[int]:
        """Return the numbers of inputs with these shapes.

        Raises:
            GraphError: the shapes are not of the family.
        """
        numbers = list[int]()
        for name in self._inputs:
            self._check(name, shapes[name], numbers)
        return numbers

    def at(
        self, shapes: Mapping[str, Ints], first: int = 0
    ) -> tuple[Graph, dict[str, Array], list[int]]:
        """Return the graph for inputs with these shapes, its weights that differ, its numbers.

        first: the index of the first node that may differ from the first graph.

        Raises:
            GraphError: it cannot be derived.
        """
        known, numbers = self.graph, self.given_at(shapes)
        specs = dict[int, TensorSpec]()
        for name in known.tensors.keys() - known.producers.keys():
            specs.setdefault(self._slots[name], known.tensors[name])
        for name in self._inputs:
            specs[self._slots[name]] = replace(known.tensors[name], shape=shapes[name])
        weights, lengthened = dict[str, Array](), set(self._cut)

        def lengthen(names: Iterable[str]) -> None:
            for name in names:
                weights[name] = self._cut_at(name, numbers)
                spec = replace(known.tensors[name], shape=weights[name].shape)
                specs[self._slots[name]] = spec
                lengthened.discard(name)

        items, made = dict[int, Items](), dict[int, Signature]()
        for place in dict.fromkeys(self._alike):
            node = known.nodes[place]
            if place < first:
                made[place] = known.signature(node)
            else:
                lengthen(lengthened.intersection(node.inputs))
                if node.name in self._items:
                    items[place] = self._items_at(node, numbers)
                    node = node.saying(items[place])
                made[place] = bound(node, [specs[self._slots[name]] for name in node.inputs])
            for name, spec in zip(node.outputs, made[place].output_specs):
                self._check(name, spec.shape, numbers)
                specs.setdefault(self._slots[name], spec)
        lengthen(set(lengthened))
        nodes = [
            node.saying(items[like]) if like in items else node
            for node, like in zip(known.nodes, self._alike)
        ]
        tensors = {name: specs[slot] for name, slot in self._slots.items()}
        found = replace(known, nodes=tuple(nodes), tensors=tensors)
        found.know(zip(known.by_name, map(made.__getitem__, self._alike)))
        return found, weights, numbers

    def _cut_at(self, name: str, numbers: list[int]) -> Array:
        """Return a weight cut to the lengths that extents need.

        Raises:
            GraphError: it would have to be longer than any that is known.
        """
        arrays, terms = self._cut[name]
        shape = tuple(term.at(numbers) for term in terms)
        for array in arrays:
            if all(0 <= now <= most for now, most in zip(shape, array.shape)):
                return array[tuple(map(slice, shape))]
        raise GraphError(f"weight {name!r}: more rows needed")

    def _items_at(self, node: Node, numbers: list[int]) -> Items:
        """Return the attributes of a node for which numbers are others."""
        terms = self._items.get(node.name, {})
        says = {name: tuple(term.at(numbers) for term in each) for name, each in terms.items()}
        return tuple((n, says.get(n, v)) for n, v in node.items)

    def evaluated(self, shapes: Mapping[str, Ints], weights: Mapping[str, Array]) -> Array:
        """Return what the graph for inputs with these shapes makes of constants, its only output.

        It is computed at once: shapes are those of arrays, and no signature is needed.

        weights: the contents of constants of the first graph, by name.

        Raises:
            GraphError: the graph cannot be derived.
        """
        numbers, known = self.given_at(shapes), dict[str, Array]()
        nodes, (output,) = self.graph.nodes, self.graph.outputs
        last_use = {name: node.name for node in nodes for name in node.inputs}
        for node in nodes:
            for name in node.inputs:
                if name not in known:
                    known[name] = (
                        self._cut_at(name, numbers) if name in self._cut else weights[name]
                    )
            dtypes = [self.graph.tensors[name].dtype for name in node.outputs]
            at = dict(self._items_at(node, numbers))
            try:
                with np.errstate(all="ignore"):  # of what is not selected afterwards
                    made = node.spec.run(at, *(known[name] for name in node.inputs), dtypes=dtypes)
            except (ValueError, IndexError) as error:
                raise GraphError(f"{node.label}: {error}") from None
            for name, array in zip(node.outputs, made):
                self._check(name, np.shape(array), numbers)
                known[name] = np.asarray(array)
            for name in set(node.inputs):
                if last_use[name] == node.name and name != output:
                    del known[name]
        return known[output]
