# ruff: noqa: E501  # a table of kernels
"""Small kernels in PTX on the driver that executes them: what they compute, and what is refused.

    DRY_RACES=1 python -m programs.cuda_instructions     # with libcuda_dry.c as the driver

Each is assembled by NVIDIA's linker, so all of them are PTX. Prints as JSON, by kernel, None or what
is wrong.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from cuda.core import Linker, LinkerOptions, ObjectCode
from programs.cuda_executed import BEHIND

Array = np.ndarray[Any, Any]
PARAMETERS = 14  # of two arrays of one axis, as Numba has them: the addresses are numbers 4 and 11
FILLED = 255  # each byte of y, before a kernel runs


@dataclass(frozen=True)
class Kernel:
    """A kernel of x and y, whose threads have the addresses of their elements in %d0 and %d1.

    body: its statements. %t is the number of a thread, %x and %y are the addresses of the arrays,
    registers are %p (predicates), %h, %r, %d (16, 32 and 64 bits), %f and %g (32 and 64 bits).
    said: what the driver says of it, or nothing: y is what it computes.
    """

    name: str
    body: str
    x: Array
    y: Array
    threads: int = 32
    blocks: int = 1
    said: str = ""
    shared: int = 0

    @property
    def text(self) -> str:
        parameters = ", ".join(f".param .u64 k_param_{n}" for n in range(PARAMETERS))
        each = [array.nbytes // max(self.threads * self.blocks, 1) for array in (self.x, self.y)]
        room = f".shared .align 16 .b8 room[{self.shared}];" if self.shared else ""
        statements = self.body.replace(";", ";\n").replace(": ", ":\n")
        return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry k({parameters})
{{
.reg .pred %p<9>; .reg .b16 %h<40>; .reg .b32 %r<200>; .reg .b64 %d<40>; .reg .f32 %f<40>;
.reg .f64 %g<20>; .reg .b64 %x; .reg .b64 %y; .reg .b32 %t; .reg .b32 %n; .reg .b32 %b; {room}
ld.param.u64 %x, [k_param_4];
ld.param.u64 %y, [k_param_11];
cvta.to.global.u64 %x, %x;
cvta.to.global.u64 %y, %y;
mov.u32 %t, %tid.x;
mov.u32 %n, %ntid.x;
mov.u32 %b, %ctaid.x;
mad.lo.s32 %n, %b, %n, %t;
mad.wide.u32 %d0, %n, {each[0]}, %x;
mad.wide.u32 %d1, %n, {each[1]}, %y;
{statements}
ret;
}}
"""


# Values, and functions of them.


def to_single(values: Array, way: str) -> Array:
    """Return doubles as singles, rounded down (m), up (p), to zero (z) or to nearest even (n)."""
    near = values.astype(np.float32)
    wide = near.astype(np.float64)
    down = np.where(wide > values, np.nextafter(near, np.float32(-np.inf)), near)
    up = np.where(wide < values, np.nextafter(near, np.float32(np.inf)), near)
    return {"n": near, "m": down, "p": up, "z": np.where(values < 0, up, down)}[way]


def drawn(seed: int, shape: Any, kind: str = "f4") -> Array:
    """Return random values of a type."""
    random = np.random.default_rng(seed)
    if kind[0] in "iu":
        limits = np.iinfo(kind)
        return random.integers(limits.min, limits.max, shape, kind, endpoint=True)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(kind)


def bfloat(values: Array) -> Array:
    """Return the bits of singles rounded to bfloat16."""
    bits = values.astype("f4").view("u4").astype("u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")


EDGES = np.array(
    [
        *(0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 126.7, 127.5, 128, -128.5, -129, 255.5, 256, 65535.6),
        *(65536, 2.0**31 - 1, 2.0**31, -(2.0**31), -(2.0**31) - 1, 2.0**32, 2.0**63, -(2.0**63)),
        *(2.0**64, 1e30, -1e30, math.inf, -math.inf, math.nan, 3.999, -3.999, 1e-40),
    ]
)


def wholes(values: Array, kind: str, way: str, wide: bool) -> Array:
    """Return reals as a type of integers, as cvt has them."""
    limits, made = np.iinfo(kind), []
    for value in values.tolist():
        if math.isnan(value):
            high = 1 << (limits.bits - 1) if wide or limits.bits == 64 else 0
            made.append(high if kind[0] == "u" or not high else -high)
        elif math.isinf(value):
            made.append(limits.max if value > 0 else limits.min)
        else:
            whole = {"zi": math.trunc, "mi": math.floor, "pi": math.ceil, "ni": round}[way](value)
            made.append(min(max(whole, limits.min), limits.max))
    return np.array(made, kind)


