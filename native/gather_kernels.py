"""Native kernels that move or combine rows at given offsets; argument blocks are int64 words.

block: rows, unit (bytes), target, source; for target and source: the address of each row's offset
(int64, bytes), or 0 and the bytes between rows; axes of a row, then axes x 3 words: extents, target
strides, source strides (bytes).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types

from soapstone.cache.compiled import cfunc
from soapstone.native.intrinsics import pointer
from soapstone.native.transfer_kernels import MAX, MIN, PROD, SUM

_HEAD = 9


@cfunc("int32(voidptr)")
def move_rows(block: Any) -> int:
    """Copy rows. The last axis of a row is the inner loop; rows of one element have loops apart."""
    head = carray(block, (_HEAD,), types.int64)
    rows = head[0]
    unit = head[1]
    axes = head[8]
    w = carray(block, (_HEAD + 3 * axes,), types.int64)
    to_step = head[5]
    by_step = head[7]
    to_rows = carray(pointer(head[4]), (rows,), types.int64)
    by_rows = carray(pointer(head[6]), (rows,), types.int64)
    outer = 1
    for axis in range(axes - 1):
        outer *= w[_HEAD + axis]
    n = w[_HEAD - 1 + axes]
    to = w[_HEAD - 1 + 2 * axes]
    by = w[_HEAD - 1 + 3 * axes]
    single = axes == 1 and n == 1
    if single and unit == 4 and head[4] == 0 and head[6] != 0 and to_step == 4:
        packed4 = carray(pointer(head[2]), (rows,), types.uint32)
        for i in range(rows):
            packed4[i] = carray(pointer(head[3] + by_rows[i]), (1,), types.uint32)[0]
        return 0
    if single and unit == 8 and head[4] == 0 and head[6] != 0 and to_step == 8:
        packed8 = carray(pointer(head[2]), (rows,), types.uint64)
        for i in range(rows):
            packed8[i] = carray(pointer(head[3] + by_rows[i]), (1,), types.uint64)[0]
        return 0
    if single and unit == 4 and head[6] == 0 and head[4] != 0 and by_step == 4:
        given4 = carray(pointer(head[3]), (rows,), types.uint32)
        for i in range(rows):
            carray(pointer(head[2] + to_rows[i]), (1,), types.uint32)[0] = given4[i]
        return 0
    if single and unit == 8 and head[6] == 0 and head[4] != 0 and by_step == 8:
        given8 = carray(pointer(head[3]), (rows,), types.uint64)
        for i in range(rows):
            carray(pointer(head[2] + to_rows[i]), (1,), types.uint64)[0] = given8[i]
        return 0
    for row in range(rows):
        for line in range(outer):
            target = head[2] + (to_rows[row] if head[4] else row * to_step)
            source = head[3] + (by_rows[row] if head[6] else row * by_step)
            left = line
            for axis in range(axes - 2, -1, -1):
                extent = w[_HEAD + axis]
                step = left % extent
                left //= extent
                target += step * w[_HEAD + axes + axis]
                source += step * w[_HEAD + 2 * axes + axis]
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
            elif unit == 8:
                for i in range(n):
                    b8 = carray(pointer(target + i * to), (1,), types.uint64)
                    b8[0] = carray(pointer(source + i * by), (1,), types.uint64)[0]
            elif unit == 4:
                for i in range(n):
                    b4 = carray(pointer(target + i * to), (1,), types.uint32)
                    b4[0] = carray(pointer(source + i * by), (1,), types.uint32)[0]
            else:
                for i in range(n):
                    for byte in range(unit):
                        b1 = carray(pointer(target + i * to + byte), (1,), types.uint8)
                        b1[0] = carray(pointer(source + i * by + byte), (1,), types.uint8)[0]
    return 0


@cache
def combine_rows(dtype: str, reduction: str) -> Any:
    """The kernel that combines rows of one dtype into the target, one after another."""
    kind = from_dtype(np.dtype(dtype))
    wanted = (SUM, PROD, MAX, MIN)[("sum", "prod", "max", "min").index(reduction)]

    @cfunc("int32(voidptr)")
    def combine(block: Any) -> int:
        head = carray(block, (_HEAD,), types.int64)
        rows = head[0]
        axes = head[8]
        w = carray(block, (_HEAD + 3 * axes,), types.int64)
        to_step = head[5]
        by_step = head[7]
        to_rows = carray(pointer(head[4]), (rows,), types.int64)
        by_rows = carray(pointer(head[6]), (rows,), types.int64)
        outer = 1
        for axis in range(axes - 1):
            outer *= w[_HEAD + axis]
        n = w[_HEAD - 1 + axes]
        to = w[_HEAD - 1 + 2 * axes]
        by = w[_HEAD - 1 + 3 * axes]
        for row in range(rows):
            for line in range(outer):
                target = head[2] + (to_rows[row] if head[4] else row * to_step)
                source = head[3] + (by_rows[row] if head[6] else row * by_step)
                left = line
                for axis in range(axes - 2, -1, -1):
                    extent = w[_HEAD + axis]
                    step = left % extent
                    left //= extent
                    target += step * w[_HEAD + axes + axis]
                    source += step * w[_HEAD + 2 * axes + axis]
                for i in range(n):
                    cell = carray(pointer(target + i * to), (1,), kind)
                    b = carray(pointer(source + i * by), (1,), kind)[0]
                    a = cell[0]
                    if wanted == SUM:
                        cell[0] = a + b
                    elif wanted == PROD:
                        cell[0] = a * b
                    else:
                        keep = a >= b if wanted == MAX else a <= b
                        cell[0] = a if keep or a != a else b
        return 0

    return combine
