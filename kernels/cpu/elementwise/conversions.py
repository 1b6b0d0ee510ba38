"""Rows of numbers of any type to and from chunks of float32, in which the machine computes.

Truth is the number 1. To integers by truncation, to bool by comparison with 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, fill_floats, get, loop, put
from soapstone.native.entries import routine
from soapstone.native.intrinsics import f32p
from soapstone.native.lanes import (
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    converts_halves,
    load_lanes,
    load_some,
    of_bfloat16,
    store_lanes,
    store_some,
    to_bfloat16,
    where,
)
from soapstone.native.simd import vectorised

# Numbers of the types in argument blocks.
ITEM_BYTES = {
    name: np.dtype(name).itemsize
    for name in ("float32", "bool", "int32", "int64", "float64", "uint8", "int8")
}
ITEM_BYTES["bfloat16"] = 2
if converts_halves():
    ITEM_BYTES["float16"] = 2
KINDS = {name: kind for kind, name in enumerate(ITEM_BYTES)}
_BOOL, _INT32, _INT64, _FLOAT64, _INT8, _BFLOAT16, _FLOAT16 = 1, 2, 3, 4, 6, 7, 8


def _narrowed(value: Lanes, element: Any, truth: bool) -> Lanes:
    if truth:
        return value.compare("!=", 0.0).cast(I8)
    if element == I8:
        return value.cast(I32).cast(I8)
    if element == I16:
        return to_bfloat16(value)
    return value.cast(element)


def _widened(value: Lanes, signed: bool) -> Lanes:
    if value.element == I16:
        return of_bfloat16(value)
    made = value.cast(F32)  # of bytes: without a sign
    return where(made < 128.0, made, made - 256.0) if signed else made


def _loader(element: Any, signed: bool = False) -> Any:
    @vectorised
    def run(to: Lanes, source: Lanes, n: Lanes) -> None:
        def body(i: Lanes, width: int, mask: Lanes | None) -> None:
            if mask is None:
                value = load_lanes(source, i, element, width)
            else:
                value = load_some(source, i, mask, 0, element, width)
            put(to, i, _widened(value, signed), mask)

        loop(n.builder, n, body, LANES)

    return run


def _storer(element: Any, truth: bool = False) -> Any:
    @vectorised
    def run(to: Lanes, source: Lanes, n: Lanes) -> None:
        def body(i: Lanes, width: int, mask: Lanes | None) -> None:
            value = _narrowed(get(source, i, width, mask), element, truth)
            if mask is None:
                store_lanes(to, i, value)
            else:
                store_some(to, i, value, mask)

        loop(n.builder, n, body, LANES)

    return run


def _reader(element: Any, signed: bool = False) -> Any:
    @vectorised
    def run(source: Lanes) -> Lanes:
        b = source.builder
        value = Lanes(b, b.load(b.inttoptr(source.value, element.as_pointer())))
        return _widened(value, signed)

    return run


def _writer(element: Any, truth: bool = False) -> Any:
    @vectorised
    def run(to: Lanes, value: Lanes) -> None:
        b = to.builder
        made = _narrowed(value.cast(F32), element, truth)
        b.store(made.value, b.inttoptr(to.value, ir.PointerType(element)))

    return run


_load_bytes, _load_int32, _load_int64, _load_float64 = map(_loader, (I8, I32, I64, F64))
_load_float16, _read_float16, _store_float16, _write_float16 = (
    make(F16 if converts_halves() else F32) for make in (_loader, _reader, _storer, _writer)
)
_load_bfloat16, _read_bfloat16, store_bfloat16, _write_bfloat16 = (
    make(I16) for make in (_loader, _reader, _storer, _writer)
)
_load_int8, _read_int8 = _loader(I8, True), _reader(I8, True)
_read_byte, _read_int32, _read_int64, _read_float64 = map(_reader, (I8, I32, I64, F64))
_store_bool, _write_bool = _storer(I8, True), _writer(I8, True)
_store_bytes, _store_int32, _store_int64, _store_float64 = map(_storer, (I8, I32, I64, F64))
_write_byte, _write_int32, _write_int64, _write_float64 = map(_writer, (I8, I32, I64, F64))


@routine
def read_number(kind: int, source: int) -> Any:
    """The number of that type at the address, as float32."""
    if kind == 0:
        return f32p(source)[0]
    if kind == _INT32:
        return _read_int32(source)
    if kind == _INT64:
        return _read_int64(source)
    if kind == _FLOAT64:
        return _read_float64(source)
    if kind == _INT8:
        return _read_int8(source)
    if kind == _BFLOAT16:
        return _read_bfloat16(source)
    if kind == _FLOAT16:
        return _read_float16(source)
    return _read_byte(source)


@routine
def _write_number(kind: int, target: int, value: float) -> None:
    if kind == 0:
        f32p(target)[0] = value
    elif kind == _BOOL:
        _write_bool(target, value)
    elif kind == _INT32:
        _write_int32(target, value)
    elif kind == _INT64:
        _write_int64(target, value)
    elif kind == _FLOAT64:
        _write_float64(target, value)
    elif kind == _BFLOAT16:
        _write_bfloat16(target, value)
    elif kind == _FLOAT16:
        _write_float16(target, value)
    else:
        _write_byte(target, value)


@routine
def _load_row(kind: int, target: int, source: int, n: int) -> None:
    if kind == 0:
        copy_floats(target, source, n)
    elif kind == _INT32:
        _load_int32(target, source, n)
    elif kind == _INT64:
        _load_int64(target, source, n)
    elif kind == _FLOAT64:
        _load_float64(target, source, n)
    elif kind == _INT8:
        _load_int8(target, source, n)
    elif kind == _BFLOAT16:
        _load_bfloat16(target, source, n)
    elif kind == _FLOAT16:
        _load_float16(target, source, n)
    else:
        _load_bytes(target, source, n)


@routine
def _store_row(kind: int, target: int, source: int, n: int) -> None:
    if kind == 0:
        copy_floats(target, source, n)
    elif kind == _BOOL:
        _store_bool(target, source, n)
    elif kind == _INT32:
        _store_int32(target, source, n)
    elif kind == _INT64:
        _store_int64(target, source, n)
    elif kind == _FLOAT64:
        _store_float64(target, source, n)
    elif kind == _BFLOAT16:
        store_bfloat16(target, source, n)
    elif kind == _FLOAT16:
        _store_float16(target, source, n)
    else:
        _store_bytes(target, source, n)


@routine
def pack_rows(
    kind: int, item: int, target: int, source: int, inner: int, down: int, rows: int, n: int
) -> None:
    """Copy rows of n numbers, `item` bytes each and strided in any way, to contiguous float32."""
    if inner == item and down == n * item:
        _load_row(kind, target, source, rows * n)
        return
    for r in range(rows):
        to, at = target + r * n * 4, source + r * down
        if inner == item:
            _load_row(kind, to, at, n)
        elif inner == 0:
            fill_floats(to, read_number(kind, at), n)
        elif kind == 0:
            for c in range(n):
                f32p(to)[c] = f32p(at + c * inner)[0]
        else:
            for c in range(n):
                f32p(to)[c] = read_number(kind, at + c * inner)


@routine
def unpack_rows(
    kind: int, item: int, target: int, source: int, inner: int, down: int, rows: int, n: int
) -> None:
    """The inverse of `pack_rows`."""
    if inner == item and down == n * item:
        _store_row(kind, target, source, rows * n)
        return
    for r in range(rows):
        to, at = target + r * down, source + r * n * 4
        if inner == item:
            _store_row(kind, to, at, n)
        elif kind == 0:
            for c in range(n):
                f32p(to + c * inner)[0] = f32p(at)[c]
        else:
            for c in range(n):
                _write_number(kind, to + c * inner, f32p(at)[c])
