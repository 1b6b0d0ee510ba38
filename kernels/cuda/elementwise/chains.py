"""Element-wise operators and their fused chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from soapstone.ir.ops.elementwise.fused import program_steps
from soapstone.ir.spec import operators
from soapstone.kernels.cuda.elementwise.pointwise import Writer, pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, step
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def single(name: str, attributes: Mapping[str, Any]) -> Writer:
    """Return the writer of one element-wise operator."""
    return lambda text, values: [step(text, name, values, attributes)]


def program(attributes: Mapping[str, Any]) -> Writer:
    """Return the writer of a program of element-wise operators (`fused_elementwise`)."""

    def write(text: Text, inputs: Sequence[Value]) -> list[Value]:
        values = list(inputs)
        for spec, operands, given in program_steps(attributes, len(inputs)):
            values.append(step(text, spec.name, [values[i] for i in operands], given))
        return [values[i] for i in attributes["results"]]

    return write


def _bind(name: str, call: Call) -> DeviceEntry:
    inputs, outputs = views(call)
    return pointwise(single(name, call.attributes), inputs, outputs)


for _spec in operators():
    if _spec.elementwise:
        variant(_spec.name, "numba", processor="cuda")(partial(_bind, _spec.name))


@variant("fused_elementwise", "numba", processor="cuda")
def fused(call: Call) -> DeviceEntry:
    """Return the entry of a chain."""
    inputs, outputs = views(call)
    return pointwise(program(call.attributes), inputs, outputs)
