"""The devices of a machine, and the times of tasks on them: by rates, or as measured."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from soapstone.engine.mapper import backing_memories
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.exchanges import KINDS
from soapstone.search.cost.launches import work
from soapstone.search.cost.machine import Device, DeviceError, roofline
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.problem.arrays import (
    DEVICE,
    DEVICE_KIND,
    MOST_DIMS,
    MOST_EXPONENT,
    PROFILE,
    TYPES,
)
from soapstone.search.parallel.problem.numbering import Numbering
from soapstone.search.parallel.problem.operators import ParallelError


def step_kind(graph: Graph) -> str:
    """Return the key of the time of a step besides its tasks: the shapes of its inputs."""
    fed = sorted(str(graph.tensors[name]) for name in graph.inputs(Role.INPUT))
    return json.dumps(["step", fed])


def described(machine: Machine, number: int) -> Device:
    """Return the description of a machine's processor: a shipped one, or its own figures.

    Raises:
        ParallelError: an unknown kind of processor, without its rate or its memory's.
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


def devices_of(machine: Machine) -> tuple[Array, Array]:
    """Return `Problem.devices` and `kinds`."""
    kinds: dict[str, int] = {}
    devices = [described(machine, number) for number in range(len(machine.processors))]
    kind_of = [kinds.setdefault(device.name, len(kinds)) for device in devices]
    places = list(dict.fromkeys(processor.node for processor in machine.processors))
    capacity = {memory.name: memory.capacity_bytes for memory in machine.memories}
    takes = isinstance(machine, MeasuredMachine)  # its executors' workers do
    memories = _memories(machine)
    rows = [
        (
            *(places.index(each.node), kind, memories.index(each.memory)),
            *(capacity[each.memory], takes),
        )
        for each, kind in zip(machine.processors, kind_of)
    ]
    rates = []
    for kind in range(len(kinds)):
        device = devices[kind_of.index(kind)]
        known = [dtype if dtype in device.flops_per_s else "float32" for dtype in TYPES]
        flops = [device.product_rate(dtype) / 1e9 for dtype in known]
        full = float(device.full_rate_results)
        rates.append((device.memory_rate / 1e9, device.launch_us * 1e3, full, flops))
    return np.array(rows, DEVICE), np.array(rates, DEVICE_KIND)


def _memories(machine: Machine) -> list[str]:
    """Return the memories in which processors work."""
    return list(dict.fromkeys(each.memory for each in machine.processors))


def profile_of(machine: Machine) -> Array:
    """Return `Problem.messages`: the measured times of messages among the ranks of a machine."""
    if not isinstance(machine, MeasuredMachine):
        return np.zeros(0, PROFILE)
    number = {name: place for place, name in enumerate(_memories(machine))}
    names = [memory.name for memory in machine.memories]
    rows = []
    for each in machine.messages.measured:
        members = sum(1 << number[names[member]] for member in each.members)
        ns = [machine.messages.ns(each, 1 << exponent) for exponent in range(MOST_EXPONENT)]
        rows.append((KINDS.index(each.kind), members, ns))
    return np.array(rows, PROFILE)


def read_ns(graph: Graph, machine: Machine) -> Array:
    """Return the additional time of a byte that another device of the same memory has made."""
    memory = np.array([processor.memory for processor in machine.processors])
    one = (memory[:, None] == memory) & ~np.eye(len(memory), dtype=bool)
    if not isinstance(machine, MeasuredMachine):
        return np.zeros(one.shape)
    step = machine.times.step(step_kind(graph))
    return np.where(one, step.ns_per_byte, 0.0)


def cross_links(
    n: Numbering, machine: Machine, nodes: Array, flops: Array, away: frozenset[str]
) -> None:
    """Set the times of copies to and from backing memories to those of their slowest links."""
    for number, node in enumerate(n.nodes):
        if not away.isdisjoint((*node.inputs, *node.outputs)):
            nodes[number]["crosses"] = True
            flops[number] = crossing_ns(machine, n.graph.tensors[node.outputs[0]].nbytes)


def crossing_ns(machine: Machine, nbytes: Any) -> Any:
    """Return the time of bytes to a backing memory or back, on the slowest of the links."""
    by_ends = {(link.source, link.target): link.bytes_per_s for link in machine.links}
    slowest = min(
        by_ends.get(ends, math.inf)
        for near, far in backing_memories(machine).items()
        for ends in ((near, far), (far, near))
    )
    return nbytes / slowest * 1e9


def times_of(
    n: Numbering, machine: Machine, nodes: Array, flops: Array, tasks: Array, rates: Array
) -> tuple[Array, Array, Array, list[str]]:
    """Return `Problem.times`, `begin_ns`, `slower`, and `Model.kinds`; set the ranges of tasks."""
    devices = len(machine.processors)
    tasks["scale"] = 1000
    if not isinstance(machine, MeasuredMachine):
        none = np.zeros(1, np.int64)
        return np.zeros((0, MOST_DIMS + devices), np.int64), none, none, []
    rows: list[list[int]] = []
    ranges: dict[str, tuple[int, int]] = {}
    kinds = [_kind(n, nodes, task) for task in range(len(n.tasks))]
    for kind in dict.fromkeys(kinds):
        begin = len(rows)
        for degrees, points_ns in machine.times.of(kind).items():
            ones, room = (1,) * (MOST_DIMS - len(degrees)), (0,) * (devices - len(points_ns))
            rows.append([*degrees, *ones, *points_ns, *room])
        ranges[kind] = begin, len(rows)
    for task, kind in enumerate(kinds):
        tasks[task]["times"] = ranges[kind]
        whole = next((t for d, t in machine.times.of(kind).items() if max(d, default=1) == 1), None)
        if whole is not None:
            tasks[task]["scale"] = 1000 * whole[0] / _roofline_ns(n, task, nodes, flops, rates)
    step = machine.times.step(step_kind(n.graph))
    begin_ns = np.array([round(step.begin_ns)], np.int64)
    slower = np.array([round(1000 * step.slower)], np.int64)
    return np.array(rows, np.int64).reshape(-1, MOST_DIMS + devices), begin_ns, slower, kinds


def _roofline_ns(n: Numbering, task: int, nodes: Array, flops: Array, rates: Array) -> float:
    """Return the time of a task in one piece by the roofline of the first device."""
    total, first = 0.0, rates[0]
    for node in n.tasks[task][1]:
        number = n.number[node.name]
        if not nodes[number]["is_view"]:
            _, nbytes = work(n.graph, node)
            rate = first["rates"][nodes[number]["rate"]]
            busy = roofline(flops[number], rate, 1.0, 1.0, nbytes, first["memory_rate"])
            total += first["launch_ns"] + busy
    return max(total, 1.0)


def _kind(n: Numbering, nodes: Array, task: int) -> str:
    """Return the class of a task: its nodes, their operands, and the operator of their dims."""
    op, mine = n.tasks[task]
    item = n.operators[op]
    made = {name: i for i, node in enumerate(mine) for name in node.outputs}
    said: list[Any] = []
    for node in mine:
        row = nodes[n.number[node.name]]
        operands = [
            [str(n.graph.tensors[name]), made.get(name, -1), str(n.graph.roles.get(name))]
            for name in node.inputs
        ]
        dims = row["follows"][: row["dims"]].tolist()
        said.append([node.operator, node.items, operands, dims])
    dims = [[dim.name, dim.extent] for dim in n.graph.signature(item.node).dims]
    return json.dumps([said, dims, item.source is None], default=str)
