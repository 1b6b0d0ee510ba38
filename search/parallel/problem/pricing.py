"""The times of an operator's tasks under a configuration, compiled: measured, or by the roofline.

The roofline is compiled from its definition.
"""

from __future__ import annotations

from soapstone.search.cost.machine import roofline
from soapstone.search.parallel.problem.arrays import (
    MOST_DIMS,
    UPDATES,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import ZERO, compiled, entry, span
from soapstone.search.parallel.problem.geometry import (
    axis_degree,
    copies,
    follow,
    interval,
    partial,
    spread,
    tile,
    volume,
)

SPLIT_FLOPS = 1024.0  # operations of a long sum that count as a result: they may be shared out

_roofline = compiled(roofline)


@compiled
def task_cost(p: Problem, c: Choice, s: Scratch, task: int, point: int, kind: int) -> int:
    """Return the nanoseconds of a point task by the roofline of a device's kind (`Device.us`).

    In contrast to it, a weight's gradient, few results of long sums, may use a whole device.
    """
    total = 0
    rates = p.kinds[kind]
    for place in span(p.operators[p.tasks[task].operator].nodes):
        node = p.lists[place]
        mine, degrees = p.nodes[node], c.nodes[node].degrees
        if mine.task != task:
            continue
        at = -1
        for candidate in range(c.nodes[node].points):
            if c.node_at[node, candidate] == point:
                at = candidate
                break
        if at < 0 or mine.is_view:
            continue
        nbytes, results, largest = 0.0, 1.0, 0.0
        for number in span(mine.operands):
            operand, box = p.operands[number], s.box[2]
            tile(p, c, number, at, box, s.at)
            gathered = False
            for axis in span(operand.axes):
                gathered = gathered or p.axes[axis].gathered != 0
            size = float(volume(box, operand.axes.end - operand.axes.begin))
            if operand.is_output:
                results = max(results, size)
            if not gathered:
                nbytes += size * operand.element_bytes
                largest = max(largest, size * operand.element_bytes)
            else:
                nbytes += largest
        share = 1.0
        for dim in range(mine.dims):
            if degrees[dim] > 1:
                a, b = interval(p, c, node, dim, s.at[dim])
                share *= (b - a) / mine.extent[dim]
        work = p.flops[node] * share
        results = max(results, work / SPLIT_FLOPS)
        if mine.crosses:
            total += int(rates.launch_ns + work)
            continue
        total += int(
            rates.launch_ns
            + _roofline(
                work, rates.rates[mine.rate], results, rates.full, nbytes, rates.memory_rate
            )
        )
    return max(total, 1)


@entry
def measured(p: Problem, c: Choice, task: int) -> int:
    """Return the row of `Problem.times` for a task with its operator's degrees, or -1.

    Only equal parts without copies are measured. The last entry of an update's row is the number of
    points that made its gradient: writing a parameter that every device reads is slower than one
    that stays.
    """
    op = p.tasks[task].operator
    split, dims = c.operators[op], p.operators[op].dims
    if split.cut >= 0:
        return -1
    if split.replicated:
        for place in span(p.operators[op].nodes):
            node = p.lists[place]
            if c.nodes[node].replicated and p.nodes[node].task == task:
                return -1
    update = p.operators[op].kind == UPDATES
    shared = copies(p, c, op) if update else ZERO
    for row in span(p.tasks[task].times):
        same = not update or p.times[row, dims] == shared
        for dim in range(dims):
            same = same and p.times[row, dim] == split.degrees[dim]
        if same:
            return row
    return -1


@compiled
def price(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Set the times of an operator's tasks: measured ones, or the roofline's.

    Equal tiles on equal devices are priced once.
    """
    mine, split = p.operators[op], c.operators[op]
    # Tiles differ by one index at most: the first one and those after it are alike when the extent
    # divides; otherwise each is priced.
    equal = split.cut < 0
    for dim in range(mine.dims):
        equal = equal and mine.extent[dim] % split.degrees[dim] == 0
    for task in span(mine.tasks):
        row = measured(p, c, task)
        for point in range(split.points):
            kind = p.devices[c.placed[op, point]].kind
            if row >= 0:
                c.task_ns[task, point] = p.times[row, MOST_DIMS + point]
            elif equal and point > 0 and kind == p.devices[c.placed[op, 0]].kind:
                c.task_ns[task, point] = c.task_ns[task, 0]
            else:
                c.task_ns[task, point] = (
                    task_cost(p, c, s, task, point, kind) * p.tasks[task].scale // 1000
                )


@compiled
def _exchanges(p: Problem, c: Choice, task: int, op: int) -> int:
    """Return the time of exchanges between a task's points before their results are final.

    An operator that reduces mid-way (batch norm over samples, softmax over classes) becomes several
    primitives when it is split there, with small sums of partial results between them. The estimate
    is a round trip in a tree of its points, whose latency outweighs the few bytes. Partial results
    that a light operator of the same task reads are summed too, with all of their bytes.
    """
    latency, slow = 0, 0.0
    levels = 0
    while (1 << levels) < c.operators[op].points:
        levels += 1
    for point in range(1, c.operators[op].points):
        a, b = c.placed[op, 0], c.placed[op, point]
        latency = max(latency, p.latency_ns[a, b])
        slow = max(slow, p.ns_per_byte[a, b])
    total = 0
    for place in span(p.operators[op].nodes):
        node = p.lists[place]
        if p.nodes[node].task != task:
            continue
        exchanged = False
        for dim in range(p.nodes[node].dims):
            split = c.nodes[node].degrees[dim] > 1 and not (c.nodes[node].replicated >> dim) & 1
            exchanged = exchanged or (split and p.nodes[node].lowers[dim] != 0)
        if exchanged:
            total += max(1, 2 * levels * latency)
        for operand in span(p.nodes[node].operands):
            if p.operands[operand].read_inside and partial(p, c, operand):
                nbytes = float(p.operands[operand].element_bytes)
                for axis in span(p.operands[operand].axes):
                    nbytes *= p.axes[axis].extent
                    nbytes /= axis_degree(p, c, axis, node)
                total += 2 * levels * latency + int(2 * nbytes * slow)
    return total


@compiled
def settle(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Derive everything of one operator that its own degrees and devices determine."""
    if p.operators[op].kind == UPDATES:
        follow(p, c, op, s.box[0].low, s.box[1].low)
    spread(p, c, s, op)
    price(p, c, s, op)
    for task in span(p.operators[op].tasks):
        c.task_ns[task, p.devices.shape[0]] = _exchanges(p, c, task, op)
