"""Products and convolutions with element-wise steps on the result, as oneDNN's post-operators.

The other way to serve `with_epilogue` is in kernels/cpu/elementwise/epilogue.py; measured cost
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.spec import operator
from soapstone.kernels.cpu.elementwise.epilogue import inner
from soapstone.kernels.cpu.onednn import convolution, matmul, pointwise
from soapstone.kernels.cpu.onednn.descriptors import (
    ABS,
    ADD,
    CLIP,
    DIV,
    ELU,
    EXP,
    GELU_ERF,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    LINEAR,
    LOGISTIC,
    MAXIMUM,
    MINIMUM,
    MUL,
    NAN_SAFE_RELU,
    POWER,
    RELU,
    SQRT,
    SUB,
    SWISH,
    TANH,
    Activation,
    Step,
)
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

Settings = Mapping[str, Any]
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

FUNCTIONS: dict[str, Callable[[Settings], Activation]] = {
    "relu": lambda at: NAN_SAFE_RELU,
    "leaky_relu": lambda at: Activation(RELU, at["alpha"]),
    "gelu": lambda at: Activation(GELU_TANH if at["approximate"] == "tanh" else GELU_ERF),
    "sigmoid": lambda at: Activation(LOGISTIC),
    "tanh": lambda at: Activation(TANH),
    "affine": lambda at: Activation(LINEAR, at["scale"], at["shift"]),
    "neg": lambda at: Activation(LINEAR, -1.0),
    "abs": lambda at: Activation(ABS),
    "exp": lambda at: Activation(EXP),
    "sqrt": lambda at: Activation(SQRT),
    "power": lambda at: Activation(POWER, 1.0, at["exponent"]),
    "clip": lambda at: Activation(
        CLIP, *(b if at[k] is None else at[k] for k, b in (("low", -np.inf), ("high", np.inf)))
    ),
    "elu": lambda at: Activation(ELU, at["alpha"]),
    "silu": lambda at: Activation(SWISH, at["alpha"]),
    "hard_sigmoid": lambda at: Activation(HARD_SIGMOID, at["alpha"], at["beta"]),
    "hard_swish": lambda at: Activation(HARD_SWISH, 1 / 6, 0.5),
}
# Algorithm by operator; whether the result may be the second operand.
OPERATIONS = {
    "add": (ADD, True),
    "mul": (MUL, True),
    "maximum": (MAXIMUM, True),
    "minimum": (MINIMUM, True),
    "sub": (SUB, False),
    "div": (DIV, False),
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
        if numbers == (result,) and name in FUNCTIONS:
            found.append(FUNCTIONS[name](operator(name).normalise(dict(items))))
        elif name in OPERATIONS and len(numbers) == 2:
            algorithm, commutes = OPERATIONS[name]
            first, second = numbers
            if second == result and commutes:
                first, second = second, first
            if first != result or not 1 <= second <= len(operands):
                return None
            operand = operands[second - 1]
            if operand.dtype != np.float32:
                return None
            found.append((algorithm, _aligned(operand, y.ndim)))
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
    variant("with_epilogue", _name)(partial(_fused, name=_name))
