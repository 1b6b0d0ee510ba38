"""The algebra of cost frontiers: reduce, union, product; many at once, compiled.

A frontier is an array of cost vectors in lexicographic order, none of which is at most equal to
another in all coordinates: of equal vectors one is kept. (TensorOpt's Algorithm 1 sorts by the
first coordinate alone, and keeps dominated vectors where it ties.) Many frontiers are one `Table`
in rows of points after each other, as sparse matrices are (CSR); each point knows of which two
points of other tables it is the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.compiling import compiled, entry, integer, put

SMALL = integer(12)  # that many points are sorted by insertion
FEW = integer(1024)  # more products than that are reduced before there are more


@compiled
def _before(costs: Array, a: int, b: int) -> bool:
    """Return whether point a comes before b: lexicographic order, then by number."""
    for at in range(costs.shape[1]):
        if costs[a, at] != costs[b, at]:
            return costs[a, at] < costs[b, at]  # type: ignore[no-any-return]
    return a < b


@compiled
def _sort(costs: Array, order: Array, room: Array, count: int) -> None:
    """Sort numbers of points: runs by insertion, then merged."""
    for begin in range(0, count, SMALL):
        for i in range(begin + 1, min(begin + SMALL, count)):
            item, j = order[i], i - 1
            while j >= begin and _before(costs, item, order[j]):
                order[j + 1] = order[j]
                j -= 1
            order[j + 1] = item
    width = SMALL
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            if middle < end and not _before(costs, order[middle - 1], order[middle]):
                put(room, order[begin:middle], middle - begin)
                left, i, j, at = middle - begin, 0, middle, begin
                while i < left:
                    if j < end and _before(costs, order[j], room[i]):
                        order[at] = order[j]
                        j += 1
                    else:
                        order[at] = room[i]
                        i += 1
                    at += 1
        width *= 2


@compiled
def _stairs(costs: Array, order: Array, room: Array, count: int) -> int:
    """As `least`, of sorted points of three coordinates.

    `room` has those kept whose other two coordinates no one kept is at most equal to, ascending in
    the second one, descending in the third (Kung, Luccio and Preparata, On finding the maxima of a
    set of vectors, 1975).
    """
    kept, steps = 0, 0
    for i in range(count):
        new = order[i]
        second, third = costs[new, 1], costs[new, 2]
        low, high = 0, steps
        while low < high:
            middle = (low + high) // 2
            if costs[room[middle], 1] <= second:
                low = middle + 1
            else:
                high = middle
        if low and costs[room[low - 1], 2] <= third:
            continue
        order[kept] = new
        kept += 1
        if low and costs[room[low - 1], 1] == second:
            low -= 1
        gone = low
        while gone < steps and costs[room[gone], 2] >= third:
            gone += 1
        if gone == low:
            for at in range(steps, low, -1):
                room[at] = room[at - 1]
            steps += 1
        elif gone > low + 1:
            for at in range(gone, steps):
                room[at - gone + low + 1] = room[at]
            steps -= gone - low - 1
        room[low] = new
    return kept


@compiled
def least(costs: Array, order: Array, room: Array, count: int) -> int:
    """Bring the numbers of a frontier's points, in order, to the front; return how many."""
    _sort(costs, order, room, count)
    kept, coordinates = 0, costs.shape[1]
    if coordinates == 3:
        return _stairs(costs, order, room, count)
    for i in range(count):
        new = order[i]
        covered = False
        if coordinates <= 2:  # the last one kept has the least second coordinate
            if kept:
                covered = costs[order[kept - 1], coordinates - 1] <= costs[new, coordinates - 1]
                covered = covered or coordinates == 1
        else:
            for j in range(kept - 1, -1, -1):
                covered = True
                for at in range(1, coordinates):
                    if costs[order[j], at] > costs[new, at]:
                        covered = False
                        break
                if covered:
                    break
        if not covered:
            order[kept] = new
            kept += 1
    return kept


