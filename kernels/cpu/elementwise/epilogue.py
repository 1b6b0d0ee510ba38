"""An operator with element-wise steps on its result, in two passes: its own kernel, then the steps.

A library that has both in one primitive registers variants of its own, and measured cost decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from soapstone.dtypes import WIDE, DType, name_of
from soapstone.ir.tensor import is_half
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.kernels.select import select
from soapstone.native.entries import sequence
from soapstone.native.memory import aligned_array
from soapstone.native.walks import in_places, memory_order


@variant("with_epilogue", "two_passes", expected=1.1, promises=True)
def two_passes(call: Call) -> Entry | None:
    """Return the entry of the operator's own kernel, then the steps in place."""
    arity = call.attributes["arity"]
    operands = call.inputs[arity:]
    program = call.attributes["program"]
    wide, (y,) = call.attributes.get("wide", False), call.outputs
    if wide and not program:
        return _widened(call)
    product_call = _alone(call) if wide else call.inner
    reals = (array.dtype for array in product_call.inputs if array.dtype.kind == "f")
    real = np.dtype(np.float32) if wide else next(reals, y.dtype)  # none: of integers
    if y.dtype != real:  # what the product makes does not fit in the result
        y = _like(y, real)
        product_call = replace(product_call, outputs=(y,))
    _, product = select(product_call)
    attributes = {"program": program, "results": (len(operands) + len(program),)}
    constants = frozenset(i - arity + 1 for i in call.constants if i >= arity)
    steps = Call(
        "fused_elementwise", attributes, (y, *operands), call.outputs, call.threads, constants
    )
    _, after = select(steps)
    return sequence([product, after])


def _alone(call: Call) -> Call:
    """Return the call without steps, of a product that reads halves as wide."""
    arity, attributes = call.attributes["arity"], {**call.attributes, "program": ()}
    constants = frozenset(i for i in call.constants if i < arity)
    return replace(call, inputs=call.inputs[:arity], attributes=attributes, constants=constants)


def _widened(call: Call) -> Entry | None:
    """Return the entry that copies halves to their wide type, and then rounds nothing."""
    before, inputs = list[Entry | None](), list[Array]()
    for array in call.inputs:
        wide = array
        if is_half(array.dtype):
            wide = _like(array, np.dtype(WIDE[name_of(array.dtype)]))
            cast = Call("cast", {"to": name_of(wide.dtype)}, (array,), (wide,), call.threads)
            before.append(select(cast)[1])
        inputs.append(wide)
    product_call = replace(call.inner, inputs=tuple(inputs), precision="float32")
    return sequence([*before, select(product_call)[1]])


def _like(array: Array, dtype: DType) -> Array:
    """Return a new array of the shape and the order of axes, of another type."""
    order = memory_order(array.strides)
    return in_places(aligned_array(tuple(array.shape[axis] for axis in order), dtype), order)
