"""One Markov chain over strategies, compiled (Jia, section 3.5).

A proposal changes the configuration of one operator, at random as in the paper or by an informed
move, or those of all equal operators, or of all that share parameters. It is accepted if it is
faster, else with a probability that decreases with the difference. The threshold is drawn first, so
a simulation stops as soon as it exceeds it. `descend` tries given configurations in turn instead,
and keeps those that are faster.

Where memory is scarce (`RUN`), both stop with CHECK at each change that is fast enough: `Walker`
computes the bytes beyond the devices' capacities, and `decide` ends the proposal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.mcmc.chain_arrays import Chain, share
from soapstone.search.parallel.mcmc.proposals import CLASS, MOVES, propose
from soapstone.search.parallel.problem import choice as choices
from soapstone.search.parallel.problem.arrays import (
    CHANNELS,
    GIVERS,
    HEADS,
    MESSAGES,
    NEEDS,
    OVERFLOW,
    SENDS,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import (
    NONE,
    ONE,
    ZERO,
    compiled,
    entry,
    integer,
    put,
    span,
)
from soapstone.search.parallel.simulation.schedule import (
    PASSED,
    State,
    accept,
    first_affected,
    reject,
    simulate,
)

# what a chain stopped for, or what became of a proposal
BUDGET, FULL, CHECK, NO, YES = (integer(outcome) for outcome in range(5))


@entry
def keep_best(c: Choice, k: Chain, cost: int) -> None:
    """Record the strategy as the best so far."""
    run = k.run[0]
    run.best, run.before_best = cost, run.proposals
    for op in range(c.operators.shape[0]):
        k.best[op] = c.operators[op]
        put(k.best_placed[op], c.placed[op], c.placed.shape[1])
        put(k.best_cuts[op], c.cuts[op], c.cuts.shape[1])


@compiled
def _crowded(c: Choice, part: Any) -> bool:
    """Return whether more than 1 / part of a pool is in use."""
    return bool(
        c.top[MESSAGES] > c.messages.shape[0] // part
        or c.top[GIVERS] > c.givers.shape[0] // part
        or c.top[SENDS] > c.sends.shape[0] // part
        or c.top[NEEDS] > c.needs.shape[0] // part
        or c.top[CHANNELS] > c.channels.shape[0] // part
        or c.top[HEADS] > c.head.shape[0] // part
    )


@compiled
def _weigh(p: Problem, c: Choice, load: Array, op: int, sign: int) -> None:
    """Add the work of an operator's tasks to that of their devices, or subtract it."""
    for task in span(p.operators[op].tasks):
        for point in range(c.operators[op].points):
            load[c.placed[op, point]] += sign * c.task_ns[task, point]


@entry
def weigh(p: Problem, c: Choice, k: Chain) -> None:
    """Compute the work of each device."""
    for device in range(p.devices.shape[0]):
        k.load[0, device] = 0
    for op in range(p.operators.shape[0]):
        _weigh(p, c, k.load[0], op, ONE)


@compiled
def _roomy(p: Problem, c: Choice, s: Scratch, t: State) -> bool:
    """Rebuild all messages if pools are half full; return whether that has made room."""
    if _crowded(c, np.int64(2)):
        choices.reconnect_all(p, c, s)
        if c.top[OVERFLOW] or _crowded(c, np.int64(3)):
            return False
        simulate(p, c, t, ZERO, NONE)
        accept(p, t, ZERO)
    return True


