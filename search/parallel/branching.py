"""Branch and bound over tables, compiled: what a strategy begun takes at least.

A step is a longest path: of tasks, of messages between them, and of the order in which a device
runs its tasks. A bound leaves paths out, never one too many in; here they are

    begin ──► forward points of operators that have a configuration    (`end`, exact but for waits
          ──► a way through the rest of the network, forward and back  (`rest`)     on channels)
          ──► their backward points, and the updates                   (`away`)

Paths go from point to point, by the least delays of `tables.py`, and along devices. What is left is
known by configuration before the search: `rest` is the least way from each forward to each backward
point of an operator through any operators that read it, `reach` the same through any before it.
Both are tables by operator, minimal over its neighbours' configurations; and a pair of neighbours
whose own best way is too long cannot be in any strategy that is looked for, and is left out of all
that follows (`rests`). What is left after that is searched depth first (`search`).

Operators come in the order of their forward tasks. Devices are told apart only as far as strategies
do: a configuration is tried if no renaming of devices that leaves those before it as they are makes
it an earlier one; tables are kept for one configuration of all that renamings make of it.
"""

from __future__ import annotations

from typing import NamedTuple

from soapstone.search.parallel.arrays import Array
from soapstone.search.parallel.compiling import NONE, ONE, ZERO, compiled, entry, integer, packed
from soapstone.search.parallel.tables import NEVER

HUGE = integer(1 << 50)  # of what no strategy reaches
# Tree.flags
BACKWARD, ORDERED, ITSELF = 0, 1, 2
# Tree.edges
SOURCE, TARGET, DELAYS, ALIVE = 0, 1, 2, 3


@packed
class Tree(NamedTuple):
    """What is searched. Rows are configurations, of all operators one after another.

    Attributes:
        first: (operators + 1), of rows. kept_first: likewise of `kept`.
        kept: rows of which renamings make others. kind: (rows), the number in `kept` of what a row
            is made of, counted from that of its operator.
        turned: (rows), the renaming that makes that one of it. image: (rows, renamings), what they
            make of a row, counted from the operator's first. renamings: (renamings, devices);
            opposite: (renamings), inverse ones.
        points, placed: of each row. ahead, back: (rows, points), times of its tasks; ahead_late,
            back_late: of the exchanges after them.
        tail: (rows, points), from when a backward point's results are final to the end of the
            step, by its own parameters. updates: (rows, devices); lasts: from where a device begins
            them to the end of the step, or 0.
        flags: (operators, 3), whether it has a backward pass; whether its tasks are run in the
            order of operators; whether its backward pass reads what its forward pass makes.
        edges: (edges, 4), two operators of which the second reads the first, where their delays and
            marks begin. before_ptr, before; after_ptr, after: edges by operator.
        delays: of pairs (kept of the first, row of the second): (2, points, points).
        alive: of the same pairs, whether they may be part of a strategy.
        partner: (operators), an earlier one of the same parameters, or -1; joint_first: where in
            `joint` its tails begin, by pairs as above; joint_lasts: as `lasts`.
        shared: (kept, points), the least tails by parameters that a later operator reads too.
        start: (kept, points), the least ends of forward points. leave: (kept, points), the least
            times from where a backward point begins to the end of the step. reach, rest: (kept,
            points, points), ways as above.
    """

    first: Array
    kept_first: Array
    kept: Array
    kind: Array
    turned: Array
    image: Array
    renamings: Array
    opposite: Array
    points: Array
    placed: Array
    ahead: Array
    back: Array
    ahead_late: Array
    back_late: Array
    tail: Array
    updates: Array
    lasts: Array
    flags: Array
    edges: Array
    before_ptr: Array
    before: Array
    after_ptr: Array
    after: Array
    delays: Array
    alive: Array
    partner: Array
    joint_first: Array
    joint: Array
    joint_lasts: Array
    shared: Array
    start: Array
    leave: Array
    reach: Array
    rest: Array


