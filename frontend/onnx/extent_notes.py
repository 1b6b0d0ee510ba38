"""Whether a model depends on the extents of its inputs only as extents of shapes.

If so, its graph for other extents can be derived from graphs that were imported already
(`soapstone.ir.extents`). While a graph is imported, each node leaves a *note* of what it does with
extents beyond shapes; two graphs for different extents with equal notes show that it is constant.

- Numbers computed from extents (`Shape`, and sums, slices and multiples of it) are linear in each
  extent, and may become shapes. Where one is used in any other way, its contents are noted: if two
  graphs for different extents noted the same, the number is a constant, for all extents.
- An operator whose translation may depend on extents in other ways makes the graph *uneven*.
- The extent of a value may follow from those of inputs in steps, as behind a stride. Such an extent
  is a number of its own, in which others are linear.
- Where a translation depends on where the parts of a cut lie, that choice is noted with the numbers
  that decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from soapstone.frontend.onnx.extent_axes import NONE, all_of
from soapstone.frontend.onnx.values import (
    EVEN,
    PLAIN,
    RULES,
    Even,
    Extent,
    Extents,
    Slot,
    Value,
    domain_of,
)
from soapstone.ir.by_extents import Choice
from soapstone.ir.spec import operator_of_onnx
from soapstone.records import replace

if TYPE_CHECKING:
    import onnx


class Note(NamedTuple):
    """The note of a node: what it does with extents beyond shapes.

    Attributes:
        said: equal in two graphs if what the node uses of extents is a constant in both.
        several: the extents of noted contents that depend on several: these may be equal in two
            graphs without being constants, unless the extents vary independently.
        bent: the extents behind strides on which noted contents depend: these may be equal in two
            graphs without being constants.
        cut: the choice of how parts are cut, by the extents that are cut and the parts' ends.
    """

    said: tuple[str, ...]
    several: tuple[Extent, ...] = ()
    bent: tuple[Extent, ...] = ()
    cut: Choice | None = None


UNEVEN = Note(("uneven",))


def _mark(node: onnx.NodeProto) -> Even | None:
    """Return how a node's translation depends on extents; None if it may depend in any way."""
    key = domain_of(node.domain), node.op_type
    spec = None if key in RULES else operator_of_onnx(key[1], key[0])
    return EVEN.get(key) if spec is None else Even(aligned=spec.elementwise)


def marked(
    node: onnx.NodeProto, inputs: Sequence[Slot | None], results: Sequence[Slot | None]
) -> tuple[Sequence[Slot | None], Note | None]:
    """Return a node's results, marked with the extents that they depend on, and its note, if any.

    Args:
        node: a node of ONNX's standard operators.
        inputs, results: its values; None for those that are left out.
    """
    given = [each for each in inputs if isinstance(each, Value) and each.follows]
    mark = _mark(node)
    if not given:
        return _told(node, mark, inputs, results)
    picked = mark.elements(node, inputs) if mark and mark.elements else None
    derived = any(each.of_extents for each in given)
    results, note = _told(node, mark, inputs, results)
    if (
        picked is None
        and note != UNEVEN
        and (derived or note is not None or (mark and mark.places))
    ):
        bent = tuple(sorted((each for each in all_of(given) if each.bent), key=_place))
        if bent:
            note = (note or Note(()))._replace(bent=bent)
    results = [
        replace(each, follows=picked or _follows(node, mark or PLAIN, inputs, given, each))
        if isinstance(each, Value)
        else each
        for each in results
    ]
    return results, note


