"""An operator with element-wise steps on its result, in two passes: its own kernel, then the steps.

A library that has both in one primitive registers variants of its own, and measured cost decides.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.kernels.select import select
from soapstone.native.entries import sequence
from soapstone.native.memory import aligned_array
from soapstone.native.walks import in_places, memory_order


def inner(call: Call) -> Call:
    """Return the wrapped operator's call."""
    at = call.attributes
    arity = at["arity"]
    return replace(
        call,
        operator=at["operator"],
        attributes=dict(at["items"]),
        inputs=call.inputs[:arity],
        constants=frozenset(i for i in call.constants if i < arity),
    )


@variant("with_epilogue", "two_passes", expected=1.1)
def two_passes(call: Call) -> Entry | None:
    """Return the entry of the operator's own kernel, then the steps in place."""
    arity = call.attributes["arity"]
    operands = call.inputs[arity:]
    program = call.attributes["program"]
    product_call, (y,) = inner(call), call.outputs
    real = next(array.dtype for array in product_call.inputs if array.dtype.kind == "f")
    if y.dtype != real:  # what the product makes does not fit in the result
        order = memory_order(y.strides)
        y = in_places(aligned_array(tuple(y.shape[axis] for axis in order), real), order)
        product_call = replace(product_call, outputs=(y,))
    _, product = select(product_call)
    attributes = {"program": program, "results": (len(operands) + len(program),)}
    constants = frozenset(i - arity + 1 for i in call.constants if i >= arity)
    steps = Call(
        "fused_elementwise", attributes, (y, *operands), call.outputs, call.threads, constants
    )
    _, after = select(steps)
    return None if product is None or after is None else sequence([product, after])
