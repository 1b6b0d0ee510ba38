"""Intrinsics of compiled code: calls by address, pointers, ordered loads and stores, the clock.

They are written with LLVM's instructions, and Numba comes to know them when it compiles.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from soapstone import system
from soapstone.cache.deferred import Late, intrinsic, numba, types

_X86 = platform.machine().lower() in ("x86_64", "amd64")
VOID, INT, WORD, POINTER = "void", "int", "word", "pointer"  # of what functions of C are given
ir = Late("llvmlite.ir")
_OF_A_THREAD = 4 | 2  # a clock of Linux: of one thread, of the time that its scheduler counts


def fixed_arity(typer: Callable[..., Any], count: Callable[[], int]) -> Any:
    """Return the intrinsic of a variadic typer, of `count()` arguments as Numba wants to see it."""

    def prepare() -> None:
        names = ["typing"] + [f"a{i}" for i in range(count())]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in names]
        )

    return intrinsic(typer, prepare)


@cache
def _llvm(of: str) -> Any:
    """Return LLVM's type of VOID, INT, WORD or POINTER."""
    whole = {VOID: ir.VoidType(), INT: ir.IntType(32), WORD: ir.IntType(64)}
    return whole[of] if of in whole else ir.IntType(8).as_pointer()


def _function(returns: str, *wants: str) -> Any:
    return ir.FunctionType(_llvm(returns), list(map(_llvm, wants)))


