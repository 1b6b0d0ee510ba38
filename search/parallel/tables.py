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
    READERS,
    TO_DEVICE,
    WRITERS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.choice import Settled
from soapstone.search.parallel.compiling import NONE, ZERO, call, compiled, entry, packed, put
from soapstone.search.parallel.geometry import spread
from soapstone.search.parallel.movement import connect
from soapstone.search.parallel.problem import Model, prepare
from soapstone.search.parallel.simulate import Simulator


@packed
class Room(NamedTuple):
    """Room for the messages of one value: when channels are free, and marks."""

    free: Array  # (channels + 1)
    delay: Array  # (devices): the longest message that waits for each point of the writer
    waited: Array  # (messages): stamps
    stamp: Array  # (1)


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
def _least_ns(p: Problem, c: Choice, room: Room, value: int, task: int) -> int:
    """Return the least time from the end of a value's last writer to its arrival at a task.

    Whichever of the writer's points is the last, what waits for it comes that much later.
    """
    room.stamp[0] += 1
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        if p.readers[place, 1] != task or c.need_at[place] < 0:
            continue
        op = p.tasks[task, OP]
        for point in range(c.operators[op, POINTS]):
            need = c.head[c.need_at[place] + point]
            while need >= 0:
                room.waited[c.needs[need, 0]] = room.stamp[0]
                need = c.needs[need, 1]
    for point in range(room.delay.shape[0]):
        room.delay[point] = 0
    for message in range(c.top[MESSAGE]):
        if room.waited[message] != room.stamp[0]:
            continue
        row = c.messages[message]
        giver = row[GIVERS]
        while giver >= 0:
            point = c.givers[giver, 1]
            room.delay[point] = max(room.delay[point], row[BUSY] + row[LATENCY])
            giver = c.givers[giver, 2]
    row0 = p.values[value, WRITERS]
    op = p.nodes[p.operands[p.writers[row0], NODE], OP]
    least = room.delay[0]
    for point in range(1, c.operators[op, POINTS]):
        least = min(least, room.delay[point])
    found: int = least
    return found


@entry
def pair_table(
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
    least: bool,
    out: Array,
) -> int:
    """Write the nanoseconds of what moves between two operators, for all pairs of configurations.

    Args:
        between: (values, 3): a value, the task that reads it, whether it goes back.
        ends: the two operators. degrees, placed; other_degrees, other_placed: their configurations.
        least: a bound from below rather than the time of all messages sent at once.
        out: (configurations, other configurations).
    """
    for i in range(degrees.shape[0]):
        _set(p, c, ends[0], degrees[i], placed[i])
        for j in range(other_degrees.shape[0]):
            _set(p, c, ends[1], other_degrees[j], other_placed[j])
            ahead, back = ZERO, ZERO
            for k in range(between.shape[0]):
                for pool in range(7):
                    c.top[pool] = 0
                connect(p, c, s, between[k, 0])
                if c.top[OVERFLOW]:
                    return NONE
                if not least:
                    ahead += _all_ns(p, c, room)
                elif between[k, 2]:
                    back = max(back, _least_ns(p, c, room, between[k, 0], between[k, 1]))
                else:
                    ahead = max(ahead, _least_ns(p, c, room, between[k, 0], between[k, 1]))
            out[i, j] = ahead + back
    return ZERO


class Pair:
    """A model of two operators, with what moves between them."""

    def __init__(self, model: Model, ends: tuple[int, int]) -> None:
        names = [model.operators[op].name for op in ends]
        self.model = prepare(model.graph, model.machine, set(names))
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

    def table(self, mine: Choices, others: Choices, least: bool) -> Array:
        """Return the nanoseconds of every pair of configurations. int64."""
        out = np.zeros((len(mine), len(others)), np.int64)
        if not len(self.between):
            return out
        while True:
            p, c = self.model.problem, self.settled.choice
            room = Room(
                free=np.zeros(int(p.route.max(initial=0)) + 1, np.int64),
                delay=np.zeros(len(p.devices), np.int64),
                waited=np.zeros(len(c.messages), np.int64),
                stamp=np.zeros(1, np.int64),
            )
            done = call(
                pair_table,
                p,
                c,
                self.settled.scratch,
                room,
                self.between,
                self.ends,
                mine.degrees,
                mine.placed,
                others.degrees,
                others.placed,
                least,
                out,
            )
            if done != NONE:
                return out
            self.settled.grow()


@dataclass(frozen=True)
class Own:
    """What an operator costs by itself, in ns, for each of its configurations.

    Attributes:
        ahead, back: the shortest point task of its forward and backward pass, with exchanges; 0 if
            a pass is several tasks.
        alone: a whole step of nothing else: passes, reductions, updates.
        updates: (configurations, devices), updates of its parameters on each device.
        work: of all its tasks.
    """

    ahead: Array
    back: Array
    alone: Array
    updates: Array
    work: Array


def own_costs(model: Model, op: int, choices: Choices) -> Own:
    """Return what an operator costs by itself."""
    item = model.operators[op]
    small = prepare(model.graph, model.machine, {item.name})
    simulator = Simulator(small.graph, small.machine, small)
    p, devices = small.problem, len(model.problem.devices)
    mine = next(i for i, each in enumerate(small.operators) if each.name == item.name)
    forward = {node.name for node in item.ahead}
    apart = sum(owner == mine for owner, _ in small.tasks) > 2  # no chain from one to the next
    found = Own(*(np.zeros(len(choices), np.int64) for _ in range(3)), *_more(choices, devices))
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
            shortest = times.min() + c.task_ns[task, devices]
            (found.ahead if nodes[0].name in forward else found.back)[row] += shortest
    return found


def _more(choices: Choices, devices: int) -> tuple[Array, Array]:
    return np.zeros((len(choices), devices), np.int64), np.zeros(len(choices), np.int64)


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


__all__ = ["Choices", "Own", "Pair", "edges_of", "own_costs", "relation"]
