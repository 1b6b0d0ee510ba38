"""Bound entries as data, from which another process makes them again without binding a call.

An entry is code over blocks of words. A word is a number, or an address in an array, in a block, of
a function or of a library's object; which it is follows from the addresses of everything that a
block keeps. The data of an entry are its words, with what each address refers to; the contents of
arrays; and how each object was made. An entry with a word that is an address of anything else
(`system.mapped`), or with an address among numbers of another kind, has no data.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone import system
from soapstone.dtypes import learn, name_of
from soapstone.native import shared
from soapstone.native.arrays import array_at, bytes_at, reach, start
from soapstone.native.memory import LINE, Array, Block, Entry, Scratch, aligned, extent
from soapstone.native.promises import promise_of

_LEAST = 1 << 32  # addresses lie above, so that no number is taken for one
_END = 1 << 63  # no address is as large
_SEEN = 1 << 15  # words that are looked at together, while they are in a cache
_SMALL = 1 << 14  # bytes of a piece that is copied together with those beside it
Place = tuple[int, int]  # a target's number, and how many bytes behind its start
Data = dict[str, Any]  # of numbers, texts, bytes and tuples of these
Pieces = Sequence[tuple[int, Array]]  # parts of contents: their offsets and bytes


class UnknownError(Exception):
    """An entry with an address of something that no other process can make."""


class _Span(NamedTuple):
    """An array, and the addresses of its first byte and of the one after its last."""

    low: int
    high: int
    array: Array


class _Kept:
    """Everything that blocks keep: blocks by address, arrays, objects in order of creation."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.arrays: dict[int, _Span] = {}  # each once, those that are not empty
        self.objects: dict[int, Any] = {}

    def array(self, array: Array) -> None:
        if array.size and id(array) not in self.arrays:
            promise = promise_of(array)
            if promise is None:  # of most, and then not asked again
                first = start(array)
                low, high = reach(array.shape, array.strides, array.itemsize)
                self.arrays[id(array)] = _Span(first + low, first + high, array)
            elif promise.is_made:
                self.arrays[id(array)] = _Span(*extent(array), array)

    def block(self, block: Block) -> None:
        if block.address in self.blocks:
            return
        if block.address != block.words.buffer_info()[0]:
            raise UnknownError("a block of a library's own")
        self.blocks[block.address] = block
        for each in block.objects:
            if isinstance(each, Block):
                self.block(each)
            elif isinstance(each, np.ndarray):
                self.array(each)
            elif getattr(each, "made", None) is not None:
                self.object(each)

    def object(self, thing: Any) -> None:
        if thing.address not in self.objects:
            for other in thing.made.objects():
                self.object(other)
            if isinstance(thing.keep, np.ndarray):
                self.array(thing.keep)
            self.objects[thing.address] = thing


