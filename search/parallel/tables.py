"""What operators cost by themselves, and what moves between two, for listed configurations.

Exact methods add these up. Every table comes from the simulator's own parts, on a model of one or
two operators; operators of one class that are joined in the same way share theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from soapstone.search.parallel.arrays import (
    BUSY,
    CHANNELS,
    CLASS,
    FREE,
    FROM_DEVICE,
    GIVERS,
    KIND,
    LATENCY,
    MESSAGE,
    NODE,
    OP,
    OVERFLOW,
    POINTS,
    RANK,
    READERS,
    TO_DEVICE,
    WRITERS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.choice import Settled
from soapstone.search.parallel.compiling import (
    NONE,
    ZERO,
    call,
    compiled,
    entry,
    integer,
    packed,
    put,
)
from soapstone.search.parallel.geometry import spread, tile
from soapstone.search.parallel.movement import connect, overlap
from soapstone.search.parallel.problem import Model, prepare
from soapstone.search.parallel.simulate import Simulator

NEVER = integer(-(1 << 40))  # a delay that says nothing
# Delays between points of two operators, of which the first or the last are known: rows of tables
FIRST_FIRST, FIRST_LAST, LAST_LAST, LAST_FIRST, DELAYS = range(5)


@packed
class Room(NamedTuple):
    """Room for the messages of one value."""

    free: Array  # (channels + 1): when channels are free
    delay: Array  # (devices, devices): from a writer's point to a reader's, NEVER if it is not read
    found: Array  # (DELAYS)


@dataclass(frozen=True)
class Choices:
    """Configurations of an operator, as rows of `Choice.operators` and `Choice.placed`."""

    degrees: Array
    placed: Array

    def __len__(self) -> int:
        return len(self.degrees)


@compiled
def _set(p: Problem, c: Choice, op: int, degrees: Array, placed: Array) -> None:
    put(c.operators[op], degrees, degrees.shape[0])
    put(c.placed[op], placed, placed.shape[0])
    spread(p, c, op)


@compiled
def _all_ns(p: Problem, c: Choice, room: Room) -> int:
    """Return when the last message has arrived, if all are sent at once."""
    devices = p.devices.shape[0]
    latest = ZERO
    for channel in range(room.free.shape[0]):
        room.free[channel] = 0
    for message in range(c.top[MESSAGE]):
        row = c.messages[message]
        source, target = row[FROM_DEVICE], row[TO_DEVICE]
        begins = ZERO
        if source < 0:
            at = row[CHANNELS]
            while c.channels[at] >= 0:
                begins = max(begins, room.free[c.channels[at]])
                at += 1
            at = row[CHANNELS]
            while c.channels[at] >= 0:
                room.free[c.channels[at]] = begins + row[BUSY]
                at += 1
        elif source != target:
            pair = source * devices + target
            for at in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                begins = max(begins, room.free[p.route[at]])
            for at in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
                room.free[p.route[at]] = begins + row[BUSY]
        latest = max(latest, begins + row[BUSY] + row[LATENCY])
    return latest


@compiled
def _delay(p: Problem, c: Choice, s: Scratch, room: Room, value: int, task: int) -> None:
    """Set the least time from each of a value's points to each of a task's that read of it."""
    row = p.values[value, WRITERS]
    operand = p.writers[row]
    node = p.operands[operand, NODE]
    rank = p.values[value, RANK]
    for point in range(room.delay.shape[0]):
        for other in range(room.delay.shape[0]):
            room.delay[point, other] = NEVER
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        if p.readers[place, 1] != task:
            continue
        reader = p.readers[place, 0]
        mine = p.operands[reader, NODE]
        for index in range(c.nodes[mine, POINTS]):
            at = c.node_at[mine, index]
            tile(p, c, reader, index, s.box[0], s.at)
            for other in range(c.nodes[node, POINTS]):
                tile(p, c, operand, other, s.box[1], s.at)
                if overlap(s.box[0], s.box[1], rank):
                    point = c.node_at[node, other]
                    room.delay[point, at] = max(ZERO, room.delay[point, at])
            need = NONE
            if c.need_at[place] >= 0:
                need = c.head[c.need_at[place] + at]
            while need >= 0:
                message = c.messages[c.needs[need, 0]]
                giver = message[GIVERS]
                while giver >= 0:
                    point = c.givers[giver, 1]
                    if c.givers[giver, 0] == row and room.delay[point, at] >= 0:
                        longer = message[BUSY] + message[LATENCY]
                        room.delay[point, at] = max(room.delay[point, at], longer)
                    giver = c.givers[giver, 2]
                need = c.needs[need, 1]


@compiled
def _least(room: Room, points: int, readers: int) -> None:
    """Set the delays of the first and the last of a reader's points after those of the writer.

    Every reader's point waits for the first of the writer's points and its slowest message; one
    reader's point at least waits for the last.
    """
    every = True
    slowest, quickest = NEVER, -NEVER
    from_last = -NEVER
    for point in range(points):
        longest = NEVER
        for reader in range(readers):
            longest = max(longest, room.delay[point, reader])
            quickest = min(quickest, room.delay[point, reader])
            every = every and room.delay[point, reader] >= 0
        slowest = max(slowest, longest)
        from_last = min(from_last, longest)
    to_first = -NEVER
    for reader in range(readers):
        longest = NEVER
        for point in range(points):
            longest = max(longest, room.delay[point, reader])
        to_first = min(to_first, longest)
    room.found[FIRST_FIRST] = to_first
    room.found[FIRST_LAST] = slowest
    room.found[LAST_LAST] = from_last
    room.found[LAST_FIRST] = quickest if every else NEVER


@entry
def moving_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    room: Room,
    between: Array,
    ends: Array,
    degrees: Array,
    placed: Array,
    other_degrees: Array,
    other_placed: Array,
    out: Array,
) -> int:
    """Write the time of all that moves between two operators, for all pairs of configurations.

    Args:
        between: (values, 3): a value, the task that reads it, whether it goes back.
        ends: the two operators. degrees, placed; other_degrees, other_placed: their configurations.
        out: (configurations, other configurations), nanoseconds.
    """
    for i in range(degrees.shape[0]):
        _set(p, c, ends[0], degrees[i], placed[i])
        for j in range(other_degrees.shape[0]):
            _set(p, c, ends[1], other_degrees[j], other_placed[j])
            total = ZERO
            for k in range(between.shape[0]):
                for pool in range(7):
                    c.top[pool] = 0
                connect(p, c, s, between[k, 0])
                if c.top[OVERFLOW]:
                    return NONE
                total += _all_ns(p, c, room)
            out[i, j] = total
    return ZERO


@entry
def delay_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    room: Room,
    between: Array,
    ends: Array,
    degrees: Array,
    placed: Array,
    other_degrees: Array,
    other_placed: Array,
    out: Array,
) -> int:
    """Write least delays between two operators, for all pairs of configurations.

    Args:
        out: (2, DELAYS, configurations, other configurations), nanoseconds, forward and back; the
            others as for `moving_table`.
    """
    for i in range(degrees.shape[0]):
        _set(p, c, ends[0], degrees[i], placed[i])
        for j in range(other_degrees.shape[0]):
            _set(p, c, ends[1], other_degrees[j], other_placed[j])
            for k in range(between.shape[0]):
                for pool in range(7):
                    c.top[pool] = 0
                connect(p, c, s, between[k, 0])
                if c.top[OVERFLOW]:
                    return NONE
                back = between[k, 2]
                first, second = ends[back], ends[1 - back]
                _delay(p, c, s, room, between[k, 0], between[k, 1])
                _least(room, c.operators[first, POINTS], c.operators[second, POINTS])
                for which in range(DELAYS):
                    out[back, which, i, j] = max(out[back, which, i, j], room.found[which])
    return ZERO


class Pair:
    """A model of two operators, with what moves between them."""

    def __init__(self, model: Model, ends: tuple[int, int]) -> None:
        names = [model.operators[op].name for op in ends]
        self.model = prepare(model.graph, model.machine, set(names), model.routes)
        number = {item.name: i for i, item in enumerate(self.model.operators)}
        self.ends = np.array([number[name] for name in names], np.int64)
        self.settled = Settled(self.model)
        self.between = np.array(self._between(), np.int64).reshape(-1, 3)

    def _between(self) -> list[tuple[int, int, bool]]:
        """Return values that one of the two makes, each with the other's task that reads it."""
        p = self.model.problem
        found = []
        for value in range(len(p.values)):
            row = p.values[value]
            maker = p.nodes[p.operands[p.writers[row[WRITERS]], NODE], OP]
            tasks = {int(p.readers[at, 1]) for at in range(row[READERS], row[READERS + 1])}
            readers = [
                task
                for task in sorted(tasks)
                if task >= 0
                and p.tasks[task, OP] != maker
                and p.operators[p.tasks[task, OP], KIND] == FREE
            ]
            if readers and p.operators[maker, KIND] == FREE:
                back = maker == self.ends[1]
                found.append(
                    (value, readers[0], back)
                )  # the forward pass, where both passes read it
        return found

    def moving(self, mine: Choices, others: Choices) -> Array:
        """Return the nanoseconds of all that moves, by configurations: (mine, others)."""
        out = np.zeros((len(mine), len(others)), np.int64)
        return self._filled(moving_table, mine, others, out)

    def delays(self, mine: Choices, others: Choices) -> Array:
        """Return least delays: (forward or back, which, mine, others), NEVER if there is none."""
        out = np.full((2, DELAYS, len(mine), len(others)), NEVER, np.int64)
        return self._filled(delay_table, mine, others, out)

    def _filled(self, function: object, mine: Choices, others: Choices, out: Array) -> Array:
        while len(self.between):
            p, c = self.model.problem, self.settled.choice
            devices = len(p.devices)
            room = Room(
                free=np.zeros(int(p.route.max(initial=0)) + 1, np.int64),
                delay=np.zeros((devices, devices), np.int64),
                found=np.zeros(DELAYS, np.int64),
            )
            where = (p, c, self.settled.scratch, room, self.between, self.ends)
            both = (mine.degrees, mine.placed, others.degrees, others.placed)
            if call(function, *where, *both, out) != NONE:  # type: ignore[arg-type]
                break
            self.settled.grow()
        return out


