"""Checked mode: entries run on fenced copies of their arguments, and what they do is compared.

With `SOAPSTONE_CHECKED=1` an entry that is bound to arrays gets copies of them instead, which
lie as the originals do (strides, overlaps, place in a cache line) between guard zones. Whenever the
entry is called

1. every array whose address it was given must be alive, aligned, and inside its allocation;
2. what it may read is copied in, and all other bytes, its outputs and gaps between rows too, are
   filled with a pattern;
3. it runs; then every byte that it had no right to write must be as before, guard zones of its own
   scratch memory included;
4. it runs again on another pattern, and must write the same: else it read what lies around its
   arguments or was there before, or it left part of its outputs unwritten;
5. the outputs are copied to the originals.

So a fault is found where it is made, at the element, and with the name of the task. Unless the mode
is on, nothing of this is imported. Source: guard zones as in Electric Fence and AddressSanitizer
(Serebryany et al., USENIX ATC 2012), two runs on different memory as in DieHard (Berger and Zorn,
PLDI 2006).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone import system
from soapstone.native import memory
from soapstone.native.memory import (
    LINE,
    NO_STATUSES,
    Array,
    Block,
    Entry,
    address,
    call,
    extent,
    pack,
)

ZONE = 4096  # bytes of a guard zone
FAULT = -0x50A9  # the status of an entry that was caught
_GUARD = 0xFB
_PATTERNS = (0xFFC00000, 0x5A000000)  # NaNs, and numbers about 1e16, each followed by a count
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class CheckedError(RuntimeError):
    """An entry touched memory that it had no right to."""


# -------------------------------------------------------------------------------- guarded memory
class _Allocation(NamedTuple):
    """Memory between guard zones: the whole of it, and where the part in use begins and ends."""

    whole: weakref.ref[Array]
    low: int
    high: int


_ALLOCATIONS: dict[int, _Allocation] = {}  # by the id of the whole


def guarded(nbytes: int, zero: bool) -> Array:
    """Return uint8 (nbytes,) at the boundary of a cache line, between guard zones."""
    whole = np.full(nbytes + 2 * ZONE + LINE, _GUARD, np.uint8)
    start = ZONE + -(address(whole) + ZONE) % LINE
    found: Array = whole[start : start + nbytes]
    if zero:
        found[:] = 0
    else:
        memory.spoil(found)
    low = address(whole, start)
    key = id(whole)
    forget = weakref.ref(whole, lambda _: _ALLOCATIONS.pop(key, None))
    _ALLOCATIONS[key] = _Allocation(forget, int(low), int(low) + nbytes)
    return found


def _root(array: Array) -> Array:
    """Return the array that holds the memory of a view."""
    found: Array = array
    base: Any = array
    while base is not None:
        if isinstance(base, np.ndarray):
            found = base
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return found


class _Span(NamedTuple):
    """The bytes of an array that an entry was given, and those of its allocation."""

    what: str
    array: weakref.ref[Array]
    root: weakref.ref[Array]
    low: int
    high: int
    limits: tuple[int, int]
    itemsize: int


def _span(array: Array) -> _Span:
    root = _root(array)
    known = _ALLOCATIONS.get(id(root))
    limits = (known.low, known.high) if known is not None else extent(root)
    what = f"array {array.dtype} {array.shape} with strides {array.strides}"
    kept = weakref.ref(array), weakref.ref(root)
    return _Span(what, *kept, *extent(array), limits, array.dtype.alignment)


def _verify(spans: Sequence[_Span]) -> None:
    """Check what an entry was given before it runs.

    Raises: CheckedError.
    """
    for span in spans:
        where = f"{span.what} at {span.low:#x}..{span.high:#x}"
        if span.root() is None:
            raise CheckedError(f"{where}: its memory has been freed")
        if span.low < span.high and not (
            span.limits[0] <= span.low and span.high <= span.limits[1]
        ):
            low, high = span.limits
            raise CheckedError(f"{where}: outside its allocation, {low:#x}..{high:#x}")
        if span.low % span.itemsize:
            raise CheckedError(f"{where}: not at a multiple of {span.itemsize} bytes")


def _fenced(spans: Sequence[_Span]) -> None:
    """Check the guard zones around the memory that an entry was given.

    Raises: CheckedError.
    """
    for whole in {id(root): root for span in spans if (root := span.root()) is not None}.values():
        known = _ALLOCATIONS.get(id(whole))
        if known is None:
            continue
        first = int(address(whole))
        begin, end = known.low - first, known.high - first
        for zone, at in ((whole[:begin], -begin), (whole[end:], 0)):
            if (zone != _GUARD).any():
                place = int(np.flatnonzero(zone != _GUARD)[0]) + at
                side = f"{-place} bytes before" if at else f"{place} bytes past the end of"
                raise CheckedError(
                    f"wrote {side} scratch memory of {end - begin} bytes at {known.low:#x}"
                )


def watched(entry: Entry) -> Entry:
    """Return an entry that checks what another was given, before it runs and after."""
    if FAULT in entry.statuses:
        return entry
    spans = [_span(array) for array in entry.arguments.arrays]
    statuses = dict(entry.statuses)

    def run() -> int:
        _verify(spans)
        status = call(entry.address, entry.block)
        _fenced(spans)
        return status

    return _entry(run, entry, statuses)


def _entry(
    run: Callable[[], int], keep: object, statuses: dict[int, str | Callable[[], str]]
) -> Entry:
    """Return the entry of a Python function that returns a status or raises CheckedError."""
    statuses[FAULT] = "not run yet"

    def guard(_: Any) -> int:
        try:
            return run()
        except BaseException as error:  # none may leave through native code
            said = str(error) if isinstance(error, CheckedError) else repr(error)
            statuses[FAULT] = f"checked mode: {said}"
            return FAULT

    function = _CALLBACK(guard)
    return Entry(system.address(function), pack(keep=(function, keep)), statuses)


# ------------------------------------------------------------------------------- fenced arguments
class _Chunk:
    """Bytes for the arguments of one entry at a time."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = memory.aligned(nbytes)
        self.lock = threading.Lock()


