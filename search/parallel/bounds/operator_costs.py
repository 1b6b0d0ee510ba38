"""The costs of operators alone, simulated on models of one, two or more of them.

The channels that collectives use depend on the numbers of their devices. Where a result must hold
for any numbering of the devices, only collectives that use the same channels delay each other
(`set_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.tables import Choices, Part, passes
from soapstone.search.parallel.problem.arrays import (
    MESSAGES,
    OVERFLOW,
    SPLIT,
    UPDATES,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.choice import settle_all
from soapstone.search.parallel.problem.compiling import NONE, ZERO, compiled, entry, integer, put
from soapstone.search.parallel.problem.packing import call, packed
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation.schedule import PASSED, State, room, simulate

LONG = integer(1 << 50)  # longer than any step
APART = 32  # collectives of different channels that are told apart


@packed
class Own(NamedTuple):
    """The costs of operators alone, in ns. A row is a configuration, or a pair of them.

    Attributes:
        alone: (rows,), a whole step of only these operators, without overlap: both passes,
            exchanges, reductions and updates.
        times: (rows, tasks, points), times of points.
        exchanges: (rows, tasks), times of the exchanges after which results are final.
        updates: (rows, operators, devices), times of parameter updates.
        tails: (rows, points), from the end of a backward point to the end of the step: reductions
            of gradients, updates, and moving parameters to where they are read.
        lasts: (rows, devices), from when a device begins its updates to the end of the step.
    """

    alone: Array
    times: Array
    exchanges: Array
    updates: Array
    tails: Array
    lasts: Array


@compiled
def set_apart(p: Problem, c: Choice, t: State) -> None:
    """Let collectives delay only others that use the same channels.

    Which channels a collective uses depends on the numbers of its devices. Without other delays, a
    step takes the same time under any numbering, and no longer than with them.
    """
    more = t.free.shape[1] - p.devices.shape[0] - 1 - APART
    known = ZERO
    for message in range(c.top[MESSAGES]):
        at = c.messages[message].channels
        if at < 0:
            continue
        number = NONE
        for other in range(message):
            before = c.messages[other].channels
            if before < 0 or number >= 0:
                continue
            same = ZERO
            while c.channels[at + same] >= 0 and (
                c.channels[at + same] == c.channels[before + same]
            ):
                same += 1
            if c.channels[at + same] < 0 and c.channels[before + same] < 0:
                number = c.messages[other].moved
        if number < 0:
            number = known
            known += 1
        c.messages[message].moved = number
    for message in range(c.top[MESSAGES]):
        at = c.messages[message].channels
        if at >= 0:
            number = c.messages[message].moved
            c.channels[at] = more + number if number < APART else NONE
            if number < APART:
                c.channels[at + 1] = NONE


@compiled
def _behind(p: Problem, c: Choice, t: State, task: int, point: int) -> int:
    """Return the time from the end of a point to the end of the step."""
    c.task_ns[task, point] += LONG
    last = simulate(p, c, t, ZERO, NONE)
    c.task_ns[task, point] -= LONG
    return int(last - t.trial_end[p.tasks[task].place, point])


@compiled
def _note(p: Problem, c: Choice, t: State, o: Own, row: int, back: int) -> None:
    """Write a row: what is settled costs by itself; but for `alone`, whatever devices are called.

    Args:
        back: the task of a backward pass, or -1.
    """
    devices, late = p.devices.shape[0], ZERO
    for task in range(p.tasks.shape[0]):  # nothing here waits for them, but in a step others do
        o.exchanges[row, task] = c.task_ns[task, devices]
        late += o.exchanges[row, task]
        c.task_ns[task, devices] = ZERO
    o.alone[row] = simulate(p, c, t, ZERO, NONE) + late
    for task in range(p.tasks.shape[0]):
        c.task_ns[task, devices] = o.exchanges[row, task]
    set_apart(p, c, t)
    for place in range(p.order.shape[0]):
        task = p.order[place]
        op = p.tasks[task].operator
        for point in range(c.operators[op].points):
            o.times[row, task, point] = c.task_ns[task, point]
            if task == back:
                late = c.task_ns[task, devices]
                o.tails[row, point] = _behind(p, c, t, task, point) + late
            if p.operators[op].kind == UPDATES:
                device = c.placed[op, point]
                o.updates[row, op, device] += c.task_ns[task, point]
                if o.lasts[row, device] == 0:
                    behind = _behind(p, c, t, task, point)
                    o.lasts[row, device] = behind + c.task_ns[task, point]


@compiled
def _given(c: Choice, op: int, split: Any, placed: Array) -> None:
    c.operators[op] = split
    put(c.placed[op], placed, placed.shape[0])


@entry
def cost_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    t: State,
    o: Own,
    ops: Array,
    back: int,
    degrees: Array,
    placed: Array,
    other_degrees: Array,
    other_placed: Array,
    row: int,
) -> int:
    """Write the rows from one on; return the one for which there is no room, or -1.

    Args:
        ops: one operator or two. degrees, placed: of the first; other_degrees, other_placed: of the
            second, or of one row. back: the first one's task of the backward pass, or -1.
    """
    others = other_degrees.shape[0]
    while row < o.alone.shape[0]:
        _given(c, ops[0], degrees[row // others], placed[row // others])
        if ops.shape[0] > 1:
            _given(c, ops[1], other_degrees[row % others], other_placed[row % others])
        settle_all(p, c, s)
        if c.top[OVERFLOW] or c.top[MESSAGES] > t.arrival.shape[0]:
            return row
        _note(p, c, t, o, row, back)
        row += 1
    return NONE


@entry
def sift(
    p: Problem,
    c: Choice,
    s: Scratch,
    t: State,
    ops: Array,
    degrees: Array,
    placed: Array,
    rows: Array,
    kept: Array,
    limit: int,
    row: int,
) -> int:
    """Mark strategies begun that take no more than a limit; return as `cost_table` does."""
    while row < rows.shape[0]:
        for i in range(ops.shape[0]):
            _given(c, ops[i], degrees[rows[row, i]], placed[rows[row, i]])
        settle_all(p, c, s)
        if c.top[OVERFLOW] or c.top[MESSAGES] > t.arrival.shape[0]:
            return row
        set_apart(p, c, t)
        kept[row] = simulate(p, c, t, ZERO, limit) != PASSED
        row += 1
    return NONE


class _Trial(Part):
    """A model of some operators, simulated for one choice of theirs after another."""

    def __init__(self, model: Model, ops: Sequence[int]) -> None:
        super().__init__(model, ops)
        self._room()

    def _room(self) -> None:
        self.state = room(self.model.problem, len(self.settled.choice.messages), APART)

    def run(self, function: Callable[..., int], *given: object) -> None:
        """Call `cost_table` or `sift`; where there is no room make more, and go on."""
        row = 0
        while row >= 0:
            held = self.settled
            where = (self.model.problem, held.choice, held.scratch, self.state)
            row = int(call(function, *where, *given, row))
            if row >= 0:
                held.grow()
                self._room()


def operator_costs(
    model: Model, ops: Sequence[int], choices: Sequence[Choices]
) -> tuple[Model, Own]:
    """Return a model of one operator, or of two, and what it costs for each of its choices.

    Tails are those of the first operator, whose backward pass is the later one.
    """
    trial = _Trial(model, ops)
    p = trial.model.problem
    count = int(np.prod([len(each) for each in choices]))
    devices, tasks = len(p.devices), len(p.tasks)
    out = Own(
        alone=np.zeros(count, np.int64),
        times=np.zeros((count, tasks, devices), np.int64),
        exchanges=np.zeros((count, tasks), np.int64),
        updates=np.zeros((count, len(p.operators), devices), np.int64),
        tails=np.zeros((count, devices), np.int64),
        lasts=np.zeros((count, devices), np.int64),
    )
    _, back = passes(trial.model, int(trial.ops[0]))
    first, second = choices[0], choices[-1] if len(choices) > 1 else _NOTHING
    both = (first.degrees, first.placed, second.degrees, second.placed)
    trial.run(cost_table, out, trial.ops, back, *both)
    return trial.model, out


_NOTHING = Choices(np.zeros(1, SPLIT), np.zeros((1, 1), np.int64))


class Sieve:
    """A model of some operators, on which strategies begun are simulated.

    What it takes is less than of the whole model, but for values that others read too: a part of
    those may have been moved already, so the time of moving them is taken off (`slack`).
    """

    def __init__(self, model: Model, ops: Sequence[int]) -> None:
        self.trial = _Trial(model, ops)
        self.slack = int(sum(self._shared_ns(model)))

    def _shared_ns(self, whole: Model) -> Iterator[float]:
        """Yield the time of moving each value that operators left out read besides others."""
        small, number = self.trial.model, {name: i for i, name in enumerate(whole.values)}
        for value, name in enumerate(small.values):
            here, there = _readers(small, value), _readers(whole, number[name])
            if here > 1 and there > here:
                nbytes = whole.graph.tensors[name].nbytes
                yield nbytes * float(whole.problem.ns_per_byte.max())

    def keep(self, degrees: Array, placed: Array, rows: Array, limit: int) -> Array:
        """Return which strategies may take less than a limit, whatever devices are called. bool

        Args:
            degrees, placed: configurations of all operators. rows: (strategies, operators).
        """
        kept = np.zeros(len(rows), np.bool_)
        given = (self.trial.ops, degrees, placed, np.ascontiguousarray(rows), kept)
        self.trial.run(sift, *given, limit + self.slack - 1)
        return kept


def _readers(model: Model, value: int) -> int:
    """Return how many operators read a value."""
    p = model.problem
    nodes = p.operands["node"][p.readers_of(value)["operand"]]
    return len(set(p.nodes["operator"][nodes].tolist()))
