"""The compiled loops that choose which pairs of a class are kept: a forest that connects it.

Pairs are met in ascending order of weight (Kruskal). Graphs of the same variables that are
connected already need no pair; of two graphs, one of which has more variables, the one with more
needs a path to the other, and only that.
"""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array

CUT_BIT = 1


@linked()
def _root(parent: Array, x: int) -> int:
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


@linked()
def _reaches(
    parent: Array, edges: Array, count: int, start: int, goal: int, seen: Array, stack: Array
) -> bool:
    """Return whether directed edges between components lead from one graph to another."""
    seen[:] = False
    goal = _root(parent, goal)
    stack[0] = _root(parent, start)
    seen[stack[0]] = True
    depth = 1
    while depth > 0:
        depth -= 1
        here = stack[depth]
        if here == goal:
            return True
        for edge in range(count):
            if _root(parent, edges[edge, 0]) == here:
                there = _root(parent, edges[edge, 1])
                if not seen[there]:
                    seen[there] = True
                    stack[depth] = there
                    depth += 1
    return False


@njit(nogil=True)
def span(starts: Array, left: Array, right: Array, ways: Array, weight: Array, keep: Array) -> None:
    """Set which pairs are kept; pairs are given class after class, by ascending weight in each.

    Class c has the graphs from `starts[c]` to `starts[c + 1]`. A weight whose last bit is set is a
    cut pair's: it connects, and is not kept.
    """
    pair = 0
    for number in range(starts.shape[0] - 1):
        begin, end = starts[number], starts[number + 1]
        size = end - begin
        parent = np.arange(size)
        seen = np.zeros(size, np.bool_)
        stack = np.zeros(size + 1, np.int64)
        edges = np.zeros((16, 2), np.int64)
        count = 0
        while pair < left.shape[0] and left[pair] < end:
            x, y = left[pair] - begin, right[pair] - begin
            if ways[pair] == 3:
                a, b = _root(parent, x), _root(parent, y)
                if a != b:
                    parent[b] = a
                    keep[pair] = weight[pair] & CUT_BIT == 0
            else:
                if ways[pair] == 2:
                    x, y = y, x
                if not _reaches(parent, edges, count, x, y, seen, stack):
                    if count == edges.shape[0]:
                        longer = np.zeros((2 * count, 2), np.int64)
                        longer[:count] = edges
                        edges = longer
                    edges[count, 0], edges[count, 1] = x, y
                    count += 1
                    keep[pair] = weight[pair] & CUT_BIT == 0
            pair += 1
