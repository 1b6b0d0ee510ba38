"""Entries of equal calls: one is bound, the others are its code over other addresses.

What a kernel does with operands of one form does not depend on where they are. So between the
blocks of two equal calls, the words that differ are addresses in operands, or in what the kernel
made of constants (`shared.packed`), which is made of others in the same way. Before any entry is
derived, this is verified for the kernel word by word on two entries that were bound. An entry's own
memory, such as scratch, is then shared by several entries, which must not run at once.
"""

from __future__ import annotations

from array import array as integers
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.native.arrays import start
from soapstone.native.memory import Array, Block, Entry, extent
from soapstone.native.promises import Notes, contents, promise_of
from soapstone.native.shared import packed

_SHOWN: dict[Hashable, set[int]] = {}  # of how entries move, in which places that has been shown


class FixedError(Exception):
    """An entry from which no other can be derived."""


class _Handle(NamedTuple):
    """A library's object that refers to memory: how to make another, and that memory."""

    again: Callable[..., Any]
    place: int
    offset: int


class _Words(NamedTuple):
    """A block, and which of its words move: for each, the place it refers to and the offset."""

    words: integers[int]
    moves: list[tuple[int, int, int]]


class Relocatable:
    """Derives entries of equal calls.

    Args:
        of: the operator and the variant. entry: of the first call. operands: of that call, inputs
            before outputs. notes: what the kernel did with constants when it was bound.

    Raises:
        FixedError: the entry depends on the contents of constants, or has unknown words.
    """

    def __init__(self, of: Hashable, entry: Entry, operands: Sequence[Array], notes: Notes) -> None:
        if notes.read or any(callable(text) for text in entry.statuses.values()):
            raise FixedError
        self.entry = entry
        self._promised = [n for n, array in enumerate(operands) if promise_of(array) is not None]
        self._packed = notes.packed
        self._parts = [_part(each.array, operands) for each in notes.packed]
        there = [*map(_there, operands), *(each.made for each in notes.packed)]
        self._spans = [(0, 0) if array is None else extent(array) for array in there]
        self._tied = list(_overlaps(self._spans))
        # Places are operands, what was packed, then handles and blocks, pointed to before others.
        self._starts = _starts(there)
        self._count = len(operands)
        self._moving: list[_Handle | _Words] = []
        self._places: dict[int, int | None] = {}  # of handles and blocks by address; None: stays
        self._used = set[int]()
        self._visit(entry.arguments)
        moving = {number for number in self._places.values() if number is not None}
        if not moving - {self._places[entry.block]} <= self._used:
            raise FixedError  # something points to it from where nobody looks

        moves = [
            (len(each.words), *(move[:2] for move in each.moves))
            if isinstance(each, _Words)
            else each.place
            for each in self._moving
        ]
        how = of, self.entry.address, self._count, *moves
        self._shown = _SHOWN.setdefault(how, set())

    def at(self, operands: Sequence[Array], starts: Sequence[int]) -> Entry | None:
        """Return the entry for other operands of the same forms; None if the call must be bound.

        starts: the addresses of their first elements.
        """
        kept: list[Any] = self._operands(operands)
        places = list(starts)
        for number in self._promised:
            places[number] = _start(kept[number])
        if not self._moved(places) <= self._shown:
            return None
        if self._packed:
            made = [
                packed(_like(each.array, operands[of], offset), each.layout, each.make)
                for each, (of, offset) in zip(self._packed, self._parts)
            ]
            kept += made
            places += _starts(made)
            if not self._fit(made) or not self._moved(places) <= self._shown:
                return None
        if self._tied and not self._together(places):
            return None
        block = self.entry.arguments
        for each in self._moving:
            if isinstance(each, _Handle):
                handle = each.again(places[each.place] + each.offset, keep=kept[each.place])
                places.append(handle.address)
                kept.append(handle)
                continue
            words = each.words[:]
            for index, place, offset in each.moves:
                words[index] = places[place] + offset
            block = Block(words, ())
            places.append(block.address)
            kept.append(block)
        if block is not self.entry.arguments:
            block.keep = (self.entry.arguments, *kept[:-1])
        return self.entry._replace(arguments=block)

    def show(self, other: Entry, operands: Sequence[Array], notes: Notes) -> None:
        """Verify on another bound entry that exactly the expected words differ.

        other: that entry. operands: of its call. notes: as of the first.
        """
        made = [each.made for each in notes.packed]
        alike = (other.address, other.statuses) == self.entry[::2] and not notes.read
        if not alike or len(made) != len(self._packed) or not self._fit(made):
            return
        for first, each, part in zip(self._packed, notes.packed, self._parts):
            if each.layout != first.layout or _part(each.array, operands) != part:
                return
        starts = _starts([*self._operands(operands), *made])
        if self._together(starts) and self._alike(
            self.entry.arguments, other.arguments, starts, {}
        ):
            self._shown |= self._moved(starts)

    def _moved(self, starts: list[int]) -> set[int]:
        """Return the places whose memory differs from that in the first call."""
        return {n for n, (a, b) in enumerate(zip(self._starts, starts)) if a != b}

    def _together(self, starts: list[int]) -> bool:
        """Return whether places that overlap in the first call, undistinguished, do so again."""
        return all(
            starts[a] - starts[b] == self._starts[a] - self._starts[b] for a, b in self._tied
        )

    def _operands(self, operands: Sequence[Array]) -> list[Array | None]:
        """Return the memory of the operands of a call; None where nobody has made it."""
        found = list[Array | None](operands)
        for number in self._promised:
            array = operands[number]
            found[number] = contents(array) if number in self._used else _there(array)
        return found

    def _fit(self, made: Sequence[Array]) -> bool:
        """Return whether what was made of constants can stand for what the first call has."""
        return all(
            (other.shape, other.strides) == (first.made.shape, first.made.strides)
            and (other is first.made or number in self._used)  # else it decided something
            for number, (first, other) in enumerate(zip(self._packed, made), self._count)
        )

    def _visit(self, block: Block) -> None:
        """Find the words that move in a block and in everything that it points to."""
        if block.address in self._places:
            return
        if block.address != block.words.buffer_info()[0]:
            raise FixedError  # a library's own
        self._places[block.address] = None
        for kept in block.objects:
            if isinstance(kept, Block):
                self._visit(kept)
            elif isinstance(kept, np.ndarray):
                self._still(kept)
            elif isinstance(array := getattr(kept, "keep", None), np.ndarray):
                self._handle(kept, array)
        words, moves = block.words, []
        for index, word in enumerate(words):
            if word in self._places:
                place, offset = self._places[word], 0
            else:
                place, offset = self._of(word)
            if place is not None:
                moves.append((index, place, offset))
                self._used.add(place)
        if moves:
            self._places[block.address] = self._next
            self._moving.append(_Words(words, moves))

    @property
    def _next(self) -> int:
        return len(self._starts) + len(self._moving)

    def _handle(self, handle: Any, array: Array) -> None:
        if handle.address in self._places:
            return
        place, offset = self._of(start(array))
        self._places[handle.address] = None if place is None else self._next
        if place is not None:
            again = getattr(handle, "again", None)
            if again is None:
                raise FixedError
            self._moving.append(_Handle(again, place, offset))
            self._used.add(place)

    def _still(self, array: Array) -> None:
        """Check that an array of numbers holds no addresses in places that move.

        Raises:
            FixedError: it may.
        """
        if array.dtype.kind in "iu" and array.itemsize == 8 and self._of(start(array))[0] is None:
            for low, high in self._spans:
                if ((array >= low) & (array < high)).any():
                    raise FixedError

    def _of(self, word: int) -> tuple[int | None, int]:
        """Return the place to which a word is an address, and its offset there."""
        for place, (low, high) in enumerate(self._spans):
            if low <= word < high:
                return place, word - self._starts[place]
        return None, 0

    def _alike(self, one: Block, two: Block, starts: list[int], other: dict[int, int]) -> bool:
        """Return whether blocks differ only in words that move and in addresses of their own.

        starts: of the places. other: what addresses of the one are in the other.
        """
        if other.setdefault(one.address, two.address) != two.address:
            return False
        kept = list(one.objects), list(two.objects)
        if len(kept[0]) != len(kept[1]) or len(one.words) != len(two.words):
            return False
        own = list[tuple[int, int, int]]()  # begin and end of an array, and where the other begins
        for a, b in zip(*kept):
            if type(a) is not type(b):
                return False
            if isinstance(a, Block):
                if not self._alike(a, b, starts, other):
                    return False
            elif isinstance(a, np.ndarray):
                if (a.shape, a.dtype, a.strides) != (b.shape, b.dtype, b.strides):
                    return False
                own.append((*extent(a), extent(b)[0]))
            elif hasattr(a, "address"):
                array = getattr(a, "keep", None)
                if isinstance(array, np.ndarray):
                    place, offset = self._of(start(array))
                    if place is not None and start(b.keep) != starts[place] + offset:
                        return False
                other[a.address] = b.address
        for a, b in zip(one.words.tolist(), two.words.tolist()):
            place, offset = self._of(a)
            if a in other:
                expected = other[a]
            elif place is not None:
                expected = starts[place] + offset
            else:
                inside = (to + a - low for low, high, to in own if low <= a < high)
                expected = next(inside, a)
            if b != expected:
                return False
        return True


