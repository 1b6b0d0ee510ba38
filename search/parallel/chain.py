"""One Markov chain over strategies, compiled (Jia, section 3.5).

A proposal changes the configuration of one operator, at random as in the paper or by a move that
keeps what is good about it, or those of all equal operators, or of all that share parameters. It is
accepted if it is faster, else with a probability that falls with the difference. The threshold is
drawn first, so that a simulation stops as soon as it must be passed. `descend` tries given
configurations in turn instead, and keeps what is faster.

Where memory is scarce (`Chain.pending`) both stop with CHECK at each change that is fast enough:
`Walker` says how many bytes it is over the devices' capacities, and `decide` ends the proposal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.search.parallel import choice as choices
from soapstone.search.parallel.arrays import (
    BOUNDS,
    CHANNEL,
    CUT,
    DEGREES,
    DIMS,
    EXTENT,
    FREE,
    GIVER,
    HEAD,
    KIND,
    MESSAGE,
    NEED,
    NODE,
    OK,
    OVERFLOW,
    POINTS,
    SEND,
    TASKS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.arrays import (
    CLASS as ITS_CLASS,
)
from soapstone.search.parallel.compiling import (
    NONE,
    ONE,
    ZERO,
    compiled,
    entry,
    integer,
    packed,
    put,
)
from soapstone.search.parallel.geometry import legal
from soapstone.search.parallel.schedule import (
    PASSED,
    State,
    accept,
    first_affected,
    reject,
    simulate,
)

# kinds of moves
RANDOM, DEVICES, DEGREE, COPY, CLASS, UNIFORM, UNEVEN, TWIN, SHIFT, ALONG, MOVES = range(11)
AFFORDED = 8  # operators that a change of a whole class has on average
# what a chain stopped for, or what became of a proposal
BUDGET, FULL, CHECK, NO, YES = (integer(outcome) for outcome in range(5))


@packed
class Chain(NamedTuple):
    """A chain's place: random numbers, costs and counts.

    random: uint64 (1). cost: int64 [now, best]. counts: int64 [proposals, accepted, simulations,
    those not simulated, proposals at the best, tasks that passes did not begin with, passes cut
    short]. load: (2, devices), work of each device, now and as proposed. pending: int64 [whether
    memory is scarce, threshold, first place, time, move] of the proposal that waits for CHECK.
    """

    random: Array
    cost: Array
    counts: Array
    weights: Array  # (MOVES): cumulative shares of moves
    free: Array  # operators that may be chosen, those with a configuration of their own
    group_of: Array  # (operators, 2): their class, and those that share their parameters
    group_ptr: Array  # operators of each group
    members: Array
    peer_ptr: Array  # operators that share a value with an operator
    peers: Array
    axes: Array  # (peers, dims): the peer's dim that cuts what they share as each of its own does
    path: Array  # (2, AFFORDED): operators that are changed together, and the place of their peer
    divisors: Array  # numbers of points tried first
    best: Array  # operators of the best choice
    best_placed: Array
    best_cuts: Array
    load: Array
    pending: Array
    moves: Array  # (MOVES, 2): how often proposed and accepted


@compiled
def _next(random: Array) -> int:
    """Return 63 random bits (xorshift64*; Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    found: int = np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(1))  # type: ignore[assignment]
    return found


@compiled
def _below(random: Array, limit: Any) -> int:
    found: int = _next(random) % limit
    return found


@compiled
def _share(random: Array) -> float:
    return float(_next(random) >> 10) / 9007199254740992.0


@compiled
def _points(p: Problem, c: Choice, op: int) -> int:
    points = 1
    for dim in range(p.operators[op, DIMS]):
        points *= c.operators[op, DEGREES + dim]
    return points


