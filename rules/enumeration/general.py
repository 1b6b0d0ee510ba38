"""The compiled loops that find pairs which are others under a renaming of variables.

The most general pair of those that differ in the names of variables is kept (Jia et al., TASO,
section 2.5). Pairs of one skeleton, which is their text without names, are compared by the lists
of their variables: one is another's instance where its list is the other's under a map.
"""

from __future__ import annotations

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.pairs import (
    ABSENT,
    NUMBERS,
    OUT,
    OUTS,
    SYMMETRIC,
    A,
    B,
    Nodes,
    Scratch,
    fill,
    forward,
    mix,
)

WIDTH = 48  # variables of a pair, repeated ones counted; pairs of more are not compared
_THREE, _FIVE = np.uint64(3), np.uint64(5)


@linked()
def _leaves(local: int, row: int, view: Array, nodes: Nodes, hashes: Array, leaves: Array) -> bool:
    """Append the variables of a term; `leaves[0]` is how many. False where there is no room."""
    if local < 0:
        if nodes.variable[-1 - local]:
            if leaves[0] + 1 >= leaves.shape[0]:
                return False
            leaves[0] += 1
            leaves[leaves[0]] = -1 - local
        return True
    i = local >> 1
    a, b = view[row, A, i], view[row, B, i]
    if (
        b != ABSENT
        and view[row, SYMMETRIC, i]
        and _hash(b, nodes, hashes) < _hash(a, nodes, hashes)
    ):
        a, b = b, a
    if not _leaves(a, row, view, nodes, hashes, leaves):
        return False
    return b == ABSENT or _leaves(b, row, view, nodes, hashes, leaves)


@linked()
def _hash(local: int, nodes: Nodes, hashes: Array) -> np.uint64:
    return nodes.loose[-1 - local] if local < 0 else hashes[local]


@njit(nogil=True)
def patterns(
    graphs: Array,
    left: Array,
    right: Array,
    nodes: Nodes,
    view: Array,
    scratch: Scratch,
    skeletons: Array,
    swapped: Array,
    lists: Array,
) -> None:
    """Set the skeletons of pairs, and the lists of their variables.

    `swapped` says 1 where the skeleton is of the opposite direction, 2 where it is of both.
    `lists` (pairs, 2, WIDTH): in the skeleton's direction, and in the other one; the first number
    is the length, -1 where there is none.
    """
    rows = np.zeros(2, np.int64)
    order = np.zeros(view.shape[2], np.int64)
    hashes = (scratch.first, scratch.second)
    for pair in range(left.shape[0]):
        rows[0], rows[1] = left[pair], right[pair]
        fill(graphs, rows, view, nodes)
        scratch.colours[: nodes.inputs] = nodes.loose
        everything = (np.int64(1) << 62) - 1
        for row in range(2):
            forward(row, -1, everything, view, scratch.colours, hashes[row])
        outs = view[0, NUMBERS, OUTS]
        one = other = np.uint64(outs)
        for place in range(outs):
            a, b = scratch.first[view[0, OUT, place]], scratch.second[view[1, OUT, place]]
            one += mix(a * _THREE + mix(b * _FIVE))
            other += mix(b * _THREE + mix(a * _FIVE))
        skeletons[pair] = mix(min(one, other)) ^ max(one, other)
        swapped[pair] = 2 if one == other else (1 if other < one else 0)
        for way in range(2):
            source = way if swapped[pair] != 1 else 1 - way
            lists[pair, way, 0] = 0
            for place in range(outs):
                order[place] = place
                at = place
                while at > 0 and _after(order[at - 1], order[at], source, view, hashes):
                    order[at - 1], order[at] = order[at], order[at - 1]
                    at -= 1
            good = True
            for row in (source, 1 - source):
                for place in range(outs):
                    local = view[row, OUT, order[place]]
                    good &= _leaves(local, row, view, nodes, hashes[row], lists[pair, way])
            if not good or (way == 1 and swapped[pair] != 2):
                lists[pair, way, 0] = -1


@linked()
def _after(first: int, second: int, source: int, view: Array, hashes: tuple[Array, Array]) -> bool:
    """Return whether an output comes after another in a skeleton."""
    a = hashes[source][view[source, OUT, first]]
    b = hashes[source][view[source, OUT, second]]
    if a != b:
        return a > b
    target = 1 - source
    return hashes[target][view[target, OUT, first]] > hashes[target][view[target, OUT, second]]


@linked()
def _instance(general: Array, special: Array, bound: Array) -> bool:
    """Return whether a list of variables is another under a map."""
    if general[0] < 0 or general[0] != special[0]:
        return False
    bound[:] = -1
    for place in range(1, general[0] + 1):
        name = general[place]
        if bound[name] < 0:
            bound[name] = special[place]
        elif bound[name] != special[place]:
            return False
    return True


@njit(nogil=True)
def most_general(
    starts: Array,
    lists: Array,
    swapped: Array,
    ways: Array,
    variables: Array,
    sizes: Array,
    inputs: int,
    found: Array,
) -> None:
    """Set of each pair the most variables that a more general one of its size has, or 0.

    Pairs of one skeleton are those from `starts[s]` to `starts[s + 1]`, those of more variables
    first. The general pair has to be usable in every direction in which the special one is.
    """
    bound = np.zeros(inputs, np.int64)
    for number in range(starts.shape[0] - 1):
        begin, end = starts[number], starts[number + 1]
        for special in range(begin, end):
            for general in range(begin, special):
                if variables[general] <= variables[special]:
                    break
                if sizes[general] != sizes[special]:
                    continue
                for way in range(2):
                    if lists[general, way, 0] < 0:
                        continue
                    usable = _directed(ways[general], (swapped[general] == 1) != (way == 1))
                    needed = _directed(ways[special], swapped[special] == 1)
                    if usable & needed != needed:
                        continue
                    if _instance(lists[general, way], lists[special, 0], bound):
                        found[special] = variables[general]
                        break
                if found[special] > 0:
                    break


@linked()
def _directed(ways: int, swapped: bool) -> int:
    if swapped:
        return (ways & 1) << 1 | ways >> 1
    return ways