@dataclass(frozen=True)
class Own:
    """What an operator costs by itself, in ns, for each of its configurations.

    Attributes:
        ahead, back: the shortest point task of its forward and backward pass, with exchanges; 0 if
            a pass is several tasks.
        ahead_all, back_all: all points of the device that has the most of them, one after another.
        alone: a whole step of nothing else: passes, reductions, updates.
        updates: (configurations, devices), updates of its parameters on each device.
        work: of all its tasks.
    """

    ahead: Array
    back: Array
    ahead_all: Array
    back_all: Array
    alone: Array
    updates: Array
    work: Array


def own_costs(model: Model, op: int, choices: Choices) -> Own:
    """Return what an operator costs by itself."""
    item = model.operators[op]
    small = prepare(model.graph, model.machine, {item.name}, model.routes)
    simulator = Simulator(small.graph, small.machine, small)
    p, devices = small.problem, len(model.problem.devices)
    mine = next(i for i, each in enumerate(small.operators) if each.name == item.name)
    forward = {node.name for node in item.ahead}
    apart = sum(owner == mine for owner, _ in small.tasks) > 2  # no chain from one to the next
    count = len(choices)
    early, late, early_back, late_back, alone, work = np.zeros((6, count), np.int64)
    updates = np.zeros((count, devices), np.int64)
    found = Own(early, early_back, late, late_back, alone, updates, work)
    for row in range(len(choices)):
        c = simulator.settled.choice
        c.operators[mine], c.placed[mine] = choices.degrees[row], choices.placed[row]
        simulator.settled.settle()
        found.alone[row] = simulator.again()
        c = simulator.settled.choice
        for task, (owner, nodes) in enumerate(small.tasks):
            points = int(c.operators[owner, POINTS])
            times = c.task_ns[task, :points]
            found.work[row] += times.sum()
            if p.operators[owner, KIND] != FREE:
                np.add.at(found.updates[row], c.placed[owner, :points], times)
                continue
            if apart:
                continue
            shortest, exchange = times.min(), c.task_ns[task, devices]
            most = np.bincount(c.placed[owner, :points]).max()
            first, last = found.back, found.back_all
            if nodes[0].name in forward:
                first, last = found.ahead, found.ahead_all
            first[row] = shortest + exchange
            last[row] = most * shortest + exchange
    return found


