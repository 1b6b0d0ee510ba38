"""The search over whole graphs: pieces, solved one by one, then what lies across their borders.

A graph is put in normal form, cut in pieces, and each is searched for the cheapest graph that the
rules reach (`backtracking.py`); equal pieces are solved once. The result is cut again elsewhere, so
that substitutions across the first cuts are seen. A piece costs what it lowers to, with the layouts
that its borders have in the whole graph.
"""

from __future__ import annotations

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
_WHOLE = 60  # graphs that are priced as a whole
Progress = Callable[[str, int, int], None]  # what is searched, pieces done, of how many


@dataclass(frozen=True)
class Options:
    """How hard to search.

    Attributes:
        alpha: how much worse than the best a graph may be and still be looked at; 1 is greedy.
        candidates: the most graphs that are priced for one piece.
        piece: the most operators of a piece.
        seconds: after which the best so far is returned.
    """

    alpha: float = 1.05
    candidates: int = 300
    piece: int = 40
    seconds: float = 300.0


@dataclass(frozen=True)
class Solved:
    """A piece and what became of it; `times` is how often it occurs."""

    before: float
    found: Found
    times: int = 1


@dataclass
class Searched:
    """The outcome of a search.

    Attributes:
        graph, constants: the cheapest graph met, and its constants, those of rules included.
        before, after: predicted costs.
        substitutions: how often each rule was applied, over all occurrences of each piece.
        solved: the pieces, for who wants to see every step.
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
        self.known: dict[Values, Solved] = {}

    def searched(self, graph: Graph, folded: Graph, progress: Progress) -> Searched:
        frame, outputs = normal.read(folded, self.pool, self.constants)
        frame = replace(frame, outputs=graph.outputs)
        first = self.written(frame, outputs)
        best = Searched(graph, self.constants, self.price(first), self.price(first))
        for shift in (None, 0.0, 0.5):
            if self.budget.over:
                break
            try:
                if shift is None:
                    new = self.whole(frame, outputs, best, progress)
                else:
                    new = self.improved(frame, outputs, shift, best, progress)
            except KeyboardInterrupt:
                self.budget.stopped = True
                break
            if new == outputs:
                continue
            written = self.written(frame, new)
            cost = self.price(written)
            if self.objective.value(cost) < self.objective.value(best.after):
                outputs = new
                best.graph, best.after = written.graph, cost
                best.constants = {**self.constants, **written.contents}
        best.complete = not self.budget.over and all(s.found.complete for s in best.solved)
        return best

    def whole(
        self, frame: normal.Frame, outputs: Values, into: Searched, progress: Progress
    ) -> Values:
        """Return the graph that rules make of the whole when each is applied wherever it matches.

        Pieces never see what is far apart, such as the same product in every step of a sequence.
        """

        def price(outputs: Values) -> float:
            progress("whole", min(into.candidates, _WHOLE), _WHOLE)
            into.candidates += 1
            return self.objective.value(self.price(self.written(frame, outputs)))

        left = max(0.0, self.budget.deadline - time.monotonic())
        budget = Budget(_WHOLE, time.monotonic() + left / 4)
        found = backtrack(
            self.pool,
            outputs,
            self.book,
            price,
            alpha=self.options.alpha,
            budget=budget,
            together=True,
        )
        self.budget.stopped |= budget.stopped
        into.solved.append(Solved(found.history[0], found))
        into.substitutions.update({step.rule: step.count for step in found.steps})
        return found.outputs

    def improved(
        self, frame: normal.Frame, outputs: Values, shift: float, into: Searched, progress: Progress
    ) -> Values:
        """Return the graph with every piece of one division at its best."""
        pool = self.pool
        spans = self.spans(outputs)
        written = self.written(frame, outputs)
        layouts = {
            written.values[name]: order
            for name, order in channels_last(written.graph).items()
            if name in written.values
        }
        division = pieces(pool, outputs, self.options.piece, spans, shift)
        renewed: dict[int, int] = {}
        for number, piece in enumerate(division):
            progress(f"pass {1 + (shift > 0)}", number, len(division))
            if self.budget.over:
                break
            now = Piece(
                moved(pool, piece.outputs, renewed), tuple(renewed.get(v, v) for v in piece.inputs)
            )
            orders = {renewed.get(v, v): layouts[v] for v in piece.inputs if v in layouts}
            copy, stands = copied(pool, now, orders)
            wanted = [layouts.get(value) for value in piece.outputs]
            solved = self.solved(copy, stands, orders, wanted, into)
            new = moved(pool, solved.found.outputs, stands)
            renewed.update(zip(piece.outputs, new))
        progress(f"pass {1 + (shift > 0)}", len(division), len(division))
        return moved(pool, outputs, renewed)

    def solved(
        self,
        copy: Values,
        stands: Mapping[int, int],
        orders: Mapping[int, Order],
        wanted: Sequence[Order | None],
        into: Searched,
    ) -> Solved:
        """Return the best of a piece, found now or when an equal one was."""
        known = self.known.get(copy)
        if known is None:
            kept = {leaf: orders[value] for leaf, value in stands.items() if value in orders}

            def price(outputs: Values) -> float:
                layouts = kept | {v: order for v, order in zip(outputs, wanted) if order}
                return self.objective.weighted(
                    self.price(normal.piece(self.pool, outputs, frozenset()), layouts)
                )

            found = backtrack(
                self.pool, copy, self.book, price, alpha=self.options.alpha, budget=self.budget
            )
            known = self.known[copy] = Solved(found.history[0], found, 0)
            into.candidates += found.candidates
        known = self.known[copy] = replace(known, times=known.times + 1)
        into.solved = [*into.solved[:1], *self.known.values()]
        for step in known.found.steps:
            into.substitutions[step.rule] += step.count
        return known

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
