"""Graphs of an enumeration as compiled code compares them, and pairs of them up to renaming.

Each class of graphs with equal outputs is laid out as small local graphs, a row each: node i of a
graph has the local outputs 2i and 2i+1, an operand below zero is an input, and sets of nodes are
bit masks. The key of a pair is a hash that does not change under renaming: the colour of each
variable is refined by the contexts it occurs in.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array

ABSENT = -1_000_000  # the second operand of an operator that has one

# A view is an int64 array (rows, fields, twice the most nodes). Fields by node: both operands and
# their values, the node and those it needs, the operator's hash, whether it is commutative, how
# many outputs, the node's id, the variables among the operands. Fields by local output: the nodes
# that read it, its tensor, its value; and the outputs of the graph, by value. Then three numbers.
A, B, VALUE_A, VALUE_B, ABOVE, HASH, SYMMETRIC, OUTPUTS, NODE, DIRECT = range(10)
USERS, TENSOR, VALUE, OUT, NUMBERS = range(10, 15)
COUNT, OUTS, MASK = range(3)  # nodes, outputs, variables
_FIELDS = 15

_ROUNDS = 2  # of refinement; contexts reach to the outputs, so each goes all the way
_C1, _C2, _C3 = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
    np.uint64(0x9E3779B97F4A7C15),
)
_S27, _S29, _S32 = np.uint64(27), np.uint64(29), np.uint64(32)
_THREE, _FIVE, _SEVEN, _ZERO = np.uint64(3), np.uint64(5), np.uint64(7), np.uint64(0)


class Nodes(NamedTuple):
    """An enumeration's nodes (applications of operators) and tensors, as arrays for compiled loops.

    A tensor is an input, or an output of a node. `a` and `b` are the tensors that a node is applied
    to, `first` is the first of its outputs.
    """

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


def new_view(graphs: int, most: int) -> Array:
    """Return a zeroed view (see above) for `graphs` graphs of at most `most` nodes."""
    return np.zeros((graphs, _FIELDS, 2 * most), np.int64)


@linked()
def mix(x: np.uint64) -> np.uint64:
    """Return a 64-bit hash of a number, by xor-shifts and multiplications (as in SplitMix64)."""
    x = (x ^ (x >> _S29)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S32)


@linked()
def tensor_of(row: int, local: int, view: Array) -> int:
    """Return the id of the tensor that is a graph's local output, or its input if below zero."""
    return -1 - local if local < 0 else view[row, TENSOR, local]


@linked()
def _fill_row(graph: Array, row: int, view: Array, nodes: Nodes) -> None:
    count = 0
    mask = np.int64(0)
    view[row, USERS] = 0
    while count < graph.shape[0] and graph[count] >= 0:
        node = graph[count]
        operator = nodes.operator[node]
        view[row, NODE, count] = node
        view[row, HASH, count] = np.int64(nodes.hashes[operator])
        view[row, SYMMETRIC, count] = nodes.symmetric[operator]
        view[row, OUTPUTS, count] = nodes.outputs[node]
        view[row, DIRECT, count] = nodes.direct[node]
        mask |= nodes.direct[node]
        for q in range(nodes.outputs[node]):
            view[row, TENSOR, 2 * count + q] = nodes.first[node] + q
            view[row, VALUE, 2 * count + q] = np.int64(nodes.value[nodes.first[node] + q])
        above = np.int64(1) << count
        for side in range(2):
            tensor = nodes.a[node] if side == 0 else nodes.b[node]
            local, value = ABSENT, np.int64(0)
            if tensor >= 0:
                value = np.int64(nodes.value[tensor])
                if tensor < nodes.inputs:
                    local = -1 - tensor
                else:
                    other = nodes.node[tensor]
                    for position in range(count):
                        if graph[position] == other:
                            local = 2 * position + tensor - nodes.first[other]
                            above |= view[row, ABOVE, position]
                            view[row, USERS, local] |= np.int64(1) << count
            view[row, A + side, count] = local
            view[row, VALUE_A + side, count] = value
        view[row, ABOVE, count] = above
        count += 1
    view[row, NUMBERS, COUNT] = count
    view[row, NUMBERS, MASK] = mask