@entry
def reduced_cells(costs: Array, cells: Array, start: Array, order: Array) -> int:
    """Reduce the points of each cell; numbers of those kept go to `order`, cell after cell.

    Args:
        costs: (points, coordinates). cells: (points,), ascending. start: (cells + 1,), written.
        order: (points,), written.

    Returns:
        How many are kept.
    """
    points = costs.shape[0]
    mine, room = np.empty(points, np.int64), np.empty(points, np.int64)
    begin, kept = 0, 0
    for cell in range(start.shape[0] - 1):
        start[cell] = kept
        end = begin
        while end < points and cells[end] == cell:
            mine[end - begin] = end
            end += 1
        count = least(costs, mine, room, end - begin)
        for i in range(count):
            order[kept + i] = mine[i]
        kept += count
        begin = end
    start[start.shape[0] - 1] = kept
    return kept


def reduce(costs: Array) -> Array:
    """Return the numbers of the vectors that make the frontier, in lexicographic order.

    Args:
        costs: (vectors, coordinates) int64.
    """
    start, order = np.zeros(2, np.int64), np.empty(len(costs), np.int64)
    costs = np.ascontiguousarray(costs, np.int64)
    count = reduced_cells(costs, np.zeros(len(costs), np.int64), start, order)
    return order[:count]


def union(*frontiers: Array) -> Array:
    """Return the frontier of all points of several: (points, coordinates) int64."""
    costs = np.concatenate(frontiers)
    return costs[reduce(costs)]


def product(one: Array, other: Array, monoids: Sequence[str] | None = None) -> Array:
    """Return the frontier of all sums of a point of each frontier: (points, coordinates) int64.

    Args:
        monoids: how costs are combined in each coordinate, `sum` or `max`; None: all are added.
    """
    coordinates = one.shape[1]
    pairs = one[:, None], other[None, :]
    met = np.where(
        [monoid == "max" for monoid in monoids or ("sum",) * coordinates],
        np.maximum(*pairs),
        np.add(*pairs),
    ).reshape(-1, coordinates)
    return met[reduce(met)]


@compiled
def _grown(of: Array, count: int, need: int) -> Array:
    """Return an array of more rows, the first ones copied."""
    made = np.empty((2 * need + 64, of.shape[1]), of.dtype)
    for i in range(count):
        for at in range(of.shape[1]):
            made[i, at] = of[i, at]
    return made


@compiled
def _copy(target: Array, to: int, source: Array, row: int) -> None:
    for at in range(4):
        target[to, at] = source[row, at]


@compiled
def _merge(
    kept: Array,
    made: Array,
    many: int,
    of: Array,
    begin: int,
    end: int,
    one: Array,
    by: int,
    column: int,
) -> int:
    """Write to `made` the union of a frontier of two sums and of another one moved by a point.

    Args:
        kept, made: (room, 4): two costs, and the numbers of the two points that make them.
        many: rows of `kept`. of, begin, end: the frontier that is moved. one, by: the point it is
            moved by. column: where the number of the point that is moved goes.

    Returns:
        How many are made, or -1 if `kept` covers them all.
    """
    first, second = one[by, 0], one[by, 1]
    low, high, bound = 0, many, of[begin, 0] + first
    while low < high:
        middle = (low + high) // 2
        if kept[middle, 0] <= bound:
            low = middle + 1
        else:
            high = middle
    if low and kept[low - 1, 1] <= of[end - 1, 1] + second:
        return -1
    low -= low and kept[low - 1, 0] == bound  # it may be what is moved that has less of the second
    for i in range(low):
        _copy(made, i, kept, i)
    i, j, count = low, begin, low
    last = kept[low - 1, 1] if low else np.int64(1) << 62
    while j < end:
        a, b = of[j, 0] + first, of[j, 1] + second
        if i < many and (kept[i, 0] < a or (kept[i, 0] == a and kept[i, 1] <= b)):
            if kept[i, 1] < last:
                last = kept[i, 1]
                _copy(made, count, kept, i)
                count += 1
            i += 1
        else:
            if b < last:
                last = b
                made[count, 0], made[count, 1] = a, b
                made[count, column], made[count, 5 - column] = j, by
                count += 1
            j += 1
    while i < many and kept[i, 1] >= last:
        i += 1
    while i < many:
        _copy(made, count, kept, i)
        count += 1
        i += 1
    return count


