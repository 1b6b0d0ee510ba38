"""Compiled search for the subgraphs of a graph, and for a tiling of the graph by frequent ones.

Graphs change with every step and all their nodes are visited, so this works on arrays, in compiled
loops. `subgraphs.py` defines the terms: subgraph, interface, structure and tiling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array

GIVEN = -1  # the maker of what no node makes
_CLASS_DEPTH = 3  # how far results of one class are made of the same


class Links(NamedTuple):
    """A graph as arrays, its nodes in topological order.

    Attributes:
        kinds: int64 (nodes,), the kind of each node; negative for nodes that join no subgraph.
        first: int64 (nodes + 1,), where each node's operands begin.
        makers, results: int64 (operands,), the node that makes an operand and which of its results
            it is. An operand that no node makes has the maker `GIVEN` and a number of its own.
    """

    kinds: Array
    first: Array
    makers: Array
    results: Array


class Table(NamedTuple):
    """A hash table of structures, which are numbered.

    Attributes:
        store: the words of all structures. firsts: where each structure's words begin in it.
        slots: int64, a power of two of them: the number of the structure with that hash, or -1.
        frequent: bool, for each structure.
    """

    slots: Array
    firsts: Array
    store: Array
    frequent: Array


class _Room(NamedTuple):
    """Working memory for one subgraph: its nodes, their marks and places, its words and inputs."""

    chosen: Array
    pending: Array
    mark: Array
    place: Array
    words: Array
    inputs: Array


@njit(nogil=True)
def _mixed(h: int, word: int) -> int:
    x = (h * -7046029254386353131 ^ word) * -4658895280553007687
    return x ^ (x >> 31)


@njit(nogil=True)
def hashed(words: Any, mask: int) -> Any:
    """Return the hash of words, reduced to the bits of a mask."""
    h = words.size
    for word in words:
        h = _mixed(h, word)
    return h & mask


@njit(nogil=True)
def classes(g: Links) -> Any:
    """Return the class of each node: a hash of its kind and those of its operands, three deep."""
    kinds, first, makers, results = g
    now = np.empty_like(kinds)
    for i in range(kinds.size):
        now[i] = _mixed(1, kinds[i])
    for _ in range(_CLASS_DEPTH - 1):
        before, now = now, np.empty_like(kinds)
        for i in range(kinds.size):
            h = _mixed(2, kinds[i])
            for e in range(first[i], first[i + 1]):
                m = makers[e]
                h = _mixed(h, -1) if m < 0 else _mixed(_mixed(h, before[m]), results[e])
            now[i] = h
    return now


@njit(nogil=True)
def ways(g: Links) -> Any:
    """Return for each node one word that tells in which ways its results are read."""
    kinds, first, makers, results = g
    starts = np.zeros(kinds.size + 2, np.int64)
    for m in makers:
        if m >= 0:
            starts[m + 2] += 1
    starts = np.cumsum(starts)
    reads = np.empty(starts[-1], np.int64)
    for i in range(kinds.size):
        for e in range(first[i], first[i + 1]):
            m = makers[e]
            if m >= 0:
                reads[starts[m + 1]] = _mixed(_mixed(_mixed(3, kinds[i]), e - first[i]), results[e])
                starts[m + 1] += 1
    made = np.zeros_like(kinds)
    for i in range(kinds.size):
        distinct = starts[i]  # the different ones come first
        for r in range(starts[i], starts[i + 1]):
            known = False
            for other in range(starts[i], distinct):
                known |= reads[other] == reads[r]
            if not known:
                reads[distinct] = reads[r]
                distinct += 1
                made[i] += reads[r]
    return made


@njit(nogil=True)
def _room(g: Links) -> _Room:
    nodes, operands = g.kinds.size, g.makers.size
    chosen, pending, place = np.empty_like(g.kinds), np.empty_like(g.kinds), np.empty_like(g.kinds)
    words = np.empty(2 * (nodes + operands), np.int64)
    return _Room(chosen, pending, np.zeros_like(g.kinds), place, words, np.empty_like(g.makers))


@njit(nogil=True)
def _choose(g: Links, root: int, depth: int, ends: Any, stamp: int, room: _Room) -> int:
    """Write the nodes of a subgraph by number, marked with the stamp, and return how many.

    Marks below the stamp are old ones; up to two above it are used.
    """
    kinds, first, makers, _ = g
    chosen, pending, mark = room.chosen, room.pending, room.mark
    chosen[0], mark[root] = root, stamp
    begin, count = 0, 1
    for _ in range(depth - 1):
        end = count
        for at in range(begin, end):
            for e in range(first[chosen[at]], first[chosen[at] + 1]):
                m = makers[e]
                if m >= 0 and mark[m] < stamp and not ends[m] and kinds[m] >= 0:
                    mark[m] = stamp
                    chosen[count] = m
                    count += 1
        if count == end:
            break
        begin = end
    if count == 1:
        return 1
    # What is also reached through a node outside is left out, which makes it convex.
    low, waiting = chosen[:count].min(), 0
    for at in range(count):
        for e in range(first[chosen[at]], first[chosen[at] + 1]):
            m = makers[e]
            if m >= low and mark[m] < stamp:
                mark[m] = stamp + 1
                pending[waiting] = m
                waiting += 1
    while waiting:
        waiting -= 1
        through = pending[waiting]
        for e in range(first[through], first[through + 1]):
            m = makers[e]
            if m >= low and mark[m] <= stamp:
                mark[m] = stamp + (2 if mark[m] == stamp else 1)
                pending[waiting] = m
                waiting += 1
    kept = 0
    for at in range(count):
        if mark[chosen[at]] == stamp:
            chosen[kept] = chosen[at]
            kept += 1
    chosen[:kept].sort()
    return kept


@njit(nogil=True)
def _describe(g: Links, count: int, stamp: int, room: _Room) -> tuple[int, int]:
    """Write the structure of chosen nodes, and which operands are its inputs; return how many."""
    kinds, first, makers, results = g
    chosen, mark, place, words, inputs = (
        room.chosen[:count],
        room.mark,
        room.place,
        room.words,
        room.inputs,
    )
    at, given = 0, 0
    for i in range(chosen.size):
        place[chosen[i]] = i
    for node in chosen:
        words[at], words[at + 1] = kinds[node], first[node + 1] - first[node]
        at += 2
        for e in range(first[node], first[node + 1]):
            m = makers[e]
            if m >= 0 and mark[m] == stamp:
                words[at], words[at + 1] = place[m], results[e]
            else:
                known = 0
                while known < given and not (
                    makers[inputs[known]] == m and results[inputs[known]] == results[e]
                ):
                    known += 1
                if known == given:
                    inputs[given] = e
                    given += 1
                words[at], words[at + 1] = GIVEN, known
            at += 2
    return at, given


@njit(nogil=True)
def one(g: Links, root: int, depth: int, ends: Any) -> tuple[Any, Any, Any]:
    """Return the nodes of a root's subgraph, its structure, and its inputs among the operands."""
    room = _room(g)
    count = _choose(g, root, depth, ends, 1, room)
    at, given = _describe(g, count, 1, room)
    return room.chosen[:count], room.words[:at], room.inputs[:given]


