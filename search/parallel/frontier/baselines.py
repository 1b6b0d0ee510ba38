"""Strategies of other methods, in the same space and at the same costs (TensorOpt, section 5.1).

Data parallelism is one strategy. ToFu's (Wang, Huang and Li, Supporting very large models using
automatic dataflow graph partitioning, 2019) is the one of least memory among those that split every
operator over all devices as far as it can be split. OptCNN's is the fast end of the frontier
itself. Mesh-TensorFlow (Shazeer et al., 2018) has one mesh for all operators, and splits a dim of
the model in the same way wherever it occurs; one axis may split different dims in different
operators.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from networkx.utils import UnionFind

from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.tables import Choices
from soapstone.search.parallel.frontier.algebra import reduce
from soapstone.search.parallel.frontier.costs import Costs
from soapstone.search.parallel.frontier.meshes import NO_DIM, Mesh, devices_of, meshes
from soapstone.search.parallel.frontier.tables import Problem
from soapstone.search.parallel.frontier.tracking import track
from soapstone.search.parallel.mcmc.initial import NAMED
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.prepare import Model

Rows = Mapping[int, int]  # the configuration of each operator, by number
MOST_AXES, MOST_NAMES = 2, 10  # of meshes of Mesh-TensorFlow, and of names that layouts give axes


def joined(
    model: Model, choices: Mapping[int, Choices], name: str
) -> tuple[dict[int, Choices], Rows]:
    """Return `choices` with a named strategy's configurations, and the rows of that strategy.

    Operators of one class keep having the same ones.
    """
    settled = Settled(model)
    settled.set(NAMED[name](model))
    c = settled.choice
    made = {id(each): each for each in choices.values()}
    rows = {}
    for op, each in choices.items():
        found = _row(made[id(each)], c.operators[op], c.placed[op])
        if found is None:
            now = made[id(each)]
            made[id(each)] = Choices(
                np.concatenate([now.degrees, c.operators[op : op + 1]]),
                np.concatenate([now.placed, c.placed[op : op + 1]]),
            )
            found = len(now)
        rows[op] = found
    return {op: made[id(each)] for op, each in choices.items()}, rows


def _row(choices: Choices, split: Any, placed: Array) -> int | None:
    points = int(split["points"])
    same = (choices.degrees["degrees"] == split["degrees"]).all(-1)
    same &= (choices.placed[:, :points] == placed[:points]).all(-1)
    same &= choices.degrees["replicated"] == split["replicated"]
    found = np.flatnonzero(same & (choices.degrees["points"] == points))
    return int(found[0]) if len(found) else None


def least_memory(costs: Costs, problem: Problem) -> Rows | None:
    """Return ToFu's strategy: the least memory among those that split each operator the most.

    Args:
        problem: memory is its first cost; no other is looked at.
    """
    kept = {}
    for op, each in costs.choices.items():
        points = each.degrees["points"]
        kept[op] = np.flatnonzero((points == points.max()) & (each.degrees["replicated"] == 0))
    found = track(only(problem, list(kept.values())))
    if not len(found):
        return None
    return {op: int(rows[at]) for (op, rows), at in zip(kept.items(), found[0].configurations)}


def only(problem: Problem, rows: Sequence[Array]) -> Problem:
    """Return the problem with only some configurations of each operator, and its first cost."""
    return replace(
        problem,
        operators=[
            replace(item, costs=item.costs[some][..., :1])
            for item, some in zip(problem.operators, rows)
        ],
        edges=[
            replace(
                edge,
                rows=edge.rows[rows[edge.writer]],
                columns=edge.columns[rows[edge.reader]],
                costs=edge.costs[..., :1],
            )
            for edge in problem.edges
        ],
        monoids=problem.monoids[:1],
    )


def one_mesh(model: Model, costs: Costs, problem: Problem) -> list[Rows]:
    """Return Mesh-TensorFlow's best trade-offs of memory and time, by ascending memory.

    A layout maps each named dim of the model to an axis of one mesh, or to none. All layouts of the
    names that index the most bytes are tried.

    Args:
        problem: of memory and time, an operator of it for each that has costs.
    """
    names, indexed = _names(model), Counter[int]()
    for op, mine in names.items():
        node = model.operators[op].node
        nbytes = sum(model.graph.tensors[name].nbytes for name in (*node.inputs, *node.outputs))
        indexed.update(dict.fromkeys({*mine} - {NO_DIM}, nbytes))
    ranked = [name for name, _ in indexed.most_common()]
    found: list[Rows] = []
    sums: list[Array] = []
    for mesh in meshes(len(model.problem.devices)):
        if len(mesh) <= MOST_AXES:
            for rows, total in _layouts(costs, problem, mesh, ranked, names):
                found.append(rows)
                sums.append(total)
    return [found[at] for at in reduce(np.array(sums).reshape(len(sums), 2))]


def _layouts(
    costs: Costs,
    problem: Problem,
    mesh: Mesh,
    ranked: Sequence[int],
    names: Mapping[int, Sequence[int]],
) -> Iterator[tuple[Rows, Array]]:
    """Yield the best layouts on a mesh: configurations, and their memory and time."""
    free, base = sorted(costs.own), len(mesh) + 1
    kind = {op: (id(costs.choices[op]), tuple(names[op])) for op in free}
    alike = {each: op for op, each in kind.items()}

    def table(op: int, known: Sequence[int]) -> tuple[list[int], Array]:
        mine = [name for name in dict.fromkeys(names[op]) if name in known]
        places = [names[op].index(name) for name in mine]
        return mine, _configurations(costs.choices[op], mesh, places)

    def splits(name: int) -> bool:
        some = [table(op, [name])[1] for op in alike.values() if name in names[op]]
        return bool((np.array(some)[:, 1:] >= 0).all(0).any())

    known = list(itertools.islice(filter(splits, ranked), MOST_NAMES))
    every = np.arange(base ** len(known))
    axes = {name: every // base**at % base for at, name in enumerate(known)}  # 0: none
    tables = {each: table(op, known) for each, op in alike.items()}

    def chosen(mine: Sequence[int], rows: Array) -> Array:
        found: Array = rows[sum((axes[name] * base**at for at, name in enumerate(mine)), 0 * every)]
        return found

    legal = np.ones(len(every), np.bool_)
    for each in tables.values():
        legal &= chosen(*each) >= 0
    axes, every = {name: each[legal] for name, each in axes.items()}, every[legal]
    found = {each: chosen(*given) for each, given in tables.items()}
    rows = [found[kind[op]] for op in free]
    total = np.zeros((len(every), 2), np.int64)
    for item, mine in zip(problem.operators, rows):
        total += item.costs[mine, 0]
    for edge in problem.edges:
        a, b = edge.rows[rows[edge.writer]], edge.columns[rows[edge.reader]]
        total += edge.costs[a, b, 0]
    for at in reduce(total):
        yield {op: int(mine[at]) for op, mine in zip(free, rows)}, total[at]


def _configurations(choices: Choices, mesh: Mesh, places: Sequence[int]) -> Array:
    """Return the configuration for each way to give the dims at some places axes, or -1.

    The axis of the first place changes first; none comes before the axes.
    """
    known = {
        (tuple(split["degrees"].tolist()), tuple(where[: split["points"]].tolist())): row
        for row, (split, where) in enumerate(zip(choices.degrees, choices.placed))
        if not split["replicated"]
    }
    found = []
    for axes in itertools.product(range(-1, len(mesh)), repeat=len(places)):
        degrees, split = [1] * len(choices.degrees["degrees"][0]), [NO_DIM] * len(mesh)
        used = [axis for axis in axes if axis >= 0]
        for place, axis in zip(reversed(places), axes):
            if axis >= 0:
                degrees[place], split[axis] = mesh[axis], place
        alone = len(used) == len(set(used))  # a tensor has no two dims on one axis
        found.append(known.get((tuple(degrees), devices_of(mesh, split)), -1) if alone else -1)
    return np.array(found)


def _names(model: Model) -> dict[int, list[int]]:
    """Return the name of each dim of each operator, NO_DIM of those that are not split.

    Dims have one name where one indexes what the other does, and where blocks repeat: where they
    are the same dims of the same classes of operators.
    """
    p, same = model.problem, UnionFind()
    for item in model.operators:
        for node in item.ahead if item.source is None else ():
            signature = model.graph.signature(node)
            operands = (*zip(node.inputs, signature.inputs), *zip(node.outputs, signature.outputs))
            for name, operand in operands:
                for place, axis in enumerate(operand.axes):
                    for dim in [dim for dim in axis.dims if signature.by_name[dim].extent > 1][:1]:
                        same.union((name, place), (node.name, dim))  # the outer one of a reshape
    found, places = {}, defaultdict(set)
    for op in p.free:
        node = model.operators[op].node
        found[op] = [same[node.name, dim.name] for dim in model.graph.signature(node).dims]
        for i, dim in enumerate(found[op]):
            places[dim].add((int(p.operators[op]["class_"]), i))
    numbers: dict[object, int] = {}
    return {
        op: [
            numbers.setdefault(frozenset(places[dim]), len(numbers))
            if p.operators[op]["splits"][i] and p.operators[op]["extent"][i] > 1
            else NO_DIM
            for i, dim in enumerate(dims)
        ]
        for op, dims in found.items()
    }
