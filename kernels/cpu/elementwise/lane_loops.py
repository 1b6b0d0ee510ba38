"""Loops over vectors of lanes: those that kernels write, and one for each machine instruction.

`loop`, `get` and `put` write a loop into a kernel that is being compiled; `copy_floats`,
`add_floats`, `add_scaled` and `fill_floats` are such loops. `instruction` is the loop of one
formula on lanes (see `formulas`) over a chunk, as the element-wise machine runs it. Each is
compiled, or loaded from the cache, when a program first uses it, so that any chain of operators
runs without being compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from soapstone.cache.deferred import intrinsic, types
from soapstone.kernels.cpu.elementwise.formulas import WIDE as WIDE, instruction_of, of_code
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native
from soapstone.native.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_lanes,
    store_some,
    stretch,
)
from soapstone.native.simd import vectorised


def loop(
    builder: Any,
    count: Lanes,
    body: Callable[[Lanes, int, Lanes | None], None],
    wide: int = WIDE,
) -> None:
    """Write a loop over lanes 0 … count-1: `body(i, width, mask)` does `width` lanes from i.

    The bulk goes by wide vectors, so that the constants of a formula are loaded once for several
    registers' worth of lanes; the mask, None in the bulk, guards the last lanes.
    """

    def bulk(i: Lanes, _: list[Lanes]) -> list[Lanes]:
        body(i, wide, None)
        return []

    def rest(i: Lanes, _: list[Lanes]) -> list[Lanes]:
        body(i, LANES, first(count - i, LANES))
        return []

    full = builder.and_(count.value, I64(-wide))
    stretch(builder, (I64(0), full), wide, [], bulk)
    stretch(builder, (full, count.value), LANES, [], rest)


def get(p: Lanes, i: Lanes, width: int, mask: Lanes | None, element: Any = F32) -> Lanes:
    """The lanes at p[i], or those of them that the mask admits."""
    if mask is None:
        return load_lanes(p, i, element, width)
    return load_some(p, i, mask, 0, element, width)


def put(p: Lanes, i: Lanes, value: Lanes, mask: Lanes | None) -> None:
    """Write the lanes at p[i], or those of them that the mask admits."""
    if mask is None:
        store_lanes(p, i, value)
    else:
        store_some(p, i, value, mask)


@intrinsic
def _lanes_loop(
    typing: Any,
    code: Any,
    to: Any,
    a: Any,
    b: Any,
    c: Any,
    turn_a: Any,
    turn_b: Any,
    turn_c: Any,
    n: Any,
    p: Any,
    q: Any,
) -> Any:
    """Write the loop of the instruction whose number is the literal `code`."""
    if not isinstance(code, types.IntegerLiteral):
        return None
    made = of_code(code.literal_value)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = [Lanes(builder, value) for value in args[1:]]
        to, places, turns, count = lanes[0], lanes[1:4], lanes[4:7], lanes[7]

        def body(i: Lanes, width: int, mask: Lanes | None) -> None:
            read = [
                get(place, i & turn, width, mask)
                for place, turn in zip(places[: made.arity], turns)
            ]
            put(to, i, made.formula(read, lanes[8:]), mask)

        loop(builder, count, body, made.wide)
        return context.get_dummy_value()

    return types.void(code, *[types.int64] * 8, types.float64, types.float64), emit


# What an instruction runs on: n floats. Operand a is read at i & turn_a: -1 for an array, 0 for
# `WIDE` copies of one number.
FRAME = Fields("to a b c turn_a turn_b turn_c n", reals="p q")
_frame_of = FRAME.at


@cache
def instruction(name: str) -> Native:
    """Return the kernel that runs an instruction over the chunk that a frame describes."""
    made = instruction_of(name)
    assert made is not None  # programs hold no other
    code = made.code

    def run(frame: Any) -> int:
        w = _frame_of(frame)
        _lanes_loop(code, w.to, w.a, w.b, w.c, w.turn_a, w.turn_b, w.turn_c, w.n, w.p, w.q)
        return 0

    # Names of its own: compiled code is cached, and found again, by name.
    run.__name__ = run.__qualname__ = f"instruction_{name}"
    return Native(run, "entry")


@vectorised
def copy_floats(to: Lanes, a: Lanes, n: Lanes) -> None:
    """Copy n floats from address `a` to address `to`."""
    loop(n.builder, n, lambda i, width, mask: put(to, i, get(a, i, width, mask), mask))


@vectorised
def add_floats(to: Lanes, a: Lanes, n: Lanes) -> None:
    """Add n floats at address `a` to those at address `to`."""

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(to, i, width, mask) + get(a, i, width, mask), mask)

    loop(n.builder, n, body)


@vectorised
def add_scaled(to: Lanes, a: Lanes, n: Lanes, factor: Lanes) -> None:
    """Add n floats at address `a`, times a number, to those at address `to`."""
    factor = factor.cast(F32)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(to, i, width, mask) + get(a, i, width, mask) * factor, mask)

    loop(n.builder, n, body)


@vectorised
def fill_floats(to: Lanes, value: Lanes, n: Lanes) -> None:
    """Write the float32 into n floats at address `to`."""
    loop(n.builder, n, lambda i, width, mask: put(to, i, value.splat(width), mask))