@njit(nogil=True)
def fill(graphs: Array, rows: Array, view: Array, nodes: Nodes) -> None:
    """Write graphs, given as rows of node ids in `graphs`, to rows 0, 1, ... of the view."""
    for row in range(rows.shape[0]):
        _fill_row(graphs[rows[row]], row, view, nodes)
        outs = 0
        for i in range(view[row, NUMBERS, COUNT]):
            for q in range(view[row, OUTPUTS, i]):
                local = 2 * i + q
                if view[row, USERS, local] == 0:
                    place = outs
                    while place > 0:
                        before = view[row, OUT, place - 1]
                        if view[row, VALUE, before] <= view[row, VALUE, local]:
                            break
                        view[row, OUT, place] = before
                        place -= 1
                    view[row, OUT, place] = local
                    outs += 1
        view[row, NUMBERS, OUTS] = outs


@njit(nogil=True)
def ordered_outputs(graphs: Array, rows: Array, view: Array, nodes: Nodes, outputs: Array) -> None:
    """Write each graph's output tensors, ordered by value, to the rows of `outputs`."""
    for number in range(rows.shape[0]):
        fill(graphs, rows[number : number + 1], view, nodes)
        for place in range(view[0, NUMBERS, OUTS]):
            outputs[number, place] = view[0, TENSOR, view[0, OUT, place]]


@linked()
def bits(mask: int) -> int:
    """Return the number of set bits."""
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


@linked()
def equal_outputs(x: int, y: int, view: Array) -> bool:
    """Return whether two graphs compute the same values, as multisets of their outputs."""
    if view[x, NUMBERS, OUTS] != view[y, NUMBERS, OUTS]:
        return False
    for place in range(view[x, NUMBERS, OUTS]):
        if view[x, VALUE, view[x, OUT, place]] != view[y, VALUE, view[y, OUT, place]]:
            return False
    return True


@linked()
def needed(row: int, cut: int, view: Array) -> int:
    """Return, as a bit mask, the nodes that outputs depend on if node `cut` were a variable."""
    need = np.int64(0)
    for place in range(view[row, NUMBERS, OUTS]):
        need |= np.int64(1) << (view[row, OUT, place] >> 1)
    if cut < 0:
        return (np.int64(1) << view[row, NUMBERS, COUNT]) - 1
    for i in range(view[row, NUMBERS, COUNT] - 1, -1, -1):
        if need >> i & 1 and i != cut:
            for side in range(2):
                local = view[row, A + side, i]
                if local >= 0:
                    need |= np.int64(1) << (local >> 1)
    return need


@linked()
def _at(local: int, cut: int, inputs: int, colours: Array, hashes: Array) -> np.uint64:
    if local < 0:
        return colours[-1 - local]
    if local >> 1 == cut:
        return colours[inputs + (local & 1)]
    return hashes[local]


@linked()
def forward(row: int, cut: int, need: int, view: Array, colours: Array, hashes: Array) -> None:
    """Compute a hash of each node's outputs from the colours of the inputs, operands first."""
    inputs = colours.shape[0] - 2
    for i in range(view[row, NUMBERS, COUNT]):
        if need >> i & 1 == 0 or i == cut:
            continue
        value = np.uint64(view[row, HASH, i])
        left = _at(view[row, A, i], cut, inputs, colours, hashes)
        if view[row, B, i] == ABSENT:
            value += mix(left * _THREE)
        else:
            right = _at(view[row, B, i], cut, inputs, colours, hashes)
            if view[row, SYMMETRIC, i]:
                value += mix(left + right) ^ mix(left * right + _C3)
            else:
                value += mix(left * _THREE) + mix(right * _FIVE + _C3)
        hashes[2 * i] = mix(value)
        hashes[2 * i + 1] = mix(value + _C3)