@packed
class Path(NamedTuple):
    """A strategy begun, and room to work in; by depth where a depth needs what was before it.

    Attributes:
        chosen: (operators), rows. cursor: (operators), the next candidate at a depth.
        fixed: (operators + 1, renamings), those that leave all that is chosen as it is.
        end: (operators, points), of forward points. free: (operators + 1, devices).
        away: (operators, points, devices + 1), from where a backward point may begin to the last
            one on each device; and to the end of the step by parameters' messages.
        follow: (operators + 1, devices, devices + 1), the same from where a device is free.
        load: (operators + 1, devices), from the last backward point to the end of the step, by
            updates. work: (operators + 1, devices), all tasks.
        grid: (4, points, points), begin, leave: (kept, points), least: (kept, points, points):
            room.
        counts: [depth, visited, leaves].
        leaves: (room, operators), rows of strategies found.
    """

    chosen: Array
    cursor: Array
    fixed: Array
    end: Array
    free: Array
    away: Array
    follow: Array
    load: Array
    work: Array
    grid: Array
    begin: Array
    leave: Array
    least: Array
    counts: Array
    leaves: Array


@compiled
def _clear(a: Array, value: int) -> None:
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            a[i, j] = value


@compiled
def _through(x: Tree, row: int, grid: Array, forward: bool) -> None:
    """Lead the ways of a grid (from or to points) through an operator's own tasks.

    Forward: rows are when points may begin, and become when their results are final. Back: columns
    are ways to the end of a backward point, and become ways from where it may begin.
    """
    count = x.points[row]
    late = x.ahead_late[row] if forward else x.back_late[row]
    for other in range(grid.shape[0]):
        final = NEVER
        if forward:
            for point in range(count):
                for earlier in range(point - 1, -1, -1):
                    if x.placed[row, earlier] == x.placed[row, point]:
                        grid[point, other] = max(grid[point, other], grid[earlier, other])
                        break
                grid[point, other] += x.ahead[row, point]
                final = max(final, grid[point, other])
            if late > 0:
                for point in range(count):
                    grid[point, other] = final + late
        else:
            if late > 0:
                for point in range(count):
                    final = max(final, grid[other, point])
                for point in range(count):
                    grid[other, point] = final + late
            for point in range(count - 1, -1, -1):
                for later in range(point + 1, count):
                    if x.placed[row, later] == x.placed[row, point]:
                        grid[other, point] = max(grid[other, point], grid[other, later])
                        break
                grid[other, point] += x.back[row, point]


@compiled
def _around(
    x: Tree, edge: int, kind: int, row: int, grid: Array, room: Array, found: Array
) -> None:
    """Lead the ways of a grid on the second operator of an edge to points of the first one.

    grid: from where forward to where backward points of the second begin and end.
    """
    devices = x.placed.shape[1]
    a = x.kept[x.kept_first[x.edges[edge, SOURCE]] + kind]
    target = x.edges[edge, TARGET]
    rows = x.first[target + 1] - x.first[target]
    pair = x.edges[edge, DELAYS] + kind * rows + row - x.first[target]
    theirs, mine = x.points[a], x.points[row]
    delays = x.delays[pair]
    for s in range(theirs):
        for e in range(mine):
            best = NEVER
            for i in range(mine):
                best = max(best, delays[0, s, i] + grid[i, e])
            room[s, e] = best
    for s in range(devices):
        for e in range(devices):
            best = NEVER
            if s < theirs and e < theirs:
                for i in range(mine):
                    best = max(best, room[s, i] + delays[1, i, e])
            found[s, e] = best


@compiled
def _into(x: Tree, edge: int, kind: int, row: int, grid: Array, room: Array, found: Array) -> None:
    """Lead the ways of a grid on the first operator of an edge to points of the second one."""
    devices = x.placed.shape[1]
    a = x.kept[x.kept_first[x.edges[edge, SOURCE]] + kind]
    target = x.edges[edge, TARGET]
    rows = x.first[target + 1] - x.first[target]
    pair = x.edges[edge, DELAYS] + kind * rows + row - x.first[target]
    theirs, mine = x.points[a], x.points[row]
    delays = x.delays[pair]
    for i in range(mine):
        for e in range(theirs):
            best = NEVER
            for s in range(theirs):
                best = max(best, grid[s, e] + delays[0, s, i])
            room[i, e] = best
    for i in range(devices):
        for j in range(devices):
            best = NEVER
            if i < mine and j < mine:
                for e in range(theirs):
                    best = max(best, room[i, e] + delays[1, j, e])
            found[i, j] = best


