"""Native entries written in Python: compiled lazily by Numba, cached on disk, run without Python.

A kernel is a plain function decorated with `@native`. It reads its arguments from a block of 64-bit
words, allocates nothing, raises nothing and returns a status (0: success). Compilation is put off
to the first use of `.address`, so importing a module of kernels costs nothing. Addresses are always
read from the block, never baked into the code: that is what makes the compiled code cacheable.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from soapstone import system
from soapstone.cache.compiled import cfunc
from soapstone.native.memory import NO_ARGUMENTS, NO_STATUSES, Block, Entry, pack, run
from soapstone.native.stack import room

Kind = Literal["entry", "body", "team"]
F = TypeVar("F", bound=Callable[..., Any])

_SIGNATURES: dict[Kind, str] = {
    "entry": "int32(voidptr)",
    "body": "int32(voidptr, int64, int64)",
    "team": "void(voidptr)",
}
_COMPILING = threading.Lock()


class Native:
    """A kernel that is compiled, or loaded from Numba's cache, when its address is first asked."""

    def __init__(self, function: Callable[..., Any], kind: Kind) -> None:
        self.function = function
        self.kind: Kind = kind
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """The address of the compiled C function."""
        if self._compiled is None:
            with _COMPILING:
                if self._compiled is None:
                    self._compiled = cfunc(_SIGNATURES[self.kind], error_model="numpy")(
                        self.function
                    )
        return int(self._compiled.address)

    def __repr__(self) -> str:
        state = "compiled" if self._compiled is not None else "not compiled"
        return f"Native({self.function.__name__}, {self.kind}, {state})"


def native(kind: Kind = "entry") -> Callable[[Callable[..., Any]], Native]:
    """Return a decorator that makes a module-level function a lazily compiled native kernel.

    "entry": `f(block) -> status`. "body": `f(block, begin, end) -> status`, one part of a
    `parallel_for`. The block is an untyped pointer: `words(block)[3]` is its fourth word.
    """

    def wrap(function: Callable[..., Any]) -> Native:
        return Native(function, kind)

    return wrap


def helper(function: F) -> F:
    """Return the function compiled to be inlined into the kernels that call it."""
    compiled: F = numba.njit(error_model="numpy", forceinline=True)(function)
    return compiled


def routine(function: F) -> F:
    """Return the function compiled to be called by kernels, inlined only where LLVM sees fit."""
    compiled: F = numba.njit(error_model="numpy")(function)
    return compiled


