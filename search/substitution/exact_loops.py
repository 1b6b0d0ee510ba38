"""The compiled loops of exact evaluation: structures on integers, several seeds at once.

Seeds are the innermost axis, so that one index serves several numbers; see `exact.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]
SEEDS = 4  # evaluations of each tensor
COPY, PRODUCT, SUM, MAX, RELU, SUM_RELU = range(6)


class Code(NamedTuple):
    """All structures met, one after the other, as compiled code reads them."""

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


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def mix(x: Any) -> Any:
    """Return a 64-bit mix of the bits of a number."""
    x = np.uint64(x)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _evaluate(index: int, code: Code, left: Array, right: Array, out: Array) -> None:
    """Write the result of a structure on two operands: (elements, seeds) each."""
    kind = code.kind[index]
    first, entry = code.first[index], code.entry[index]
    for o in range(code.size[index]):
        begin = entry + code.start[first + o]
        end = entry + code.start[first + o + 1]
        w = x = y = z = np.int64(0)
        if kind == COPY:
            a = code.a[begin]
            out[o, 0], out[o, 1] = left[a, 0], left[a, 1]
            out[o, 2], out[o, 3] = left[a, 2], left[a, 3]
            continue
        if kind == PRODUCT:
            for e in range(begin, end):
                a, b = code.a[e], code.b[e]
                w += left[a, 0] * right[b, 0]
                x += left[a, 1] * right[b, 1]
                y += left[a, 2] * right[b, 2]
                z += left[a, 3] * right[b, 3]
        elif kind in (MAX, RELU):
            w = x = y = z = np.int64(0)
            for e in range(begin, end):
                a = code.a[e]
                if kind == RELU or e > begin:
                    w, x = max(w, left[a, 0]), max(x, left[a, 1])
                    y, z = max(y, left[a, 2]), max(z, left[a, 3])
                else:
                    w, x, y, z = left[a, 0], left[a, 1], left[a, 2], left[a, 3]
        else:
            weight = code.weight[index]
            for e in range(begin, end):
                a, b = code.a[e], code.b[e]
                number = np.int64(1)
                if weight >= 0:
                    number = code.numerator[weight + e - entry]
                if b < 0:
                    w += number * left[a, 0]
                    x += number * left[a, 1]
                    y += number * left[a, 2]
                    z += number * left[a, 3]
                elif a < 0:
                    w += number * right[b, 0]
                    x += number * right[b, 1]
                    y += number * right[b, 2]
                    z += number * right[b, 3]
                else:
                    w += number * left[a, 0] * right[b, 0]
                    x += number * left[a, 1] * right[b, 1]
                    y += number * left[a, 2] * right[b, 2]
                    z += number * left[a, 3] * right[b, 3]
            factor, shift = code.factor[index], code.shift[index]
            w, x = (w * factor) >> shift, (x * factor) >> shift
            y, z = (y * factor) >> shift, (z * factor) >> shift
            if kind == SUM_RELU:
                zero = np.int64(0)
                w, x, y, z = max(w, zero), max(x, zero), max(y, zero), max(z, zero)
        out[o, 0], out[o, 1], out[o, 2], out[o, 3] = w, x, y, z


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def identify(type_: int, data: Array, size: int) -> Any:
    """Return the 64-bit id of a tensor: a mix of its type and elements, never 0."""
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    w = mix(np.uint64(type_ + 1))
    x, y, z = w ^ np.uint64(1), w ^ np.uint64(2), w ^ np.uint64(3)
    for o in range(size):
        w = (w ^ np.uint64(data[o, 0])) * multiplier
        x = (x ^ np.uint64(data[o, 1])) * multiplier
        y = (y ^ np.uint64(data[o, 2])) * multiplier
        z = (z ^ np.uint64(data[o, 3])) * multiplier
        w ^= w >> np.uint64(29)
        x ^= x >> np.uint64(29)
        y ^= y >> np.uint64(29)
        z ^= z >> np.uint64(29)
    return mix(mix(mix(mix(w) + x) + y) + z) | np.uint64(1)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        for output in range(code.outputs[handle]):
            index = code.structures[handle, output]
            _evaluate(index, code, left, right, scratch)
            out[row, output] = identify(code.types[handle, output], scratch, code.size[index])


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def store(
    handles: Array, a: Array, b: Array, code: Code, data: Array, offset: Array, first: int
) -> None:
    tensor = first
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        for output in range(code.outputs[handle]):
            index = code.structures[handle, output]
            _evaluate(index, code, left, right, data[offset[tensor] :])
            tensor += 1


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
    previous, size, type_ = 1, 0, -1
    for row in range(handles.shape[0]):
        handle = handles[row]
        left = data[offset[a[row]] :]
        right = data[offset[b[row]] :] if b[row] >= 0 else left
        index = code.structures[handle, outputs[row]]
        mine = scratch[1 - previous]
        _evaluate(index, code, left, right, mine)
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