@compiled
def _inner(x: Tree, op: int, kind: int, grid: Array) -> None:
    """Set the least ways from where an operator's forward points begin to where backward ones end.

    Those are `rest`, between its own tasks.
    """
    devices = x.placed.shape[1]
    number = x.kept_first[op] + kind
    row = x.kept[number]
    for s in range(devices):
        for e in range(devices):
            grid[s, e] = x.rest[number, s, e]
    # Columns become ends of backward points by way of the reversed walk through them.
    for s in range(devices):
        final = NEVER
        for e in range(x.points[row]):
            for earlier in range(e - 1, -1, -1):
                if x.placed[row, earlier] == x.placed[row, e]:
                    grid[s, e] = max(grid[s, e], grid[s, earlier])
                    break
            grid[s, e] += x.back[row, e]
            final = max(final, grid[s, e])
        if x.back_late[row] > 0:
            for e in range(x.points[row]):
                grid[s, e] = final + x.back_late[row]
    # Rows become begins of forward points.
    for e in range(devices):
        final = NEVER
        if x.ahead_late[row] > 0:
            for s in range(x.points[row]):
                final = max(final, grid[s, e])
            for s in range(x.points[row]):
                grid[s, e] = final + x.ahead_late[row]
        for s in range(x.points[row] - 1, -1, -1):
            for later in range(s + 1, x.points[row]):
                if x.placed[row, later] == x.placed[row, s]:
                    grid[s, e] = max(grid[s, e], grid[later, e])
                    break
            grid[s, e] += x.ahead[row, s]


@entry
def reaches(x: Tree, y: Path) -> None:
    """Set `start`, `leave` and `reach` of every operator, over the pairs that are alive."""
    devices = x.placed.shape[1]
    for op in range(x.flags.shape[0]):
        first = x.kept_first[op]
        grid, room, found = y.grid[0], y.grid[1], y.grid[2]
        for number in range(first, x.kept_first[op + 1]):
            row = x.kept[number]
            for s in range(devices):
                x.start[number, s] = ZERO
                x.leave[number, s] = max(x.tail[row, s], x.shared[number, s])
                if s < x.points[row]:
                    updates = x.updates[row, x.placed[row, s]]
                    x.leave[number, s] = max(x.leave[number, s], updates)
                for e in range(devices):
                    x.reach[number, s, e] = NEVER
        for at in range(x.before_ptr[op], x.before_ptr[op + 1]):
            edge = x.before[at]
            other = x.edges[edge, SOURCE]
            rows = x.first[op + 1] - x.first[op]
            best, begin, leave = y.least, y.begin, y.leave
            for number in range(first, x.kept_first[op + 1]):
                for s in range(devices):
                    begin[number, s] = HUGE
                    leave[number, s] = HUGE
                    for e in range(devices):
                        best[number, s, e] = HUGE
            for kind in range(x.kept_first[other + 1] - x.kept_first[other]):
                theirs = x.kept_first[other] + kind
                pair = x.edges[edge, DELAYS] + kind * rows
                mark = x.edges[edge, ALIVE] + kind * rows
                for i in range(rows):
                    if not x.alive[mark + i]:
                        continue
                    row = x.first[op] + i
                    number = first + x.kind[row]
                    _into(x, edge, kind, row, x.reach[theirs], room, found)
                    for s in range(devices):
                        ready, ends = ZERO, ZERO
                        for k in range(x.points[x.kept[theirs]]):
                            ready = max(ready, x.start[theirs, k] + x.delays[pair + i, 0, k, s])
                            ends = max(ends, x.delays[pair + i, 1, s, k] + x.leave[theirs, k])
                        begin[number, s] = min(begin[number, s], ready)
                        leave[number, s] = min(leave[number, s], ends)
                        for e in range(devices):
                            best[number, s, e] = min(best[number, s, e], found[s, e])
            for number in range(first, x.kept_first[op + 1]):
                for s in range(devices):
                    x.start[number, s] = max(x.start[number, s], begin[number, s])
                    x.leave[number, s] = max(x.leave[number, s], leave[number, s])
                    for e in range(devices):
                        x.reach[number, s, e] = max(x.reach[number, s, e], best[number, s, e])
        for number in range(first, x.kept_first[op + 1]):
            row = x.kept[number]
            count = x.points[row]
            for s in range(devices):
                for e in range(devices):
                    grid[s, e] = x.start[number, s]
            _through(x, row, grid, True)
            for s in range(count):
                x.start[number, s] = grid[s, 0]
            for s in range(devices):
                for e in range(devices):
                    grid[s, e] = x.leave[number, e]
            _through(x, row, grid, False)
            for e in range(count):
                x.leave[number, e] = grid[0, e]
            reach = x.reach[number]
            _through(x, row, reach, True)
            _through(x, row, reach, False)
            for s in range(count):
                for e in range(count):
                    if x.start[number, s] < HUGE:
                        reach[s, e] = max(reach[s, e], x.start[number, s] + x.leave[number, e])