class _Targets:
    """The possible targets of addresses: ranges, by number, and other mapped memory."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.first, self.past = np.array(ranges, np.int64).reshape(-1, 2).T
        if len(self.first) and self.first.min() < _LEAST:
            raise UnknownError("addresses that may be numbers")
        self._order = np.argsort(self.first, kind="stable")
        self._mapped = np.array(system.mapped(), np.int64).reshape(-1, 2)
        if not len(self._mapped):
            raise UnknownError("the system does not tell what memory there is")

    def moves(self, words: Array) -> tuple[Array, Array, Array]:
        """Return which words are addresses, and for each its target and the offset there."""
        low, high = max(_LEAST, int(self._mapped[0, 0])), int(self._mapped[-1, 1])
        found = []
        for first in range(0, len(words), _SEEN):
            beyond = (words[first : first + _SEEN] - low).view(np.uint64)
            found.append(np.flatnonzero(beyond < high - low) + first)
        at = np.concatenate(found) if found else np.zeros(0, np.int64)
        if not len(at):
            return at, at, at
        picked = words[at]
        of = self._order[np.searchsorted(self.first[self._order], picked, "right") - 1]
        inside = (picked >= self.first[of]) & (picked < self.past[of])
        others = picked[~inside]
        lies = np.searchsorted(self._mapped[:, 0], others, "right") - 1
        if (others < self._mapped[lies, 1]).any():
            raise UnknownError("an address of what is not known")
        return at[inside], of[inside], picked[inside] - self.first[of[inside]]


def taken(
    entry: Entry,
    ends: Mapping[Hashable, Array],
    free: Sequence[Array],
    lying: Array | None,
    functions: Mapping[int, Hashable],
    recipe: Callable[[Any, Mapping[int, int], Callable[[int], Place]], Hashable],
) -> tuple[Callable[[], tuple[Data, Pieces]], int]:
    """Return a function that makes the data of an entry and its arrays' contents, as of now; and
    the number of bytes of these.

    The function may be called once, later, while the entry runs. It returns the contents of arrays
    that nobody may write to where they are, for as long as the function is there. The others are
    copied now, holding the interpreter lock: each release would give it to another computing thread
    for some milliseconds. Words of the contents that are addresses become zeros.

    Args:
        ends: arrays that are read or written from outside, by name.
        free: memory whose contents do not matter before a run. lying: bytes that the other process
            has too, such as those of a file.
        functions: returns what identifies a function, given its address.
        recipe: returns how to make an object again, given the numbers of objects by address, and a
            function from an address to its place.

    Raises:
        UnknownError: the entry has no data; says why.
    """
    kept = _Kept()
    kept.block(entry.arguments)
    for each in ends.values():
        kept.array(each)
    spans = list(kept.arrays.values())
    found, held = _segments(spans, [extent(each) for each in (*free, *ends.values())])
    begin, end = (0, 0) if lying is None else extent(lying)
    there = [(low, high) for low, high in found if begin <= low and high <= end]
    held -= len(there)  # nobody writes there
    segments = [each for each in found if each not in there]
    blocks = list(kept.blocks.values())
    counts = [len(block.words) for block in blocks]
    ranges = [
        *segments,
        *there,
        *((block.address, block.address + 8 * count) for block, count in zip(blocks, counts)),
        *((each, each + 1) for each in (*kept.objects, *functions)),
    ]
    targets = _Targets(ranges)
    words = np.frombuffer(b"".join(memoryview(block.words) for block in blocks), np.int64)
    (offsets, ends_of), written = _offsets(segments), _written(segments, spans)
    pieces = _pieces(segments[:held], offsets, written)

    def told() -> tuple[Data, Pieces]:
        moved: list[tuple[int, ...]] = []  # words of the contents that are addresses
        given: list[tuple[int, Array]] = []
        words_lie = _Within(spans)
        lows, begins = np.array([(0, 0), *zip((low for low, _ in segments[:held]), offsets)]).T
        for offset, contents in pieces:
            skipped = -offset % 8  # an offset is as far behind a cache line as its address
            at, *move = targets.moves(_words(contents[skipped:]))
            if len(at):
                places = offset + skipped + 8 * at
                of = np.searchsorted(begins[1:], places, "right")
                if not words_lie.all(lows[of] + places - begins[of]):
                    raise UnknownError("what may be an address among numbers that are no words")
                contents = contents.copy()
                _words(contents[skipped:])[at] = 0
                moved += zip(*(each.tolist() for each in (places, *move)))
            given.append((offset, contents))
        first = len(segments) + len(there) + len(blocks)

        lies = sorted((low, high, of) for of, (low, high) in enumerate([*segments, *there]))

        def place(address: int) -> Place:
            low, high, of = lies[bisect(lies, (address, _END)) - 1] if lies else (0, 0, 0)
            if not low <= address < high:
                raise UnknownError("an object on memory that is not known")
            return of, address - low

        recipes: dict[Hashable, int] = {}  # objects that were made alike are one
        numbers: dict[int, int] = {}
        for address, each in kept.objects.items():
            numbers[address] = recipes.setdefault(recipe(each, numbers, place), len(recipes))
        if entry.address not in functions:
            raise UnknownError("a function that is in no file")
        used = {*targets.moves(words)[1].tolist(), *(move[1] for move in moved)}
        named = [
            name if first + len(numbers) + number in used or address == entry.address else None
            for number, (address, name) in enumerate(functions.items())
        ]
        data: Data = {
            "segments": tuple(segments),
            "held": held,
            "there": tuple(low - begin for low, _ in there),
            "counts": tuple(counts),
            "words": words.tobytes(),
            "moves": tuple(each.astype(np.int64).tobytes() for each in targets.moves(words)),
            "moved": tuple(moved),
            "objects": tuple(recipes),
            "which": tuple(numbers.values()),
            "functions": tuple(named),
            "entry": first + len(numbers) + list(functions).index(entry.address),
            "ends": {
                name: (*place(start(each)), name_of(each.dtype), each.shape, each.strides)
                for name, each in ends.items()
            },
        }
        return data, given

    return told, ends_of[held]


class Restored(NamedTuple):
    """An entry made of data: its function and block, and the arrays of its ends.

    work: the memory whose contents do not matter before a run.
    """

    address: int
    block: int
    ends: Mapping[Any, Array]
    work: Array
    keep: object


def restored(
    data: Data,
    contents: Array,
    lying: Array | None,
    function: Callable[[Any], int],
    make: Callable[[Any, Sequence[Any], Callable[[Place], int]], Any],
    ready: Callable[[], object] = lambda: None,
) -> Restored:
    """Return the entry that data describe.

    contents: of arrays, as they were taken, in `held_bytes` on the boundary of a cache line: it is
    part of the entry, which writes nothing there but the addresses that `clear` removes.
    lying: as of `taken`. function: returns a function's address. make: makes an object, given those
    before it and where places are. ready: waits until the contents are there.
    """
    offsets, ends_of = _offsets(data["segments"])
    held, begin = data["held"], -(-contents.size // LINE) * LINE
    work = aligned(max(0, ends_of[-1] - begin), zero=True)
    offsets[held:] = [offset - begin for offset in offsets[held:]]
    words = np.frombuffer(data["words"], np.int64).copy()
    firsts = start(words) + 8 * (np.cumsum([0, *data["counts"][:-1]]))
    places = [start(contents) + offset for offset in offsets[:held]]
    places += [start(work) + offset for offset in offsets[held:]]
    if lying is not None:
        places += [start(lying) + offset for offset in data["there"]]
    objects: list[Any] = []
    for each in data["objects"]:
        objects.append(make(each, objects, lambda place: places[place[0]] + place[1]))
    functions = [0 if each is None else function(each) for each in data["functions"]]
    targets = np.array(
        [*places, *firsts.tolist(), *(objects[n].address for n in data["which"]), *functions],
        np.int64,
    )
    at, of, behind = (np.frombuffer(each, np.int64) for each in data["moves"])
    words[at] = targets[of] + behind
    ready()
    for offset, target, further in data["moved"]:
        contents[offset : offset + 8].view(np.int64)[0] = targets[target] + further
    ends = {
        name: np.ndarray(
            *(shape, learn(dtype), contents if target < held else work),
            *(offsets[target] + further, strides),
        )
        for name, (target, further, dtype, shape, strides) in data["ends"].items()
    }
    keep = contents, words, objects, lying
    return Restored(int(targets[data["entry"]]), start(words), ends, work, keep)


def held_bytes(data: Data) -> int:
    """Return the size of the contents that `restored` needs."""
    return _offsets(data["segments"])[1][data["held"]]


def clear(moved: Iterable[Sequence[int]], contents: Array) -> None:
    """Make zeros of the words of contents that are addresses. moved: of the data."""
    for offset, *_ in moved:
        contents[offset : offset + 8] = 0


def _words(contents: Array) -> Array:
    return np.frombuffer(contents.data, np.int64, contents.size // 8)


def _segments(
    spans: Sequence[_Span], free: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """Return the memory of arrays as disjoint pieces, and how many of these have contents.

    These come first; the contents of the others, which are `Scratch` or in `free`, do not matter.
    """
    ranges = sorted({(each.low, each.high, _counts(each, free)) for each in spans})
    found: list[tuple[int, int, bool]] = []
    for low, high, counts in ranges:
        if found and low < found[-1][1]:
            first, past, before = found.pop()
            low, high, counts = first, max(past, high), counts or before
        found.append((low, high, counts))
    held = [(low, high) for low, high, counts in found if counts]
    return held + [(low, high) for low, high, counts in found if not counts], len(held)


def _pieces(
    segments: Sequence[tuple[int, int]], offsets: Sequence[int], written: Sequence[bool]
) -> list[tuple[int, Array]]:
    """Return the contents of segments, by their offsets: where they are, or copies.

    Small ones that lie one behind another are one piece: a model has a thousand of them. written:
    whether somebody may write to each.
    """
    found: list[tuple[int, Array]] = []
    begin, parts = 0, bytearray()  # of the small ones that are not in a piece yet

    def join() -> None:
        if parts:
            found.append((begin, np.frombuffer(bytes(parts), np.uint8)))
            parts.clear()

    for (low, high), offset, changes in zip(segments, offsets, written):
        if high - low < _SMALL:
            # A word of which a part is in the gap is no address: zeros end it, behind half of it.
            if offset % 8 or (begin + len(parts)) % 8 > 4:
                join()
            if not parts:
                begin = offset
            parts += bytes(offset - begin - len(parts)) + bytes_at(low, high - low)
        else:
            join()
            lies = array_at(low, (high - low,), np.uint8)
            found.append((offset, np.frombuffer(lies.tobytes(), np.uint8) if changes else lies))
    join()
    return found


def _written(segments: Sequence[tuple[int, int]], spans: Sequence[_Span]) -> list[bool]:
    """Return, for each piece of the memory of arrays, whether somebody may write there."""
    first, past = np.array([(0, 0), *sorted(shared.places())], np.int64).T
    ends = {(low, high) for low, high, array in spans if array.flags.writeable}
    low, high = np.array([*ends], np.int64).reshape(-1, 2).T
    low = low[high > past[np.searchsorted(first, low, "right") - 1]]
    begins = np.array([(0, 0), *segments], np.int64)[:, 0]
    order = np.argsort(begins)
    made = np.zeros(len(begins), bool)
    made[order[np.searchsorted(begins[order], low, "right") - 1]] = True
    found: list[bool] = made[1:].tolist()
    return found


def _counts(span: _Span, free: Sequence[tuple[int, int]]) -> bool:
    if isinstance(span.array, Scratch):
        return False
    return not any(first <= span.low and span.high <= past for first, past in free)


def _offsets(segments: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the offset of each piece, and their total size; cache lines stay aligned."""
    offsets, sizes = [], [0]
    for low, high in segments:
        offsets.append(-(-sizes[-1] // LINE) * LINE + low % LINE)
        sizes.append(offsets[-1] + high - low)
    return offsets, sizes


class _Within:
    """The memory of those arrays that are of words, which may hold addresses."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        kinds = {(low, high, array.dtype.kind, array.itemsize) for low, high, array in spans}
        ranges = sorted({(low, high) for low, high, *of in kinds if of in (["i", 8], ["u", 8])})
        self._low, high = np.array([(0, 0), *ranges], np.int64).T
        self._past = np.maximum.accumulate(high)  # of all ranges that begin no later

    def all(self, places: Array) -> bool:
        """Return whether all addresses are inside."""
        last = np.searchsorted(self._low, places, "right") - 1
        return bool((places < self._past[last]).all())


__all__ = ["Data", "Restored", "UnknownError", "clear", "held_bytes", "restored", "taken"]
