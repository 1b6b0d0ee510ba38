"""Short vectors in Numba code: sixteen lanes as values of type `vectors.Vector`.

`@vectorised` makes a function of `Lanes` callable from kernels; what kernels use most has its name
here. Load and store take an address or a pointer, and an index in elements.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from soapstone.cache.deferred import Late, numba, types
from soapstone.native.intrinsics import fixed_arity
from soapstone.native.lanes import (
    F32,
    F64,
    I1,
    Lanes as Lanes,
    first,
    load_lanes,
    load_some,
    maximum,
    minimum,
    store_lanes as store_lanes,
    store_some as store_some,
    where as where,
)

vectors = Late("soapstone.native.vectors")


# ------------------------------------------------------------------------------------ from Numba
def vectorised(function: Callable[..., Any]) -> Any:
    """Return the function of lanes as one that Numba code can call.

    Arguments may be vectors, numbers, pointers or addresses. The result type is found by a trial
    run on a program that is thrown away.
    """

    def write(context: Any, builder: Any, kinds: Any, values: Any) -> Any:
        lanes = []
        for kind, value in zip(kinds, values, strict=True):
            if kind in (types.boolean,) and value.type != I1:
                value = builder.trunc(value, I1)
            lanes.append(Lanes(builder, value))
        made = function(*lanes)
        return None if made is None else made.value

    def typer(typing: Any, *given: Any) -> Any:
        context = numba.core.registry.cpu_target.target_context
        plain = [types.unliteral(kind) for kind in given]
        shapes = [context.get_value_type(kind) for kind in plain]
        trial = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), shapes), "trial")
        builder = ir.IRBuilder(trial.append_basic_block())
        result = vectors.numba_type(write(context, builder, plain, trial.args))

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            made = write(context, builder, signature.args, args)
            return context.get_dummy_value() if made is None else made

        return result(*plain), emit

    return fixed_arity(typer, lambda: len(inspect.signature(function).parameters))


# What kernels call: v = load(p, i), store(p, i, v), part(p, i, n): the first n lanes of p[i]….
load = vectorised(lambda p, i: load_lanes(p, i))
store = vectorised(lambda p, i, v: store_lanes(p, i, v))
load_first = vectorised(lambda p, i, n: load_some(p, i, first(n)))
store_first = vectorised(lambda p, i, v, n: store_some(p, i, v, first(n)))
# The lanes past the end are minus or plus infinity, the identities of maximum and minimum.
load_first_low = vectorised(lambda p, i, n: load_some(p, i, first(n), float("-inf")))
load_first_high = vectorised(lambda p, i, n: load_some(p, i, first(n), float("inf")))
load_doubles = vectorised(lambda p, i: load_lanes(p, i, F64))
splat = vectorised(lambda x: x.cast(F32).splat())
widen = vectorised(lambda v: v.cast(F64))
choose = vectorised(where)
vmax = vectorised(maximum)
vmin = vectorised(minimum)
vsqrt = vectorised(lambda v: v.call("llvm.sqrt"))
sum_lanes = vectorised(lambda v: v.fold(lambda a, b: a + b))
max_lanes = vectorised(lambda v: v.fold(maximum))
min_lanes = vectorised(lambda v: v.fold(minimum))
