"""The costs of operators and edges in every configuration, each alone: bytes and nanoseconds.

Cai et al., TensorOpt, section 2.1, equations 1 and 2, computed by parts of the strategy simulator.
The time of an operator is that of a step of this operator alone: forward and backward pass, the
reductions of its gradients and its updates. The time of an edge is that of its messages, forward
and back. Nothing overlaps. An operator's memory holds its parameters, their gradients, the state of
its optimizer, and the results that the backward pass reads. An edge's memory holds the copies that
resharding a value makes, until the backward pass has read them. (In the paper an edge holds
nothing, which contradicts its tensor reuse, section 4.2.) Bytes are those of the fullest memory.

On a measured machine, executors keep parameters and states whole in every memory and update as soon
as a gradient is there. So a gradient counts only if it is a partial sum, which waits for the other
parts; by then its operator has released what it kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.backward import backward
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.bounds.operator_costs import operator_costs
from soapstone.search.parallel.exact.tables import Choices, Part, edges_of, relation
from soapstone.search.parallel.frontier.boxes import boxes_of, in_memories
from soapstone.search.parallel.frontier.edges import Moving, moved_specs, moving_of, reads
from soapstone.search.parallel.frontier.paths import Paths
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation.liveness import whole_bytes
from soapstone.system import usable_cores


@dataclass(frozen=True)
class Own:
    """What an operator costs: (configurations,) int64 each.

    Attributes:
        time: ns of both passes, the reductions of gradients and the updates.
        compute: the part of `time` that its tasks take; the rest is communication.
        ahead: the part of `compute` that the forward pass takes.
        fixed: bytes of parameters, gradients and the optimizer's state.
        kept: bytes of results that the backward pass reads, without those that edges count
            (`Moving.sole`).
        inner: the part of `kept` that no other operator reads.
        waiting: bytes of partial gradients that take the place of `kept`; not part of `fixed`.
        passes: whether an edge counts something that this operator makes.
    """

    time: Array
    compute: Array
    ahead: Array
    fixed: Array
    kept: Array
    inner: Array
    waiting: Array
    passes: bool


@dataclass(frozen=True)
class Costs:
    """The costs of a model's edges, and of its operators that have their own configuration."""

    choices: Mapping[int, Choices]
    own: Mapping[int, Own]
    edges: Mapping[tuple[int, int], Moving]


def costs_of(model: Model, choices: Mapping[int, Choices], paths: bool = False) -> Costs:
    """Return the costs of all operators and edges of a model.

    Args:
        model: graph and machine, prepared for simulation.
        choices: the configurations of each operator; operators of one class may share them.
        paths: whether values may be resharded in several steps.
    """
    p, late = model.problem, keeping(model.graph)
    first, only = _first_readers(model), _only_readers(model)
    with ThreadPoolExecutor(usable_cores()) as pool:
        owns: dict[object, Future[Own]] = {}
        own = {}
        for op in p.free:
            held = held_by(model, op, late, first, only)
            key: object = (int(p.operators[op]["class_"]), id(choices[op]), held)
            if key not in owns:
                owns[key] = pool.submit(_own, model, op, choices[op], held)
            own[op] = owns[key]
        tables: dict[object, Future[Moving]] = {}
        edges, ways = {}, dict[str, Future[Paths]]()
        for ends in edges_of(model) if paths else ():
            for spec in moved_specs(model, ends):
                if str(spec) not in ways:
                    ways[str(spec)] = pool.submit(Paths, model, spec)
        known = {key: found.result() for key, found in ways.items()}
        for ends in edges_of(model):
            kinds = reads(model, ends, late, only)
            mine, others = (choices[op] for op in ends)
            key = relation(model, ends), id(mine), id(others), kinds
            if key not in tables:
                tables[key] = pool.submit(moving_of, model, ends, mine, others, kinds, known)
            edges[ends] = tables[key]
        return Costs(
            choices,
            {op: found.result() for op, found in own.items()},
            {ends: found.result() for ends, found in edges.items()},
        )


# What is held


def keeping(graph: Graph) -> frozenset[str]:
    """Return the backward pass's nodes for which forward values are kept.

    Updates are left out: they read flags, and what the backward pass itself makes.
    """
    late = backward(graph)
    return frozenset(name for name in late if not graph.by_name[name].spec.updates)


@dataclass(frozen=True)
class Held:
    """The values that an operator holds, each as (node, whether an output, position).

    A node is its place in the operator, which counts those of the forward pass, then the others.
    """

    kept: tuple[tuple[int, bool, int], ...]
    inner: tuple[tuple[int, bool, int], ...]
    parameters: tuple[tuple[int, bool, int], ...]
    gradients: tuple[tuple[int, bool, int], ...]
    states: bool
    passes: bool


