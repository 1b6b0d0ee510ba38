"""The native loops that await messages. Importing this module compiles them.

A message between ranks that share memory has two words: how often it was ready, written by the
sender, and how often it was taken, written by the receiver, who copies straight from the sender's
instance. Neither needs the other to do anything meanwhile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from soapstone.cache.compiled import cfunc, njit
from soapstone.native.intrinsics import call_entry, clock_ns, pause, yield_processor

_SPINS = 2000  # polls before other threads may run
_LOOK = 1024  # polls between two looks at the clock
HEAD = 7  # words of a block before its copies
_FLAG, _STATUS = 6, 8  # words of the block: MPI_Test's flag, and room for its MPI_Status


@intrinsic  # type: ignore[untyped-decorator]
def _call_test(typingctx: Any, function: Any, request: Any, flag: Any, status: Any) -> Any:
    """`MPI_Test(request, flag, status)` through addresses."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer] * 3).as_pointer()
        given = [builder.inttoptr(arg, pointer) for arg in args[1:]]
        found = builder.call(builder.inttoptr(args[0], kind), given)
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _load(typingctx: Any, address: Any) -> Any:
    """The word at an address, as an atomic acquire load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(word, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the word at an address, as an atomic release store."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], word, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _address_of(typingctx: Any, block: Any) -> Any:
    """The address a void pointer holds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(types.voidptr), codegen


@cfunc("int32(voidptr)")
def await_request(block: Any) -> int:
    """Poll a request until it has ended; the block's words are as `persistent` lays them out."""
    words = carray(block, (16,), types.int64)
    base = _address_of(block)
    polls = 0
    until = 0
    while True:
        words[_FLAG] = 0
        status = _call_test(words[0], words[1], base + 8 * _FLAG, base + 8 * _STATUS)
        if status != 0:
            return int(status)
        if _load(base + 8 * _FLAG) != 0:
            return 0
        if _load(words[2]) != 0 or _load(words[3]) != 0:
            return -2
        polls += 1
        if polls < _SPINS:
            pause()
        else:
            yield_processor()
        if polls % _LOOK == 0:
            now = clock_ns()
            if until == 0:
                until = now + words[4]
            elif now > until:
                return -3


@njit()
def _until(head: Any, address: int) -> int:
    """Poll a word until it has come to what a block counts to; its words are those of `take`."""
    polls = 0
    until = 0
    while _load(address) < head[0]:
        if _load(head[3]) != 0 or _load(head[4]) != 0:
            return -2
        polls += 1
        if polls < _SPINS:
            pause()
        else:
            yield_processor()
        if polls % _LOOK == 0:
            now = clock_ns()
            if until == 0:
                until = now + head[5]
            elif now > until:
                return -3
    return 0


@cfunc("int32(voidptr)")
def make_ready(block: Any) -> int:
    """Say that a message is ready; block: rounds so far, address of `ready`."""
    head = carray(block, (2,), types.int64)
    head[0] += 1
    _store(head[1], head[0])
    return 0


@cfunc("int32(voidptr)")
def take(block: Any) -> int:
    """Await that a message is ready, copy it, and say that it is taken.

    block: rounds so far; addresses of `ready`, `taken`, the control words and the fault word;
    nanoseconds to wait; the number of copies; then function and block of each copy.
    """
    head = carray(block, (HEAD,), types.int64)
    head[0] += 1
    status = _until(head, head[1])
    if status != 0:
        return int(status)
    copies = carray(block, (HEAD + 2 * head[6],), types.int64)
    for number in range(head[6]):
        status = call_entry(copies[HEAD + 2 * number], copies[HEAD + 2 * number + 1])
        if status != 0:
            return int(status)
    _store(head[2], head[0])
    return 0


@cfunc("int32(voidptr)")
def await_taken(block: Any) -> int:
    """Await that a message is taken; block as that of `take`."""
    head = carray(block, (HEAD,), types.int64)
    head[0] += 1
    return int(_until(head, head[2]))
