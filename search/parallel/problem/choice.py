"""Strategies as arrays: set, changed and undone, and converted from and to `Strategy`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from soapstone.engine.lower import channels_last
from soapstone.ir.dims import equal_cuts
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import (
    Configuration,
    check_configuration,
    check_replicated,
)
from soapstone.ir.tensor import Array, Role
from soapstone.search.parallel.problem.arrays import (
    BOX,
    COLLECTED,
    GIVER,
    HOLDING,
    KNOWN,
    LINK,
    MARK,
    MESSAGE,
    MOST_DIMS,
    OVERFLOW,
    SEEN,
    TILE,
    WHOLE,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import compiled, entry, put, span
from soapstone.search.parallel.problem.geometry import uneven
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.problem.pricing import settle
from soapstone.search.parallel.simulation.movement import connect


def empty(p: Problem, pool: int) -> Choice:
    """Return a choice in which every operator is whole and on device 0; nothing is derived yet."""
    devices, operators, nodes = len(p.devices), len(p.operators), len(p.nodes)
    tasks, rows = len(p.tasks), len(p.writers)
    return Choice(
        operators=np.full(operators, WHOLE),
        placed=np.zeros((operators, devices), np.int64),
        cuts=np.full((operators, devices + 1), -1, np.int64),
        nodes=np.full(nodes, WHOLE),
        node_at=np.zeros((nodes, devices), np.int64),
        task_ns=np.zeros((tasks, devices + 1), np.int64),
        top=np.zeros(7, np.int64),
        send_at=np.zeros(max(rows, 1), np.int64),
        need_at=np.zeros(max(len(p.readers), 1), np.int64),
        head=np.full(max(pool, 3 * (rows + len(p.readers)) * devices), -1, np.int32),
        messages=np.zeros(pool, MESSAGE),
        givers=np.zeros(2 * pool, GIVER),
        sends=np.zeros(pool, LINK),
        needs=np.zeros(2 * pool, LINK),
        channels=np.zeros(2 * pool, np.int32),
    )


def scratch(p: Problem, held: int = 0) -> Scratch:
    """Return scratch memory. held: the boxes of one value that devices can have, at least."""
    devices = len(p.devices)
    written = p.values["writers"]["end"] - p.values["writers"]["begin"]
    read = p.values["readers"]["end"] - p.values["readers"]["begin"]
    most = int(written.max(initial=1)) * devices
    held = max(held, min(int(read.max(initial=1)) * devices * devices, 1 << 16) + 1)
    return Scratch(
        box=np.zeros(4, BOX),
        at=np.zeros(MOST_DIMS, np.int64),
        writers=np.zeros(most, TILE),
        readers=np.zeros(devices, TILE),
        holdings=np.zeros(held, HOLDING),
        marks=np.zeros(devices, MARK),
        seen=np.zeros(int(p.route.max(initial=0)) + 1, np.int64),
        stamp=np.zeros(1, np.int64),
        lists=np.zeros(max(len(p.operators), len(p.values)), COLLECTED),
        known=np.zeros(KNOWN, SEEN),
        collected=np.zeros(2, np.int64),
        ready_at=np.full(len(p.operands), -1, np.int64),
        ready=np.zeros((0, devices, 1), np.int32),
        ready_points=np.zeros(0, np.int64),
        ready_sums=np.zeros(0, np.int64),
    )


@entry
def settle_all(p: Problem, c: Choice, s: Scratch) -> None:
    """Derive everything from degrees and devices."""
    for op in range(p.operators.shape[0]):
        settle(p, c, s, op)
    reconnect_all(p, c, s)


@compiled
def reconnect_all(p: Problem, c: Choice, s: Scratch) -> None:
    """Rebuild all messages, so that the pools hold nothing else."""
    for pool in range(7):
        c.top[pool] = 0
    for value in range(p.values.shape[0]):
        connect(p, c, s, value)


@compiled
def affected(p: Problem, s: Scratch, op: int, first: bool) -> None:
    """Collect an operator, those that follow it, and their values, in addition to earlier ones."""
    if first:
        s.stamp[0] += 1
        s.collected[0] = 0
        s.collected[1] = 0
    stamp = s.stamp[0]
    begin = p.operators[op].followers.begin
    for place in range(begin - 1, p.operators[op].followers.end):
        other = op if place < begin else p.lists[place]
        if s.lists[other].operator_stamp == stamp:
            continue
        s.lists[other].operator_stamp = stamp
        s.lists[s.collected[0]].operator = other
        s.collected[0] += 1
        for at in span(p.operators[other].touched):
            value = p.lists[at]
            if s.lists[value].value_stamp != stamp:
                s.lists[value].value_stamp = stamp
                s.lists[s.collected[1]].value = value
                s.collected[1] += 1


@compiled
def _move(p: Problem, source: Choice, target: Choice, op: int) -> None:
    """Copy what is derived for an operator, except messages."""
    target.operators[op] = source.operators[op]
    put(target.placed[op], source.placed[op], source.placed.shape[1])
    put(target.cuts[op], source.cuts[op], source.cuts.shape[1])
    for place in span(p.operators[op].nodes):
        node = p.lists[place]
        target.nodes[node] = source.nodes[node]
        put(target.node_at[node], source.node_at[node], source.node_at.shape[1])
    for task in span(p.operators[op].tasks):
        put(target.task_ns[task], source.task_ns[task], source.task_ns.shape[1])


@compiled
def save(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Save in `b` what a change of the collected operators will overwrite."""
    put(b.top, c.top, 7)
    for i in range(s.collected[0]):
        _move(p, c, b, s.lists[i].operator)
    for i in range(s.collected[1]):
        value = s.lists[i].value
        for row in span(p.values[value].writers):
            b.send_at[row] = c.send_at[row]
        for place in span(p.values[value].readers):
            b.need_at[place] = c.need_at[place]


