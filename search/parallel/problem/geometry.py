"""Configurations and tiles, compiled: a fast form of `Strategy.configuration` and `expand`.

An operator's degrees become those of its gradient nodes by dim name; light operators have the tiles
of what they read; updates are distributed over the devices that hold parts of the gradient.

Interval maps are compiled from their definitions.
"""

from __future__ import annotations

from typing import Any

from soapstone.ir.dims import affine_interval, equal_cut
from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import AFFINE, UNINDEXED, Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, entry, span

_affine, _equal_cut = compiled(affine_interval), compiled(equal_cut)


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
    """Return the number of elements of a box."""
    result = 1
    for axis in range(rank):
        result *= box.high[axis] - box.low[axis]
    return result


@compiled
def inside(a: Any, b: Any, rank: int) -> bool:
    """Return whether the first box is contained in the second."""
    for axis in range(rank):
        if a.low[axis] < b.low[axis] or a.high[axis] > b.high[axis]:
            return False
    return True


@compiled
def overlap(a: Any, b: Any, rank: int) -> int:
    """Return the number of elements that two boxes share."""
    result = 1
    for axis in range(rank):
        low, high = max(a.low[axis], b.low[axis]), min(a.high[axis], b.high[axis])
        if low >= high:
            return 0
        result *= high - low
    return result


@compiled
def same_box(a: Any, b: Any, rank: int) -> bool:
    """Return whether two boxes are equal."""
    for axis in range(rank):
        if a.low[axis] != b.low[axis] or a.high[axis] != b.high[axis]:
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
        indexed = False
        for number in span(p.operands[operand].axes):
            axis = p.axes[number]
            for place in span(axis.dims):
                if p.lists[place] == dim:
                    indexed = True
                    if axis.map == AFFINE and axis.window > axis.stride:
                        return True
        if not indexed:
            return True
    return False


@entry
def legal(p: Problem, node: int, degrees: Array) -> bool:
    """Return whether a node's dims may be split so, regardless of extents."""
    nested = p.nodes[node].nested
    for place in range(nested.begin, nested.end, 2):
        outer = p.lists[place + 1]
        if degrees[p.lists[place]] > 1 and degrees[outer] != p.nodes[node].extent[outer]:
            return False
    return True


@entry
def complete(p: Problem, node: int, degrees: Array, replicated: int) -> bool:
    """Return whether each point of a node may have all of some dims (`check_replicated`)."""
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
    """Return the dims that a node has whole if its operator has all of these: all or none."""
    mine, whole = p.nodes[node], ZERO
    for dim in range(mine.dims):
        if degrees[dim] > 1 and (dims >> mine.follows[dim]) & 1:
            whole |= ONE << dim
    return whole if whole and complete(p, node, degrees, whole) else ZERO


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
    """Return the number of ranges into which an axis is split."""
    degree = 1
    for place in span(p.axes[axis].dims):
        if not (c.nodes[node].replicated >> p.lists[place]) & 1:
            degree *= c.nodes[node].degrees[p.lists[place]]
    return degree


@compiled
def point_at(p: Problem, c: Choice, operand: int, ranges: Array, replica: int) -> int:
    """Return the node's point with the tile at these ranges; `replica` numbers equal ones."""
    node = p.operands[operand].node
    result, weight, left = 0, 1, replica
    first = p.operands[operand].axes.begin
    for dim in range(p.nodes[node].dims - 1, -1, -1):
        degree = c.nodes[node].degrees[dim]
        if degree == 1:
            continue
        index, indexed = 0, False
        for axis in range(first, p.operands[operand].axes.end):
            inner = 1
            dims = p.axes[axis].dims
            for place in range(dims.end - 1, dims.begin - 1, -1):
                other = p.lists[place]
                if other == dim:
                    index, indexed = ranges[axis - first] // inner % degree, True
                inner *= c.nodes[node].degrees[other]
        if not indexed:
            index = left % degree
            left //= degree
        result += index * weight
        weight *= degree
    return result


@entry
def copies(p: Problem, c: Choice, op: int) -> int:
    """Return how many points make each tile of the gradient that an update follows.

    Several points make partial sums, and each of their devices has read the whole tile.
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
    """Set an update's configuration: the tiles of the gradient, and its devices.

    Each tile is split further, so that every device with a part of the gradient updates an equal
    share of the parameter, and the sum needs each byte once in one place (Rajbhandari et al., ZeRO,
    2020, stage 1).
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
