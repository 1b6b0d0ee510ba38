"""Products and convolutions with element-wise steps on the result, as oneDNN's post-operators.

The other way to serve `with_epilogue` is in kernels/cpu/elementwise/epilogue.py; measured cost
decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from soapstone.dtypes import name_of
from soapstone.ir.spec import operator
from soapstone.kernels.cpu.onednn import bfloat16, convolution, matmul, pointwise, quantized
from soapstone.kernels.cpu.onednn.descriptors import (
    ACTIVATIONS,
    ALGORITHMS,
    Activation,
    Step,
    activation,
)
from soapstone.kernels.cpu.onednn.library import multiplies_bfloat16, multiplies_bytes
from soapstone.kernels.cpu.onednn.sequences import as_image
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant

Bind = Callable[[Call, Sequence[Step]], Entry | None]
_MOST = 12  # steps
_RELU = Activation(ALGORITHMS["relu"])  # makes NaN 0, for which there is no byte
_SLOW = frozenset({"sigmoid", "silu"})
# Steps that oneDNN makes numbers of NaN by, which would hide a diverged step.
_HIDING = frozenset({"clip", "exp", "hard_sigmoid", "maximum", "minimum"})

BINDS: dict[str, dict[str, Bind]] = {  # by variant, then by operator
    "onednn": {
        "conv1d": as_image(convolution.convolution),
        "conv2d": convolution.convolution,
        "conv3d": convolution.convolution,
        "linear": matmul.linear,
        "matmul": matmul.matmul,
    },
    "onednn_gemm": {
        "linear": partial(matmul.linear, form="gemm"),
        "matmul": partial(matmul.matmul, form="gemm"),
    },
    "onednn_product": {"conv2d": pointwise.conv2d},
    bfloat16.NAME: bfloat16.BINDS,
    bfloat16.PRODUCT: {"conv2d": bfloat16.pixels},
}

# Of products of bytes, whose results may be rounded to bytes again.
_ROUNDING: dict[str, Callable[..., Entry | None]] = (
    {"quantized_conv2d": quantized.conv, "quantized_linear": quantized.linear}
    if multiplies_bytes()
    else {}
)


def _binary(name: str) -> int | None:
    """Return oneDNN's algorithm of an operator of two operands, or None where it has none."""
    spec = operator(name)
    if spec.formula is None or len(spec.inputs) != 2 or not spec.formula.onednn:
        return None
    return ALGORITHMS[str(spec.formula.onednn[None][0])]


def _aligned(operand: Array, rank: int) -> Array:
    """Return the operand with axes of size 1 put before it up to the rank."""
    return operand[(None,) * (rank - operand.ndim)]


