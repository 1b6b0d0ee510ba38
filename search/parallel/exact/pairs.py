"""What is known of pairs of neighbours' configurations before the search, compiled.

`reach`, `rest` and the like of `exact_arrays.Tree`: the least ways before and after an operator,
minimal over its neighbours' configurations. Pairs whose own best way is too long are left out.
"""

from __future__ import annotations

from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.exact_arrays import HUGE, Path, Tree
from soapstone.search.parallel.exact.tables import NEVER
from soapstone.search.parallel.problem.compiling import ONE, ZERO, compiled, entry


@compiled
def _clear(a: Array, value: int) -> None:
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            a[i, j] = value


@compiled
def _along(x: Tree, row: int, grid: Array, times: Array, late: int, forward: bool) -> None:
    """Lead ways to or from points, the rows of a grid, along the tasks of these points.

    Forward: rows are when points may begin, and become when their results are final. Else they are
    ways from where points have ended, and become ways from where they may begin.

    Args:
        times: of points. late: of the exchange after them.
    """
    count = x.points[row]
    for other in range(grid.shape[1]):
        if late > 0 and not forward:
            _final(grid, count, other, late)
        for i in range(count):
            point = i if forward else count - 1 - i
            for j in range(1, i + 1):  # the last before it on its device
                near = point - j if forward else point + j
                if x.placed[row, near] == x.placed[row, point]:
                    grid[point, other] = max(grid[point, other], grid[near, other])
                    break
            grid[point, other] += times[point]
        if late > 0 and forward:
            _final(grid, count, other, late)


@compiled
def _final(grid: Array, count: int, other: int, late: int) -> None:
    """Let all points wait for the last of them, and for an exchange."""
    final = NEVER
    for point in range(count):
        final = max(final, grid[point, other])
    for point in range(count):
        grid[point, other] = final + late


@compiled
def _delays(x: Tree, edge: int, kind: int, row: int) -> Array:
    """Return the ways between points of a pair of an edge: forward, and back."""
    target = x.edges[edge].target
    rows = x.first[target + 1] - x.first[target]
    found: Array = x.delays[x.edges[edge].delays + kind * rows + row - x.first[target]]
    return found


@compiled
def _led(
    before: Array, grid: Array, after: Array, outer: int, inner: int, room: Array, ways: Array
) -> None:
    """Set the longest ways over `before`, `grid` and `after`: from outer points by inner ones."""
    devices = ways.shape[0]
    for i in range(outer):
        for k in range(inner):
            best = NEVER
            for j in range(inner):
                best = max(best, before[i, j] + grid[j, k])
            room[i, k] = best
    for i in range(devices):
        for j in range(devices):
            best = NEVER
            if i < outer and j < outer:
                for k in range(inner):
                    best = max(best, room[i, k] + after[k, j])
            ways[i, j] = best


@compiled
def _to_first(
    x: Tree, edge: int, kind: int, row: int, grid: Array, room: Array, ways: Array
) -> None:
    """Lead the ways of a grid on the second operator of an edge to points of the first one.

    grid: from where forward to where backward points of the second begin and end.
    """
    theirs = x.points[x.kept[x.kept_first[x.edges[edge].source] + kind]]
    delays = _delays(x, edge, kind, row)
    _led(delays[0], grid, delays[1], theirs, x.points[row], room, ways)


@compiled
def _to_second(
    x: Tree, edge: int, kind: int, row: int, grid: Array, room: Array, ways: Array
) -> None:
    """Lead the ways of a grid on the first operator of an edge to points of the second one."""
    theirs = x.points[x.kept[x.kept_first[x.edges[edge].source] + kind]]
    delays = _delays(x, edge, kind, row)
    _led(delays[0].T, grid, delays[1].T, x.points[row], theirs, room, ways)


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
    # Columns become ends of backward points, rows begins of forward ones.
    _along(x, row, grid.T, x.back[row], x.back_late[row], True)
    _along(x, row, grid, x.ahead[row], x.ahead_late[row], False)


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
            other = x.edges[edge].source
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
                pair = x.edges[edge].delays + kind * rows
                mark = x.edges[edge].alive + kind * rows
                for i in range(rows):
                    if not x.alive[mark + i]:
                        continue
                    row = x.first[op] + i
                    number = first + x.kind[row]
                    _to_second(x, edge, kind, row, x.reach[theirs], room, found)
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
            _along(x, row, grid, x.ahead[row], x.ahead_late[row], True)
            for s in range(count):
                x.start[number, s] = grid[s, 0]
            for s in range(devices):
                for e in range(devices):
                    grid[s, e] = x.leave[number, e]
            _along(x, row, grid.T, x.back[row], x.back_late[row], False)
            for e in range(count):
                x.leave[number, e] = grid[0, e]
            reach = x.reach[number]
            _along(x, row, reach, x.ahead[row], x.ahead_late[row], True)
            _along(x, row, reach.T, x.back[row], x.back_late[row], False)
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
                    if (late and x.flags[op].itself) or (
                        not late and x.placed[row, s] == x.placed[row, e]
                    ):
                        x.rest[number, s, e] = ZERO
        for at in range(x.after_ptr[op], x.after_ptr[op + 1]):
            edge = x.after[at]
            other = x.edges[edge].target
            rows = x.first[other + 1] - x.first[other]
            for kind in range(x.kept_first[op + 1] - first):
                number = first + kind
                count = x.points[x.kept[number]]
                mark = x.edges[edge].alive + kind * rows
                best, least = y.grid[3], y.begin[number]
                _clear(best, HUGE)
                for s in range(devices):
                    least[s] = HUGE
                for i in range(rows):
                    if not x.alive[mark + i]:
                        continue
                    row = x.first[other] + i
                    _inner(x, other, x.kind[row], inner)
                    _to_first(x, edge, kind, row, inner, room, found)
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
    return int(least)
