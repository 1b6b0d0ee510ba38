"""Values computed element by element that are kept in registers: one kernel makes all that others
need of them.

An `Element` is written down when it is asked for, and computed where it is read. `Joined` launches
what must be in memory: what has a place there, what a kernel of another kind reads, and what is
read again after that. A part of an element is an element of parts of its operands, so the gates
that are cut from a sum of products, and put side by side again, are never moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, step, wide
from soapstone.kernels.cuda.entry import Work
from soapstone.kernels.cuda.substrate.arrays import View

MOST = 40  # operands of a kernel, whose arguments are 4096 bytes at most
Change = Callable[[Any], Any]  # of an array to a view of it


@dataclass(eq=False)
class Element:
    """What an element-wise operator makes of operands whose shapes broadcast to its own.

    Attributes:
        operator: its name, or None of what is its operand as it is.
        flops: operations for one element. last: the number of the step that reads it last.
        home: where it is to be in memory, if it is. stored: whether it is there.
        parts: what has been made of it by a view, by the view's name.
    """

    operator: str | None
    attributes: Mapping[str, Any]
    operands: Sequence[Operand]
    shape: tuple[int, ...]
    dtype: str
    flops: float = 0.0
    last: int = -1
    home: View | None = None
    stored: bool = False
    parts: dict[Any, Element] = field(default_factory=dict, repr=False)

    def memory(self) -> View:
        """Return where a stored element is."""
        assert self.home is not None
        return self.home


Operand: TypeAlias = Element | View


def present(value: Operand) -> View | None:
    """Return where a value is in memory, or None: it has yet to be computed."""
    if isinstance(value, View):
        return value
    return value.home if value.stored else None


class Joined:
    """Elements that are written down, and launches of those that somebody needed.

    Attributes:
        launches: so far, in order. now: the number of the step whose operands are being read.

    Args:
        room: gives memory for a shape and a type, until the step of its last reader. passing:
            whether a view is in such memory.
    """

    def __init__(
        self, room: Callable[[Sequence[int], str, int], View], passing: Callable[[View], bool]
    ) -> None:
        self.launches: list[Work] = []
        self.now = 0
        self._room, self._passing = room, passing
        self._pending: list[Element] = []

    def add(self, element: Element) -> Element:
        """Write an element down; its operands are in memory, or elements that are written down."""
        for operand in element.operands:
            view = present(operand)
            if view is not None:
                self.settle(view)
        self._pending.append(element)
        return element

    def moved(self, value: Operand, key: Any, change: Change) -> Operand:
        """Return what a view of a value is. key: what the view is known by."""
        view = present(value)
        if view is not None:
            return view.through(change)
        assert isinstance(value, Element)
        made = value.parts.get(key)
        if made is None:

            def whole(array: Any) -> Any:
                return change(np.broadcast_to(array, value.shape))

            operands = [self.moved(each, (value.shape, key), whole) for each in value.operands]
            shape = whole(np.empty((), np.uint8)).shape
            made = replace(value, operands=operands, shape=shape, last=-1, home=None, parts={})
            value.parts[key] = self.add(made)
        return made

    def read(self, value: Operand) -> View:
        """Return where a value is in memory, for what is launched next."""
        view = present(value)
        if view is None:
            assert isinstance(value, Element)
            value.home = value.home or self._room(value.shape, value.dtype, value.last)
            self.flush()
            return value.home
        self.settle(view)
        return view

    def settle(self, view: View) -> None:
        """Compute what is yet to be written where a view reads."""
        if any(each.home is not None and _meet(each.home, view) for each in self._pending):
            self.flush()

    def holds(self) -> set[int]:
        """Forget what nobody can ask for any more, and return the spans that the rest reads."""
        asked = [e for e in self._pending if e.home is not None or e.last > self.now]
        alive = _reached(asked)
        self._pending = [each for each in self._pending if each in alive]
        views = [present(operand) for each in alive for operand in each.operands]
        views += [each.home for each in alive]
        return {id(view.span) for view in views if view is not None}

    def flush(self) -> None:
        """Launch whatever has a place in memory and is not there yet."""
        reached = _reached([each for each in self._pending if each.home is not None])
        queue = [each for each in self._pending if each in reached]
        while queue:
            taken = self._first(queue)
            made = self._stored(taken)
            for each in made:
                each.home = each.home or self._room(each.shape, each.dtype, each.last)
            for shape in dict.fromkeys(map(_long, made)):
                self._launch([each for each in made if _long(each) == shape])
            for each in made:
                each.stored = True
            gone = set(taken)
            queue = [each for each in queue if each not in gone]
            self._pending = [each for each in self._pending if not each.stored]

    def _first(self, queue: Sequence[Element]) -> list[Element]:
        """Return as many of a queue as one kernel may have operands for, one at least."""
        taken: list[Element] = []
        reads: set[Any] = set()
        for each in queue:
            reads |= {_key(view) for view in _leaves(each)}
            if taken and len(reads) + len(self._stored([*taken, each])) > MOST:
                break
            taken.append(each)
        return taken

    def _stored(self, taken: Sequence[Element]) -> list[Element]:
        """Return which of elements that are computed together must be in memory then."""
        inside = set(taken)
        outside = {
            operand for e in self._pending if e not in inside for operand in _elements(e.operands)
        }
        return [
            each
            for each in taken
            if each.home is not None
            or ((each.last >= self.now or each in outside) and not self._cheap(each))
        ]

    def _cheap(self, element: Element) -> bool:
        """Return whether an element is rather computed again than kept."""
        if len(element.operands) > 2:
            return False
        views = [each for each in element.operands if isinstance(each, View)]
        numbers = [each for each in _elements(element.operands) if not each.operands]
        stay = not any(map(self._passing, views))
        return stay and len(views) + len(numbers) == len(element.operands)

    def _launch(self, made: Sequence[Element]) -> None:
        """Launch the kernel of elements of one shape, but for axes of extent 1."""
        known: dict[Any, View] = {}
        for root in made:
            for view in _leaves(root):
                seen = _seen(view, root.shape)
                known.setdefault(_key(seen), seen)
        number = {key: n for n, key in enumerate(known)}

        def write(text: Text, values: Sequence[Value]) -> list[Value]:
            found: dict[Any, Value] = {}

            def value(of: Operand, shape: tuple[int, ...]) -> Value:
                view = present(of)
                if view is not None:
                    return values[number[_key(_seen(view, shape))]]
                assert isinstance(of, Element)
                if (of, shape) not in found:
                    operands = [value(each, shape) for each in of.operands]
                    found[of, shape] = _written(text, of, operands)
                return found[of, shape]

            return [value(each, each.shape) for each in made]

        outputs = [_seen(each.memory(), each.shape) for each in made]
        flops = sum(each.flops * math.prod(each.shape) for each in _reached(made))
        entry = pointwise(write, list(known.values()), outputs)
        self.launches += entry.counted(flops).launches


def _written(text: Text, element: Element, operands: Sequence[Value]) -> Value:
    if element.operator is None:
        return operands[0]
    if not operands:
        kind = wide(element.dtype)
        return text.set(literal(element.attributes["value"], kind), kind)
    return step(text, element.operator, operands, element.attributes)


def _elements(operands: Iterable[Operand]) -> Iterator[Element]:
    """Yield those of operands that are yet to be computed."""
    for each in operands:
        if isinstance(each, Element) and not each.stored:
            yield each


def _reached(elements: Iterable[Element]) -> dict[Element, None]:
    """Return elements and all that are computed for them, in an order."""
    found: dict[Element, None] = {}
    rest = list(elements)
    while rest:
        each = rest.pop()
        if each not in found:
            found[each] = None
            rest += _elements(each.operands)
    return found


def _leaves(element: Element) -> Iterator[View]:
    """Yield what an element is computed from, in memory."""
    for each in _reached([element]):
        for operand in each.operands:
            view = present(operand)
            if view is not None:
                yield view


def _key(view: View) -> Any:
    return id(view.span), view.offset, view.shape, view.strides, view.dtype


def _seen(view: View, shape: Sequence[int]) -> View:
    """Return a view that is broadcast to a shape, without the axes of extent 1."""
    kept = tuple(0 if extent == 1 else slice(None) for extent in shape)
    return view.broadcast(shape).through(lambda array: array[(*kept, ...)])


def _long(element: Element) -> tuple[int, ...]:
    """Return the extents of an element's axes that have more than one index."""
    return tuple(extent for extent in element.shape if extent != 1)


def _meet(one: View, other: View) -> bool:
    """Return whether views may have an element in common."""
    if one.span is not other.span or not one.size or not other.size:
        return False
    return one.offset < other.offset + other.reach and other.offset < one.offset + one.reach
