"""From a graph and a machine to the arrays of a search: what is split, and what moves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np

from soapstone.engine.lower.updates import hoist_updates
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.routes import Routes, routes
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.problem.arrays import (
    FREE,
    MOST_RANK,
    OPERATOR,
    READER,
    TASK,
    UPDATES,
    VALUE,
    Problem,
)
from soapstone.search.parallel.problem.numbering import Numbering
from soapstone.search.parallel.problem.operators import (
    Operator,
    ParallelError,
    Task,
    fans_of,
    operators_of,
    tasks_of,
    waits_of,
    within,
)
from soapstone.search.parallel.problem.signatures import nodes_of, operands_of, write_dims
from soapstone.search.parallel.problem.timing import (
    cross_links,
    devices_of,
    profile_of,
    read_ns,
    times_of,
)


@dataclass(frozen=True)
class Model:
    """A graph on a machine, prepared for simulation.

    Attributes:
        operators: in program order; their numbers are those of `problem`.
        tasks: (operator's number, its nodes) of each task.
        values: names, by the numbers of `problem`.
        problem: the arrays.
        kinds: the class of each task, under which a measured machine keeps its times.
    """

    graph: Graph
    machine: Machine
    operators: tuple[Operator, ...]
    tasks: tuple[Task, ...]
    values: tuple[str, ...]
    nodes: tuple[Node, ...]
    problem: Problem
    routes: Routes
    kinds: tuple[str, ...] = ()


def prepare(
    graph: Graph,
    machine: Machine,
    only: Collection[str] | None = None,
    routed: Routes | None = None,
    away: Collection[str] = (),
) -> Model:
    """Return a graph on a machine, as arrays.

    Args:
        away: values that are in the memory behind that of their device.
        only: names of operators; the others, and what they read and write, are left out.
        routed: the machine's routes, if they are known.

    Raises:
        ParallelError: nothing to split, or a type or rank that cannot be handled; MachineError.
    """
    fans = fans_of(graph)
    operators = operators_of(graph, fans)
    if only is not None:
        operators = within(operators, fans, only)
    if not operators:
        raise ParallelError(f"graph {graph.name!r} has no operators to split")
    tasks = tasks_of(graph, operators, fans, fine=isinstance(machine, MeasuredMachine))
    routed = routed or routes(machine)
    part = only is not None
    return _Encoder(graph, machine, operators, tasks, fans, routed, part, frozenset(away)).model()


class _Encoder(Numbering):
    """Writes the arrays."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        operators: tuple[Operator, ...],
        tasks: tuple[Task, ...],
        fans: Mapping[str, Node],
        routed: Routes,
        part: bool,
        away: frozenset[str],
    ) -> None:
        super().__init__(graph, operators, tasks, fans)
        self.machine, self.routed, self.part, self.away = machine, routed, part, away

    def model(self) -> Model:
        """Return the model."""
        routed = self.routed
        nodes, flops = nodes_of(self)
        operands, axes, self.operand_number = operands_of(self, nodes)
        order = self._order(flops)
        self.place = {int(task): place for place, task in enumerate(order)}
        values, writers, readers, touched, makes = self._values(operands)
        tasks = np.zeros(len(self.tasks), TASK)
        reads: list[list[int]] = [[] for _ in self.tasks]
        for place, task in enumerate(readers["task"].tolist()):
            if task >= 0:
                reads[task].append(place)
        for i, (op, _) in enumerate(self.tasks):
            tasks[i]["operator"] = op
            tasks[i]["makes"], tasks[i]["reads"] = self.listed(makes[i]), self.listed(reads[i])
        tasks["place"][order] = np.arange(len(order))
        operators = self._operators(touched)
        devices, kinds = devices_of(self.machine)
        if self.away:
            cross_links(self, self.machine, nodes, flops, self.away)
        timed = times_of(self, self.machine, nodes, flops, tasks, kinds)
        times, begin_ns, slower, classes = timed
        if self.part:  # to be a bound for the whole: what slows tasks may change sides
            slower = np.zeros(1, np.int64)
        problem = Problem(
            operators=operators,
            nodes=nodes,
            flops=flops,
            operands=operands,
            axes=axes,
            tasks=tasks,
            order=order,
            values=values,
            writers=writers,
            makers=nodes["task"][operands["node"][writers]],
            readers=readers,
            lists=np.array(self.lists, np.int64),
            devices=devices,
            kinds=kinds,
            route_ptr=routed.route_ptr.astype(np.int64),
            route=routed.route.astype(np.int64),
            latency_ns=np.ceil(routed.latency_s * 1e9).astype(np.int64),
            ns_per_byte=routed.s_per_byte * 1e9,
            read_ns=read_ns(self.graph, self.machine),
            messages=profile_of(self.machine),
            times=times,
            begin_ns=begin_ns,
            slower=slower,
        )
        return Model(
            self.graph,
            self.machine,
            self.operators,
            self.tasks,
            tuple(self.values),
            self.nodes,
            problem,
            routed,
            tuple(classes),
        )

    def _order(self, flops: Array) -> Array:
        """Return the tasks in the order in which every device runs its own.

        They are ordered by when they could begin on unlimited devices, so independent tasks
        alternate; updates come last, when their sums have arrived.
        """
        waits = waits_of(self.graph, self.tasks, self.fans)
        cost = np.ones(len(self.tasks))
        for number, node in enumerate(self.nodes):
            cost[self.task_of[node.name]] += flops[number]
        begins = np.zeros(len(self.tasks))
        for task in networkx.topological_sort(waits):
            begins[task] = max((begins[b] + cost[b] for b in waits.predecessors(task)), default=0)
        last = [self.operators[op].source is not None for op, _ in self.tasks]
        if isinstance(self.machine, MeasuredMachine):  # the order of its executor's launches
            launched = {node.name: i for i, node in enumerate(hoist_updates(self.graph).nodes)}
            begins = np.array([launched[nodes[0].name] for _, nodes in self.tasks])
            last = [False] * len(self.tasks)
        return np.array(
            list(
                networkx.lexicographical_topological_sort(
                    waits, key=lambda task: (last[task], begins[task], task)
                )
            ),
            np.int64,
        )

    def _when(self, item: tuple[str, int]) -> int:
        """Return the place in the order of the task of (node, position)."""
        return self.place[self.task_of[item[0]]]

    def _values(
        self, operands: Array
    ) -> tuple[Array, Array, Array, list[list[int]], list[list[int]]]:
        """Return values, writers, readers; the values of each operator; the rows of each task."""
        graph = self.graph
        writers: dict[str, list[tuple[str, int]]] = {}
        inside = {part: value for value, node in self.fans.items() for part in node.inputs}
        for node in self.nodes:
            for position, name in enumerate(node.outputs):
                writers.setdefault(inside.get(name, name), []).append((node.name, position))
        now: dict[str, list[tuple[str, int]]] = {}
        later: dict[str, list[tuple[str, int]]] = {}
        next_of = {old: new for old, new in graph.updates.items() if new in writers}
        order = graph.positions
        for node in sorted(self.nodes, key=lambda item: order[item.name]):
            for position, name in enumerate(node.inputs):
                if name in next_of:
                    if graph.roles[name] is Role.PARAMETER and not node.overwrites:
                        later.setdefault(next_of[name], []).append((node.name, position))
                elif name in writers:
                    now.setdefault(name, []).append((node.name, position))
        self.values = [
            name
            for name in writers
            if name in later
            or {self.task_of[n] for n, _ in now.get(name, ())}
            - {self.task_of[n] for n, _ in writers[name]}
        ]
        rows = np.zeros(len(self.values), VALUE)
        write: list[int] = []
        read: list[tuple[int, int]] = []
        touched: list[set[int]] = [set() for _ in self.operators]
        makes: list[list[int]] = [[] for _ in self.tasks]
        for i, name in enumerate(self.values):
            spec, row = graph.tensors[name], rows[i]
            if spec.rank > MOST_RANK:
                raise ParallelError(f"value {name!r}: rank {spec.rank} found, {MOST_RANK} at most")
            row["rank"], row["element_bytes"] = spec.rank, np.dtype(spec.dtype).itemsize
            row["is_sum"], row["lasts"] = name in self.fans, name in graph.updates.values()
            row["away"] = name in self.away
            makers = set()
            begin = len(write), len(read)
            for maker, position in sorted(writers[name], key=self._when, reverse=True):
                operand = self.operand_number[maker, position, True]
                operands[operand]["value"] = i
                makes[self.task_of[maker]].append(len(write))
                makers.add(self.task_of[maker])
                touched[self.op_of[maker]].add(i)
                write.append(operand)
            for group, waits in ((now, True), (later, False)):
                for reader, position in sorted(group.get(name, ()), key=self._when):
                    task = self.task_of[reader]
                    if waits and task in makers:
                        continue  # within a task results are at hand
                    operand = self.operand_number[reader, position, False]
                    operands[operand]["value"] = i
                    touched[self.op_of[reader]].add(i)
                    read.append((operand, task if waits else -1))
            row["writers"], row["readers"] = zip(begin, (len(write), len(read)))
        return (
            rows,
            np.array(write, np.int64),
            np.array(read, READER),
            [sorted(values) for values in touched],
            makes,
        )

    def _operators(self, touched: list[list[int]]) -> Array:
        rows = np.zeros(len(self.operators), OPERATOR)
        classes: dict[Any, int] = {}
        follows = [-1] * len(self.operators)
        for i, item in enumerate(self.operators):
            row = rows[i]
            write_dims(self.graph, row, item.node)
            row["node"], row["kind"] = self.number[item.name], FREE
            row["source"] = row["operand"] = -1
            if item.source is not None:
                maker, value = self._maker(item.source)
                row["kind"] = UPDATES
                row["source"] = self.operand_number[maker.name, maker.outputs.index(value), True]
                position = item.node.inputs.index(item.source)
                row["operand"] = self.operand_number[item.name, position, False]
                follows[i] = self.op_of[maker.name]
            row["class_"] = self._class(item, classes)
            mine = [node.name for node in (*item.ahead, *item.back)]
            row["nodes"] = self.listed(self.number[name] for name in mine)
            tasks = [self.task_of[name] for name in mine]
            row["tasks"] = min(tasks), max(tasks) + 1
            row["touched"] = self.listed(touched[i])
        for i in range(len(self.operators)):
            reached, later = {i}, []
            for j in range(i + 1, len(self.operators)):  # what follows comes later
                if follows[j] in reached:
                    reached.add(j)
                    later.append(j)
            rows[i]["followers"] = self.listed(later)
        return rows

    def _maker(self, value: str) -> tuple[Node, str]:
        """Return the first node that makes a value and what it makes: of a sum, a part."""
        parts = self.fans[value].inputs if value in self.fans else (value,)
        for part in parts:
            maker = self.graph.producers[part]
            if maker.name in self.op_of:
                return maker, part
        raise ParallelError(f"value {value!r}: no maker found")

    def _class(self, item: Operator, classes: dict[Any, int]) -> int:
        shapes = tuple(str(self.graph.tensors[name]) for name in item.node.inputs)
        size = len(item.ahead), len(item.back), item.source is None
        key = item.node.operator, item.node.items, shapes, size
        return classes.setdefault(key, len(classes))
