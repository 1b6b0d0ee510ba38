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
class Finish:
    """What is done to a sum: raised to `before`, `added` to, and kept within bounds."""

    before: float = -math.inf
    added: Array | None = None
    low: float = -math.inf
    high: float = math.inf


_OWN = {None: Finish(), "relu": Finish(low=0.0)}
_Step: TypeAlias = Array | tuple[float, float]  # what is added to the result, or its bounds


def finished(call: Call) -> tuple[Call, Finish] | None:
    """Return the call of a convolution and what follows it, or None where no `Finish` holds that.

    call: of a convolution, or of one with an epilogue.
    """
    first = call.inner
    finish = _OWN.get(first.attributes.get("activation"))
    for step in _chain(call) if first is not call else ():
        finish = None if finish is None or step is None else _after(finish, step)
    return None if finish is None else (first, finish)


def _chain(call: Call) -> Iterator[_Step | None]:
    """Yield the steps on the result; None is one that no `Finish` can hold."""
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


def _after(finish: Finish, step: _Step) -> Finish | None:
    """Return the finish with one more step, or None where it has no place for that."""
    if isinstance(step, np.ndarray):
        if finish.added is not None or finish.high != math.inf:
            return None
        return Finish(before=finish.low, added=step)
    low, high = (min(max(bound, step[0]), step[1]) for bound in (finish.low, finish.high))
    return replace(finish, low=low, high=high)
