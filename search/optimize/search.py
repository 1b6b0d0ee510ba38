"""The search over whole graphs: pieces, solved one by one, then what lies across their borders.

A graph is put in normal form, cut in pieces, and each is searched for the cheapest graph that the
rules reach (`backtracking.py`); equal pieces are solved once. The result is cut again elsewhere, so
that substitutions across the first cuts are seen. A piece costs what it lowers to, with the layouts
that its borders have in the whole graph.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.runtime.lower import channels_last, fold_weights
from soapstone.search.cost import Cost, CostModel, Objective
from soapstone.search.optimize import normal
from soapstone.search.optimize.backtracking import Budget, Found, Step, backtrack
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pieces import Order, Piece, copied, moved, pieces
from soapstone.search.optimize.pool import Leaf, Pool
from soapstone.search.optimize.rulebook import Rulebook

Values = tuple[int, ...]
Progress = Callable[[str, int, int], None]  # what is searched, pieces done, of how many


@dataclass(frozen=True)
class Options:
    """How hard to search.

    Attributes:
        alpha: how much worse than the best a graph may be and still be looked at; 1 is greedy.
        candidates: the most graphs that are priced for one piece.
        whole: the most graphs that are priced as a whole.
        piece: the most operators of a piece.
        seconds: after which the best so far is returned.
    """

    alpha: float = 1.05
    candidates: int = 300
    whole: int = 60
    piece: int = 40
    seconds: float = 300.0


@dataclass(frozen=True)
class Solved:
    """The whole, or a piece that occurs so many times, and what was found for it."""

    found: Found
    times: int = 1

    @property
    def before(self) -> float:
        """What it cost before."""
        return self.found.history[0]


@dataclass
class Searched:
    """The outcome of a search.

    Attributes:
        graph, constants: the cheapest graph met, and its constants, those of rules included.
        before, after: predicted costs.
        substitutions: how often each rule was applied, over all occurrences of each piece.
        solved: the whole and the pieces whose rewriting was kept, with every step.
        complete: whether all pieces were searched to the end.
    """

    graph: Graph
    constants: Mapping[str, Array]
    before: Cost
    after: Cost
    substitutions: Counter[str] = field(default_factory=Counter)
    solved: list[Solved] = field(default_factory=list)
    candidates: int = 0
    complete: bool = True
    seconds: float = 0.0


def search(
    graph: Graph,
    constants: Mapping[str, Array],
    book: Rulebook,
    model: CostModel,
    objective: Objective | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Searched:
    """Return the cheapest equivalent of a graph that was met; an interrupt ends the search early.

    Args:
        constants: weights by name; none for a training graph, whose weights are values.
        book: the rules to use.
        model: what prices graphs.
    """
    began = time.monotonic()
    options = options or Options()
    run = _Run(constants, book, model, objective or Objective(), options)
    folded = fold_weights(graph, constants) if constants else graph
    result = run.searched(graph, folded, progress or (lambda what, done, of: None))
    result.seconds = time.monotonic() - began
    return result


class _Run:
    """One search: its pool, what it has solved, and its budget."""

    def __init__(
        self,
        constants: Mapping[str, Array],
        book: Rulebook,
        model: CostModel,
        objective: Objective,
        options: Options,
    ) -> None:
        self.pool = Pool()
        self.constants = dict(constants)
        self.book = book
        self.model = model
        self.objective = objective
        self.options = options
        self.budget = Budget(options.candidates, time.monotonic() + options.seconds)
        self.known: dict[Values, Found] = {}
        self.candidates = 0

    def searched(self, graph: Graph, folded: Graph, progress: Progress) -> Searched:
        frame, outputs = normal.read(folded, self.pool, self.constants)
        frame = replace(frame, outputs=graph.outputs)
        cost = self.price(self.written(frame, outputs))
        best = Searched(graph, self.constants, cost, cost)
        for shift in (None, 0.0, 0.5):
            if self.budget.over:
                break
            try:
                new, solved = self.one_pass(frame, outputs, shift, progress)
            except KeyboardInterrupt:
                self.budget.stopped = True
                break
            best.complete &= all(each.found.complete for each in solved)
            written = self.written(frame, new)
            cost = self.price(written) if new != outputs else best.after
            if self.objective.value(cost) < self.objective.value(best.after):
                outputs = new
                best.graph, best.after = written.graph, cost
                best.constants = {**self.constants, **written.contents}
                best.solved += solved
                for each in solved:
                    for step in each.found.steps:
                        best.substitutions[step.rule] += each.times * step.count
        best.candidates = self.candidates
        best.complete &= not self.budget.over
        return best

    def one_pass(
        self, frame: normal.Frame, outputs: Values, shift: float | None, progress: Progress
    ) -> tuple[Values, list[Solved]]:
        """Return what the whole becomes, or where a shift of cuts is given, its pieces."""
        if shift is None:
            return self.whole(frame, outputs, progress)
        return self.divided(frame, outputs, shift, progress)

    def whole(
        self, frame: normal.Frame, outputs: Values, progress: Progress
    ) -> tuple[Values, list[Solved]]:
        """Return the graph that rules make of the whole when each is applied wherever it matches.

        Pieces never see what is far apart, such as the same product in every step of a sequence.
        """
        counted = itertools.count()
        most = self.options.whole

        def price(outputs: Values) -> float:
            progress("whole", min(next(counted), most), most)
            return self.objective.value(self.price(self.written(frame, outputs)))

        left = max(0.0, self.budget.deadline - time.monotonic())
        budget = Budget(most, time.monotonic() + left / 4)
        alpha = self.options.alpha
        found = backtrack(
            self.pool, outputs, self.book, price, alpha=alpha, budget=budget, together=True
        )
        self.budget.stopped |= budget.stopped
        self.candidates += found.candidates
        return found.outputs, [Solved(found)]

    def divided(
        self, frame: normal.Frame, outputs: Values, shift: float, progress: Progress
    ) -> tuple[Values, list[Solved]]:
        """Return the graph with every piece of one division at its best, and the pieces."""
        pool = self.pool
        written = self.written(frame, outputs)
        layouts = {
            written.values[name]: order
            for name, order in channels_last(written.graph).items()
            if name in written.values
        }
        division = pieces(pool, outputs, self.options.piece, self.spans(outputs), shift)
        renewed: dict[int, int] = {}
        times: Counter[Values] = Counter()
        try:
            for number, piece in enumerate(division):
                progress(f"pass {1 + (shift > 0)}", number, len(division))
                if self.budget.over:
                    break
                now = Piece(
                    moved(pool, piece.outputs, renewed),
                    tuple(renewed.get(v, v) for v in piece.inputs),
                )
                orders = {renewed.get(v, v): layouts[v] for v in piece.inputs if v in layouts}
                copy, stands = copied(pool, now, orders)
                wanted = [layouts.get(value) for value in piece.outputs]
                found = self.found(copy, stands, orders, wanted)
                times[copy] += 1
                renewed.update(zip(piece.outputs, moved(pool, found.outputs, stands)))
            progress(f"pass {1 + (shift > 0)}", len(division), len(division))
        except KeyboardInterrupt:
            self.budget.stopped = True  # the pieces that are done count
        solved = [Solved(self.known[copy], count) for copy, count in times.items()]
        return moved(pool, outputs, renewed), solved

    def found(
        self,
        copy: Values,
        stands: Mapping[int, int],
        orders: Mapping[int, Order],
        wanted: Sequence[Order | None],
    ) -> Found:
        """Return the best of a piece, found now or when an equal one was."""
        if copy not in self.known:
            kept = {leaf: orders[value] for leaf, value in stands.items() if value in orders}

            def price(outputs: Values) -> float:
                layouts = kept | {v: order for v, order in zip(outputs, wanted) if order}
                return self.objective.weighted(
                    self.price(normal.piece(self.pool, outputs, frozenset()), layouts)
                )

            alpha = self.options.alpha
            self.known[copy] = backtrack(
                self.pool, copy, self.book, price, alpha=alpha, budget=self.budget
            )
            self.candidates += self.known[copy].candidates
        return self.known[copy]

    def spans(self, outputs: Values) -> Counter[int]:
        """Return how many matches reach across each value, as the inside of their left side."""
        where = places(self.pool, outputs)
        matcher = Matcher(self.pool)
        found: Counter[int] = Counter()
        for rule in self.book.applicable(where.symbols):
            if rule.symbols <= where.symbols:
                for match in matcher.matches(rule, where):
                    inside = self.pool.order(match.roots, frozenset(match.values.values()))
                    found.update(v for v in inside if v not in match.roots)
        return found

    def written(self, frame: normal.Frame, outputs: Values) -> normal.Written:
        return normal.write(self.pool, frame, outputs)

    def price(self, written: normal.Written, layouts: Mapping[int, Order] | None = None) -> Cost:
        """Return what a graph costs."""
        contents = dict(written.contents)
        named: dict[str, Order] = {}
        for name, value in written.values.items():
            if layouts and value in layouts:
                named[name] = layouts[value]
            if self.pool.fixed[value] and name in written.graph.roles and name not in contents:
                contents[name] = self.weight(name, value)
        return self.model.cost(written.graph, contents, named)

    def weight(self, name: str, value: int) -> Array:
        """Return the contents of a weight; those of a piece are of no account but for numbers."""
        maker = self.pool.makers[value]
        if isinstance(maker, Leaf) and maker.name in self.constants:
            return self.constants[maker.name]
        spec = self.pool.specs[value]
        return np.broadcast_to(np.ones((), spec.dtype), spec.shape)


__all__ = ["Options", "Searched", "Solved", "Step", "search"]