_filled: dict[int, Array] = {}


def _pattern(first: int, nbytes: int) -> Array:
    """Return bytes of a pattern, no word of which is like another: a copy of one shows too."""
    found = _filled.get(first)
    if found is None or found.size < nbytes:
        words = np.arange(-(-nbytes // 4) * 2, dtype=np.uint32)
        found = _filled[first] = ((words & 0x3FFFFF) | first).astype("<u4").view(np.uint8)
    return found[:nbytes]


_chunks = threading.local()


def _chunk(nbytes: int) -> _Chunk:
    """Return a chunk for entries that are bound in this thread, in which most also run."""
    found: dict[int, _Chunk] = _chunks.__dict__.setdefault("by_size", {})
    size = 1 << max(16, (nbytes - 1).bit_length())
    if size not in found:
        found[size] = _Chunk(size)
    return found[size]


class Argument(NamedTuple):
    """An array of an entry, and what the entry does with it."""

    name: str
    array: Array
    reads: bool
    writes: bool


class _Fence:
    """Copies of the arguments of an entry, as they lie, in memory of which all else is known."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self.arguments = arguments
        self._originals = [_span(argument.array) for argument in arguments]
        starts, top = _places([(span.low, span.high) for span in self._originals])
        self._places = [
            (start, start + span.high - span.low) for start, span in zip(starts, self._originals)
        ]
        self._firsts = [
            start + address(argument.array) - span.low
            for start, argument, span in zip(starts, arguments, self._originals)
        ]
        self._chunk = _chunk(top)
        self._bytes = self._chunk.bytes[:top]
        self._copies = self.views()
        self._lost: set[int] = set()

    def views(self) -> list[Array]:
        """New arrays on the copies; each is the root of whatever is made of it."""
        whole = self._chunk.bytes
        kind = ctypes.c_uint8 * whole.size  # through an array NumPy would look to its owner
        return [
            self._view(number, kind.from_buffer(whole.data)) for number in range(len(self._firsts))
        ]

    def _view(self, number: int, store: Any) -> Array:
        """An argument in a store of bytes."""
        like = self.arguments[number].array
        made: Array = np.ndarray(like.shape, like.dtype, store, self._firsts[number], like.strides)
        return made

    def bound(self, held: Sequence[bool]) -> None:
        """Take over which arguments an entry keeps; others count as if they were freed by now."""
        self._lost = {number for number, kept in enumerate(held) if not kept}

    def run(self, entry: Any, spans: Sequence[_Span], pure: bool) -> int:
        """Run the entry that is bound to the copies, and copy what it wrote to the originals.

        Raises: CheckedError.
        """
        _verify(self._originals)
        _verify(spans)
        runs: list[list[Array]] = []
        with self._chunk.lock:
            for first in _PATTERNS[: 1 + pure]:
                self._bytes[:] = _pattern(first, self._bytes.size)
                for number, argument in enumerate(self.arguments):
                    if number not in self._lost and (argument.reads or not pure):
                        np.copyto(self._copies[number], argument.array)
                image = self._bytes.copy()
                status = call(entry.address, entry.block)
                if status:
                    return status
                _fenced(spans)
                runs.append(self._written(image))
            if pure:
                self._compare(*runs)
            for number in self._writes():
                np.copyto(self.arguments[number].array, self._copies[number])
        return 0

    def _writes(self) -> list[int]:
        """The numbers of the arguments that may be written."""
        return [n for n, a in enumerate(self.arguments) if a.writes and n not in self._lost]

    def _written(self, image: Array) -> list[Array]:
        """What the entry wrote, when it wrote nothing else; image: the bytes before it ran.

        Raises: CheckedError.
        """
        for number in self._writes():
            np.copyto(self._view(number, image.data), self._copies[number])
        if not np.array_equal(image, self._bytes):
            place = int(np.flatnonzero(image != self._bytes)[0])
            raise CheckedError(f"wrote {self._where(place)}")
        return [np.array(self._copies[number]) for number in self._writes()]

    def _where(self, place: int) -> str:
        """Say where a byte is."""
        for number, (low, high) in enumerate(self._places):
            if low <= place < high:
                argument = self.arguments[number]
                lost = ", which it does not keep" if number in self._lost else ""
                between = "between elements, " if argument.writes and not lost else ""
                return f"{between}{place - low} bytes into {_said(argument)}{lost}"

        def distance(number: int) -> int:
            low, high = self._places[number]
            return low - place if place < low else place - high + 1

        near = min(range(len(self._places)), key=distance)
        side = "before" if place < self._places[near][0] else "past the end of"
        return f"{distance(near)} bytes {side} {_said(self.arguments[near])}"

    def _compare(self, first: Sequence[Array], second: Sequence[Array]) -> None:
        """Check that two runs wrote the same.

        Raises: CheckedError.
        """
        for number, *runs in zip(self._writes(), first, second):
            argument = self.arguments[number]
            size = argument.array.itemsize
            one, two = (run.reshape(-1).view(np.uint8).reshape(-1, size) for run in runs)
            differ = np.flatnonzero((one != two).any(axis=1))
            if differ.size:
                at = tuple(map(int, np.unravel_index(differ[0], argument.array.shape)))
                where = self._firsts[number] + sum(
                    i * step for i, step in zip(at, argument.array.strides)
                )
                if all(
                    np.array_equal(run[differ[0]], _pattern(first, where + size)[where:])
                    for run, first in zip((one, two), _PATTERNS)
                ):
                    raise CheckedError(f"left element {at} of {_said(argument)} unwritten")
                raise CheckedError(
                    f"element {at} of {_said(argument)} depends on bytes outside the arguments, or "
                    "on what was there before"
                )
        for number in self._lost:
            argument, (low, high) = self.arguments[number], self._places[number]
            alone = not any(
                a < high and low < b
                for other, (a, b) in enumerate(self._places)
                if other != number and self.arguments[other].reads
            )
            if argument.writes and not argument.reads and argument.array.size and alone:
                raise CheckedError(f"left {_said(argument)} unwritten")


def _said(argument: Argument) -> str:
    array = argument.array
    low, high = extent(array)
    return (
        f"{argument.name}, {array.dtype} {array.shape} with strides {array.strides} at "
        f"{low:#x}..{high:#x}"
    )


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the unions of intervals that overlap."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


def _places(spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return where intervals go in a store at the boundary of a cache line, and its bytes.

    Those that overlap keep their distances, the others lie apart; each has its place in a line.
    """
    moved, top = [], ZONE
    for low, high in _merged(spans):
        top += (low - top) % LINE
        moved.append((low, high, top))
        top += high - low + ZONE
    starts = []
    for low, _ in spans:
        first, _, start = next(item for item in reversed(moved) if item[0] <= low)
        starts.append(start + low - first)
    return starts, top


_binding = threading.local()


def fenced(arguments: Sequence[Argument], bind: Callable[[Sequence[Array]], Any]) -> Any:
    """Return the entry that `bind` gives for copies of the arguments, checked at each run, or None.

    An `Entry` is a function of its arguments, and is run twice; entries of other types may have
    effects elsewhere, are run once, and find in what they write what was there. Inside `bind`
    nothing else is fenced.
    """
    if getattr(_binding, "inside", False):
        return bind([argument.array for argument in arguments])
    fence = _Fence(arguments)
    given = fence.views()
    alive = [weakref.ref(array) for array in given]
    with unfenced():
        entry = bind(given)
    if entry is None:
        return None
    del given
    block = getattr(entry, "arguments", None)
    spans = [_span(array) for array in (block.arrays if isinstance(block, Block) else ())]
    fence.bound([array() is not None for array in alive])
    pure = isinstance(entry, Entry)
    statuses = dict(getattr(entry, "statuses", NO_STATUSES))
    return _entry(lambda: fence.run(entry, spans, pure), (fence, entry), statuses)


@contextlib.contextmanager
def unfenced() -> Iterator[None]:
    """Bind entries to their arrays themselves inside the block, in this thread."""
    before = getattr(_binding, "inside", False)
    _binding.inside = True
    try:
        yield
    finally:
        _binding.inside = before


def try_out(entry: Entry) -> None:
    """Run an entry once, whatever its status.

    Raises: CheckedError when it touched memory that it had no right to.
    """
    if memory.run(entry) == FAULT:
        raise CheckedError(entry.statuses[FAULT])