def _follows(
    node: onnx.NodeProto,
    mark: Even,
    inputs: Sequence[Slot | None],
    given: Sequence[Value],
    made: Value,
) -> tuple[Extents, ...]:
    """Return what each axis of a result follows from; more than that where it is not looked for."""
    x, rank = inputs[0], made.rank
    attributes = {each.name: list(each.ints) for each in node.attribute}
    if made.of_extents:
        several = node.op_type == "Mul" and sum(each.of_extents for each in given) > 1
        if several and made.array is not None:  # products of extents are numbers of their own
            values = enumerate(made.array.ravel().tolist())
            return tuple(_own(all_of(given), made, at, value) for at, value in values)
        return (all_of(given),)
    moved = mark.axes(node, inputs, rank) if mark.axes else None
    if moved is not None:
        return moved
    if any(each.of_extents for each in given) or not isinstance(x, Value):
        return (all_of(given),) * rank
    if (mark.strided or mark.scaled) and len(x.follows) == rank:
        strides = [0] if mark.scaled else attributes.get("strides") or [1]
        strides *= 1 if len(strides) == rank - 2 else rank - 2
        spatial = zip(x.follows[2:], strides)
        behind = (
            each if stride == 1 else _own(each, made, axis, made.shape[axis])
            for axis, (each, stride) in enumerate(spatial, 2)
        )
        return (*x.follows[:2], *behind)
    if mark.aligned:
        return tuple(
            NONE.union(*(each.follows[axis] for each in given if len(each.follows) >= -axis))
            for axis in range(-rank, 0)
        )
    return (all_of(given),) * rank


def _own(extents: Extents, made: Value, at: int, number: int) -> Extents:
    """Return what follows from extents, but on no line, as a number of its own."""
    origin = frozenset[tuple[str, int]]().union(*(each.origin for each in extents))
    return frozenset([Extent(made.label, at, number, origin)])


def _place(extent: Extent) -> tuple[str, int, int]:
    return extent[:3]


def _told(
    node: onnx.NodeProto,
    mark: Even | None,
    inputs: Sequence[Slot | None],
    results: Sequence[Slot | None],
) -> tuple[Sequence[Slot | None], Note | None]:
    """Return a node's results, those made of extents marked so, and what is to be noted, if any."""
    kind = node.op_type
    if kind == "Shape":
        return [replace(each, of_extents=True) for each in results if isinstance(each, Value)], None
    which = [
        at
        for at, each in enumerate(inputs)
        if each is not None and getattr(each, "of_extents", False)
    ]
    made = [each for each in results if not isinstance(each, Value) or each.array is None]
    if not which:
        follows = any(isinstance(each, Value) and each.follows for each in inputs)
        return results, None if not (made or follows) else _even(node, mark, inputs)
    known = all(each is None or _number(each) for each in inputs)
    linear = mark is not None and mark.linear_in(which)
    if known and not made and all(map(_number, results)):
        divided = kind == "Div" and which == [0]
        if linear or divided or (kind == "Mul" and len(which) == 2):
            numbers = [
                replace(each, of_extents=True) for each in results if isinstance(each, Value)
            ]
            return numbers, _divided(inputs) if divided else None
    if mark is not None and which == [mark.shape] and _within(kind, inputs):
        return results, None if not made else _even(node, mark, inputs)
    if kind == "Slice" and 0 not in which and (note := _cut(inputs)) is not None:
        return results, note
    if made and _even(node, mark, inputs) is not None:
        return results, UNEVEN
    contents = [each for at in which if isinstance(each := inputs[at], Value)]
    arrays = [each.array.tobytes().hex() for each in contents if each.array is not None]
    sources = [all_of([each]) for each in contents]
    several = [each for all_ in sources if len(all_) > 1 for each in sorted(all_, key=_place)]
    return results, Note((kind, *arrays), tuple(several))


def _divided(inputs: Sequence[Slot | None]) -> Note:
    """Return what is to be noted where numbers are divided: parts are linear while rests stay."""
    arrays = [each.array for each in inputs if isinstance(each, Value) and each.array is not None]
    pairs = np.stack(np.broadcast_arrays(*arrays), -1)
    numbers = tuple(pairs.ravel().tolist())
    return Note(("Div",), cut=Choice(_rests, numbers, _rests(*numbers)))