@compiled
def _reduce(points: Array, order: Array, room: Array, count: int) -> int:
    """Reduce the first points, with what belongs to them, where they are; return how many stay."""
    for i in range(count):
        order[i] = i
    coordinates = points.shape[1] - 2
    stay = least(points[:, :coordinates], order, room, count)
    moved = np.empty((stay, points.shape[1]), np.int64)
    for i in range(stay):
        for at in range(points.shape[1]):
            moved[i, at] = points[order[i], at]
    for i in range(stay):
        for at in range(points.shape[1]):
            points[i, at] = moved[i, at]
    return stay


@entry
def joined(
    first: int,
    last: int,
    cells: Array,
    steps: Array,
    largest: Array,
    start_a: Array,
    costs_a: Array,
    start_b: Array,
    costs_b: Array,
) -> tuple[Array, Array, Array]:
    """Return frontiers of the unions of products, for a range of cells of a new table.

    Args:
        first, last: the range. cells: (cells, 2), where each is in the two tables.
        steps: (choices, 2), how far each choice of what is eliminated is from there.
        largest: (coordinates,), whether the larger cost counts, instead of the sum.
        start_a, costs_a, start_b, costs_b: the two tables.

    Returns:
        How many points each cell has; their costs; numbers of points in both tables.
    """
    coordinates = costs_a.shape[1]
    counts = np.zeros(last - first, np.int64)
    costs, origins = np.empty((64, coordinates), np.int64), np.empty((64, 2), np.int32)
    many = 0
    merging = coordinates == 2 and not largest.any()
    kept, made = np.empty((64, coordinates + 2), np.int64), np.empty((64, 4), np.int64)
    order, room = np.empty(0, np.int64), np.empty(0, np.int64)
    for cell in range(first, last):
        count, reduced = 0, 0
        for step in range(steps.shape[0]):
            a, b = cells[cell, 0] + steps[step, 0], cells[cell, 1] + steps[step, 1]
            begin_a, end_a, begin_b, end_b = start_a[a], start_a[a + 1], start_b[b], start_b[b + 1]
            if begin_a == end_a or begin_b == end_b:
                continue
            if merging:
                need = count + max(end_a - begin_a, end_b - begin_b)
                if need > kept.shape[0]:
                    kept = _grown(kept, count, need)
                if need > made.shape[0]:
                    made = np.empty((kept.shape[0], 4), np.int64)
                if end_a - begin_a < end_b - begin_b:
                    for by in range(begin_a, end_a):
                        if count + end_b - begin_b > min(kept.shape[0], made.shape[0]):
                            kept = _grown(kept, count, count + end_b - begin_b)
                            made = np.empty((kept.shape[0], 4), np.int64)
                        new = _merge(kept, made, count, costs_b, begin_b, end_b, costs_a, by, 3)
                        if new >= 0:
                            kept, made, count = made, kept, new
                else:
                    for by in range(begin_b, end_b):
                        if count + end_a - begin_a > min(kept.shape[0], made.shape[0]):
                            kept = _grown(kept, count, count + end_a - begin_a)
                            made = np.empty((kept.shape[0], 4), np.int64)
                        new = _merge(kept, made, count, costs_a, begin_a, end_a, costs_b, by, 2)
                        if new >= 0:
                            kept, made, count = made, kept, new
                continue
            need = count + (end_a - begin_a) * (end_b - begin_b)
            if need > kept.shape[0]:
                kept = _grown(kept, count, need)
            for i in range(begin_a, end_a):
                for j in range(begin_b, end_b):
                    for at in range(coordinates):
                        x, y = costs_a[i, at], costs_b[j, at]
                        kept[count, at] = max(x, y) if largest[at] else x + y
                    kept[count, coordinates], kept[count, coordinates + 1] = i, j
                    count += 1
            if count > 2 * reduced + FEW:
                if order.shape[0] < count:
                    order, room = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
                count = reduced = _reduce(kept, order, room, count)
        if not merging and count > reduced:
            if order.shape[0] < count:
                order, room = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
            count = _reduce(kept, order, room, count)
        counts[cell - first] = count
        if many + count > costs.shape[0]:
            costs, origins = _grown(costs, many, many + count), _grown(origins, many, many + count)
        for i in range(count):
            for at in range(coordinates):
                costs[many + i, at] = kept[i, at]
            origins[many + i, 0] = kept[i, coordinates]
            origins[many + i, 1] = kept[i, coordinates + 1]
        many += count
    return counts, costs[:many].copy(), origins[:many].copy()
