"""The native loop that runs an entry's steps, and the small steps that are no primitives.

Imported lazily: it needs Numba.

The address of dnnl_primitive_execute comes from the block, not from the code, so that the compiled
loop can be cached on disk whichever library is loaded.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic


@intrinsic
def _execute(  # type: ignore[no-untyped-def]
    typing_context, function, primitive, stream, count, arguments
) -> Any:
    """`status = function(primitive, stream, count, arguments)`, all given as integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(word, [pointer, pointer, word, pointer])
        address, primitive, stream, count, arguments = values
        return builder.call(
            builder.inttoptr(address, kind.as_pointer()),
            [
                builder.inttoptr(primitive, pointer),
                builder.inttoptr(stream, pointer),
                builder.trunc(count, word),
                builder.inttoptr(arguments, pointer),
            ],
        )

    long = types.int64
    return types.int32(long, long, long, long, long), generate


@intrinsic
def _call(typing_context, function, block) -> Any:  # type: ignore[no-untyped-def]
    """`status = function(block)`, both given as integers."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.IntType(32), [pointer]).as_pointer()
        return builder.call(
            builder.inttoptr(values[0], kind), [builder.inttoptr(values[1], pointer)]
        )

    return types.int32(types.int64, types.int64), generate


@intrinsic
def _pointer(typing_context, address) -> Any:  # type: ignore[no-untyped-def]
    """A pointer to the address."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@njit(error_model="numpy", forceinline=True)
def _floats(address: Any, size: Any) -> Any:
    return carray(_pointer(address), (size,), np.float32)


def execute(block: Any) -> Any:
    """Run a Program's steps in order; return the first non-zero status."""
    head = carray(block, (5,), np.int64)
    words = carray(block, (5 + 3 * head[2],), np.int64)
    for index in range(head[3], head[2]):
        base = 5 + 3 * index
        if words[base] == 0:
            status = _call(words[base + 1], words[base + 2])
        else:
            status = _execute(head[0], words[base], head[1], words[base + 1], words[base + 2])
        if status != 0:
            return status
    head[3] = head[4]
    return 0


def running_statistics(block: Any) -> Any:
    """Batch statistics to running ones and rstd.

    Words: channels; mean, variance (biased), old mean, old variance, new mean, new variance, rstd;
    epsilon, momentum, count / (count - 1).
    """
    words = carray(block, (11,), np.int64)
    reals = carray(block, (11,), np.float64)
    channels = words[0]
    mean, variance = _floats(words[1], channels), _floats(words[2], channels)
    old_mean, old_variance = _floats(words[3], channels), _floats(words[4], channels)
    new_mean, new_variance = _floats(words[5], channels), _floats(words[6], channels)
    rstd = _floats(words[7], channels)
    epsilon, momentum, unbias = reals[8], reals[9], reals[10]
    for c in range(channels):
        new_mean[c] = (1 - momentum) * old_mean[c] + momentum * mean[c]
        new_variance[c] = (1 - momentum) * old_variance[c] + momentum * unbias * variance[c]
        rstd[c] = 1 / np.sqrt(variance[c] + epsilon)
    return 0


def reciprocal_deviation(block: Any) -> Any:
    """1 / sqrt(variance + epsilon). Words: size, variance, rstd, epsilon."""
    words = carray(block, (4,), np.int64)
    epsilon = carray(block, (4,), np.float64)[3]
    variance, rstd = _floats(words[1], words[0]), _floats(words[2], words[0])
    for i in range(words[0]):
        rstd[i] = 1 / np.sqrt(variance[i] + epsilon)
    return 0


def variance_of(block: Any) -> Any:
    """1 / rstd², the variance with epsilon inside. Words: size, rstd, variance."""
    words = carray(block, (3,), np.int64)
    rstd, variance = _floats(words[1], words[0]), _floats(words[2], words[0])
    for i in range(words[0]):
        variance[i] = 1 / (np.float64(rstd[i]) * rstd[i])
    return 0


_FUNCTIONS = {
    f.__name__: f for f in (execute, running_statistics, reciprocal_deviation, variance_of)
}
_COMPILING = threading.Lock()


@cache
def _compiled(name: str) -> Any:
    return cfunc("int32(voidptr)", cache=True, error_model="numpy")(_FUNCTIONS[name])


def compiled(name: str) -> Any:
    """Return the function `name` of this module as a compiled C callback."""
    with _COMPILING:  # two workers may bind their first entries at once
        return _compiled(name)
