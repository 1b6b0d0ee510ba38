"""The proposals of a Markov chain, compiled: other configurations for some operators.

These are one operator, at random as in the paper (Jia, section 3.5) or by an informed move; all
equal operators; all that share parameters; a path; or a run of operators.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.mcmc.chain_arrays import AFFORDED, Chain, below
from soapstone.search.parallel.problem import choice as choices
from soapstone.search.parallel.problem.arrays import FREE, Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import ONE, ZERO, compiled, put
from soapstone.search.parallel.problem.geometry import legal

# kinds of moves
RANDOM, DEVICES, DEGREE, COPY, CLASS, UNIFORM, UNEVEN, TWIN, SHIFT, ALONG, MOVES = range(11)
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


def cumulative(shares: dict[int, float]) -> Array:
    """Return the cumulative shares of moves."""
    weights = np.zeros(MOVES)
    for move, share in shares.items():
        weights[move] = share
    found: Array = np.cumsum(weights) / weights.sum()
    return found


@compiled
def _points(p: Problem, c: Choice, op: int) -> int:
    points = 1
    for dim in range(p.operators[op].dims):
        points *= c.operators[op].degrees[dim]
    return points


@compiled
def _degrees(p: Problem, c: Choice, k: Chain, op: int) -> None:
    """Draw degrees: a number of points, with its prime factors distributed over dims.

    Every legal choice of degrees with at most one point for each device can be drawn.
    """
    c.operators[op].cut = -1
    for _ in range(64):
        for dim in range(p.operators[op].dims):
            c.operators[op].degrees[dim] = 1
        if below(k.random, np.int64(8)) == 0:
            left = 1 + below(k.random, len(p.devices))
        else:
            left = k.divisors[below(k.random, k.divisors.shape[0])]
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
            for dim in range(p.operators[op].dims):
                wide = c.operators[op].degrees[dim] * factor <= p.operators[op].extent[dim]
                count += p.operators[op].splits[dim] and wide
            if count == 0:
                good = False
                break
            pick = below(k.random, count)
            for dim in range(p.operators[op].dims):
                wide = c.operators[op].degrees[dim] * factor <= p.operators[op].extent[dim]
                if p.operators[op].splits[dim] and wide:
                    if pick == 0:
                        c.operators[op].degrees[dim] *= factor
                        break
                    pick -= 1
        if good and legal(p, p.operators[op].node, c.operators[op].degrees):
            return
    for dim in range(p.operators[op].dims):
        c.operators[op].degrees[dim] = 1


@compiled
def _place(p: Problem, c: Choice, k: Chain, op: int) -> None:
    """Draw devices: mostly consecutive or evenly spaced, sometimes any, with repeats."""
    points = c.operators[op].points
    pick = below(k.random, np.int64(16))
    if pick < 8:
        blocks = max(1, len(p.devices) // points)
        first = below(k.random, blocks) * points
        for i in range(points):
            c.placed[op, i] = (first + i) % len(p.devices)
    elif pick < 11:
        stride = max(1, len(p.devices) // points)
        first = below(k.random, stride)
        for i in range(points):
            c.placed[op, i] = (first + i * stride) % len(p.devices)
    elif pick < 13:
        first = below(k.random, len(p.devices))
        for i in range(points):
            c.placed[op, i] = (first + i) % len(p.devices)
    elif pick < 15:  # distinct devices in any order
        for i in range(points):
            while True:
                device = below(k.random, len(p.devices))
                known = False
                for j in range(i):
                    known = known or c.placed[op, j] == device
                if not known:
                    break
            c.placed[op, i] = device
    else:
        for i in range(points):
            c.placed[op, i] = below(k.random, len(p.devices))


@compiled
def _take_over(p: Problem, c: Choice, source: int, target: int) -> bool:
    """Give an operator the degrees and devices of another; return whether that is legal."""
    if p.operators[source].dims != p.operators[target].dims:
        return False
    for dim in range(p.operators[source].dims):
        degree = c.operators[source].degrees[dim]
        if degree > p.operators[target].extent[dim] or (
            degree > 1 and not p.operators[target].splits[dim]
        ):
            return False
    if not legal(p, p.operators[target].node, c.operators[source].degrees):
        return False
    c.operators[target] = c.operators[source]
    put(c.placed[target], c.placed[source], c.placed.shape[1])
    put(c.cuts[target], c.cuts[source], c.cuts.shape[1])
    cut = c.operators[source].cut
    if cut >= 0 and p.operators[source].extent[cut] != p.operators[target].extent[cut]:
        c.operators[target].cut = -1
    return True


@compiled
def _align(p: Problem, c: Choice, k: Chain, op: int, place: int) -> None:
    """Give an operator the tiles that a neighbour has of the value that they share."""
    peer = k.peers[place]
    c.operators[op].cut = -1
    for dim in range(p.operators[op].dims):
        degree, other = ONE, k.axes[place, dim]
        if other >= 0 and p.operators[op].splits[dim]:
            degree = c.operators[peer].degrees[other]
        c.operators[op].degrees[dim] = min(degree, p.operators[op].extent[dim])
    # Two dims may follow one of the peer's: x and x.T of a product of x with itself.
    fits = _points(p, c, op) <= len(p.devices)
    if not (fits and legal(p, p.operators[op].node, c.operators[op].degrees)):
        for dim in range(p.operators[op].dims):
            c.operators[op].degrees[dim] = 1
    c.operators[op].points = _points(p, c, op)
    if c.operators[op].points == c.operators[peer].points:
        put(c.placed[op], c.placed[peer], c.placed.shape[1])
    else:
        _place(p, c, k, op)


@compiled
def _along(k: Chain, op: int) -> int:
    """Draw a path of neighbours; return its length."""
    k.path[0, 0] = op
    length = ONE
    while length < AFFORDED and (length == 1 or below(k.random, np.int64(2))):
        last = k.path[0, length - 1]
        count = k.peer_ptr[last + 1] - k.peer_ptr[last]
        if count == 0:
            break
        peer = k.peers[k.peer_ptr[last] + below(k.random, count)]
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
    """Double or halve the degree of one dim, or move a factor from one dim to another."""
    c.operators[op].cut = -1
    dims = p.operators[op].dims
    a = below(k.random, dims)
    b = below(k.random, dims)
    pick = below(k.random, np.int64(3))
    if pick != 0:
        if c.operators[op].degrees[a] % 2:
            return False
        c.operators[op].degrees[a] //= 2
    if pick != 1:
        c.operators[op].degrees[b] *= 2
        if c.operators[op].degrees[b] > p.operators[op].extent[b] or not p.operators[op].splits[b]:
            return False
    return _points(p, c, op) <= len(p.devices) and legal(
        p, p.operators[op].node, c.operators[op].degrees
    )


@compiled
def _uneven(p: Problem, c: Choice, k: Chain, op: int) -> bool:
    """Move a boundary between two tiles; return whether there is one to move.

    At most one dim of an operator is split unevenly. A dim that is split into single indices stays
    so, as is needed where another dim is split inside it.
    """
    dims = p.operators[op].dims
    dim = below(k.random, dims)
    degree, extent = c.operators[op].degrees[dim], p.operators[op].extent[dim]
    if degree < 2 or degree == extent:
        return False
    row = c.cuts[op]
    if c.operators[op].cut != dim:
        c.operators[op].cut = dim
        for i in range(degree + 1):
            row[i] = extent * i // degree
    i = 1 + below(k.random, degree - 1)
    low, high = row[i - 1] + 1, row[i + 1]
    if high - low < 2:
        return False
    row[i] = low + below(k.random, high - low)
    return True


@compiled
def _run(k: Chain, p: Problem, op: int) -> int:
    """Return how many operators, from this one on, change together."""
    length = 1 + below(k.random, np.int64(AFFORDED))
    return int(min(length, p.operators.shape[0] - op))


@compiled
def propose(p: Problem, c: Choice, b: Choice, s: Scratch, k: Chain, move: int) -> bool:
    """Change the configurations of some operators; return whether there is a change to judge.

    The operators are collected, and their configurations saved, before anything changes.
    """
    op = k.free[below(k.random, k.free.shape[0])]
    choices.affected(p, s, op, True)
    number = k.group_of[op, below(k.random, np.int64(2)) if move == CLASS else ZERO]
    first, size = k.group_ptr[number], k.group_ptr[number + 1] - k.group_ptr[number]
    twin, run = op, ONE
    if move == CLASS and (size < 2 or below(k.random, size) >= AFFORDED):
        move = COPY  # a large class costs as much to derive
    if move == CLASS:
        for place in range(first, first + size):
            choices.affected(p, s, k.members[place], False)
    elif move in (TWIN, SHIFT):
        run = _run(k, p, op)
        if move == TWIN:
            twin = k.members[first + below(k.random, size)]
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
                or p.operators[op + i].class_ != p.operators[other].class_
            ):
                break
            if p.operators[op + i].kind == FREE:
                _take_over(p, c, other, op + i)
    elif move == SHIFT:
        by = 1 + below(k.random, np.int64(p.devices.shape[0]))
        for i in range(run):
            if p.operators[op + i].kind == FREE:
                for point in range(c.operators[op + i].points):
                    c.placed[op + i, point] = (c.placed[op + i, point] + by) % p.devices.shape[0]
    elif move == DEGREE:
        before = c.operators[op].points
        if not _another_degree(p, c, k, op):
            return False
        c.operators[op].points = _points(p, c, op)
        if c.operators[op].points != before:
            _place(p, c, k, op)
    elif move == COPY:
        count = k.peer_ptr[op + 1] - k.peer_ptr[op]
        if count == 0:
            return False
        place = k.peer_ptr[op] + below(k.random, count)
        if below(k.random, np.int64(2)) or not _take_over(p, c, k.peers[place], op):
            _align(p, c, k, op, place)
    elif move == ALONG:
        before = c.operators[op].points
        _degrees(p, c, k, op)
        c.operators[op].points = _points(p, c, op)
        if c.operators[op].points != before:
            _place(p, c, k, op)
        for i in range(1, run):
            _align(p, c, k, k.path[0, i], k.path[1, i])
    else:
        _degrees(p, c, k, op)
        c.operators[op].points = _points(p, c, op)
        if move == UNIFORM:  # as in the paper: any device for each point
            for i in range(c.operators[op].points):
                c.placed[op, i] = below(k.random, len(p.devices))
        else:
            _place(p, c, k, op)
        if move == CLASS:
            for place in range(first, first + size):
                if k.members[place] != op:
                    _take_over(p, c, op, k.members[place])
    return True