@compiled
def _judge(
    p: Problem, c: Choice, b: Choice, s: Scratch, t: State, k: Chain, threshold: int, delta: bool
) -> int:
    """Simulate the proposal, and accept it unless its cost exceeds the threshold."""
    run = k.run[0]
    put(k.load[1], k.load[0], p.devices.shape[0])
    for i in range(s.collected[0]):
        _weigh(p, b, k.load[1], s.lists[i].operator, NONE)
    choices.change(p, c, s)
    for i in range(s.collected[0]):
        _weigh(p, c, k.load[1], s.lists[i].operator, ONE)
    for device in range(p.devices.shape[0]):
        if k.load[1, device] > threshold:  # whatever has to move
            choices.put_back(p, c, b, s)
            return NO
    choices.reconnect(p, c, s)
    if c.top[OVERFLOW]:
        choices.undo(p, c, b, s)
        return FULL
    first = first_affected(p, s) if delta else ZERO
    run.simulated += 1
    run.skipped += first
    cost = simulate(p, c, t, first, threshold)
    run.threshold, run.first, run.passed = threshold, first, cost
    if run.scarce and cost != PASSED:
        return CHECK
    return _decide(p, c, b, s, t, k, cost)


@compiled
def _decide(p: Problem, c: Choice, b: Choice, s: Scratch, t: State, k: Chain, cost: int) -> int:
    """End the simulated proposal, given its cost; PASSED if it exceeded the threshold."""
    run = k.run[0]
    if cost == PASSED:
        reject(t)
        choices.undo(p, c, b, s)
        return NO
    accept(p, t, run.first)
    put(k.load[0], k.load[1], p.devices.shape[0])
    run.accepted += 1
    k.moves[run.move, 1] += 1
    run.cost = cost
    if cost < run.best:
        keep_best(c, k, cost)
    return YES


@entry
def decide(p: Problem, c: Choice, b: Choice, s: Scratch, t: State, k: Chain, cost: int) -> int:
    """End the proposal that stopped with CHECK, at this cost."""
    return _decide(p, c, b, s, t, k, cost if cost <= k.run[0].threshold else PASSED)


@entry
def walk(
    p: Problem,
    c: Choice,
    b: Choice,
    s: Scratch,
    t: State,
    k: Chain,
    temperature: float,
    proposals: int,
    delta: bool,
) -> int:
    """Make proposals; return FULL, with nothing lost, when a pool must be enlarged.

    Args:
        temperature: the increase in nanoseconds that is accepted with probability 1 / e.
        proposals: how many to make.
        delta: whether simulations begin at the change.
    """
    run = k.run[0]
    for _ in range(proposals):
        if not _roomy(p, c, s, t):
            return FULL
        u = share(k.random)
        move = 0
        while move < MOVES - 1 and u >= k.weights[move]:
            move += 1
        threshold = run.cost + int(-np.log(1.0 - share(k.random)) * temperature)
        run.proposals += 1
        k.moves[move, 0] += 1
        run.move = move
        if not propose(p, c, b, s, k, move):
            choices.put_back(p, c, b, s)
            continue
        outcome = _judge(p, c, b, s, t, k, threshold, delta)
        if outcome in (FULL, CHECK):
            return outcome
    return BUDGET


@entry
def descend(
    p: Problem,
    c: Choice,
    b: Choice,
    s: Scratch,
    t: State,
    k: Chain,
    group: Array,
    degrees: Array,
    placed: Array,
    row: Array,
    last: int,
    delta: bool,
) -> int:
    """Try configurations for the operators of a group in turn; keep those that are faster.

    Args:
        group: equal operators. degrees, placed: configurations, as rows of `Choice.operators` and
            `Choice.placed`. row: (1), the next to try. last: the row to stop before.
    """
    run = k.run[0]
    while row[0] < last:
        if not _roomy(p, c, s, t):
            return FULL
        at = row[0]
        row[0] += 1
        run.proposals += 1
        run.move = CLASS
        choices.affected(p, s, group[0], True)
        for i in range(1, group.shape[0]):
            choices.affected(p, s, group[i], False)
        choices.save(p, c, b, s)
        for i in range(group.shape[0]):
            c.operators[group[i]] = degrees[at]
            put(c.placed[group[i]], placed[at], placed.shape[1])
        outcome = _judge(p, c, b, s, t, k, run.cost - 1, delta)
        if outcome == FULL:
            row[0] = at
        if outcome in (FULL, CHECK):
            return outcome
    return BUDGET