def _overlaps(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of numbers of spans that overlap."""
    for number, (low, high) in enumerate(spans):
        for other, (begin, end) in enumerate(spans[:number]):
            if low < end and begin < high:
                yield number, other


def _starts(arrays: Sequence[Array | None]) -> list[int]:
    return [_start(array) for array in arrays]


def _start(array: Array | None) -> int:
    return 0 if array is None else start(array)


def _there(array: Array) -> Array | None:
    """Return an operand's contents; None if they are promised and not made."""
    promise = promise_of(array)
    if promise is None:
        return array
    return contents(array) if promise.is_made else None


def _part(array: Array, operands: Sequence[Array]) -> tuple[int, int]:
    """Return the operand of which a packed constant is part, and the offset there.

    Raises:
        FixedError: it is part of none.
    """
    promise = promise_of(array)
    for number, operand in enumerate(operands):
        if promise is not None:
            inside = promise_of(operand) is promise
        else:
            (low, high), (first, past) = extent(array), extent(operand)
            inside = first <= low and high <= past and operand.flags.c_contiguous
        if inside:
            return number, start(array) - start(operand)
    raise FixedError


def _like(array: Array, operand: Array, offset: int) -> Array:
    """Return the part of an operand that is at an offset, of the form of an array."""
    promise = promise_of(operand)
    if promise is None:
        flat = operand.reshape(-1).view(np.uint8)
    else:
        flat, offset = np.frombuffer(promise, np.uint8), offset + promise.place(operand)[0]
    return np.ndarray(array.shape, array.dtype, flat, offset, array.strides)


__all__ = ["FixedError", "Relocatable"]
