"""A model's graph for a new shape of inputs, out of those for two others.

A graph is translated and folded for the first shapes that come. Where two such graphs differ in
extents alone (`ir/extents.py`), and the model is known to depend on these by shapes alone
(`Source.noted`), the graph for another is the first one with other extents. The first time, that
is compared with the one that is made: a pair that foretold it is trusted from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.engine.lower.by_extents import Choice
from soapstone.engine.served import Served, ServedBetween
from soapstone.frontend.inference.sources import Notes
from soapstone.ir.errors import GraphError
from soapstone.ir.extents import Between, same
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.records import dataclass

if TYPE_CHECKING:
    from soapstone.ir.files.layouts import Layouts

_MOST = 8  # graphs, pairs of them that are trusted, and others, that are kept
Shapes = Mapping[str, tuple[int, ...]]  # of inputs, by name


@dataclass(frozen=True, eq=False)
class Known:
    """A graph that is ready to be bound.

    Attributes:
        make: returns the graph, with what its weights allow to fold, and the contents of what it
            was made with, and of what is another than the model's. outputs: what its results are
            called.
        given: the graph as it was, None where it was never made. layouts: see `InferenceSession`.
        notes: see `Source`; None where extents may matter otherwise than by shapes.
        choices: what passes chose by its extents.
        served: what is bound of it, where that is known.
    """

    make: Callable[[], tuple[Graph, Mapping[str, Array]]]
    outputs: tuple[str, ...]
    given: Graph | None = None
    layouts: Layouts | None = None
    notes: Notes | None = field(default=None)
    choices: tuple[Choice, ...] = ()
    served: Served | None = None

    @staticmethod
    def of(graph: Graph, constants: Mapping[str, Array], *others: Any) -> Known:
        """Return a graph that is made already; others: the fields that follow `make`."""
        return Known(lambda: (graph, constants), *others)

    @cached_property
    def _made(self) -> tuple[Graph, Mapping[str, Array]]:
        return self.make()

    @property
    def graph(self) -> Graph:
        """The graph.

        Raises:
            GraphError: it is not known, although what is bound of it is.
        """
        return self._made[0]

    @property
    def constants(self) -> Mapping[str, Array]:
        """The contents that come with it."""
        return self._made[1]


class Extended:
    """The graphs of a model that were made last, and what lies between them."""

    def __init__(self) -> None:
        self._seen: list[tuple[Shapes, Known]] = []
        self._pairs: list[_Pair] = []
        self._lock = threading.Lock()  # of who takes note; who asks waits for none

    def note(self, shapes: Shapes, known: Known, weights: Mapping[str, Array]) -> None:
        """Take note of a graph that was made for inputs of these shapes."""
        with self._lock:
            self._note(shapes, known, weights)

    def _note(self, shapes: Shapes, known: Known, weights: Mapping[str, Array]) -> None:
        self._compare(shapes, known, weights)
        if known.notes is None:
            return
        found: dict[bool, _Pair] = {}  # the latest of one number, and of several
        for before, other in self._seen:
            if before.keys() != shapes.keys() or before == shapes or other.notes is None:
                continue
            if not alike(known.notes, other.notes, between=True):
                continue
            held = {**weights, **known.constants, **other.constants}
            with suppress(GraphError):
                pair = _Pair(Between(known.graph, other.graph, held), known, other)
                found.setdefault(pair.between.one_number, pair)
            if True in found:
                break
        pairs = [*found.values(), *self._pairs]
        kept = [[pair for pair in pairs if pair.trusted is each] for each in (True, False)]
        self._pairs = [pair for each in kept for pair in each[:_MOST]]
        self._seen = [(shapes, known), *self._seen][:_MOST]

    def at(self, shapes: Shapes, plain: bool = False) -> Known | None:
        """Return the graph for inputs of these shapes, or None where it has to be made.

        plain: whether it is launched as those of `serve` are.
        """
        trusted = [pair for pair in self._pairs if pair.trusted]
        for pair in trusted if plain else ():
            served = pair.served_at(shapes)
            if served is not None:
                return served
        for seen, known in self._seen:
            if seen == shapes:
                return known
        for pair in trusted:
            found = pair.at(shapes)
            if found is not None:
                return Known.of(*found, pair.known.outputs, None, None, pair.known.notes)
        return None

    @property
    def waits(self) -> bool:
        """Whether there are pairs of which it is not known yet how others are launched."""
        return any(pair.trusted and pair.served is None for pair in self._pairs)

    def serve(self, make: Callable[[Known], Served]) -> None:
        """Find out how graphs are launched that trusted pairs foretell.

        It is taken to be arithmetic too where that holds for all others that were made, at least
        for a third.

        make: returns how a graph is.
        """
        for pair in [each for each in self._pairs if each.trusted and each.served is None]:
            pair.serve(make, self._seen)

    def _compare(self, shapes: Shapes, made: Known, weights: Mapping[str, Array]) -> None:
        """Trust the pairs that foretell the graph that was made for these shapes; drop others."""
        kept = list[_Pair]()
        for pair in self._pairs:
            found = pair.at(shapes)
            if found is not None:
                held = {**weights, **made.constants}
                foretold = {**weights, **pair.known.constants, **found[1]}
                noted = alike(made.notes, pair.known.notes, between=True)
                if not noted or not same(made.graph, found[0], held, foretold):
                    continue
                before = pair.trusted
                pair.foretold(shapes)
                if pair.trusted and not before:
                    kept.insert(0, pair)  # what comes now is like it: others have had their time
                    continue
            kept.append(pair)
        self._pairs = kept


def alike(one: Notes | None, other: Notes | None, *, between: bool = False) -> bool:
    """Return whether the same was noted of two graphs, in which one number differs.

    between: or what holds for numbers between those alone.
    """
    if one is None or other is None:
        return False
    sides = (
        [note.said if between else note.exact or note.said for note in side]
        for side in (one, other)
    )
    return next(sides) == next(sides)


class _Pair:
    """Two graphs of a model.

    known: the first. trusted: whether they foretold a third; where several numbers differ, as many
        that these are known to vary apart from each other; and where what was noted of both is the
        same, but follows from several numbers, as many as show that it is a constant.
    """

    def __init__(self, between: Between, known: Known, other: Known) -> None:
        self.between, self.known, self.other, self.trusted = between, known, other, False
        self.served: ServedBetween | bool | None = None  # None: not known yet, False: it is not
        # What parts are cut of, where that differs, lies between what it is in both.
        self._within = not alike(known.notes, other.notes)
        sides = zip(known.notes or (), other.notes or ())
        several = any(one.several for one, two in sides if one.exact != two.exact)
        if self._within and several and not between.one_number:
            raise GraphError("parts of what follows from several numbers found")
        self._choices = _alike_chosen(known, other)
        for choice, extents in self._choices:
            between.check(choice.extents, extents)
        self._points = None if between.one_number else between.ends
        self._degree = 1 if known.notes == other.notes else len(between.ends[0])

    def foretold(self, shapes: Shapes) -> None:
        """Take note that they foretold the graph for these shapes."""
        if self._points is not None:
            self._points.append(self.between.numbers(shapes))
        self.trusted = self._points is None or _spans(self._points, self._degree)

    def serve(
        self, make: Callable[[Known], Served], others: Sequence[tuple[Shapes, Known]]
    ) -> None:
        """Find out how the graphs that they foretell are launched; see `Extended.serve`.

        others: graphs that were made, of which some may be such.
        """
        thirds = [
            (shapes, known)
            for shapes, known in others
            if known not in (self.known, self.other) and self.at(shapes) is not None
        ]
        points = [*self.between.ends, *(self.between.numbers(shapes) for shapes, _ in thirds)]
        self.served = False
        if thirds and (self.between.one_number or _spans(points, 1)):
            with suppress(GraphError):
                made = ServedBetween(make(self.known), make(self.other))
                if all(made.foretells(shapes, make(known)) for shapes, known in thirds):
                    self.served = made

    def served_at(self, shapes: Shapes) -> Known | None:
        """Return the graph for inputs of these shapes and what is bound of it, or None."""
        if not isinstance(self.served, ServedBetween):
            return None
        try:
            self._check(shapes)
            served = self.served.at(shapes)
        except GraphError:
            return None
        outputs, notes = self.known.outputs, self.known.notes
        return Known(lambda: self.between.at(shapes), outputs, notes=notes, served=served)

    def at(self, shapes: Shapes) -> tuple[Graph, Mapping[str, Array]] | None:
        """Return the graph for inputs of these shapes and its own weights, or None: not known."""
        try:
            self._check(shapes)
            return self.between.at(shapes)
        except GraphError:
            return None

    def _check(self, shapes: Shapes) -> None:
        """Check that what is known of both graphs is known of that for these shapes.

        Raises:
            GraphError: it is not.
        """
        if self._within:
            ends = zip(*self.between.ends)
            for now, both in zip(self.between.numbers(shapes), ends, strict=True):
                if not min(both) <= now <= max(both):
                    raise GraphError("a number beyond those of two graphs found")
        numbers = self.between.numbers(shapes) if self._choices else ()
        for (rule, one, chosen), other in self._choices:
            if rule(*self.between.extents(one, other, numbers)) is not chosen:
                raise GraphError("extents found for which passes choose otherwise")


def chosen_alike(one: Known, other: Known) -> bool:
    """Return whether passes chose the same for two graphs, by whatever extents."""
    sides = ([(each.rule, each.chosen) for each in known.choices] for known in (one, other))
    return next(sides) == next(sides)


def _alike_chosen(one: Known, other: Known) -> list[tuple[Choice, tuple[int, ...]]]:
    """Return the different choices of passes on a graph, and the extents of each in another.

    Raises:
        GraphError: something was chosen otherwise there.
    """
    if not chosen_alike(one, other):
        raise GraphError("other choices of passes found")
    return list(dict.fromkeys((a, b.extents) for a, b in zip(one.choices, other.choices)))


def _spans(points: Sequence[tuple[int, ...]], degree: int) -> bool:
    """Return whether sums of multiples of products of numbers are equal if they are at points.

    degree: how many different numbers are in a product at most.
    """
    numbers = np.array(points, np.float64)
    numbers /= numbers.max(axis=0)
    count = numbers.shape[1]
    products = [
        numbers[:, list(of)].prod(1)
        for n in range(degree + 1)
        for of in combinations(range(count), n)
    ]
    return bool(np.linalg.matrix_rank(np.stack(products, 1)) == len(products))
