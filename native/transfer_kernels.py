"""Native copy, fill and fold kernels on strided arrays; argument blocks are int64 words.

Elements are combined one by one in the order of the parts, so a fold gives the same bits however
it is cut over processors. Compiled on first use, one fold for each dtype and reduction.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from soapstone.cache.compiled import cfunc
from soapstone.native.intrinsics import pointer

CHUNK = 2048  # elements of a row folded at a time, so that the output stays in the first cache
SUM, PROD, MAX, MIN = 0, 1, 2, 3
FIRST, COMBINE, IDENTITY = 0, 1, 2  # how a fold starts: with the first part, the output, identity


@cfunc("int32(voidptr)")
def copy_words(block: Any) -> int:
    """Copy a strided array; block: axes, unit bytes, target, source, then axes x 3 words:
    extents, target strides, source strides (bytes). The last axis is the inner loop."""
    head = carray(block, (4,), types.int64)
    axes = head[0]
    unit = head[1]
    w = carray(block, (4 + 3 * axes,), types.int64)
    outer = 1
    for axis in range(axes - 1):
        outer *= w[4 + axis]
    n = w[3 + axes]
    to = w[3 + 2 * axes]
    by = w[3 + 3 * axes]
    for row in range(outer):
        target = w[2]
        source = w[3]
        rest = row
        for axis in range(axes - 2, -1, -1):
            extent = w[4 + axis]
            step = rest % extent
            rest //= extent
            target += step * w[4 + axes + axis]
            source += step * w[4 + 2 * axes + axis]
        if to == unit and by == unit:
            size = n * unit
            words = size // 8
            t8 = carray(pointer(target), (words,), types.uint64)
            s8 = carray(pointer(source), (words,), types.uint64)
            for i in range(words):
                t8[i] = s8[i]
            t1 = carray(pointer(target + words * 8), (size - words * 8,), types.uint8)
            s1 = carray(pointer(source + words * 8), (size - words * 8,), types.uint8)
            for i in range(size - words * 8):
                t1[i] = s1[i]
        elif by == 0 and to == unit and unit == 4:
            same = carray(pointer(source), (1,), types.uint32)[0]
            row4 = carray(pointer(target), (n,), types.uint32)
            for i in range(n):
                row4[i] = same
        elif by == 0 and to == unit and unit == 8:
            whole = carray(pointer(source), (1,), types.uint64)[0]
            row8 = carray(pointer(target), (n,), types.uint64)
            for i in range(n):
                row8[i] = whole
        elif unit == 8:
            for i in range(n):
                t = carray(pointer(target + i * to), (1,), types.uint64)
                t[0] = carray(pointer(source + i * by), (1,), types.uint64)[0]
        elif unit == 4 and to == 4:
            a = carray(pointer(target), (n,), types.uint32)
            for i in range(n):
                a[i] = carray(pointer(source + i * by), (1,), types.uint32)[0]
        elif unit == 4:
            for i in range(n):
                b = carray(pointer(target + i * to), (1,), types.uint32)
                b[0] = carray(pointer(source + i * by), (1,), types.uint32)[0]
        elif unit == 2:
            for i in range(n):
                c = carray(pointer(target + i * to), (1,), types.uint16)
                c[0] = carray(pointer(source + i * by), (1,), types.uint16)[0]
        else:
            for i in range(n):
                d = carray(pointer(target + i * to), (1,), types.uint8)
                d[0] = carray(pointer(source + i * by), (1,), types.uint8)[0]
    return 0


@cache
def fold_kernel(dtype: str, reduction: str, start: Any) -> Any:
    """The fold of one dtype and reduction; `start` is the reduction's identity.

    block: number of stages, then for each stage: mode, parts, axes, output, extents, output
    strides, and for each part its address and strides (bytes). The last axis is the inner loop.
    """
    kind = from_dtype(np.dtype(dtype))
    item = kind.bitwidth // 8
    wanted = (SUM, PROD, MAX, MIN)[("sum", "prod", "max", "min").index(reduction)]

    @cfunc("int32(voidptr)")
    def fold(block: Any) -> int:
        stages = carray(block, (1,), types.int64)[0]
        w = carray(block, (1 << 40,), types.int64)
        base = 1
        for _stage in range(stages):
            mode = w[base]
            parts = w[base + 1]
            axes = w[base + 2]
            extents = base + 4
            strides = extents + axes
            table = strides + axes
            outer = 1
            for axis in range(axes - 1):
                outer *= w[extents + axis]
            n = w[extents + axes - 1]
            to = w[strides + axes - 1]
            for row in range(outer):
                out_row = w[base + 3]
                rest = row
                for axis in range(axes - 2, -1, -1):
                    out_row += (rest % w[extents + axis]) * w[strides + axis]
                    rest //= w[extents + axis]
                for low in range(0, n, CHUNK):
                    m = min(CHUNK, n - low)
                    out = carray(pointer(out_row + low * to), (m,), kind)
                    if mode == IDENTITY:
                        for i in range(m):
                            carray(pointer(out_row + (low + i) * to), (1,), kind)[0] = start
                    for part in range(parts):
                        entry = table + part * (1 + axes)
                        address = w[entry]
                        rest = row
                        for axis in range(axes - 2, -1, -1):
                            address += (rest % w[extents + axis]) * w[entry + 1 + axis]
                            rest //= w[extents + axis]
                        by = w[entry + axes]
                        address += low * by
                        first = part == 0 and mode == FIRST
                        if to == item and by == item:
                            given = carray(pointer(address), (m,), kind)
                            if first:
                                for i in range(m):
                                    out[i] = given[i]
                            elif wanted == SUM:
                                for i in range(m):
                                    out[i] = out[i] + given[i]
                            elif wanted == PROD:
                                for i in range(m):
                                    out[i] = out[i] * given[i]
                            else:
                                for i in range(m):
                                    a = out[i]
                                    b = given[i]
                                    keep = a >= b if wanted == MAX else a <= b
                                    out[i] = a if keep or a != a else b
                        else:
                            for i in range(m):
                                cell = carray(pointer(out_row + (low + i) * to), (1,), kind)
                                b = carray(pointer(address + i * by), (1,), kind)[0]
                                a = cell[0]
                                keep = a >= b if wanted == MAX else a <= b
                                if first:
                                    cell[0] = b
                                elif wanted == SUM:
                                    cell[0] = a + b
                                elif wanted == PROD:
                                    cell[0] = a * b
                                else:
                                    cell[0] = a if keep or a != a else b
            base = table + parts * (1 + axes)
        return 0

    return fold
