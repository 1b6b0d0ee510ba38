"""Subgraphs above a node, their signatures, and tilings of a graph by frequent ones.

A graph here is a list of nodes in topological order, each of a kind, with operands. The *subgraph*
of a root and a depth contains the root and the operators from which it is reached in so many steps,
by the shortest path. It ends at *interfaces*: results that are read in different ways at different
places, like what a function returns; what a function computes inside is always read in one way. The
subgraph is made convex: a node that also leads to the root through a node outside is left out.

Subgraphs are equivalent if their *structures* are equal: the kinds of nodes, which result of which
node each operand is, and what is shared. Kinds may contain types, and then shapes must be equal,
too. Structures are looked up by a hash of 64 bits, their *signature*, and then compared.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, sections 4.2 to 4.7. Deviations: subgraphs have several results and end at
interfaces; of depths up to P_Depth the deepest frequent one is taken at each node, not one depth
for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import networkx as nx
import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.reuse.cover import (
    GIVEN,
    Links,
    Table,
    classes,
    covered,
    enter,
    occurring,
    one,
    ordered,
    ways,
)

_SEVERAL = 0.1  # of the results of a class, read otherwise than most: it is an interface


@dataclass(frozen=True)
class Node:
    """An application of an operator.

    kind: equal for nodes that may be run alike; None: the node joins no subgraph. operands: for
    each, the node that makes it and which of its results it is. An operand that no node makes has
    the maker `GIVEN` and a number of its own.
    """

    kind: Hashable
    operands: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Subgraph:
    """A subgraph of a graph.

    Attributes:
        nodes: the numbers of its nodes, in topological order.
        structure: equal for equivalent subgraphs: the kind and the operands of each node, in which
            operands from outside are numbered in the order of `inputs`.
        inputs: the operands from outside, as nodes have them.
    """

    nodes: tuple[int, ...]
    structure: tuple[Hashable, ...]
    inputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tiling:
    """Disjoint subgraphs (tiles) of a graph, which can run one after another.

    Attributes:
        structures: the number of each tile's structure.
        nodes: int64, the nodes of all tiles; first: where each tile's begin.
        inputs: the operands of the graph that are tiles' inputs; given: where each tile's begin.
        owner: the tile of each node; a node in none has a number of its own, after those of tiles.
        order: the order in which tiles and these single nodes can run.
    """

    structures: Array
    nodes: Array
    first: Array
    inputs: Array
    given: Array
    owner: Array
    order: Array


class Kinds:
    """Numbers the kinds of nodes."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.kinds: list[Hashable] = []

    def number(self, kind: Hashable) -> int:
        """Return the number of a kind, -1 of None."""
        if kind is None:
            return -1
        known = self._numbers.setdefault(kind, len(self.kinds))
        if known == len(self.kinds):
            self.kinds.append(kind)
        return known

    def links(self, nodes: Sequence[Node]) -> Links:
        """Return nodes as arrays."""
        firsts = [0, *(len(node.operands) for node in nodes)]
        operands = np.array([o for node in nodes for o in node.operands], np.int64).reshape(-1, 2)
        kinds = np.array([self.number(node.kind) for node in nodes], np.int64)
        makers, results = operands.T.copy()
        return Links(kinds, np.cumsum(firsts), makers, results)

    def structure(self, words: Sequence[int]) -> tuple[Hashable, ...]:
        """Return a structure as `Subgraph` has it. words: the structure as arrays have it."""
        made, at = list[Hashable](), 0
        while at < len(words):
            end = at + 2 + 2 * words[at + 1]
            made.append(
                (
                    self.kinds[words[at]] if words[at] >= 0 else None,
                    *zip(words[at + 2 : end : 2], words[at + 3 : end : 2]),
                )
            )
            at = end
        return tuple(made)

    def words(self, structure: tuple[Any, ...]) -> Array:
        """Return a structure as arrays have it: the inverse of `structure`."""
        made: list[int] = []
        for kind, *operands in structure:
            made += [self.number(kind), len(operands), *chain.from_iterable(operands)]
        return np.array(made, np.int64)


def subgraph(nodes: Sequence[Node], root: int, depth: int, ends: set[int]) -> Subgraph:
    """Return the subgraph of a root to a depth. ends: nodes it may not contain but as the root."""
    kinds = Kinds()
    links = kinds.links(nodes)
    at_end = np.zeros(len(nodes), np.bool_)
    at_end[list(ends)] = True
    chosen, words, inputs = one(links, root, depth, at_end)
    return _written(links, chosen, kinds.structure(words.tolist()), inputs)


def _written(
    links: Links, nodes: Array, structure: tuple[Hashable, ...], inputs: Array
) -> Subgraph:
    pairs = zip(links.makers[inputs].tolist(), links.results[inputs].tolist())
    return Subgraph(tuple(nodes.tolist()), structure, tuple(pairs))