def conversions() -> Iterator[Kernel]:
    """Yield kernels that convert."""
    types = {"s16": "i2", "u16": "u2", "s32": "i4", "u32": "u4", "s64": "i8", "u64": "u8"}
    register = {"16": "%h1", "32": "%r1", "64": "%d2"}
    for source, given, held in (("f32", EDGES.astype("f4"), "%f0"), ("f64", EDGES, "%g0")):
        for to, kind in types.items():
            for way in ("zi", "mi", "pi", "ni"):
                into = register[to[1:]]
                yield Kernel(
                    f"cvt.r{way}.{to}.{source}",
                    f"ld.global.{source} {held}, [%d0]; cvt.r{way}.{to}.{source} {into}, {held};"
                    f"st.global.{to.replace('s', 'b').replace('u', 'b')} [%d1], {into};",
                    given,
                    wholes(given.astype("f8"), kind, way, source == "f64"),
                )
    whole = drawn(1, 32, "i8")
    for way in "nzmp":
        for name, kind in (("s64", "i8"), ("u64", "u8")):
            given = whole.view(kind)
            made = []
            for value, one in zip(map(int, given), given.astype("f4")):
                off = int(one) - value
                side = {"n": 0, "m": off > 0, "p": -(off < 0)}.get(way, 0)
                if way == "z":
                    side = (off > 0) if value > 0 else -(off < 0)
                made.append(np.nextafter(one, np.float32(-np.inf * side)) if side else one)
            yield Kernel(
                f"cvt.r{way}.f32.{name}",
                f"ld.global.b64 %d2, [%d0]; cvt.r{way}.f32.{name} %f0, %d2; st.global.f32 [%d1], %f0;",
                given,
                np.array(made, "f4"),
            )
        doubles = drawn(2, 32, "f8")
        yield Kernel(
            f"cvt.r{way}.f32.f64",
            f"ld.global.f64 %g0, [%d0]; cvt.r{way}.f32.f64 %f0, %g0; st.global.f32 [%d1], %f0;",
            doubles,
            to_single(doubles, way),
        )
    given = drawn(3, 32, "i4") >> (np.arange(32, dtype="i4") % 32)
    for to, low, high in (
        ("s8", -128, 127),
        ("u8", 0, 255),
        ("s16", -32768, 32767),
        ("u16", 0, 65535),
    ):
        yield Kernel(
            f"cvt.sat.{to}.s32",
            f"ld.global.b32 %r0, [%d0]; cvt.sat.{to}.s32 %r1, %r0; st.global.b32 [%d1], %r1;",
            given,
            np.clip(given, low, high),
        )
    yield Kernel(
        "cvt.s32.s8",
        "ld.global.s8 %r0, [%d0]; cvt.s32.s8 %r1, %r0; cvt.u32.u8 %r2, %r0; st.global.v2.b32 [%d1], {%r1, %r2};",
        drawn(4, 32, "i1"),
        np.stack([drawn(4, 32, "i1").astype("i4"), drawn(4, 32, "i1").view("u1").astype("i4")], 1),
    )
    singles = np.concatenate(
        [drawn(5, 26), [65504, 65520, 1e-7, math.inf, math.nan, -6e-8]]
    ).astype("f4")
    with np.errstate(over="ignore"):
        halves = singles.astype("f2")
    yield Kernel(
        "cvt.rn.f16.f32",
        "ld.global.f32 %f0, [%d0]; cvt.rn.f16.f32 %h0, %f0; st.global.b16 [%d1], %h0;",
        singles,
        halves,
    )
    yield Kernel(
        "cvt.f32.f16",
        "ld.global.b16 %h0, [%d0]; cvt.f32.f16 %f0, %h0; st.global.f32 [%d1], %f0;",
        halves,
        halves.astype("f4"),
    )
    finite = singles[:30]
    yield Kernel(
        "cvt.rn.bf16x2.f32",
        "ld.global.v2.f32 {%f0, %f1}, [%d0]; cvt.rn.bf16x2.f32 %r0, %f1, %f0; st.global.b32 [%d1], %r0;",
        finite,
        bfloat(finite),
        threads=15,
    )
    yield Kernel(
        "cvt.sat.f32.f32",
        "ld.global.f32 %f0, [%d0]; cvt.sat.f32.f32 %f1, %f0; st.global.f32 [%d1], %f1;",
        singles,
        np.where(np.isnan(singles), 0, np.clip(singles, 0, 1)).astype("f4"),
    )
    for way, function in (("ni", np.rint), ("zi", np.trunc), ("mi", np.floor), ("pi", np.ceil)):
        yield Kernel(
            f"cvt.r{way}.f32.f32",
            f"ld.global.f32 %f0, [%d0]; cvt.r{way}.f32.f32 %f1, %f0; st.global.f32 [%d1], %f1;",
            EDGES.astype("f4"),
            function(EDGES.astype("f4")),
        )


