"""What operators cost by themselves, simulated on models of one or two of them, or of more.

Channels of collectives follow from the numbers of their devices. Where results must hold whatever
devices are called, collectives hold up only those that take the same channels (`set_apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.search.parallel.arrays import (
    CHANNELS,
    FREE,
    KIND,
    MESSAGE,
    MOVED,
    NODE,
    OP,
    PLACE,
    POINTS,
    READERS,
    Array,
    Choice,
    Problem,
)
from soapstone.search.parallel.choice import Settled
from soapstone.search.parallel.compiling import NONE, ZERO, call, entry
from soapstone.search.parallel.problem import Model, prepare
from soapstone.search.parallel.schedule import PASSED, State, room, simulate
from soapstone.search.parallel.tables import Choices, passes

LONG = 1 << 50  # longer than any step
APART = 32  # collectives of different channels that are told apart


@dataclass(frozen=True)
class Own:
    """What operators cost by themselves, in ns, a row a configuration (or a pair of them).

    Attributes:
        alone: a whole step of nothing else: passes, reductions, updates.
        times: (rows, tasks, points). exchanges: (rows, tasks), before results are final.
        updates: (rows, operators, devices), of updates of parameters.
        tails: (rows, points), from the end of a point of the backward pass to the end of the step:
            sums of gradients, updates, and parameters brought to where they are read.
    """

    alone: Array
    times: Array
    exchanges: Array
    updates: Array
    tails: Array


@entry
def set_apart(p: Problem, c: Choice, t: State) -> None:
    """Let collectives hold up only those that take the same channels.

    Which channels a collective takes follows from the numbers of its devices. So what is left takes
    as long whatever devices are called, and no longer than it would.
    """
    more = t.free.shape[1] - p.devices.shape[0] - 1 - APART
    known = ZERO
    for message in range(c.top[MESSAGE]):
        at = c.messages[message, CHANNELS]
        if at < 0:
            continue
        number = NONE
        for other in range(message):
            before = c.messages[other, CHANNELS]
            if before < 0 or number >= 0:
                continue
            same = ZERO
            while c.channels[at + same] >= 0 and (
                c.channels[at + same] == c.channels[before + same]
            ):
                same += 1
            if c.channels[at + same] < 0 and c.channels[before + same] < 0:
                number = c.messages[other, MOVED]
        if number < 0:
            number = known
            known += 1
        c.messages[message, MOVED] = number
    for message in range(c.top[MESSAGE]):
        at = c.messages[message, CHANNELS]
        if at >= 0:
            number = c.messages[message, MOVED]
            c.channels[at] = more + number if number < APART else NONE
            if number < APART:
                c.channels[at + 1] = NONE


class _Trial:
    """A model of some operators, simulated for one choice of theirs after another."""

    def __init__(self, model: Model, ops: Sequence[int]) -> None:
        names = [model.operators[op].name for op in ops]
        self.model = prepare(model.graph, model.machine, set(names), model.routes)
        number = {item.name: i for i, item in enumerate(self.model.operators)}
        self.ops = np.array([number[name] for name in names], np.int64)
        self.settled = Settled(self.model)
        self.state = room(self.model.problem, len(self.settled.choice.messages), APART)

    def set(self, degrees: Array, placed: Array) -> None:
        """Give each operator a row of degrees and one of devices; derive what follows."""
        c = self.settled.choice
        c.operators[self.ops], c.placed[self.ops] = degrees, placed
        self.settled.settle()
        messages = len(self.settled.choice.messages)
        if len(self.state.arrival) < messages:
            self.state = room(self.model.problem, messages, APART)

    def run(self, limit: int = -1) -> int:
        """Return the time of a step in ns, or PASSED if it is above the limit."""
        p, c = self.model.problem, self.settled.choice
        return int(call(simulate, p, c, self.state, 0, limit))

    def apart(self) -> None:
        """Let what is simulated from now on hold whatever devices are called."""
        call(set_apart, self.model.problem, self.settled.choice, self.state)


def own_costs(model: Model, ops: Sequence[int], choices: Sequence[Choices]) -> tuple[Model, Own]:
    """Return a model of one operator, or of two, and what it costs for each of its choices.

    Tails are those of the first operator, whose backward pass is the later one; they hold whatever
    devices are called.
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
    )
    _, back = passes(trial.model, int(trial.ops[0]))
    task_of = p.tasks[:, OP]
    spread = [task for task in range(tasks) if p.operators[task_of[task], KIND] != FREE]
    for row, picked in enumerate(itertools.product(*(range(len(each)) for each in choices))):
        degrees = [each.degrees[i] for each, i in zip(choices, picked)]
        trial.set(np.array(degrees), np.array([c.placed[i] for c, i in zip(choices, picked)]))
        c = trial.settled.choice
        out.alone[row] = trial.run()
        points = c.operators[task_of, POINTS]
        there = np.arange(devices)[None, :] < points[:, None]
        out.times[row] = np.where(there, c.task_ns[:, :devices], 0)
        out.exchanges[row] = c.task_ns[:, devices]
        for task in spread:
            where = c.placed[task_of[task], : points[task]]
            np.add.at(out.updates[row, task_of[task]], where, c.task_ns[task, : points[task]])
        if back < 0:
            continue
        trial.apart()
        place = p.tasks[back, PLACE]
        for point in range(int(points[back])):
            c.task_ns[back, point] += LONG
            last = trial.run()
            ended = trial.state.trial_end[place, point] - c.task_ns[back, devices]
            out.tails[row, point] = last - ended
            c.task_ns[back, point] -= LONG
    return trial.model, out


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
        kept = np.zeros(len(rows), bool)
        for i, row in enumerate(rows):
            self.trial.set(degrees[row], placed[row])
            self.trial.apart()
            kept[i] = self.trial.run(limit + self.slack - 1) != PASSED
        return kept


def _readers(model: Model, value: int) -> int:
    """Return how many operators read a value."""
    p = model.problem
    row = p.values[value]
    operands = p.readers[row[READERS] : row[READERS + 1], 0]
    return len({int(p.nodes[p.operands[operand, NODE], OP]) for operand in operands})


__all__ = ["Own", "Sieve", "own_costs"]