def _rests(*numbers: int) -> tuple[tuple[bool, int], ...]:
    """Return the signs of numbers, and what is left of them by the divisors behind them."""
    return tuple((n < 0, n % by if by else n) for n, by in zip(numbers[::2], numbers[1::2]))


def _within(kind: str, inputs: Sequence[Slot | None]) -> bool:
    """Return whether an operand made of extents is a shape, or ends a range or part of a constant.

    The range or part has as many elements as lie between its ends, however long it is.
    """
    if kind not in ("Slice", "Range"):
        return True
    arrays = [each.array for each in inputs if isinstance(each, Value) and each.array is not None]
    if len(arrays) < len(inputs):
        return False
    if kind == "Range":
        start, stop, step = arrays
        return bool(step == 1 and start <= stop)
    data, starts, ends, *rest = arrays
    if getattr(inputs[0], "follows", ()):
        return False
    axes = rest[0].tolist() if rest else range(starts.size)
    return all(
        0 <= start <= end <= data.shape[axis]
        for start, end, axis in zip(starts.tolist(), ends.tolist(), axes)
    ) and all(step == 1 for each in rest[1:] for step in each.tolist())


def _cut(inputs: Sequence[Slot | None]) -> Note | None:
    """Return what is to be noted of a part that is cut, or None where too little is known.

    Ends are linear in extents, as axes are, so how they lie is known for others.
    """
    data, *given = [each for each in inputs if isinstance(each, Value)]
    arrays = [each.array.tolist() for each in given if each.array is not None]
    if len(arrays) < len(inputs) - 1 or len(arrays) not in (3, 4):
        return None
    axes = [axis % data.rank for axis in arrays[2]]
    if any(step != 1 for each in arrays[3:] for step in each):
        return None
    ends = tuple(zip((data.shape[axis] for axis in axes), *arrays[:2]))
    numbers = tuple(number for each in ends for number in each)
    return Note(("Slice", *map(str, axes)), cut=Choice(_lies, numbers, _lies(*numbers)))


def _lies(*numbers: int) -> tuple[bool, ...]:
    """Return how parts lie in the axes that they are cut of: an extent, start and end of each."""
    found = list[bool]()
    for extent, start, end in zip(*(numbers[n::3] for n in range(3))):
        low, high = (bound + extent * (bound < 0) for bound in (start, end))
        found += (start < 0, end < 0, *(0 <= bound <= extent for bound in (low, high)))
        found.append(min(max(low, 0), extent) > min(max(high, 0), extent))
    return tuple(found)


def _number(slot: Slot | None) -> bool:
    """Return whether a value is known integers."""
    return isinstance(slot, Value) and slot.array is not None and slot.array.dtype.kind in "iu"


def _even(node: onnx.NodeProto, mark: Even | None, inputs: Sequence[Slot | None]) -> Note | None:
    """Return None where a node's translation depends on extents by shapes alone, else a note."""
    kind = node.op_type
    if mark is None:
        return UNEVEN
    data = inputs[0] if inputs else None
    for each in node.attribute:
        padded = each.name == "auto_pad" and each.s not in (b"NOTSET", b"VALID", b"")
        if padded or (each.name == "ceil_mode" and each.i) or each.name == "output_shape":
            # what is padded goes by the extents of what windows move over
            if not isinstance(data, Value):
                return UNEVEN
            return Note((kind, *map(str, data.shape[2:])))
    if kind == "MaxPool" and len([name for name in node.output if name]) > 1:
        return UNEVEN
    if not isinstance(data, Value):
        return None
    if mark.strided and data.array is not None and data.follows:  # a constant made of extents
        return UNEVEN
    if kind == "Slice" and (data.array is None or data.follows):
        note = _cut(inputs)
        if note is not None:
            return note
        axes = inputs[3] if len(inputs) > 3 else None
        if not isinstance(axes, Value) or axes.array is None:
            return UNEVEN
        return Note((kind, *(str(data.shape[axis]) for axis in axes.array.tolist())))
    return None


__all__ = ["UNEVEN", "Note", "marked"]
