"""All graphs of a space: sets of nodes closed under what they need, each once, with fingerprints.

Nodes are added in increasing order of id; those that a set allows next are found by their closure,
which is one of the set's subsets. Outputs of a graph are the tensors that no operator of it uses;
a fingerprint is a sum over them, so that their order does not count (TASO, section 2.3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.exact_loops import mix
from soapstone.rules.enumeration.propose import Classes, Terms, is_prefix


class Groups(NamedTuple):
    """Nodes grouped by closure (all nodes that they depend on), found by a hash of it."""

    slot: Array  # int32, open addressing: group, or -1
    key: Array  # uint64 (groups)
    start: Array  # int64 (groups + 1)
    nodes: Array  # int32, ascending within a group


class Stack(NamedTuple):
    """The state of the depth-first enumeration; `depth[0]` nodes are chosen so far."""

    depth: Array
    chosen: Array  # (most)
    subset: Array  # bits of the chosen nodes that are the closure being extended
    position: Array
    end: Array
    mask: Array  # inputs used by the first d nodes
    used: Array  # bits 2 * position + output of tensors used among the first d nodes


@linked()
def _mixed(node: Any) -> Any:
    return mix(np.uint64(node + 1) * np.uint64(0x9E3779B97F4A7C15))


@njit(nogil=True)
def _keys(closure: Array, keys: Array) -> None:
    for node in range(closure.shape[0]):
        key = np.uint64(0)
        for position in range(closure.shape[1]):
            if closure[node, position] < 0:
                break
            key += _mixed(closure[node, position])
        keys[node] = key


@njit(nogil=True)
def _fill(slot: Array, key: Array) -> None:
    size = np.uint64(slot.shape[0] - 1)
    for group in range(key.shape[0]):
        at = mix(key[group]) & size
        while slot[np.int64(at)] >= 0:
            at = (at + np.uint64(1)) & size
        slot[np.int64(at)] = group


@linked()
def _group(key: int, groups: Groups) -> Any:
    """Return the group of nodes whose closure has a key, or -1."""
    size = np.uint64(groups.slot.shape[0] - 1)
    at = mix(key) & size
    while groups.slot[np.int64(at)] >= 0:
        group = groups.slot[np.int64(at)]
        if groups.key[group] == key:
            return group
        at = (at + np.uint64(1)) & size
    return -1


def groups_of(terms: Terms, nodes: int) -> Groups:
    """Return the first `nodes` nodes, grouped by closure."""
    keys = np.zeros(nodes, np.uint64)
    _keys(terms.closure[:nodes], keys)
    order = np.argsort(keys, kind="stable").astype(np.int32)
    ordered = keys[order]
    new = np.ones(nodes, np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    start = np.append(np.nonzero(new)[0], nodes).astype(np.int64)
    key = ordered[new]
    slot = np.full(1 << max(4, (2 * len(key)).bit_length()), -1, np.int32)
    _fill(slot, key)
    return Groups(slot, key, start, order)


def new_stack(most: int) -> Stack:
    """Return the state before the first graph, for graphs of at most `most` nodes."""
    stack = Stack(*(np.zeros(most + 1, np.int64) for _ in range(7)))
    stack.subset[0] = -1
    return stack


@linked()
def _repeats(m: int, subset: int, chosen: Array, count: int, terms: Terms) -> bool:
    """Return whether a node has an output equal to one of the chosen nodes outside its closure."""
    for position in range(count):
        if subset >> position & 1:
            continue
        other = chosen[position]
        for a in range(terms.first[m], terms.first[m] + terms.outputs[m]):
            for b in range(terms.first[other], terms.first[other] + terms.outputs[other]):
                if terms.value[a] == terms.value[b]:
                    return True
    return False


@linked()
def _bit(tensor: int, chosen: Array, count: int, terms: Terms) -> Any:
    """Return the bit of a tensor among the outputs of the chosen nodes; 0 for inputs and none."""
    if tensor < 0 or terms.node[tensor] < 0:
        return 0
    node = terms.node[tensor]
    for position in range(count):
        if chosen[position] == node:
            return 1 << (2 * position + tensor - terms.first[node])
    return 0


@linked()
def fingerprint(chosen: Array, count: int, used: int, terms: Terms, good: Array) -> Any:
    """Return the fingerprint of a graph, or 0 where an output has no other form."""
    total = np.uint64(0)
    for position in range(count):
        node = chosen[position]
        for output in range(terms.outputs[node]):
            if used >> (2 * position + output) & 1:
                continue
            tensor = terms.first[node] + output
            if not good[tensor]:
                return np.uint64(0)
            total += mix(terms.value[tensor])
    return total | np.uint64(1)


@njit(nogil=True)
def walk(
    stack: Stack,
    most: int,
    terms: Terms,
    groups: Groups,
    good: Array,
    classes: Classes,
    counts: Array,
    prints: Array,
    graphs: Array,
    budget: int,
) -> Any:
    """Enumerate graphs until buffers are full or the budget of steps is spent; return how many.

    Only graphs all of whose outputs are good are written; `counts[n]` counts all graphs of n
    operators. The enumeration is over where `stack.depth[0]` is -1.
    """
    written = 0
    depth = stack.depth[0]
    while depth >= 0 and budget > 0 and written < prints.shape[0]:
        budget -= 1
        if stack.subset[depth] < 0 or stack.position[depth] >= stack.end[depth]:
            subset = stack.subset[depth] + 1
            if subset >= 1 << depth:
                depth -= 1
                continue
            stack.subset[depth] = subset
            key = np.uint64(0)
            for position in range(depth):
                if subset >> position & 1:
                    key += _mixed(stack.chosen[position])
            group = _group(key, groups)
            if group < 0:
                stack.position[depth] = stack.end[depth] = 0
                continue
            low, end = groups.start[group], groups.start[group + 1]
            stack.end[depth] = end
            if depth > 0:  # only nodes after the last one chosen
                high = end
                while low < high:
                    middle = (low + high) >> 1
                    if groups.nodes[middle] <= stack.chosen[depth - 1]:
                        low = middle + 1
                    else:
                        high = middle
            stack.position[depth] = low
            continue
        m = groups.nodes[stack.position[depth]]
        stack.position[depth] += 1
        mask = stack.mask[depth] | terms.mask[m]
        proper = is_prefix(mask, classes)
        if depth + 1 == most and not proper:
            continue
        if _repeats(m, stack.subset[depth], stack.chosen, depth, terms):
            continue
        used = stack.used[depth] | _bit(terms.a[m], stack.chosen, depth, terms)
        used |= _bit(terms.b[m], stack.chosen, depth, terms)
        stack.chosen[depth] = m
        if proper:
            value = fingerprint(stack.chosen, depth + 1, used, terms, good)
            counts[depth + 1] += 1
            if value != 0:
                prints[written] = value
                for position in range(graphs.shape[1]):
                    graphs[written, position] = -1
                    if position <= depth:
                        graphs[written, position] = stack.chosen[position]
                written += 1
        if depth + 1 < most:
            depth += 1
            stack.subset[depth] = -1
            stack.mask[depth] = mask
            stack.used[depth] = used
    stack.depth[0] = depth
    return written


@njit(nogil=True)
def outputs_of(graph: Array, terms: Terms, out: Array) -> Any:
    """Write the outputs of a graph, tensors that none of its operators use; return how many."""
    count = 0
    for position in range(graph.shape[0]):
        node = graph[position]
        if node < 0:
            break
        for tensor in range(terms.first[node], terms.first[node] + terms.outputs[node]):
            free = True
            for later in range(position + 1, graph.shape[0]):
                other = graph[later]
                if other >= 0 and (terms.a[other] == tensor or terms.b[other] == tensor):
                    free = False
            if free:
                out[count] = tensor
                count += 1
    return count


@njit(nogil=True)
def same_outputs(graphs: Array, order: Array, prints: Array, terms: Terms, same: Array) -> None:
    """Fill whether each graph has the output values of the first graph of its fingerprint."""
    width = 2 * graphs.shape[1]
    tensors = np.empty(width, np.int64)
    values = np.empty((2, width), np.uint64)  # of the first graph, and of this, ascending
    known = 0
    for row in range(order.shape[0]):
        count = outputs_of(graphs[order[row]], terms, tensors)
        new = row == 0 or prints[order[row]] != prints[order[row - 1]]
        mine = values[0] if new else values[1]
        for index in range(count):
            value = terms.value[tensors[index]]
            at = index
            while at > 0 and mine[at - 1] > value:
                mine[at] = mine[at - 1]
                at -= 1
            mine[at] = value
        if new:
            known = count
        same[row] = known == count
        for index in range(count):
            if mine[index] != values[0, index]:
                same[row] = False


def signatures(terms: Terms, operator: Array, symmetric: Array) -> Array:
    """Return for each tensor a number of its operator, output and operand values (inputs: 0)."""
    with np.errstate(over="ignore"):
        value = mixed(terms.value)
        node = terms.node[terms.inputs :]
        a, b = terms.a[node], terms.b[node]
        left = value[a]
        right = np.where(b >= 0, value[np.maximum(b, 0)], np.uint64(0))
        both = np.where(
            symmetric[operator[node]],
            left * np.uint64(3) + right * np.uint64(3),
            left * np.uint64(3) + right * np.uint64(5),
        )
        output = np.arange(terms.inputs, len(terms.node)) - terms.first[node]
        kind = operator[node].astype(np.uint64) * np.uint64(4) + output.astype(np.uint64)
        result = np.zeros(len(terms.node), np.uint64)
        result[terms.inputs :] = both + mixed(kind + np.uint64(1)) * np.uint64(7)
    return result


def mixed(numbers: Array) -> Array:
    """Return a 64-bit mix of each number."""
    x = numbers.astype(np.uint64)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def with_other_form(terms: Terms, signature: Array) -> Array:
    """Return for each tensor whether another operator, or other operands, make the same."""
    good = np.zeros(len(terms.value), np.bool_)
    made = slice(terms.inputs, None)
    value, mine = terms.value[made], signature[made]
    if not len(value):
        return good
    order = np.lexsort((mine, value))
    value, mine = value[order], mine[order]
    starts = np.nonzero(np.append(True, value[1:] != value[:-1]))[0]
    ends = np.append(starts[1:], len(value)) - 1
    several = mine[starts] != mine[ends]
    good[terms.inputs + order] = np.repeat(several, ends - starts + 1)
    return good
