"""The compiled loops of exact evaluation: structures on integers, several seeds at once.

Seeds are the innermost axis, so that one index serves several numbers; see `exact.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array

SEEDS = 8  # evaluations of each tensor
COPY, PRODUCT, SUM, MAX, RELU, SUM_RELU = range(6)


class Code(NamedTuple):
    """Structures (index maps of operators, `rules/algebra/structure.py`), concatenated for compiled
    loops."""

    kind: Array  # int8 (structures)
    size: Array  # elements of the result
    first: Array  # where its runs begin in `start`
    entry: Array  # where its entries begin in `a`, `b`
    weight: Array  # where its numerators begin, -1 where all are 1
    factor: Array  # int64: by which sums are multiplied
    shift: Array  # then shifted right
    start: Array
    a: Array
    b: Array
    numerator: Array
    structures: Array  # int32 (handles, 2)
    types: Array  # (handles, 2)
    outputs: Array  # (handles)


@linked()
def mix(x: Any) -> Any:
    """Return a 64-bit hash of a number (the finaliser of SplitMix64)."""
    x = np.uint64(x)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@linked()
def _evaluate(index: int, code: Code, left: Array, right: Array, out: Array, total: Array) -> None:
    """Write the result of a structure on two operands: (elements, seeds) each.

    `total` is room for one element. Its loops over seeds are what compiles to the fastest code.
    """
    kind = code.kind[index]
    first, entry = code.first[index], code.entry[index]
    factor, shift, weight = code.factor[index], code.shift[index], code.weight[index]
    for o in range(code.size[index]):
        begin = entry + code.start[first + o]
        end = entry + code.start[first + o + 1]
        if kind == COPY:
            a = np.int64(code.a[begin])
            for s in range(SEEDS):
                out[o, s] = left[a, s]
            continue
        for s in range(SEEDS):
            total[s] = 0
        if kind == PRODUCT:
            for e in range(begin, end):
                a, b = np.int64(code.a[e]), np.int64(code.b[e])
                for s in range(SEEDS):
                    total[s] += left[a, s] * right[b, s]
        elif kind in (MAX, RELU):
            for e in range(begin, end):
                a = np.int64(code.a[e])
                for s in range(SEEDS):
                    if left[a, s] > total[s] or (kind == MAX and e == begin):
                        total[s] = left[a, s]
        else:
            for e in range(begin, end):
                a, b = np.int64(code.a[e]), np.int64(code.b[e])
                number = np.int64(1)
                if weight >= 0:
                    number = code.numerator[weight + e - entry]
                if b < 0:
                    for s in range(SEEDS):
                        total[s] += number * left[a, s]
                elif a < 0:
                    for s in range(SEEDS):
                        total[s] += number * right[b, s]
                else:
                    for s in range(SEEDS):
                        total[s] += number * left[a, s] * right[b, s]
            for s in range(SEEDS):
                total[s] = (total[s] * factor) >> shift
            if kind == SUM_RELU:
                for s in range(SEEDS):
                    total[s] = max(total[s], 0)
        for s in range(SEEDS):
            out[o, s] = total[s]


@njit(nogil=True)
def identify(type_: int, data: Array, size: int, hashes: Array) -> Any:
    """Return the 64-bit id of a tensor: a mix of its type and elements, never 0.

    `hashes` is room for one number a seed.
    """
    start = mix(np.uint64(type_ + 1))
    for s in range(SEEDS):
        hashes[s] = start + np.uint64(s)
    for o in range(size):
        for s in range(SEEDS):
            mixed = (hashes[s] ^ np.uint64(data[o, s])) * np.uint64(0x9E3779B97F4A7C15)
            hashes[s] = mixed ^ (mixed >> np.uint64(29))
    for s in range(SEEDS):
        start = mix(start + hashes[s])
    return start | np.uint64(1)


@njit(nogil=True)
def values(
    handles: Array,
    a: Array,
    b: Array,
    code: Code,
    data: Array,
    offset: Array,
    scratch: Array,
    out: Array,
) -> None:
    """Write the ids of the outputs of nodes: (nodes, 2)."""
    total, hashes = np.empty(SEEDS, np.int64), np.empty(SEEDS, np.uint64)
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        for output in range(code.outputs[handle]):
            index = code.structures[handle, output]
            _evaluate(index, code, left, right, scratch, total)
            size = code.size[index]
            out[row, output] = identify(code.types[handle, output], scratch, size, hashes)


@njit(nogil=True)
def store(
    handles: Array, a: Array, b: Array, code: Code, data: Array, offset: Array, first: int
) -> None:
    """Write the outputs of nodes as tensors, from the first of these numbers on."""
    total = np.empty(SEEDS, np.int64)
    tensor = first
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        for output in range(code.outputs[handle]):
            index = code.structures[handle, output]
            _evaluate(index, code, left, right, data[offset[tensor] :], total)
            tensor += 1


@njit(nogil=True)
def agree(
    handles: Array,
    a: Array,
    b: Array,
    outputs: Array,
    tensors: Array,
    code: Code,
    data: Array,
    offset: Array,
    types: Array,
    scratch: Array,
    good: Array,
) -> None:
    """Compare with stored tensors, or where none is given with the row before."""
    total = np.empty(SEEDS, np.int64)
    previous, size, type_ = 1, 0, -1
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        index = code.structures[handle, outputs[row]]
        mine = scratch[1 - previous]
        _evaluate(index, code, left, right, mine, total)
        other = scratch[previous]
        if tensors.shape[0] > 0:
            other = data[offset[tensors[row]] :]
            type_, size = types[tensors[row]], code.size[index]
        good[row] = type_ == code.types[handle, outputs[row]] and size == code.size[index]
        if good[row]:
            for o in range(size):
                for seed in range(SEEDS):
                    if mine[o, seed] != other[o, seed]:
                        good[row] = False
        type_, size = code.types[handle, outputs[row]], code.size[index]
        previous = 1 - previous
