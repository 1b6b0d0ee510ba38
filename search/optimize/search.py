"""The search over whole graphs: piece by piece, then across the borders of pieces.

A graph is put in normal form and cut in pieces, and for each piece the cheapest graph that the
rules reach is searched (`backtracking.py`); equal pieces are solved once. The result is cut again
at other places, so that substitutions across the first cuts are found. The cost of a piece is that
of its lowered form, with the layouts that its borders have in the whole graph and those chosen for
its inner values (`layouts.py`).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from soapstone.deadline import Deadline
from soapstone.engine.lower import channels_last, fold_weights
from soapstone.engine.prepare import evaluated
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Arrays
from soapstone.search.cost import Cost, CostModel, Objective
from soapstone.search.cost.cost import UNKNOWN
from soapstone.search.optimize import normal
from soapstone.search.optimize.backtracking import ENDS, Budget, Cheapest, Step, backtrack, replayed
from soapstone.search.optimize.chain import Chain, Pass
from soapstone.search.optimize.exhaustive import exhaust
from soapstone.search.optimize.extraction import NodePrices
from soapstone.search.optimize.layouts import Chooser, Orders
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pieces import Order, Piece, copied, moved, pieces
from soapstone.search.optimize.pool import Leaf, Pool
from soapstone.search.optimize.saturation import saturate
from soapstone.search.rules.rulebook import Rulebook

Values = tuple[int, ...]
METHODS = ("backtracking", "saturation", "exhaustive")
_LEAST = 0.01  # share of a cost that is a gain, where the model has no noise
_STATES = 50_000  # of a region, when all are looked at
Progress = Callable[[str, int, int], None]  # what is searched, pieces done, of how many


@dataclass(frozen=True)
class Options:
    """The effort of a search.

    Attributes:
        alpha: graphs that cost up to this times the best are expanded; 1 is greedy.
        candidates: the largest number of graphs priced for one piece.
        whole: the largest number of graphs priced as a whole.
        piece: the largest number of operators of a piece.
        seconds: after which the best so far is returned, including the time of measurements.
        method: `backtracking`, `saturation`, or for few rules `exhaustive`.
        layouts: whether axis orders are searched too; otherwise the rule of the cost model decides.
        chain: the substitutions to apply instead of a search.
    """

    alpha: float = 1.05
    candidates: int = 300
    whole: int = 60
    piece: int = 40
    seconds: float = 45.0
    method: str = METHODS[0]
    layouts: bool = False
    chain: Chain | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise GraphError(f"method {self.method!r} found; one of {', '.join(METHODS)} needed")


@dataclass(frozen=True)
class Solved:
    """The result for the whole graph, or for a piece that occurs several times."""

    cheapest: Cheapest
    times: int = 1

    @property
    def before(self) -> float:
        """The cost of the original."""
        return self.cheapest.history[0]


@dataclass
class Searched:
    """The outcome of a search.

    Attributes:
        graph, constants: the cheapest graph found, and its constants, including those of rules.
        layouts: the axis orders chosen for its values; the rule decides the others.
        before, after: predicted costs.
        substitutions: how often each rule was applied, over all occurrences of each piece.
        solved: the results that were kept for the whole and for pieces, with every step.
        candidates: the number of graphs priced, whole ones and pieces.
        graphs: the number of all reachable graphs, if all were considered.
        passes: the steps that were kept, from which the result can be made again.
        complete: whether all pieces were searched to the end.
        seconds, measuring_seconds: of the search, and of measurements besides. If the time was over
            before the graph itself was priced, its costs are NaN.
    """

    graph: Graph
    constants: Arrays
    before: Cost
    after: Cost
    substitutions: Counter[str] = field(default_factory=Counter)
    solved: list[Solved] = field(default_factory=list)
    layouts: Mapping[str, Order] = field(default_factory=dict)
    candidates: int = 0
    graphs: int = 0
    passes: list[Pass] = field(default_factory=list)
    complete: bool = True
    seconds: float = 0.0
    measuring_seconds: float = 0.0


def search(
    graph: Graph,
    constants: Arrays,
    book: Rulebook,
    model: CostModel,
    objective: Objective | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Searched:
    """Return the cheapest equivalent graph that was found; an interrupt ends the search early.

    Args:
        constants: weights by name; none for a training graph, whose weights are values.
        book: the rules to use.
        model: prices graphs.
        deadline: when to end, for the model too; by default after the seconds of the options.
    """
    options = options or Options()
    clock = Spent(model)
    deadline = model.deadline = deadline or Deadline(options.seconds)
    folded, known = _folded(graph, constants)
    run = _Run(known, book, model, objective or Objective(), options, deadline)
    result = run.searched(graph, folded, progress or (lambda what, done, of: None))
    result.seconds, result.measuring_seconds = clock.seconds
    return result


class Spent:
    """A stopwatch for a search, which counts the cost model's measurements separately."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._began, self._measured = time.monotonic(), model.measuring_s

    @property
    def seconds(self) -> tuple[float, float]:
        """The seconds since it was made: searching, and measuring."""
        measuring = self._model.measuring_s - self._measured
        return time.monotonic() - self._began - measuring, measuring


