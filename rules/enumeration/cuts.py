"""The compiled loops that cut pairs: which pairs of equal graphs follow from smaller ones.

Both forms of common subgraph of Jia et al., TASO, section 2.5 (`prune.py` says why nothing is
lost). What a pair is cut to is the total size of the largest pair that it follows from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.pairs import (
    ABOVE,
    ABSENT,
    COUNT,
    DIRECT,
    HASH,
    MASK,
    NODE,
    NUMBERS,
    OUT,
    OUTPUTS,
    OUTS,
    SYMMETRIC,
    TENSOR,
    USERS,
    VALUE_A,
    VALUE_B,
    A,
    B,
    Nodes,
    Scratch,
    bits,
    equal_outputs,
    fill,
    key,
    needed,
    tensor_of,
)

UNCUT, UNUSABLE, UNEQUAL = -1, -2, -3  # besides the size that a pair is cut to


@linked()
def _whole(row: int, members: int, chosen: Array, count: int, view: Array) -> bool:
    """Return whether the graph of some nodes has just the chosen outputs."""
    for i in range(view[row, NUMBERS, COUNT]):
        if members >> i & 1:
            for q in range(view[row, OUTPUTS, i]):
                if view[row, USERS, 2 * i + q] & members == 0:
                    known = False
                    for place in range(count):
                        known |= chosen[place] == 2 * i + q
                    if not known:
                        return False
    return True


@linked()
def _together(
    x: int,
    y: int,
    left: Array,
    right: Array,
    count: int,
    ways: int,
    view: Array,
) -> int:
    """Return the size of the pair of graphs with these outputs, -1 if there is no such pair.

    It has to be usable in the directions `ways`: 1 from x to y, 2 from y to x, 3 both.
    """
    members_x = members_y = mask_x = mask_y = np.int64(0)
    for place in range(count):
        if left[place] < 0 or right[place] < 0:
            return -1
        members_x |= view[x, ABOVE, left[place] >> 1]
        members_y |= view[y, ABOVE, right[place] >> 1]
    if not _whole(x, members_x, left, count, view):
        return -1
    if not _whole(y, members_y, right, count, view):
        return -1
    for i in range(view[x, NUMBERS, COUNT]):
        if members_x >> i & 1:
            mask_x |= view[x, DIRECT, i]
    for i in range(view[y, NUMBERS, COUNT]):
        if members_y >> i & 1:
            mask_y |= view[y, DIRECT, i]
    if (ways & 1 and mask_y & ~mask_x) or (ways & 2 and mask_x & ~mask_y):
        return -1
    return bits(members_x) + bits(members_y)


@linked()
def _derived(
    x: int,
    y: int,
    left: Array,
    right: Array,
    count: int,
    ways: int,
    view: Array,
) -> int:
    """Return the size of the largest pair that rewriting these tensors needs, -1 if none do.

    Tensors that nothing else reads are rewritten together or each alone; others alone.
    """
    members_x = members_y = np.int64(0)
    kept = 0
    for place in range(count):
        if tensor_of(x, left[place], view) == tensor_of(y, right[place], view):
            continue
        if left[place] < 0 or right[place] < 0:
            return -1
        left[kept], right[kept] = left[place], right[place]
        members_x |= view[x, ABOVE, left[kept] >> 1]
        members_y |= view[y, ABOVE, right[kept] >> 1]
        kept += 1
    largest = free = 0
    for place in range(kept):
        a, b = left[place], right[place]
        if view[x, USERS, a] & members_x == 0 and view[y, USERS, b] & members_y == 0:
            left[place], right[place] = left[free], right[free]
            left[free], right[free] = a, b
            free += 1
    for place in range(free, kept):
        size = _together(x, y, left[place:], right[place:], 1, ways, view)
        if size < 0:
            return -1
        largest = max(largest, size)
    if free > 0:
        size = _together(x, y, left, right, free, ways, view)
        if size < 0:
            for place in range(free):
                size = _together(x, y, left[place:], right[place:], 1, ways, view)
                if size < 0:
                    return -1
                largest = max(largest, size)
        largest = max(largest, size)
    return largest


@linked()
def _common(x: int, y: int, i: int, j: int, view: Array) -> int:
    """Return whether nodes are one operator of equal operands: 1 in order, 2 crossed, 0 not."""
    if view[x, HASH, i] != view[y, HASH, j]:
        return 0
    a, b, c, d = view[x, VALUE_A, i], view[x, VALUE_B, i], view[y, VALUE_A, j], view[y, VALUE_B, j]
    if a == c and b == d:
        return 1
    return 2 if view[x, SYMMETRIC, i] and a == d and b == c else 0


@linked()
def common_output(x: int, y: int, ways: int, view: Array, left: Array, right: Array) -> int:
    """Return the size to which a pair is cut by a common output operator, or -1.

    The operator has the same operands by value; without it they are outputs (the paper's second
    form). Outputs that can be rewritten one after the other are cut apart likewise.
    """
    best = -1
    for i in range(view[x, NUMBERS, COUNT]):
        if view[x, USERS, 2 * i] | view[x, USERS, 2 * i + 1]:
            continue
        for j in range(view[y, NUMBERS, COUNT]):
            if view[y, USERS, 2 * j] | view[y, USERS, 2 * j + 1]:
                continue
            order = _common(x, y, i, j, view)
            if order == 0:
                continue
            count = 0
            for place in range(view[x, NUMBERS, OUTS]):
                a, b = view[x, OUT, place], view[y, OUT, place]
                if (a >> 1 == i) != (b >> 1 == j):
                    count = -1
                    break
                if a >> 1 != i:
                    left[count], right[count] = a, b
                    count += 1
            if count < 0:
                continue
            for side in range(2):
                if view[x, A + side, i] != ABSENT:
                    left[count] = view[x, A + side, i]
                    right[count] = view[y, A + side if order == 1 else B - side, j]
                    count += 1
            size = _derived(x, y, left, right, count, ways, view)
            if size >= 0 and (best < 0 or size < best):
                best = size
    if view[x, NUMBERS, OUTS] > 1:
        for alone in range(view[x, NUMBERS, OUTS]):
            count = 0
            for place in range(view[x, NUMBERS, OUTS]):
                if place != alone:
                    left[count], right[count] = view[x, OUT, place], view[y, OUT, place]
                    count += 1
            rest = _derived(x, y, left, right, count, ways, view)
            left[0], right[0] = view[x, OUT, alone], view[y, OUT, alone]
            size = _derived(x, y, left, right, 1, ways, view)
            if rest >= 0 and size >= 0 and (best < 0 or max(rest, size) < best):
                best = max(rest, size)
    return best


class Pairs(NamedTuple):
    """Pairs of graphs that compute the same, which are candidates for rules."""

    left: Array  # int32: rows of the graphs, the smaller first
    right: Array
    cut: Array  # int16
    key: Array  # uint64
    variables: Array  # int8: how many
    ways: Array  # int8: 1 usable from left to right, 2 from right to left, 3 both


class Queries(NamedTuple):
    """Pairs whose graphs share a node, to be tested with a variable in its place."""

    pair: Array  # int64
    node: Array  # int32
    size: Array  # int16: the total size then
    exact: Array  # uint64: the key, variables by shape
    loose: Array  # by rank


@linked()
def _without(row: int, cut: int, view: Array) -> tuple[int, int, int, bool]:
    """Return what a graph needs where a node is a variable: nodes, inputs, outputs of the node.

    The last says whether no output of an operator is left that nobody reads.
    """
    need = needed(row, cut, view)
    reached = need >> cut & 1 == 1
    need &= ~(np.int64(1) << cut)
    mask = fresh = np.int64(0)
    whole = reached
    for i in range(view[row, NUMBERS, COUNT]):
        if need >> i & 1:
            mask |= view[row, DIRECT, i]
            for q in range(view[row, OUTPUTS, i]):
                if view[row, USERS, 2 * i + q] != 0 and view[row, USERS, 2 * i + q] & need == 0:
                    whole = False
    for q in range(2):
        if view[row, USERS, 2 * cut + q] & need:
            fresh |= 1 << q
    return need, mask, fresh, whole


@linked()
def _inputs_of_pair(
    x: int,
    y: int,
    ways: int,
    pair: int,
    view: Array,
    nodes: Nodes,
    types: Array,
    marks: Array,
    scratch: Scratch,
    fresh: Array,
    queries: Queries,
    count: int,
) -> int:
    """Ask for each node common to both whether it can be a variable; return how many asked."""
    for i in range(view[x, NUMBERS, COUNT]):
        for j in range(view[y, NUMBERS, COUNT]):
            if view[x, NODE, i] != view[y, NODE, j]:
                continue
            node = view[x, NODE, i]
            inner = True
            for q in range(view[x, OUTPUTS, i]):
                if view[x, USERS, 2 * i + q] == 0 or view[y, USERS, 2 * j + q] == 0:
                    inner = False
            if not inner:
                continue
            need_x, mask_x, fresh_x, whole_x = _without(x, i, view)
            need_y, mask_y, fresh_y, whole_y = _without(y, j, view)
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
                for q in range(view[x, OUTPUTS, i]):
                    fresh[q] = marks[types[view[x, TENSOR, 2 * i + q]], loose]
                inputs = nodes.loose if loose else nodes.exact
                found = key(x, y, i, j, inputs, fresh, view, scratch)
                if loose:
                    queries.loose[count] = found
                else:
                    queries.exact[count] = found
            count += 1
    return count


@njit(nogil=True)
def scan(
    graphs: Array,
    starts: Array,
    nodes: Nodes,
    types: Array,
    marks: Array,
    view: Array,
    scratch: Scratch,
    pairs: Pairs,
    queries: Queries,
) -> int:
    """Fill the pairs of classes, class after class; return how many queries there are.

    Class c has the graphs from `starts[c]` to `starts[c + 1]`. `types` is by tensor, `marks`
    (types, 2) says what a variable of a type is, by shape and by rank.
    """
    fresh = np.zeros(2, np.uint64)
    left = np.zeros(view.shape[2] + 2, np.int64)
    right = np.zeros(view.shape[2] + 2, np.int64)
    pair = count = 0
    for number in range(starts.shape[0] - 1):
        begin, end = starts[number], starts[number + 1]
        fill(graphs, np.arange(begin, end), view, nodes)
        for x in range(end - begin):
            for y in range(x + 1, end - begin):
                pairs.left[pair], pairs.right[pair] = begin + x, begin + y
                one, two = view[x, NUMBERS, MASK], view[y, NUMBERS, MASK]
                ways = (0 if two & ~one else 1) + (0 if one & ~two else 2)
                pairs.ways[pair] = ways
                pairs.variables[pair] = bits(one | two)
                if not equal_outputs(x, y, view):
                    pairs.cut[pair] = UNEQUAL
                elif ways == 0:
                    pairs.cut[pair] = UNUSABLE
                else:
                    pairs.key[pair] = key(x, y, -1, -1, nodes.loose, fresh, view, scratch)
                    cut = common_output(x, y, ways, view, left, right)
                    pairs.cut[pair] = cut
                    if cut < 0:
                        count = _inputs_of_pair(
                            *(x, y, ways, pair, view, nodes, types, marks),
                            *(scratch, fresh, queries, count),
                        )
                pair += 1
    return count
