"""A graph over constant weights as it is launched, and its derivation for other extents.

The lowering passes make a graph of a graph (`engine.prepare`). Where the lowered graphs for several
input shapes differ in extents alone, the one for another shape follows by arithmetic on extents
(`ir/extents.py`), without running a pass. The same holds for its views: the boxes and shapes by
which values lie in the memory of others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from soapstone.engine.constants import Constants
from soapstone.engine.lower import View
from soapstone.engine.prepare import Prepared
from soapstone.ir.errors import GraphError
from soapstone.ir.extent_terms import Ints, Term
from soapstone.ir.extents import Family
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.records import dataclass


@dataclass(frozen=True, eq=False)
class InferenceGraph:
    """A graph whose weights are constant, ready to be bound.

    Attributes:
        weights: by name.
        prologue: the nodes that weights alone determine; they run when the graph is bound.
        constants: the weights and the results of the prologue, as kernels read them.
        prepared: the other nodes, lowered.
    """

    weights: Mapping[str, Array]
    prologue: Graph
    constants: Constants
    prepared: Prepared

    @cached_property
    def whole(self) -> Graph:
        """The prologue and the lowered nodes as one graph.

        Raises:
            GraphError: they have names in common.
        """
        first, rest = self.prologue, self.prepared.graph
        made = [name for graph in (first, rest) for node in graph.nodes for name in node.outputs]
        names = [node.name for graph in (first, rest) for node in graph.nodes]
        roles = {name: role for name, role in rest.roles.items() if name not in first.producers}
        roles |= first.roles
        if any(len(set(each)) < len(each) for each in (names, [*made, *roles])) or rest.updates:
            raise GraphError("names in common found")
        return replace(
            rest,
            nodes=(*first.nodes, *rest.nodes),
            tensors={**first.tensors, **rest.tensors},
            roles=roles,
        )


class InferenceFamily:
    """Graphs of one model for several input shapes, from which that for another is derived.

    Args:
        made: two graphs or more, which are a `Family`.

    Attributes:
        numbers: the numbers of which all extents are composed.

    Raises:
        GraphError: the graphs differ in more than extents.
    """

    def __init__(self, made: Sequence[InferenceGraph]) -> None:
        one, *others = made
        self._one = one
        self._family = Family([each.whole for each in made], [each.weights for each in made])
        self.numbers = self._family.numbers
        # Of values seen otherwise: a number of how, that view, and the terms of its numbers.
        self._views: dict[str, tuple[int, View, tuple[Term, ...]]] = {}
        known = dict[Hashable, int]()
        for other, names in zip(others, self._family.names[1:]):
            _check_alike(one.prepared, other.prepared, names)
        for value, view in one.prepared.seen.items():
            views = [
                (each.prepared.seen[names.get(value, value)], names)
                for each, names in zip(made, self._family.names)
            ]
            for theirs, names in views:
                if theirs.root != names.get(view.root, view.root) or not _alike(view, theirs):
                    raise GraphError(f"value {value!r}: views {view} and {theirs} found")
            columns = list(zip(*(_numbers(theirs) for theirs, _ in views)))
            if any(len(set(column)) > 1 for column in columns):
                terms = tuple(self.numbers.term(column) for column in columns)
                how = known.setdefault((view.steps, view.box, terms), len(known))
                self._views[value] = how, view, terms
        if not one.whole.tensors.keys() <= {*one.whole.roles, *one.whole.producers}:
            raise GraphError("a value that nobody makes found")
        # Constants are others where weights go along extents, or what is made of them does.
        other_ones = set(self._family.cut)
        for node in one.prologue.nodes:
            if node.name in self._family.changed or not other_ones.isdisjoint(node.inputs):
                other_ones.update(node.outputs)
        self._same = frozenset(one.constants) - other_ones
        self._first = 0 if other_ones else len(one.prologue.nodes)
        one.constants.keep_promises()

    def at(self, shapes: Mapping[str, Ints]) -> tuple[InferenceGraph, list[int]]:
        """Return the graph for inputs of these shapes, and the values of `numbers` for them.

        Raises:
            GraphError: it cannot be derived.
        """
        whole, cut, numbers = self._family.at(shapes, self._first)
        one, before = self._one, self._one.prepared
        count = len(one.prologue.nodes)
        lowered = replace(
            before.graph,
            nodes=whole.nodes[count:],
            tensors={name: whole.tensors[name] for name in before.graph.tensors},
        )
        lowered.know((node.name, whole.signature(node)) for node in lowered.nodes)
        seen, views = dict(before.seen), dict[int, View]()
        for value, (how, view, terms) in self._views.items():
            if how not in views:
                views[how] = _moved(view, [term.at(numbers) for term in terms])
            seen[value] = View(view.root, views[how].steps, views[how].box)
        prepared = Prepared(lowered, before.strategy, before.constants, seen)
        if self._first:  # and no constant is another one
            return replace(one, prepared=prepared), numbers
        prologue = replace(
            one.prologue,
            nodes=whole.nodes[:count],
            tensors={name: whole.tensors[name] for name in one.prologue.tensors},
        )
        weights = {**one.weights, **cut}
        found = one.constants.found
        constants = Constants(weights, prologue, found, others=one.constants, same=self._same)
        return InferenceGraph(weights, prologue, constants, prepared), numbers


def _check_alike(one: Prepared, other: Prepared, names: Mapping[str, str]) -> None:
    """Check that both are launched alike, in whatever extents.

    Raises:
        GraphError: they are not, or by configurations, which are of extents.
    """

    def called(values: Iterable[str]) -> set[str]:
        return {names.get(value, value) for value in values}

    plain = all(each.strategy.plain for each in (one, other))
    orders = {names.get(v, v): order for v, order in one.strategy.layouts.items()}
    seen = called(one.seen) == other.seen.keys()
    if not (plain and seen and orders == other.strategy.layouts):
        raise GraphError("launches that are not alike found")


def _alike(one: View, other: View) -> bool:
    """Return whether views differ in numbers alone, those of axes' orders not among them."""
    return (
        len(_numbers(one)) == len(_numbers(other))
        and (one.box is None) == (other.box is None)
        and [kind for kind, _ in one.steps] == [kind for kind, _ in other.steps]
        and all(
            len(a) == len(b) and (kind != "transpose" or a == b)
            for (kind, a), (_, b) in zip(one.steps, other.steps)
        )
    )


def _numbers(view: View) -> Ints:
    """Return the numbers of a view: of its box, then of its steps."""
    box = () if view.box is None else (*view.box[0], *view.box[1])
    return (*box, *(number for _, argument in view.steps for number in argument))


def _moved(view: View, numbers: Iterable[int]) -> View:
    """Return a view with other numbers."""
    rest = iter(numbers)
    box = view.box and tuple(tuple(next(rest) for _ in side) for side in view.box)
    steps = tuple((kind, tuple(next(rest) for _ in argument)) for kind, argument in view.steps)
    return View(view.root, steps, box)  # type: ignore[arg-type]


__all__ = ["InferenceFamily", "InferenceGraph"]
