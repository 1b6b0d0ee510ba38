"""What operators and edges cost by themselves in every configuration: bytes and nanoseconds.

Cai et al., TensorOpt, section 2.1, equations 1 and 2, from the parts of the strategy simulator. The
time of an operator is that of a step of nothing else: its passes, the sums of its gradients, its
updates; the time of an edge that of its messages, forward and back. Nothing overlaps. An operator
holds its parameters, their gradients and the states of updates, and what it makes for the backward
pass; an edge holds the copies that another distribution of a value needs until then (in the paper
an edge holds nothing, which contradicts its tensor reuse, section 4.2). Bytes are those of the
memory that holds most, of all its devices together.

Executors here keep parameters and states whole in every memory. There a gradient lives until its
update, which follows at once, and is not counted unless it is a part of a sum of several.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from soapstone.ir.backward import backward
from soapstone.ir.configuration import Configuration
from soapstone.ir.graph import Graph, Node
from soapstone.ir.movement import Tiles
from soapstone.ir.reshards import layout_of
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.bounds.own import own_costs
from soapstone.search.parallel.exact.tables import Choices, Pair, Part, edges_of, relation
from soapstone.search.parallel.frontier.paths import Paths, Routed, routed
from soapstone.search.parallel.frontier.tables import INFEASIBLE
from soapstone.search.parallel.problem.arrays import BOX, Array, Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import entry, put
from soapstone.search.parallel.problem.geometry import settle, tile
from soapstone.search.parallel.problem.operators import Operator as Item
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation.liveness import whole_bytes
from soapstone.system import usable_cores


@dataclass(frozen=True)
class Own:
    """What an operator costs, a number a configuration, int64.

    Attributes:
        time: ns of both passes and all that its gradients and parameters need.
        compute: of them, ns of its tasks; the rest is network. ahead: of them, in the forward pass.
        fixed: bytes of parameters, gradients and states. kept: of what the backward pass reads, but
            what edges hold (`Moving.sole`); inner: of that, what no other operator reads.
        passes: whether an edge holds something that it makes.
    """

    time: Array
    compute: Array
    ahead: Array
    fixed: Array
    kept: Array
    inner: Array
    passes: bool


@dataclass(frozen=True)
class Moving:
    """What an edge costs, for pairs of layouts: (layouts of the maker, of the reader), int64.

    Attributes:
        mine, others: the layout of each configuration of the maker and of the reader.
        ahead, back: ns of messages forward, and of gradients back.
        copies: bytes of what is moved forward, where it is read.
        tile: bytes of it where it is made, by layout of the maker; passed: of that, what no
            backward pass reads; sole: what that of the reader alone does.
        whole: bytes of what is read, by layout of the reader, if that can be kept instead of what
            was made: nobody else reads it, and no element is there twice; else INFEASIBLE.
        again: whether the reader's backward pass reads what is moved.
        routed: ways in several steps, where they were looked for and some are shorter.
    """

    mine: Array
    others: Array
    ahead: Array
    back: Array
    copies: Array
    tile: Array
    passed: Array
    sole: Array
    whole: Array
    again: bool
    routed: Routed | None = None


@dataclass(frozen=True)
class Costs:
    """Costs of a model's operators that have a configuration of their own, and of its edges."""

    choices: Mapping[int, Choices]
    own: Mapping[int, Own]
    edges: Mapping[tuple[int, int], Moving]


