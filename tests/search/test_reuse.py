"""Frequent subgraphs: convex, told apart by structure, and tilings that can run."""

from collections.abc import Sequence
from itertools import count

import networkx as nx
import numpy as np
import pytest

from soapstone.search.reuse.cover import GIVEN
from soapstone.search.reuse.subgraphs import Frequencies, Node, subgraph


def drawn(seed: int, size: int = 40) -> list[Node]:
    random = np.random.default_rng(seed)
    nodes: list[Node] = []
    for number in range(size):
        operands = []
        for _ in range(int(random.integers(1, 3))):
            low = max(-1, number - 8)
            maker = int(random.integers(low, number)) if number else GIVEN
            operands.append((maker, 0) if maker >= 0 else (GIVEN, int(random.integers(4))))
        kind = None if random.random() < 0.1 else "abc"[int(random.integers(3))]
        nodes.append(Node(kind, tuple(operands)))
    return nodes


def graph_of(nodes: Sequence[Node]) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from((m, n) for n, node in enumerate(nodes) for m, _ in node.operands if m >= 0)
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_subgraphs_are_convex_and_no_deeper_than_asked(seed: int) -> None:
    nodes = drawn(seed)
    graph = graph_of(nodes)
    for root in range(len(nodes)):
        for depth in (1, 2, 5):
            found = set(subgraph(nodes, root, depth, set()).nodes)
            assert root in found
            back = nx.single_source_shortest_path_length(graph.reverse(), root)
            assert all(back[node] < depth for node in found)
            for outside in set(graph) - found:
                above = nx.descendants(graph, outside) & found
                below = nx.ancestors(graph, outside) & found
                assert not (above and below)


@pytest.mark.parametrize("seed", range(30))
def test_tiles_have_no_node_in_common_and_can_run(seed: int) -> None:
    nodes = drawn(seed, 120)
    counts = Frequencies(depth=6, least=2)
    counts.collect(nodes)
    tiles = counts.tiles(nodes)
    taken = [node for tile in tiles for node in tile.nodes]
    assert len(taken) == len(set(taken))
    assert all(nodes[node].kind is not None for node in taken)
    assert all(counts.count(tile.structure) >= 2 for tile in tiles)
    owner = {node: ("tile", number) for number, tile in enumerate(tiles) for node in tile.nodes}
    merged = nx.DiGraph()
    for n, node in enumerate(nodes):
        for m, _ in node.operands:
            pair = owner.get(m, m), owner.get(n, n)
            if m >= 0 and pair[0] != pair[1]:
                merged.add_edge(*pair)
    assert nx.is_directed_acyclic_graph(merged)


def test_structures_say_what_is_shared() -> None:
    twice = [Node("a", ((GIVEN, 0),)), Node("b", ((0, 0), (0, 0)))]
    two = [Node("a", ((GIVEN, 0),)), Node("a", ((GIVEN, 1),)), Node("b", ((0, 0), (1, 0)))]
    other = [Node("a", ((GIVEN, 0),)), Node("b", ((0, 0), (0, 1)))]
    found = {subgraph(nodes, len(nodes) - 1, 4, set()).structure for nodes in (twice, two, other)}
    assert len(found) == 3
    renamed = [Node("a", ((GIVEN, 7),)), Node("b", ((0, 0), (0, 0)))]
    assert subgraph(renamed, 1, 4, set()).structure == subgraph(twice, 1, 4, set()).structure


def test_a_chain_of_equal_calls_is_a_few_equal_tiles() -> None:
    nodes: list[Node] = []
    h, c = (GIVEN, 0), (GIVEN, 1)
    for _ in range(20):
        start = len(nodes)
        nodes += [
            Node("linear", (h,)),
            Node("mul", (c, (start, 0))),
            Node("add", ((start + 1, 0), (start, 0))),
            Node("tanh", ((start + 2, 0),)),
        ]
        h, c = (start + 3, 0), (start + 2, 0)
    counts = Frequencies(depth=8, least=2)
    counts.collect(nodes)
    tiles = counts.tiles(nodes)
    assert sum(len(tile.nodes) for tile in tiles) > 70
    assert len({tile.structure for tile in tiles}) <= 2


def test_a_tree_is_cut_where_its_calls_meet() -> None:
    # c is made of gates and the c of both sides, h of c; the gates of the next call are made of h.
    nodes: list[Node] = []
    given = count()

    def call(depth: int) -> tuple[tuple[int, int], tuple[int, int]]:
        if depth == 0:
            return (GIVEN, next(given)), (GIVEN, next(given))
        (lh, lc), (rh, rc) = call(depth - 1), call(depth - 1)
        at = len(nodes)
        nodes.append(Node("concat", (lh, rh)))
        nodes.append(Node("linear", ((at, 0),)))
        nodes.append(Node("sigmoid", ((at + 1, 0),)))
        nodes.append(Node("mul", ((at + 2, 0), lc)))
        nodes.append(Node("mul", ((at + 2, 1), rc)))
        nodes.append(Node("add", ((at + 3, 0), (at + 4, 0))))
        nodes.append(Node("tanh", ((at + 5, 0),)))
        return (at + 6, 0), (at + 5, 0)

    call(5)
    counts = Frequencies(depth=6, least=2)
    counts.collect(nodes)
    tiles = counts.tiles(nodes)
    assert [len(tile.nodes) for tile in tiles] == [7] * 31
    assert len({tile.structure for tile in tiles}) == 1


@pytest.mark.parametrize("bits", [0, 1, 16])
def test_signatures_that_collide_are_told_apart(bits: int) -> None:
    weak, whole = Frequencies(5, 3, bits), Frequencies(5, 3)
    exact: dict[object, int] = {}
    for seed in range(20):
        nodes = drawn(seed)
        for counts in (weak, whole):
            counts.collect(nodes)
        for root in range(len(nodes)):
            structure = subgraph(nodes, root, 3, set()).structure
            exact[structure] = exact.get(structure, 0) + 1
    alone = Frequencies(3, 2, bits)
    for structure, many in exact.items():
        for _ in range(many):
            alone.add(structure)  # type: ignore[arg-type]
    assert all(alone.count(structure) == many for structure, many in exact.items())  # type: ignore[arg-type]
    found = [weak.tiles(drawn(seed)) for seed in range(20, 40)]
    assert found == [whole.tiles(drawn(seed)) for seed in range(20, 40)]
    assert len({tile.structure for tiles in found for tile in tiles}) > 5