@compiled
def change(p: Problem, c: Choice, s: Scratch) -> None:
    """Derive what follows from the collected operators, whose own configurations are set.

    Messages are left to `reconnect`.
    """
    for i in range(1, s.collected[0]):  # in order: what follows is settled after what it follows
        op, place = s.lists[i].operator, i
        while place > 0 and s.lists[place - 1].operator > op:
            s.lists[place].operator = s.lists[place - 1].operator
            place -= 1
        s.lists[place].operator = op
    for i in range(s.collected[0]):
        settle(p, c, s, s.lists[i].operator)


@compiled
def reconnect(p: Problem, c: Choice, s: Scratch) -> None:
    """Rebuild the messages of the collected values."""
    for i in range(s.collected[1]):
        connect(p, c, s, s.lists[i].value)


@compiled
def undo(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Undo a change."""
    for i in range(s.collected[1]):
        value = s.lists[i].value
        for row in span(p.values[value].writers):
            c.send_at[row] = b.send_at[row]
        for place in span(p.values[value].readers):
            c.need_at[place] = b.need_at[place]
    put_back(p, c, b, s)


@compiled
def put_back(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Restore the collected operators, whose messages were not changed."""
    put(c.top, b.top, 7)
    for i in range(s.collected[0]):
        _move(p, b, c, s.lists[i].operator)


class Settled:
    """A strategy in arrays with everything derived, whose pools grow as needed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.problem = model.problem
        pool = 64 + 4 * self.problem.tasks.shape[0] * len(self.problem.devices)
        self.choice = empty(self.problem, pool)
        self.scratch = scratch(self.problem)

    def set(self, configurations: Mapping[str, Configuration]) -> None:
        """Set the configurations of operators; those left out follow others, or are whole.

        Raises:
            ParallelError: a configuration is not legal on this graph and machine.
        """
        c = self.choice
        c.operators[:], c.placed[:] = WHOLE, 0
        for op, item in enumerate(self.model.operators):
            found = configurations.get(item.name)
            if found is not None and item.source is None:
                self._set(op, found)
        self.settle()

    def _set(self, op: int, item: Configuration) -> None:
        c, node, most = self.choice, self.model.operators[op].node, len(self.problem.devices)
        signature = self.model.graph.signature(node)
        try:
            check_configuration(node, signature, item)
            check_replicated(self.model.graph, node, item)
        except StrategyError as error:
            raise ParallelError(f"{node.label}: {error}") from None
        if item.points > most:
            raise ParallelError(
                f"{node.label}: {item.points} points found, at most one a device needed, {most}"
            )
        devices = item.devices or [i * most // item.points for i in range(item.points)]
        if max(devices) >= most:
            raise ParallelError(f"{node.label}: device {max(devices)} found, below {most} needed")
        uneven = {
            name: cut for name, cut in item.cuts.items() if cut != equal_cuts(cut[-1], len(cut) - 1)
        }
        if len(uneven) > 1:
            raise ParallelError(
                f"{node.label}: uneven tiles along {', '.join(uneven)} found, one dim at most"
            )
        split = c.operators[op]
        split["points"], c.placed[op, : item.points] = item.points, devices
        for number, dim in enumerate(signature.dims):
            split["degrees"][number] = item.degrees.get(dim.name, 1)
            split["replicated"] |= (dim.name in item.replicated) << number
            if dim.name in uneven:
                split["cut"] = number
                c.cuts[op, : len(uneven[dim.name])] = uneven[dim.name]

    def settle(self) -> None:
        """Derive everything; enlarge the pools until it fits."""
        while True:
            call(settle_all, self.problem, self.choice, self.scratch)
            if not self.choice.top[OVERFLOW]:
                return
            self.grow()

    def restore(self, operators: Array, placed: Array, cuts: Array) -> None:
        """Set a strategy of the same model (`Choice.chosen`), and derive everything."""
        for kept, new in zip(self.choice.chosen, (operators, placed, cuts)):
            kept[:] = new
        self.settle()

    def grow(self) -> None:
        """Double all room; the contents of the pools must be derived again."""
        old = self.choice
        self.scratch = scratch(self.problem, 2 * len(self.scratch.holdings))
        self.choice = empty(self.problem, 2 * len(old.messages))
        for kept, new in zip(self.choice.chosen, old.chosen):
            kept[:] = new

    def configurations(self) -> dict[str, Configuration]:
        """Return the configuration of every forward node, and of every update."""
        c = self.choice
        number = {node.name: i for i, node in enumerate(self.model.nodes)}
        found = {}
        for op, item in enumerate(self.model.operators):
            for node in (*item.ahead, *item.back):
                if node.origin in self.model.graph.by_name:
                    continue  # a gradient follows by itself
                row = c.nodes[number[node.name]]
                names = [dim.name for dim in self.model.graph.signature(node).dims]
                degrees = dict(zip(names, row["degrees"].tolist()))
                cuts = {
                    name: tuple(c.cuts[op, : degrees[name] + 1].tolist())
                    for dim, name in enumerate(names)
                    if call(uneven, self.problem, c, number[node.name], dim)
                }
                points = c.node_at[number[node.name], : row["points"]]
                found[node.name] = Configuration(
                    {name: degree for name, degree in degrees.items() if degree > 1},
                    tuple(c.placed[op, points].tolist()),
                    cuts,
                    tuple(n for dim, n in enumerate(names) if row["replicated"] >> dim & 1),
                )
        return found


def needs_of(p: Problem, c: Choice, task: int, point: int) -> Iterator[int]:
    """Yield the messages that a task waits for at a point."""
    for at in range(*p.tasks[task]["reads"]):
        heads = int(c.need_at[p.lists[at]])
        need = int(c.head[heads + point]) if heads >= 0 else -1
        while need >= 0:
            message, need = c.needs[need].tolist()
            yield message


def as_strategy(
    graph: Graph,
    model: Model,
    configurations: Mapping[str, Configuration],
    provenance: Mapping[str, Any],
) -> Strategy:
    """Return the strategy with these configurations; gradient sums get those of their updates."""
    made = dict(configurations)
    for node in graph.nodes:
        if node.name in made or node.origin in graph.by_name or not node.inputs:
            continue
        readers = graph.consumers[node.outputs[0]]
        if readers and readers[0].name in made:
            made[node.name] = _like(graph, node, readers[0], made[readers[0].name])
    return Strategy(
        configurations={"*": Configuration(), **made},
        layouts=channels_last(graph),
        model=graph.name,
        model_hash=graph.structural_hash,
        machine=model.machine.describe(),
        inputs={name: graph.tensors[name].shape for name in graph.inputs(Role.INPUT)},
        provenance=dict(provenance),
    )


def _like(graph: Graph, node: Node, reader: Node, item: Configuration) -> Configuration:
    """Return a node's configuration, given that of the element-wise reader of its result."""
    names = [dim.name for dim in graph.signature(reader).dims]
    mine = [dim.name for dim in graph.signature(node).dims]
    degrees = {mine[names.index(name)]: degree for name, degree in item.degrees.items()}
    cuts = {mine[names.index(name)]: cut for name, cut in item.cuts.items()}
    return Configuration(degrees, item.devices, cuts)
