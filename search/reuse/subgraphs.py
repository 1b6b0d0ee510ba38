"""Subgraphs above a node, their signatures, and tilings of a graph by frequent ones.

A graph here is a list of nodes in topological order, each of a kind, with operands. The subgraph of
a node and a depth has the node and what it is made of, as far as so many operators before it, by
the shortest way. It ends at *interfaces*: results that are read here in one way and there in
another, as what a function returns is; what it computes inside is always read alike. And it is cut
where it would not be convex: what is also reached through a node outside belongs to another.

Equivalence is of structure: kinds, which operand is which node's which result, what is shared.
Kinds contain types, so it is of shapes too where they do. A signature is 128 bits of that; where it
is found again the structure is compared.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, sections 4.2 to 4.7. Deviations: subgraphs have several results and end at
interfaces; of depths up to P_Depth the deepest frequent one is taken at each node, not one depth
for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

GIVEN = -1  # the maker of what no node makes
_CLASS_DEPTH = 3  # how far results of one class are made of the same
_SEVERAL = 0.1  # of the results of a class, read otherwise than most: it is an interface


@dataclass(frozen=True)
class Node:
    """One operator applied. operands: of each, its maker and which of its results it is.

    What no node makes has the maker `GIVEN` and a number of its own. Nodes of kind None are in no
    subgraph.
    """

    kind: Hashable
    operands: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Subgraph:
    """Nodes that belong together.

    Attributes:
        nodes: by number, in topological order. structure: equal for equal subgraphs: of each node
            its kind and operands, those from outside by the order of `inputs`.
        inputs: operands from outside, as nodes have them.
    """

    nodes: tuple[int, ...]
    structure: tuple[Hashable, ...]
    inputs: tuple[tuple[int, int], ...]


def subgraph(nodes: Sequence[Node], root: int, depth: int, ends: set[int]) -> Subgraph:
    """Return the subgraph of a node. ends: nodes that it may not have, but for the root."""
    chosen, level = {root}, [root]
    for _ in range(depth - 1):
        makers = dict.fromkeys(m for n in level for m, _ in nodes[n].operands if m != GIVEN)
        level = [
            m for m in makers if m not in chosen and m not in ends and nodes[m].kind is not None
        ]
        chosen.update(level)
    _make_convex(nodes, chosen)
    order = tuple(sorted(chosen))
    place = {node: number for number, node in enumerate(order)}
    inputs: dict[tuple[int, int], int] = {}
    structure = tuple(
        (
            nodes[n].kind,
            *(
                (place[maker], result)
                if maker in place
                else (GIVEN, inputs.setdefault((maker, result), len(inputs)))
                for maker, result in nodes[n].operands
            ),
        )
        for n in order
    )
    return Subgraph(order, structure, tuple(inputs))


def _make_convex(nodes: Sequence[Node], chosen: set[int]) -> None:
    """Leave out the nodes that are also reached through one outside."""
    first = min(chosen)
    pending = [m for n in chosen for m, _ in nodes[n].operands if m >= first and m not in chosen]
    outside = set(pending)
    while pending:
        for maker, _ in nodes[pending.pop()].operands:
            if maker >= first and maker not in outside:
                outside.add(maker)
                pending.append(maker)
    lost = chosen & outside
    chosen -= lost


def digest(structure: tuple[Hashable, ...]) -> bytes:
    """Return 128 bits of a structure."""
    return hashlib.blake2b(repr(structure).encode(), digest_size=16).digest()


class Interfaces:
    """Which results are read in several ways, by what they are made of.

    A result's class is its node's kind and those of what it is made of, three deep. A way to be
    read is which operands of which kinds of readers it is.
    """

    def __init__(self) -> None:
        self._classes: dict[Hashable, int] = {}
        self._ways: dict[int, dict[Hashable, int]] = {}  # how often, by class and way

    def _classes_of(self, nodes: Sequence[Node]) -> list[int]:
        """Return the class of each node."""
        known = self._classes
        made = [known.setdefault(node.kind, len(known)) for node in nodes]
        for _ in range(_CLASS_DEPTH - 1):
            before = made
            made = []
            for node in nodes:
                makers = [(before[m] if m != GIVEN else GIVEN, r) for m, r in node.operands]
                made.append(known.setdefault((node.kind, *_numbered(makers)), len(known)))
        return made

    def collect(self, nodes: Sequence[Node]) -> None:
        """Count how results are read."""
        ways: list[set[Hashable]] = [set() for _ in nodes]
        for node in nodes:
            for position, (maker, result) in enumerate(node.operands):
                if maker != GIVEN:
                    ways[maker].add((node.kind, position, result))
        for of, way in zip(self._classes_of(nodes), ways):
            counts = self._ways.setdefault(of, {})
            key = frozenset(way)
            counts[key] = counts.get(key, 0) + 1

    def among(self, nodes: Sequence[Node]) -> set[int]:
        """Return the nodes whose results are interfaces."""
        several = set()
        for of, counts in self._ways.items():
            often = sorted(counts.values())
            if len(often) > 1 and sum(often[:-1]) >= _SEVERAL * sum(often):
                several.add(of)
        return {number for number, of in enumerate(self._classes_of(nodes)) if of in several}


def _numbered(makers: Sequence[tuple[int, int]]) -> tuple[Hashable, ...]:
    """Return operands with those that are given known as that alone."""
    return tuple(GIVEN if of == GIVEN else (of, result) for of, result in makers)


class Frequencies:
    """How often structures occurred.

    Args:
        depth: of subgraphs, at most (P_Depth). least: occurrences that make one frequent (P_Freq).
        signature: of a structure; equal ones are told apart by their structures.
    """

    def __init__(
        self,
        depth: int,
        least: int,
        signature: Callable[[tuple[Hashable, ...]], bytes] = digest,
    ) -> None:
        self.depth = depth
        self.least = least
        self.interfaces = Interfaces()
        self._signature = signature
        self._counts: dict[bytes, list[tuple[tuple[Hashable, ...], int]]] = {}

    def count(self, structure: tuple[Hashable, ...]) -> int:
        """Return how often a structure occurred."""
        known = self._counts.get(self._signature(structure), ())
        return next((count for other, count in known if other == structure), 0)

    def add(self, structure: tuple[Hashable, ...]) -> None:
        """Count an occurrence."""
        known = self._counts.setdefault(self._signature(structure), [])
        for place, (other, count) in enumerate(known):
            if other == structure:
                known[place] = structure, count + 1
                return
        known.append((structure, 1))

    def collect(self, nodes: Sequence[Node]) -> None:
        """Count the subgraphs of all depths at the nodes where tiles of the greatest would be."""
        self.interfaces.collect(nodes)
        ends = self.interfaces.among(nodes)
        taken: set[int] = set()
        for root in range(len(nodes) - 1, -1, -1):
            if root not in taken and nodes[root].kind is not None:
                made = list(self._depths(nodes, root, ends))
                for one in made:
                    self.add(one.structure)
                taken.update(made[0].nodes if made else ())
                ends.update(taken)

    def _depths(self, nodes: Sequence[Node], root: int, ends: set[int]) -> Iterator[Subgraph]:
        """Yield the different subgraphs of a node with two nodes or more, the largest first."""
        size = 0
        for depth in range(self.depth, 1, -1):
            one = subgraph(nodes, root, depth, ends)
            if len(one.nodes) > 1 and (not size or len(one.nodes) < size):
                size = len(one.nodes)
                yield one

    def tiles(self, nodes: Sequence[Node]) -> list[Subgraph]:
        """Return subgraphs that have no node in common and can run one after the other.

        At each node that has no tile yet, from the last to the first, it is the largest frequent.
        """
        ends, taken = self.interfaces.among(nodes), set[int]()
        chosen: list[Subgraph] = []
        for root in range(len(nodes) - 1, -1, -1):
            if root not in taken and nodes[root].kind is not None:
                made = self._depths(nodes, root, ends)
                one = next((e for e in made if self.count(e.structure) >= self.least), None)
                if one is not None:
                    chosen.append(one)
                    taken.update(one.nodes)
                    ends.update(one.nodes)
        return _ordered(nodes, chosen)


def _ordered(nodes: Sequence[Node], tiles: Sequence[Subgraph]) -> list[Subgraph]:
    """Return the tiles without those that wait for each other."""
    owner = {node: number for number, tile in enumerate(tiles) for node in tile.nodes}
    graph = nx.DiGraph()
    for number, node in enumerate(nodes):
        own = owner.get(number, -1 - number)
        for maker, _ in node.operands:
            other = own if maker == GIVEN else owner.get(maker, -1 - maker)
            if other != own:
                graph.add_edge(other, own)
    tangled = {
        tile
        for group in nx.strongly_connected_components(graph)
        if len(group) > 1
        for tile in group
    }
    return [tile for number, tile in enumerate(tiles) if number not in tangled]


__all__ = ["GIVEN", "Frequencies", "Interfaces", "Node", "Subgraph", "digest", "subgraph"]
