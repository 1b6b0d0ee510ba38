"""Strategies as arrays: made, changed, taken back; and to and from `Strategy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.engine.lower import channels_last
from soapstone.ir.configuration import Configuration, check_configuration
from soapstone.ir.dims import equal_cuts
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.search.parallel.problem.arrays import (
    BOUNDS,
    CUT,
    DEGREES,
    EXTENT,
    FOLLOWERS,
    KNOWN,
    MOST_DIMS,
    MOST_RANK,
    NODE,
    NODES,
    OK,
    OVERFLOW,
    POINTS,
    READERS,
    TASKS,
    TOUCHED,
    WRITERS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import compiled, entry, put
from soapstone.search.parallel.problem.geometry import legal, settle, uneven
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation.movement import connect


def empty(p: Problem, pool: int) -> Choice:
    """Return a choice in which every operator is whole, on device 0; nothing is derived yet."""
    devices, operators, nodes = len(p.devices), len(p.operators), len(p.nodes)
    tasks, rows = len(p.tasks), len(p.writers)
    return Choice(
        operators=np.ones((operators, DEGREES + MOST_DIMS), np.int64),
        placed=np.zeros((operators, devices), np.int64),
        cuts=np.full((operators, devices + 2), -1, np.int64),
        nodes=np.ones((nodes, DEGREES + MOST_DIMS), np.int64),
        node_at=np.zeros((nodes, devices), np.int64),
        task_ns=np.zeros((tasks, devices + 1), np.int64),
        top=np.zeros(7, np.int64),
        send_at=np.zeros(max(rows, 1), np.int64),
        need_at=np.zeros(max(len(p.readers), 1), np.int64),
        head=np.full(max(pool, 3 * (rows + len(p.readers)) * devices), -1, np.int32),
        messages=np.zeros((pool, 7), np.int64),
        givers=np.zeros((2 * pool, 3), np.int32),
        sends=np.zeros((pool, 2), np.int32),
        needs=np.zeros((2 * pool, 2), np.int32),
        channels=np.zeros(2 * pool, np.int32),
    )


def scratch(p: Problem, held: int = 0) -> Scratch:
    """Return room to work in. held: boxes that devices have of one value, at least."""
    devices = len(p.devices)
    written = p.values[:, WRITERS + 1] - p.values[:, WRITERS]
    read = p.values[:, READERS + 1] - p.values[:, READERS]
    most = int(written.max(initial=1)) * devices
    held = max(held, min(int(read.max(initial=1)) * devices * devices, 1 << 16) + 1)
    width = 2 * MOST_RANK
    return Scratch(
        box=np.zeros((4, width), np.int64),
        at=np.zeros(MOST_DIMS, np.int64),
        writers=np.zeros((most, width + 4), np.int64),
        readers=np.zeros((devices, width + 4), np.int64),
        holdings=np.zeros((held, width + 2), np.int64),
        marks=np.zeros((devices, 4), np.int64),
        seen=np.zeros(int(p.route.max(initial=0)) + 1, np.int64),
        stamp=np.zeros(1, np.int64),
        lists=np.zeros((4, max(len(p.operators), len(p.values))), np.int64),
        known=np.zeros((KNOWN, 2), np.int64),
        collected=np.zeros(2, np.int64),
    )


@entry
def settle_all(p: Problem, c: Choice, s: Scratch) -> None:
    """Derive everything from degrees and devices."""
    for op in range(p.operators.shape[0]):
        settle(p, c, s, op)
    reconnect_all(p, c, s)


@entry
def reconnect_all(p: Problem, c: Choice, s: Scratch) -> None:
    """Make all messages anew, so that the pools hold nothing else."""
    for pool in range(7):
        c.top[pool] = 0
    for value in range(p.values.shape[0]):
        connect(p, c, s, value)


@compiled
def affected(p: Problem, s: Scratch, op: int, first: bool) -> None:
    """Collect an operator, those that follow it, and their values, besides those collected."""
    if first:
        s.stamp[0] += 1
        s.collected[0] = 0
        s.collected[1] = 0
    stamp = s.stamp[0]
    begin = p.operators[op, FOLLOWERS]
    for place in range(begin - 1, p.operators[op, FOLLOWERS + 1]):
        other = op if place < begin else p.lists[place]
        if s.lists[1, other] == stamp:
            continue
        s.lists[1, other] = stamp
        s.lists[0, s.collected[0]] = other
        s.collected[0] += 1
        for at in range(p.operators[other, TOUCHED], p.operators[other, TOUCHED + 1]):
            value = p.lists[at]
            if s.lists[3, value] != stamp:
                s.lists[3, value] = stamp
                s.lists[2, s.collected[1]] = value
                s.collected[1] += 1


@compiled
def _move(p: Problem, source: Choice, target: Choice, op: int) -> None:
    """Copy what is derived of an operator, messages aside."""
    put(target.operators[op], source.operators[op], source.operators.shape[1])
    put(target.placed[op], source.placed[op], source.placed.shape[1])
    put(target.cuts[op], source.cuts[op], source.cuts.shape[1])
    for place in range(p.operators[op, NODES], p.operators[op, NODES + 1]):
        node = p.lists[place]
        put(target.nodes[node], source.nodes[node], source.nodes.shape[1])
        put(target.node_at[node], source.node_at[node], source.node_at.shape[1])
    for task in range(p.operators[op, TASKS], p.operators[op, TASKS + 1]):
        put(target.task_ns[task], source.task_ns[task], source.task_ns.shape[1])


@compiled
def save(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Keep in `b` what a change of the collected operators will overwrite."""
    put(b.top, c.top, 7)
    for i in range(s.collected[0]):
        _move(p, c, b, s.lists[0, i])
    for i in range(s.collected[1]):
        value = s.lists[2, i]
        for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
            b.send_at[row] = c.send_at[row]
        for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
            b.need_at[place] = c.need_at[place]