def arithmetic() -> Iterator[Kernel]:
    """Yield kernels that compute, of pairs of values."""

    def pairs(name: str, kind: str, values: Array, wanted: Array, more: str = "") -> Kernel:
        held = {"f32": "%f", "f64": "%g", "64": "%d", "32": "%r", "16": "%h"}
        by = held.get(kind) or held[kind[1:]]
        first = 5 if by == "%d" else 0
        one, two, made = (f"{by}{first + n}" for n in range(3))
        stored = kind if kind[0] == "f" else "b" + kind[1:]
        return Kernel(
            name,
            f"ld.global.v2.{stored} {{{one}, {two}}}, [%d0]; {more or name} {made}, {one}, {two};"
            f"st.global.{stored} [%d1], {made};",
            values,
            wanted,
        )

    x, y = drawn(6, 32), drawn(7, 32)
    both, wide = np.stack([x, y], 1), (x.astype("f8"), y.astype("f8"))
    for way in "nzmp":
        yield pairs(f"add.r{way}.f32", "f32", both, to_single(wide[0] + wide[1], way))
        yield pairs(f"mul.r{way}.f32", "f32", both, to_single(wide[0] * wide[1], way))
        tiny = np.array([1, -1, 2, -2] * 8, "f8"), np.array([2.0**-60, -(2.0**-60)] * 16)
        ends = {
            "n": tiny[0],
            "p": np.where(tiny[1] > 0, np.nextafter(tiny[0], np.inf), tiny[0]),
            "m": np.where(tiny[1] < 0, np.nextafter(tiny[0], -np.inf), tiny[0]),
        }
        ends["z"] = tiny[0]  # away from zero on both sides
        yield pairs(f"add.r{way}.f64", "f64", np.stack(tiny, 1), ends[way])
    small = np.array([[1e-39, 1.0], [-1e-39, 0], [1e-20, 1e-20], [3, 4]] * 8, "f4")
    yield pairs("add.ftz.f32", "f32", small, np.array([1, 0, 2e-20, 7] * 8, "f4"))
    yield pairs("mul.ftz.f32", "f32", small, np.array([0, -0.0, 0, 12] * 8, "f4"))
    nans = np.array([[math.nan, 1], [2, math.nan], [-0.0, 0.0], [3, -4]] * 8, "f4")
    yield pairs("min.f32", "f32", nans, np.array([1, 2, -0.0, -4] * 8, "f4"))
    yield pairs("max.f32", "f32", nans, np.array([1, 2, 0.0, 3] * 8, "f4"))
    yield pairs("max.NaN.f32", "f32", nans, np.array([math.nan, math.nan, 0.0, 3] * 8, "f4"))
    yield pairs(
        "copysign.f32",
        "f32",
        nans[2:4].repeat(16, 0),
        np.copysign(nans[2:4, 1], nans[2:4, 0]).repeat(16),
    )
    yield pairs("div.rn.f32", "f32", both, x / y)
    for kind, name in (("i8", "64"), ("i4", "32")):
        a, b = drawn(8, 32, kind), drawn(9, 32, kind) >> np.array([0, 20, 30] * 10 + [0, 0], kind)
        b = np.where(b == 0, 3, b).astype(kind)
        a[:2], b[:2] = (np.iinfo(kind).min, np.iinfo(kind).max), (-1, -1)
        given = np.stack([a, b], 1)
        with np.errstate(over="ignore"):
            low = [
                int(p) // int(q) if (p < 0) == (q < 0) else -(abs(int(p)) // abs(int(q)))
                for p, q in given
            ]
            rest = [int(p) - q * int(s) for (p, s), q in zip(given, low)]
            low[0] = int(a[0])
            yield pairs(f"div.s{name}", "s" + name, given, np.array(low, kind))
            yield pairs(f"rem.s{name}", "s" + name, given, np.array([0, *rest[1:]], kind))
            yield pairs(f"mul.lo.s{name}", "s" + name, given, a * b)
            positive = given.view("u" + kind[1:])
            yield pairs(f"div.u{name}", "u" + name, positive, positive[:, 0] // positive[:, 1])
            high = [int(p) * int(q) >> int(name) for p, q in given]
            yield pairs(f"mul.hi.s{name}", "s" + name, given, np.array(high, kind))
            high = [int(p) * int(q) >> int(name) for p, q in positive]
            yield pairs(f"mul.hi.u{name}", "u" + name, positive, np.array(high, positive.dtype))
    values = drawn(10, 32, "i4")
    by = np.arange(32, dtype="i4") * 3
    full = [int(v) >> min(int(n), 31) for v, n in zip(values, by)]
    yield pairs("shr.s32", "s32", np.stack([values, by], 1), np.array(full, "i4"))
    full = [(int(v) << int(n)) & 0xFFFFFFFF for v, n in zip(values.view("u4"), by)]
    yield pairs("shl.b32", "s32", np.stack([values, by], 1), np.array(full, "u4"))
    for position, bits in ((0, 32), (4, 8), (28, 9), (31, 1), (40, 4), (5, 0)):
        field = ((1 << bits) - 1) << position & 0xFFFFFFFF
        a, b = drawn(11, 32, "u4"), drawn(12, 32, "u4")
        filled = [(int(q) & ~field) | (int(p) << position & field) for p, q in zip(a, b)]
        body = "ld.global.v2.b32 {%r0, %r1}, [%d0]; "
        given = np.stack([a, b], 1)
        yield Kernel(
            f"bfi {position} {bits}",
            body + f"bfi.b32 %r2, %r0, %r1, {position}, {bits}; st.global.b32 [%d1], %r2;",
            given,
            np.array(filled, "u4"),
        )
        taken = [(int(p) >> position) & ((1 << bits) - 1) for p in a]
        yield Kernel(
            f"bfe {position} {bits}",
            body + f"bfe.u32 %r2, %r0, {position}, {bits}; st.global.b32 [%d1], %r2;",
            given,
            np.array(taken, "u4"),
        )
    for choice in (0x3210, 0x5410, 0x7632, 0x0123, 0xBA98, 0x4444):
        octets = np.stack([a, b], 1).view("u1")
        signs = np.where(octets & 128, 255, 0).astype("u1")
        picked = [
            (signs if choice >> 4 * n & 8 else octets)[:, choice >> 4 * n & 7] for n in range(4)
        ]
        yield Kernel(
            f"prmt {choice:#x}",
            "ld.global.v2.b32 {%r0, %r1}, [%d0];"
            f"prmt.b32 %r2, %r0, %r1, {choice}; st.global.b32 [%d1], %r2;",
            np.stack([a, b], 1),
            np.stack(picked, 1),
        )
    for name, function in (
        ("popc", lambda v: v.bit_count()),
        ("clz", lambda v: 32 - v.bit_length()),
        ("brev", lambda v: int(f"{v:032b}"[::-1], 2)),
    ):
        yield Kernel(
            name,
            f"ld.global.b32 %r0, [%d0]; {name}.b32 %r1, %r0; st.global.b32 [%d1], %r1;",
            a >> (np.arange(32, dtype="u4")),
            np.array([function(int(v)) for v in a >> np.arange(32, dtype="u4")], "u4"),
        )
    yield Kernel(
        "mad.lo.cc, madc.hi",
        "ld.global.v2.b32 {%r0, %r1}, [%d0]; mad.lo.cc.u32 %r2, %r0, %r1, -1;"
        "madc.hi.u32 %r3, %r0, %r1, 0; st.global.v2.b32 [%d1], {%r2, %r3};",
        np.stack([a, b], 1),
        a.astype("u8") * b + np.uint64(0xFFFFFFFF),
    )
    compared = np.array([[1, 2], [2, 1], [2, 2], [math.nan, 1], [1, math.nan], [-0.0, 0]], "f4")
    one, two = compared.T
    either = np.isnan(one) | np.isnan(two)
    truths = {
        "lt": one < two, "geu": either | (one >= two), "equ": either | (one == two),
        "ne": ~either & (one != two), "neu": one != two, "num": ~either, "nan": either,
        "eq": one == two, "ltu": either | (one < two), "gtu": either | (one > two),
    }  # fmt: skip
    for name, wanted in truths.items():
        yield Kernel(
            f"setp.{name}.f32",
            "ld.global.v2.f32 {%f0, %f1}, [%d0];"
            f"setp.{name}.f32 %p1|%p2, %f0, %f1; selp.b32 %r0, 1, 0, %p1; selp.b32 %r1, 1, 0, %p2;"
            "@%p1 add.s32 %r0, %r0, 4; @!%p1 add.s32 %r1, %r1, 8; st.global.v2.b32 [%d1], {%r0, %r1};",
            compared,
            np.stack([wanted * 5, ~wanted * 9], 1).astype("i4"),
            threads=len(compared),
        )


LANE = np.arange(32, dtype="i4")
EXCHANGE = "ld.global.b32 %r0, [%d0]; {} st.global.v2.b32 [%d1], {{%r1, %r2}};"


def shuffled(way: str, by: int, width: int) -> Array:
    """Return what lanes get, and whether it is another's."""
    first = LANE // width * width
    source = {"up": LANE - by, "down": LANE + by, "bfly": LANE ^ by, "idx": first + by % width}[way]
    there = (
        source < first + width if way == "bfly" else (source >= first) & (source < first + width)
    )
    return np.stack([np.where(there, source, LANE) * 3 + 1, there], 1).astype("i4")


def meetings() -> Iterator[Kernel]:
    """Yield kernels in which lanes, warps and memory meet as they should."""
    for way in ("up", "down", "bfly", "idx"):
        for width in (32, 8, 2):
            for by in (1, 3, 16):
                clamp = (32 - width) << 8 | (0 if way == "up" else 31)
                yield Kernel(
                    f"shfl {way} {by} of {width}",
                    EXCHANGE.format(
                        f"shfl.sync.{way}.b32 %r1|%p1, %r0, {by}, {clamp}, -1; selp.b32 %r2, 1, 0, %p1;"
                    ),
                    LANE * 3 + 1,
                    shuffled(way, by, width),
                )
    yield Kernel(
        "lanes whose loops end at different turns meet again",
        "mov.u32 %r0, 0; mov.u32 %r1, %t; $L_turn: add.s32 %r0, %r0, %r1; sub.s32 %r1, %r1, 1;"
        "setp.ge.s32 %p1, %r1, 0; @%p1 bra $L_turn; shfl.sync.bfly.b32 %r2, %r0, 31, 31, -1;"
        "st.global.v2.b32 [%d1], {%r0, %r2};",
        LANE,
        np.stack([LANE * (LANE + 1) // 2, (31 - LANE) * (32 - LANE) // 2], 1).astype("i4"),
    )
    yield Kernel(
        "half of a warp shuffles among itself",
        "mov.u32 %r1, 7; setp.lt.s32 %p1, %t, 16; @!%p1 bra $L_end; ld.global.b32 %r0, [%d0];"
        "shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff; $L_end: st.global.b32 [%d1], %r1;",
        LANE,
        np.where(LANE < 16, LANE ^ 1, 7).astype("i4"),
    )
    yield Kernel(
        "lanes that have ended are not waited for",
        "setp.ge.s32 %p1, %t, 20; @%p1 ret; shfl.sync.bfly.b32 %r1, %t, 1, 31, -1; bar.sync 0;"
        "st.global.b32 [%d1], %r1;",
        LANE,
        np.where(LANE < 20, LANE ^ 1, -1).astype("i4"),
    )
    threads = np.arange(96, dtype="i4")
    turned = (
        "shl.b32 %r2, %t, 2; mov.u32 %r3, room; add.s32 %r2, %r2, %r3; ld.global.b32 %r0, [%d0];"
    )
    yield Kernel(
        "a block's memory, after a barrier",
        turned + "st.shared.b32 [%r2], %r0; bar.sync 0; mov.u32 %r4, 95; sub.s32 %r4, %r4, %t;"
        "shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r3; ld.shared.b32 %r1, [%r4]; st.global.b32 [%d1], %r1;",
        threads * 5,
        threads[::-1] * 5,
        threads=96,
        shared=384,
    )
    yield Kernel(
        "generic addresses of a block's memory",
        "mov.u64 %d4, room; cvta.shared.u64 %d4, %d4; mad.wide.u32 %d4, %t, 8, %d4;"
        "ld.global.v2.b32 {%r0, %r1}, [%d0]; st.v2.b32 [%d4], {%r1, %r0}; ld.b64 %d5, [%d4]; st.global.b64 [%d1], %d5;",
        np.arange(64, dtype="i4"),
        np.arange(64, dtype="i4").reshape(32, 2)[:, ::-1].copy(),
        shared=256,
    )
    yield Kernel(
        "two elements of 64 bits at once",
        "ld.global.v2.b64 {%d5, %d6}, [%d0]; st.global.v2.b64 [%d1], {%d6, %d5};",
        np.arange(64.0),
        np.arange(64.0).reshape(32, 2)[:, ::-1].copy(),
    )
    yield Kernel(
        "guarded loads and stores",
        "mad.wide.u32 %d0, %t, 4, %x; setp.lt.s32 %p1, %t, 5; mov.u32 %r0, -7; @%p1 ld.global.b32 %r0, [%d0]; @!%p1 add.s32 %r0, %r0, %t;"
        "setp.ne.s32 %p2, %t, 9; @%p2 st.global.b32 [%d1], %r0;",
        np.arange(5, dtype="i4"),
        np.where(LANE == 9, -1, np.where(LANE < 5, LANE, LANE - 7)).astype("i4"),
    )
    yield Kernel(
        "any and all of a block",
        "setp.eq.s32 %p1, %t, 40; bar.red.or.pred %p2, 0, %p1; bar.red.and.pred %p3, 0, %p1;"
        "selp.b32 %r0, 1, 0, %p2; selp.b32 %r1, 1, 0, %p3; st.global.v2.b32 [%d1], {%r0, %r1};",
        np.zeros(64, "i4"),
        np.array([[1, 0]] * 64, "i4"),
        threads=64,
    )
    yield Kernel(
        "memory that nobody has written is NaN",
        "mov.u32 %r1, room; ld.shared.f32 %f0, [%r1+4]; st.global.f32 [%d1], %f0;",
        LANE,
        np.full(32, np.nan, "f4"),
        shared=16,
    )
    copied = "mov.u32 %r1, room; shl.b32 %r2, %t, 4; add.s32 %r1, %r1, %r2; "
    yield Kernel(
        "copies are there once they are waited for",
        copied + "cp.async.cg.shared.global [%r1], [%d0], 16; cp.async.commit_group;"
        "cp.async.cg.shared.global [%r1+512], [%d0], 16, 8; cp.async.commit_group; cp.async.wait_group 1;"
        "ld.shared.b32 %r3, [%r1+12]; cp.async.wait_all; ld.shared.b32 %r4, [%r1+516]; ld.shared.b32 %r5, [%r1+520];"
        "add.s32 %r4, %r4, %r5; st.global.v2.b32 [%d1], {%r3, %r4};",
        np.arange(128, dtype="i4"),
        np.stack([LANE * 4 + 3, LANE * 4 + 1], 1).astype("i4"),
        shared=1024,
    )


def fragments() -> Iterator[Kernel]:
    """Yield products of fragments, loaded by ldmatrix, against NumPy's."""
    a, b = (np.random.default_rng(n).integers(-8, 9, (16, n * 8)).astype("f4") / 4 for n in (2, 1))
    for kind in ("f16", "bf16"):
        left, right = (x.astype("f2").view("u2") if kind == "f16" else bfloat(x) for x in (a, b))
        whole = np.concatenate([left.ravel(), right.ravel()]).view(
            "i4"
        )  # a and b, rows of 16 and 8
        load = (
            "mov.u32 %r1, room; mov.u32 %r2, %t; $L_fill: shl.b32 %r3, %r2, 2; add.s32 %r4, %r1, %r3;"
            "cvt.u64.u32 %d4, %r3; add.s64 %d4, %d4, %x; ld.global.b32 %r5, [%d4]; st.shared.b32 [%r4], %r5;"
            "add.s32 %r2, %r2, 32; setp.lt.s32 %p1, %r2, 192; @%p1 bra $L_fill; bar.sync 0;"
            # of a: rows 0 to 7 and 8 to 15 of the first columns, then of the last
            "and.b32 %r6, %t, 15; shl.b32 %r6, %r6, 5; shr.u32 %r7, %t, 4; shl.b32 %r7, %r7, 4;"
            "add.s32 %r6, %r6, %r7; add.s32 %r6, %r6, %r1;"
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r6];"
            "and.b32 %r8, %t, 15; shl.b32 %r8, %r8, 4; add.s32 %r8, %r8, %r1;"
            "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r14, %r15}, [%r8+512];"
            "mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f3F800000; mov.f32 %f3, 0f3F800000;"
        )
        yield Kernel(
            f"mma of {kind}",
            load
            + f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f0, %f1, %f2, %f3}},"
            "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f0, %f1, %f2, %f3};"
            "shr.u32 %r20, %t, 2; shl.b32 %r20, %r20, 3; and.b32 %r21, %t, 3; shl.b32 %r21, %r21, 1;"
            "add.s32 %r20, %r20, %r21; mad.wide.u32 %d5, %r20, 4, %y; st.global.v2.f32 [%d5], {%f0, %f1};"
            "st.global.v2.f32 [%d5+256], {%f2, %f3};",
            whole,
            a @ b + 1,
            shared=768,
        )


