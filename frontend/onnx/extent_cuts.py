"""Ends that extents decide: what rules name of operators that cut parts, count, or divide.

A rule says by one of these (`Even.cut`, `Even.within`, `Even.divided`) on which choice it depends
that what its operator does with extents is the same for others.
"""

from __future__ import annotations

import numpy as np

from soapstone.frontend.onnx.values import Slots, Value
from soapstone.ir.by_extents import Choice
from soapstone.ir.tensor import Array


def rests(inputs: Slots) -> Choice:
    """Return what numbers that are divided depend on: parts are linear while rests stay."""
    pairs = np.stack(np.broadcast_arrays(*_arrays(inputs)), -1)
    numbers = tuple(pairs.ravel().tolist())
    return Choice(_rests, numbers, _rests(*numbers))


def _rests(*numbers: int) -> tuple[tuple[bool, int], ...]:
    """Return the signs of numbers, and what is left of them by the divisors behind them."""
    return tuple((n < 0, n % by if by else n) for n, by in zip(numbers[::2], numbers[1::2]))


def counted(inputs: Slots) -> bool:
    """Return whether a range has as many elements as lie between its ends, however long it is."""
    arrays = _arrays(inputs)
    if len(arrays) < len(inputs):
        return False
    start, stop, step = arrays
    return bool(step == 1 and start <= stop)


def part_of_constant(inputs: Slots) -> bool:
    """Return whether a part of a constant has as many elements as lie between its ends."""
    arrays = _arrays(inputs)
    if len(arrays) < len(inputs) or any(isinstance(x, Value) and x.follows for x in inputs[:1]):
        return False
    data, starts, ends, *rest = arrays
    axes = rest[0].tolist() if rest else range(starts.size)
    return all(
        0 <= start <= end <= data.shape[axis]
        for start, end, axis in zip(starts.tolist(), ends.tolist(), axes)
    ) and all(step == 1 for each in rest[1:] for step in each.tolist())


def part(inputs: Slots) -> tuple[tuple[str, ...], Choice | None] | None:
    """Return the axes of a part that is cut and the choice of how it lies.

    Ends are linear in extents, as axes are, so how they lie is known for others. Where they are not
    known, or are taken in steps, these are the extents of the axes, and no choice; where axes are
    not known either, None.
    """
    data, *given = [each for each in inputs if isinstance(each, Value)]
    arrays = [each.array.tolist() for each in given if each.array is not None]
    if len(arrays) == len(inputs) - 1 and len(arrays) in (3, 4) and set(*arrays[3:]) <= {1}:
        axes = [axis % data.rank for axis in arrays[2]]
        ends = zip((data.shape[axis] for axis in axes), *arrays[:2])
        numbers = tuple(number for each in ends for number in each)
        return tuple(map(str, axes)), Choice(_lies, numbers, _lies(*numbers))
    axes_given = inputs[3] if len(inputs) > 3 else None
    if not isinstance(axes_given, Value) or axes_given.array is None:
        return None
    return tuple(str(data.shape[axis]) for axis in axes_given.array.tolist()), None


def _lies(*numbers: int) -> tuple[bool, ...]:
    """Return how parts lie in the axes that they are cut of: an extent, start and end of each."""
    found = list[bool]()
    for extent, start, end in zip(*(numbers[n::3] for n in range(3))):
        low, high = (bound + extent * (bound < 0) for bound in (start, end))
        found += (start < 0, end < 0, *(0 <= bound <= extent for bound in (low, high)))
        found.append(min(max(low, 0), extent) > min(max(high, 0), extent))
    return tuple(found)


def _arrays(inputs: Slots) -> list[Array]:
    """Return the contents of those that are known."""
    return [each.array for each in inputs if isinstance(each, Value) and each.array is not None]
