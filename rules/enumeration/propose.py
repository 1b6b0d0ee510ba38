"""The compiled loops that propose nodes: every pair of tensors whose closures make up a level.

A node of level L needs L - 1 others, its *closure*. Its operands are (a) one tensor of level L - 1
with an input or a tensor of its own closure, or (b) two tensors, neither in the other's closure,
whose closures together have L - 1 nodes: disjoint ones, or ones that share. Those that share are
found in buckets, by the smallest node of level 1 in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.typetable import ASKED, Tables


class Terms(NamedTuple):
    """All nodes and tensors so far; node ids are topological, tensors 0.. are the inputs."""

    inputs: int
    a: Array  # int32 (nodes), tensor ids
    b: Array
    closure: Array  # int32 (nodes, most), ascending, padded with -1
    first: Array  # int32 (nodes): the first output
    outputs: Array  # int8 (nodes)
    mask: Array  # int64 (nodes): inputs used
    value: Array  # uint64 (tensors)
    node: Array  # int32 (tensors): -1 for inputs
    type: Array  # int32 (tensors)


class Rows(NamedTuple):
    """Proposed nodes: an entry of the type table, and operands."""

    entry: Array  # int32
    a: Array
    b: Array


class Pairs(NamedTuple):
    """Two tensors that an operator may be applied to, in either order; b is -1 for one tensor."""

    a: Array  # int32
    b: Array


class Classes(NamedTuple):
    """Interchangeable inputs: the first bit, and the mask of so many, of each class."""

    shift: Array
    full: Array


@njit(nogil=True)
def is_prefix(mask: int, classes: Classes) -> bool:
    """Return whether of each class of interchangeable inputs the first ones are used."""
    for index in range(classes.shift.shape[0]):
        used = (mask >> classes.shift[index]) & classes.full[index]
        if used & (used + 1):
            return False
    return True


@linked()
def _mask_of(tensor: int, terms: Terms) -> Any:
    node = terms.node[tensor]
    return np.int64(1) << tensor if node < 0 else terms.mask[node]


@njit(nogil=True)
def expand(
    pairs: Pairs,
    number: int,
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
) -> Any:
    """Propose every operator on every pair, in both orders; return how many rows.

    Pairs of types that the table does not know are asked for.
    """
    count = 0
    for index in range(number):
        for order in range(2):
            a, b = pairs.a[index], pairs.b[index]
            if order == 1:
                if b < 0 or a == b:
                    continue
                a, b = b, a
            if b < 0:
                first = tables.single[terms.type[a]]
                many = tables.single_count[terms.type[a]]
            else:
                first = tables.pair[terms.type[a], terms.type[b]]
                many = tables.pair_count[terms.type[a], terms.type[b]]
                if first < 0:
                    tables.pair[terms.type[a], terms.type[b]] = ASKED
                    continue
            if many == 0:
                continue
            mask = _mask_of(a, terms)
            if b >= 0:
                mask |= _mask_of(b, terms)
            for entry in range(first, first + many):
                if tables.symmetric[entry] and a > b:
                    continue
                if last and not is_prefix(mask | tables.fixed[tables.operator[entry]], classes):
                    continue
                rows.entry[count] = entry
                rows.a[count] = a
                rows.b[count] = b
                count += 1
    return count


@linked()
def _add(pairs: Pairs, count: int, a: int, b: int) -> Any:
    pairs.a[count] = a
    pairs.b[count] = b
    return count + 1


@njit(nogil=True)
def from_closures(
    terms: Terms, repeated: bool, pairs: Pairs, cursor: Array, end: int, margin: int
) -> Any:
    """Write the pairs of a tensor of level L - 1 with nothing, an input, or one of its closure.

    `cursor[0]` is the node to go on with; stops where less than `margin` pairs are free. Returns
    how many pairs there are.
    """
    count = 0
    while cursor[0] < end and count + margin <= pairs.a.shape[0]:
        node = cursor[0]
        cursor[0] += 1
        after = terms.first[node] + terms.outputs[node]
        for a in range(terms.first[node], after):
            count = _add(pairs, count, a, -1)
            for b in range(terms.inputs):
                count = _add(pairs, count, a, b)
            for b in range(a if repeated else a + 1, after):
                count = _add(pairs, count, a, b)
            for position in range(terms.closure.shape[1]):
                other = terms.closure[node, position]
                if other < 0:
                    break
                for b in range(terms.first[other], terms.first[other] + terms.outputs[other]):
                    count = _add(pairs, count, a, b)
    return count


@linked()
def _same_value(left: int, right: int, terms: Terms) -> bool:
    """Return whether two nodes have an output in common."""
    for a in range(terms.first[left], terms.first[left] + terms.outputs[left]):
        for b in range(terms.first[right], terms.first[right] + terms.outputs[right]):
            if terms.value[a] == terms.value[b]:
                return True
    return False


@linked()
def _has(closure: Array, node: int) -> bool:
    for position in range(closure.shape[0]):
        if closure[position] == node:
            return True
        if closure[position] < 0:
            return False
    return False


@linked()
def _member(node: int, position: int, terms: Terms) -> Any:
    """Return a member of a node's closure, or after those the node itself, then -1."""
    width = terms.closure.shape[1]
    if position < width and terms.closure[node, position] >= 0:
        return terms.closure[node, position]
    if position == 0 or (position <= width and terms.closure[node, position - 1] >= 0):
        return node
    return -1