@compiled
def _degrees(p: Problem, c: Choice, k: Chain, op: int) -> None:
    """Draw degrees: a number of points, and its prime factors dealt out to dims that may take it.

    Every legal choice of degrees with at most one point a device can be drawn.
    """
    c.cuts[op, CUT] = -1
    for _ in range(64):
        for dim in range(p.operators[op, DIMS]):
            c.operators[op, DEGREES + dim] = 1
        if _below(k.random, np.int64(8)) == 0:
            left = 1 + _below(k.random, len(p.devices))
        else:
            left = k.divisors[_below(k.random, k.divisors.shape[0])]
        factor = 2
        good = True
        while left > 1:
            if factor * factor > left:
                factor = left
            if left % factor:
                factor += 1
                continue
            left //= factor
            count = 0
            for dim in range(p.operators[op, DIMS]):
                wide = c.operators[op, DEGREES + dim] * factor <= p.operators[op, EXTENT + dim]
                count += p.operators[op, OK + dim] and wide
            if count == 0:
                good = False
                break
            pick = _below(k.random, count)
            for dim in range(p.operators[op, DIMS]):
                wide = c.operators[op, DEGREES + dim] * factor <= p.operators[op, EXTENT + dim]
                if p.operators[op, OK + dim] and wide:
                    if pick == 0:
                        c.operators[op, DEGREES + dim] *= factor
                        break
                    pick -= 1
        if good and legal(p, p.operators[op, NODE], c.operators[op, DEGREES:]):
            return
    for dim in range(p.operators[op, DIMS]):
        c.operators[op, DEGREES + dim] = 1


