"""From a graph and a machine to the arrays of a search: what is split, and what moves."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx
import numpy as np

from soapstone.ir.dims import Affine, Axis, Kind, Product, Whole
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.lower.updates import hoist_updates
from soapstone.runtime.routes import Routes, routes
from soapstone.search.cost.launches import work
from soapstone.search.cost.machine import Device, DeviceError
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.arrays import (
    AFFINE,
    BYTES,
    CLASS,
    DIMS,
    EXTENT,
    FAN,
    FOLLOWERS,
    FREE,
    FROM,
    KIND,
    LAUNCH,
    LOOKS,
    LOWERS,
    MAKES,
    MEMORY_RATE,
    MOST_DIMS,
    MOST_RANK,
    NESTED,
    NODE,
    NODES,
    OK,
    OP,
    OPERAND,
    OPERANDS,
    PLACE,
    PRODUCT,
    RANK,
    RATE,
    RATES,
    READERS,
    READS,
    SCALE,
    SOURCE,
    STAYS,
    TASK,
    TASKS,
    TIMES,
    TOUCHED,
    UPDATES,
    VALUE,
    WHOLE,
    WRITERS,
    Array,
    Problem,
)
from soapstone.search.parallel.operators import (
    Operator,
    ParallelError,
    Task,
    fans_of,
    followed,
    operators_of,
    tasks_of,
    waits_of,
    within,
)

TYPES = ("float32", "float64", "float16")
_KINDS = {Whole: WHOLE, Affine: AFFINE, Product: PRODUCT}


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
) -> Model:
    """Return a graph on a machine, as arrays.

    Args:
        only: names of operators; the others, and what they read and write, are left out.
        routed: the machine's routes, if they are known.

    Raises:
        ParallelError: nothing to split, or a type or rank that cannot be handled; MachineError.
    """
    fans = fans_of(graph)
    operators = operators_of(graph, fans)
    if only is not None:
        operators = within(graph, operators, fans, only)
    if not operators:
        raise ParallelError(f"graph {graph.name!r} has no operators to split")
    tasks = tasks_of(graph, operators, fans, fine=isinstance(machine, MeasuredMachine))
    routed = routed or routes(machine)
    return _Encoder(graph, machine, operators, tasks, fans, routed, only is not None).model()


def step_kind(graph: Graph) -> str:
    """Return what the time of a step beside its tasks depends on: the shapes that it is fed."""
    fed = sorted(str(graph.tensors[name]) for name in graph.inputs(Role.INPUT))
    return json.dumps(["step", fed])


class _Encoder:
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
    ) -> None:
        # Of a part the simulation must be a bound for the whole: what slows tasks may change sides.
        self.routed, self.part = routed, part
        self.graph, self.machine, self.operators, self.tasks = graph, machine, operators, tasks
        self.fans = fans
        self.nodes = tuple(node for _, nodes in tasks for node in nodes)
        self.number = {node.name: i for i, node in enumerate(self.nodes)}
        self.task_of = {n.name: i for i, (_, nodes) in enumerate(tasks) for n in nodes}
        self.op_of = {n.name: op for op, nodes in tasks for n in nodes}
        self.lists: list[int] = []
        self.operand_number: dict[tuple[str, int, bool], int] = {}
        self.owners: list[int] = []

    def model(self) -> Model:
        """Return the model."""
        routed = self.routed
        nodes, flops = self._nodes()
        operands, axes = self._operands(nodes)
        order = self._order(flops)
        self.place = {int(task): place for place, task in enumerate(order)}
        values, writers, readers, touched, makes = self._values(operands)
        tasks = np.zeros((len(self.tasks), SCALE + 1), np.int64)
        reads: list[list[int]] = [[] for _ in self.tasks]
        for place, task in enumerate(readers[:, 1].tolist()):
            if task >= 0:
                reads[task].append(place)
        for i, (op, _) in enumerate(self.tasks):
            tasks[i, OP] = op
            tasks[i, MAKES : MAKES + 2] = self._list(makes[i])
            tasks[i, READS : READS + 2] = self._list(reads[i])
        tasks[order, PLACE] = np.arange(len(order))
        operators = self._operators(touched)
        devices, kinds = self._devices()
        times, begin_ns, slower = self._times(nodes, flops, tasks, kinds)
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
            readers=readers,
            lists=np.array(self.lists, np.int64),
            devices=devices,
            kinds=kinds,
            route_ptr=routed.route_ptr.astype(np.int64),
            route=routed.route.astype(np.int64),
            latency_ns=np.ceil(routed.latency_s * 1e9).astype(np.int64),
            ns_per_byte=routed.s_per_byte * 1e9,
            read_ns=self._read_ns(),
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
            tuple(self.kinds),
        )

    def _times(self, nodes: Array, flops: Array, tasks: Array, rates: Array) -> tuple[Array, ...]:
        """Return the measured times of tasks, of a step beside them, `slower`; set their ranges."""
        machine, devices = self.machine, len(self.machine.processors)
        tasks[:, SCALE] = 1000
        self.kinds: list[str] = []
        if not isinstance(machine, MeasuredMachine):
            none = np.zeros(1, np.int64)
            return np.zeros((0, MOST_DIMS + devices), np.int64), none, none
        rows: list[list[int]] = []
        ranges: dict[str, tuple[int, int]] = {}
        self.kinds = [self._kind(nodes, task) for task in range(len(self.tasks))]
        for kind in dict.fromkeys(self.kinds):
            begin = len(rows)
            for degrees, points_ns in machine.times.of(kind).items():
                ones, room = (1,) * (MOST_DIMS - len(degrees)), (0,) * (devices - len(points_ns))
                rows.append([*degrees, *ones, *points_ns, *room])
            ranges[kind] = begin, len(rows)
        for task, kind in enumerate(self.kinds):
            tasks[task, TIMES : TIMES + 2] = ranges[kind]
            whole = next(
                (t for d, t in machine.times.of(kind).items() if max(d, default=1) == 1), None
            )
            if whole is not None:
                tasks[task, SCALE] = 1000 * whole[0] / self._roofline_ns(task, nodes, flops, rates)
        step = machine.times.step(step_kind(self.graph))
        begin_ns = np.array([round(step.begin_ns)], np.int64)
        slower = np.array([0 if self.part else round(1000 * step.slower)], np.int64)
        return np.array(rows, np.int64).reshape(-1, MOST_DIMS + devices), begin_ns, slower

    def _read_ns(self) -> Array:
        """Return what a byte takes more that another device of the same memory has made."""
        memory = np.array([processor.memory for processor in self.machine.processors])
        one = (memory[:, None] == memory) & ~np.eye(len(memory), dtype=bool)
        if not isinstance(self.machine, MeasuredMachine):
            return np.zeros(one.shape)
        step = self.machine.times.step(step_kind(self.graph))
        return np.where(one, step.ns_per_byte, 0.0)

    def _roofline_ns(self, task: int, nodes: Array, flops: Array, rates: Array) -> float:
        """Return the time of a task in one piece by the roofline of the first device."""
        total = 0.0
        for node in self.tasks[task][1]:
            row = nodes[self.number[node.name]]
            if not row[LOOKS]:
                _, nbytes = work(self.graph, node)
                compute = flops[self.number[node.name]] / rates[0, RATES + row[RATE]]
                total += rates[0, LAUNCH] + max(compute, nbytes / rates[0, MEMORY_RATE])
        return max(total, 1.0)

    def _kind(self, nodes: Array, task: int) -> str:
        """Return the class of a task: its nodes, what they read, and whose dims they follow."""
        op, mine = self.tasks[task]
        item = self.operators[op]
        made = {name: i for i, node in enumerate(mine) for name in node.outputs}
        said: list[Any] = []
        for node in mine:
            row = nodes[self.number[node.name]]
            operands = [
                [str(self.graph.tensors[name]), made.get(name, -1), str(self.graph.roles.get(name))]
                for name in node.inputs
            ]
            dims = row[FROM : FROM + row[DIMS]].tolist()
            said.append([node.operator, node.items, operands, dims])
        dims = [[dim.name, dim.extent] for dim in self.graph.signature(item.node).dims]
        return json.dumps([said, dims, item.source is None], default=str)

    def _order(self, flops: Array) -> Array:
        """Return the tasks in the order in which every device runs its own.

        They are ordered by when they could begin if there were no bounds to devices, so that what
        can run beside each other alternates; updates come last, when their sums have arrived.
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

    def _list(self, items: Iterable[int]) -> tuple[int, int]:
        """Append to `lists`; return the range."""
        first = len(self.lists)
        self.lists.extend(items)
        return first, len(self.lists)

    def _dims(self, row: Array, node: Node) -> None:
        """Write the dims of a node, or of the operator whose forward node it is."""
        dims = self.graph.signature(node).dims
        if len(dims) > MOST_DIMS:
            raise ParallelError(f"{node.label}: {len(dims)} dims found, {MOST_DIMS} at most")
        row[DIMS] = len(dims)
        row[EXTENT : EXTENT + MOST_DIMS] = 1
        for j, dim in enumerate(dims):
            row[EXTENT + j] = max(dim.extent, 1)
            row[OK + j] = dim.kind is not Kind.WHOLE and (
                dim.kind is not Kind.LOWERED or node.spec.lower is not None
            )

    def _nodes(self) -> tuple[Array, Array]:
        rows = np.zeros((len(self.nodes), LOWERS + MOST_DIMS), np.int64)
        flops = np.zeros(len(self.nodes))
        sources = self._sources()
        for i, node in enumerate(self.nodes):
            row, signature = rows[i], self.graph.signature(node)
            self._dims(row, node)
            row[OP], row[TASK] = self.op_of[node.name], self.task_of[node.name]
            for j, dim in enumerate(signature.dims):
                row[LOWERS + j] = dim.kind is Kind.LOWERED
                row[FROM + j] = sources[node.name].get(dim.name, -1)
            place = {dim.name: j for j, dim in enumerate(signature.dims)}
            row[NESTED : NESTED + 2] = self._list(
                at
                for product in signature.products
                for position, inner in enumerate(product.dims)
                for outer in product.dims[:position]
                for at in (place[inner], place[outer])
            )
            flops[i] = work(self.graph, node)[0]
            dtype = signature.dtypes[0] if signature.dtypes else "float32"
            row[RATE] = TYPES.index(dtype) if dtype in TYPES else 0
            row[LOOKS] = node.spec.view in ("reshape", "split", "slice", "concat")
        return rows, flops

    def _sources(self) -> dict[str, dict[str, int]]:
        """Return, for each node, which of its operator's dims each of its dims follows.

        A gradient node's are those of its origin by name, a light node's those that index the same
        axes of what it follows.
        """
        found: dict[str, dict[str, int]] = {}
        order = {node.name: i for i, node in enumerate(self.graph.nodes)}
        for node in sorted(self.nodes, key=lambda item: order[item.name]):
            signature = self.graph.signature(node)
            if self.operators[self.op_of[node.name]].node is node:
                found[node.name] = {dim.name: j for j, dim in enumerate(signature.dims)}
            elif node.origin in found:
                known, rename = found[str(node.origin)], dict(node.rename)
                names = ((dim.name, rename.get(dim.name, dim.name)) for dim in signature.dims)
                found[node.name] = {own: known[name] for own, name in names if name in known}
            else:
                found[node.name] = self._followed_dims(node, order, found)
        return found

    def _followed_dims(
        self, node: Node, order: Mapping[str, int], found: Mapping[str, Mapping[str, int]]
    ) -> dict[str, int]:
        maker = followed(self.graph, node, order)
        assert maker is not None  # or it would be an operator of its own
        made = self.graph.signature(maker)
        result: dict[str, int] = {}
        for name, operand in zip(node.inputs, self.graph.signature(node).inputs):
            if name not in maker.outputs:
                continue
            whole = made.outputs[maker.outputs.index(name)]
            for theirs, ours in zip(whole.axes, operand.axes):
                if theirs.dims and ours.dims and theirs.dims[0] in found[maker.name]:
                    result.setdefault(ours.dims[0], found[maker.name][theirs.dims[0]])
            return result
        return result

    def _operands(self, nodes: Array) -> tuple[Array, Array]:
        operands: list[list[int]] = []
        axes: list[list[int]] = []
        for i, node in enumerate(self.nodes):
            signature = self.graph.signature(node)
            place = {dim.name: j for j, dim in enumerate(signature.dims)}
            first = len(operands)
            for output, group, shaped in (
                (False, node.inputs, signature.inputs),
                (True, node.outputs, signature.outputs),
            ):
                for position, (name, operand) in enumerate(zip(group, shaped)):
                    if len(operand.axes) > MOST_RANK:
                        raise ParallelError(
                            f"{node.label}: a tensor of rank {len(operand.axes)} found,"
                            f" {MOST_RANK} at most"
                        )
                    self.operand_number[node.name, position, output] = len(operands)
                    self.owners.append(i)
                    begin = len(axes)
                    for axis in operand.axes:
                        mapped = self._list(place[dim] for dim in axis.dims)
                        axes.append([*_axis(axis), *mapped])
                    size = np.dtype(self.graph.tensors[name].dtype).itemsize
                    operands.append(
                        [i, -1, output, size, begin, len(axes), output and self._inside(name)]
                    )
            nodes[i, OPERANDS : OPERANDS + 2] = first, len(operands)
        return np.array(operands, np.int64), np.array(axes, np.int64).reshape(-1, 8)

    def _inside(self, name: str) -> bool:
        """Return whether a light node of the task that makes a value reads it."""
        maker = self.graph.producers[name]
        return any(
            self.task_of.get(reader.name) == self.task_of[maker.name] and reader.origin is None
            for reader in self.graph.consumers[name]
        )

    def _values(
        self, operands: Array
    ) -> tuple[Array, Array, Array, list[list[int]], list[list[int]]]:
        """Return values, writers, readers; the values of each operator, and rows of each task."""
        graph = self.graph
        writers: dict[str, list[tuple[str, int]]] = {}
        inside = {part: value for value, node in self.fans.items() for part in node.inputs}
        for node in self.nodes:
            for position, name in enumerate(node.outputs):
                writers.setdefault(inside.get(name, name), []).append((node.name, position))
        now: dict[str, list[tuple[str, int]]] = {}
        later: dict[str, list[tuple[str, int]]] = {}
        next_of = {old: new for old, new in graph.updates.items() if new in writers}
        order = {node.name: i for i, node in enumerate(graph.nodes)}
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
        rows = np.zeros((len(self.values), READERS + 2), np.int64)
        write: list[int] = []
        read: list[tuple[int, int]] = []
        touched: list[set[int]] = [set() for _ in self.operators]
        makes: list[list[int]] = [[] for _ in self.tasks]
        for i, name in enumerate(self.values):
            spec = graph.tensors[name]
            if spec.rank > MOST_RANK:
                raise ParallelError(f"value {name!r}: rank {spec.rank} found, {MOST_RANK} at most")
            rows[i, RANK], rows[i, BYTES] = spec.rank, np.dtype(spec.dtype).itemsize
            rows[i, FAN], rows[i, STAYS] = name in self.fans, name in graph.updates.values()
            makers = set()
            rows[i, WRITERS] = len(write)
            for maker, position in sorted(writers[name], key=self._when, reverse=True):
                operand = self.operand_number[maker, position, True]
                operands[operand, VALUE] = i
                makes[self.task_of[maker]].append(len(write))
                makers.add(self.task_of[maker])
                touched[self.op_of[maker]].add(i)
                write.append(operand)
            rows[i, WRITERS + 1] = len(write)
            rows[i, READERS] = len(read)
            for group, waits in ((now, True), (later, False)):
                for reader, position in sorted(group.get(name, ()), key=self._when):
                    task = self.task_of[reader]
                    if waits and task in makers:
                        continue  # within a task results are at hand
                    operand = self.operand_number[reader, position, False]
                    operands[operand, VALUE] = i
                    touched[self.op_of[reader]].add(i)
                    read.append((operand, task if waits else -1))
            rows[i, READERS + 1] = len(read)
        return (
            rows,
            np.array(write, np.int64),
            np.array(read, np.int64).reshape(-1, 2),
            [sorted(values) for values in touched],
            makes,
        )

    def _operators(self, touched: list[list[int]]) -> Array:
        rows = np.zeros((len(self.operators), OK + MOST_DIMS), np.int64)
        classes: dict[Any, int] = {}
        follows = [-1] * len(self.operators)
        for i, item in enumerate(self.operators):
            row = rows[i]
            self._dims(row, item.node)
            row[NODE], row[KIND] = self.number[item.name], FREE
            row[SOURCE] = row[OPERAND] = -1
            if item.source is not None:
                maker, value = self._maker(item.source)
                row[KIND] = UPDATES
                row[SOURCE] = self.operand_number[maker.name, maker.outputs.index(value), True]
                position = item.node.inputs.index(item.source)
                row[OPERAND] = self.operand_number[item.name, position, False]
                follows[i] = self.op_of[maker.name]
            row[CLASS] = self._class(item, classes)
            row[NODES : NODES + 2] = self._list(
                self.number[node.name] for node in (*item.ahead, *item.back)
            )
            mine = {self.task_of[node.name] for node in (*item.ahead, *item.back)}
            row[TASKS : TASKS + 2] = min(mine), max(mine) + 1
            row[TOUCHED : TOUCHED + 2] = self._list(touched[i])
        for i in range(len(self.operators)):
            reached, later = {i}, []
            for j in range(i + 1, len(self.operators)):  # what follows comes later
                if follows[j] in reached:
                    reached.add(j)
                    later.append(j)
            rows[i, FOLLOWERS : FOLLOWERS + 2] = self._list(later)
        return rows

    def _maker(self, value: str) -> tuple[Node, str]:
        """Return the first node that makes a value, and what it makes: of a sum, a part."""
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

    def _devices(self) -> tuple[Array, Array]:
        machine = self.machine
        kinds: dict[str, int] = {}
        devices = [described(machine, number) for number in range(len(machine.processors))]
        kind_of = [kinds.setdefault(device.name, len(kinds)) for device in devices]
        places = list(dict.fromkeys(processor.node for processor in machine.processors))
        capacity = {memory.name: memory.capacity_bytes for memory in machine.memories}
        takes = isinstance(machine, MeasuredMachine)  # its executors' workers do
        rows = [
            [places.index(processor.node), kind, capacity[processor.memory], takes]
            for processor, kind in zip(machine.processors, kind_of)
        ]
        rates = []
        for kind in range(len(kinds)):
            device = devices[kind_of.index(kind)]
            full = device.flops_per_s["float32"]
            rates.append(
                [
                    device.bytes_per_s * device.memory_share / 1e9,
                    device.launch_us * 1e3,
                    float(device.full_rate_results),
                    *(
                        device.flops_per_s.get(dtype, full) * device.compute_share / 1e9
                        for dtype in TYPES
                    ),
                ]
            )
        return np.array(rows, np.int64), np.array(rates)