@linked()
def _fit(n: int, m: int, shared: int, bucket: int, terms: Terms) -> bool:
    """Return whether two nodes share so many others, the smallest this one, and no value twice."""
    if _has(terms.closure[m], n):
        return False
    common = 0
    width = terms.closure.shape[1]
    for position in range(width):
        left = terms.closure[n, position]
        if left < 0:
            break
        if _has(terms.closure[m], left):
            if common == 0 and left != bucket:
                return False
            common += 1
    if common != shared:
        return False
    for i in range(width + 1):
        left = _member(n, i, terms)
        if left < 0:
            break
        if shared > 0 and _has(terms.closure[m], left):
            continue
        for j in range(width + 1):
            right = _member(m, j, terms)
            if right < 0:
                break
            if left != right and _same_value(left, right, terms):
                return False
    return True


@linked()
def _offer(
    n: int, m: int, shared: int, bucket: int, terms: Terms, tables: Tables, pairs: Pairs, count: int
) -> Any:
    """Write the pairs of outputs of two nodes that fit each other; return how many there are."""
    some = False
    for a in range(terms.first[n], terms.first[n] + terms.outputs[n]):
        for b in range(terms.first[m], terms.first[m] + terms.outputs[m]):
            left, right = terms.type[a], terms.type[b]
            known = tables.pair[left, right] >= 0 and tables.pair[right, left] >= 0
            number = tables.pair_count[left, right] + tables.pair_count[right, left]
            if not known or number > 0:
                some = True
    if some and _fit(n, m, shared, bucket, terms):
        for a in range(terms.first[n], terms.first[n] + terms.outputs[n]):
            for b in range(terms.first[m], terms.first[m] + terms.outputs[m]):
                count = _add(pairs, count, a, b)
    return count


@njit(nogil=True)
def from_disjoint(
    terms: Terms,
    tables: Tables,
    pairs: Pairs,
    cursor: Array,
    ends: Array,
    budget: int,
) -> Any:
    """Write the pairs of tensors whose closures have nothing in common; return how many.

    `cursor` is the pair of nodes to go on with, `ends` the two levels: (begin, end, begin, end).
    """
    count = 0
    while cursor[0] < ends[1]:
        n = cursor[0]
        if cursor[1] < 0:
            cursor[1] = n + 1 if ends[0] == ends[2] else ends[2]
        while cursor[1] < ends[3]:
            if count + 4 > pairs.a.shape[0] or budget == 0:
                return count
            budget -= 1
            cursor[1] += 1
            count = _offer(n, cursor[1] - 1, 0, -1, terms, tables, pairs, count)
        cursor[0] += 1
        cursor[1] = -1
    return count


@njit(nogil=True)
def from_shared(
    terms: Terms,
    tables: Tables,
    pairs: Pairs,
    cursor: Array,
    shared: int,
    same: bool,
    left_starts: Array,
    left: Array,
    right_starts: Array,
    right: Array,
    budget: int,
) -> Any:
    """Write the pairs of tensors whose closures share so many nodes; return how many.

    `left[left_starts[r]:left_starts[r + 1]]` are the nodes of one level that need node r of level
    1. `cursor` is (bucket, position in left, position in right), -1 where it is yet to begin.
    """
    count = 0
    while cursor[0] < left_starts.shape[0] - 1:
        bucket = cursor[0]
        if cursor[1] < 0:
            cursor[1] = left_starts[bucket]
        while cursor[1] < left_starts[bucket + 1]:
            n = np.int64(left[cursor[1]])
            if cursor[2] < 0:
                cursor[2] = cursor[1] + 1 if same else right_starts[bucket]
            while cursor[2] < right_starts[bucket + 1]:
                if count + 4 > pairs.a.shape[0] or budget == 0:
                    return count
                budget -= 1
                cursor[2] += 1
                m = np.int64(right[cursor[2] - 1])
                count = _offer(n, m, shared, bucket, terms, tables, pairs, count)
            cursor[1] += 1
            cursor[2] = -1
        cursor[0] += 1
        cursor[1] = -1
    return count


@njit(nogil=True)
def settle(
    rows: Rows,
    tables: Tables,
    values: Array,
    terms: Terms,
    keep: Array,
    equal: Array,
    closures: Array,
    masks: Array,
) -> None:
    """Fill the closures and masks of rows, and which have an output equal to one they need.

    `equal[row, output]` is the tensor that the output equals, an input or one of the closure, or
    -1; rows without such outputs are kept.
    """
    width = closures.shape[1]
    for row in range(keep.shape[0]):
        entry = rows.entry[row]
        a, b = rows.a[row], rows.b[row]
        n = terms.node[a]
        m = terms.node[b] if b >= 0 else -1
        mask = _mask_of(a, terms) | tables.fixed[tables.operator[entry]]
        if b >= 0:
            mask |= _mask_of(b, terms)
        masks[row] = mask
        size = 0
        i = j = 0
        while size < width:  # merge two ascending lists
            left = _member(n, i, terms) if n >= 0 else -1
            right = _member(m, j, terms) if m >= 0 else -1
            if left < 0 and right < 0:
                break
            if right < 0 or (0 <= left < right):
                closures[row, size] = left
                i += 1
            else:
                closures[row, size] = right
                j += 1
                if left == right:
                    i += 1
            size += 1
        for position in range(size, width):
            closures[row, position] = -1
        keep[row] = True
        for output in range(tables.outputs[entry]):
            equal[row, output] = -1
            value = values[row, output]
            for tensor in range(terms.inputs):
                if terms.value[tensor] == value:
                    equal[row, output] = tensor
            for position in range(size):
                node = closures[row, position]
                for tensor in range(terms.first[node], terms.first[node] + terms.outputs[node]):
                    if terms.value[tensor] == value:
                        equal[row, output] = tensor
            if equal[row, output] >= 0:
                keep[row] = False
