"""Rows of numbers of any type to and from chunks of float32, in which the machine computes.

Truth is the number 1. To integers by truncation, to bool by comparison with 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from soapstone.kernels.cpu.elementwise.lane_loops import fill_floats, get, loop, put
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
    WIDTH,
    Lanes,
    chosen,
    converts_halves,
    load_one,
    of_bfloat16,
    to_bfloat16,
    where,
)
from soapstone.native.simd import vectorised


class _Form(NamedTuple):
    """How numbers of a type are held: by LLVM's type, bytes with a sign, or as truths."""

    element: Any
    signed: bool = False
    truth: bool = False


_FORMS = {
    "float32": _Form(F32),
    "bool": _Form(I8, truth=True),
    "int32": _Form(I32),
    "int64": _Form(I64),
    "float64": _Form(F64),
    "uint8": _Form(I8),
    "int8": _Form(I8, signed=True),
    "bfloat16": _Form(I16),
}
if converts_halves():
    _FORMS["float16"] = _Form(F16)
ITEM_BYTES = {name: WIDTH[str(form.element)] for name, form in _FORMS.items()}
KINDS = {name: kind for kind, name in enumerate(_FORMS)}  # numbers of the types in blocks


def _narrowed(value: Lanes, form: _Form) -> Lanes:
    if form.truth:
        return value.compare("!=", 0.0).cast(I8)
    if form.element == I8:
        return value.cast(I32).cast(I8)
    return to_bfloat16(value) if form.element == I16 else value.cast(form.element)


def _widened(value: Lanes, form: _Form) -> Lanes:
    if form.element == I16:
        return of_bfloat16(value)
    made = value.cast(F32)  # of bytes: without a sign
    return where(made < 128.0, made, made - 256.0) if form.signed else made


def _of_kind(kind: Lanes, write: Callable[[_Form], Any]) -> Any:
    """What is written for the type of that number."""
    return chosen(kind, {n: partial(write, form) for n, form in enumerate(_FORMS.values())})


def _load(form: _Form, to: Lanes, source: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, _widened(get(source, i, width, mask, form.element), form), mask)

    loop(n.builder, n, body, LANES)


def _store(form: _Form, to: Lanes, source: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, _narrowed(get(source, i, width, mask), form), mask)

    loop(n.builder, n, body, LANES)


def _read(form: _Form, source: Lanes) -> Lanes:
    return _widened(load_one(source, form.element), form)


def _write(form: _Form, to: Lanes, value: Lanes) -> None:
    b = to.builder
    made = _narrowed(value.cast(F32), form)
    b.store(made.value, b.inttoptr(to.value, form.element.as_pointer()))


_read_any = vectorised(lambda kind, source: _of_kind(kind, lambda f: _read(f, source)))
_write_any = vectorised(lambda kind, to, x: _of_kind(kind, lambda f: _write(f, to, x)))
_load_any = vectorised(lambda kind, to, x, n: _of_kind(kind, lambda f: _load(f, to, x, n)))
_store_any = vectorised(lambda kind, to, x, n: _of_kind(kind, lambda f: _store(f, to, x, n)))
store_bfloat16 = vectorised(lambda to, x, n: _store(_FORMS["bfloat16"], to, x, n))


@routine
def read_number(kind: int, source: int) -> Any:
    """The number of that type at the address, as float32."""
    return _read_any(kind, source)


@routine
def _write_number(kind: int, target: int, value: float) -> None:
    _write_any(kind, target, value)


@routine
def _load_row(kind: int, target: int, source: int, n: int) -> None:
    _load_any(kind, target, source, n)


@routine
def _store_row(kind: int, target: int, source: int, n: int) -> None:
    _store_any(kind, target, source, n)


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
