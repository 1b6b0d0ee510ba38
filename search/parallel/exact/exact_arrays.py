"""The arrays of branch and bound: what is searched, and a strategy begun (`branching.py`)."""

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
        flags: FLAGS. edges: EDGE. before_ptr, before; after_ptr, after: edges by operator.
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