@linked()
def _backward(
    row: int,
    cut: int,
    need: int,
    view: Array,
    colours: Array,
    hashes: Array,
    context: Array,
    contexts: Array,
) -> None:
    """Add to `contexts`, for each input, a hash of each place where it occurs in the graph.

    The hash of a place depends on the path to the outputs and on the other operands along it.
    """
    inputs = colours.shape[0] - 2
    for i in range(view[row, NUMBERS, COUNT] - 1, -1, -1):
        if need >> i & 1 == 0 or i == cut:
            continue
        here = np.uint64(view[row, HASH, i])
        here += mix(context[2 * i]) + mix(context[2 * i + 1] + _C3)
        for side in range(2):
            local, other = view[row, A + side, i], view[row, B - side, i]
            if local == ABSENT:
                continue
            value = here
            if other != ABSENT:
                value += mix(_at(other, cut, inputs, colours, hashes) * _SEVEN)
                if side == 1 and not view[row, SYMMETRIC, i]:
                    value += _C3
            value = mix(value)
            if local < 0:
                contexts[-1 - local] += value
            elif local >> 1 == cut:
                contexts[inputs + (local & 1)] += value
            else:
                context[local] += value


class Scratch(NamedTuple):
    """Preallocated arrays for the hashes of a pair of graphs."""

    colours: Array  # uint64 (inputs + 2): of the inputs, and two variables more
    found: Array
    first: Array  # (twice the most nodes)
    second: Array
    context: Array


def new_scratch(inputs: int, most: int) -> Scratch:
    """Return room for pairs over so many inputs, of graphs of so many nodes."""
    return Scratch(
        np.zeros(inputs + 2, np.uint64),
        np.zeros(inputs + 2, np.uint64),
        *(np.zeros(2 * most, np.uint64) for _ in range(3)),
    )


@njit(nogil=True)
def key(
    x: int,
    y: int,
    cut_x: int,
    cut_y: int,
    marks: Array,
    fresh: Array,
    view: Array,
    scratch: Scratch,
) -> np.uint64:
    """Return a hash of a pair that no renaming or direction changes.

    Nodes `cut_x` and `cut_y` (or -1) stand for variables with the marks `fresh`.
    """
    colours, found, context = scratch.colours, scratch.found, scratch.context
    first, second = scratch.first, scratch.second
    for number in range(marks.shape[0]):
        colours[number] = marks[number]
    colours[marks.shape[0]], colours[marks.shape[0] + 1] = fresh[0], fresh[1]
    need_x, need_y = needed(x, cut_x, view), needed(y, cut_y, view)
    outs = view[x, NUMBERS, OUTS]
    for step in range(_ROUNDS + 1):
        forward(x, cut_x, need_x, view, colours, first)
        forward(y, cut_y, need_y, view, colours, second)
        if step == _ROUNDS:
            break
        for number in range(found.shape[0]):
            found[number] = _ZERO
        for side in range(2):
            for local in range(context.shape[0]):
                context[local] = _ZERO
            for place in range(outs):
                a, b = view[x, OUT, place], view[y, OUT, place]
                if side == 0:
                    context[a] += mix(first[a] + second[b] * _SEVEN)
                else:
                    context[b] += mix(second[b] + first[a] * _SEVEN)
            if side == 0:
                _backward(x, cut_x, need_x, view, colours, first, context, found)
            else:
                _backward(y, cut_y, need_y, view, colours, second, context, found)
        for number in range(found.shape[0]):
            if found[number] != _ZERO:
                colours[number] = mix(colours[number] + found[number])
    one = other = np.uint64(outs)
    for place in range(outs):
        left, right = first[view[x, OUT, place]], second[view[y, OUT, place]]
        one += mix(left * _THREE + mix(right * _FIVE))
        other += mix(right * _THREE + mix(left * _FIVE))
    return mix(mix(min(one, other)) + max(one, other))
