"""Intrinsics of the native loops: calls through addresses, ordered loads and stores, the clock.

Importing this module imports Numba: only modules that are imported on first use may do so.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from soapstone import system
from soapstone.native.stack import room

_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic  # type: ignore[untyped-decorator]
def call_entry(typingctx: Any, address: Any, block: Any) -> Any:
    """The status of `int32_t (*)(void *)` at an address, called with a block's address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer]).as_pointer()
        status = builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], pointer)])
        return builder.sext(status, ir.IntType(64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def call_pointer(typingctx: Any, address: Any) -> Any:
    """What `void *(*)(void)` at an address returns, as an integer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), []).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), [])

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def load_acquire(typingctx: Any, array: Any, index: Any) -> Any:
    """`array[index]` of an int64 array, as an atomic acquire load."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.gep(view.data, [args[1]]), "acquire", 8)

    return types.int64(array, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_release(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index] = value` of an int64 array, as an atomic release store."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        builder.store_atomic(args[2], builder.gep(view.data, [args[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def compare_exchange(typingctx: Any, array: Any, index: Any, old: Any, new: Any) -> Any:
    """Replace `array[index]` of an int64 array if it is `old`, atomically; whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        word = builder.gep(view.data, [args[1]])
        pair = builder.cmpxchg(word, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    """The processor's hint that a loop is waiting (x86); nothing elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(_declare(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typingctx: Any, address: Any) -> Any:
    """The void pointer at an integer address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def clock_ns(typingctx: Any) -> Any:
    """Nanoseconds of the clock of `time.perf_counter_ns`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        slot = builder.bitcast(room(builder, ir.ArrayType(word, 2)), word.as_pointer())
        if system.CLOCK_ID is None:
            kind = ir.FunctionType(ir.IntType(32), [word.as_pointer()])
            builder.call(_declare(builder.module, kind, system.CLOCK), [slot])
            tick = 1_000_000_000 // system.performance_frequency()
            return builder.mul(builder.load(slot), ir.Constant(word, tick))
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(32), word.as_pointer()])
        function = _declare(builder.module, kind, system.CLOCK)
        builder.call(function, [ir.Constant(ir.IntType(32), system.CLOCK_ID), slot])
        seconds = builder.load(slot)
        rest = builder.load(builder.gep(slot, [ir.Constant(ir.IntType(32), 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(word, 1_000_000_000)), rest)

    return types.int64(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def yield_processor(typingctx: Any) -> Any:
    """Let another thread of the operating system run on this core."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(_declare(builder.module, kind, system.YIELD), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _declare(module: Any, kind: Any, name: str) -> Any:
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name=name)