def mistakes() -> Iterator[Kernel]:
    """Yield kernels that a device may do anything with, and what has to be said of them."""
    here = "mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.s32 %r1, %r1, %r2; "
    half = "setp.lt.s32 %p1, %t, 16; @%p1 bra $L_else; "
    many = " ".join(f"ld.volatile.global.b32 %r{n}, [%x+{4 * n}];" for n in range(90))
    sums = " ".join(f"mul.lo.s32 %r{n}, %r{n}, %r{89 - n};" for n in range(90))
    added = " ".join(f"add.s32 %r90, %r90, %r{n};" for n in range(90))
    table: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("no barrier", "a race with what block 0, thread [0-9]+ (wrote|read) in shared",
         here + "st.shared.b32 [%r1], %t; xor.b32 %r2, %r2, 128; mov.u32 %r3, room; add.s32 %r3, %r3, %r2;"
         "ld.shared.b32 %r0, [%r3]; st.global.b32 [%d1], %r0;", {"threads": 64, "shared": 256}),
        ("no barrier in a warp", "a race with what block 0, thread [0-9]+ wrote in shared",
         here + "st.shared.b32 [%r1], %t; xor.b32 %r2, %r2, 4; mov.u32 %r3, room; add.s32 %r3, %r3, %r2;"
         "ld.shared.b32 %r0, [%r3]; st.global.b32 [%d1], %r0;", {"shared": 128}),
        ("blocks write one element", "a race with what block 0, thread [0-9]+ wrote in an array",
         "st.global.b32 [%y], %b;", {"blocks": 2}),
        ("a block reads what another writes", "a race with what block 0, thread 0 wrote in an array",
         "add.s32 %r0, %b, 5; st.global.b32 [%d1], %r0; ld.global.b32 %r1, [%y]; st.global.b32 [%d1], %r1;",
         {"blocks": 2, "threads": 1}),
        ("past an array", "which are of no array", "st.global.b32 [%d1+4], %t;", {}),
        ("before an array", "which are of no array", "st.global.b32 [%d1+-4], %t;", {}),
        ("half past an array", "which are of no array", "st.global.v2.b32 [%x+120], {%t, %t};", {"size": 31}),
        ("past shared memory", "byte 16 of 16 of shared", "mov.u32 %r1, room; ld.shared.b32 %r0, [%r1+16];", {"shared": 16}),
        ("before shared memory", "of shared memory", "mov.u32 %r1, room; ld.shared.b32 %r0, [%r1+-4];", {"shared": 16}),
        ("an odd address", "no multiple", "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%x+4];", {}),
        ("an odd address of a copy", "no multiple",
         "mov.u32 %r1, room; cp.async.ca.shared.global [%r1], [%x+4], 8;", {"shared": 16}),
        ("a barrier for half of a warp", "lanes 0x[0f]+ wait",
         half + "bar.sync 0; $L_else: bar.warp.sync -1;", {}),
        ("two barriers", "two barriers",
         "setp.lt.s32 %p1, %t, 32; @%p1 bra $L_else; bar.sync 0; ret; $L_else: bar.sync 0;", {"threads": 64}),
        ("a guarded barrier", "a barrier for lanes", "setp.lt.s32 %p1, %t, 16; @%p1 bar.sync 0;", {}),
        ("a barrier in a loop that lanes leave", "lanes 0x[0-9a-f]+ wait",
         "mov.u32 %r1, 0; $L_turn: bar.sync 0; add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, %t; @%p1 bra $L_turn;"
         "bar.warp.sync -1;", {}),
        ("a barrier for some warps", "part of a block", "bar.sync 0, 32;", {}),
        ("a shuffle of lanes that have parted", "lanes",
         half + "shfl.sync.bfly.b32 %r0, %t, 1, 31, -1; $L_else: bar.warp.sync -1;", {}),
        ("a shuffle that leaves its own lane out", "names lanes", "shfl.sync.bfly.b32 %r0, %t, 1, 31, 0xffff;", {}),
        ("a fragment of half of a warp", "lanes",
         half + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3},"
         "{%r4, %r5}, {%f0, %f1, %f2, %f3}; $L_else: bar.warp.sync -1;", {}),
        ("a copy that is read too early", "a copy is on its way",
         "mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.s32 %r1, %r1, %r2; cp.async.ca.shared.global [%r1], [%d0], 4;"
         "cp.async.commit_group; ld.shared.b32 %r0, [%r1]; st.global.b32 [%d1], %r0;", {"shared": 128}),
        ("a copy of a group that is not waited for", "a copy is on its way",
         "mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.s32 %r1, %r1, %r2; cp.async.ca.shared.global [%r1], [%d0], 4;"
         "cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %r0, [%r1];", {"shared": 128}),
        ("an atomic addition", "not known", "atom.global.add.u32 %r0, [%y], 1;", {}),
        ("a clock", "not declared", "mov.u32 %r0, %clock;", {}),
        ("more registers than a block has", "registers of 1024 threads",
         many + sums + "mov.u32 %r90, 0;" + added + "st.global.b32 [%d1], %r90;", {"threads": 1024, "size": 1024}),
    )  # fmt: skip
    for name, said, body, more in table:
        threads, blocks = more.get("threads", 32), more.get("blocks", 1)
        size = more.get("size", threads * blocks)
        array = np.zeros(size, "i4")
        yield Kernel(name, body, array, array, threads, blocks, said, more.get("shared", 0))


