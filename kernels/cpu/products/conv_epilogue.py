"""What convolutions of this folder and of `winograd` do to a sum before they write it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from soapstone.kernels.entry import Array, Call
from soapstone.records import dataclass


@dataclass(frozen=True)
class ConvEpilogue:
    """What is done to a sum: raised to `before`, `added` to, and kept within bounds."""

    before: float = -math.inf
    added: Array | None = None
    low: float = -math.inf
    high: float = math.inf


_OWN = {None: ConvEpilogue(), "relu": ConvEpilogue(low=0.0)}
_Step: TypeAlias = Array | tuple[float, float]  # what is added to the result, or its bounds


def conv_epilogue(call: Call) -> tuple[Call, ConvEpilogue] | None:
    """Return the call of a convolution and what follows it, or None where none holds that.

    call: of a convolution, or of one with an epilogue.
    """
    first = call.inner
    epilogue = _OWN.get(first.attributes.get("activation"))
    for step in _chain(call) if first is not call else ():
        epilogue = None if epilogue is None or step is None else _after(epilogue, step)
    return None if epilogue is None else (first, epilogue)


def _chain(call: Call) -> Iterator[_Step | None]:
    """Yield the steps on the result; None is one that no `ConvEpilogue` can hold."""
    y, operands = call.outputs[0], call.inputs[call.attributes["arity"] :]
    result = 0
    for index, (name, numbers, items) in enumerate(call.attributes["program"]):
        settings = dict(items)
        others = [number for number in numbers if number != result]
        if numbers == (result,) and name == "relu":
            yield 0.0, math.inf
        elif numbers == (result,) and name == "clip":
            low, high = settings.get("low"), settings.get("high")
            yield -math.inf if low is None else low, math.inf if high is None else high
        elif name == "add" and len(others) == 1 and len(numbers) == 2:
            known = 1 <= others[0] <= len(operands)
            operand = operands[others[0] - 1] if known else None
            yield operand if operand is not None and operand.shape == y.shape else None
        else:
            yield None
        result = len(operands) + index + 1


def _after(epilogue: ConvEpilogue, step: _Step) -> ConvEpilogue | None:
    """Return the epilogue with one more step, or None where it has no place for that."""
    if isinstance(step, np.ndarray):
        if epilogue.added is not None or epilogue.high != math.inf:
            return None
        return ConvEpilogue(before=epilogue.low, added=step)
    low, high = (min(max(bound, step[0]), step[1]) for bound in (epilogue.low, epilogue.high))
    return replace(epilogue, low=low, high=high)
