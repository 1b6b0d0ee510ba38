"""The compiled loops that propose nodes: every pair of tensors whose closures make up a level.

A node of level L needs L - 1 others, its *closure*. Its operands are (a) one tensor of level L - 1
with an input or a tensor of its own closure, or (b) two tensors, neither in the other's closure,
whose closures together have L - 1 nodes: disjoint ones, or ones that share. Those that share are
found in buckets, by the smallest node of level 1 in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from soapstone.search.substitution.typetable import ASKED, UNKNOWN, Tables

Array = NDArray[Any]
UNKNOWN_PAIR, ASKED_PAIR = UNKNOWN, ASKED


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


class Classes(NamedTuple):
    """Interchangeable inputs: the first bit, and the mask of so many, of each class."""

    shift: Array
    full: Array


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def is_prefix(mask: int, classes: Classes) -> bool:
    """Return whether of each class of interchangeable inputs the first ones are used."""
    for index in range(classes.shift.shape[0]):
        used = (mask >> classes.shift[index]) & classes.full[index]
        if used & (used + 1):
            return False
    return True


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _mask_of(tensor: int, terms: Terms) -> Any:
    node = terms.node[tensor]
    return np.int64(1) << tensor if node < 0 else terms.mask[node]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _single(
    a: int, terms: Terms, tables: Tables, classes: Classes, last: bool, rows: Rows, count: int
) -> Any:
    """Propose the operators of one operand on a tensor; return the count of rows."""
    type_ = terms.type[a]
    mask = _mask_of(a, terms)
    for entry in range(tables.single[type_], tables.single[type_] + tables.single_count[type_]):
        if last and not is_prefix(mask | tables.fixed[tables.operator[entry]], classes):
            continue
        rows.entry[count] = entry
        rows.a[count] = a
        rows.b[count] = -1
        count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _ordered(
    a: int,
    b: int,
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
    count: int,
) -> Any:
    """Propose the operators of two operands on (a, b); ask for the pair of types if unknown."""
    first = tables.pair[terms.type[a], terms.type[b]]
    if first < 0:
        tables.pair[terms.type[a], terms.type[b]] = ASKED_PAIR
        return count
    number = tables.pair_count[terms.type[a], terms.type[b]]
    if number == 0:
        return count
    mask = _mask_of(a, terms) | _mask_of(b, terms)
    for entry in range(first, first + number):
        if tables.symmetric[entry] and a > b:
            continue
        if last and not is_prefix(mask | tables.fixed[tables.operator[entry]], classes):
            continue
        rows.entry[count] = entry
        rows.a[count] = a
        rows.b[count] = b
        count += 1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _both(
    a: int,
    b: int,
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
    count: int,
) -> Any:
    count = _ordered(a, b, terms, tables, classes, last, rows, count)
    return _ordered(b, a, terms, tables, classes, last, rows, count)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def from_inputs(
    terms: Terms, tables: Tables, classes: Classes, last: bool, repeated: bool, rows: Rows
) -> Any:
    """Propose all nodes of level 1; return how many."""
    count = 0
    for a in range(terms.inputs):
        count = _single(a, terms, tables, classes, last, rows, count)
        if repeated:
            count = _ordered(a, a, terms, tables, classes, last, rows, count)
        for b in range(a + 1, terms.inputs):
            count = _both(a, b, terms, tables, classes, last, rows, count)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def from_closures(
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    repeated: bool,
    rows: Rows,
    cursor: Array,
    end: int,
    margin: int,
) -> Any:
    """Propose nodes of a tensor of level L - 1 with inputs or its closure; return how many.

    `cursor[0]` is the node to go on with; stops where less than `margin` rows are free.
    """
    count = 0
    while cursor[0] < end:
        if count + margin > rows.a.shape[0]:
            return count
        node = cursor[0]
        cursor[0] += 1
        for a in range(terms.first[node], terms.first[node] + terms.outputs[node]):
            count = _single(a, terms, tables, classes, last, rows, count)
            if repeated:
                count = _ordered(a, a, terms, tables, classes, last, rows, count)
            for b in range(terms.inputs):
                count = _both(a, b, terms, tables, classes, last, rows, count)
            for b in range(a + 1, terms.first[node] + terms.outputs[node]):
                count = _both(a, b, terms, tables, classes, last, rows, count)
            for position in range(terms.closure.shape[1]):
                other = terms.closure[node, position]
                if other < 0:
                    break
                for b in range(terms.first[other], terms.first[other] + terms.outputs[other]):
                    count = _both(a, b, terms, tables, classes, last, rows, count)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _same_value(left: int, right: int, terms: Terms) -> bool:
    """Return whether two nodes have an output in common."""
    for a in range(terms.first[left], terms.first[left] + terms.outputs[left]):
        for b in range(terms.first[right], terms.first[right] + terms.outputs[right]):
            if terms.value[a] == terms.value[b]:
                return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _has(closure: Array, node: int) -> bool:
    for position in range(closure.shape[0]):
        if closure[position] == node:
            return True
        if closure[position] < 0:
            return False
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _member(node: int, position: int, terms: Terms) -> Any:
    """Return a member of a node's closure, or after those the node itself, then -1."""
    width = terms.closure.shape[1]
    if position < width and terms.closure[node, position] >= 0:
        return terms.closure[node, position]
    if position == 0 or (position <= width and terms.closure[node, position - 1] >= 0):
        return node
    return -1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _pairs(
    n: int,
    m: int,
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
    count: int,
) -> Any:
    for a in range(terms.first[n], terms.first[n] + terms.outputs[n]):
        for b in range(terms.first[m], terms.first[m] + terms.outputs[m]):
            count = _both(a, b, terms, tables, classes, last, rows, count)
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _some(n: int, m: int, terms: Terms, tables: Tables) -> bool:
    """Return whether any operator fits outputs of two nodes, or it is not known yet."""
    for a in range(terms.first[n], terms.first[n] + terms.outputs[n]):
        for b in range(terms.first[m], terms.first[m] + terms.outputs[m]):
            left, right = terms.type[a], terms.type[b]
            if tables.pair[left, right] < 0 or tables.pair[right, left] < 0:
                return True
            if tables.pair_count[left, right] + tables.pair_count[right, left] > 0:
                return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def from_disjoint(
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
    cursor: Array,
    ends: Array,
    margin: int,
    budget: int,
) -> Any:
    """Propose nodes of two tensors whose closures have nothing in common; return how many.

    `cursor` is the pair of nodes to go on with, `ends` the two levels: (begin, end, begin, end).
    """
    count = 0
    while cursor[0] < ends[1]:
        n = cursor[0]
        if cursor[1] < 0:
            cursor[1] = n + 1 if ends[0] == ends[2] else ends[2]
        while cursor[1] < ends[3]:
            if count + margin > rows.a.shape[0] or budget == 0:
                return count
            budget -= 1
            m = cursor[1]
            cursor[1] += 1
            if _some(n, m, terms, tables) and _fit(n, m, 0, -1, terms):
                count = _pairs(n, m, terms, tables, classes, last, rows, count)
        cursor[0] += 1
        cursor[1] = -1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def from_shared(
    terms: Terms,
    tables: Tables,
    classes: Classes,
    last: bool,
    rows: Rows,
    cursor: Array,
    shared: int,
    same: bool,
    left_starts: Array,
    left: Array,
    right_starts: Array,
    right: Array,
    margin: int,
    budget: int,
) -> Any:
    """Propose nodes of two tensors whose closures share so many nodes; return how many.

    `left[left_starts[r]:left_starts[r + 1]]` are the nodes of one level that need node r of level
    1. `cursor` is (bucket, position in left, position in right), -1 where it is yet to begin.
    """
    count = 0
    buckets = left_starts.shape[0] - 1
    while cursor[0] < buckets:
        bucket = cursor[0]
        if cursor[1] < 0:
            cursor[1] = left_starts[bucket]
        while cursor[1] < left_starts[bucket + 1]:
            n = left[cursor[1]]
            if cursor[2] < 0:
                cursor[2] = cursor[1] + 1 if same else right_starts[bucket]
            while cursor[2] < right_starts[bucket + 1]:
                if count + margin > rows.a.shape[0] or budget == 0:
                    return count
                budget -= 1
                m = right[cursor[2]]
                cursor[2] += 1
                if _some(n, m, terms, tables) and _fit(n, m, shared, bucket, terms):
                    count = _pairs(n, m, terms, tables, classes, last, rows, count)
            cursor[1] += 1
            cursor[2] = -1
        cursor[0] += 1
        cursor[1] = -1
    return count


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
