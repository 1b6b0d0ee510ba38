"""Batches of a new size, answered by runs of sizes that are bound already.

This is possible if each row of the outputs depends only on its row of the inputs, and the model's
graphs for two numbers of rows differ in extents only. Then any number of rows is run in steps of
bound sizes; the last step may repeat rows of the one before. So the first answer for a new size
waits at most for a graph to be made, not for its binding. A size that comes again is bound by a
background thread once it has taken `MOST_STEPS` steps in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from soapstone.engine.session import Bound
from soapstone.frontend.exchange import targets
from soapstone.frontend.inference.families import Known, alike
from soapstone.frontend.inference.sources import Source
from soapstone.ir.analysis.samples import meeting_samples, same_for_samples
from soapstone.ir.by_extents import Said
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import differs
from soapstone.ir.tensor import Array, Role

MOST_STEPS = 8  # for one number; beyond, binding takes less than what larger batches gain
_KINDS, _NUMBERS = 64, 256  # kinds of rows, and numbers of a kind, that are told apart

Shapes = tuple[tuple[int, ...], ...]  # of the inputs, in their order
Find = Callable[[Shapes], Bound | None]  # returns what is bound for shapes


class _Kind:
    """The rows that have one shape in each input.

    Attributes:
        numbers: the numbers of rows whose graphs are known to be alike, bound or not.
        taken: the steps taken so far, by the number of rows.
        seen: a number of rows with its graph, with which others are compared.
        apart: whether rows may be run in steps, as far as is known.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.taken: OrderedDict[int, int] = OrderedDict()
        self.seen: tuple[int, Known] | None = None
        self.apart = True


class InRows:
    """What is known of how a model treats rows.

    Args:
        source: the model, all of whose inputs begin with one symbolic dim (`Source.rows`).
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kinds: OrderedDict[Shapes, _Kind] = OrderedDict()

    def undecided(self, given: Mapping[str, Array]) -> bool:
        """Return whether the graph for these inputs would show whether rows are independent."""
        kind, number = self._kind(given)
        seen = kind.seen
        return bool(number and kind.apart and not kind.numbers and seen and seen[0] != number)

    def note(self, given: Mapping[str, Array], known: Known) -> None:
        """Record the graph for some inputs, whether it is bound later or not."""
        kind, number = self._kind(given)
        if not number or not kind.apart:
            return
        if kind.seen is None:
            kind.seen = number, known
            return
        first, other = kind.seen
        if first == number:
            return
        several, few = (other, known) if number == 1 else (known, other)
        try:
            where = where_rows_meet(several, few, self._source.weights())
        except GraphError:
            return  # what is bound of one is known alone
        if not where:
            kind.numbers |= {first, number}
        elif first == 1 and alike(other.notes, known.notes):  # much is written otherwise
            kind.seen = number, known
        elif number > 1:
            kind.apart = False
            kind.seen = None
            kind.numbers.clear()

    def run(
        self,
        given: Mapping[str, Array],
        out: Mapping[str, Any],
        find: Find,
        run: Callable[[Bound], None],
        later: Callable[[], bool],
    ) -> dict[str, Array] | None:
        """Return the outputs by name for a new number of rows; None if it must be bound.

        given, out: as of `InferenceSession.run`. find: returns the bound graph for shapes. run:
        runs it. later: begins to bind the graph for this number in the background, and returns
        whether it does.
        """
        kind, rows = self._kind(given)

        def bound_for(number: int) -> Bound | None:
            return find(tuple((number, *array.shape[1:]) for array in given.values()))

        known = {n: bound for n in kind.numbers if (bound := bound_for(n)) is not None}
        steps = _steps(rows, known)
        taken = kind.taken.pop(rows, 0) + len(steps)
        if not steps or (taken > MOST_STEPS and not later()):
            return None
        kind.taken[rows] = taken
        if len(kind.taken) > _NUMBERS:
            kind.taken.popitem(last=False)
        some = next(iter(known.values())).results
        whole = {
            name: np.broadcast_to(np.zeros((), array.dtype), (rows, *array.shape[1:]))
            for name, array in some.items()
        }
        into = targets(self._source.name, out, whole)
        found = {
            name: into[name] if name in into else np.empty(array.shape, array.dtype)
            for name, array in whole.items()
        }
        if any(np.may_share_memory(a, b) for a in into.values() for b in given.values()):
            given = {name: array.copy() for name, array in given.items()}
        for begin, number in steps:
            bound, end = known[number], min(begin + number, rows)
            for name, feed in bound.feeds.items():
                feed[: end - begin] = given[name][begin:end]
                feed[end - begin :] = given[name][-1:]
            run(bound)
            for name, array in found.items():
                array[begin:end] = bound.results[name][: end - begin]
        return found

    def _kind(self, given: Mapping[str, Array]) -> tuple[_Kind, int]:
        """Return the rows like those of inputs and their number; 0 if inputs differ in it."""
        key = tuple(array.shape[1:] for array in given.values())
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        numbers = {array.shape[0] for array in given.values()}
        return kind, numbers.pop() if len(numbers) == 1 else 0


def where_rows_meet(several: Known, other: Known, weights: Mapping[str, Array]) -> str:
    """Return where outputs depend on other rows than theirs, or on how many there are; "" nowhere.

    Where it is not told that they do not, they count as if they did.

    several, other: what is known for two numbers of rows, the first of 2 or more. weights: of the
    model.

    Raises:
        GraphError: a graph cannot be derived, although its lowered graph can.
    """
    if not alike(several.notes, other.notes):
        return "the number of rows"
    if _lengthens(several, other):
        return "a constant of as many rows"
    weights = {**weights, **several.constants, **other.constants}
    where = differs(several.graph, other.graph, weights)
    return where or meeting_samples(several.graph, other.graph)


def _lengthens(one: Known, other: Known) -> bool:
    """Return whether constants grow with the number of rows: contents for more rows are unknown."""
    graphs = one.graph, other.graph
    found = [
        (graphs[0].tensors[x], graphs[1].tensors[y])
        for x, y in zip(*(g.roles for g in graphs))
        if graphs[0].roles[x] is not Role.INPUT
    ]
    said = [
        [each.made for each in known.choices if isinstance(each, Said)] for known in (one, other)
    ]
    if len(said[0]) != len(said[1]):
        return True
    return any(a.shape != b.shape for a, b in found) or not all(
        same_for_samples(*made) for made in zip(*said)
    )


def _steps(rows: int, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the steps for so many rows, each a first row and a size; none if they are too many.

    The last step may begin at rows of the one before. If there are fewer rows than the smallest
    size, the only step reaches beyond them.
    """
    sizes, steps, begin = sorted(numbers, reverse=True), list[tuple[int, int]](), 0
    while sizes and begin < rows:
        number = next((n for n in sizes if n <= rows - begin), sizes[-1])
        begin = max(0, min(begin, rows - number))
        steps.append((begin, number))
        begin += number
        if len(steps) > MOST_STEPS:
            return []
    return steps