# The driver.

Words = ctypes.c_uint64 * PARAMETERS


@cache
def driver() -> Any:
    """Return the driver's library, with a context."""
    found = ctypes.CDLL("libcuda.so.1")
    found.dry_said.restype = ctypes.c_char_p
    context = ctypes.c_void_p()
    done(found.cuInit(0))
    done(found.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    done(found.cuCtxPushCurrent_v2(context))
    return found


def done(code: int) -> None:
    """Check what a call returns."""
    assert code == 0, f"error {code}"


def sent(array: Array) -> int:
    """Return the address of a GPU's copy of an array."""
    place = ctypes.c_uint64()
    done(driver().cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(array.nbytes)))
    done(driver().cuMemcpyHtoD_v2(place, array.ctypes, ctypes.c_size_t(array.nbytes)))
    return place.value


def run(kernel: Kernel) -> tuple[Array, str]:
    """Return what a kernel leaves in y, and what the driver says of it."""
    text = kernel.text.encode()
    code = Linker(ObjectCode.from_ptx(text), options=LinkerOptions(arch="sm_90")).link("cubin").code
    library, function, before = ctypes.c_void_p(), ctypes.c_void_p(), len(driver().dry_said())
    found = ctypes.c_char_p(bytes(code) + BEHIND + text + b"\0")
    done(driver().cuLibraryLoadData(ctypes.byref(library), found, *[None] * 2, 0, *[None] * 2, 0))
    done(driver().cuLibraryGetKernel(ctypes.byref(function), library, b"k"))
    y = np.full(kernel.y.nbytes, FILLED, np.uint8)
    places = [sent(array) for array in (np.ascontiguousarray(kernel.x), y)]
    words = []
    for place, array in zip(places, (kernel.x, kernel.y)):
        words += [0, 0, array.size, array.itemsize, place, array.size, array.itemsize]
    held = Words(*words)
    given = (ctypes.c_void_p * PARAMETERS)(
        *(ctypes.addressof(held) + 8 * number for number in range(PARAMETERS))
    )
    shape = (kernel.blocks, 1, 1, kernel.threads, 1, 1)
    failed = driver().cuLaunchKernel(function, *shape, 0, None, given, None)
    if not failed and not driver().cuCtxSynchronize():
        done(
            driver().cuMemcpyDtoH_v2(
                y.ctypes, ctypes.c_uint64(places[1]), ctypes.c_size_t(y.nbytes)
            )
        )
    return y.view(kernel.y.dtype).reshape(kernel.y.shape), driver().dry_said()[before:].decode()


def wrong(kernel: Kernel) -> str | None:
    """Run a kernel; return what is not as it should be."""
    try:
        found, said = run(kernel)
    except Exception:
        return traceback.format_exc()
    if kernel.said or said:
        return None if kernel.said and re.search(kernel.said, said) else f"said {said!r}"
    same = found.view("u1").reshape(*found.shape, -1) == kernel.y.view("u1").reshape(
        *found.shape, -1
    )
    right = same.all(-1) | ((found != found) & (kernel.y != kernel.y))
    return None if right.all() else f"{found[~right]} found, {kernel.y[~right]} needed"


KINDS = (conversions, arithmetic, meetings, fragments, mistakes)


def main() -> None:
    """Run all kernels."""
    print(json.dumps({kernel.name: wrong(kernel) for kind in KINDS for kernel in kind()}))


if __name__ == "__main__":
    main()
