"""Cost-based backtracking over substitutions (MetaFlow, section 4, Algorithm 1).

Candidates wait in a queue, cheapest first. Every rule is applied to the cheapest at every match;
what costs less than alpha times the best graph so far is kept and looked at in its turn. So a
substitution that makes a graph slower is tolerated where it may enable others. A kernel that was
enlarged always is: it waits in the place of the graph that it was enlarged in. Beside single
matches a candidate is also what a rule makes everywhere at once, since a block of 32 equal branches
is not worth 31 rounds.
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
    """A rule and where it was applied: at the match of a number, or at `count` matches in turn."""

    rule: str
    match: int | None
    count: int = 1


Came = dict[Values, tuple[Values, Step] | None]  # of each graph, that before it, and the step


@dataclass
class Budget:
    """How long a search may take, and what it takes for better.

    It ends at its deadline, and looks at so many candidates a graph.
    """

    candidates: int = 1000
    deadline: Deadline = field(default_factory=Deadline)
    gain: float = 0.99  # what costs more than this times the best is not better than it

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.deadline.over

    def part(self, candidates: int, share: float) -> Budget:
        """Return a budget of a share of the time that is left."""
        return replace(self, candidates=candidates, deadline=self.deadline.part(share))


@dataclass(frozen=True)
class Cheapest:
    """The best graph that a search met, what it costs, and the steps that lead to it.

    `complete`: whether every graph within alpha of the best was looked at.
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
    """Return the cheapest graph that rules make of a graph.

    Args:
        price: what a graph costs.
        alpha: what costs more than this times the best is not looked at further; 1 is greedy.
        together: apply rules only at all their matches at once.
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
    """Yield what one rule makes of a graph: at all its matches together, then at each one."""
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
    """Return the graph that steps make of a graph.

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
