"""The inner blocks of `pairs`: sums of products of bytes, two of 16 bits in one instruction."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import cgutils
from soapstone.cache.objects import features
from soapstone.native.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Lanes,
    chosen,
    load_lanes,
    load_one,
    store_lanes,
    stretch,
    where,
)
from soapstone.native.simd import vectorised

STEP = 4  # numbers that a block's loop takes at a time: what depths are filled up to
_MULTIPLY = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}  # by lanes


@cache
def has_pairs() -> bool:
    """Return whether an instruction adds two products of 16 bits."""
    return "avx2" in features()


_LANES = 16 if "avx512bw" in features() else 8  # of the instruction
ROWS = (12, 6, 4, 2, 1) if _LANES == 16 else (6, 4, 2, 1)  # of a block: sums stay in registers


def _multiplied(left: Lanes, right: Lanes) -> Lanes:
    """Return the sums of two products, of 16-bit numbers that lie in pairs in 32 bits."""
    b, pairs = left.builder, right.kind
    kind = ir.VectorType(I32, pairs.count // 2)
    shape = ir.FunctionType(kind, [pairs, pairs])
    function = cgutils.get_or_insert_function(b.module, shape, _MULTIPLY[kind.count])
    return Lanes(b, b.call(function, [b.bitcast(left.value, pairs), right.value]))


def _widened(weights: Lanes) -> Lanes:
    """Return weights as numbers of 16 bits, bytes with their sign."""
    b, kind = weights.builder, ir.VectorType(I16, weights.kind.count)
    return weights if weights.kind == kind else Lanes(b, b.sext(weights.value, kind))


def _product(
    rows: int, of: Any, x: Lanes, step: Lanes, depth: Lanes, weights: Lanes, kept: Lanes, to: Lanes
) -> None:
    b = depth.builder
    vectors = LANES // _LANES
    mask = kept.cast(I32).splat(_LANES)
    begin = [load_lanes(to, cell * _LANES, I32, _LANES) & mask for cell in range(rows * vectors)]
    places = [x + step * row for row in range(rows)]

    def turn(k: Lanes, sums: list[Lanes]) -> list[Lanes]:
        sums, line = list(sums), weights + k * (of.width // 8 * LANES)
        for pair in range(STEP // 2):
            starts = [(pair * vectors + v) * 2 * _LANES for v in range(vectors)]
            held = [_widened(load_lanes(line, start, of, 2 * _LANES)) for start in starts]
            for row, place in enumerate(places):
                word = load_one(place + (k * 2 + 4 * pair), I32).splat(_LANES)
                for v, each in enumerate(held):
                    cell = row * vectors + v
                    sums[cell] = sums[cell] + _multiplied(word, each)
        return sums

    sums = stretch(b, (I64(0), depth.value), STEP, begin, turn)
    for cell, total in enumerate(sums):
        store_lanes(to, cell * _LANES, total)


def _products(of: Any) -> Any:
    """Return the block by weights of a type."""

    def write(
        rows: Lanes, x: Lanes, step: Lanes, depth: Lanes, weights: Lanes, kept: Lanes, to: Lanes
    ) -> None:
        """Write (rows, 16) sums of products in 32 bits; rows: one of ROWS.

        x: rows of `depth` numbers of 16 bits, `step` bytes apart. weights: (depth / 2, 16, 2).
        kept: -1 where what is there already is added to, else 0.
        """
        given = of, x, step, depth, weights, kept, to
        chosen(rows, {count: partial(_product, count, *given) for count in ROWS})

    return vectorised(write)


products, wide_products = _products(I8), _products(I16)


def _widen(source: Lanes, count: Lanes, flip: Lanes, zero: Lanes, to: Lanes) -> None:
    """Write bytes, as numbers of 16 bits less their zero.

    flip: what makes a byte one without a sign, 0 or 128; zero: of the byte that this makes. Bytes
    beyond the last are neither read nor written.
    """
    b = count.builder

    def put(start: Lanes, lanes: int) -> None:
        wide = (load_lanes(source, start, I8, lanes) ^ flip.cast(I8).splat(lanes)).cast(I16)
        store_lanes(to, start, wide - zero.cast(I16).splat(lanes))

    def turn(lanes: int, k: Lanes, _: list[Lanes]) -> list[Lanes]:
        put(k, lanes)
        return []

    whole = count.value
    with b.if_else(b.icmp_signed(">=", whole, I64(LANES))) as (long, short):
        with long:
            stretch(b, (I64(0), b.sub(whole, I64(LANES - 1))), LANES, [], partial(turn, LANES))
            put(count - LANES, LANES)  # what is left, and some again
        with short:
            stretch(b, (I64(0), whole), 1, [], partial(turn, 1))


widen = vectorised(_widen)


# What is added to results, and what these are, by the number that `finish` knows them by.
KINDS = {"none": 0, "float32": 1, "uint8": 2, "int8": 3, "int32": 4}
# Of a result: (sum * scale + bias) * rise + start, within low and high, rounded where `rounds` is
# not 0; where there is a second part, * rise + start plus what is added, * rise + start, within low
# and high; and of bytes, what is added to the number, which is rounded: bounds are theirs, too.
NUMBERS = (
    *("rise", "start", "low", "high", "rounds", "rise_2", "start_2"),
    *("rise_3", "start_3", "low_3", "high_3", "zero"),
)


def _within(value: Lanes, low: Lanes, high: Lanes) -> Lanes:
    value = where(value < low, low, value)  # NaN stays
    return where(value > high, high, value)


def _finish(
    rows: Lanes,
    sums: Lanes,
    scale: Lanes,
    bias: Lanes,
    numbers: Lanes,
    second: Lanes,
    added: Lanes,
    added_step: Lanes,
    kind: Lanes,
    to: Lanes,
    step: Lanes,
) -> None:
    """Write rows of 16 results of their sums (rows, 16), `step` bytes apart.

    scale, bias: 16 numbers each; numbers: NUMBERS, float32. second: whether there is a second part,
    and what is added then, one of KINDS. kind: what results are.
    """
    b = rows.builder
    given = {name: load_one(numbers + 4 * place).splat() for place, name in enumerate(NUMBERS)}
    rise = load_lanes(scale, 0) * given["rise"]
    start = load_lanes(bias, 0) * given["rise"] + given["start"]
    rounds = load_one(numbers + 4 * NUMBERS.index("rounds")) > 0.0

    def operand(name: str, place: Lanes) -> Lanes | None:
        if name == "none":
            return None
        if name == "float32":
            return load_lanes(place, 0)
        if name == "uint8":
            return load_lanes(place, 0, I8).cast(F32)
        read = load_lanes(place, 0, I8)
        return Lanes(b, b.sitofp(read.value, ir.VectorType(F32, LANES)))

    def put(name: str, place: Lanes, value: Lanes) -> None:
        if name != "float32":
            value = (value.call("llvm.rint") + given["zero"]).cast(I32).cast(I8)
        store_lanes(place, 0, value)

    def each(adds: str | None, name: str) -> None:
        def turn(row: Lanes, _: list[Lanes]) -> list[Lanes]:
            total = load_lanes(sums, row * LANES, I32)
            if name == "int32":
                store_lanes(to + step * row, 0, total)
                return []
            value = _within(total.cast(F32) * rise + start, given["low"], given["high"])
            if adds is not None:
                rounded = value.call("llvm.rint")
                value = Lanes(b, b.select(rounds.value, rounded.value, value.value))
                value = value * given["rise_2"] + given["start_2"]
                more = operand(adds, added + added_step * row)
                value = (value if more is None else value + more) * given["rise_3"]
                value = _within(value + given["start_3"], given["low_3"], given["high_3"])
            put(name, to + step * row, value)
            return []

        stretch(b, (I64(0), rows.value), 1, [], turn)

    def of_kind(name: str) -> None:
        if name == "int32":
            each(None, name)
            return
        parts = {0: partial(each, None, name)}
        parts |= {1 + KINDS[adds]: partial(each, adds, name) for adds in KINDS if adds != "int32"}
        chosen(second, parts)

    names = [name for name in KINDS if name != "none"]
    chosen(kind, {KINDS[name]: partial(of_kind, name) for name in names})


finish = vectorised(_finish)
