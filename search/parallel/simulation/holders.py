"""The holders and readers of a value's tiles, and what devices have already, compiled.

Operators that are computed in copies have equal tiles on several devices; a reader takes the
nearest copy (`Replicas`). Tiles that are precomputed (`Scratch.ready`) are used as they are.
"""

from __future__ import annotations

from typing import Any

from soapstone.search.parallel.problem.arrays import KNOWN, OVERFLOW, Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import ZERO, compiled, span
from soapstone.search.parallel.problem.geometry import inside, partial, same_box, tile
from soapstone.search.parallel.simulation.messages import new_lists


@compiled
def hold(c: Choice, s: Scratch, count: int, device: int, message: int, box: Any) -> int:
    """Record that a device has a box once a message arrives; a full table is a full pool."""
    if count >= s.holdings.shape[0]:
        c.top[OVERFLOW] = 1
        return count
    row = s.holdings[count]
    row.box = box
    row.message, row.next = message, s.marks[device].holding
    s.marks[device].holding = count
    return count + 1


@compiled
def at_hand(p: Problem, c: Choice, row: int) -> bool:
    """Return whether a writer's results are final on its device as soon as it has ended.

    Later tasks on that device need not wait for it, since devices run tasks in order.
    """
    task = p.makers[row]
    return bool(c.task_ns[task, p.devices.shape[0]] == 0)


@compiled
def held_by(s: Scratch, device: int, box: Any, rank: int) -> int:
    """Return the message that brings a box to a device, HERE if none is needed, or -1."""
    number = s.marks[device].holding
    while number >= 0:
        if inside(box, s.holdings[number].box, rank):
            return int(s.holdings[number].message)
        number = s.holdings[number].next
    return -1


@compiled
def collect_writers(p: Problem, c: Choice, s: Scratch, value: int) -> tuple[int, bool]:
    """Collect the tiles of a value's writers; return their number, and whether they are partial.

    The last writers come first. Of those with the same tiles on the same devices only the last
    counts, since devices run tasks in order and add up what they have.
    """
    total, kept, sums = ZERO, ZERO, False
    for row in span(p.values[value].writers):
        operand = p.writers[row]
        node = p.operands[operand].node
        op = p.nodes[node].operator
        if p.values[value].is_sum and at_hand(p, c, row):
            if repeats(p, c, s, operand, ZERO, kept):
                continue
            kept += 1
        c.send_at[row] = new_lists(c, p.devices.shape[0])
        ready = s.ready_at[operand]
        if ready >= 0:
            sums = sums or s.ready_sums[ready] > 0
            for point in range(s.ready_points[ready]):
                w = s.writers[total]
                _take_ready(s, ready, point, p.values[value].rank, w)
                w.row, w.point, w.number = row, point, ZERO
                total += 1
            continue
        sums = sums or partial(p, c, operand)
        for point in range(c.nodes[node].points):
            w = s.writers[total]
            tile(p, c, operand, point, w.box, s.at)
            w.row, w.number = row, ZERO
            w.point = c.node_at[node, point]
            w.device = c.placed[op, w.point]
            total += 1
    return total, sums


@compiled
def _take_ready(s: Scratch, row: int, point: int, rank: int, made: Any) -> None:
    """Write a tile that is precomputed."""
    made.device = s.ready[row, point, 0]
    for axis in range(rank):
        made.box.low[axis] = s.ready[row, point, 1 + 2 * axis]
        made.box.high[axis] = s.ready[row, point, 2 + 2 * axis]


@compiled
def collect_reader(p: Problem, c: Choice, s: Scratch, place: int) -> int:
    """Collect the tiles of one reader; return their number. `point` is its list of needs, or -1."""
    operand, task = p.readers[place].operand, p.readers[place].task
    node = p.operands[operand].node
    op = p.nodes[node].operator
    ready = s.ready_at[operand]
    if ready >= 0:
        rank = p.values[p.operands[operand].value].rank
        for point in range(s.ready_points[ready]):
            _take_ready(s, ready, point, rank, s.readers[point])
            s.readers[point].point = -1
        return int(s.ready_points[ready])
    if task >= 0 and c.need_at[place] < 0:
        c.need_at[place] = new_lists(c, p.devices.shape[0])
    for point in range(c.nodes[node].points):
        r = s.readers[point]
        tile(p, c, operand, point, r.box, s.at)
        at = c.node_at[node, point]
        r.device = c.placed[op, at]
        r.point = c.need_at[place] + at if task >= 0 else -1
    return int(c.nodes[node].points)


@compiled
def _same(p: Problem, c: Choice, operand: int, other: int) -> bool:
    """Return whether two operands of equal operators have equal tiles on equal devices."""
    node, before = p.operands[operand].node, p.operands[other].node
    op, first = p.nodes[node].operator, p.nodes[before].operator
    mine, theirs, split = p.operators[op], p.operators[first], c.operators[op]
    if (
        c.nodes[node].points != c.nodes[before].points
        or mine.class_ != theirs.class_
        or mine.nodes.end - mine.nodes.begin != theirs.nodes.end - theirs.nodes.begin
        or p.lists[mine.nodes.begin] - node != p.lists[theirs.nodes.begin] - before
        or p.nodes[node].operands.begin - operand != p.nodes[before].operands.begin - other
        or split.cut != c.operators[first].cut
        or c.nodes[node].replicated != c.nodes[before].replicated
    ):
        return False
    for dim in range(p.nodes[node].dims):
        if c.nodes[node].degrees[dim] != c.nodes[before].degrees[dim]:
            return False
    for point in range(c.nodes[node].points):
        if c.placed[op, c.node_at[node, point]] != c.placed[first, c.node_at[before, point]]:
            return False
    if split.cut >= 0:
        for i in range(split.degrees[split.cut] + 1):
            if c.cuts[op, i] != c.cuts[first, i]:
                return False
    return True


@compiled
def repeats(p: Problem, c: Choice, s: Scratch, operand: int, waits: int, count: int) -> bool:
    """Return whether an operand equals one of the last kept ones; otherwise keep it."""
    for i in range(max(ZERO, count - KNOWN), count):
        kept = s.known[i % KNOWN]
        if kept.waits == waits and _same(p, c, operand, kept.operand):
            return True
    kept = s.known[count % KNOWN]
    kept.operand, kept.waits = operand, waits
    return False


@compiled
def number_copies(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> bool:
    """Number the copies of each final tile of a value; return whether a tile has several."""
    operand, rank, several = p.writers[p.values[value].writers.begin], p.values[value].rank, ZERO
    if s.ready_at[operand] < 0 and c.nodes[p.operands[operand].node].replicated == 0:
        return False
    for i in range(1, total):
        several += same_box(s.writers[0].box, s.writers[i].box, rank)
    if several == 0:
        return False
    for i in range(total):
        for j in range(i):
            s.writers[i].number += same_box(s.writers[i].box, s.writers[j].box, rank)
    return True


@compiled
def nearest(s: Scratch, total: int, device: int) -> int:
    """Return the number of the copy that a device reads (`Replicas`)."""
    number, least = s.writers[0].number, abs(s.writers[0].device - device)
    for i in range(1, total):
        away = abs(s.writers[i].device - device)
        if away < least or (away == least and s.writers[i].number < number):
            number, least = s.writers[i].number, away
    return int(number)


@compiled
def at_home(s: Scratch, r: Any, total: int, rank: int) -> int:
    """Return the place of a tile of the reader's copy, on its device, that has all it reads."""
    for i in range(total):
        w = s.writers[i]
        if w.device == r.device and w.number == r.number and inside(r.box, w.box, rank):
            return i
    return 0
