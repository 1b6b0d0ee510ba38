"""The native loop that runs an entry's primitives (imported lazily: it needs Numba).

The address of dnnl_primitive_execute comes from the block, not from the code, so that the compiled
loop can be cached on disk whichever library is loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types
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


@cfunc("int32(voidptr)", cache=True, error_model="numpy")
def execute(block: Any) -> Any:
    """Run a Program's steps in order; return the first non-zero status."""
    head = carray(block, (5,), np.int64)
    words = carray(block, (5 + 3 * head[2],), np.int64)
    for index in range(head[3], head[2]):
        base = 5 + 3 * index
        status = _execute(head[0], words[base], head[1], words[base + 1], words[base + 2])
        if status != 0:
            return status
    head[3] = head[4]
    return 0
