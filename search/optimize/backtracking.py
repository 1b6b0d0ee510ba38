"""Cost-based backtracking over substitutions (MetaFlow, section 4, Algorithm 1).

Candidate graphs wait in a queue, cheapest first. Every rule is applied to the cheapest one at every
match; results that cost less than alpha times the best graph so far enter the queue. So a
substitution that makes a graph slower is tolerated if it may enable others. A graph in which a
kernel was enlarged is always kept, with the priority of the graph before it. Besides single
matches, a rule is also applied at all matches at once: a block of 32 equal branches is not worth 31
rounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from soapstone.deadline import Deadline, TimeUpError
from soapstone.ir.errors import GraphError
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.rewrite import applied, everywhere
from soapstone.search.rules.rulebook import Rulebook

Values = tuple[int, ...]
Price = Callable[[Values], float]
ENDS = (KeyboardInterrupt, TimeUpError)  # a search, which keeps what it has found by then


@dataclass(frozen=True)
class Step:
    """An application of a rule: at the match with a number, or at `count` matches in turn."""

    rule: str
    match: int | None
    count: int = 1


Came = dict[Values, tuple[Values, Step] | None]  # of each graph, that before it, and the step


@dataclass
class Budget:
    """The limits of a search: a deadline, candidates for each graph, the least gain."""

    candidates: int = 1000
    deadline: Deadline = field(default_factory=Deadline)
    gain: float = 0.99  # what costs more than this times the best is not better than it

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline.over

    def part(self, candidates: int, share: float) -> Budget:
        """Return a budget with a share of the remaining time."""
        return replace(self, candidates=candidates, deadline=self.deadline.part(share))


@dataclass(frozen=True)
class Cheapest:
    """The cheapest graph that a search met, its cost, and the steps that lead to it.

    `complete`: whether every graph within alpha of the best was expanded.
    """

    outputs: Values
    cost: float
    steps: tuple[Step, ...]
    candidates: int
    complete: bool
    history: tuple[float, ...] = field(default=(), compare=False)


def backtrack(
    pool: Pool,
    outputs: Values,
    book: Rulebook,
    price: Price,
    *,
    alpha: float = 1.05,
    budget: Budget | None = None,
    together: bool = False,
) -> Cheapest:
    """Return the cheapest graph found by applying rules to a graph.

    Args:
        price: returns the cost of a graph.
        alpha: graphs that cost more than this times the best are not expanded; 1 is greedy.
        together: whether rules are only applied at all their matches at once.
    """
    budget = budget or Budget()
    matcher = Matcher(pool)
    start = price(outputs)
    best, best_cost = outputs, start
    came: Came = {outputs: None}
    queue = [(start, 0, outputs)]
    history = [start]
    count = 1
    try:
        while queue and not budget.over and count < budget.candidates:
            cost, _, graph = heapq.heappop(queue)
            if cost > alpha * best_cost:
                continue
            for new, step in neighbours(pool, matcher, graph, book, together):
                if new in came:
                    continue
                came[new] = graph, step
                new_cost = price(new)
                count += 1
                if new_cost < best_cost * budget.gain:
                    best, best_cost = new, new_cost
                    history.append(new_cost)
                begun = bool(book.by_name[step.rule].open)
                wait = min(cost, new_cost) if begun else new_cost
                if wait <= alpha * best_cost:
                    heapq.heappush(queue, (wait, count, new))
                if budget.over or count >= budget.candidates:
                    break
    except ENDS:
        budget.deadline.stop()  # what was found is kept
    complete = not budget.deadline.stopped and not any(
        cost <= alpha * best_cost for cost, _, _ in queue
    )
    return Cheapest(best, best_cost, steps_to(came, best), count, complete, tuple(history))


def neighbours(
    pool: Pool, matcher: Matcher, graph: Values, book: Rulebook, together: bool = False
) -> Iterator[tuple[Values, Step]]:
    """Yield the results of one rule on a graph: at all matches together, then at each one."""
    for rule, found in matcher.every(book, places(pool, graph)):
        if together or len(found) > 1:
            new, count = everywhere(pool, matcher, graph, rule)
            if count > (0 if together else 1):
                yield new, Step(rule.name, None, count)
        for number, match in enumerate([] if together else found):
            one = applied(pool, graph, [match])
            if one is not None and one != graph:
                yield one, Step(rule.name, number)


def replayed(pool: Pool, outputs: Values, book: Rulebook, steps: Iterable[Step]) -> Values:
    """Return the graph that results from applying steps to a graph.

    Raises:
        GraphError: a step's rule is not in the book, or does not match there; names it.
    """
    matcher = Matcher(pool)
    for step in steps:
        rule = book.by_name.get(step.rule)
        if rule is None:
            raise GraphError(f"rule {step.rule!r}: it is not among the rules in use")
        if step.match is None:
            outputs, count = everywhere(pool, matcher, outputs, rule)
            new = outputs if count == step.count else None
        else:
            found = islice(matcher.matches(rule, places(pool, outputs)), step.match, None)
            match = next(found, None)
            new = None if match is None else applied(pool, outputs, [match])
        if new is None:
            raise GraphError(f"rule {step.rule!r}: it no longer matches where it was applied")
        outputs = new
    return outputs


def steps_to(came: Came, graph: Values) -> tuple[Step, ...]:
    """Return the steps that lead to a graph."""
    steps = []
    while (before := came[graph]) is not None:
        graph, step = before
        steps.append(step)
    return tuple(reversed(steps))