@compiled
def change(p: Problem, c: Choice, s: Scratch) -> None:
    """Derive anew what follows from the collected operators, whose own configurations are set.

    Messages are left to `reconnect`.
    """
    for i in range(1, s.collected[0]):  # in order: what follows is settled after what it follows
        op, place = s.lists[0, i], i
        while place > 0 and s.lists[0, place - 1] > op:
            s.lists[0, place] = s.lists[0, place - 1]
            place -= 1
        s.lists[0, place] = op
    for i in range(s.collected[0]):
        settle(p, c, s, s.lists[0, i])


@compiled
def reconnect(p: Problem, c: Choice, s: Scratch) -> None:
    """Make the messages of the collected values anew."""
    for i in range(s.collected[1]):
        connect(p, c, s, s.lists[2, i])


@compiled
def undo(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Take a change back."""
    for i in range(s.collected[1]):
        value = s.lists[2, i]
        for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
            c.send_at[row] = b.send_at[row]
        for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
            c.need_at[place] = b.need_at[place]
    put_back(p, c, b, s)


@compiled
def put_back(p: Problem, c: Choice, b: Choice, s: Scratch) -> None:
    """Set the collected operators to what they were; their messages are as they were."""
    put(c.top, b.top, 7)
    for i in range(s.collected[0]):
        _move(p, b, c, s.lists[0, i])


class Settled:
    """A strategy in arrays with everything derived, whose pools grow as needed."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.problem = model.problem
        pool = 64 + 4 * self.problem.tasks.shape[0] * len(self.problem.devices)
        self.choice = empty(self.problem, pool)
        self.scratch = scratch(self.problem)

    def set(self, configurations: Mapping[str, Configuration]) -> None:
        """Take over the configurations of operators; those left out follow, or are whole.

        Raises:
            ParallelError: a configuration is not legal on this graph and machine.
        """
        c = self.choice
        c.operators[:] = 1
        c.placed[:] = 0
        c.cuts[:] = -1
        for op, item in enumerate(self.model.operators):
            found = configurations.get(item.name)
            if found is not None and item.source is None:
                self._set(op, found)
        self.settle()

    def _set(self, op: int, item: Configuration) -> None:
        p, c = self.problem, self.choice
        operator = self.model.operators[op]
        names = [dim.name for dim in self.model.graph.signature(operator.node).dims]
        for name, degree in item.degrees.items():
            dim = names.index(name) if name in names else -1
            if (
                dim < 0
                or degree > p.operators[op, EXTENT + dim]
                or (degree > 1 and not p.operators[op, OK + dim])
            ):
                raise ParallelError(
                    f"{operator.node.label}: dim {name} cannot be split by {degree}"
                )
            c.operators[op, DEGREES + dim] = degree
        if not call(legal, p, int(p.operators[op, NODE]), c.operators[op, DEGREES:]):
            raise ParallelError(f"{operator.node.label}: degrees {item} are not legal together")
        self._set_cuts(op, names, item)
        points, most = item.points, len(p.devices)
        if points > most:
            raise ParallelError(
                f"{operator.node.label}: {points} points found, at most one a device needed, {most}"
            )
        devices = item.devices or [i * most // points for i in range(points)]
        if max(devices) >= most:
            raise ParallelError(
                f"{operator.node.label}: device {max(devices)} found, below {most} needed"
            )
        c.operators[op, POINTS] = points
        c.placed[op, :points] = devices

    def _set_cuts(self, op: int, names: list[str], item: Configuration) -> None:
        node = self.model.operators[op].node
        uneven = {
            name: cut for name, cut in item.cuts.items() if cut != equal_cuts(cut[-1], len(cut) - 1)
        }
        if not uneven:
            return
        if len(uneven) > 1:
            raise ParallelError(
                f"{node.label}: uneven tiles along {', '.join(uneven)} found, one dim at most"
            )
        check_configuration(node, self.model.graph.signature(node), item)
        name, cut = next(iter(uneven.items()))
        row = self.choice.cuts[op]
        row[CUT] = names.index(name)
        row[BOUNDS : BOUNDS + len(cut)] = cut

    def settle(self) -> None:
        """Derive everything; make the pools larger until it fits."""
        while True:
            call(settle_all, self.problem, self.choice, self.scratch)
            if not self.choice.top[OVERFLOW]:
                return
            self.grow()

    def restore(self, operators: Array, placed: Array, cuts: Array) -> None:
        """Take over a strategy of the same model from arrays, and derive everything."""
        c = self.choice
        c.operators[:], c.placed[:], c.cuts[:] = operators, placed, cuts
        self.settle()

    def grow(self) -> None:
        """Double all room; what is in the pools must be derived again."""
        old = self.choice
        self.scratch = scratch(self.problem, 2 * len(self.scratch.holdings))
        self.choice = empty(self.problem, 2 * len(old.messages))
        self.choice.operators[:] = old.operators
        self.choice.placed[:] = old.placed
        self.choice.cuts[:] = old.cuts

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
                degrees = {
                    name: int(row[DEGREES + dim])
                    for dim, name in enumerate(names)
                    if row[DEGREES + dim] > 1
                }
                points = c.node_at[number[node.name], : row[POINTS]]
                found[node.name] = Configuration(
                    degrees,
                    tuple(int(c.placed[op, point]) for point in points),
                    self._cuts(op, number[node.name], names),
                )
        return found

    def _cuts(self, op: int, node: int, names: list[str]) -> dict[str, tuple[int, ...]]:
        """Return the boundaries of a node's uneven tiles, by dim."""
        p, c = self.problem, self.choice
        for dim, name in enumerate(names):
            if call(uneven, p, c, node, dim):
                degree = int(c.nodes[node, DEGREES + dim])
                row = c.cuts[op, BOUNDS : BOUNDS + degree + 1]
                return {name: tuple(int(bound) for bound in row)}
        return {}


def as_strategy(
    graph: Graph,
    model: Model,
    configurations: Mapping[str, Configuration],
    provenance: Mapping[str, Any],
) -> Strategy:
    """Return the strategy with these configurations; sums of gradients go with their updates."""
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
        provenance=dict(provenance),
    )


def _like(graph: Graph, node: Node, reader: Node, item: Configuration) -> Configuration:
    """Return the configuration of an element-wise reader for the node whose result it reads."""
    names = [dim.name for dim in graph.signature(reader).dims]
    mine = [dim.name for dim in graph.signature(node).dims]
    degrees = {mine[names.index(name)]: degree for name, degree in item.degrees.items()}
    cuts = {mine[names.index(name)]: cut for name, cut in item.cuts.items()}
    return Configuration(degrees, item.devices, cuts)


__all__ = [
    "Settled",
    "affected",
    "as_strategy",
    "change",
    "reconnect",
    "reconnect_all",
    "save",
    "settle_all",
    "undo",
]