# ----------------------------------------------------------------------------- calls by address
def calling(returns: Any, *wants: Any) -> Any:
    """Return the intrinsic that calls the C function at an address: `call(address, *arguments)`.

    returns: VOID, INT or WORD (a pointer comes back as its address). wants: of each argument
    POINTER, INT or WORD; all are given as 64-bit integers.
    """

    def typer(typing: Any, *given: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = builder.inttoptr(args[0], _function(returns, *wants).as_pointer())
            passed = []
            for value, want in zip(args[1:], wants, strict=True):
                if want == POINTER:
                    passed.append(builder.inttoptr(value, _llvm(want)))
                else:
                    passed.append(builder.trunc(value, _llvm(want)) if want == INT else value)
            answer = builder.call(target, passed)
            return context.get_dummy_value() if returns == VOID else answer

        return _kind(returns)(*map(_kind, [WORD] * (1 + len(wants)))), emit

    return fixed_arity(typer, lambda: 1 + len(wants))


def external(name: str, returns: Any, *wants: Any) -> Any:
    """Return the intrinsic that calls a C function of this process; see `calling`."""

    def typer(typing: Any, *given: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = _declare(builder.module, _function(returns, *wants), name)
            answer = builder.call(function, args)
            return context.get_dummy_value() if returns == VOID else answer

        return _kind(returns)(*map(_kind, wants)), emit

    return fixed_arity(typer, lambda: len(wants))


def symbol(name: str) -> Any:
    """Return the intrinsic of the address that the process gives a name; see `loader.define`."""

    @intrinsic
    def place(typing: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            named = _declare(builder.module, _function(VOID), name)
            return builder.ptrtoint(named, _llvm(WORD))

        return types.int64(), emit

    return place


def _kind(of: Any) -> Any:
    """Return Numba's type of VOID, INT or WORD."""
    return {VOID: types.void, INT: types.int32, WORD: types.int64}[of]


call_entry: Any = calling(INT, POINTER)  # (function, block) -> status
call_body: Any = calling(INT, POINTER, WORD, WORD)  # (function, block, begin, end) -> status
call_pointer: Any = calling(WORD)  # `void *(*)(void)`, whose answer is an address


# ------------------------------------------------------------------------------------- pointers
def pointer_cast(dtype: str) -> Any:
    """Return what makes pointers to numbers, of an integer address or another pointer."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            if isinstance(signature.args[0], types.Integer):
                return builder.inttoptr(args[0], target)
            return builder.bitcast(args[0], target)

        return types.CPointer(numba.from_dtype(np.dtype(dtype)))(address), emit

    return pointer


# `f32p(words(block)[0])[i]`, and so on.
f32p: Any = pointer_cast("float32")
f64p: Any = pointer_cast("float64")
i64p: Any = pointer_cast("int64")
i32p: Any = pointer_cast("int32")
i16p: Any = pointer_cast("int16")
u8p: Any = pointer_cast("uint8")
words: Any = i64p


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """The void pointer at an integer address."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], _llvm(POINTER))

    return types.voidptr(types.int64), emit


@intrinsic
def address_of(typing: Any, place: Any) -> Any:
    """The integer address that a pointer holds."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], _llvm(WORD))

    return types.int64(place), emit


# ---------------------------------------------------------------------------------------- stack
def room(builder: Any, kind: Any, align: int = 0) -> Any:
    """Return the pointer to room of an LLVM type on the stack of the function being built.

    It is taken in the function's first block: where it is used may be inside a loop, which would
    take more stack in every round.
    """
    with builder.goto_entry_block():
        place = builder.alloca(kind)
        if align:
            place.align = align
    return place


@intrinsic
def stack(typing: Any, nbytes: Any) -> Any:
    """The address of `nbytes` (a literal) of the kernel's stack, aligned to 64 bytes."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None
    size = nbytes.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = room(builder, ir.ArrayType(ir.IntType(8), size), 64)
        return builder.ptrtoint(place, _llvm(WORD))

    return types.int64(nbytes), emit


# -------------------------------------------------------------------------------- between workers
def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """The pointer to a word of an int64 array, or of the words at an address."""
    if isinstance(signature.args[0], types.Integer):
        first = builder.inttoptr(args[0], _llvm(WORD).as_pointer())
    else:
        first = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(first, [args[1]])


@intrinsic
def load_acquire(typing: Any, words: Any, index: Any) -> Any:
    """`words[index]` of an int64 array, or of an address, as an atomic acquire load."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, args), "acquire", 8)

    return types.int64(words, types.int64), emit


@intrinsic
def store_release(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """`words[index] = value` of an int64 array, or of an address, as an atomic release store."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), emit


@intrinsic
def compare_exchange(typing: Any, words: Any, index: Any, old: Any, new: Any) -> Any:
    """Replace `words[index]`, as in `load_acquire`, if it is `old`, atomically; whether so."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature, args)
        pair = builder.cmpxchg(word, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(words, types.int64, types.int64, types.int64), emit


@intrinsic
def fetch_add(typing: Any, words: Any, index: Any, value: Any) -> Any:
    """Add to `words[index]`, as in `load_acquire`, atomically and in one order; what it was."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(context, builder, signature, args)
        return builder.atomic_rmw("add", word, args[2], "seq_cst")

    return types.int64(words, types.int64, types.int64), emit


@intrinsic
def pause(typing: Any) -> Any:
    """The processor's hint that a loop is waiting (x86); nothing elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _X86:
            kind = _function(VOID)
            builder.call(_declare(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


def _clock(builder: Any, number: Any) -> Any:
    """Nanoseconds of one of the system's clocks, by its number."""
    slot = builder.bitcast(room(builder, ir.ArrayType(_llvm(WORD), 2)), _llvm(WORD).as_pointer())
    kind = ir.FunctionType(_llvm(INT), [_llvm(INT), _llvm(WORD).as_pointer()])
    builder.call(_declare(builder.module, kind, system.CLOCK), [number, slot])
    seconds, rest = builder.load(slot), builder.load(builder.gep(slot, [_llvm(INT)(1)]))
    return builder.add(builder.mul(seconds, _llvm(WORD)(1_000_000_000)), rest)


@intrinsic
def clock_ns(typing: Any) -> Any:
    """Nanoseconds of the clock of `time.perf_counter_ns`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if system.CLOCK_ID is not None:
            return _clock(builder, _llvm(INT)(system.CLOCK_ID))
        slot = room(builder, _llvm(WORD))
        kind = ir.FunctionType(_llvm(INT), [_llvm(WORD).as_pointer()])
        builder.call(_declare(builder.module, kind, system.CLOCK), [slot])
        tick = 1_000_000_000 // system.performance_frequency()
        return builder.mul(builder.load(slot), _llvm(WORD)(tick))

    return types.int64(), emit


@intrinsic
def thread_clock_ns(typing: Any, identifier: Any) -> Any:
    """Nanoseconds that a thread, by its number (int32), has had a processor; Linux alone.

    Source: the manual page clock_getres(2): bits 3 and up of such a clock are the number inverted
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inverted = builder.shl(builder.not_(args[0]), _llvm(INT)(3))
        return _clock(builder, builder.or_(inverted, _llvm(INT)(_OF_A_THREAD)))

    return types.int64(types.int32), emit


@intrinsic
def yield_processor(typing: Any) -> Any:
    """Let another thread of the operating system run on this core."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(_declare(builder.module, _function(INT), system.YIELD), [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def rest(typing: Any) -> Any:
    """Sleep for as short as the operating system can: some 50 us."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, rest_ = _function(INT, INT), _llvm(INT)(0 if system.WINDOWS else 1)
        builder.call(_declare(builder.module, kind, system.REST), [rest_])
        return context.get_dummy_value()

    return types.void(), emit


def _declare(module: Any, kind: Any, name: str) -> Any:
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name=name)
