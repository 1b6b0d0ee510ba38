"""Programs from bytes to bytes: a table of what becomes of each of them, and a look at it.

The table is made on each run, by the program on 256 numbers, so its other operands may change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.cache.objects import features
from soapstone.dtypes import BYTES, name_of
from soapstone.kernels.cpu.elementwise.programs import Program
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, sequence
from soapstone.native.intrinsics import u8p
from soapstone.native.lanes import I8, I64, Lanes, load_lanes, store_lanes, stretch
from soapstone.native.memory import Scratch, aligned_array
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import walk

_LEAST = 4096  # bytes: for fewer a table is not worth making
_ITEM = 4096  # bytes
_SIDE = 64  # bytes that are looked up at once
_TABLE = Fields("x y table size")
_table_of = _TABLE.at

Bind = Callable[[Program, Sequence[Array], Sequence[Array], int], Entry | None]


def _looked_up(table: list[Lanes], x: Lanes) -> Lanes:
    """The bytes at the places x of a table of 256: those of either half, by the highest bit."""
    b, kind = x.builder, x.kind
    shape = ir.FunctionType(kind, [kind] * 3)
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    function = cgutils.get_or_insert_function(b.module, shape, name)
    low, high = (
        b.call(function, [table[half].value, x.value, table[half + 1].value]) for half in (0, 2)
    )
    return Lanes(b, b.select((x < 0).value, high, low))


@vectorised
def _look_up_vectors(table: Lanes, x: Lanes, to: Lanes, count: Lanes) -> None:
    """Write what a table has at the places x, `count` bytes, a multiple of 64."""
    held = [load_lanes(table, _SIDE * part, I8, _SIDE) for part in range(4)]

    def turn(k: Lanes, _: list[Lanes]) -> list[Lanes]:
        store_lanes(to, k, _looked_up(held, load_lanes(x, k, I8, _SIDE)))
        return []

    stretch(count.builder, (I64(0), count.value), _SIDE, [], turn)


_WHOLE = _SIDE if "avx512vbmi" in features() else 0


@native("body")
def _look_up(block: Any, begin: int, end: int) -> int:
    w = _table_of(block)
    first, past = begin * _ITEM, min(end * _ITEM, w.size)
    table, x, to = u8p(w.table), u8p(w.x), u8p(w.y)
    if _WHOLE:
        whole = (past - first) // _WHOLE * _WHOLE
        _look_up_vectors(w.table, w.x + first, w.y + first, whole)
        first += whole
    for k in range(first, past):
        to[k] = table[x[k]]
    return 0


def by_table(
    program: Program, inputs: Sequence[Array], outputs: Sequence[Array], threads: int, bind: Bind
) -> Entry | None:
    """Return the entry of a program of one array of bytes and numbers, None where it is another.

    bind: returns the entry of a program.
    """
    whole = [number for number, x in enumerate(inputs) if x.size != 1]
    if len(outputs) != 1 or len(whole) != 1:
        return None
    (number,), (y,) = whole, outputs
    x = inputs[number]
    if not {name_of(a.dtype) for a in (x, y)} <= set(BYTES) or x.shape != y.shape:
        return None
    if y.size < _LEAST or walk(y.shape, (x, y), lead=1).strides != ((1,), (1,)):
        return None
    every, made = aligned_array((256,), x.dtype), aligned_array((256,), y.dtype).view(Scratch)
    every.view(np.uint8)[:] = np.arange(256, dtype=np.uint8)
    given = [every if i == number else each.reshape(()) for i, each in enumerate(inputs)]
    first = bind(program, given, [made], 1)
    if first is None:
        return None
    block = _TABLE.pack(x=x, y=y, table=made, size=y.size)
    items, threads = -(-y.size // _ITEM), useful_threads(threads, 2 * y.size)
    return sequence([first, parallel_for(_look_up, block, items, threads)])
