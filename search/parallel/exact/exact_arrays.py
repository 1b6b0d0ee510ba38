"""The arrays of branch and bound: the space that is searched, and a partial strategy.

`branching.py` works on them.
"""

from __future__ import annotations

from typing import NamedTuple

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import record
from soapstone.search.parallel.problem.compiling import integer
from soapstone.search.parallel.problem.packing import packed

HUGE = integer(1 << 50)  # of what no strategy reaches
# Of an operator: whether it has a backward pass; whether its tasks are run in the order of
# operators; whether its backward pass reads what its forward pass makes.
FLAGS = record("backward ordered itself")
# Two operators of which the second reads the first; where their delays and marks begin.
EDGE = record("source target delays alive")


@packed
class Tree(NamedTuple):
    """The space that is searched. Times are in ns.

    A *row* is a configuration; the rows of all operators follow one another. Renamings of devices
    turn rows into others. `kept` has one row of each set of rows that turn into one another, and
    tables that do not depend on the devices' names have an entry for each of these alone.

    Attributes:
        first: (operators + 1), where each operator's rows begin; kept_first: likewise in `kept`.
        kept: the rows that represent the others.
        kind: (rows), the place in `kept` of the row that represents it, within its operator.
        turned: (rows), the renaming that turns a row into that one.
        image: (rows, renamings), what each renaming turns a row into, within its operator.
        renamings: (renamings, devices), what each renames devices to.
        opposite: (renamings), the inverse of each renaming.
        points, placed: the number of points of each row, and their devices.
        ahead, back: (rows, points), times of the forward and the backward task's points.
        ahead_late, back_late: times of the exchanges after these.
        tail: (rows, points), from when a backward point's results are final to the end of the
            step, along its own parameters.
        updates: (rows, devices), times of updates.
        lasts: (rows, devices), from when a device begins its updates to the end of the step, or 0.
        flags: FLAGS of each operator.
        edges: EDGE. before_ptr, before; after_ptr, after: the edges into and out of each operator.
        delays: (pairs, 2, points, points), for pairs (of `kept` of an edge's source, row of its
            target).
        alive: (pairs), whether the pair may be part of a strategy below the limit.
        partner: (operators), an earlier operator with the same parameters, or -1.
        joint_first: where the operator's tails, by pairs as above, begin in `joint`.
        joint_lasts: as `lasts`, for these pairs.
        shared: (kept, points), least tails along parameters that a later operator reads, too.
        start: (kept, points), earliest ends of forward points.
        leave: (kept, points), least times from a backward point's start to the end of the step.
        reach, rest: (kept, points, points), the shortest ways that `branching.py` describes.
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
    """A partial strategy, and room to work in.

    What a depth of the search needs of the depth above it is kept for each depth. Times are in ns.

    Attributes:
        chosen: (operators), the row of each. cursor: (operators), the next candidate at each depth.
        fixed: (operators + 1, renamings), whether a renaming leaves all chosen rows unchanged.
        end: (operators, points), when forward points end.
        free: (operators + 1, devices), when devices have run the forward points up to a depth.
        away: (operators, points, devices + 1), from a backward point's earliest start to the end of
            the last backward point of each device; the last entry: to the end of the step, along
            messages of parameters.
        follow: (operators + 1, devices, devices + 1), the same from when a device is free.
        load: (operators + 1, devices), from the last backward point of a device to the end of the
            step, along its updates.
        work: (operators + 1, devices), the time of all tasks of a device.
        grid: (4, points, points); begin, leave: (kept, points); least: (kept, points, points). Room
            to work in.
        counts: the depth, how many partial strategies were visited, and how many were listed.
        leaves: (room, operators), the rows of the strategies that were listed.
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
