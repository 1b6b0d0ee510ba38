"""The compiled loops that cut pairs: which pairs of equal graphs follow from smaller ones.

Both forms of common subgraph of Jia et al., TASO, section 2.5 (`prune.py` says why nothing is
lost). What a pair is cut to is the total size of the largest pair that it follows from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from soapstone.search.substitution.pairs import (
    ABSENT,
    Nodes,
    Scratch,
    View,
    bits,
    equal_outputs,
    fill,
    key,
    needed,
    tensor_of,
)

Array = NDArray[Any]
UNCUT, UNUSABLE, UNEQUAL = -1, -2, -3  # besides the size that a pair is cut to


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _whole(row: int, members: int, chosen: Array, count: int, view: View, nodes: Nodes) -> bool:
    """Return whether the graph of some nodes has just the chosen outputs."""
    for i in range(view.count[row]):
        if members >> i & 1:
            for q in range(nodes.outputs[view.node[row, i]]):
                if view.users[row, 2 * i + q] & members == 0:
                    known = False
                    for place in range(count):
                        known |= chosen[place] == 2 * i + q
                    if not known:
                        return False
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _together(
    x: int,
    y: int,
    left: Array,
    right: Array,
    count: int,
    ways: int,
    view: View,
    nodes: Nodes,
) -> int:
    """Return the size of the pair of graphs with these outputs, -1 if there is no such pair.

    It has to be usable in the directions `ways`: 1 from x to y, 2 from y to x, 3 both.
    """
    members_x = members_y = mask_x = mask_y = np.int64(0)
    for place in range(count):
        if left[place] < 0 or right[place] < 0:
            return -1
        members_x |= view.above[x, left[place] >> 1]
        members_y |= view.above[y, right[place] >> 1]
    if not _whole(x, members_x, left, count, view, nodes):
        return -1
    if not _whole(y, members_y, right, count, view, nodes):
        return -1
    for i in range(view.count[x]):
        if members_x >> i & 1:
            mask_x |= nodes.direct[view.node[x, i]]
    for i in range(view.count[y]):
        if members_y >> i & 1:
            mask_y |= nodes.direct[view.node[y, i]]
    if (ways & 1 and mask_y & ~mask_x) or (ways & 2 and mask_x & ~mask_y):
        return -1
    return bits(members_x) + bits(members_y)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _derived(
    x: int,
    y: int,
    left: Array,
    right: Array,
    count: int,
    ways: int,
    view: View,
    nodes: Nodes,
) -> int:
    """Return the size of the largest pair that rewriting these tensors needs, -1 if none do.

    Tensors that nothing else reads are rewritten together or each alone; others alone.
    """
    members_x = members_y = np.int64(0)
    kept = 0
    for place in range(count):
        if tensor_of(x, left[place], view, nodes) == tensor_of(y, right[place], view, nodes):
            continue
        if left[place] < 0 or right[place] < 0:
            return -1
        left[kept], right[kept] = left[place], right[place]
        members_x |= view.above[x, left[kept] >> 1]
        members_y |= view.above[y, right[kept] >> 1]
        kept += 1
    largest = free = 0
    for place in range(kept):
        a, b = left[place], right[place]
        if view.users[x, a] & members_x == 0 and view.users[y, b] & members_y == 0:
            left[place], right[place] = left[free], right[free]
            left[free], right[free] = a, b
            free += 1
    for place in range(free, kept):
        size = _together(x, y, left[place:], right[place:], 1, ways, view, nodes)
        if size < 0:
            return -1
        largest = max(largest, size)
    if free > 0:
        size = _together(x, y, left, right, free, ways, view, nodes)
        if size < 0:
            for place in range(free):
                size = _together(x, y, left[place:], right[place:], 1, ways, view, nodes)
                if size < 0:
                    return -1
                largest = max(largest, size)
        largest = max(largest, size)
    return largest


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _value(row: int, local: int, view: View, nodes: Nodes) -> np.uint64:
    return nodes.value[tensor_of(row, local, view, nodes)]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def common_output(
    x: int, y: int, ways: int, view: View, nodes: Nodes, left: Array, right: Array
) -> int:
    """Return the size to which a pair is cut by a common output operator, or -1.

    The operator has the same operands by value; without it they are outputs (the paper's second
    form). Outputs that can be rewritten one after the other are cut apart likewise.
    """
    best = -1
    for i in range(view.count[x]):
        node = view.node[x, i]
        if view.users[x, 2 * i] | view.users[x, 2 * i + 1]:
            continue
        for j in range(view.count[y]):
            other = view.node[y, j]
            if view.users[y, 2 * j] | view.users[y, 2 * j + 1]:
                continue
            if nodes.operator[node] != nodes.operator[other]:
                continue
            crossed = False
            if _value(x, view.a[x, i], view, nodes) != _value(y, view.a[y, j], view, nodes):
                crossed = True
            elif view.b[x, i] != ABSENT:
                crossed = _value(x, view.b[x, i], view, nodes) != _value(
                    y, view.b[y, j], view, nodes
                )
            if crossed and (
                not nodes.symmetric[nodes.operator[node]]
                or _value(x, view.a[x, i], view, nodes) != _value(y, view.b[y, j], view, nodes)
                or _value(x, view.b[x, i], view, nodes) != _value(y, view.a[y, j], view, nodes)
            ):
                continue
            count = 0
            for place in range(view.outs[x]):
                a, b = view.out[x, place], view.out[y, place]
                if (a >> 1 == i) != (b >> 1 == j):
                    count = -1
                    break
                if a >> 1 != i:
                    left[count], right[count] = a, b
                    count += 1
            if count < 0:
                continue
            left[count] = view.a[x, i]
            right[count] = view.b[y, j] if crossed else view.a[y, j]
            count += 1
            if view.b[x, i] != ABSENT:
                left[count] = view.b[x, i]
                right[count] = view.a[y, j] if crossed else view.b[y, j]
                count += 1
            size = _derived(x, y, left, right, count, ways, view, nodes)
            if size >= 0 and (best < 0 or size < best):
                best = size
    if view.outs[x] > 1:
        for alone in range(view.outs[x]):
            count = 0
            for place in range(view.outs[x]):
                if place != alone:
                    left[count], right[count] = view.out[x, place], view.out[y, place]
                    count += 1
            rest = _derived(x, y, left, right, count, ways, view, nodes)
            left[0], right[0] = view.out[x, alone], view.out[y, alone]
            size = _derived(x, y, left, right, 1, ways, view, nodes)
            if rest >= 0 and size >= 0 and (best < 0 or max(rest, size) < best):
                best = max(rest, size)
    return best


class Pairs(NamedTuple):
    """Pairs of graphs of equal classes."""

    left: Array  # int32: rows of the graphs, the smaller first
    right: Array
    cut: Array  # int16
    key: Array  # uint64
    variables: Array  # int8: how many
    ways: Array  # int8: 1 usable from left to right, 2 from right to left, 3 both


class Queries(NamedTuple):
    """Pairs with a common node, to be tested with a variable in its place."""

    pair: Array  # int64
    node: Array  # int32
    size: Array  # int16: the total size then
    exact: Array  # uint64: the key, variables by shape
    loose: Array  # by rank


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _without(row: int, cut: int, view: View, nodes: Nodes) -> tuple[int, int, int, bool]:
    """Return what a graph needs where a node is a variable: nodes, inputs, outputs of the node.

    The last says whether no output of an operator is left that nobody reads.
    """
    need = needed(row, cut, view)
    reached = need >> cut & 1 == 1
    need &= ~(np.int64(1) << cut)
    mask = fresh = np.int64(0)
    whole = reached
    for i in range(view.count[row]):
        if need >> i & 1:
            mask |= nodes.direct[view.node[row, i]]
            for q in range(nodes.outputs[view.node[row, i]]):
                if view.users[row, 2 * i + q] != 0 and view.users[row, 2 * i + q] & need == 0:
                    whole = False
    for q in range(2):
        if view.users[row, 2 * cut + q] & need:
            fresh |= 1 << q
    return need, mask, fresh, whole


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _inputs_of_pair(
    x: int,
    y: int,
    ways: int,
    pair: int,
    view: View,
    nodes: Nodes,
    types: Array,
    marks: Array,
    scratch: Scratch,
    fresh: Array,
    queries: Queries,
    count: int,
) -> int:
    """Ask for each node common to both whether it can be a variable; return how many asked."""
    for i in range(view.count[x]):
        for j in range(view.count[y]):
            if view.node[x, i] != view.node[y, j]:
                continue
            node = view.node[x, i]
            inner = True
            for q in range(nodes.outputs[node]):
                if view.users[x, 2 * i + q] == 0 or view.users[y, 2 * j + q] == 0:
                    inner = False
            if not inner:
                continue
            need_x, mask_x, fresh_x, whole_x = _without(x, i, view, nodes)
            need_y, mask_y, fresh_y, whole_y = _without(y, j, view, nodes)
            if not (whole_x and whole_y):
                continue
            if ways & 1 and (mask_y & ~mask_x or fresh_y & ~fresh_x):
                continue
            if ways & 2 and (mask_x & ~mask_y or fresh_x & ~fresh_y):
                continue
            queries.pair[count] = pair
            queries.node[count] = node
            queries.size[count] = bits(need_x) + bits(need_y)
            for loose in range(2):
                for q in range(nodes.outputs[node]):
                    fresh[q] = marks[types[nodes.first[node] + q], loose]
                inputs = nodes.loose if loose else nodes.exact
                found = key(x, y, i, j, inputs, fresh, view, nodes, scratch)
                if loose:
                    queries.loose[count] = found
                else:
                    queries.exact[count] = found
            count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scan(
    graphs: Array,
    starts: Array,
    nodes: Nodes,
    types: Array,
    marks: Array,
    view: View,
    scratch: Scratch,
    pairs: Pairs,
    queries: Queries,
) -> int:
    """Fill the pairs of classes, class after class; return how many queries there are.

    Class c has the graphs from `starts[c]` to `starts[c + 1]`. `types` is by tensor, `marks`
    (types, 2) says what a variable of a type is, by shape and by rank.
    """
    fresh = np.zeros(2, np.uint64)
    left = np.zeros(view.out.shape[1] + 2, np.int32)
    right = np.zeros(view.out.shape[1] + 2, np.int32)
    pair = count = 0
    for number in range(starts.shape[0] - 1):
        begin, end = starts[number], starts[number + 1]
        fill(graphs, np.arange(begin, end), view, nodes)
        for x in range(end - begin):
            for y in range(x + 1, end - begin):
                pairs.left[pair], pairs.right[pair] = begin + x, begin + y
                one, two = view.mask[x], view.mask[y]
                ways = (0 if two & ~one else 1) + (0 if one & ~two else 2)
                pairs.ways[pair] = ways
                pairs.variables[pair] = bits(one | two)
                if not equal_outputs(x, y, view, nodes):
                    pairs.cut[pair] = UNEQUAL
                elif ways == 0:
                    pairs.cut[pair] = UNUSABLE
                else:
                    pairs.key[pair] = key(x, y, -1, -1, nodes.loose, fresh, view, nodes, scratch)
                    cut = common_output(x, y, ways, view, nodes, left, right)
                    pairs.cut[pair] = cut
                    if cut < 0:
                        count = _inputs_of_pair(
                            *(x, y, ways, pair, view, nodes, types, marks),
                            *(scratch, fresh, queries, count),
                        )
                pair += 1
    return count