# ------------------------------------------------------------------ what kernels use to read memory
def _pointer_cast(element: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
    def pointer(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            if isinstance(signature.args[0], types.Integer):
                return builder.inttoptr(args[0], target)
            return builder.bitcast(args[0], target)

        return types.CPointer(element)(address), emit

    return pointer


# Typed pointers from an integer address or another pointer: `f32p(words(block)[0])[i]`.
f32p: Any = _pointer_cast(types.float32)
f64p: Any = _pointer_cast(types.float64)
i64p: Any = _pointer_cast(types.int64)
i32p: Any = _pointer_cast(types.int32)
i16p: Any = _pointer_cast(types.int16)
u8p: Any = _pointer_cast(types.uint8)
words: Any = i64p


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def as_float(typing: Any, word: Any) -> Any:
    """The float64 whose bits are the 64-bit word."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), emit


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def stack(typing: Any, nbytes: Any) -> Any:
    """The address of `nbytes` (a literal) of the kernel's stack, aligned to 64 bytes."""
    if not isinstance(nbytes, types.IntegerLiteral):
        return None
    size = nbytes.literal_value

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = room(builder, ir.ArrayType(ir.IntType(8), size), 64)
        return builder.ptrtoint(place, ir.IntType(64))

    return types.int64(nbytes), emit


def fixed_arity(typer: Callable[..., Any], count: int) -> Any:
    """Return the intrinsic of a variadic typer, of `count` arguments as Numba wants to see it."""
    names = ["typing"] + [f"a{i}" for i in range(count)]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    return intrinsic(typer)


def _call(result: str, count: int) -> Any:
    """An intrinsic that calls the C function at an address with 64-bit or pointer arguments."""
    pointer = ir.IntType(8).as_pointer()
    shapes = {
        "entry": (ir.IntType(32), [pointer]),
        "body": (ir.IntType(32), [pointer, ir.IntType(64), ir.IntType(64)]),
        "team": (ir.VoidType(), [pointer, pointer, ir.IntType(32), ir.IntType(32)]),
        "number": (ir.IntType(32), []),
    }
    returns, wants = shapes[result]

    def typer(typing: Any, *given: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target = builder.inttoptr(args[0], ir.FunctionType(returns, wants).as_pointer())
            passed = []
            for value, want in zip(args[1:], wants, strict=True):
                if isinstance(want, ir.PointerType):
                    passed.append(builder.inttoptr(value, want))
                else:
                    passed.append(builder.trunc(value, want) if want.width < 64 else value)
            answer = builder.call(target, passed)
            return context.get_dummy_value() if returns == ir.VoidType() else answer

        kind = types.void if returns == ir.VoidType() else types.int32
        return kind(*([types.int64] * (count + 1))), emit

    return fixed_arity(typer, count + 1)


call_entry: Any = _call("entry", 1)  # (function, block) -> status
call_body: Any = _call("body", 3)  # (function, block, begin, end) -> status
_call_parallel: Any = _call("team", 4)  # GOMP_parallel(function, data, threads, flags)
_call_number: Any = _call("number", 0)  # omp_get_thread_num(), omp_get_num_threads()


# ------------------------------------------------------------------------------- argument blocks
def bind(kernel: Native, *values: Any, statuses: Mapping[int, str] = NO_STATUSES) -> Entry:
    """Return the entry of a kernel on the packed values."""
    return Entry(kernel.address, pack(*values, keep=(kernel,)), statuses)


# ------------------------------------------------------------------------ entries made of entries
@native()
def _nothing(block: Any) -> int:
    return 0


@native()
def _in_order(block: Any) -> Any:
    w = words(block)
    for i in range(w[0]):
        status = call_entry(w[1 + 2 * i], w[2 + 2 * i])
        if status != 0:
            return status
    return 0


@native()
def _either(block: Any) -> Any:
    w = words(block)
    which = 1 if u8p(w[0])[0] != 0 else 3
    return call_entry(w[which], w[which + 1])


@native()
def _whole(block: Any) -> Any:
    w = words(block)
    return call_body(w[0], w[1], 0, w[2])


@native("team")
def _member(block: Any) -> None:
    # w: GOMP_parallel, member, omp_get_thread_num, omp_get_num_threads, parts, items, body,
    #    block, then one status a part. Parts are cut by the requested count, not by the team's, so
    #    that results do not depend on how many threads libgomp grants.
    w = words(block)
    parts = w[4]
    part = np.int64(_call_number(w[2]))
    step = np.int64(_call_number(w[3]))
    while part < parts:
        w[8 + part] = call_body(w[6], w[7], part * w[5] // parts, (part + 1) * w[5] // parts)
        part += step


@native()
def _team(block: Any) -> Any:
    w = words(block)
    data = w[8 + w[4]]
    _call_parallel(w[0], w[1], data, w[4], 0)
    for part in range(w[4]):
        if w[8 + part] != 0:
            return w[8 + part]
    return 0


def noop() -> Entry:
    """Return the entry that does nothing and succeeds."""
    return Entry(_nothing.address, NO_ARGUMENTS)


def sequence(entries: Sequence[Entry]) -> Entry:
    """Return one entry that runs the entries in order and stops at the first non-zero status."""
    if len(entries) == 1:
        return entries[0]
    statuses = {code: text for entry in entries for code, text in entry.statuses.items()}
    return bind(_in_order, len(entries), list(entries), statuses=statuses)


def either(flag: np.ndarray[Any, Any], first: Entry, second: Entry) -> Entry:
    """Return one entry that runs the first where the flag, a bool scalar, is true when it runs."""
    statuses = {**second.statuses, **first.statuses}
    return bind(_either, flag, first, second, statuses=statuses)


class OpenMP(NamedTuple):
    """Addresses of the functions of libgomp that `parallel_for` calls."""

    parallel: int
    thread_num: int
    num_threads: int


@lru_cache(maxsize=1)
def openmp() -> OpenMP | None:
    """Return libgomp's entry points, or None where it is absent (everything is then serial).

    It is the pool oneDNN uses: two pools would fight over the cores.
    """
    library = system.openmp()
    if library is None:
        return None
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    return OpenMP(*(system.address(getattr(library, name)) for name in names))


def parallel_for(
    body: Native,
    block: Block,
    items: int,
    threads: int,
    statuses: Mapping[int, str] = NO_STATUSES,
) -> Entry:
    """Return an entry that runs `body(block, begin, end)` over `items`, cut over the threads.

    The cut depends on `items` and `threads` only. With one thread, or where libgomp is absent, the
    body runs on the calling thread. The status is that of the first part that failed.
    """
    parts = min(threads, items)
    team = openmp()
    if parts <= 1 or team is None:
        return Entry(_whole.address, pack(body.address, block, items, keep=(body,)), statuses)
    packed = pack(
        team.parallel,
        _member.address,
        team.thread_num,
        team.num_threads,
        parts,
        items,
        body.address,
        block,
        (0,) * parts,
        0,
        keep=(body,),
    )
    packed.words[8 + parts] = packed.address
    return Entry(_team.address, packed, statuses)


def useful_threads(threads: int, nbytes: int) -> int:
    """Return how many of the threads pay for work that touches `nbytes` of memory.

    A parallel region costs a few microseconds, in which one core moves some tens of kilobytes.
    """
    return max(1, min(threads, nbytes // 32768))


__all__ = [
    "Block",
    "Native",
    "OpenMP",
    "as_float",
    "bind",
    "call_body",
    "call_entry",
    "either",
    "f32p",
    "f64p",
    "fixed_arity",
    "helper",
    "i16p",
    "i32p",
    "i64p",
    "native",
    "noop",
    "openmp",
    "pack",
    "parallel_for",
    "routine",
    "run",
    "sequence",
    "stack",
    "u8p",
    "useful_threads",
    "words",
]
