"""Graphs of an enumeration as compiled code compares them, and pairs of them up to renaming.

Each class of graphs with equal outputs is laid out as small local graphs: node i of a graph has the
local outputs 2i and 2i+1, an operand below zero is an input, and sets of nodes are bit masks. The
key of a pair is a hash that does not change under renaming: the colour of each variable is refined
by the contexts it occurs in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
ABSENT = -1_000_000  # the second operand of an operator that has one
_ROUNDS = 2  # of refinement; contexts reach to the outputs, so each goes all the way
_C1, _C2, _C3 = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
    np.uint64(0x9E3779B97F4A7C15),
)
_S27, _S29, _S32 = np.uint64(27), np.uint64(29), np.uint64(32)
_THREE, _FIVE, _SEVEN, _ZERO = np.uint64(3), np.uint64(5), np.uint64(7), np.uint64(0)


class Nodes(NamedTuple):
    """What the loops read of an enumeration."""

    inputs: int
    operator: Array  # int32 (nodes)
    hashes: Array  # uint64 (operators)
    symmetric: Array  # bool (operators)
    a: Array  # int32 (nodes), tensors
    b: Array
    first: Array  # int32 (nodes)
    outputs: Array  # int8 (nodes)
    direct: Array  # int64 (nodes): the variables among the operands
    value: Array  # uint64 (tensors)
    node: Array  # int32 (tensors)
    variable: Array  # bool (inputs)
    exact: Array  # uint64 (inputs): what an input is, by shape; constants by name
    loose: Array  # the same, by rank


class View(NamedTuple):
    """The graphs of a class, each as a local graph."""

    count: Array  # nodes
    node: Array  # int32 (graphs, most)
    a: Array  # int32 (graphs, most), local outputs or inputs
    b: Array
    above: Array  # int64 (graphs, most): the node and those it needs
    users: Array  # int64 (graphs, 2 most): nodes that read an output
    out: Array  # int32 (graphs, 2 most): the outputs of the graph, by value
    outs: Array  # how many
    mask: Array  # int64 (graphs): variables


def new_view(graphs: int, most: int) -> View:
    """Return room for a class of so many graphs of so many nodes."""
    return View(
        np.zeros(graphs, np.int32),
        *(np.zeros((graphs, most), np.int32) for _ in range(3)),
        np.zeros((graphs, most), np.int64),
        np.zeros((graphs, 2 * most), np.int64),
        np.zeros((graphs, 2 * most), np.int32),
        np.zeros(graphs, np.int32),
        np.zeros(graphs, np.int64),
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def mix(x: np.uint64) -> np.uint64:
    """Return a 64-bit number that looks like another for each."""
    x = (x ^ (x >> _S29)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S32)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _local(tensor: int, row: int, view: View, nodes: Nodes) -> int:
    if tensor < nodes.inputs:
        return -1 - tensor
    node = nodes.node[tensor]
    for position in range(view.count[row]):
        if view.node[row, position] == node:
            return 2 * position + tensor - nodes.first[node]
    return ABSENT


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def tensor_of(row: int, local: int, view: View, nodes: Nodes) -> int:
    """Return the tensor that a local output or input is."""
    if local < 0:
        return -1 - local
    return nodes.first[view.node[row, local >> 1]] + (local & 1)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill(graphs: Array, rows: Array, view: View, nodes: Nodes) -> None:
    """Lay out the graphs of these rows as rows 0, 1, ... of the view."""
    for row in range(rows.shape[0]):
        graph = graphs[rows[row]]
        count = 0
        while count < graph.shape[0] and graph[count] >= 0:
            view.node[row, count] = graph[count]
            count += 1
        view.count[row] = count
        view.mask[row] = 0
        for local in range(2 * count):
            view.users[row, local] = 0
        for i in range(count):
            node = view.node[row, i]
            view.mask[row] |= nodes.direct[node]
            above = np.int64(1) << i
            second = ABSENT
            if nodes.b[node] >= 0:
                second = _local(nodes.b[node], row, view, nodes)
            view.a[row, i] = _local(nodes.a[node], row, view, nodes)
            view.b[row, i] = second
            for local in (view.a[row, i], view.b[row, i]):
                if local >= 0:
                    above |= view.above[row, local >> 1]
                    view.users[row, local] |= np.int64(1) << i
            view.above[row, i] = above
        outs = 0
        for i in range(count):
            for q in range(nodes.outputs[view.node[row, i]]):
                local = 2 * i + q
                if view.users[row, local] == 0:
                    value = nodes.value[tensor_of(row, local, view, nodes)]
                    place = outs
                    while place > 0:
                        before = tensor_of(row, view.out[row, place - 1], view, nodes)
                        if nodes.value[before] <= value:
                            break
                        view.out[row, place] = view.out[row, place - 1]
                        place -= 1
                    view.out[row, place] = local
                    outs += 1
        view.outs[row] = outs


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def bits(mask: int) -> int:
    """Return how many bits are set."""
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def equal_outputs(x: int, y: int, view: View, nodes: Nodes) -> bool:
    if view.outs[x] != view.outs[y]:
        return False
    for place in range(view.outs[x]):
        left = nodes.value[tensor_of(x, view.out[x, place], view, nodes)]
        if left != nodes.value[tensor_of(y, view.out[y, place], view, nodes)]:
            return False
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def needed(row: int, cut: int, view: View) -> int:
    """Return the nodes that the outputs need where node `cut` is a variable."""
    need = np.int64(0)
    for place in range(view.outs[row]):
        need |= np.int64(1) << (view.out[row, place] >> 1)
    for i in range(view.count[row] - 1, -1, -1):
        if need >> i & 1 and i != cut:
            if view.a[row, i] >= 0:
                need |= np.int64(1) << (view.a[row, i] >> 1)
            if view.b[row, i] >= 0:
                need |= np.int64(1) << (view.b[row, i] >> 1)
    return need


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _at(local: int, cut: int, inputs: int, colours: Array, hashes: Array) -> np.uint64:
    if local < 0:
        return colours[-1 - local]
    if local >> 1 == cut:
        return colours[inputs + (local & 1)]
    return hashes[local]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def forward(
    row: int, cut: int, need: int, view: View, nodes: Nodes, colours: Array, hashes: Array
) -> None:
    """Set the hash of each output from the colours of the inputs."""
    for i in range(view.count[row]):
        if need >> i & 1 == 0 or i == cut:
            continue
        operator = nodes.operator[view.node[row, i]]
        value = nodes.hashes[operator]
        left = _at(view.a[row, i], cut, nodes.inputs, colours, hashes)
        if view.b[row, i] == ABSENT:
            value += mix(left * _THREE)
        else:
            right = _at(view.b[row, i], cut, nodes.inputs, colours, hashes)
            if nodes.symmetric[operator]:
                value += mix(left + right) ^ mix(left * right + _C3)
            else:
                value += mix(left * _THREE) + mix(right * _FIVE + _C3)
        hashes[2 * i] = mix(value)
        hashes[2 * i + 1] = mix(value + _C3)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _backward(
    row: int,
    cut: int,
    need: int,
    view: View,
    nodes: Nodes,
    colours: Array,
    hashes: Array,
    context: Array,
    found: Array,
) -> None:
    """Add to `found`, of each input, the contexts of its occurrences."""
    inputs = nodes.inputs
    for i in range(view.count[row] - 1, -1, -1):
        if need >> i & 1 == 0 or i == cut:
            continue
        operator = nodes.operator[view.node[row, i]]
        here = nodes.hashes[operator] + mix(context[2 * i]) + mix(context[2 * i + 1] + _C3)
        a, b = view.a[row, i], view.b[row, i]
        for side in range(2):
            local, other = (a, b) if side == 0 else (b, a)
            if local == ABSENT:
                continue
            value = here
            if other != ABSENT:
                value += mix(_at(other, cut, inputs, colours, hashes) * _SEVEN)
                if side == 1 and not nodes.symmetric[operator]:
                    value += _C3
            value = mix(value)
            if local < 0:
                found[-1 - local] += value
            elif local >> 1 == cut:
                found[inputs + (local & 1)] += value
            else:
                context[local] += value


class Scratch(NamedTuple):
    """Room for the hashes of a pair."""

    colours: Array
    found: Array
    first: Array
    second: Array
    context: Array


def new_scratch(inputs: int, most: int) -> Scratch:
    """Return room for pairs over so many inputs, of graphs of so many nodes."""
    return Scratch(
        np.zeros(inputs + 2, np.uint64),
        np.zeros(inputs + 2, np.uint64),
        *(np.zeros(2 * most, np.uint64) for _ in range(3)),
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def key(
    x: int,
    y: int,
    cut_x: int,
    cut_y: int,
    marks: Array,
    fresh: Array,
    view: View,
    nodes: Nodes,
    scratch: Scratch,
) -> np.uint64:
    """Return a hash of a pair that no renaming or direction changes.

    Nodes `cut_x` and `cut_y` (or -1) stand for variables with the marks `fresh`.
    """
    colours, found = scratch.colours, scratch.found
    colours[: nodes.inputs] = marks
    colours[nodes.inputs :] = fresh
    need_x, need_y = needed(x, cut_x, view), needed(y, cut_y, view)
    for step in range(_ROUNDS + 1):
        forward(x, cut_x, need_x, view, nodes, colours, scratch.first)
        forward(y, cut_y, need_y, view, nodes, colours, scratch.second)
        if step == _ROUNDS:
            break
        found[:] = _ZERO
        for side in range(2):
            scratch.context[:] = _ZERO
            for place in range(view.outs[x]):
                left = scratch.first[view.out[x, place]]
                right = scratch.second[view.out[y, place]]
                if side == 0:
                    scratch.context[view.out[x, place]] += mix(left + right * _SEVEN)
                else:
                    scratch.context[view.out[y, place]] += mix(right + left * _SEVEN)
            if side == 0:
                _backward(
                    *(x, cut_x, need_x, view, nodes),
                    *(colours, scratch.first, scratch.context, found),
                )
            else:
                _backward(
                    *(y, cut_y, need_y, view, nodes),
                    *(colours, scratch.second, scratch.context, found),
                )
        for number in range(found.shape[0]):
            if found[number] != _ZERO:
                colours[number] = mix(colours[number] + found[number])
    one = other = np.uint64(view.outs[x])
    for place in range(view.outs[x]):
        left, right = scratch.first[view.out[x, place]], scratch.second[view.out[y, place]]
        one += mix(left * _THREE + mix(right * _FIVE))
        other += mix(right * _THREE + mix(left * _FIVE))
    return mix(min(one, other)) ^ mix(max(one, other))