@njit(nogil=True)
def find(words: Any, table: Table, mask: int) -> Any:
    """Return the number of a structure in a table, or -1. It is found by hash, then compared."""
    slots, firsts, store, _ = table
    slot = hashed(words, mask) & (slots.size - 1)
    while slots[slot] >= 0:
        number = slots[slot]
        begin = firsts[number]
        if firsts[number + 1] - begin == words.size:
            same = True
            for k in range(words.size):
                if store[begin + k] != words[k]:
                    same = False
                    break
            if same:
                return number
        slot = (slot + 1) & (slots.size - 1)
    return -1


@njit(nogil=True)
def enter(table: Table, mask: int) -> None:
    """Fill the slots of a table, all -1 before, with the structures of its store."""
    slots, firsts, store, _ = table
    for number in range(firsts.size - 1):
        words = store[firsts[number] : firsts[number + 1]]
        slot = hashed(words, mask) & (slots.size - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (slots.size - 1)
        slots[slot] = number


@njit(nogil=True)
def occurring(g: Links, ends: Any, depth: int) -> tuple[Any, Any]:
    """Return the structures of all depths at the roots of a tiling by the deepest subgraphs.

    Returns: the words of all structures, and where each begins.
    """
    kinds, room = g.kinds, _room(g)
    ends, taken = ends.copy(), np.zeros(kinds.size, np.bool_)
    found, used, firsts, stamp = np.empty(4 * room.words.size, np.int64), 0, [0], 1
    for root in range(kinds.size - 1, -1, -1):
        if taken[root] or kinds[root] < 0:
            continue
        size, largest = 0, room.chosen[:0].copy()
        for d in range(depth, 1, -1):
            count = _choose(g, root, d, ends, stamp, room)
            if count > 1 and (size == 0 or count < size):
                at, _ = _describe(g, count, stamp, room)
                if used + at > found.size:
                    grown = np.empty(2 * (used + at), np.int64)
                    grown[:used] = found[:used]
                    found = grown
                found[used : used + at] = room.words[:at]
                used += at
                firsts.append(used)
                if size == 0:
                    largest = room.chosen[:count].copy()
                size = count
            stamp += 3
        for node in largest:
            taken[node] = ends[node] = True
    return found[:used], np.array(firsts)


@njit(nogil=True)
def covered(
    g: Links, ends: Any, depth: int, table: Table, mask: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the tiles of a graph: from the last node to the first, its largest frequent subgraph.

    Nodes that are in a tile already are skipped.

    Returns: the number of each tile's structure; the nodes of all tiles, and where each tile's
    begin; the operands that are tiles' inputs, and where each tile's begin.
    """
    kinds, room = g.kinds, _room(g)
    ends, taken = ends.copy(), np.zeros(kinds.size, np.bool_)
    numbers, nodes_of = np.empty_like(kinds), np.empty_like(kinds)
    all_inputs = np.empty_like(g.makers)
    node_first = np.zeros(kinds.size + 1, np.int64)
    input_first = np.zeros(kinds.size + 1, np.int64)
    tiles, stamp = 0, 1
    for root in range(kinds.size - 1, -1, -1):
        if taken[root] or kinds[root] < 0:
            continue
        size = 0
        for d in range(depth, 1, -1):
            count = _choose(g, root, d, ends, stamp, room)
            if count > 1 and (size == 0 or count < size):
                size, nodes = count, room.chosen[:count]
                at, given = _describe(g, count, stamp, room)
                number = find(room.words[:at], table, mask)
                if number >= 0 and table.frequent[number]:
                    numbers[tiles] = number
                    begin, gets = node_first[tiles], input_first[tiles]
                    nodes_of[begin : begin + count] = nodes
                    all_inputs[gets : gets + given] = room.inputs[:given]
                    tiles += 1
                    node_first[tiles], input_first[tiles] = begin + count, gets + given
                    for node in nodes:
                        taken[node] = ends[node] = True
                    break
            stamp += 3
        stamp += 3
    return (
        numbers[:tiles],
        nodes_of[: node_first[tiles]],
        node_first[: tiles + 1],
        all_inputs[: input_first[tiles]],
        input_first[: tiles + 1],
    )


@njit(nogil=True)
def ordered(g: Links, owner: Any, tiles: int) -> Any:
    """Return an order in which tiles and single nodes can run, without those that wait in a cycle.

    owner: the tile of each node; a node in none has a number of its own, from `tiles` on.
    """
    first, makers = g.first, g.makers
    many = max(tiles, owner.max() + 1)
    waits, starts = np.zeros(many, np.int64), np.zeros(many + 2, np.int64)
    for i in range(owner.size):
        for e in range(first[i], first[i + 1]):
            m = makers[e]
            if m >= 0 and owner[m] != owner[i]:
                waits[owner[i]] += 1
                starts[owner[m] + 2] += 1
    starts = np.cumsum(starts)
    after = np.empty(starts[-1], np.int64)
    for i in range(owner.size):
        for e in range(first[i], first[i + 1]):
            m = makers[e]
            if m >= 0 and owner[m] != owner[i]:
                after[starts[owner[m] + 1]] = owner[i]
                starts[owner[m] + 1] += 1
    order, count, at = np.empty(many, np.int64), 0, 0
    for unit in range(many):
        if waits[unit] == 0:
            order[count] = unit
            count += 1
    while at < count:
        for k in range(starts[order[at]], starts[order[at] + 1]):
            waits[after[k]] -= 1
            if waits[after[k]] == 0:
                order[count] = after[k]
                count += 1
        at += 1
    return order[:count]


@njit(nogil=True)
def leaving(g: Links, owner: Any, out_first: Any) -> Any:
    """Return, bool (results,), which results are read by another tile or node, or by none.

    owner: see `ordered`. out_first: where each node's results begin.
    """
    first, makers, results = g.first, g.makers, g.results
    inside, outside = np.zeros(out_first[-1], np.bool_), np.zeros(out_first[-1], np.bool_)
    for i in range(owner.size):
        for e in range(first[i], first[i + 1]):
            m = makers[e]
            if m >= 0:
                if owner[m] == owner[i]:
                    inside[out_first[m] + results[e]] = True
                else:
                    outside[out_first[m] + results[e]] = True
    return outside | ~inside
