"""Families of graphs of one model: the graph for a new input shape is derived from earlier ones.

The model is translated and folded for the first shapes that come. Three or more such graphs are a
family where they differ in extents alone (`ir/extents.py`) and the model is known to depend on
extents only through shapes (`Source.noted`). A member of the family with other extents is then the
graph for another shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from soapstone.engine.inference import InferenceFamily, InferenceGraph
from soapstone.frontend.inference.sources import Notes
from soapstone.ir.by_extents import Choice, Said
from soapstone.ir.errors import GraphError
from soapstone.ir.extent_terms import Numbers, Term
from soapstone.ir.extents import Family
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.records import dataclass

if TYPE_CHECKING:
    from soapstone.ir.files.layouts import Layouts

_MOST = 16  # graphs, and families of them, that are kept
_LEAST, _MEMBERS = 3, 8  # graphs of a family, of which two would be on any line
Shapes = Mapping[str, tuple[int, ...]]  # of inputs, by name


@dataclass(frozen=True, eq=False)
class Known:
    """A graph that is ready to be bound.

    Attributes:
        make: returns the graph with its weights folded, and the contents of constants that are
            not weights of the model.
        outputs: the names of its results.
        given: the graph before folding; None where the graph was derived from others.
        layouts: see `InferenceSession`.
        notes: see `Source`; None where extents may matter other than through shapes.
        choose: returns `choices`.
        inference: the lowered graph, where that is derived too.
    """

    make: Callable[[], tuple[Graph, Mapping[str, Array]]]
    outputs: tuple[str, ...]
    given: Graph | None = None
    layouts: Layouts | None = None
    notes: Notes | None = field(default=None)
    choose: Callable[[], tuple[Choice | Said, ...]] = tuple
    inference: InferenceGraph | None = None

    @cached_property
    def _made(self) -> tuple[Graph, Mapping[str, Array]]:
        return self.make()

    @cached_property
    def choices(self) -> tuple[Choice | Said, ...]:
        """What passes decided by extents, or by contents that depend on extents.

        Raises:
            GraphError: as `graph`.
        """
        return self.choose()

    @property
    def graph(self) -> Graph:
        """The graph.

        Raises:
            GraphError: it cannot be derived, although its lowered graph can.
        """
        return self._made[0]

    @property
    def constants(self) -> Mapping[str, Array]:
        """The contents of constants that are not weights of the model."""
        return self._made[1]


class GraphFamilies:
    """The graphs of a model that were made last, and the families that they form."""

    def __init__(self) -> None:
        self._seen: list[tuple[Shapes, Known]] = []
        self._families: list[_Family] = []
        self._lock = threading.Lock()  # of `note`; `at` takes no lock

    def note(self, shapes: Shapes, known: Known, weights: Mapping[str, Array]) -> None:
        """Add a graph that was made for inputs of these shapes."""
        if known.notes is None:
            return
        with self._lock:
            like = [(shapes, known)] + [
                (before, other)
                for before, other in self._seen
                if before != shapes and _written_alike(known, shapes, other, before)
            ]
            with suppress(GraphError):
                if len(like) >= _LEAST:
                    self._families = [_Family(like, weights), *self._families][:_MOST]
            self._seen = [(shapes, known), *self._seen][:_MOST]

    def at(self, shapes: Shapes, plain: bool = False) -> Known | None:
        """Return the graph for inputs of these shapes, or None where it has to be made.

        plain: whether graphs are lowered as those of `prepare` are.
        """
        families = self._families
        for family in families if plain else ():
            prepared = family.prepared_at(shapes)
            if prepared is not None:
                return prepared
        for seen, known in self._seen:
            if seen == shapes:
                return known
        for family in families:
            found = family.at(shapes)
            if found is not None:
                return found
        return None

    @property
    def has_unprepared(self) -> bool:
        """Whether there are families whose graphs are not lowered yet."""
        return any(family.inference is None for family in self._families)

    def prepare(self, make: Callable[[Known], InferenceGraph]) -> None:
        """Lower the graphs of all families, so that those derived from them need no passes.

        make: returns a graph lowered.
        """
        for family in [each for each in self._families if each.inference is None]:
            family.prepare(make)


def alike(one: Notes | None, other: Notes | None, *, cut: bool = True) -> bool:
    """Return whether the same was noted of two graphs.

    cut: of how parts are cut, too.
    """
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        a.said == b.said
        and (a.cut is None) == (b.cut is None)
        and (not cut or a.cut == b.cut)
        and [each.name for each in a.bent] == [each.name for each in b.bent]
        and [each[:2] for each in a.several] == [each[:2] for each in b.several]
        for a, b in zip(one, other)
    )


def _choices(known: Known) -> list[Choice | Said]:
    """Return what was chosen by extents for a graph: by its translation, then by passes."""
    return [*(note.cut for note in known.notes or () if note.cut is not None), *known.choices]


def chosen_alike(one: Known, other: Known) -> bool:
    """Return whether the same was chosen for two graphs, by whatever extents."""
    sides = ([(each.rule, each.chosen) for each in _choices(known)] for known in (one, other))
    return next(sides) == next(sides)


def _written_alike(one: Known, shapes: Shapes, other: Known, others: Shapes) -> bool:
    """Return whether two graphs, for inputs of these shapes, may differ in extents alone."""
    few = (
        [(name, [extent < 2 for extent in shape]) for name, shape in each.items()]
        for each in (shapes, others)
    )
    return (
        next(few) == next(few)  # what repeats is written otherwise
        and alike(one.notes, other.notes, cut=False)
        and chosen_alike(one, other)
    )


def _operators(known: Known) -> list[str]:
    return [node.operator for node in known.graph.nodes]


class Contents:
    """What was said of contents in graphs of a model, which is asked for other inputs again.

    Args:
        of: two graphs or more, of which the same was said.
        weights: of the model.
        told: returns whether what is said of contents need not be asked again, given the graphs
            that make them.

    Raises:
        GraphError: contents are made otherwise in another graph.
    """

    def __init__(
        self,
        of: Sequence[Known],
        weights: Mapping[str, Array],
        told: Callable[[Sequence[Graph]], bool] = lambda made: False,
    ) -> None:
        held = [{**weights, **known.constants} for known in of]
        self._held = held[0]
        self._said = dict[Hashable, tuple[Said, Family]]()
        for several in zip(*map(_choices, of), strict=True):
            first, made = several[0], [each.made for each in several if isinstance(each, Said)]
            if not isinstance(first, Said) or (first.rule, first.made.outputs) in self._said:
                continue
            if not told(made):
                self._said[first.rule, first.made.outputs] = first, Family(made, held)

    def __bool__(self) -> bool:
        return bool(self._said)

    def made_at(self, shapes: Shapes) -> dict[Hashable, Graph]:
        """Return what makes contents for inputs of these shapes, by the rule and their names.

        Raises:
            GraphError: it cannot be derived.
        """
        return {key: family.at(shapes)[0] for key, (_, family) in self._said.items()}

    def check(self, shapes: Shapes) -> None:
        """Check that rules say the same of contents for inputs of these shapes.

        Raises:
            GraphError: they do not.
        """
        for first, family in self._said.values():
            if first.rule(family.evaluated(shapes, self._held)) != first.chosen:
                name = first.made.outputs[0]
                raise GraphError(f"value {name!r}: contents found of which something else is said")


class _Family:
    """Three or more graphs of a model, from which others are derived.

    Args:
        like: graphs with the shapes of their inputs, the one made last first. Graphs that differ
            from that one in more than extents are left out.
        weights: of the model.

    Raises:
        GraphError: too few graphs are left, or no others can be derived from them.
    """

    def __init__(self, like: Sequence[tuple[Shapes, Known]], weights: Mapping[str, Array]) -> None:
        first = like[0][1]
        of = [each for each in like if _operators(each[1]) == _operators(first)][:_MEMBERS]

        def family(members: Sequence[tuple[Shapes, Known]], least: int = _LEAST) -> Family:
            if len(members) < least:
                raise GraphError(f"{len(members)} graphs found that are alike; {least} needed")
            held = [{**weights, **known.constants} for _, known in members]
            return Family([known.graph for _, known in members], held)

        def fits(other: tuple[Shapes, Known]) -> bool:
            with suppress(GraphError):
                family((of[0], other), 2)
                return True
            return False

        try:
            found = family(of)
        except GraphError:
            of = [of[0], *filter(fits, of[1:])]
            found = family(of)
        self._of = [known for _, known in of]
        self._family = found
        self._contents = Contents(self._of, weights)
        self.inference: InferenceFamily | bool | None = None  # None: not tried; False: impossible
        _check_vary(self._family.given)
        _check_apart([shape for shape, _ in of], [known.notes or () for known in self._of])
        self._rules = self._chosen(self._family.numbers)
        given = len(self._family.given)
        self._early = [each for each in self._rules if all(t.within(given) for t in each[1])]

    def _chosen(self, numbers: Numbers) -> list[tuple[Choice, list[Term]]]:
        """Return the different choices by extents, and what these extents are.

        Raises:
            GraphError: that is not known.
        """
        found = dict.fromkeys(
            (choices[0], tuple(zip(*(each.extents for each in choices))))
            for choices in zip(*map(_choices, self._of), strict=True)
            if isinstance(choices[0], Choice)
        )
        return [(first, [numbers.term(each) for each in columns]) for first, columns in found]

    def prepare(self, make: Callable[[Known], InferenceGraph]) -> None:
        """Lower the graphs; see `GraphFamilies.prepare`."""
        self.inference = False
        with suppress(GraphError):
            inference = InferenceFamily([make(known) for known in self._of])
            self._inference_rules = self._chosen(inference.numbers)
            self.inference = inference

    def prepared_at(self, shapes: Shapes) -> Known | None:
        """Return the graph for inputs of these shapes and its lowered form; None if underivable."""
        if not isinstance(self.inference, InferenceFamily):
            return None
        try:
            self._check_early(shapes)
            inference, numbers = self.inference.at(shapes)
            _check_chosen(self._inference_rules, numbers)
            self._contents.check(shapes)
        except GraphError:
            return None
        first = self._of[0]
        return Known(
            lambda: self._family.at(shapes)[:2],
            first.outputs,
            notes=first.notes,
            choose=lambda: self._choices_at(shapes),
            inference=inference,
        )

    def _choices_at(self, shapes: Shapes) -> tuple[Choice | Said, ...]:
        """Return what passes would decide for inputs of these shapes, which is known to be alike.

        Raises:
            GraphError: what contents would be made of cannot be derived.
        """
        made = self._contents.made_at(shapes)
        return tuple(
            each._replace(made=made[each.rule, each.made.outputs])
            if isinstance(each, Said)
            else each
            for each in self._of[0].choices
        )

    def _check_early(self, shapes: Shapes) -> None:
        """Check what is chosen by the extents of inputs alone, before a graph is made.

        Raises:
            GraphError: inputs of these shapes are none of the family, or something else is chosen.
        """
        numbers = self._family.given_at(shapes)
        _check_chosen(self._early, numbers)

    def at(self, shapes: Shapes) -> Known | None:
        """Return the graph for inputs of these shapes and its constants; None if underivable."""
        try:
            self._check_early(shapes)
            graph, weights, numbers = self._family.at(shapes)
            _check_chosen(self._rules, numbers)
            self._contents.check(shapes)
        except GraphError:
            return None
        first = self._of[0]
        return Known(
            lambda: (graph, weights),
            first.outputs,
            notes=first.notes,
            choose=lambda: self._choices_at(shapes),
        )


def _check_chosen(rules: Iterable[tuple[Choice, Sequence[Term]]], numbers: Sequence[int]) -> None:
    """Check that the same is chosen where extents are made of these numbers.

    Raises:
        GraphError: it is not.
    """
    for (rule, _, chosen), terms in rules:
        if rule(*(term.at(numbers) for term in terms)) != chosen:
            raise GraphError("extents found for which something else is chosen")


def _check_apart(shapes: Sequence[Shapes], notes: Sequence[Notes]) -> None:
    """Check that what is the same in all graphs is a constant.

    A sum of multiples of extents is, where these vary apart from each other; and what follows from
    an extent behind strides, where this varies, unless nothing does that it follows from.

    Raises:
        GraphError: it may be otherwise for others.
    """
    for same in set(zip(*([(note.several, note.bent) for note in each] for each in notes))):
        for extents in zip(*(bent for _, bent in same)):
            origins = {place for each in extents for place in each.origin}
            varies = any(len({shape[name][axis] for shape in shapes}) > 1 for name, axis in origins)
            if varies and len({each.extent for each in extents}) == 1:
                raise GraphError("an extent behind strides found that does not vary")
        _check_vary({tuple(each.extent for each in all_) for all_ in zip(*(s for s, _ in same))})


def _check_vary(columns: Iterable[tuple[int, ...]]) -> None:
    """Check that no extent is a sum of multiples of others in all graphs, and a number.

    columns: an extent in each of the graphs, that of another behind it.

    Raises:
        GraphError: one may be.
    """
    varied = {column for column in columns if len(set(column)) > 1}
    if varied:
        numbers = np.array([[1] * len(next(iter(varied))), *varied], np.float64).T
        numbers /= numbers.max(axis=0)
        if np.linalg.matrix_rank(numbers) <= len(varied):
            raise GraphError("extents that vary together found")
