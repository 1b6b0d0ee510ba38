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
        several = mark.multiplied and sum(each.of_extents for each in given) > 1
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
    if mark is not None and mark.counts:
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
    if known and not made and mark and mark.linear_in(which) and all(map(_number, results)):
        numbers = [replace(each, of_extents=True) for each in results if isinstance(each, Value)]
        choice = mark.divided(inputs) if mark.divided else None
        return numbers, choice and Note((node.op_type,), cut=choice)
    if mark and which == [mark.shape] and (mark.within is None or mark.within(inputs)):
        return results, None if not made else _even(node, mark, inputs)
    parts = mark.cut(inputs) if mark and mark.cut and 0 not in which else None
    if parts is not None and parts[1] is not None:
        return results, Note((node.op_type, *parts[0]), cut=parts[1])
    if made and _even(node, mark, inputs) is not None:
        return results, UNEVEN
    contents = [each for at in which if isinstance(each := inputs[at], Value)]
    arrays = [each.array.tobytes().hex() for each in contents if each.array is not None]
    sources = [all_of([each]) for each in contents]
    several = [each for all_ in sources if len(all_) > 1 for each in sorted(all_, key=_place)]
    return results, Note((node.op_type, *arrays), tuple(several))


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
    if not isinstance(data, Value):
        return None
    if mark.strided and data.array is not None and data.follows:  # a constant made of extents
        return UNEVEN
    if mark.cut is not None and (data.array is None or data.follows):
        parts = mark.cut(inputs)
        return UNEVEN if parts is None else Note((kind, *parts[0]), cut=parts[1])
    return None


__all__ = ["UNEVEN", "Note", "marked"]
