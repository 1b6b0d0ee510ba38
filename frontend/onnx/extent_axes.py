"""What axes of results, and elements of shapes, follow from: the kinds that rules name.

A rule says by one of these (`Even.axes`, `Even.elements`) how its operator moves extents: each axis
of its result then follows from some axes of its operands, and not from all of them. Where too
little is known they return None.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.values import Extents, Slot, Value

if TYPE_CHECKING:
    import onnx

NONE: Extents = frozenset()
Inputs = Sequence[Slot | None]
Found = tuple[Extents, ...] | None


def all_of(values: Sequence[Value]) -> Extents:
    """Return everything that values follow from."""
    return NONE.union(*(extents for each in values for extents in each.follows))


# Elements of shapes


def of_shape(node: onnx.NodeProto, inputs: Inputs) -> Found:
    """Return what the extents of a value follow from, or of a part of them."""
    x, ends = inputs[0], {each.name: each.i for each in node.attribute}
    if not isinstance(x, Value):
        return None
    return x.follows[ends.get("start", 0) : ends.get("end")]


def joined(node: onnx.NodeProto, inputs: Inputs) -> Found:
    """Return what the numbers of several shapes follow from."""
    parts = [_elements(each) for each in inputs]
    known = [part for part in parts if part is not None]
    if not isinstance(inputs[0], Value) or len(known) < len(parts):
        return None
    return tuple(each for part in known for each in part)


def gathered(node: onnx.NodeProto, inputs: Inputs) -> Found:
    """Return what the numbers at given places follow from."""
    found = _places(inputs)
    if found is None or found[1][0] is None:
        return None
    follows, (places, *_) = found
    return _at(follows, np.arange(len(follows))[places])


def sliced(node: onnx.NodeProto, inputs: Inputs) -> Found:
    """Return what the numbers of a slice follow from."""
    found = _places(inputs)
    if found is None or len(found[1]) < 2 or any(each is None for each in found[1]):
        return None
    follows, arrays = found
    begin, end, *rest = (int(each.item()) for each in arrays if each is not None)
    begin = max(begin, -len(follows))  # also backwards
    return _at(follows, np.arange(len(follows))[begin : end : rest[1] if len(rest) > 1 else 1])


def _places(inputs: Inputs) -> tuple[tuple[Extents, ...], list[Any]] | None:
    """Return what the numbers of a shape follow from, and the constants that choose among them."""
    x, *others = inputs
    if not isinstance(x, Value):
        return None
    arrays = [
        each.array
        for each in others
        if isinstance(each, Value) and not (each.of_extents or each.follows)
    ]
    known = x.of_extents and x.rank == 1 and len(x.follows) == x.shape[0]
    return (x.follows, arrays) if known and len(arrays) == len(others) else None


def _at(follows: tuple[Extents, ...], elements: np.ndarray[Any, Any]) -> tuple[Extents, ...]:
    return tuple(follows[at] for at in elements.ravel().tolist())


def _elements(slot: Slot | None) -> Found:
    """Return what each of some numbers follows from; None where they are not known."""
    if not isinstance(slot, Value) or slot.rank != 1 or slot.lasting is None:
        return None
    if slot.follows and not slot.of_extents:
        return None
    count = slot.shape[0]
    return slot.follows if len(slot.follows) == count else (all_of([slot]),) * count


# Axes of results


def reshaped(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return what the axes of a value follow from once it has a shape."""
    x, shape = inputs[0], inputs[1] if len(inputs) > 1 else None
    elements = _elements(shape)
    if elements is None or not isinstance(x, Value) or not isinstance(shape, Value):
        return None
    if shape.array is None:
        return None
    found, numbers, of = list(elements), shape.array.tolist(), axes_of(x)
    zeros = any(each.name == "allowzero" and each.i for each in node.attribute)
    same = set[int]() if zeros else {axis for axis, number in enumerate(numbers) if number == 0}
    for axis in same:
        found[axis] = of[axis]
    if -1 in numbers:  # what is left, once the axes that stay are divided out
        left = [of[axis] for axis in range(x.rank) if axis not in same]
        found[numbers.index(-1)] = all_of([shape]).union(*left)
    return tuple(found)


def kept(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of what is padded or cut along its axes, by numbers that follow too."""
    x, *others = inputs
    if not isinstance(x, Value):
        return None
    ends = all_of([each for each in others if isinstance(each, Value)])
    return tuple(each | ends for each in axes_of(x))


def expanded(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of what is repeated to a shape."""
    x, shape = inputs[0], inputs[1] if len(inputs) > 1 else None
    return _along(axes_of(x), _elements(shape)) if isinstance(x, Value) else None


def transposed(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of what has its axes in another order."""
    x = inputs[0]
    if not isinstance(x, Value):
        return None
    order = next((list(each.ints) for each in node.attribute if each.name == "perm"), [])
    return tuple(axes_of(x)[axis] for axis in order or range(rank)[::-1])


def unsqueezed(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of what has further axes."""
    x, *others = inputs
    told = others[0].lasting if others and isinstance(others[0], Value) else None
    given = next((list(each.ints) for each in node.attribute if each.name == "axes"), [])
    new = {axis % rank for axis in (given if told is None else told.ravel().tolist())}
    if not isinstance(x, Value) or not new:
        return None
    left = iter(axes_of(x))
    return tuple(NONE if axis in new else next(left) for axis in range(rank))


def multiplied(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of a product of matrices, or of many of them."""
    x, y = inputs[:2]
    if not (isinstance(x, Value) and isinstance(y, Value)) or min(x.rank, y.rank) < 2:
        return None
    batch = _along(axes_of(x)[:-2], axes_of(y)[:-2]) or ()
    return (*batch, axes_of(x)[-2], axes_of(y)[-1])


def multiplied_turned(node: onnx.NodeProto, inputs: Inputs, rank: int) -> Found:
    """Return the same of a product of matrices of which each may be transposed."""
    x, y = inputs[:2]
    if not (isinstance(x, Value) and isinstance(y, Value)):
        return None
    turned = {each.name for each in node.attribute if each.i}
    return axes_of(x)["transA" in turned], axes_of(y)["transB" not in turned]


def axes_of(value: Value) -> tuple[Extents, ...]:
    """Return what each axis follows from; more than that where it is not known."""
    known = len(value.follows) == value.rank and not value.of_extents
    return value.follows if known else (all_of([value]),) * value.rank


def _along(one: Sequence[Extents], other: Sequence[Extents] | None) -> Found:
    """Return what axes follow from that are counted from the last of two values."""
    if other is None:
        return None
    both = zip_longest(one[::-1], other[::-1], fillvalue=NONE)
    return tuple(a | b for a, b in both)[::-1]
