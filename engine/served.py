"""A served graph as it is launched, and that for other extents out of those for two.

What passes make of a graph is a graph too (`engine.prepare`): where it differs between two extents
as shapes do alone, that for others is arithmetic on it (`ir/extents.py`) and takes no pass. So are
the boxes and shapes by which values are seen in others' memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from soapstone.engine.constants import Constants
from soapstone.engine.lower import View
from soapstone.engine.prepare import Prepared
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import Between, Ints, same
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


class ServedBetween:
    """What is bound of a model for extents of its inputs, by that for two.

    Args:
        one, other: of graphs between which there is `Between`.

    Raises:
        GraphError: they differ in more than extents.
    """

    def __init__(self, one: Served, other: Served) -> None:
        self._one = one
        self._between = Between(one.whole, other.whole, {**other.weights, **one.weights})
        names = self._between.names
        _check_alike(one.prepared, other.prepared, names)
        self._views: dict[str, tuple[View, View]] = {}  # those that differ, in both
        for value, view in one.prepared.seen.items():
            looks = other.prepared.seen[names.get(value, value)]
            if looks.root != names.get(view.root, view.root) or not _alike(view, looks):
                raise GraphError(f"value {value!r}: views {view} and {looks} found")
            if (view.steps, view.box) != (looks.steps, looks.box):
                self._views[value] = view, looks
            self._between.check(_numbers(view), _numbers(looks))
        if not one.whole.tensors.keys() <= {*one.whole.roles, *one.whole.producers}:
            raise GraphError("a value that nobody makes found")
        # Constants are others where weights go along extents, or what is made of them does.
        other_ones = set(self._between.cut)
        for node in one.prologue.nodes:
            if node.name in self._between.changed or not other_ones.isdisjoint(node.inputs):
                other_ones.update(node.outputs)
        self._same = frozenset(one.constants) - other_ones
        self._first = 0 if other_ones else len(one.prologue.nodes)
        one.constants.keep_promises()

    def at(self, shapes: Mapping[str, Ints]) -> Served:
        """Return what is bound for inputs of these shapes.

        Raises:
            GraphError: it is not known.
        """
        whole, cut = self._between.at(shapes, self._first)
        one, before = self._one, self._one.prepared
        numbers = self._between.numbers(shapes)
        count = len(one.prologue.nodes)
        lowered = replace(
            before.graph,
            nodes=whole.nodes[count:],
            tensors={name: whole.tensors[name] for name in before.graph.tensors},
        )
        lowered.know({node.name: whole.signature(node) for node in lowered.nodes})
        seen = dict(before.seen)
        for value, (view, looks) in self._views.items():
            ends = _numbers(view), _numbers(looks)
            seen[value] = _moved(view, self._between.extents(*ends, numbers))
        prepared = Prepared(lowered, before.strategy, before.constants, seen)
        if self._first:  # and no constant is another one
            return replace(one, prepared=prepared)
        prologue = replace(
            one.prologue,
            nodes=whole.nodes[:count],
            tensors={name: whole.tensors[name] for name in one.prologue.tensors},
        )
        weights = {**one.weights, **cut}
        found = one.constants.found
        constants = Constants(weights, prologue, found, others=one.constants, same=self._same)
        return Served(weights, prologue, constants, prepared)

    def foretells(self, shapes: Mapping[str, Ints], made: Served) -> bool:
        """Return whether arithmetic gives what was made for inputs of these shapes."""
        try:
            found = self.at(shapes)
            if not same(made.whole, found.whole, made.weights, found.weights):
                return False
            names = _names(found.whole, made.whole)
            _check_alike(found.prepared, made.prepared, names)
        except GraphError:
            return False
        mine, theirs = found.prepared.seen, made.prepared.seen
        return all(
            replace(view, root=names.get(view.root, view.root)) == theirs[names.get(value, value)]
            for value, view in mine.items()
        )


def _names(one: Graph, other: Graph) -> dict[str, str]:
    """Return what values of a graph are called in another of the same nodes."""
    sides = zip(one.nodes, other.nodes)
    return {
        x: y for a, b in sides for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs))
    }


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


def _moved(view: View, numbers: Ints) -> View:
    """Return a view with other numbers."""
    rest = iter(numbers)
    box = view.box and tuple(tuple(next(rest) for _ in side) for side in view.box)
    steps = tuple((kind, tuple(next(rest) for _ in argument)) for kind, argument in view.steps)
    return View(view.root, steps, box)  # type: ignore[arg-type]


__all__ = ["Served", "ServedBetween"]
