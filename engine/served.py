"""A served graph as it is launched, and that for other extents out of those for some.

What passes make of a graph is a graph too (`engine.prepare`): where it differs between extents as
shapes do alone, that for others is arithmetic on it (`ir/extents.py`) and takes no pass. So are
the boxes and shapes by which values are seen in others' memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from soapstone.engine.constants import Constants
from soapstone.engine.lower import View
from soapstone.engine.prepare import Prepared
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import Family, Ints, Term
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.records import dataclass


@dataclass(frozen=True, eq=False)
class Served:
    """What is bound of a graph whose weights are constant.

    Attributes:
        weights: by name. prologue: the graph of what they alone determine.
        constants: both, for kernels. prepared: the rest as it is launched.
    """

    weights: Mapping[str, Array]
    prologue: Graph
    constants: Constants
    prepared: Prepared

    @cached_property
    def whole(self) -> Graph:
        """Both graphs as one.

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


class ServedFamily:
    """What is bound of a model for extents of its inputs, by that for some.

    Args:
        made: of graphs that are a `Family`, two or more.

    Attributes:
        numbers: that extents are made of.

    Raises:
        GraphError: they differ in more than extents.
    """

    def __init__(self, made: Sequence[Served]) -> None:
        one, *others = made
        self._one = one
        self._family = Family([each.whole for each in made], [each.weights for each in made])
        self.numbers = self._family.numbers
        # Of values seen otherwise: a number of how, that view, and the terms of its numbers.
        self._views: dict[str, tuple[int, View, tuple[Term, ...]]] = {}
        looked = dict[Hashable, int]()
        for other, names in zip(others, self._family.names[1:]):
            _check_alike(one.prepared, other.prepared, names)
        for value, view in one.prepared.seen.items():
            looks = [
                (each.prepared.seen[names.get(value, value)], names)
                for each, names in zip(made, self._family.names)
            ]
            for look, names in looks:
                if look.root != names.get(view.root, view.root) or not _alike(view, look):
                    raise GraphError(f"value {value!r}: views {view} and {look} found")
            columns = list(zip(*(_numbers(look) for look, _ in looks)))
            if any(len(set(column)) > 1 for column in columns):
                terms = tuple(self.numbers.term(column) for column in columns)
                how = looked.setdefault((view.steps, view.box, terms), len(looked))
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

    def at(self, shapes: Mapping[str, Ints]) -> tuple[Served, list[int]]:
        """Return what is bound for inputs of these shapes, and the numbers there.

        Raises:
            GraphError: it is not known.
        """
        whole, cut, numbers = self._family.at(shapes, self._first)
        one, before = self._one, self._one.prepared
        count = len(one.prologue.nodes)
        lowered = replace(
            before.graph,
            nodes=whole.nodes[count:],
            tensors={name: whole.tensors[name] for name in before.graph.tensors},
        )
        lowered.know({node.name: whole.signature(node) for node in lowered.nodes})
        seen, looks = dict(before.seen), dict[int, View]()
        for value, (how, view, terms) in self._views.items():
            if how not in looks:
                looks[how] = _moved(view, [term.at(numbers) for term in terms])
            seen[value] = View(view.root, looks[how].steps, looks[how].box)
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
        return Served(weights, prologue, constants, prepared), numbers


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


__all__ = ["Served", "ServedFamily"]
