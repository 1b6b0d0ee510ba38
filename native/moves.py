"""What moves elements of one, two, four or eight bytes, runs of them at any steps; rows' places."""

from __future__ import annotations

from typing import Any

from soapstone.cache.deferred import cgutils
from soapstone.native.entries import helper, routine
from soapstone.native.intrinsics import i16p, i32p, i64p, u8p
from soapstone.native.lanes import I8, I32, Lanes, first, load_some, store_some
from soapstone.native.simd import vectorised


@helper
def row_offset(t: Any, strides: int, rank: int, index: int) -> Any:
    """The offset in bytes of row number `index` in a table: extents, and strides at that word."""
    offset = 0
    for d in range(rank - 1, 0, -1):
        extent = t[d]
        offset += (index % extent) * t[strides + d]
        index = index // extent
    return offset + index * t[strides]


@helper
def row_at(t: Any, rank: int, array: int, row: int) -> Any:
    """The offset of a row in array number `array` of those whose walk a table is.

    t: `rank` extents, then as many strides for each array.
    """
    return row_offset(t, rank * (1 + array), rank, row)


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


def _loops(size: int, pointer: Any) -> tuple[Any, Any, Any]:
    """The loops over elements of one size; steps are in bytes."""

    @routine
    def fill(to: int, x: int, n: int) -> None:
        y, value = pointer(to), pointer(x)[0]
        for i in range(n):
            y[i] = value

    @routine
    def strided(to: int, to_step: int, x: int, x_step: int, n: int) -> None:
        to_step, x_step = to_step // size, x_step // size
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

    @helper
    def one(to: int, x: int) -> None:
        pointer(to)[0] = pointer(x)[0]

    return fill, strided, one


def _of_size(of_1: Any, of_2: Any, of_4: Any, of_8: Any) -> Any:
    """The function of a size in bytes that calls the one of elements of that size."""

    @helper
    def run(size: int, *arguments: int) -> None:
        if size == 4:
            of_4(*arguments)
        elif size == 1:
            of_1(*arguments)
        elif size == 8:
            of_8(*arguments)
        else:
            of_2(*arguments)

    return run


_LOOPS = (_loops(1, u8p), _loops(2, i16p), _loops(4, i32p), _loops(8, i64p))
# fill_run(size, to, x, n): the element at x, n times, one after the other.
# strided_run(size, to, to_step, x, x_step, n): n elements copied.
# move(size, to, x): one element copied.
fill_run, strided_run, move = (_of_size(*made) for made in zip(*_LOOPS))


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
