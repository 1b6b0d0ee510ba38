"""Tables of communication between two operators, for all pairs of their configurations.

Exact methods add these up with what each operator costs alone (`bounds/operator_costs.py`). Every
table is computed by parts of the simulator, on a model of only the two operators. Pairs of
operators of the same classes that are connected in the same way share their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import (
    MESSAGES,
    OVERFLOW,
    Choice,
    Problem,
    Scratch,
    record,
)
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.compiling import (
    NONE,
    ZERO,
    compiled,
    entry,
    integer,
    put,
    span,
)
from soapstone.search.parallel.problem.geometry import overlap, partial, spread, tile
from soapstone.search.parallel.problem.packing import call, packed
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.simulation.movement import connect
from soapstone.search.parallel.simulation.schedule import pass_on

NEVER = integer(-(1 << 56))  # a delay that says nothing: less than all others together


@packed
class Room(NamedTuple):
    """Working memory for the messages of one value."""

    free: Array  # (channels + 1): when channels are free
    delay: Array  # (devices, devices): from a writer's point to a reader's, NEVER if it is not read


# A value, the task that reads it, whether it goes back, whether others may read a part of it on the
# same device before, so that less has to be moved.
BETWEEN = record("value task back shared")


@dataclass(frozen=True)
class Choices:
    """Configurations of an operator, as rows of `Choice.operators` and `Choice.placed`."""

    degrees: Array
    placed: Array

    def __len__(self) -> int:
        return len(self.degrees)


@compiled
def _set(p: Problem, c: Choice, s: Scratch, op: int, split: Any, placed: Array) -> None:
    c.operators[op] = split
    put(c.placed[op], placed, placed.shape[0])
    spread(p, c, s, op)


@compiled
def _all_ns(p: Problem, c: Choice, room: Room) -> int:
    """Return the time, in ns, until the last message has arrived if all are sent at once."""
    latest = ZERO
    for channel in range(room.free.shape[0]):
        room.free[channel] = 0
    for message in range(c.top[MESSAGES]):
        row = c.messages[message]
        begins = pass_on(p, c, row, room.free, ZERO, ZERO)
        latest = max(latest, begins + row.busy + row.latency)
    return latest


@compiled
def _delay(
    p: Problem, c: Choice, s: Scratch, room: Room, value: int, task: int, others: int
) -> None:
    """Compute the least delay from each point that writes a value to each point that reads it."""
    row = p.values[value].writers.begin
    operand, rank = p.writers[row], p.values[value].rank
    node = p.operands[operand].node
    for point in range(room.delay.shape[0]):
        for other in range(room.delay.shape[0]):
            room.delay[point, other] = NEVER
    for place in span(p.values[value].readers):
        if p.readers[place].task != task:
            continue
        reader = p.readers[place].operand
        mine = p.operands[reader].node
        for index in range(c.nodes[mine].points):
            at = c.node_at[mine, index]
            tile(p, c, reader, index, s.box[0], s.at)
            for other in range(c.nodes[node].points):
                tile(p, c, operand, other, s.box[1], s.at)
                if overlap(s.box[0], s.box[1], rank):
                    point = c.node_at[node, other]
                    room.delay[point, at] = max(ZERO, room.delay[point, at])
            need = NONE
            if c.need_at[place] >= 0:
                need = c.head[c.need_at[place] + at]
            while need >= 0:
                message = c.messages[c.needs[need].message]
                number = message.givers
                while number >= 0:
                    giver = c.givers[number]
                    if giver.row == row and room.delay[giver.point, at] >= 0:
                        longer = message.latency + (ZERO if others else message.busy)
                        room.delay[giver.point, at] = max(room.delay[giver.point, at], longer)
                    number = giver.next
                need = c.needs[need].next


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
    delays: Array,
) -> int:
    """Write least delays between two operators, for all pairs of configurations, in nanoseconds.

    Args:
        between: BETWEEN, a row a value.
        ends: the two operators. degrees, placed; other_degrees, other_placed: their configurations.
        delays: (configurations, other configurations, 2, points, points), least times forward and
            back, from a point of the writer to one of the reader.
    """
    devices = p.devices.shape[0]
    for i in range(degrees.shape[0]):
        _set(p, c, s, ends[0], degrees[i], placed[i])
        for j in range(other_degrees.shape[0]):
            _set(p, c, s, ends[1], other_degrees[j], other_placed[j])
            for k in range(between.shape[0]):
                each = between[k]
                for pool in range(7):
                    c.top[pool] = 0
                connect(p, c, s, each.value)
                if c.top[OVERFLOW]:
                    return NONE
                back = each.back
                _delay(p, c, s, room, each.value, each.task, each.shared)
                for a in range(devices):
                    for b in range(devices):
                        longer = max(delays[i, j, back, a, b], room.delay[a, b])
                        delays[i, j, back, a, b] = longer
    return ZERO


@entry
def lay_ready(
    p: Problem,
    c: Choice,
    s: Scratch,
    op: int,
    degrees: Array,
    placed: Array,
    operands: Array,
    first: Array,
) -> None:
    """Compute the tiles of an operator's operands in all its configurations.

    Args:
        first: for each operand, the row of its tiles in the first configuration.
    """
    for i in range(degrees.shape[0]):
        _set(p, c, s, op, degrees[i], placed[i])
        for k in range(operands.shape[0]):
            operand, row = operands[k], first[k] + i
            node = p.operands[operand].node
            rank = p.operands[operand].axes.end - p.operands[operand].axes.begin
            s.ready_points[row] = c.nodes[node].points
            if p.operands[operand].is_output:
                s.ready_sums[row] = partial(p, c, operand)
            for point in range(c.nodes[node].points):
                tile(p, c, operand, point, s.box[0], s.at)
                s.ready[row, point, 0] = c.placed[op, c.node_at[node, point]]
                for axis in range(rank):
                    s.ready[row, point, 1 + 2 * axis] = s.box[0].low[axis]
                    s.ready[row, point, 2 + 2 * axis] = s.box[0].high[axis]


@entry
def moving_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    room: Room,
    values: Array,
    sides: Array,
    first: Array,
    moving: Array,
) -> int:
    """Write the time of all messages between two operators, for all pairs of configurations.

    Args:
        values: of which. sides: (operands,), 0 of the first operator, 1 of the second, -1 of none.
        first: (operands,), the row of the tiles of the first configuration (`lay_ready`).
        moving: (configurations, other configurations), nanoseconds.
    """
    for i in range(moving.shape[0]):
        for j in range(moving.shape[1]):
            for operand in range(sides.shape[0]):
                if sides[operand] >= 0:
                    s.ready_at[operand] = first[operand] + (i if sides[operand] == 0 else j)
            for k in range(values.shape[0]):
                for pool in range(7):
                    c.top[pool] = 0
                connect(p, c, s, values[k])
                if c.top[OVERFLOW]:
                    return NONE
                moving[i, j] += _all_ns(p, c, room)
    return ZERO


class Part:
    """A model of only the operators `ops` of another model, in that order, with a strategy."""

    def __init__(self, model: Model, ops: Sequence[int]) -> None:
        names = [model.operators[op].name for op in ops]
        self.model = prepare(model.graph, model.machine, set(names), model.routes)
        number = {item.name: i for i, item in enumerate(self.model.operators)}
        self.ops = np.array([number[name] for name in names], np.int64)
        self.settled = Settled(self.model)


class Pair(Part):
    """A model of only two operators of another model, with the values that they exchange."""

    def __init__(self, model: Model, ends: tuple[int, int]) -> None:
        super().__init__(model, ends)
        self.between = np.array(self._between(model), BETWEEN)
        self.moved = [self._moved(back) for back in (False, True)]  # numbers of values, each way
        self.shared = tuple(self.between["shared"].tolist())

    def _between(self, whole: Model) -> list[tuple[int, int, bool, bool]]:
        """Return values that one of the two makes, each with the other's task that reads it.

        Forward ones are read by a forward pass, those that go back by a backward pass. The last
        number says whether other operators of the whole model read the value too.
        """
        p = self.model.problem
        ahead, back = zip(*(passes(self.model, int(op)) for op in self.ops))
        everyone = {name: i for i, name in enumerate(whole.values)}
        found = []
        for value, name in enumerate(self.model.values):
            reading = whole.problem.readers_of(everyone[name])["task"]
            theirs = {whole.tasks[task][0] for task in reading.tolist() if task >= 0}
            task = p.makers[p.values[value]["writers"]["begin"]]
            maker, tasks = self.model.tasks[task][0], p.readers_of(value)["task"]
            for goes_back, sent, read in ((False, ahead[0], ahead[1]), (True, back[1], back[0])):
                if maker == self.ops[int(goes_back)] and task == sent and read in tasks:
                    found.append((value, read, goes_back, len(theirs) > 2))
        return found

    def _moved(self, back: bool) -> list[int]:
        """Return values that one of the two makes and the other reads, in one of the passes."""
        p = self.model.problem
        ends = [self.model.operators[op] for op in self.ops[:: -1 if back else 1]]
        made, read = ({node.name for node in (x.back if back else x.ahead)} for x in ends)

        def nodes(operands: Array) -> set[str]:
            return {self.model.nodes[at].name for at in p.operands["node"][operands]}

        return [
            value
            for value, row in enumerate(p.values)
            if made & nodes(p.writers[slice(*row["writers"])])
            and read & nodes(p.readers_of(value)["operand"])
        ]

    def operands(self, value: int) -> tuple[list[int], list[int]]:
        """Return the operands of a value that belong to the first and to the second operator."""
        p = self.model.problem
        sides: tuple[list[int], list[int]] = [], []
        every = p.writers[slice(*p.values[value]["writers"])].tolist()
        for operand in (*every, *p.readers_of(value)["operand"].tolist()):
            owner = p.nodes["operator"][p.operands["node"][operand]]
            for side, op in zip(sides, self.ops):
                if owner == op and operand not in side:
                    side.append(operand)
        return sides

    def moving(self, mine: Choices, others: Choices, values: Sequence[int] | None = None) -> Array:
        """Return the nanoseconds of what moves, by configurations: (mine, others), int64.

        Args:
            values: numbers of some; None: all, forward and back.
        """
        p = self.model.problem
        ahead, back = self.moved
        every = np.array([*ahead, *back] if values is None else values, np.int64)
        sides = np.full(len(p.operands), -1, np.int64)
        first, rows = np.zeros(len(p.operands), np.int64), 0
        for value in every.tolist():
            for side, (operands, choices) in enumerate(zip(self.operands(value), (mine, others))):
                sides[operands] = side
                first[operands] = rows + len(choices) * np.arange(len(operands))
                rows += len(choices) * len(operands)
        axes = int(p.values["rank"][every].max(initial=0))
        while True:
            made = np.zeros((len(mine), len(others)), np.int64)
            c = self.settled.choice.messages_only
            s = self.settled.scratch._replace(
                ready_at=np.full(len(p.operands), -1, np.int64),
                ready=np.zeros((rows, len(p.devices), 1 + 2 * axes), np.int32),
                ready_points=np.zeros(rows, np.int64),
                ready_sums=np.zeros(rows, np.int64),
            )
            for side, choices in enumerate((mine, others)):
                of = np.flatnonzero(sides == side)
                both = choices.degrees, choices.placed
                call(lay_ready, p, c, s, self.ops[side], *both, of, first[of])
            if call(moving_table, p, c, s, self._room(), every, sides, first, made) != NONE:
                return made
            self.settled.grow()

    def delays(self, mine: Choices, others: Choices) -> Array:
        """Return the least delays in ns, or NEVER between points that exchange nothing.

        Returns:
            (mine, others, forward or back, points of the writer, points of the reader) int64.
        """
        p, devices = self.model.problem, len(self.model.problem.devices)
        both = (mine.degrees, mine.placed, others.degrees, others.placed)
        while True:
            made = np.full((len(mine), len(others), 2, devices, devices), NEVER, np.int64)
            where = (p, self.settled.choice, self.settled.scratch, self._room())
            ends = (self.between, self.ops)
            if not len(self.between) or call(pair_table, *where, *ends, *both, made) != NONE:
                return made
            self.settled.grow()

    def _room(self) -> Room:
        p = self.model.problem
        return Room(
            free=np.zeros(int(p.route.max(initial=0)) + 1, np.int64),
            delay=np.zeros((len(p.devices), len(p.devices)), np.int64),
        )


def passes(model: Model, op: int) -> tuple[int, int]:
    """Return the forward and the backward task of an operator; NONE for one that it lacks.

    An operator of more than one task in a pass has neither.
    """
    ahead = model.operators[op].ahead
    mine = [(task, nodes) for task, (owner, nodes) in enumerate(model.tasks) if owner == op]
    first = [task for task, nodes in mine if nodes[0] in ahead]
    last = [task for task, nodes in mine if nodes[0] not in ahead]
    if len(first) > 1 or len(last) > 1:
        return int(NONE), int(NONE)
    return first[0], last[0] if last else int(NONE)


def edges_of(model: Model) -> list[tuple[int, int]]:
    """Return the pairs (writer, reader) of operators in the forward pass."""
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


def edges_back(model: Model) -> list[tuple[int, int]]:
    """Return the pairs of operators in which the first's backward pass reads the second's."""
    maker = {
        name: op
        for op, item in enumerate(model.operators)
        if item.source is None
        for node in item.back
        for name in node.outputs
    }
    found = {
        (op, maker[name])
        for op, item in enumerate(model.operators)
        for node in item.back
        for name in node.inputs
        if maker.get(name, op) != op
    }
    return sorted(found)


def relation(model: Model, ends: tuple[int, int], back: bool = False) -> tuple[object, ...]:
    """Return a key of all that the table of a pair of operators depends on.

    Args:
        back: whether the table is of the backward pass, which goes from the second to the first.
    """
    first, second = (model.operators[op] for op in ends)
    made = {
        name: (i, j)
        for i, node in enumerate(second.back if back else first.ahead)
        for j, name in enumerate(node.outputs)
    }
    joined = tuple(
        (made[name], i, j)
        for i, node in enumerate(first.back if back else second.ahead)
        for j, name in enumerate(node.inputs)
        if name in made
    )
    kinds = tuple(int(model.problem.operators[op]["class_"]) for op in ends)
    return (*kinds, joined)
