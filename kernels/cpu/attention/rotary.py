"""Rotary embeddings: rows whose pairs of elements are turned, read and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from soapstone.ir.ops.products.rotary import width_of
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, get, loop, put
from soapstone.kernels.cpu.substrate.layout import float32, rows_contiguous
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop
from soapstone.native.intrinsics import f32p
from soapstone.native.lanes import (
    I32,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_lanes,
    store_some,
)
from soapstone.native.moves import row_at
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import Walk, walk

# form: how rows are turned, of those below. Steps are bytes: to the next pair, from an element to
# its partner, to the next of `count` rows of an item, to the next element. c, s: tables of
# cosines and sines; rest: elements of a row that are not turned. The walk of items follows, of
# `rank` dims.
_ROTARY = Fields(
    "form pairs count rest rank x x_step(pair partner row each) y y_step(pair partner row each)"
    " c c_step(pair partner row each) s s_step(pair partner row each)"
)
_HALVES, _NEIGHBOURS, _NEIGHBOURS_OF_EACH, _APART = range(4)
_rotary_of, _rotary_table = _ROTARY.at, _ROTARY.table


@vectorised
def _halves(
    y: Lanes, x: Lanes, half: Lanes, c: Lanes, c_half: Lanes, s: Lanes, s_half: Lanes, n: Lanes
) -> None:
    """Turn n pairs whose partners lie some bytes behind, in tables perhaps none."""

    def body(i: Lanes, width: int, some: Lanes | None) -> None:
        low, high = (get(place, i, width, some) for place in (x, x + half))
        cosines = [get(place, i, width, some) for place in (c, c + c_half)]
        sines = [get(place, i, width, some) for place in (s, s + s_half)]
        put(y, i, low * cosines[0] - high * sines[0], some)
        put(y + half, i, high * cosines[1] + low * sines[1], some)

    loop(n.builder, n, body)


def _shuffled(a: Lanes, b: Lanes, picks: list[int]) -> Lanes:
    which = ir.Constant(ir.VectorType(I32, LANES), picks)
    return Lanes(a.builder, a.builder.shuffle_vector(a.value, b.value, which))


def _neighbours(each: bool) -> Any:
    """Return what turns pairs of neighbours. each: whether tables have a number of each element."""
    evens, odds = ([*range(first, 2 * LANES, 2)] for first in (0, 1))
    orders = [[k // 2 + k % 2 * LANES for k in range(low, low + LANES)] for low in (0, LANES)]

    @vectorised
    def turn(y: Lanes, x: Lanes, c: Lanes, s: Lanes, n: Lanes) -> None:
        def body(i: Lanes, width: int, some: Lanes | None) -> None:
            masks = [first((n - i) * 2 - low) for low in (0, LANES)]

            def apart(place: Lanes) -> list[Lanes]:
                a, b = (
                    load_lanes(place, i * 2 + low)
                    if some is None
                    else load_some(place, i * 2 + low, mask)
                    for low, mask in zip((0, LANES), masks)
                )
                return [_shuffled(a, b, picks) for picks in (evens, odds)]

            low, high = apart(x)
            cosines, sines = (
                apart(place) if each else [get(place, i, width, some)] * 2 for place in (c, s)
            )
            made = low * cosines[0] - high * sines[0], high * cosines[1] + low * sines[1]
            for start, mask, order in zip((0, LANES), masks, orders):
                if some is None:
                    store_lanes(y, i * 2 + start, _shuffled(*made, order))
                else:
                    store_some(y, i * 2 + start, _shuffled(*made, order), mask)

        loop(n.builder, n, body, LANES)

    return turn


_of_pairs, _of_each = _neighbours(False), _neighbours(True)


@native("body")
def _rotary(block: Any, begin: int, end: int) -> int:
    w, table = _rotary_of(block), _rotary_table(block)
    form, pairs, rank = w.form, w.pairs, w.rank
    for item in range(begin, end):
        x, y = w.x + row_at(table, rank, 0, item), w.y + row_at(table, rank, 1, item)
        c, s = w.c + row_at(table, rank, 2, item), w.s + row_at(table, rank, 3, item)
        for _ in range(w.count):
            if form == _HALVES:
                _halves(y, x, w.x_step_partner, c, w.c_step_partner, s, w.s_step_partner, pairs)
            elif form == _NEIGHBOURS:
                _of_pairs(y, x, c, s, pairs)
            elif form == _NEIGHBOURS_OF_EACH:
                _of_each(y, x, c, s, pairs)
            else:
                for k in range(pairs):
                    at, to = x + k * w.x_step_pair, y + k * w.y_step_pair
                    cos, sin = c + k * w.c_step_pair, s + k * w.s_step_pair
                    a, b = f32p(at)[0], f32p(at + w.x_step_partner)[0]
                    f32p(to)[0] = a * f32p(cos)[0] - b * f32p(sin)[0]
                    cos, sin = cos + w.c_step_partner, sin + w.s_step_partner
                    f32p(to + w.y_step_partner)[0] = b * f32p(cos)[0] + a * f32p(sin)[0]
            if form != _APART:
                copy_floats(y + pairs * 8, x + pairs * 8, w.rest)
            else:
                for k in range(2 * pairs, 2 * pairs + w.rest):
                    f32p(y + k * w.y_step_each)[0] = f32p(x + k * w.x_step_each)[0]
            x, y = x + w.x_step_row, y + w.y_step_row
            c, s = c + w.c_step_row, s + w.s_step_row
    return 0


@variant("rotary_embedding", "numba", promises=True)
def rotary_embedding(call: Call) -> Entry | None:
    """Return the entry of rows turned by tables that broadcast to them."""
    (x, *tables), (y,) = call.inputs, call.outputs
    width, interleaved = width_of(call.attributes, x.shape[-1]), call.attributes["interleaved"]
    if not float32(call) or width == 0:
        return None
    if y.size == 0:
        return noop()
    arrays = (x, y, *tables)
    extents, strides = walk(x.shape[:-1], [array[..., 0] for array in arrays])
    inner = len(extents) > 1  # the innermost dim is the loop of an item
    count = extents[-1] if inner else 1
    outer = Walk(extents[:-1], tuple(s[:-1] for s in strides)) if inner else Walk(extents, strides)
    steps = {}
    for name, array, along in zip("xycs", arrays, strides):
        each, of_pairs = array.strides[-1], name in "cs" and array.shape[-1] < width
        pair, partner = (2 * each, each) if interleaved else (each, each * (width // 2))
        between = (each, 0) if of_pairs else (pair, partner)
        steps[f"{name}_step"] = (*between, along[-1] * inner, each)
    block = _ROTARY.pack(
        *outer,
        form=_form(interleaved, width, arrays),
        pairs=width // 2,
        count=count,
        rest=x.shape[-1] - width,
        rank=outer.rank,
        **dict(zip("xycs", arrays)),
        **steps,
    )
    items = outer.size
    return parallel_for(_rotary, block, items, useful_threads(call.threads, 2 * x.nbytes))


def _form(interleaved: bool, width: int, arrays: Sequence[Array]) -> int:
    of_each = {array.shape[-1] == width for array in arrays[2:]}
    if not rows_contiguous(*arrays) or (interleaved and len(of_each) > 1):
        return _APART
    if not interleaved:
        return _HALVES
    return _NEIGHBOURS_OF_EACH if of_each == {True} else _NEIGHBOURS