class _Chain:
    """The steps of a program as oneDNN's, while they are a chain of such."""

    def __init__(self, call: Call) -> None:
        self.arity = call.attributes["arity"]
        self.call = call
        self.operands = call.inputs[self.arity :]
        self.steps: list[Step] = []
        self.rounds = False  # whether the result is bytes
        # Narrow operands, their scale and zero, by the number of what they stand for.
        self._widened: dict[int, tuple[Array, float, float]] = {}

    def add(self, index: int, result: int) -> bool | None:
        """Add a step on the result so far; return whether there is a new one, None: it cannot be.

        result: the number of the result so far. index: of the step.
        """
        name, numbers, items = self.call.attributes["program"][index]
        if name == "dequantize" and numbers[0] != result:
            scale, zero = map(self._known, numbers[1:])
            if not (1 <= numbers[0] <= len(self.operands) and scale) or zero is None:
                return None
            source = self.operands[numbers[0] - 1]
            self._widened[len(self.operands) + index + 1] = source, scale, zero
            return False
        if name == "cast":
            return self._cast(numbers[0], dict(items)["to"], index, result)
        if name in ("quantize", "dequantize"):
            return self._converted(name, numbers, dict(items)["to"] if items else "", index)
        if name in _HIDING and self.call.attributes["operator"] not in _ROUNDING:
            return None  # of bytes there is no NaN
        if numbers == (result,):
            function = activation(name, dict(items))
            if function is None:
                return None
            self.steps.append(function)
            return True
        algorithm = _binary(name)  # of whose operands the result so far may be either
        if algorithm is None or len(numbers) != 2:
            return None
        first, second = numbers
        if second == result and name not in ("sub", "div"):
            first, second = second, first
        return True if first == result and self._combined(name, algorithm, second) else None

    def _cast(self, number: int, to: str, index: int, result: int) -> bool | None:
        """Add a rounding of the result to bfloat16, which ends a program, or a half that is read.

        One that relu and another rounding follow is none: it makes no difference.
        """
        if number == result:
            after = [step[0] for step in self.call.attributes["program"][index + 1 :]]
            rounds = to == BFLOAT16 and after in ([], ["cast", "relu", "cast"])
            return True if rounds or to == "float32" else None
        if not 1 <= number <= len(self.operands) or to != "float32":
            return None
        source = self.operands[number - 1]
        if name_of(source.dtype) != BFLOAT16:
            return None
        self._widened[len(self.operands) + index + 1] = source, 1.0, 0.0
        return False

    def _known(self, number: int) -> float | None:
        """Return an operand that is one number and never another, else None."""
        position = self.arity + number - 1
        if position not in self.call.constants or self.call.inputs[position].size != 1:
            return None
        return float(self.call.inputs[position].reshape(()))

    def _combined(self, name: str, algorithm: int, number: int) -> bool:
        """Add an operator of two operands, the second by its number; return whether it is one."""
        rank = self.call.outputs[0].ndim
        if number in self._widened:
            operand, scale, zero = self._widened[number]
            if name_of(operand.dtype) == BFLOAT16:
                self.steps.append((algorithm, _aligned(operand, rank)))
                return True
            if name != "add":
                return False
            # y + (q - zero) scale = (y / scale + q) scale - zero scale
            self._affine(1 / scale, 0.0)
            self.steps.append((algorithm, _aligned(operand, rank)))
            self._affine(scale, -zero * scale)
            return True
        if not 1 <= number <= len(self.operands):
            return False
        operand = self.operands[number - 1]
        if operand.dtype != np.float32:
            return False
        self.steps.append((algorithm, _aligned(operand, rank)))
        return True

    def _converted(self, name: str, numbers: Sequence[int], to: str, index: int) -> bool | None:
        """Add a rounding of the result to bytes, or what they stand for."""
        scale, zero = map(self._known, numbers[1:])
        if scale is None or scale <= 0 or zero is None:
            return None
        if name == "dequantize":
            self._affine(scale, -zero * scale)
            return True
        limits = np.iinfo(to)
        positive = self.steps[-1:] == [ACTIVATIONS["relu"]]
        if positive:
            self.steps.pop()
        self._affine(1 / scale, 0.0)
        if positive and zero != limits.min:  # which is what all below 0 is rounded to
            self.steps.append(_RELU)
        if index == len(self.call.attributes["program"]) - 1:
            self.rounds = True  # the primitive does, within the type's limits
            if zero % 2:  # ties go to even numbers before it is added
                self.steps.append(Activation(ALGORITHMS["round"]))
        else:
            low, high = limits.min - zero, limits.max - zero
            self.steps.append(Activation(ALGORITHMS["round"]))
            self.steps.append(Activation(ALGORITHMS["clip"], low, high))
        self._affine(1.0, zero)
        return True

    def _affine(self, scale: float, shift: float) -> None:
        """Add a multiplication and an addition, as one with those before."""
        if (scale, shift) == (1.0, 0.0):
            return
        last = self.steps[-1] if self.steps else None
        if isinstance(last, Activation) and last.algorithm == ALGORITHMS["linear"]:
            self.steps.pop()
            scale, shift = last.alpha * scale, last.beta * scale + shift
        self.steps.append(Activation(ALGORITHMS["linear"], scale, shift))


def _chain(call: Call) -> _Chain | None:
    """Return the program as oneDNN's steps, or None where it is no chain of such."""
    made = _Chain(call)
    result = 0
    for index in range(len(call.attributes["program"])):
        new = made.add(index, result)
        if new is None:
            return None
        if new:
            result = len(made.operands) + index + 1
    return made if len(made.steps) <= _MOST else None


def _fused(call: Call, name: str) -> Entry | None:
    """Return the entry of one primitive with post-operators, or None where oneDNN has none."""
    bind = BINDS[name].get(call.attributes["operator"])
    rounding = name == "onednn" and _ROUNDING.get(call.attributes["operator"])
    if not (bind or rounding) or call.outputs[0].size == 0:
        return None
    chain = _chain(call)
    if chain is None:
        return None
    if rounding:
        return rounding(call.inner, chain.steps, chain.rounds)
    return bind(call.inner, chain.steps) if bind and not chain.rounds else None


def _expected(call: Call, name: str) -> float:
    """Return what is expected of a variant: oneDNN's sigmoid takes longer than a pass of ours."""
    slow = any(step[0] in _SLOW for step in call.attributes["program"])
    return (bfloat16.expected(call) if name == bfloat16.NAME else 1.0) * (1.2 if slow else 1.0)


for _name in BINDS:
    _runs = _name != bfloat16.NAME or multiplies_bfloat16()
    _cost = partial(_expected, name=_name)
    variant("with_epilogue", _name, expected=_cost, promises=True, runs=_runs)(
        partial(_fused, name=_name)
    )
