"""Configurations and tiles, compiled: what `Strategy.configuration` and `expand` say, fast.

An operator's degrees become those of its gradient nodes by dim name; light operators follow the
tiles of what they read; updates are spread over the devices that hold parts of the gradient.

What an axis map or a roofline says is compiled from where it is said.
"""

from __future__ import annotations

from typing import Any

from soapstone.ir.dims import affine_interval, equal_cut
from soapstone.search.cost.machine import roofline
from soapstone.search.parallel.problem.arrays import (
    AFFINE,
    MOST_DIMS,
    UNINDEXED,
    UPDATES,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, entry, span

SPLIT_FLOPS = 1024.0  # operations of a long sum that count as a result: they may be shared out

_affine, _equal_cut, _roofline = compiled(affine_interval), compiled(equal_cut), compiled(roofline)


@entry
def uneven(p: Problem, c: Choice, node: int, dim: int) -> bool:
    """Return whether a node's dim has the uneven tiles of its operator (`resolved`)."""
    mine = p.nodes[node]
    split = c.operators[mine.operator]
    cut = split.cut
    return bool(
        cut >= 0
        and mine.follows[dim] == cut
        and c.nodes[node].degrees[dim] == split.degrees[cut]
        and mine.extent[dim] == p.operators[mine.operator].extent[cut]
    )


@compiled
def interval(p: Problem, c: Choice, node: int, dim: int, index: int) -> tuple[int, int]:
    """Return the interval of one of a dim's tiles."""
    extent, degree = p.nodes[node].extent[dim], c.nodes[node].degrees[dim]
    if degree == 1 or (c.nodes[node].replicated >> dim) & 1:
        return ZERO, extent
    if uneven(p, c, node, dim):
        op = p.nodes[node].operator
        return c.cuts[op, index], c.cuts[op, index + 1]
    return _equal_cut(extent, degree, index), _equal_cut(extent, degree, index + 1)


@entry
def tile(p: Problem, c: Choice, operand: int, point: int, box: Any, index: Array) -> None:
    """Write the box of an operand's tile at a node's point, as `Operand.tiles` says it."""
    node = p.operands[operand].node
    rest = point
    for dim in range(p.nodes[node].dims - 1, -1, -1):
        degree = c.nodes[node].degrees[dim]
        index[dim] = ZERO
        if degree > 1:
            index[dim] = rest % degree
            rest //= degree
    first = p.operands[operand].axes.begin
    for number in span(p.operands[operand].axes):
        at, axis = number - first, p.axes[number]
        if axis.map == UNINDEXED:
            box.low[at], box.high[at] = 0, axis.extent
        elif axis.map == AFFINE:
            dim = p.lists[axis.dims.begin]
            a, b = interval(p, c, node, dim, index[dim])
            box.low[at], box.high[at] = _affine(
                a, b, axis.stride, axis.offset, axis.window, axis.extent
            )
        else:
            start, last, empty = 0, 0, False
            for place in span(axis.dims):
                dim = p.lists[place]
                a, b = interval(p, c, node, dim, index[dim])
                start = start * p.nodes[node].extent[dim] + a
                last = last * p.nodes[node].extent[dim] + b - 1
                empty = empty or b <= a
            box.low[at] = start
            box.high[at] = start if empty else last + 1


@compiled
def volume(box: Any, rank: int) -> int:
    """Return how many elements a box has."""
    result = 1
    for axis in range(rank):
        result *= box.high[axis] - box.low[axis]
    return result


@compiled
def inside(a: Any, b: Any, rank: int) -> bool:
    """Return whether the first box lies in the second."""
    for axis in range(rank):
        if a.low[axis] < b.low[axis] or a.high[axis] > b.high[axis]:
            return False
    return True


@compiled
def partial(p: Problem, c: Choice, operand: int) -> bool:
    """Return whether an output's tiles are partial results."""
    row = c.nodes[p.operands[operand].node]
    return bool(_partial(p, operand, row.degrees, row.replicated))


@compiled
def _partial(p: Problem, operand: int, degrees: Array, replicated: int) -> bool:
    """Return whether an output's tiles are partial results (`Signature.monoid`)."""
    node = p.operands[operand].node
    for dim in range(p.nodes[node].dims):
        if degrees[dim] == 1 or (replicated >> dim) & 1:
            continue
        found = False
        for number in span(p.operands[operand].axes):
            axis = p.axes[number]
            for place in span(axis.dims):
                if p.lists[place] == dim:
                    found = True
                    if axis.map == AFFINE and axis.window > axis.stride:
                        return True
        if not found:
            return True
    return False


@entry
def legal(p: Problem, node: int, degrees: Array) -> bool:
    """Return whether a node's dims may be split so; extents are not looked at."""
    nested = p.nodes[node].nested
    for place in range(nested.begin, nested.end, 2):
        outer = p.lists[place + 1]
        if degrees[p.lists[place]] > 1 and degrees[outer] != p.nodes[node].extent[outer]:
            return False
    return True


@entry
def complete(p: Problem, node: int, degrees: Array, replicated: int) -> bool:
    """Return whether a node may have all of some dims at each point (`check_replicated`)."""
    mine = p.nodes[node]
    if mine.once:
        return False
    for place in range(mine.nested.begin, mine.nested.end, 2):
        inner, outer = p.lists[place], p.lists[place + 1]
        apart = degrees[inner] > 1 and not (replicated >> inner) & 1
        if apart and (replicated >> outer) & 1:
            return False
    for dim in range(mine.dims):
        if mine.lowers[dim] and degrees[dim] > 1 and not (replicated >> dim) & 1:
            return False
    for operand in span(mine.operands):
        if p.operands[operand].is_output and _partial(p, operand, degrees, replicated):
            return False
    return True


@compiled
def _replicated(p: Problem, node: int, degrees: Array, dims: int) -> int:
    """Return the dims of which a node has all, where its operator has all of these: all or none."""
    mine, found = p.nodes[node], ZERO
    for dim in range(mine.dims):
        if degrees[dim] > 1 and (dims >> mine.follows[dim]) & 1:
            found |= ONE << dim
    return found if found and complete(p, node, degrees, found) else ZERO


@compiled
def spread(p: Problem, c: Choice, s: Scratch, op: int) -> None:
    """Set the degrees and points of an operator's nodes from its own (`inherited`, `resolved`)."""
    for place in span(p.operators[op].nodes):
        node = p.lists[place]
        mine, taken = p.nodes[node], c.nodes[node].degrees
        count = mine.dims
        for dim in range(count):
            taken[dim] = 1
        points = 1
        for dim in range(count):
            source = mine.follows[dim]
            if source < 0 or not mine.splits[dim]:
                continue
            degree = min(c.operators[op].degrees[source], mine.extent[dim])
            used = False
            for other in range(dim):
                used = used or (taken[other] > 1 and mine.follows[other] == source)
            if degree <= 1 or used:
                continue
            taken[dim] = degree
            if legal(p, node, taken):
                points *= degree
            else:
                taken[dim] = 1
        c.nodes[node].points = points
        dims = c.operators[op].replicated
        c.nodes[node].replicated = _replicated(p, node, taken, dims) if dims else ZERO
        weight = ONE
        for own in range(p.operators[op].dims - 1, -1, -1):
            s.at[own] = weight
            weight *= c.operators[op].degrees[own]
        for point in range(points):
            rest, at = point, 0
            for dim in range(count - 1, -1, -1):
                if taken[dim] > 1:
                    at += rest % taken[dim] * s.at[mine.follows[dim]]
                    rest //= taken[dim]
            c.node_at[node, point] = at


@compiled
def axis_degree(p: Problem, c: Choice, axis: int, node: int) -> int:
    """Return in how many ranges an axis is cut."""
    degree = 1
    for place in span(p.axes[axis].dims):
        if not (c.nodes[node].replicated >> p.lists[place]) & 1:
            degree *= c.nodes[node].degrees[p.lists[place]]
    return degree


@compiled
def point_at(p: Problem, c: Choice, operand: int, ranges: Array, replica: int) -> int:
    """Return the node's point whose tile is at these ranges; `replica` numbers those alike."""
    node = p.operands[operand].node
    result, weight, left = 0, 1, replica
    first = p.operands[operand].axes.begin
    for dim in range(p.nodes[node].dims - 1, -1, -1):
        degree = c.nodes[node].degrees[dim]
        if degree == 1:
            continue
        index, found = 0, False
        for axis in range(first, p.operands[operand].axes.end):
            inner = 1
            dims = p.axes[axis].dims
            for place in range(dims.end - 1, dims.begin - 1, -1):
                other = p.lists[place]
                if other == dim:
                    index, found = ranges[axis - first] // inner % degree, True
                inner *= c.nodes[node].degrees[other]
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
    source = p.operators[op].source
    made, tiles = p.operands[source].node, 1
    for axis in span(p.operands[source].axes):
        tiles *= axis_degree(p, c, axis, made)
    return int(c.nodes[made].points // tiles)


@compiled
def _first_dim(p: Problem, axis: int) -> int:
    """Return the first dim that indexes an axis, or -1."""
    dims = p.axes[axis].dims
    return int(p.lists[dims.begin] if dims.begin < dims.end else NONE)


@compiled
def follow(p: Problem, c: Choice, op: int, ranges: Array, cut: Array) -> None:
    """Set an update's configuration: the tiles, and the devices, of the gradient.

    It cuts each tile further, so that every device that holds a part of the gradient updates
    an equal share of the parameter, and the sum needs each byte once at one place (the scheme of
    Rajbhandari et al., ZeRO, 2020, stage 1).
    """
    mine, degrees = p.operators[op], c.operators[op].degrees
    source, operand = mine.source, mine.operand
    made, dims = p.operands[source].node, mine.dims
    first, begin = p.operands[source].axes.begin, p.operands[operand].axes.begin
    rank = p.operands[operand].axes.end - begin
    for dim in range(dims):
        degrees[dim] = 1
    for axis in range(rank):
        cut[axis] = axis_degree(p, c, first + axis, made)
    more, where = 1, -1
    shared = copies(p, c, op)
    for axis in range(rank):
        room = min(shared, p.axes[begin + axis].extent // cut[axis])
        if room > more:
            more, where = room, axis
        if more == shared:
            break
    for axis in range(rank):
        dim = _first_dim(p, begin + axis)
        wanted = cut[axis] * (more if axis == where else 1)
        if dim < 0 or not mine.splits[dim] or wanted <= 1:
            continue
        if degrees[dim] > 1:
            continue
        degrees[dim] = min(wanted, mine.extent[dim])
        if not legal(p, mine.node, degrees):
            degrees[dim] = 1
    points = 1
    for dim in range(dims):
        points *= degrees[dim]
    while points > p.devices.shape[0]:  # a halved split of the widest dim fits
        widest = 0
        for dim in range(dims):
            if degrees[dim] > degrees[widest]:
                widest = dim
        points //= degrees[widest]
        degrees[widest] = max(1, degrees[widest] // 2)
        points *= degrees[widest]
    c.operators[op].points = points
    for point in range(points):
        replica = ZERO
        for axis in range(rank):
            dim = _first_dim(p, begin + axis)
            ranges[axis] = 0
            if dim < 0:
                continue
            rest = point
            for other in range(dims - 1, dim, -1):
                rest //= degrees[other]
            index = rest % degrees[dim]
            if axis == where and degrees[dim] == cut[axis] * more:
                replica = index % more
                ranges[axis] = index // more
            else:
                ranges[axis] = index * cut[axis] // degrees[dim]
        at = point_at(p, c, source, ranges, replica)
        c.placed[op, point] = c.placed[p.nodes[made].operator, c.node_at[made, at]]


@compiled
def task_cost(p: Problem, c: Choice, s: Scratch, task: int, point: int, kind: int) -> int:
    """Return the nanoseconds of a point task by the roofline of a device's kind (`Device.us`).

    Unlike there a weight's gradient, few results of long sums, may fill a device.
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

    Only equal parts are measured, and none in copies. An update's row says last how many points
    made its gradient: a parameter that every device reads is slower to write than one that stays on
    its device.
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
    """Return the time of what a task's points tell each other before their results are final.

    An operator that reduces mid-way (batch norm over samples, softmax over classes) becomes several
    primitives when it is split there, with small sums of partial results between them. The estimate
    here is a round trip in a tree of its points, whose latency outweighs the few bytes. Partial
    results that a light operator of the same task reads are summed too: all of their bytes.
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
