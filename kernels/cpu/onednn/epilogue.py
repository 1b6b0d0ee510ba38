"""Products and convolutions with element-wise steps on the result, as oneDNN's post-operators.

The other way to serve `with_epilogue` is in kernels/cpu/elementwise/epilogue.py; measured cost
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from soapstone.ir.spec import operators
from soapstone.kernels.cpu.elementwise.epilogue import inner
from soapstone.kernels.cpu.onednn import convolution, matmul, pointwise
from soapstone.kernels.cpu.onednn.descriptors import ALGORITHMS, Step, activation
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

Bind = Callable[[Call, Sequence[Step]], Entry | None]

BINDS: dict[str, dict[str, Bind]] = {  # by variant, then by operator
    "onednn": {
        "conv2d": convolution.convolution,
        "linear": lambda call, steps: matmul.linear(call, "first", steps),
        "matmul": lambda call, steps: matmul.matmul(call, "first", steps),
    },
    "onednn_gemm": {
        "linear": lambda call, steps: matmul.linear(call, "gemm", steps),
        "matmul": lambda call, steps: matmul.matmul(call, "gemm", steps),
    },
    "onednn_product": {"conv2d": pointwise.conv2d},
}

# Algorithms of operators of two operands, of which the result so far may be either.
BINARY = {
    spec.name: ALGORITHMS[str(spec.formula.onednn[None][0])]
    for spec in operators()
    if spec.formula and len(spec.inputs) == 2 and spec.formula.onednn
}


def _aligned(operand: Array, rank: int) -> Array:
    """Return the operand with axes of size 1 put before it up to the rank."""
    return operand[(None,) * (rank - operand.ndim)]


def _steps(call: Call) -> list[Step] | None:
    """Return the program as oneDNN's steps, or None where it is no chain of such."""
    arity = call.attributes["arity"]
    y = call.outputs[0]
    operands = call.inputs[arity:]
    found: list[Step] = []
    result = 0
    for index, (name, numbers, items) in enumerate(call.attributes["program"]):
        if numbers == (result,):
            function = activation(name, dict(items))
            if function is None:
                return None
            found.append(function)
        elif name in BINARY and len(numbers) == 2:
            first, second = numbers
            if second == result and name not in ("sub", "div"):
                first, second = second, first
            if first != result or not 1 <= second <= len(operands):
                return None
            operand = operands[second - 1]
            if operand.dtype != np.float32:
                return None
            found.append((BINARY[name], _aligned(operand, y.ndim)))
        else:
            return None
        result = len(operands) + index + 1
    return found


def _fused(call: Call, name: str) -> Entry | None:
    """Return the entry of one primitive with post-operators, or None where oneDNN has none."""
    bind = BINDS[name].get(call.attributes["operator"])
    steps = _steps(call)
    if bind is None or not steps or len(steps) > 8 or call.outputs[0].size == 0:
        return None
    return bind(inner(call), steps)


for _name in BINDS:
    variant("with_epilogue", _name, promises=True)(partial(_fused, name=_name))
