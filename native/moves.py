"""What moves elements of one, two, four or eight bytes, runs of them at any steps; rows' places."""

from __future__ import annotations

from typing import Any

from soapstone.cache.deferred import cgutils
from soapstone.native.entries import helper, routine
from soapstone.native.intrinsics import i16p, i32p, i64p, u8p
from soapstone.native.lanes import I8, I32, Lanes, first, load_some, store_some
from soapstone.native.simd import vectorised


@helper
def row_offset(w: Any, extents: int, strides: int, rank: int, index: int) -> Any:
    """The offset in bytes of row number `index`; the tables lie at those words of the block."""
    offset = 0
    for d in range(rank - 1, 0, -1):
        extent = w[extents + d]
        offset += (index % extent) * w[strides + d]
        index = index // extent
    return offset + index * w[strides]


@helper
def row_at(t: Any, rank: int, array: int, row: int) -> Any:
    """The offset of a row in array number `array` of those whose walk a table is.

    t: `rank` extents, then as many strides for each array.
    """
    return row_offset(t, 0, rank * (1 + array), rank, row)


@vectorised
def copy_bytes(to: Lanes, x: Lanes, count: Lanes) -> None:
    """Copy `count` bytes, many of them."""
    b = to.builder
    places = [b.inttoptr(lanes.value, I8.as_pointer()) for lanes in (to, x)]
    cgutils.raw_memcpy(b, *places, count.value, 1)


@vectorised
def copy_small(to: Lanes, x: Lanes, words: Lanes) -> None:
    """Copy up to 16 words of four bytes."""
    held = first(words)
    store_some(to, 0, load_some(x, 0, held, 0, I32), held)


def _element_loops(pointer: Any) -> tuple[Any, Any]:
    @routine
    def fill(to: int, x: int, n: int) -> None:
        y, value = pointer(to), pointer(x)[0]
        for i in range(n):
            y[i] = value

    @routine
    def strided(to: int, to_step: int, x: int, x_step: int, n: int) -> None:
        # Steps known to the compiler, for the commonest ones.
        if to_step == 1 and x_step == -1:
            for i in range(n):
                pointer(to)[i] = pointer(x)[-i]
        elif to_step == 1 and x_step == 2:
            for i in range(n):
                pointer(to)[i] = pointer(x)[2 * i]
        elif to_step == 1:
            for i in range(n):
                pointer(to)[i] = pointer(x)[i * x_step]
        else:
            for i in range(n):
                pointer(to)[i * to_step] = pointer(x)[i * x_step]

    return fill, strided


_fill_1, _strided_1 = _element_loops(u8p)
_fill_2, _strided_2 = _element_loops(i16p)
_fill_4, _strided_4 = _element_loops(i32p)
_fill_8, _strided_8 = _element_loops(i64p)


@helper
def fill_run(size: int, to: int, x: int, n: int) -> None:
    """Write the element at x n times, one after the other."""
    if size == 4:
        _fill_4(to, x, n)
    elif size == 1:
        _fill_1(to, x, n)
    elif size == 8:
        _fill_8(to, x, n)
    else:
        _fill_2(to, x, n)


@helper
def strided_run(size: int, to: int, to_step: int, x: int, x_step: int, n: int) -> None:
    """Copy n elements at steps in bytes."""
    if size == 4:
        _strided_4(to, to_step // 4, x, x_step // 4, n)
    elif size == 1:
        _strided_1(to, to_step, x, x_step, n)
    elif size == 8:
        _strided_8(to, to_step // 8, x, x_step // 8, n)
    else:
        _strided_2(to, to_step // 2, x, x_step // 2, n)


@helper
def move(size: int, to: int, x: int) -> None:
    """Copy one element of `size` bytes."""
    if size == 4:
        i32p(to)[0] = i32p(x)[0]
    elif size == 8:
        i64p(to)[0] = i64p(x)[0]
    elif size == 1:
        u8p(to)[0] = u8p(x)[0]
    else:
        i16p(to)[0] = i16p(x)[0]


@routine
def copy_run(size: int, to: int, to_step: int, x: int, x_step: int, n: int) -> None:
    """Copy n elements of `size` bytes at steps in bytes."""
    if n == 1:
        move(size, to, x)
    elif to_step != size or x_step != size:
        strided_run(size, to, to_step, x, x_step, n)
    elif n * size <= 64 and size >= 4:
        copy_small(to, x, n * size // 4)
    else:
        copy_bytes(to, x, n * size)


@routine
def zero_run(size: int, to: int, step: int, n: int) -> None:
    """Write n zeros of `size` bytes at steps in bytes."""
    if step == size:
        for i in range(n * size):
            u8p(to)[i] = 0
        return
    for i in range(n):
        for j in range(size):
            u8p(to + i * step)[j] = 0