@compiled
def _place(p: Problem, c: Choice, k: Chain, op: int) -> None:
    """Draw devices: mostly neighbours in order, or evenly spaced; sometimes any, even the same."""
    points = c.operators[op, POINTS]
    pick = _below(k.random, np.int64(16))
    if pick < 8:
        blocks = max(1, len(p.devices) // points)
        first = _below(k.random, blocks) * points
        for i in range(points):
            c.placed[op, i] = (first + i) % len(p.devices)
    elif pick < 11:
        stride = max(1, len(p.devices) // points)
        first = _below(k.random, stride)
        for i in range(points):
            c.placed[op, i] = (first + i * stride) % len(p.devices)
    elif pick < 13:
        first = _below(k.random, len(p.devices))
        for i in range(points):
            c.placed[op, i] = (first + i) % len(p.devices)
    elif pick < 15:  # distinct devices in any order
        for i in range(points):
            while True:
                device = _below(k.random, len(p.devices))
                known = False
                for j in range(i):
                    known = known or c.placed[op, j] == device
                if not known:
                    break
            c.placed[op, i] = device
    else:
        for i in range(points):
            c.placed[op, i] = _below(k.random, len(p.devices))


@compiled
def _take_over(p: Problem, c: Choice, source: int, target: int) -> bool:
    """Give an operator another's degrees, dim by dim, and devices; return whether that is legal."""
    if p.operators[source, DIMS] != p.operators[target, DIMS]:
        return False
    for dim in range(p.operators[source, DIMS]):
        degree = c.operators[source, DEGREES + dim]
        if degree > p.operators[target, EXTENT + dim] or (
            degree > 1 and not p.operators[target, OK + dim]
        ):
            return False
    if not legal(p, p.operators[target, NODE], c.operators[source, DEGREES:]):
        return False
    put(c.operators[target], c.operators[source], c.operators.shape[1])
    put(c.placed[target], c.placed[source], c.placed.shape[1])
    put(c.cuts[target], c.cuts[source], c.cuts.shape[1])
    cut = c.cuts[source, CUT]
    if cut >= 0 and p.operators[source, EXTENT + cut] != p.operators[target, EXTENT + cut]:
        c.cuts[target, CUT] = -1
    return True


@compiled
def _align(p: Problem, c: Choice, k: Chain, op: int, place: int) -> None:
    """Give an operator the tiles that its peer has of the value that they share."""
    peer = k.peers[place]
    c.cuts[op, CUT] = -1
    for dim in range(p.operators[op, DIMS]):
        degree, other = ONE, k.axes[place, dim]
        if other >= 0 and p.operators[op, OK + dim]:
            degree = c.operators[peer, DEGREES + other]
        c.operators[op, DEGREES + dim] = min(degree, p.operators[op, EXTENT + dim])
    # Two dims may follow one of the peer's: x and x.T of a product of x with itself.
    fits = _points(p, c, op) <= len(p.devices)
    if not (fits and legal(p, p.operators[op, NODE], c.operators[op, DEGREES:])):
        for dim in range(p.operators[op, DIMS]):
            c.operators[op, DEGREES + dim] = 1
    c.operators[op, POINTS] = _points(p, c, op)
    if c.operators[op, POINTS] == c.operators[peer, POINTS]:
        put(c.placed[op], c.placed[peer], c.placed.shape[1])
    else:
        _place(p, c, k, op)


@compiled
def _along(k: Chain, op: int) -> int:
    """Draw a path of peers, one after another; return its length."""
    k.path[0, 0] = op
    length = ONE
    while length < AFFORDED and (length == 1 or _below(k.random, np.int64(2))):
        last = k.path[0, length - 1]
        count = k.peer_ptr[last + 1] - k.peer_ptr[last]
        if count == 0:
            break
        peer = k.peers[k.peer_ptr[last] + _below(k.random, count)]
        known = False
        for i in range(length):
            known = known or k.path[0, i] == peer
        if known:
            break
        place = k.peer_ptr[peer]
        while k.peers[place] != last:
            place += 1
        k.path[0, length], k.path[1, length] = peer, place
        length += 1
    return length


@compiled
def _another_degree(p: Problem, c: Choice, k: Chain, op: int) -> bool:
    """Double or halve the degree of one dim, or move a factor from one to another."""
    c.cuts[op, CUT] = -1
    dims = p.operators[op, DIMS]
    a = _below(k.random, dims)
    b = _below(k.random, dims)
    pick = _below(k.random, np.int64(3))
    if pick != 0:
        if c.operators[op, DEGREES + a] % 2:
            return False
        c.operators[op, DEGREES + a] //= 2
    if pick != 1:
        c.operators[op, DEGREES + b] *= 2
        if (
            c.operators[op, DEGREES + b] > p.operators[op, EXTENT + b]
            or not p.operators[op, OK + b]
        ):
            return False
    return _points(p, c, op) <= len(p.devices) and legal(
        p, p.operators[op, NODE], c.operators[op, DEGREES:]
    )


@compiled
def _uneven(p: Problem, c: Choice, k: Chain, op: int) -> bool:
    """Move a boundary between two tiles; return whether there is one to move.

    A dim is cut unevenly or another is: one of an operator at most. A dim of single indices stays
    so, which those that another dim is split inside must.
    """
    dims = p.operators[op, DIMS]
    dim = _below(k.random, dims)
    degree, extent = c.operators[op, DEGREES + dim], p.operators[op, EXTENT + dim]
    if degree < 2 or degree == extent:
        return False
    row = c.cuts[op]
    if row[CUT] != dim:
        row[CUT] = dim
        for i in range(degree + 1):
            row[BOUNDS + i] = extent * i // degree
    i = BOUNDS + 1 + _below(k.random, degree - 1)
    low, high = row[i - 1] + 1, row[i + 1]
    if high - low < 2:
        return False
    row[i] = low + _below(k.random, high - low)
    return True


@compiled
def _run(k: Chain, p: Problem, op: int) -> int:
    """Return how many operators from this one on are changed together."""
    length = 1 + _below(k.random, np.int64(AFFORDED))
    found: int = min(length, p.operators.shape[0] - op)
    return found


@compiled
def _propose(p: Problem, c: Choice, b: Choice, s: Scratch, k: Chain, move: int) -> bool:
    """Change the configuration of some operators; return whether there is a change to judge.

    The operators are collected, and what they were is saved, before anything is changed.
    """
    op = k.free[_below(k.random, k.free.shape[0])]
    choices.affected(p, s, op, True)
    number = k.group_of[op, _below(k.random, np.int64(2)) if move == CLASS else ZERO]
    first, size = k.group_ptr[number], k.group_ptr[number + 1] - k.group_ptr[number]
    twin, run = op, ONE
    if move == CLASS and (size < 2 or _below(k.random, size) >= AFFORDED):
        move = COPY  # a large class costs as much to derive
    if move == CLASS:
        for place in range(first, first + size):
            choices.affected(p, s, k.members[place], False)
    elif move in (TWIN, SHIFT):
        run = _run(k, p, op)
        if move == TWIN:
            twin = k.members[first + _below(k.random, size)]
            if twin == op:
                move = COPY
        if move != COPY:
            for i in range(1, run):
                choices.affected(p, s, op + i, False)
    elif move == ALONG:
        run = _along(k, op)
        for i in range(1, run):
            choices.affected(p, s, k.path[0, i], False)
    choices.save(p, c, b, s)
    if move == DEVICES:
        _place(p, c, k, op)
    elif move == UNEVEN:
        return _uneven(p, c, k, op)
    elif move == TWIN:
        for i in range(run):
            other = twin + i
            if (
                other >= p.operators.shape[0]
                or p.operators[op + i, ITS_CLASS] != p.operators[other, ITS_CLASS]
            ):
                break
            if p.operators[op + i, KIND] == FREE:
                _take_over(p, c, other, op + i)
    elif move == SHIFT:
        by = 1 + _below(k.random, np.int64(p.devices.shape[0]))
        for i in range(run):
            if p.operators[op + i, KIND] == FREE:
                for point in range(c.operators[op + i, POINTS]):
                    c.placed[op + i, point] = (c.placed[op + i, point] + by) % p.devices.shape[0]
    elif move == DEGREE:
        before = c.operators[op, POINTS]
        if not _another_degree(p, c, k, op):
            return False
        c.operators[op, POINTS] = _points(p, c, op)
        if c.operators[op, POINTS] != before:
            _place(p, c, k, op)
    elif move == COPY:
        count = k.peer_ptr[op + 1] - k.peer_ptr[op]
        if count == 0:
            return False
        place = k.peer_ptr[op] + _below(k.random, count)
        if _below(k.random, np.int64(2)) or not _take_over(p, c, k.peers[place], op):
            _align(p, c, k, op, place)
    elif move == ALONG:
        before = c.operators[op, POINTS]
        _degrees(p, c, k, op)
        c.operators[op, POINTS] = _points(p, c, op)
        if c.operators[op, POINTS] != before:
            _place(p, c, k, op)
        for i in range(1, run):
            _align(p, c, k, k.path[0, i], k.path[1, i])
    else:
        _degrees(p, c, k, op)
        c.operators[op, POINTS] = _points(p, c, op)
        if move == UNIFORM:  # as in the paper: any device for each point
            for i in range(c.operators[op, POINTS]):
                c.placed[op, i] = _below(k.random, len(p.devices))
        else:
            _place(p, c, k, op)
        if move == CLASS:
            for place in range(first, first + size):
                if k.members[place] != op:
                    _take_over(p, c, op, k.members[place])
    return True


@entry
def keep_best(c: Choice, k: Chain, cost: int) -> None:
    """Note the strategy as the best so far."""
    k.cost[1] = cost
    k.counts[4] = k.counts[0]
    for op in range(c.operators.shape[0]):
        put(k.best[op], c.operators[op], c.operators.shape[1])
        put(k.best_placed[op], c.placed[op], c.placed.shape[1])
        put(k.best_cuts[op], c.cuts[op], c.cuts.shape[1])


@compiled
def _crowded(c: Choice, part: Any) -> bool:
    """Return whether more than 1 / part of a pool is taken."""
    return bool(
        c.top[MESSAGE] > c.messages.shape[0] // part
        or c.top[GIVER] > c.givers.shape[0] // part
        or c.top[SEND] > c.sends.shape[0] // part
        or c.top[NEED] > c.needs.shape[0] // part
        or c.top[CHANNEL] > c.channels.shape[0] // part
        or c.top[HEAD] > c.head.shape[0] // part
    )


@compiled
def _weigh(p: Problem, c: Choice, load: Array, op: int, sign: int) -> None:
    """Add the work of an operator's tasks to that of their devices."""
    for task in range(p.operators[op, TASKS], p.operators[op, TASKS + 1]):
        for point in range(c.operators[op, POINTS]):
            load[c.placed[op, point]] += sign * c.task_ns[task, point]


@entry
def weigh(p: Problem, c: Choice, k: Chain) -> None:
    """Set the work of each device."""
    for device in range(p.devices.shape[0]):
        k.load[0, device] = 0
    for op in range(p.operators.shape[0]):
        _weigh(p, c, k.load[0], op, ONE)


@compiled
def _roomy(p: Problem, c: Choice, s: Scratch, t: State) -> bool:
    """Make all messages anew if pools are half full; return whether that has made room."""
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
    """Derive what was proposed, and accept it unless it is above the threshold."""
    put(k.load[1], k.load[0], p.devices.shape[0])
    for i in range(s.collected[0]):
        _weigh(p, b, k.load[1], s.lists[0, i], NONE)
    choices.change(p, c, s)
    for i in range(s.collected[0]):
        _weigh(p, c, k.load[1], s.lists[0, i], ONE)
    for device in range(p.devices.shape[0]):
        if k.load[1, device] > threshold:  # whatever has to move
            k.counts[3] += 1
            choices.put_back(p, c, b, s)
            return NO
    choices.reconnect(p, c, s)
    if c.top[OVERFLOW]:
        choices.undo(p, c, b, s)
        return FULL
    first = first_affected(p, s) if delta else ZERO
    k.counts[2] += 1
    k.counts[5] += first
    cost = simulate(p, c, t, first, threshold)
    k.pending[1], k.pending[2], k.pending[3] = threshold, first, cost
    if k.pending[0] and cost != PASSED:
        return CHECK
    return _decide(p, c, b, s, t, k, cost)


@compiled
def _decide(p: Problem, c: Choice, b: Choice, s: Scratch, t: State, k: Chain, cost: int) -> int:
    """End the proposal that was simulated: its cost is known, PASSED if above the threshold."""
    if cost == PASSED:
        k.counts[6] += 1
        reject(t)
        choices.undo(p, c, b, s)
        return NO
    accept(p, t, k.pending[2])
    put(k.load[0], k.load[1], p.devices.shape[0])
    k.counts[1] += 1
    k.moves[k.pending[4], 1] += 1
    k.cost[0] = cost
    if cost < k.cost[1]:
        keep_best(c, k, cost)
    return YES


@entry
def decide(p: Problem, c: Choice, b: Choice, s: Scratch, t: State, k: Chain, cost: int) -> int:
    """End the proposal that stopped with CHECK, at this cost."""
    return _decide(p, c, b, s, t, k, cost if cost <= k.pending[1] else PASSED)


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
    """Make so many proposals; return FULL, with nothing lost, when a pool must be made larger.

    Args:
        temperature: the rise in nanoseconds that is accepted with probability 1 / e.
        delta: whether passes begin where the change does.
    """
    for _ in range(proposals):
        if not _roomy(p, c, s, t):
            return FULL
        u = _share(k.random)
        move = 0
        while move < MOVES - 1 and u >= k.weights[move]:
            move += 1
        threshold = k.cost[0] + int(-np.log(1.0 - _share(k.random)) * temperature)
        k.counts[0] += 1
        k.moves[move, 0] += 1
        k.pending[4] = move
        if not _propose(p, c, b, s, k, move):
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
    """Give the operators of a group one configuration after another; keep what is faster.

    Args:
        group: equal operators. degrees, placed: configurations, as rows of `Choice.operators` and
            `Choice.placed`. row: (1), the next to try; last: the one to stop before.
    """
    while row[0] < last:
        if not _roomy(p, c, s, t):
            return FULL
        at = row[0]
        row[0] += 1
        k.counts[0] += 1
        k.pending[4] = CLASS
        choices.affected(p, s, group[0], True)
        for i in range(1, group.shape[0]):
            choices.affected(p, s, group[i], False)
        choices.save(p, c, b, s)
        for i in range(group.shape[0]):
            c.cuts[group[i], CUT] = -1
            put(c.operators[group[i]], degrees[at], degrees.shape[1])
            put(c.placed[group[i]], placed[at], placed.shape[1])
        outcome = _judge(p, c, b, s, t, k, k.cost[0] - 1, delta)
        if outcome == FULL:
            row[0] = at
        if outcome in (FULL, CHECK):
            return outcome
    return BUDGET


def moves(shares: dict[int, float]) -> Array:
    """Return the cumulative shares of moves."""
    weights = np.zeros(MOVES)
    for move, share in shares.items():
        weights[move] = share
    found: Array = np.cumsum(weights) / weights.sum()
    return found


INFORMED = {
    RANDOM: 0.1,
    DEVICES: 0.2,
    DEGREE: 0.1,
    COPY: 0.25,
    ALONG: 0.1,
    CLASS: 0.05,
    UNEVEN: 0.05,
    TWIN: 0.1,
    SHIFT: 0.05,
}
PLAIN = {UNIFORM: 1.0}  # the paper's

__all__ = [
    "BUDGET",
    "CHECK",
    "FULL",
    "INFORMED",
    "PLAIN",
    "Chain",
    "decide",
    "descend",
    "keep_best",
    "moves",
    "walk",
    "weigh",
]