@entry
def rests(x: Tree, y: Path, limit: int) -> int:
    """Set `rest` of every operator, and leave out pairs that are part of no way below the limit.

    Returns how many pairs are alive.
    """
    devices = x.placed.shape[1]
    inner, room, found = y.grid[0], y.grid[1], y.grid[2]
    alive = ZERO
    for op in range(x.flags.shape[0] - 1, -1, -1):
        first = x.kept_first[op]
        for number in range(first, x.kept_first[op + 1]):
            row = x.kept[number]
            for s in range(devices):
                for e in range(devices):
                    x.rest[number, s, e] = NEVER
            for s in range(x.points[row]):
                for e in range(x.points[row]):
                    late = x.ahead_late[row] > 0
                    if (late and x.flags[op, ITSELF]) or (
                        not late and x.placed[row, s] == x.placed[row, e]
                    ):
                        x.rest[number, s, e] = ZERO
        for at in range(x.after_ptr[op], x.after_ptr[op + 1]):
            edge = x.after[at]
            other = x.edges[edge, TARGET]
            rows = x.first[other + 1] - x.first[other]
            for kind in range(x.kept_first[op + 1] - first):
                number = first + kind
                count = x.points[x.kept[number]]
                mark = x.edges[edge, ALIVE] + kind * rows
                best, least = y.grid[3], y.begin[number]
                _clear(best, HUGE)
                for s in range(devices):
                    least[s] = HUGE
                for i in range(rows):
                    if not x.alive[mark + i]:
                        continue
                    row = x.first[other] + i
                    _inner(x, other, x.kind[row], inner)
                    _around(x, edge, kind, row, inner, room, found)
                    longest = ZERO
                    for s in range(count):
                        for e in range(count):
                            longest = max(longest, x.reach[number, s, e] + found[s, e])
                    theirs = x.kept_first[other] + x.kind[row]
                    for s in range(x.points[row]):
                        for e in range(x.points[row]):
                            longest = max(longest, x.reach[theirs, s, e] + x.rest[theirs, s, e])
                    if x.partner[other] == op:
                        a, joint = x.kept[number], x.joint[x.joint_first[other] + kind * rows + i]
                        for e in range(count):
                            ends = x.back[a, e] + joint[e]
                            for s in range(count):
                                way = max(found[s, e], x.rest[number, s, e])
                                longest = max(longest, x.start[number, s] + way + ends)
                    if longest >= limit:
                        x.alive[mark + i] = ZERO
                        continue
                    alive += ONE
                    for s in range(count):
                        if x.partner[other] == op:
                            joint = x.joint[x.joint_first[other] + kind * rows + i]
                            least[s] = min(least[s], joint[s])
                        for e in range(count):
                            best[s, e] = min(best[s, e], found[s, e])
                if x.partner[other] == op:
                    for s in range(count):
                        x.shared[number, s] = least[s] - x.back_late[x.kept[number]]
                for s in range(count):
                    for e in range(count):
                        x.rest[number, s, e] = max(x.rest[number, s, e], best[s, e])
    return alive


