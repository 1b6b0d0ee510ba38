"""Compiled branch and bound: lower bounds of partial strategies, and the search by them.

A *partial strategy* has configurations for the first few operators. The time of a step is the
length of a longest path through tasks, messages between them, and the order in which each device
runs its tasks. Leaving paths out gives a lower bound; the paths considered here are

    begin ──► forward points of operators that have a configuration    (`end`, exact but for waits
          ──► a way through the rest of the network, forward and back  (`rest`)     on channels)
          ──► their backward points, and the updates                   (`away`)

Paths lead from point task to point task, by the least delays of `tables.py`, and along devices. The
rest is tabulated before the search, by configuration (`pairs.py`): `rest` is the shortest way from
each forward point to each backward point of an operator through the operators that read it, `reach`
the same through those before it. Both are minimal over the neighbours' configurations. A pair of
neighbours whose own shortest way exceeds the limit is part of no strategy that is looked for, and
is left out. The strategies of the pairs that remain are searched depth first (`search`).

Operators get configurations in the order of their forward tasks. Symmetry of devices is used: a
configuration is tried only if no renaming of devices that preserves all earlier configurations
turns it into one with a smaller number. Tables have one configuration of each such orbit.
"""

from __future__ import annotations

from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.exact_arrays import Path, Tree
from soapstone.search.parallel.exact.tables import NEVER
from soapstone.search.parallel.problem.compiling import NONE, ZERO, compiled, entry


@compiled
def _pair(x: Tree, y: Path, edge: int, row: int) -> int:
    """Return the number of the pair that a row makes with the row chosen for the edge's source."""
    a = y.chosen[x.edges[edge].source]
    target = x.edges[edge].target
    rows = x.first[target + 1] - x.first[target]
    return int(x.kind[a] * rows + x.image[row, x.turned[a]])


@compiled
def _forward(x: Tree, y: Path, op: int, row: int) -> None:
    """Compute when an operator's forward points end, given all operators before it."""
    devices = x.placed.shape[1]
    ordered = x.flags[op].ordered != 0
    now = y.free[op + 1]
    for device in range(devices):
        now[device] = y.free[op, device] if ordered else ZERO
    final = ZERO
    for point in range(x.points[row]):
        begins = now[x.placed[row, point]]
        for at in range(x.before_ptr[op], x.before_ptr[op + 1]):
            edge = x.before[at]
            other = x.edges[edge].source
            delays = x.delays[x.edges[edge].delays + _pair(x, y, edge, row), 0]
            for i in range(x.points[y.chosen[other]]):
                begins = max(begins, y.end[other, i] + delays[i, point])
        ends = begins + x.ahead[row, point]
        y.end[op, point] = ends
        now[x.placed[row, point]] = ends
        final = max(final, ends)
    if x.ahead_late[row] > 0:
        for point in range(x.points[row]):
            y.end[op, point] = final + x.ahead_late[row]
    if not ordered:
        for device in range(devices):
            now[device] = y.free[op, device]


@compiled
def _backward(x: Tree, y: Path, op: int, row: int) -> None:
    """Compute the longest ways from the starts of an operator's backward points to a step's end."""
    devices = x.placed.shape[1]
    count = x.points[row]
    ways = devices + 1
    follow = y.follow[op + 1]
    for device in range(devices):
        for k in range(ways):
            follow[device, k] = y.follow[op, device, k]
    away = y.away[op]
    for point in range(count):
        for k in range(ways):
            away[point, k] = NEVER
    if not x.flags[op].backward:
        return
    for point in range(count):
        shared = x.shared[x.kept_first[op] + x.kind[row], point]
        away[point, devices] = max(x.tail[row, point], shared)
        for at in range(x.before_ptr[op], x.before_ptr[op + 1]):
            edge = x.before[at]
            other = x.edges[edge].source
            a = y.chosen[other]
            pair = _pair(x, y, edge, row)
            delays = x.delays[x.edges[edge].delays + pair, 1]
            for i in range(x.points[a]):
                for k in range(ways):
                    away[point, k] = max(away[point, k], delays[point, i] + y.away[other, i, k])
                if x.partner[op] == other:
                    joint = x.joint[x.joint_first[op] + pair, i] + x.back[a, i]
                    away[point, devices] = max(away[point, devices], delays[point, i] + joint)
    if x.back_late[row] > 0:
        for k in range(ways):
            final = NEVER
            for point in range(count):
                final = max(final, away[point, k])
            for point in range(count):
                away[point, k] = final + x.back_late[row]
    for point in range(count - 1, -1, -1):
        device = x.placed[row, point]
        later = point + 1
        while later < count and x.placed[row, later] != device:
            later += 1
        for k in range(ways):
            if later < count:
                away[point, k] = max(away[point, k], away[later, k])
            elif x.flags[op].ordered:
                away[point, k] = max(away[point, k], y.follow[op, device, k])
            elif k == device:
                away[point, k] = max(away[point, k], ZERO)
            away[point, k] += x.back[row, point]
        if x.flags[op].ordered:
            for k in range(ways):
                follow[device, k] = away[point, k]


