"""Configurations and tiles, compiled: what `Strategy.configuration` and `expand` say, fast.

An operator's degrees become those of its gradient nodes by dim name; light operators follow the
tiles of what they read; updates are spread over the devices that hold parts of the gradient.

A box is a row of numbers: where it begins along each axis and, from `MOST_RANK` on, where it ends.
"""

from __future__ import annotations

from soapstone.search.parallel.problem.arrays import (
    AFFINE,
    AXES,
    BOUNDS,
    BYTES,
    CUT,
    DEGREES,
    DIMS,
    EXTENT,
    FROM,
    FULL,
    GATHERED,
    INSIDE,
    KIND,
    LAUNCH,
    LENGTH,
    LOOKS,
    LOWERS,
    MAP,
    MAPPED,
    MEMORY_RATE,
    MOST_DIMS,
    MOST_RANK,
    NESTED,
    NODE,
    NODES,
    OF_KIND,
    OFFSET,
    OK,
    OP,
    OPERAND,
    OPERANDS,
    OUTPUT,
    POINTS,
    RATE,
    RATES,
    SCALE,
    SOURCE,
    STRIDE,
    TASK,
    TASKS,
    TIMES,
    UPDATES,
    WHOLE,
    WINDOW,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import ONE, ZERO, compiled, entry

SPLIT_FLOPS = 1024.0  # operations of a long sum that count as a result: they may be shared out


@entry
def uneven(p: Problem, c: Choice, node: int, dim: int) -> bool:
    """Return whether a node's dim has the uneven tiles of its operator (`resolved`)."""
    op = p.nodes[node, OP]
    cut = c.cuts[op, CUT]
    return bool(
        cut >= 0
        and p.nodes[node, FROM + dim] == cut
        and c.nodes[node, DEGREES + dim] == c.operators[op, DEGREES + cut]
        and p.nodes[node, EXTENT + dim] == p.operators[op, EXTENT + cut]
    )


@compiled
def interval(p: Problem, c: Choice, node: int, dim: int, index: int) -> tuple[int, int]:
    """Return the interval of one of a dim's tiles."""
    extent, degree = p.nodes[node, EXTENT + dim], c.nodes[node, DEGREES + dim]
    if degree == 1:
        return ZERO, extent
    if uneven(p, c, node, dim):
        op = p.nodes[node, OP]
        return c.cuts[op, BOUNDS + index], c.cuts[op, BOUNDS + index + 1]
    return extent * index // degree, extent * (index + 1) // degree


@entry
def tile(p: Problem, c: Choice, operand: int, point: int, box: Array, index: Array) -> None:
    """Write the box of an operand's tile at a node's point, as `Operand.tiles` says it."""
    node = p.operands[operand, NODE]
    rest = point
    for dim in range(p.nodes[node, DIMS] - 1, -1, -1):
        degree = c.nodes[node, DEGREES + dim]
        index[dim] = ZERO
        if degree > 1:
            index[dim] = rest % degree
            rest //= degree
    first = p.operands[operand, AXES]
    for axis in range(first, p.operands[operand, AXES + 1]):
        at, extent = axis - first, p.axes[axis, LENGTH]
        kind = p.axes[axis, MAP]
        if kind == WHOLE:
            box[at], box[MOST_RANK + at] = 0, extent
        elif kind == AFFINE:
            dim = p.lists[p.axes[axis, MAPPED]]
            a, b = interval(p, c, node, dim, index[dim])
            start = a * p.axes[axis, STRIDE] + p.axes[axis, OFFSET]
            stop = start
            if b > a:
                stop = (b - 1) * p.axes[axis, STRIDE] + p.axes[axis, OFFSET] + p.axes[axis, WINDOW]
            start = min(max(start, 0), extent)
            box[at] = start
            box[MOST_RANK + at] = max(start, min(max(stop, 0), extent))
        else:
            start, last, empty = 0, 0, False
            for place in range(p.axes[axis, MAPPED], p.axes[axis, MAPPED + 1]):
                dim = p.lists[place]
                a, b = interval(p, c, node, dim, index[dim])
                start = start * p.nodes[node, EXTENT + dim] + a
                last = last * p.nodes[node, EXTENT + dim] + b - 1
                empty = empty or b <= a
            box[at] = start
            box[MOST_RANK + at] = start if empty else last + 1


@compiled
def volume(box: Array, rank: int) -> int:
    """Return how many elements a box has."""
    result = 1
    for axis in range(rank):
        result *= box[MOST_RANK + axis] - box[axis]
    return result


@compiled
def inside(a: Array, b: Array, rank: int) -> bool:
    """Return whether the first box lies in the second."""
    for axis in range(rank):
        if a[axis] < b[axis] or a[MOST_RANK + axis] > b[MOST_RANK + axis]:
            return False
    return True


@compiled
def partial(p: Problem, c: Choice, operand: int) -> bool:
    """Return whether an output's tiles are partial results (`Signature.monoid`)."""
    node = p.operands[operand, NODE]
    for dim in range(p.nodes[node, DIMS]):
        if c.nodes[node, DEGREES + dim] == 1:
            continue
        found = False
        for axis in range(p.operands[operand, AXES], p.operands[operand, AXES + 1]):
            for place in range(p.axes[axis, MAPPED], p.axes[axis, MAPPED + 1]):
                if p.lists[place] == dim:
                    found = True
                    if p.axes[axis, MAP] == AFFINE and p.axes[axis, WINDOW] > p.axes[axis, STRIDE]:
                        return True
        if not found:
            return True
    return False


@entry
def legal(p: Problem, node: int, degrees: Array) -> bool:
    """Return whether a node's dims may be split so; extents are not looked at."""
    for place in range(p.nodes[node, NESTED], p.nodes[node, NESTED + 1], 2):
        outer = p.lists[place + 1]
        if degrees[p.lists[place]] > 1 and degrees[outer] != p.nodes[node, EXTENT + outer]:
            return False
    return True


@compiled
def spread(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Set the degrees and points of an operator's nodes from its own (`inherited`, `resolved`)."""
    for place in range(p.operators[op, NODES], p.operators[op, NODES + 1]):
        node = p.lists[place]
        taken = c.nodes[node, DEGREES:]
        count = p.nodes[node, DIMS]
        for dim in range(count):
            taken[dim] = 1
        points = 1
        for dim in range(count):
            source = p.nodes[node, FROM + dim]
            if source < 0 or not p.nodes[node, OK + dim]:
                continue
            degree = min(c.operators[op, DEGREES + source], p.nodes[node, EXTENT + dim])
            used = False
            for other in range(dim):
                used = used or (taken[other] > 1 and p.nodes[node, FROM + other] == source)
            if degree <= 1 or used:
                continue
            taken[dim] = degree
            if legal(p, node, taken):
                points *= degree
            else:
                taken[dim] = 1
        c.nodes[node, POINTS] = points
        weight = ONE
        for own in range(p.operators[op, DIMS] - 1, -1, -1):
            s.at[own] = weight
            weight *= c.operators[op, DEGREES + own]
        for point in range(points):
            rest, at = point, 0
            for dim in range(count - 1, -1, -1):
                if taken[dim] > 1:
                    at += rest % taken[dim] * s.at[p.nodes[node, FROM + dim]]
                    rest //= taken[dim]
            c.node_at[node, point] = at


@compiled
def axis_degree(p: Problem, c: Choice, axis: int, node: int) -> int:
    """Return in how many ranges an axis is cut."""
    degree = 1
    for place in range(p.axes[axis, MAPPED], p.axes[axis, MAPPED + 1]):
        degree *= c.nodes[node, DEGREES + p.lists[place]]
    return degree


@compiled
def point_at(p: Problem, c: Choice, operand: int, ranges: Array, replica: int) -> int:
    """Return the node's point whose tile is at these ranges; `replica` numbers those alike."""
    node = p.operands[operand, NODE]
    result, weight, left = 0, 1, replica
    first = p.operands[operand, AXES]
    for dim in range(p.nodes[node, DIMS] - 1, -1, -1):
        degree = c.nodes[node, DEGREES + dim]
        if degree == 1:
            continue
        index, found = 0, False
        for axis in range(first, p.operands[operand, AXES + 1]):
            inner = 1
            for place in range(p.axes[axis, MAPPED + 1] - 1, p.axes[axis, MAPPED] - 1, -1):
                other = p.lists[place]
                if other == dim:
                    index, found = ranges[axis - first] // inner % degree, True
                inner *= c.nodes[node, DEGREES + other]
        if not found:
            index = left % degree
            left //= degree
        result += index * weight
        weight *= degree
    return result


@entry
def copies(p: Problem, c: Choice, op: int) -> int:
    """Return how many points make each tile of the gradient that an update follows.

    More than one make parts of a sum, and each of their devices has read the whole tile.
    """
    source = p.operators[op, SOURCE]
    made, tiles = p.operands[source, NODE], 1
    for axis in range(p.operands[source, AXES], p.operands[source, AXES + 1]):
        tiles *= axis_degree(p, c, axis, made)
    found: int = c.nodes[made, POINTS] // tiles
    return found


@compiled
def follow(p: Problem, c: Choice, op: int, ranges: Array, cut: Array) -> None:
    """Set an update's configuration: the tiles, and the devices, of the gradient.

    It cuts each tile further, so that every device that holds a part of the gradient updates
    an equal share of the parameter, and the sum needs each byte once at one place (the scheme of
    Rajbhandari et al., ZeRO, 2020, stage 1).
    """
    source, operand = p.operators[op, SOURCE], p.operators[op, OPERAND]
    made, node = p.operands[source, NODE], p.operators[op, NODE]
    first, begin = p.operands[source, AXES], p.operands[operand, AXES]
    rank = p.operands[operand, AXES + 1] - begin
    for dim in range(p.operators[op, DIMS]):
        c.operators[op, DEGREES + dim] = 1
    for axis in range(rank):
        cut[axis] = axis_degree(p, c, first + axis, made)
    more, where = 1, -1
    shared = copies(p, c, op)
    for axis in range(rank):
        room = min(shared, p.axes[begin + axis, LENGTH] // cut[axis])
        if room > more:
            more, where = room, axis
        if more == shared:
            break
    for axis in range(rank):
        dim = -1
        if p.axes[begin + axis, MAPPED] < p.axes[begin + axis, MAPPED + 1]:
            dim = p.lists[p.axes[begin + axis, MAPPED]]
        wanted = cut[axis] * (more if axis == where else 1)
        if dim < 0 or not p.operators[op, OK + dim] or wanted <= 1:
            continue
        if c.operators[op, DEGREES + dim] > 1:
            continue
        c.operators[op, DEGREES + dim] = min(wanted, p.operators[op, EXTENT + dim])
        if not legal(p, node, c.operators[op, DEGREES:]):
            c.operators[op, DEGREES + dim] = 1
    points = 1
    for dim in range(p.operators[op, DIMS]):
        points *= c.operators[op, DEGREES + dim]
    while points > p.devices.shape[0]:  # a halved split of the widest dim fits
        widest = 0
        for dim in range(p.operators[op, DIMS]):
            if c.operators[op, DEGREES + dim] > c.operators[op, DEGREES + widest]:
                widest = dim
        points //= c.operators[op, DEGREES + widest]
        c.operators[op, DEGREES + widest] = max(1, c.operators[op, DEGREES + widest] // 2)
        points *= c.operators[op, DEGREES + widest]
    c.operators[op, POINTS] = points
    for point in range(points):
        replica = ZERO
        for axis in range(rank):
            dim = -1
            if p.axes[begin + axis, MAPPED] < p.axes[begin + axis, MAPPED + 1]:
                dim = p.lists[p.axes[begin + axis, MAPPED]]
            ranges[axis] = 0
            if dim < 0:
                continue
            rest = point
            for other in range(p.operators[op, DIMS] - 1, dim, -1):
                rest //= c.operators[op, DEGREES + other]
            index = rest % c.operators[op, DEGREES + dim]
            if axis == where and c.operators[op, DEGREES + dim] == cut[axis] * more:
                replica = index % more
                ranges[axis] = index // more
            else:
                ranges[axis] = index * cut[axis] // c.operators[op, DEGREES + dim]
        at = point_at(p, c, source, ranges, replica)
        c.placed[op, point] = c.placed[p.nodes[made, OP], c.node_at[made, at]]


@compiled
def task_cost(p: Problem, c: Choice, s: Scratch, task: int, point: int, kind: int) -> int:
    """Return the nanoseconds of a point task by the roofline of a device's kind (`Device.us`).

    Unlike there a weight's gradient, few results of long sums, may fill a device.
    """
    op = p.tasks[task, OP]
    total = 0
    for place in range(p.operators[op, NODES], p.operators[op, NODES + 1]):
        node = p.lists[place]
        if p.nodes[node, TASK] != task:
            continue
        mine = -1
        for candidate in range(c.nodes[node, POINTS]):
            if c.node_at[node, candidate] == point:
                mine = candidate
                break
        if mine < 0 or p.nodes[node, LOOKS]:
            continue
        nbytes, results, largest = 0.0, 1.0, 0.0
        for operand in range(p.nodes[node, OPERANDS], p.nodes[node, OPERANDS + 1]):
            tile(p, c, operand, mine, s.box[2], s.at)
            size, gathered = 1.0, False
            for axis in range(p.operands[operand, AXES], p.operands[operand, AXES + 1]):
                at = axis - p.operands[operand, AXES]
                size *= s.box[2, MOST_RANK + at] - s.box[2, at]
                gathered = gathered or p.axes[axis, GATHERED] != 0
            if p.operands[operand, OUTPUT]:
                results = max(results, size)
            if not gathered:
                nbytes += size * p.operands[operand, BYTES]
                largest = max(largest, size * p.operands[operand, BYTES])
            else:
                nbytes += largest
        share = 1.0
        for dim in range(p.nodes[node, DIMS]):
            if c.nodes[node, DEGREES + dim] > 1:
                a, b = interval(p, c, node, dim, s.at[dim])
                share *= (b - a) / p.nodes[node, EXTENT + dim]
        work = p.flops[node] * share
        filled = min(1.0, max(results, work / SPLIT_FLOPS) / p.kinds[kind, FULL])
        compute = work / (p.kinds[kind, RATES + p.nodes[node, RATE]] * filled)
        total += int(p.kinds[kind, LAUNCH] + max(compute, nbytes / p.kinds[kind, MEMORY_RATE]))
    return max(total, 1)


@entry
def measured(p: Problem, c: Choice, task: int) -> int:
    """Return the row of `Problem.times` for a task with its operator's degrees, or -1.

    Only equal parts are measured. An update's row says last how many points made its gradient:
    a parameter that every device reads is slower to write than one that stays on its device.
    """
    op = p.tasks[task, OP]
    if c.cuts[op, CUT] >= 0:
        return -1
    update = p.operators[op, KIND] == UPDATES
    shared = copies(p, c, op) if update else ZERO
    for row in range(p.tasks[task, TIMES], p.tasks[task, TIMES + 1]):
        same = True
        for dim in range(p.operators[op, DIMS]):
            same = same and p.times[row, dim] == c.operators[op, DEGREES + dim]
        same = same and (not update or p.times[row, p.operators[op, DIMS]] == shared)
        if same:
            return row
    return -1


@compiled
def price(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Set the times of an operator's tasks: measured ones, or the roofline's.

    Equal tiles on equal devices are priced once.
    """
    for task in range(p.operators[op, TASKS], p.operators[op, TASKS + 1]):
        row = measured(p, c, task)
        for point in range(c.operators[op, POINTS]):
            if row >= 0:
                c.task_ns[task, point] = p.times[row, MOST_DIMS + point]
                continue
            kind = p.devices[c.placed[op, point], OF_KIND]
            # Tiles differ by one index at most: the first one and those after it are alike when
            # the extent divides; otherwise each is priced.
            alike = point > 0 and kind == p.devices[c.placed[op, 0], OF_KIND]
            alike = alike and c.cuts[op, CUT] < 0
            for dim in range(p.operators[op, DIMS]):
                alike = (
                    alike and p.operators[op, EXTENT + dim] % c.operators[op, DEGREES + dim] == 0
                )
            if alike:
                c.task_ns[task, point] = c.task_ns[task, 0]
            else:
                c.task_ns[task, point] = (
                    task_cost(p, c, s, task, point, kind) * p.tasks[task, SCALE] // 1000
                )


@compiled
def _exchanges(p: Problem, c: Choice, task: int, op: int) -> int:
    """Return the time of what a task's points tell each other before their results are final.

    An operator that reduces mid-way (batch norm over samples, softmax over classes) becomes several
    primitives when it is split there, with small sums of partial results between them. The estimate
    here is a round trip in a tree of its points, whose latency outweighs the few bytes. Partial
    results that a light operator of the same task reads are summed too: all of their bytes.
    """
    latency, slow = 0, 0.0
    levels = 0
    while (1 << levels) < c.operators[op, POINTS]:
        levels += 1
    for point in range(1, c.operators[op, POINTS]):
        a, b = c.placed[op, 0], c.placed[op, point]
        latency = max(latency, p.latency_ns[a, b])
        slow = max(slow, p.ns_per_byte[a, b])
    total = 0
    for place in range(p.operators[op, NODES], p.operators[op, NODES + 1]):
        node = p.lists[place]
        if p.nodes[node, TASK] != task:
            continue
        exchanged = False
        for dim in range(p.nodes[node, DIMS]):
            exchanged = exchanged or (
                p.nodes[node, LOWERS + dim] != 0 and c.nodes[node, DEGREES + dim] > 1
            )
        if exchanged:
            total += max(1, 2 * levels * latency)
        for operand in range(p.nodes[node, OPERANDS], p.nodes[node, OPERANDS + 1]):
            if p.operands[operand, INSIDE] and partial(p, c, operand):
                nbytes = float(p.operands[operand, BYTES])
                for axis in range(p.operands[operand, AXES], p.operands[operand, AXES + 1]):
                    nbytes *= p.axes[axis, LENGTH]
                    nbytes /= axis_degree(p, c, axis, node)
                total += 2 * levels * latency + int(2 * nbytes * slow)
    return total


@compiled
def settle(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Derive everything of one operator that its own degrees and devices determine."""
    if p.operators[op, KIND] == UPDATES:
        follow(p, c, op, s.box[0], s.box[1])
    spread(p, c, s, op)
    price(p, c, s, op)
    for task in range(p.operators[op, TASKS], p.operators[op, TASKS + 1]):
        c.task_ns[task, p.devices.shape[0]] = _exchanges(p, c, task, op)


__all__ = [
    "copies",
    "inside",
    "interval",
    "legal",
    "measured",
    "partial",
    "settle",
    "tile",
    "uneven",
    "volume",
]