def costs_of(model: Model, choices: Mapping[int, Choices], paths: bool = False) -> Costs:
    """Return what everything costs.

    Args:
        choices: configurations by operator; those of one class may be shared.
        paths: whether values may be moved in several steps.
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
        edges, ways = {}, dict[object, Future[Paths]]()
        for ends in edges_of(model) if paths else ():
            for spec in _moved(model, ends):
                if str(spec) not in ways:
                    ways[str(spec)] = pool.submit(Paths, model, spec)
        known = {key: found.result() for key, found in ways.items()}
        for ends in edges_of(model):
            kinds = _reads(model, ends, late, only)
            mine, others = (choices[op] for op in ends)
            key = relation(model, ends), id(mine), id(others), kinds
            if key not in tables:
                tables[key] = pool.submit(_moving, model, ends, mine, others, kinds, known)
            edges[ends] = tables[key]
        return Costs(
            choices,
            {op: found.result() for op, found in own.items()},
            {ends: found.result() for ends, found in edges.items()},
        )


# What is held


def keeping(graph: Graph) -> frozenset[str]:
    """Return the nodes of the backward pass that values are kept for: not updates, which read what
    is made in it, and flags."""
    late = backward(graph)
    return frozenset(name for name in late if not graph.by_name[name].spec.updates)


@dataclass(frozen=True)
class Held:
    """What an operator holds, as (place of the node in the operator, output, position).

    The place counts the nodes ahead, then those back.
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
    """Return what an operator holds.

    Args:
        late: nodes that values are kept for.
        first: the operator that is charged with each parameter.
        only: of values that one other operator reads alone, which.
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
    """Return the first operator that reads each parameter: the one that is charged with it."""
    found: dict[str, int] = {}
    for op, item in enumerate(model.operators):
        for node in item.ahead if item.source is None else ():
            for name in node.inputs:
                if model.graph.roles.get(name) is Role.PARAMETER:
                    found.setdefault(name, op)
    return found


def _only_readers(model: Model) -> dict[str, int]:
    """Return values of which one node of another operator's forward pass reads, and besides only
    that operator's backward pass; with that operator."""
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
    """Return the values that updates read: gradients, or parts of their sums.

    waiting: only those that wait for others.
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


@entry
def boxes_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    op: int,
    degrees: Array,
    placed: Array,
    operands: Array,
    out: Array,
) -> None:
    """Write the boxes of operands on devices in each configuration of one operator.

    Args:
        out: BOX (configurations, operands, devices); where there is none it is left as it is.
    """
    for row in range(degrees.shape[0]):
        c.operators[op] = degrees[row]
        put(c.placed[op], placed[row], placed.shape[1])
        for other in range(p.operators.shape[0]):
            settle(p, c, s, other)
        for i in range(operands.shape[0]):
            node = p.operands[operands[i]].node
            for point in range(c.nodes[node].points):
                device = c.placed[p.nodes[node].operator, c.node_at[node, point]]
                tile(p, c, operands[i], point, out[row, i, device], s.at)


def _boxes(part: Part, op: int, choices: Choices, operands: Sequence[int]) -> Array:
    """Return boxes (configurations, operands, devices), BOX; `high` is -1 where there is none."""
    p, held = part.model.problem, part.settled
    out = np.zeros((len(choices), len(operands), len(p.devices)), BOX)
    out["high"] = -1
    numbers = np.array(operands, np.int64)
    given = (op, choices.degrees, choices.placed, numbers, out)
    call(boxes_table, p, held.choice, held.scratch, *given)
    return out


def _operand(model: Model, node: Node, output: bool, position: int) -> int:
    """Return the number of an operand of a node."""
    number = next(i for i, each in enumerate(model.nodes) if each.name == node.name)
    begin = int(model.problem.nodes[number]["operands"]["begin"])
    return begin + position + (len(node.inputs) if output else 0)


def volumes(p: Problem, operand: int, boxes: Array) -> Array:
    """Return the bytes of boxes (configurations, devices) of an operand."""
    row = p.operands[operand]
    rank = int(row["axes"]["end"] - row["axes"]["begin"])
    sides = np.maximum(boxes["high"] - boxes["low"], 0)[..., :rank]
    there = boxes["high"][..., 0] >= 0
    found: Array = np.prod(sides, axis=-1) * there * int(row["element_bytes"])
    return found


def in_memories(p: Problem, operand: int, boxes: Array, parts: bool = False) -> Array:
    """Return the bytes of boxes (configurations, devices) in the memory of each device.

    parts: whether each is a part of a sum, and all are there; else what several devices of one
    memory have is there once.
    """
    memory = p.devices["memory"]
    found: Array = volumes(p, operand, boxes) @ (memory[:, None] == memory).astype(np.int64)
    return found if parts else found.clip(max=whole_bytes(p, operand))


def _own(model: Model, op: int, choices: Choices, has: Held) -> Own:
    small, costs = own_costs(model, [op], [choices])
    compute = costs.times.max(-1).sum(-1)
    part = Part(model, [op])
    p, item = part.model.problem, model.operators[op]
    nodes = (*item.ahead, *item.back)
    number = int(part.ops[0])

    def held(operands: list[int], parts: bool = False) -> Array:
        boxes = _boxes(part, number, choices, operands)
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
        fixed = gradients.max(-1) + sum(whole_bytes(p, each) for each in lasting)
    else:
        fixed = (held(lasting) + gradients).max(-1)
    first = {node.name for node in item.ahead}
    tasks = [task for task, (_, done) in enumerate(small.tasks) if done[0].name in first]
    ahead = (costs.times.max(-1) + costs.exchanges)[:, tasks].sum(-1)
    kept, inner = (held(numbers(each)).max(-1) for each in (has.kept, has.inner))
    return Own(costs.alone, compute, ahead, fixed, kept, inner, has.passes)


# What moves


@dataclass(frozen=True)
class Read:
    """Whether a pair's second reads backward what the first makes forward; and, of each result of
    the first: whether any backward pass reads it, and whether nobody but the second reads it;
    whether the gradient that the second makes is the one that the first reads."""

    again: bool
    late: tuple[bool, ...]
    only: tuple[bool, ...]
    gradient: bool


def _reads(
    model: Model, ends: tuple[int, int], late: Collection[str], only: Mapping[str, int]
) -> Read:
    first, second = (model.operators[op] for op in ends)
    made = [name for node in first.ahead for name in node.outputs]
    back = {name for node in second.back for name in node.inputs}
    return Read(
        not back.isdisjoint(made),
        tuple(_read_by(model.graph, (name,), late) for name in made),
        tuple(only.get(name) == ends[1] for name in made),
        any(gradients_between(first, second)),
    )


def gradients_between(first: Item, second: Item) -> Iterator[tuple[str, Node]]:
    """Yield what an operator's backward pass reads of another's, and the node that does."""
    made = {name for node in second.back for name in node.outputs}
    for node in first.back:
        for name in dict.fromkeys(node.inputs):
            if name in made:
                yield name, node


def _moved(model: Model, ends: tuple[int, int]) -> list[TensorSpec]:
    """Return what an operator's forward pass reads of another's."""
    first, second = (model.operators[op] for op in ends)
    made = {name for node in first.ahead for name in node.outputs}
    read = dict.fromkeys(name for node in second.ahead for name in node.inputs if name in made)
    return [model.graph.tensors[name] for name in read]


def _layouts(part: Part, op: int, choices: Choices, operands: Sequence[int]) -> tuple[Array, Array]:
    """Return the layout of each configuration, and a configuration of each layout."""
    if not operands:
        return np.zeros(len(choices), np.int64), np.zeros(1, np.int64)
    boxes = _boxes(part, op, choices, operands)
    flat = np.ascontiguousarray(boxes).reshape(len(choices), -1).view(np.int64)
    varies = np.ptp(flat, 0) > 0
    varies[0] = True
    flat = flat[:, varies]
    _, first, number = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    return number.reshape(-1).astype(np.int64), first


def _some(choices: Choices, rows: Array) -> Choices:
    return Choices(choices.degrees[rows].copy(), choices.placed[rows].copy())


def _moving(
    model: Model,
    ends: tuple[int, int],
    mine: Choices,
    others: Choices,
    kinds: Read,
    paths: Mapping[str, Paths],
) -> Moving:
    pair = Pair(model, ends)
    p = pair.model.problem
    values = pair.between["value"].tolist()
    sides: tuple[dict[int, None], dict[int, None]] = {}, {}
    for value in values:
        for side, operands in zip(sides, pair.operands(value)):
            side.update(dict.fromkeys(operands))
    layouts, first = zip(
        *(
            _layouts(pair, int(op), choices, list(operands))
            for op, choices, operands in zip(pair.ops, (mine, others), sides)
        )
    )
    few = _some(mine, first[0]), _some(others, first[1])
    between, times = pair.between, []
    for goes_back in (False, True):
        pair.between = between[between["back"].astype(bool) == goes_back]
        times.append(pair.moving(*few))
    count = len(first[0]), len(first[1])
    copies, whole = np.zeros(count, np.int64), np.zeros(count[1], np.int64)
    able = np.ones(count[1], np.bool_)
    tile, passed, sole = (np.zeros(count[0], np.int64) for _ in range(3))
    made = [name for node in model.operators[ends[0]].ahead for name in node.outputs]
    for value in {int(v) for v, back in zip(values, between["back"]) if not back}:
        written, read = _operands(pair, value)
        a, b = (
            _boxes(pair, int(op), each, [operand])[:, 0]
            for op, each, operand in zip(pair.ops, few, (written, read))
        )
        copies += _copies(p, value, read, a, b)
        mine_bytes = in_memories(p, written, a).max(-1)
        tile += mine_bytes
        number = made.index(pair.model.values[value])
        if not kinds.late[number]:
            passed += mine_bytes
        elif kinds.only[number]:
            sole += mine_bytes
        shape = pair.model.graph.tensors[pair.model.values[value]].shape
        able &= [kinds.only[number] and _layout(shape, each) is not None for each in b]
        whole += in_memories(p, read, b).max(-1)
    whole[~able] = INFEASIBLE
    ways = None
    specs = _moved(model, ends)
    if len(specs) == 1 and str(specs[0]) in paths:
        shape = specs[0].shape
        mine_layouts = [_layout(shape, each) for each in a]
        ways = routed(paths[str(specs[0])], mine_layouts, *times, kinds.gradient)
    sides = layouts[0], layouts[1], times[0], times[1]
    return Moving(*sides, copies, tile, passed, sole, whole, kinds.again, ways)


def _layout(shape: Sequence[int], boxes: Array) -> Configuration | None:
    """Return the layout of a value that has these boxes on devices, if there is one."""
    there = np.flatnonzero(boxes["high"][:, 0] >= 0) if len(shape) else np.zeros(0, np.int64)
    low, high = (boxes[side][there][:, : len(shape)] for side in ("low", "high"))
    return layout_of(shape, Tiles(low, high, there.tolist()))


def _operands(pair: Pair, value: int) -> tuple[int, int]:
    """Return the operands by which a pair's first makes a value, and its second reads it."""
    p = pair.model.problem
    written = int(p.writers[p.values[value]["writers"]["begin"]])
    read = next(
        int(operand)
        for operand in p.readers_of(value)["operand"]
        if p.nodes["operator"][p.operands["node"][operand]] == pair.ops[1]
    )
    return written, read


def _copies(p: Problem, value: int, read: int, a: Array, b: Array) -> Array:
    """Return bytes of what the second's devices read that the first left in other memories.

    a, b: boxes on devices where it is made and where it is read, by layout.
    """
    if len(np.unique(p.devices["memory"])) == 1:
        return np.zeros((len(a), len(b)), np.int64)
    rank = int(p.values[value]["rank"])
    nbytes = volumes(p, read, b)
    inside = np.ones((len(a), len(b), a.shape[1]), np.bool_)
    for axis in range(rank):
        inside &= a["low"][:, None, :, axis] <= b["low"][None, :, :, axis]
        inside &= a["high"][:, None, :, axis] >= b["high"][None, :, :, axis]
    found: Array = (nbytes[None] * ~inside).max(-1)
    return found
