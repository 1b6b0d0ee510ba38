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
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from soapstone.engine.session import Bound
from soapstone.frontend.inference.families import Contents, Known, alike
from soapstone.frontend.inference.snapshot_places import Shapes
from soapstone.frontend.inference.sources import Source
from soapstone.frontend.inference.steps import MOST_STEPS, Rows, run_in_steps, steps_of
from soapstone.ir.analysis.samples import meeting_samples, same_for_samples
from soapstone.ir.by_extents import Rule, Said
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import differs
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role

_KINDS, _NUMBERS = 64, 256  # kinds of rows, and numbers of a kind, that are told apart

Find = Callable[[Shapes], Bound | None]  # returns what is bound for shapes


class _Kind:
    """The rows that have one shape in each input.

    Attributes:
        numbers: the numbers of rows whose graphs are known to be alike, bound or not.
        taken: the steps taken so far, by the number of rows.
        seen: a number of rows with its graph, with which others are compared.
        single: the graph of one row, where much of it is written otherwise than of several.
        apart: whether rows may be run in steps, as far as is known.
        told: the number of rows that another process has found to be apart, if any.
        contents: what has to be said of each number of rows for that.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.taken: OrderedDict[int, int] = OrderedDict()
        self.seen: tuple[int, Known] | None = None
        self.single: Known | None = None
        self.contents: Contents | None = None
        self.apart = True
        self.told: set[int] = set()


class InRows:
    """What is known of how a model treats rows.

    Args:
        source: the model, all of whose inputs begin with one symbolic dim (`Source.rows`).
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kinds: OrderedDict[Shapes, _Kind] = OrderedDict()
        self._lock = threading.Lock()
        self._noting = threading.Lock()  # while graphs are compared, by the warm-up's thread too

    def undecided(self, given: Mapping[str, Array], told: bool = True) -> bool:
        """Return whether the graph for these inputs would show whether rows are independent.

        told: False if what another process has found is to be found again, with more numbers.
        """
        with self._lock:
            kind, number = self._kind(given)
            seen, known = kind.seen, kind.numbers or (told and kind.told)
            return bool(number and kind.apart and not known and seen and seen[0] != number)

    def note(self, given: Mapping[str, Array], known: Known) -> None:
        """Record the graph for some inputs, whether it is bound later or not."""
        with self._lock:
            kind, number = self._kind(given)
        with self._noting:  # and not the other, for which those wait who know enough
            self._note(kind, number, known)

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
                kind.apart, kind.seen, kind.told = False, None, set()
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
            numbers = kind.numbers | kind.told

        def bound_for(number: int) -> Bound | None:
            return find(tuple((number, *array.shape[1:]) for array in given.values()))

        known = {n: bound for n in numbers if (bound := bound_for(n)) is not None}
        steps = steps_of(rows, known)
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
        of = {
            number: Rows(bound.feeds, bound.results, partial(run, bound))
            for number, bound in known.items()
        }
        return run_in_steps(self._source.name, given, steps, of, out)

    def apart(self, given: Mapping[str, Array]) -> bool:
        """Return whether all that are `MOST_STEPS` steps of as many rows, or fewer, may be so run.

        As `_note` found of two graphs, and contents say for each number of rows.
        """
        with self._lock:
            kind, number = self._kind(given)
            known, contents = number in kind.numbers, kind.contents
        if not known or not contents:
            return known
        for rows in range(1, MOST_STEPS * number + 1):
            shapes = {name: (rows, *array.shape[1:]) for name, array in given.items()}
            try:
                if rows != number:
                    contents.check(shapes)
            except GraphError:
                return False
        return True

    def note_apart(self, given: Mapping[str, Array]) -> None:
        """Record what `apart` said in another process."""
        with self._lock:
            kind, number = self._kind(given)
            kind.told = {number}

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