def held_by(
    model: Model,
    op: int,
    late: Collection[str],
    first: Mapping[str, int],
    only: Mapping[str, int],
) -> Held:
    """Return the values that an operator holds for the backward pass.

    Args:
        late: the nodes for which values are kept (`keeping`).
        first: for each parameter, the operator to which its bytes are charged.
        only: for each value that only one other operator reads, that operator.
    """
    graph, item = model.graph, model.operators[op]
    kept, inner, parameters, gradients = [], [], {}, []
    passes = False
    mine = {node.name for node in (*item.ahead, *item.back)}
    for place, node in enumerate(item.ahead):
        viewed = node.spec.view is not None and _read_by(graph, node.inputs[:1], late)
        for position, name in enumerate(node.outputs):
            if not viewed and _read_by(graph, (name,), late):
                if name in only:
                    passes = True
                    continue
                kept.append((place, True, position))
                if all(node.name in mine for node in graph.consumers[name]):
                    inner.append(kept[-1])
        for position, name in enumerate(node.inputs):
            if graph.roles.get(name) is Role.PARAMETER and first[name] == op:
                parameters[name] = place, False, position
    summed = _summed(model, isinstance(model.machine, MeasuredMachine))
    for place, node in enumerate(item.back, len(item.ahead)):
        for position, name in enumerate(node.outputs):
            if name in summed:
                gradients.append((place, True, position))
    return Held(
        tuple(kept),
        tuple(inner),
        tuple(parameters.values()),
        tuple(gradients),
        bool(parameters),
        passes,
    )


def _read_by(graph: Graph, names: Iterable[str], late: Collection[str]) -> bool:
    return any(node.name in late for name in names for node in graph.consumers[name])


def _first_readers(model: Model) -> dict[str, int]:
    """Return the first operator that reads each parameter; it is charged with its bytes."""
    found: dict[str, int] = {}
    for op, item in enumerate(model.operators):
        for node in item.ahead if item.source is None else ():
            for name in node.inputs:
                if model.graph.roles.get(name) is Role.PARAMETER:
                    found.setdefault(name, op)
    return found


def _only_readers(model: Model) -> dict[str, int]:
    """Return the values that only one other operator reads, with that operator.

    One node of its forward pass reads them, and otherwise only its backward pass.
    """
    graph, found = model.graph, {}
    owner = {
        node.name: op
        for op, item in enumerate(model.operators)
        for node in (*item.ahead, *item.back)
    }
    free = set(model.problem.free)
    for op in free:
        for node in model.operators[op].ahead:
            for name in node.outputs if node.spec.view is None else ():
                readers = {owner.get(each.name, -1) for each in graph.consumers[name]}
                other = readers.pop() if len(readers) == 1 and name not in graph.outputs else op
                if other == op or other not in free:
                    continue
                ahead = [each for each in model.operators[other].ahead if name in each.inputs]
                if len(ahead) == 1 and ahead[0].spec.view is None:
                    found[name] = other
    return found


def _summed(model: Model, waiting: bool) -> set[str]:
    """Return the values that updates read: gradients, or their partial sums.

    waiting: only partial sums, which wait for the other parts.
    """
    found: set[str] = set()
    for item in model.operators:
        if item.source is not None:
            maker = model.graph.producers[item.source]
            if maker.operator == "accumulate":
                found.update(maker.inputs)
            elif not waiting:
                found.add(item.source)
    return found


def _operand(model: Model, node: Node, output: bool, position: int) -> int:
    """Return the number of an operand of a node."""
    number = next(i for i, each in enumerate(model.nodes) if each.name == node.name)
    begin = int(model.problem.nodes[number]["operands"]["begin"])
    return begin + position + (len(node.inputs) if output else 0)


def _own(model: Model, op: int, choices: Choices, has: Held) -> Own:
    small, costs = operator_costs(model, [op], [choices])
    compute = costs.times.max(-1).sum(-1)
    part = Part(model, [op])
    p, item = part.model.problem, model.operators[op]
    nodes = (*item.ahead, *item.back)
    number = int(part.ops[0])

    def held(operands: list[int], parts: bool = False) -> Array:
        boxes = boxes_of(part, number, choices, operands)
        nbytes = np.zeros((len(choices), len(p.devices)), np.int64)
        for i, operand in enumerate(operands):
            nbytes += in_memories(p, operand, boxes[:, i], parts)
        return nbytes

    def numbers(places: Iterable[tuple[int, bool, int]]) -> list[int]:
        return [_operand(part.model, nodes[i], output, at) for i, output, at in places]

    states = [
        _operand(part.model, each.node, True, position)
        for each in part.model.operators
        if each.source is not None and has.states
        for position in range(1, len(each.node.outputs))
    ]
    lasting = [*numbers(has.parameters), *states]
    here = isinstance(model.machine, MeasuredMachine)
    gradients = held(numbers(has.gradients), parts=not here)
    if here:
        waiting = gradients.max(-1)
        fixed = np.full_like(waiting, sum(whole_bytes(p, each) for each in lasting))
    else:
        fixed = (held(lasting) + gradients).max(-1)
        waiting = np.zeros_like(fixed)
    first = {node.name for node in item.ahead}
    tasks = [task for task, (_, done) in enumerate(small.tasks) if done[0].name in first]
    ahead = (costs.times.max(-1) + costs.exchanges)[:, tasks].sum(-1)
    kept, inner = (held(numbers(each)).max(-1) for each in (has.kept, has.inner))
    return Own(costs.alone, compute, ahead, fixed, kept, inner, waiting, has.passes)