def _folded(graph: Graph, constants: Arrays) -> tuple[Graph, Mapping[str, Array]]:
    """Return a graph with its weights folded, so that no graph that is priced folds them again.

    A training graph has no constants and stays as it is.
    """
    if not constants:
        return graph, constants
    return evaluated(fold_weights(graph, constants), constants, graph.outputs)


class _Run:
    """One search: its pool, the pieces solved so far, and its budget."""

    def __init__(
        self,
        constants: Arrays,
        book: Rulebook,
        model: CostModel,
        objective: Objective,
        options: Options,
        deadline: Deadline,
    ) -> None:
        self.pool = Pool()
        self.constants = dict(constants)
        self.book = book
        self.model = model
        self.objective = objective
        self.options = options
        self.budget = Budget(options.candidates, deadline, gain=1 - max(_LEAST, model.noise))
        self.rule = getattr(model, "rule", channels_last)
        self.known: dict[Values, Cheapest] = {}
        self.chosen: dict[Values, Orders] = {}  # by piece
        self.orders: Orders = {}  # of the best graph
        self.prices = NodePrices(self.pool, self.alone)
        self.candidates = self.graphs = self.wholes = 0
        self.replay: Iterator[tuple[Step, ...]] | None = None  # steps of a chain

    def searched(self, graph: Graph, folded: Graph, progress: Progress) -> Searched:
        frame, outputs = normal.read(folded, self.pool, self.constants)
        frame = replace(frame, outputs=graph.outputs)
        try:
            cost = self.price(self.written(frame, outputs))
        except ENDS:
            return Searched(graph, self.constants, UNKNOWN, UNKNOWN, complete=False)
        best = Searched(graph, self.constants, cost, cost)
        for shift, replay in self.plan():
            if self.budget.over:
                break
            self.replay = replay
            if self.replay is not None:
                self.known.clear()  # each part of the pass has its own steps
            try:
                new, solved, orders = self.one_pass(frame, outputs, shift, progress)
                best.complete &= all(each.cheapest.complete for each in solved)
                written = self.written(frame, new)
                same = new == outputs and orders == self.orders
                cost = best.after if same else self.price(written, orders)
            except ENDS:
                self.budget.deadline.stop()
                break
            gain = 1.0 if self.options.method == "exhaustive" else self.budget.gain
            better = self.objective.value(cost) < gain * self.objective.value(best.after)
            if better or (self.replay is not None and not same):
                outputs, self.orders = new, orders
                best.graph, best.after = written.graph, cost
                best.layouts = _named(written, orders)
                best.constants = {**self.constants, **written.contents}
                best.solved += solved
                best.passes.append(Pass(shift, tuple(each.cheapest.steps for each in solved)))
                for each in solved:
                    for step in each.cheapest.steps:
                        best.substitutions[step.rule] += each.times * step.count
        if self.options.layouts:
            try:
                self.turn(best, frame, outputs)
            except ENDS:
                self.budget.deadline.stop()
        best.candidates, best.graphs = self.candidates, self.graphs
        best.complete &= not self.budget.over
        return best

    def turn(self, best: Searched, frame: normal.Frame, outputs: Values) -> None:
        """Choose axis orders for the whole graph, since regions cross the borders of pieces."""
        written = self.written(frame, outputs)

        def price(written: normal.Written, orders: Orders) -> float:
            return self.objective.value(self.price(written, orders))

        given = (self.pool, price, self.rule)
        chooser = Chooser(*given, kept=self.orders, over=lambda: self.budget.over)
        cost = chooser.least(outputs, written, {})
        if cost < self.budget.gain * self.objective.value(best.after):
            best.layouts = _named(written, chooser.orders[outputs])
            best.graph, best.after = written.graph, self.price(written, chooser.orders[outputs])
            best.constants = {**self.constants, **written.contents}

    def plan(self) -> Iterator[tuple[float | None, Iterator[tuple[Step, ...]] | None]]:
        """Yield each pass: the shift of its cuts, None for the whole graph, and a chain's steps."""
        if self.options.chain is not None:
            for each in self.options.chain.passes:
                yield each.shift, iter(each.parts)
        elif self.options.method == "exhaustive":
            yield None, None
        else:
            if self.options.method == "saturation":
                yield None, None
            yield from ((None, None), (0.0, None), (0.5, None))

    def one_pass(
        self, frame: normal.Frame, outputs: Values, shift: float | None, progress: Progress
    ) -> tuple[Values, list[Solved], Orders]:
        """Return the result of a pass over the whole graph, or with a shift, over its pieces."""
        if self.options.method == "exhaustive":
            return *self.exhausted(frame, outputs, progress), self.orders
        if shift is None:
            return *self.whole(frame, outputs, progress), self.orders
        return self.divided(frame, outputs, shift, progress)

    def whole(
        self, frame: normal.Frame, outputs: Values, progress: Progress
    ) -> tuple[Values, list[Solved]]:
        """Return the graph after applying rules to the whole, each wherever it matches.

        Pieces never contain what is far apart, such as the same product in every step of a
        sequence.
        """
        counted = itertools.count()
        together = self.options.method == "backtracking" or not self.wholes
        self.wholes += 1  # of the second an e-graph is made
        most = self.options.whole if together else self.options.candidates

        def price(outputs: Values) -> float:
            progress("whole", min(next(counted), most), most)
            return self.objective.value(self.price(self.written(frame, outputs), self.orders))

        budget = self.budget.part(most, 1 / 2)
        found = self.best(outputs, price, budget, together)
        self.candidates += found.candidates
        return found.outputs, [Solved(found)]

    def exhausted(
        self, frame: normal.Frame, outputs: Values, progress: Progress
    ) -> tuple[Values, list[Solved]]:
        """Return the best of all reachable graphs, with the results for it and for each region."""
        counted = itertools.count(1)

        def price(outputs: Values) -> float:
            number = next(counted)
            progress("all", number, number)
            return self.objective.value(self.price(self.written(frame, outputs), self.orders))

        separable = not self.objective.limits and "memory" not in self.objective.weights
        budget = self.budget.part(_STATES, 1)
        given = (self.pool, outputs, self.book, price)
        found = exhaust(*given, separable=separable, budget=budget)
        self.candidates += found.priced
        self.graphs = found.graphs
        costs = price(outputs), found.cost
        whole = Cheapest(found.outputs, found.cost, (), found.priced, found.complete, costs)
        return found.outputs, [Solved(whole), *map(Solved, found.parts)]

    def divided(
        self, frame: normal.Frame, outputs: Values, shift: float, progress: Progress
    ) -> tuple[Values, list[Solved], Orders]:
        """Return the graph with every piece of one division at its best, the pieces, and orders."""
        pool = self.pool
        written = self.written(frame, outputs)
        layouts = {
            written.values[name]: order
            for name, order in self.rule(written.graph, _named(written, self.orders)).items()
            if name in written.values
        }
        chosen = dict(self.orders)
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
                found = self.solved(copy, stands, orders, wanted)
                times[copy] += 1
                ends = moved(pool, found.outputs, stands)
                self.carry(chosen, now, copy, stands)
                old = zip(ends, piece.outputs)
                chosen |= {new: self.orders[value] for new, value in old if value in self.orders}
                renewed.update(zip(piece.outputs, ends))
            progress(f"pass {1 + (shift > 0)}", len(division), len(division))
        except ENDS:
            self.budget.deadline.stop()  # the pieces that are done count
        solved = [Solved(self.known[copy], count) for copy, count in times.items()]
        return moved(pool, outputs, renewed), solved, chosen

    def carry(
        self, chosen: dict[int, Order], piece: Piece, copy: Values, stands: Mapping[int, int]
    ) -> None:
        """Translate the orders chosen for the copy of a piece to the piece itself."""
        for value in self.pool.order(piece.outputs, frozenset(piece.inputs)):
            if value not in piece.inputs:
                chosen.pop(value, None)
        inner = self.chosen.get(copy, {})
        chosen.update(zip(moved(self.pool, tuple(inner), stands), inner.values()))

    def solved(
        self,
        copy: Values,
        stands: Mapping[int, int],
        orders: Mapping[int, Order],
        wanted: Sequence[Order | None],
    ) -> Cheapest:
        """Return the best result for a piece, which equal pieces share."""
        if copy not in self.known:
            kept = {leaf: orders[value] for leaf, value in stands.items() if value in orders}

            def border(outputs: Values) -> dict[int, Order]:
                return kept | {v: order for v, order in zip(outputs, wanted) if order}

            def cost(written: normal.Written, orders: Orders) -> float:
                return self.objective.weighted(self.price(written, orders))

            chooser = Chooser(self.pool, cost, self.rule, over=lambda: self.budget.over)

            def price(outputs: Values) -> float:
                if not self.options.layouts:
                    return self.alone(outputs, border(outputs))
                written = normal.piece(self.pool, outputs)
                return chooser.least(outputs, written, border(outputs))

            best = self.known[copy] = self.best(copy, price, self.budget)
            self.chosen[copy] = chooser.orders.get(best.outputs, {})
            self.candidates += self.known[copy].candidates
        return self.known[copy]

    def best(
        self,
        outputs: Values,
        price: Callable[[Values], float],
        budget: Budget,
        together: bool = False,
    ) -> Cheapest:
        """Return the best graph that the chosen method finds, or the result of a chain."""
        if self.replay is not None:
            steps = next(self.replay, ())
            new = replayed(self.pool, outputs, self.book, steps)
            costs = price(outputs), price(new)
            return Cheapest(new, costs[1], steps, len(costs), True, costs)
        given = (self.pool, outputs, self.book, price)
        alpha = self.options.alpha
        if self.options.method == "saturation" and not together:
            return saturate(*given, self.prices, alpha=alpha, budget=budget)
        return backtrack(*given, alpha=alpha, budget=budget, together=together)

    def alone(self, outputs: Values, layouts: Orders | None = None) -> float:
        """Return the cost of part of a graph."""
        written = normal.piece(self.pool, outputs)
        return self.objective.weighted(self.price(written, layouts))

    def spans(self, outputs: Values) -> Counter[int]:
        """Return the number of matches that contain each value inside their left side."""
        found: Counter[int] = Counter()
        for _, matches in Matcher(self.pool).every(self.book, places(self.pool, outputs)):
            for match in matches:
                inside = self.pool.order(match.roots, frozenset(match.values.values()))
                found.update(v for v in inside if v not in match.roots)
        return found

    def written(self, frame: normal.Frame, outputs: Values) -> normal.Written:
        return normal.write(self.pool, frame, outputs)

    def price(self, written: normal.Written, layouts: Orders | None = None) -> Cost:
        """Return the cost of a graph."""
        contents = dict(written.contents)
        for name, value in written.values.items():
            if self.pool.fixed[value] and name in written.graph.roles and name not in contents:
                contents[name] = self._weight(value)
        return self.model.cost(written.graph, contents, _named(written, layouts or {}))

    def _weight(self, value: int) -> Array:
        """Return the contents of a weight; within a piece only those of numbers matter."""
        maker = self.pool.makers[value]
        if isinstance(maker, Leaf) and maker.name in self.constants:
            return self.constants[maker.name]
        spec = self.pool.specs[value]
        return np.broadcast_to(np.ones((), spec.dtype), spec.shape)


def _named(written: normal.Written, orders: Orders) -> dict[str, Order]:
    """Return orders by the names that values have in a graph."""
    return {name: orders[value] for name, value in written.values.items() if value in orders}
