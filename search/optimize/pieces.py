"""Division of large graphs into pieces, cut where few substitutions apply (MetaFlow, section 5).

A graph is cut in two at a minimum vertex cut, where the capacity of an operator is the number of
matches across it; both halves are cut again until pieces are small. Each piece is copied onto
leaves of its own, in order of occurrence, so equal pieces, such as the blocks of a deep network,
are one graph and are solved once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
from networkx.algorithms.flow import dinitz

from soapstone.ir.tensor import Role
from soapstone.search.optimize.pool import Application, Leaf, Pool

Values = tuple[int, ...]
Order = tuple[int, ...]  # of axes: the layout of a value
_SOURCE, _SINK = "source", "sink"


@dataclass(frozen=True)
class Piece:
    """Part of a graph: the values `outputs`, computed from `inputs`."""

    outputs: Values
    inputs: Values


def pieces(
    pool: Pool, outputs: Values, most: int, spans: Mapping[int, int], shift: float = 0.0
) -> list[Piece]:
    """Return the pieces of a graph in order, each of at most `most` operators if it can be cut.

    Args:
        spans: by value, the number of matches across it.
        shift: where cuts are sought: 0 in the middle, otherwise nearer to an end, so that the cuts
            of another division lie inside pieces.
    """
    every = [value for value in pool.order(outputs) if _is_operator(pool, value)]
    parts = [every]
    done: list[list[int]] = []
    while parts:
        part = parts.pop()
        halves = _halves(pool, part, spans, shift) if _count(pool, part) > most else None
        if halves is None:
            done.append(part)
        else:
            parts += reversed(halves)
    found = (piece_of(pool, part, outputs, every) for part in done)
    return [piece for piece in found if piece.outputs]


def piece_of(pool: Pool, part: Sequence[int], outputs: Values, operators: Iterable[int]) -> Piece:
    """Return part of a graph with its inputs; weights are computed in advance.

    Args:
        outputs, operators: of the whole graph.
    """
    inside = set(part)
    wanted = set(outputs)
    for value in operators:
        if value not in inside:
            wanted.update(pool.operands(value))
    read = dict.fromkeys(
        operand
        for value in part
        for operand in pool.operands(value)
        if operand not in inside and not pool.fixed[operand]
    )
    return Piece(tuple(value for value in part if value in wanted), tuple(read))


def _is_operator(pool: Pool, value: int) -> bool:
    return isinstance(pool.makers[value], Application) and not pool.fixed[value]


def _count(pool: Pool, part: Sequence[int]) -> int:
    return len({pool.makers[value] for value in part})


def _halves(
    pool: Pool, part: Sequence[int], spans: Mapping[int, int], shift: float
) -> tuple[list[int], list[int]] | None:
    """Return a part cut in two at its cheapest vertex cut; None if there is none.

    Cuts that leave less than a quarter on either side are not considered.
    """
    size = len(part)
    low, high = (math.floor(size * (bound + shift / 4)) for bound in (0.25, 0.75))
    first, last = set(part[: max(1, low)]), set(part[min(size - 1, high) :])
    network = nx.DiGraph()
    inside = set(part)
    for value in part:
        enter, leave = ("in", value), ("out", value)
        maker = pool.makers[value]
        assert isinstance(maker, Application)
        capacity = 1 + spans.get(value, 0) + (size if len(maker.outputs) > 1 else 0)
        network.add_edge(enter, leave, capacity=capacity)
        network.add_edge(leave, enter)  # without capacity: unlimited
        for operand in pool.operands(value):
            if operand in inside:
                network.add_edge(("out", operand), enter)
                network.add_edge(enter, ("in", operand))
        for sibling in maker.outputs:
            if sibling != value and sibling in inside:
                network.add_edge(enter, ("in", sibling))
        if value in first:
            network.add_edge(_SOURCE, enter)
        if value in last:
            network.add_edge(leave, _SINK)
    try:
        _, (near, _) = nx.minimum_cut(network, _SOURCE, _SINK, flow_func=dinitz)
    except nx.NetworkXUnbounded:
        return None
    before = [value for value in part if ("in", value) in near]
    after = [value for value in part if ("in", value) not in near]
    return (before, after) if before and after else None


def copied(pool: Pool, piece: Piece, layouts: Mapping[int, Order]) -> tuple[Values, dict[int, int]]:
    """Return the outputs of a piece on leaves of its own, and the value that each leaf stands for.

    Weights of one number are kept, since lowering reads them.
    """
    leaves: dict[int, int] = {}
    stands: dict[int, int] = {}

    def leaf(value: int) -> int:
        maker = pool.makers[value]
        weight = pool.fixed[value]
        known = weight and isinstance(maker, Leaf) and maker.contents is not None
        if known or (weight and pool.specs[value].size == 1):
            return value
        name = f"{'w' if weight else 'v'}{len(stands)}"
        role = Role.PARAMETER if weight else Role.INPUT
        called = f"piece {name}: {pool.specs[value]} {layouts.get(value, 'plain')}"
        made = pool.leaf(called, pool.specs[value], role, weight)
        stands[made] = value
        return made

    stop = frozenset(piece.inputs)
    for value in pool.order(piece.outputs, stop):
        maker = pool.makers[value]
        if value in stop or isinstance(maker, Leaf):
            leaves[value] = leaf(value)
    return moved(pool, piece.outputs, leaves), stands


def moved(pool: Pool, outputs: Sequence[int], where: Mapping[int, int]) -> Values:
    """Return values with some of their operands replaced."""
    new = dict(where)
    for value in pool.order(outputs, frozenset(where)):
        if value in new:
            continue
        maker = pool.makers[value]
        if isinstance(maker, Leaf):
            new[value] = value
            continue
        inputs = tuple(new[operand] for operand in maker.inputs)
        if inputs == maker.inputs:
            new[value] = value
        else:
            made = pool.apply_normal(maker.operator, maker.items, inputs, maker.name)
            new.update(zip(maker.outputs, made))
    return tuple(new[value] for value in outputs)
