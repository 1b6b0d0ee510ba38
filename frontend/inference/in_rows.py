"""Batches of a new size, answered by runs of sizes that are bound already.

This is possible if each row of the outputs depends only on its row of the inputs, and the model's
graphs for two numbers of rows differ in extents only. Then any number of rows is run in steps of
bound sizes; the last step may repeat rows of the one before. So the first answer for a new size
waits at most for a graph to be made, not for its binding. A size that comes again is bound by a
background thread once it has taken `MOST_STEPS` steps in all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from soapstone.engine.session import Bound
from soapstone.frontend.exchange import targets
from soapstone.frontend.inference.families import Contents, Known, alike
from soapstone.frontend.inference.sources import Source
from soapstone.ir.analysis.samples import meeting_samples, same_for_samples
from soapstone.ir.by_extents import Rule, Said
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import differs
from soapstone.ir.graph import Graph
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
        single: the graph of one row, where much of it is written otherwise than of several.
        apart: whether rows may be run in steps, as far as is known.
        contents: what has to be said of each number of rows for that.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.taken: OrderedDict[int, int] = OrderedDict()
        self.seen: tuple[int, Known] | None = None
        self.single: Known | None = None
        self.contents: Contents | None = None
        self.apart = True


class InRows:
    """What is known of how a model treats rows.

    Args:
        source: the model, all of whose inputs begin with one symbolic dim (`Source.rows`).
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kinds: OrderedDict[Shapes, _Kind] = OrderedDict()
        self._lock = threading.Lock()  # held while graphs are compared, by the warm-up's thread too

    def undecided(self, given: Mapping[str, Array]) -> bool:
        """Return whether the graph for these inputs would show whether rows are independent."""
        with self._lock:
            kind, number = self._kind(given)
            seen = kind.seen
            return bool(number and kind.apart and not kind.numbers and seen and seen[0] != number)

    def note(self, given: Mapping[str, Array], known: Known) -> None:
        """Record the graph for some inputs, whether it is bound later or not."""
        with self._lock:
            self._note(*self._kind(given), known)

    def _note(self, kind: _Kind, number: int, known: Known) -> None:
        if not number or not kind.apart or number in kind.numbers:
            return
        if kind.seen is None:
            kind.seen = number, known
            return
        first, other = kind.seen
        if first == number:
            return
        several, few = (other, known) if number == 1 else (known, other)
        try:
            _ = several.graph, several.choices, few.graph, few.choices
        except GraphError:
            return  # what is bound of one is known alone
        try:
            kind.contents = rows_apart(several, few, self._source.weights())
            kind.numbers |= {first, number}
        except GraphError:
            if 1 in (first, number) and alike(several.notes, few.notes):
                kind.single = few
                if first == 1:
                    kind.seen = number, known
            elif number > 1:
                kind.apart, kind.seen = False, None
                kind.numbers.clear()
        if kind.single is not None and kind.numbers and _told(kind.single) == _told(several):
            kind.numbers.add(1)

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
        with self._lock:
            kind, rows = self._kind(given)
            numbers = tuple(kind.numbers)

        def bound_for(number: int) -> Bound | None:
            return find(tuple((number, *array.shape[1:]) for array in given.values()))

        known = {n: bound for n in numbers if (bound := bound_for(n)) is not None}
        steps = _steps(rows, known)
        if steps and kind.contents and rows not in kind.taken:
            try:
                kind.contents.check({name: array.shape for name, array in given.items()})
            except GraphError:
                return None
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


def rows_apart(several: Known, other: Known, weights: Mapping[str, Array]) -> Contents:
    """Return what must be said of a number of rows if its rows are as those of two others: apart.

    several, other: what is known for two numbers of rows, the first of 2 or more. weights: of the
    model.

    Raises:
        GraphError: rows of outputs depend on other rows than theirs, or on how many there are, or
            are not known not to; says where.
    """
    if not alike(several.notes, other.notes):
        raise GraphError("the number of rows")
    found = zip(*(_constants(known.graph) for known in (several, other)))
    if any(a != b for a, b in found):  # contents for more rows are unknown
        raise GraphError("a constant of as many rows")
    if _told(several) != _told(other):
        raise GraphError("contents that depend on the number of rows")
    known = {**weights, **several.constants, **other.constants}
    where = differs(several.graph, other.graph, known)
    where = where or meeting_samples(several.graph, other.graph)
    if where:
        raise GraphError(where)
    return Contents([several, other], weights, lambda made: same_for_samples(*made))


def _constants(graph: Graph) -> list[tuple[int, ...]]:
    return [graph.tensors[n].shape for n, role in graph.roles.items() if role is not Role.INPUT]


def _told(known: Known) -> list[tuple[Rule, Hashable]]:
    """Return what was said of contents."""
    return [(each.rule, each.chosen) for each in known.choices if isinstance(each, Said)]


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