@compiled
def _longest(x: Tree, y: Path, op: int, row: int) -> int:
    """Return the longest path that is known once an operator has a configuration: the bound."""
    devices = x.placed.shape[1]
    longest = ZERO
    load, work = y.load[op + 1], y.work[op + 1]
    for device in range(devices):
        load[device] = max(y.load[op, device] + x.updates[row, device], x.lasts[row, device])
        work[device] = y.work[op, device] + x.updates[row, device]
    other = x.partner[op]
    if other >= 0:
        a = y.chosen[other]
        rows = x.first[op + 1] - x.first[op]
        pair = x.joint_first[op] + x.kind[a] * rows + x.image[row, x.turned[a]]
        names = x.renamings[x.turned[a]]
        for device in range(devices):
            load[device] = max(load[device], x.joint_lasts[pair, names[device]])
        number = x.kept_first[other] + x.kind[a]
        for s in range(x.points[a]):
            for e in range(x.points[a]):
                way = y.end[other, s] + x.rest[number, s, e] + x.back[a, e] + x.joint[pair, e]
                longest = max(longest, way)
    number = x.kept_first[op] + x.kind[row]
    count = x.points[row]
    for s in range(count):
        work[x.placed[row, s]] += x.ahead[row, s] + x.back[row, s]
        longest = max(longest, y.end[op, s])
        for e in range(count):
            way = y.end[op, s] + x.rest[number, s, e]
            if way < 0:
                continue
            for device in range(devices):
                longest = max(longest, way + y.away[op, e, device] + load[device])
            longest = max(longest, way + y.away[op, e, devices])
    for device in range(devices):
        longest = max(longest, work[device])
    return int(longest)


@compiled
def _allowed(x: Tree, y: Path, op: int, row: int) -> bool:
    """Return whether symmetry lets a row be tried, and compute the renamings that remain then."""
    own = row - x.first[op]
    for renaming in range(x.image.shape[1]):
        y.fixed[op + 1, renaming] = ZERO
        if y.fixed[op, renaming]:
            image = x.image[row, renaming]
            if image < own:
                return False
            y.fixed[op + 1, renaming] = image == own
    return True


@compiled
def _candidate(x: Tree, y: Path, op: int) -> int:
    """Return the next configuration to try, or -1."""
    rows = x.first[op + 1] - x.first[op]
    begin = x.before_ptr[op]
    while y.cursor[op] < rows:
        i = y.cursor[op]
        y.cursor[op] += 1
        if begin == x.before_ptr[op + 1]:
            row = x.first[op] + i
        else:
            edge = x.before[begin]
            a = y.chosen[x.edges[edge].source]
            if not x.alive[x.edges[edge].alive + x.kind[a] * rows + i]:
                continue
            row = x.first[op] + x.image[x.first[op] + i, x.opposite[x.turned[a]]]
        good = True
        for at in range(begin + 1, x.before_ptr[op + 1]):
            edge = x.before[at]
            good = good and x.alive[x.edges[edge].alive + _pair(x, y, edge, row)] != 0
        if good and _allowed(x, y, op, row):
            found: int = row
            return found
    return NONE


@entry
def bounds(x: Tree, y: Path, rows: Array, bounds: Array) -> None:
    """Write the lower bounds, in ns, of a strategy's first operator, its first two, and so on."""
    for op in range(rows.shape[0]):
        _forward(x, y, op, rows[op])
        _backward(x, y, op, rows[op])
        y.chosen[op] = rows[op]
        bounds[op] = _longest(x, y, op, rows[op])


@entry
def begin(x: Tree, y: Path, rows: Array, depth: int) -> None:
    """Choose rows for the first operators, from which `search` goes on."""
    for op in range(depth):
        _allowed(x, y, op, rows[op])
        _forward(x, y, op, rows[op])
        _backward(x, y, op, rows[op])
        _longest(x, y, op, rows[op])
        y.chosen[op] = rows[op]
    y.counts[0] = depth
    y.cursor[depth] = ZERO


@entry
def search(x: Tree, y: Path, bottom: int, top: int, limit: int, visits: int) -> bool:
    """Continue the search for partial strategies whose bound is below a limit, and list them.

    Args:
        bottom: how many operators have a row already.
        top: how many operators are to have one in what is listed.
        limit: in ns.
        visits: how many partial strategies may be visited before it returns.

    Returns whether the search is complete. If not, the list is full or `visits` are used up.
    """
    stop = y.counts[1] + visits
    y.counts[2] = ZERO
    while y.counts[0] >= bottom:
        op = y.counts[0]
        if y.counts[1] >= stop or y.counts[2] >= y.leaves.shape[0]:
            return False
        row = _candidate(x, y, op)
        if row < 0:
            y.counts[0] -= 1
            continue
        y.counts[1] += 1
        _forward(x, y, op, row)
        _backward(x, y, op, row)
        if _longest(x, y, op, row) >= limit:
            continue
        y.chosen[op] = row
        if op + 1 == top:
            for i in range(top):
                y.leaves[y.counts[2], i] = y.chosen[i]
            y.counts[2] += 1
        else:
            y.counts[0] += 1
            y.cursor[op + 1] = ZERO
    return True