class Interfaces:
    """Finds interfaces: the classes of results that are read in several ways.

    A result's class is its node's kind and those of its operands, three deep. The way in which it
    is read is the set of its readers' kinds, with the operand that it is to each.
    """

    def __init__(self) -> None:
        self._ways: dict[int, dict[int, int]] = {}  # how often, by class and way
        self._several = np.zeros(0, np.int64)

    def collect(self, links: Links) -> None:
        """Count how results are read."""
        pairs = zip(classes(links).tolist(), ways(links).tolist())
        for of, way in pairs:
            counts = self._ways.setdefault(of, {})
            counts[way] = counts.get(way, 0) + 1
        several = []
        for of, counts in self._ways.items():
            often = sorted(counts.values())
            if len(often) > 1 and sum(often[:-1]) >= _SEVERAL * sum(often):
                several.append(of)
        self._several = np.array(several, np.int64)

    def among(self, links: Links) -> Array:
        """Return which nodes' results are interfaces: bool (nodes,)."""
        return np.isin(classes(links), self._several)


class Frequencies:
    """Counts how often structures occur in graphs, and tiles graphs by the frequent ones.

    Graphs are given as nodes, or as `Links`, whose kinds the caller has numbered.

    Args:
        depth: the greatest depth of subgraphs (P_Depth of Liu).
        least: how many occurrences make a structure frequent (P_Freq).
        bits: the length of signatures; structures with equal ones are compared.
    """

    def __init__(self, depth: int, least: int, bits: int = 64) -> None:
        self.depth = depth
        self.least = least
        self.interfaces = Interfaces()
        self._mask = (1 << bits) - 1 if bits < 64 else -1
        self._kinds = Kinds()
        self._counts: dict[bytes, int] = {}
        self._table: Table | None = None

    def count(self, structure: tuple[Hashable, ...]) -> int:
        """Return how often a structure occurred."""
        return self._counts.get(self._kinds.words(structure).tobytes(), 0)

    def add(self, structure: tuple[Hashable, ...]) -> None:
        """Count an occurrence."""
        self._add(self._kinds.words(structure).tobytes())

    def _add(self, words: bytes) -> None:
        self._counts[words] = self._counts.get(words, 0) + 1
        self._table = None

    def collect(self, nodes: Sequence[Node] | Links) -> None:
        """Count the subgraphs of all depths at the roots of a tiling by the deepest ones."""
        links = nodes if isinstance(nodes, Links) else self._kinds.links(nodes)
        self.interfaces.collect(links)
        words, firsts = occurring(links, self.interfaces.among(links), self.depth)
        for first, end in zip(firsts.tolist(), firsts[1:].tolist()):
            self._add(words[first:end].tobytes())

    def tiles(self, nodes: Sequence[Node]) -> list[Subgraph]:
        """Return the subgraphs of a tiling; see `tiling`."""
        links = self._kinds.links(nodes)
        made = self.tiling(links)
        return [
            _written(
                links,
                made.nodes[made.first[tile] : made.first[tile + 1]],
                self._kinds.structure(self.structure(number)),
                made.inputs[made.given[tile] : made.given[tile + 1]],
            )
            for tile, number in enumerate(made.structures.tolist())
        ]

    def structure(self, number: int) -> list[int]:
        """Return the words of a structure by its number.

        For each node these are its kind, its number of operands, and for each operand its maker's
        place in the structure and which result it is, or `GIVEN` and the number of the input.
        """
        table = self._entered()
        words: list[int] = table.store[table.firsts[number] : table.firsts[number + 1]].tolist()
        return words

    def tiling(self, links: Links) -> Tiling:
        """Return a tiling: at each node not yet in a tile, from the last, the largest frequent one.

        Tiles that would wait for each other are left out.
        """
        ends = self.interfaces.among(links)
        structures, nodes, first, inputs, given = covered(
            links, ends, self.depth, self._entered(), self._mask
        )
        while True:
            count = len(structures)
            owner = np.full(len(links.kinds), -1, np.int64)
            owner[nodes] = np.repeat(np.arange(count), np.diff(first))
            loose = owner < 0
            owner[loose] = count + np.arange(np.count_nonzero(loose))
            order = ordered(links, owner, count)
            if len(order) == count + np.count_nonzero(loose):
                return Tiling(structures, nodes, first, inputs, given, owner, order)
            tangled = _tangled(links, owner)
            kept = np.array([tile not in tangled for tile in range(count)], np.bool_)
            nodes = nodes[np.repeat(kept, np.diff(first))]
            inputs = inputs[np.repeat(kept, np.diff(given))]
            first, given = (np.cumsum([0, *np.diff(each)[kept]]) for each in (first, given))
            structures = structures[kept]

    def _entered(self) -> Table:
        """Return all structures in a table."""
        if self._table is None:
            store = np.frombuffer(b"".join(self._counts), np.int64)
            firsts = np.cumsum([0, *(len(words) // 8 for words in self._counts)])
            slots = np.full(1 << (2 * len(self._counts) + 1).bit_length(), -1, np.int64)
            frequent = np.array([n >= self.least for n in self._counts.values()], np.bool_)
            self._table = Table(slots, firsts, store, frequent)
            enter(self._table, self._mask)
        return self._table


def _tangled(links: Links, owner: Array) -> set[int]:
    """Return the tiles that wait for each other."""
    own = np.repeat(owner, np.diff(links.first))
    inside = links.makers != GIVEN
    edges = zip(owner[links.makers[inside]].tolist(), own[inside].tolist())
    graph = nx.DiGraph((maker, reader) for maker, reader in edges if maker != reader)
    groups = nx.strongly_connected_components(graph)
    return {tile for group in groups if len(group) > 1 for tile in group}