def _axis(axis: Axis) -> tuple[int, ...]:
    """Return an axis map as numbers: kind, gathered, extent, stride, offset, window."""
    kind = _KINDS[type(axis)]
    if isinstance(axis, Affine):
        return kind, 0, axis.extent, axis.stride, axis.offset, axis.window
    gathered = isinstance(axis, Whole) and axis.gathered
    return kind, int(gathered), axis.extent, 1, 0, 1


def described(machine: Machine, number: int) -> Device:
    """Return the description of a machine's processor: shipped, or from its own figures.

    Raises:
        ParallelError: it is of an unknown kind and lacks its rate or its memory's.
    """
    processor = machine.processors[number]
    try:
        return Device.load(processor.kind)
    except DeviceError:
        memory = next(item for item in machine.memories if item.name == processor.memory)
        if not processor.flops or not memory.bytes_per_s:
            raise ParallelError(
                f"machine {machine.name!r}: processor {processor.name!r} of kind"
                f" {processor.kind!r} has flops {processor.flops} and its memory bytes_per_s"
                f" {memory.bytes_per_s}; both, or one of {', '.join(Device.shipped())}, needed"
            ) from None
        return Device(
            processor.kind,
            {"float32": processor.flops},
            memory.bytes_per_s,
            memory.capacity_bytes,
            1.0,
        )


__all__ = ["Model", "described", "prepare", "step_kind"]
