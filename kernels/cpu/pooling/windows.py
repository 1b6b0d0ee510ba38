"""Lanes for pooling: choices with positions, bytes of positions, rows split by stride."""

from __future__ import annotations

from llvmlite import ir

from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats
from soapstone.native.entries import routine
from soapstone.native.intrinsics import f32p
from soapstone.native.lanes import (
    F32,
    I8,
    I32,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_some,
)
from soapstone.native.simd import load, store_first, vectorised


def _takes(v: Lanes, best: Lanes) -> Lanes:
    """Where v comes before the best so far: larger, or the first NaN."""
    return (v > best) | (v.compare("!=", v) & best.compare("==", best))


def _shuffle(a: Lanes, b: Lanes, order: list[int]) -> Lanes:
    mask = ir.Constant(ir.VectorType(I32, len(order)), order)
    return Lanes(a.builder, a.builder.shuffle_vector(a.value, b.value, mask))


def _split(p: Lanes, i: Lanes, n: Lanes, odd: int) -> Lanes:
    both = load_some(p, i, first(n, 2 * LANES), 0.0, F32, 2 * LANES)
    return _shuffle(both, both, [2 * k + odd for k in range(LANES)])


def _zip(p: Lanes, i: Lanes, a: Lanes, b: Lanes, n: Lanes) -> None:
    order = [k // 2 + LANES * (k % 2) for k in range(2 * LANES)]
    store_some(p, i, _shuffle(a, b, order), first(n, 2 * LANES))


takes = vectorised(_takes)
first_lanes = vectorised(lambda n: first(n))
load_where = vectorised(lambda p, i, mask: load_some(p, i, mask))
store_where = vectorised(lambda p, i, v, mask: store_some(p, i, v, mask))
load_ints = vectorised(lambda p, i: load_lanes(p, i, I32))
splat_int = vectorised(lambda n: n.cast(I32).splat())
load_bytes_where = vectorised(lambda p, i, mask: load_some(p, i, mask, 0, I8))
store_bytes_where = vectorised(lambda p, i, v, mask: store_some(p, i, v.cast(I8), mask))
bytes_equal = vectorised(lambda v, n: v.compare("==", n.cast(I8).splat()))
_evens = vectorised(lambda p, i, n: _split(p, i, n, 0))
_odds = vectorised(lambda p, i, n: _split(p, i, n, 1))
_store_pairs = vectorised(_zip)


@routine
def split_row(buffer: int, space: int, source: int, n: int, low: int, step: int) -> None:
    """Put element j of the row at q = low + j: position q // step of phase q % step.

    Phases are `space` floats apart. A window's element kw of output o is then at position
    o + kw // step of phase kw % step: sixteen outputs are contiguous.
    """
    if step == 1:
        copy_floats(buffer + low * 4, source, n)
        return
    if step == 2:
        even = buffer + (low % 2 * space + low // 2) * 4
        odd = buffer + ((low + 1) % 2 * space + (low + 1) // 2) * 4
        for j in range(0, n, 32):
            k = n - j
            store_first(even, j // 2, _evens(source, j, k), (k + 1) // 2)
            store_first(odd, j // 2, _odds(source, j, k), k // 2)
        return
    x, to = f32p(source), f32p(buffer)
    phase, position = low % step, low // step
    for j in range(n):
        to[phase * space + position] = x[j]
        phase += 1
        if phase == step:
            phase = 0
            position += 1


@routine
def join_row(target: int, buffer: int, space: int, n: int, low: int, step: int) -> None:
    """The inverse of `split_row`."""
    if step == 1:
        copy_floats(target, buffer + low * 4, n)
        return
    if step == 2:
        even = buffer + (low % 2 * space + low // 2) * 4
        odd = buffer + ((low + 1) % 2 * space + (low + 1) // 2) * 4
        for j in range(0, n, 32):
            _store_pairs(target, j, load(even, j // 2), load(odd, j // 2), n - j)
        return
    x, source = f32p(target), f32p(buffer)
    phase, position = low % step, low // step
    for j in range(n):
        x[j] = source[phase * space + position]
        phase += 1
        if phase == step:
            phase = 0
            position += 1


@routine
def fill_row(buffer: int, value: float, n: int) -> None:
    """Write the number into n floats."""
    to = f32p(buffer)
    for i in range(n):
        to[i] = value
