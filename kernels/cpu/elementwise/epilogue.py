"""An operator with element-wise steps on its result, in two passes: its own kernel, then the steps.

A library that has both in one primitive registers variants of its own, and measured cost decides.
"""

from __future__ import annotations

from dataclasses import replace

from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.kernels.select import select
from soapstone.native.entries import sequence


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
    _, product = select(inner(call))
    operands = call.inputs[call.attributes["arity"] :]
    program = call.attributes["program"]
    attributes = {"program": program, "results": (len(operands) + len(program),)}
    steps = Call(
        "fused_elementwise", attributes, (call.outputs[0], *operands), call.outputs, call.threads
    )
    _, after = select(steps)
    return None if product is None or after is None else sequence([product, after])
