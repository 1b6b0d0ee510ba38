"""What other methods find, in the same space and at the same costs (TensorOpt, section 5.1).

Data parallelism is one strategy, and ToFu's (Wang, Huang and Li, Supporting very large models using
automatic dataflow graph partitioning, 2019) another, of least memory, with all that can be split
split among all devices. OptCNN's is the fast end of the frontier itself. Mesh-TensorFlow
(Shazeer et al., 2018) has one mesh for all operators, and a dim of the model is split alike
wherever it occurs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from networkx.utils import UnionFind

from soapstone.ir.dims import Affine
from soapstone.search.parallel.exact.tables import Choices
from soapstone.search.parallel.frontier.costs import Costs
from soapstone.search.parallel.frontier.meshes import NO_DIM, devices_of, meshes
from soapstone.search.parallel.frontier.tables import Problem
from soapstone.search.parallel.frontier.tracking import track
from soapstone.search.parallel.mcmc.initial import NAMED
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.choice import Settled
from soapstone.search.parallel.problem.prepare import Model

Rows = Mapping[int, int]  # the configuration of each operator, by number
MOST_AXES, MOST_DIMS = 2, 12  # of meshes of Mesh-TensorFlow, and of dims: those that occur most


def joined(
    model: Model, choices: Mapping[int, Choices], name: str
) -> tuple[dict[int, Choices], Rows]:
    """Return configurations with those of a strategy that is known by name, and which these are.

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
    found = np.flatnonzero(same & (choices.degrees["points"] == points))
    return int(found[0]) if len(found) else None


def least_memory(costs: Costs, problem: Problem) -> Rows | None:
    """Return ToFu's strategy: of those that split each operator most, one of least memory.

    Args:
        problem: memory is its first cost; no other is looked at.
    """
    kept = {}
    for op, each in costs.choices.items():
        points = each.degrees["points"]
        kept[op] = np.flatnonzero(points == points.max())
    found = track(only(problem, list(kept.values())))
    if not len(found):
        return None
    return {op: int(rows[at]) for (op, rows), at in zip(kept.items(), found[0].configurations)}


def only(problem: Problem, rows: Sequence[Array]) -> Problem:
    """Return a problem with some configurations of each operator, and the first cost alone."""
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


def one_mesh(model: Model, costs: Costs) -> Iterator[Rows]:
    """Yield the strategies of Mesh-TensorFlow: one mesh, each of its axes for a dim of the model.

    Dims of operators are one dim of the model where one indexes what the other does.
    """
    known = _dims(model)
    often = Counter(dim for mine in known.values() for dim in mine if dim != NO_DIM)
    dims = [dim for dim, _ in often.most_common(MOST_DIMS)]
    places = {
        op: {
            (tuple(split["degrees"].tolist()), tuple(where[: split["points"]].tolist())): row
            for row, (split, where) in enumerate(zip(each.degrees, each.placed))
        }
        for op, each in costs.choices.items()
    }
    width = len(next(iter(costs.choices.values())).degrees["degrees"][0])
    for mesh in meshes(len(model.problem.devices)):
        if len(mesh) > MOST_AXES:
            continue
        for chosen in itertools.permutations([*dims, *[NO_DIM] * len(mesh)], len(mesh)):
            rows = {}
            for op, mine in known.items():
                split = [mine.index(dim) if dim in mine else NO_DIM for dim in chosen]
                degrees = [1] * width
                for axis, place in enumerate(split):
                    if place != NO_DIM:
                        degrees[place] = mesh[axis]
                row = places[op].get((tuple(degrees), devices_of(mesh, split)))
                if row is None:
                    break
                rows[op] = row
            else:
                yield rows


def _dims(model: Model) -> dict[int, list[int]]:
    """Return the dim of the model that each dim of an operator is."""
    same = UnionFind()
    for item in model.operators:
        for node in item.ahead if item.source is None else ():
            signature = model.graph.signature(node)
            operands = (*zip(node.inputs, signature.inputs), *zip(node.outputs, signature.outputs))
            for name, operand in operands:
                for place, axis in enumerate(operand.axes):
                    if isinstance(axis, Affine):
                        same.union((name, place), (node.name, axis.dim))
    numbers: dict[object, int] = {}
    found = {}
    for op in model.problem.free:
        node = model.operators[op].node
        row = model.problem.operators[op]
        found[op] = [
            numbers.setdefault(same[node.name, dim.name], len(numbers))
            if row["splits"][i]
            else NO_DIM
            for i, dim in enumerate(model.graph.signature(node).dims)
        ]
    return found
