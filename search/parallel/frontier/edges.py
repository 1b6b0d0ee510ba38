"""The communication between two operators for all pairs of layouts: bytes and nanoseconds.

The *maker* writes a value in its layout, the *reader* reads it in its own, and what differs is
moved. On a described machine a copy is held for as long as it is read. On a measured one, whose
executors keep one instance of a value in each memory, the instance holds all of the value that is
used there, for as long as any of it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.ir.graph import Node
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.exact.tables import Choices, Pair, Part
from soapstone.search.parallel.frontier.boxes import (
    boxes_of,
    grown,
    in_memories,
    layout_in,
    volumes,
)
from soapstone.search.parallel.frontier.paths import Paths, Routed, routed
from soapstone.search.parallel.frontier.tables import INFEASIBLE
from soapstone.search.parallel.problem.arrays import Problem
from soapstone.search.parallel.problem.prepare import Model


@dataclass(frozen=True)
class Moving:
    """What an edge costs: (layouts of the maker, of the reader) int64, unless said otherwise.

    Attributes:
        mine, others: (configurations,), the layout of each configuration of maker and reader.
        ahead, back: ns of the messages forward, and of those of the gradient back.
        copies: bytes of the copies that the reader gets in the forward pass.
        stays: the part of `copies` that stays as long as the original, whoever reads it.
        tile: (layouts of the maker,), bytes of the value where it is made.
        passed: the part of `tile` that no backward pass reads.
        sole: the part of `tile` that only the reader's backward pass reads.
        whole: (layouts of the reader,), bytes of the value where it is read, if these copies can be
            kept instead of the original: nobody else reads it, and no element has two copies.
            Otherwise INFEASIBLE.
        again: whether the reader's backward pass reads the value, too.
        routed: paths of several steps, if they were asked for and some are faster.
    """

    mine: Array
    others: Array
    ahead: Array
    back: Array
    copies: Array
    stays: Array
    tile: Array
    passed: Array
    sole: Array
    whole: Array
    again: bool
    routed: Routed | None = None


@dataclass(frozen=True)
class Read:
    """How the reader of an edge uses what the maker writes.

    Attributes:
        again: whether the reader's backward pass reads what the maker's forward pass makes.
        late: for each result of the maker, whether any backward pass reads it.
        only: for each result of the maker, whether only the reader reads it.
        gradient: whether the gradient that the reader makes is the one that the maker reads.
    """

    again: bool
    late: tuple[bool, ...]
    only: tuple[bool, ...]
    gradient: bool


def reads(
    model: Model, ends: tuple[int, int], late: Collection[str], only: Mapping[str, int]
) -> Read:
    """Return how the reader, the second of `ends`, uses what the maker, the first, writes.

    Args:
        late: nodes that values are kept for. only: of values that one operator reads alone, which.
    """
    first, second = (model.operators[op] for op in ends)
    made = [name for node in first.ahead for name in node.outputs]
    back = {name for node in second.back for name in node.inputs}
    return Read(
        not back.isdisjoint(made),
        tuple(any(each.name in late for each in model.graph.consumers[name]) for name in made),
        tuple(only.get(name) == ends[1] for name in made),
        any(between(second.back, first.back)),
    )


def between(makers: Sequence[Node], readers: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    """Yield what some nodes read of what others make, and the node that does."""
    made = {name for node in makers for name in node.outputs}
    for node in readers:
        for name in dict.fromkeys(node.inputs):
            if name in made:
                yield name, node


def moved_specs(model: Model, ends: tuple[int, int]) -> list[TensorSpec]:
    """Return the types of the values that the second's forward pass reads of the first's."""
    first, second = (model.operators[op] for op in ends)
    names = dict.fromkeys(name for name, _ in between(first.ahead, second.ahead))
    return [model.graph.tensors[name] for name in names]


def _layouts(part: Part, op: int, choices: Choices, operands: Sequence[int]) -> tuple[Array, Array]:
    """Return the layout of each configuration, and a configuration of each layout."""
    if not operands:
        return np.zeros(len(choices), np.int64), np.zeros(1, np.int64)
    boxes = boxes_of(part, op, choices, operands)
    flat = np.ascontiguousarray(boxes).reshape(len(choices), -1).view(np.int64)
    varies = np.ptp(flat, 0) > 0
    varies[0] = True
    copies = choices.degrees["replicated"] > 0  # or else such tiles may be parts of sums
    flat = np.column_stack([flat[:, varies], copies])
    _, first, number = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    return number.reshape(-1).astype(np.int64), first


def _some(choices: Choices, rows: Array) -> Choices:
    return Choices(choices.degrees[rows].copy(), choices.placed[rows].copy())


def moving_of(
    model: Model,
    ends: tuple[int, int],
    mine: Choices,
    others: Choices,
    kinds: Read,
    paths: Mapping[str, Paths],
) -> Moving:
    """Return what an edge costs for all pairs of layouts of its maker and its reader.

    Args:
        mine, others: the configurations of the maker and of the reader.
        kinds: how the reader uses what the maker writes (`reads`).
        paths: by a value's type, its shortest paths of several steps; empty: one step each.
    """
    pair = Pair(model, ends)
    p = pair.model.problem
    ahead, back = pair.moved
    sides: tuple[dict[int, None], dict[int, None]] = {}, {}
    for value in (*ahead, *back):
        for side, operands in zip(sides, pair.operands(value)):
            side.update(dict.fromkeys(operands))
    layouts, first = zip(
        *(
            _layouts(pair, int(op), choices, list(operands))
            for op, choices, operands in zip(pair.ops, (mine, others), sides)
        )
    )
    few = _some(mine, first[0]), _some(others, first[1])
    times = [pair.moving(*few, values) for values in pair.moved]
    count = len(first[0]), len(first[1])
    copies, stays = (np.zeros(count, np.int64) for _ in range(2))
    whole = np.zeros(count[1], np.int64)
    able = np.ones(count[1], np.bool_)
    tile, passed, sole = (np.zeros(count[0], np.int64) for _ in range(3))
    made = [name for node in model.operators[ends[0]].ahead for name in node.outputs]
    for value in ahead:
        written, read = _operands(pair, value)
        a, b = (
            boxes_of(pair, int(op), each, [operand])[:, 0]
            for op, each, operand in zip(pair.ops, few, (written, read))
        )
        number = made.index(pair.model.values[value])
        if isinstance(model.machine, MeasuredMachine):
            more = grown(p, read, a, b)
            stays += more * kinds.late[number]
        else:
            more = _copies(p, value, read, a, b)
        copies += more
        mine_bytes = in_memories(p, written, a).max(-1)
        tile += mine_bytes
        if not kinds.late[number]:
            passed += mine_bytes
        elif kinds.only[number]:
            sole += mine_bytes
        shape = pair.model.graph.tensors[pair.model.values[value]].shape
        able &= [kinds.only[number] and layout_in(shape, each) is not None for each in b]
        whole += in_memories(p, read, b).max(-1)
    whole[~able] = INFEASIBLE
    ways = None
    specs = moved_specs(model, ends)
    if len(specs) == 1 and str(specs[0]) in paths:
        shape = specs[0].shape
        there = [layout_in(shape, each) for each in a]
        ways = routed(paths[str(specs[0])], there, times[0], times[1], kinds.gradient)
    return Moving(
        mine=layouts[0],
        others=layouts[1],
        ahead=times[0],
        back=times[1],
        copies=copies,
        stays=stays,
        tile=tile,
        passed=passed,
        sole=sole,
        whole=whole,
        again=kinds.again,
        routed=ways,
    )


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