@entry
def shortest(x: Tree, op: int) -> int:
    """Return the least way through an operator, whatever its configuration."""
    least = HUGE
    for number in range(x.kept_first[op], x.kept_first[op + 1]):
        longest = ZERO
        count = x.points[x.kept[number]]
        for s in range(count):
            longest = max(longest, x.start[number, s])
            for e in range(count):
                longest = max(longest, x.reach[number, s, e] + x.rest[number, s, e])
        least = min(least, longest)
    found: int = least
    return found


@compiled
def _pair(x: Tree, y: Path, edge: int, row: int) -> int:
    """Return which pair of an edge a row makes with what is chosen of its first operator."""
    a = y.chosen[x.edges[edge, SOURCE]]
    target = x.edges[edge, TARGET]
    rows = x.first[target + 1] - x.first[target]
    found: int = x.kind[a] * rows + x.image[row, x.turned[a]]
    return found


@compiled
def _forward(x: Tree, y: Path, op: int, row: int) -> None:
    """Set when an operator's forward points end, after those of all before it."""
    devices = x.placed.shape[1]
    ordered = x.flags[op, ORDERED] != 0
    now = y.free[op + 1]
    for device in range(devices):
        now[device] = y.free[op, device] if ordered else ZERO
    final = ZERO
    for point in range(x.points[row]):
        begins = now[x.placed[row, point]]
        for at in range(x.before_ptr[op], x.before_ptr[op + 1]):
            edge = x.before[at]
            other = x.edges[edge, SOURCE]
            delays = x.delays[x.edges[edge, DELAYS] + _pair(x, y, edge, row), 0]
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
    """Set the longest ways from where an operator's backward points may begin."""
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
    if not x.flags[op, BACKWARD]:
        return
    for point in range(count):
        shared = x.shared[x.kept_first[op] + x.kind[row], point]
        away[point, devices] = max(x.tail[row, point], shared)
        for at in range(x.before_ptr[op], x.before_ptr[op + 1]):
            edge = x.before[at]
            other = x.edges[edge, SOURCE]
            a = y.chosen[other]
            pair = _pair(x, y, edge, row)
            delays = x.delays[x.edges[edge, DELAYS] + pair, 1]
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
            elif x.flags[op, ORDERED]:
                away[point, k] = max(away[point, k], y.follow[op, device, k])
            elif k == device:
                away[point, k] = max(away[point, k], ZERO)
            away[point, k] += x.back[row, point]
        if x.flags[op, ORDERED]:
            for k in range(ways):
                follow[device, k] = away[point, k]


@compiled
def _longest(x: Tree, y: Path, op: int, row: int) -> int:
    """Return the longest of the ways known when an operator gets a configuration."""
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
    found: int = longest
    return found


@compiled
def _allowed(x: Tree, y: Path, op: int, row: int) -> bool:
    """Return whether no renaming that is left makes an earlier one of a row; set those after it."""
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
            a = y.chosen[x.edges[edge, SOURCE]]
            if not x.alive[x.edges[edge, ALIVE] + x.kind[a] * rows + i]:
                continue
            row = x.first[op] + x.image[x.first[op] + i, x.opposite[x.turned[a]]]
        good = True
        for at in range(begin + 1, x.before_ptr[op + 1]):
            edge = x.before[at]
            good = good and x.alive[x.edges[edge, ALIVE] + _pair(x, y, edge, row)] != 0
        if good and _allowed(x, y, op, row):
            found: int = row
            return found
    return NONE


@entry
def bounds(x: Tree, y: Path, rows: Array, found: Array) -> None:
    """Write what a strategy takes at least when the first, the first two, ... are chosen."""
    for op in range(rows.shape[0]):
        _forward(x, y, op, rows[op])
        _backward(x, y, op, rows[op])
        y.chosen[op] = rows[op]
        found[op] = _longest(x, y, op, rows[op])


@entry
def begin(x: Tree, y: Path, rows: Array, depth: int) -> None:
    """Set the first operators' rows, and let the search go on from there."""
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
    """Go on with the search for strategies begun that may take less than a limit; list them.

    Args:
        bottom, top: how many operators have a row already, and are to have one.

    Returns whether it has come to its end; else the list is full, or so many have been begun.
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


__all__ = ["HUGE", "Path", "Tree", "begin", "bounds", "reaches", "rests", "search", "shortest"]