def edges_of(model: Model) -> list[tuple[int, int]]:
    """Return pairs of operators of which the second reads what the first makes, forward."""
    source: dict[str, int] = {}
    found: dict[tuple[int, int], None] = {}
    for op, item in enumerate(model.operators):
        if item.source is not None:
            continue
        for node in item.ahead:
            for name in node.inputs:
                if source.get(name, op) != op:
                    found[source[name], op] = None
        for node in item.ahead:
            for name in node.outputs:
                source[name] = op
    return list(found)


def relation(model: Model, ends: tuple[int, int]) -> tuple[object, ...]:
    """Return what a pair's table depends on, whichever operators they are."""
    first, second = (model.operators[op] for op in ends)
    made = {
        name: (i, j) for i, node in enumerate(first.ahead) for j, name in enumerate(node.outputs)
    }
    joined = tuple(
        (made[name], i, j)
        for i, node in enumerate(second.ahead)
        for j, name in enumerate(node.inputs)
        if name in made
    )
    kinds = tuple(int(model.problem.operators[op, CLASS]) for op in ends)
    return (*kinds, joined)


__all__ = [
    "DELAYS",
    "FIRST_FIRST",
    "FIRST_LAST",
    "LAST_FIRST",
    "LAST_LAST",
    "NEVER",
    "Choices",
    "Own",
    "Pair",
    "edges_of",
    "own_costs",
    "relation",
]
