"""Graphs of a model for inputs that have not come: a thread makes them once it has answered.

What graphs for several extents show of all others (`extended.py`, `in_rows.py`) is then known when
the first other length or number of rows comes, which waits for no translation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.extended import Known
from soapstone.frontend.inference.sources import Source
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.runtime.forks import wait_for

_FEW = 12  # of which a half and three quarters differ
_TURNS = 7  # graphs of a group that are made at most
_SHOWN = 2  # graphs of a group that others foretell, which is enough
_MANY = 30  # rows
_MULTIPLES = 8  # of which sides of images are, where each level of a network halves them
_STEP = 3  # eighths of what lies between that the next one is further

Given = Mapping[str, Array]
Dim = int | str | None


class Foretold:
    """The graphs that are made so, of one model; a few, once.

    Attributes:
        rows: inputs of another number of rows than those that came, and the graph for them.
    """

    def __init__(self) -> None:
        self.rows: tuple[Given, Known] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._first = threading.Lock()  # is taken by the first session that begins, for good
        wait_for(self)

    def begin(
        self,
        source: Source,
        given: Given,
        make: Callable[[Given], Known | None],
        then: Callable[[], None],
    ) -> None:
        """Begin to make them, if that has not begun.

        given: the inputs that came. make: returns the graph for others and takes note of it, or
        None where it depends on their contents. then: is done when some are made.
        """
        if self._stopped or not self._first.acquire(blocking=False):
            return
        rows, *groups = _others(source, given)  # none keeps what came

        def made(inputs: Given) -> Known | None:
            if self._stopped:
                return None
            with suppress(GraphError, DataError):  # the model may have none for these
                return make(inputs)
            return None

        def work() -> None:
            for inputs, _ in rows:
                known = made(inputs)
                if known is not None and source.rows:
                    self.rows = inputs, known
            for group in groups:
                foretold = 0
                for inputs, rounded in group:
                    known = made(inputs) or made(rounded)
                    foretold += known is not None and known.given is None
                    if known is None or foretold == _SHOWN:
                        break
                if self._stopped:
                    return
                then()
                if group and not foretold:
                    return  # so others would not be

        self._start(work)

    def later(self, work: Callable[[], None]) -> None:
        """Let something be done, unless anything is."""
        if not self._stopped and not (self._thread is not None and self._thread.is_alive()):
            self._start(work)

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="soapstone-foretold", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until those that were begun are made."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Begin no more; the one that is being made is finished."""
        self._stopped = True


def _others(source: Source, given: Given) -> list[list[tuple[Given, Given]]]:
    """Return inputs without contents of other extents than those given, in groups.

    First of one more row, where there are rows. Then of other lengths: extents beyond 1 that are no
    numbers of rows; of one row, of several, of short ones and of longer ones, of which passes may
    choose otherwise, and of many rows, of which less is computed ahead. Each group ends where
    graphs that were made foretell others. Lengths are odd and even, all but the longer ones are
    less than what came where they can be, so that no constant that is as long as they is larger,
    and those that are equal in what came vary apart. Beside each are the same with lengths that are
    multiples of eight, for models that have no graph of others.
    """
    extents = dict[Dim, int]()
    for field in source.inputs:
        extents |= zip(field.shape, given[field.name].shape)
    named: dict[Dim, int] = {d: n for d, n in extents.items() if isinstance(d, str)}
    single = {d: n for d, n in named.items() if n == 1 or d == source.rows}
    several = {d: n for d, n in named.items() if d not in single}
    many = min(several.values(), default=0) >= 4 * _FEW

    def of(turn: int, least: int, most: int, rows: int = 0, multiples: int = 1) -> Given:
        made = {d: n + rows if rows else 1 for d, n in single.items()}
        for number, (d, n) in enumerate(several.items()):
            extent = _between(n, turn * (number + 2) + number, least, most)
            made[d] = max(multiples, extent // multiples * multiples)
        shapes = {
            field.name: tuple(made.get(d, n) for d, n in zip(field.shape, given[field.name].shape))
            for field in source.inputs
        }
        return shapes_of(given, shapes)

    def group(least: int, most: int, rows: Sequence[int]) -> list[tuple[Given, Given]]:
        turns = [(turn, least, most, number) for turn, number in enumerate(rows)]
        return [(of(*turn), of(*turn, multiples=_MULTIPLES)) for turn in turns]

    turns = range(_TURNS)
    groups = [group(8, 8, [1]) if single else []]
    if several:
        whole = group(8, 8, [0]) if max(single.values(), default=1) > 1 else []
        groups.append([*whole, *group(4, 7, [0 for _ in turns])])
    if single:
        groups.append(group(4, 7, [2 + turn * turn for turn in turns]))
    if many:
        groups.append(group(1, 2, [0 for _ in turns]))
    if several:
        groups.append(group(12, 32, [0 for _ in turns]))
    if single and several:
        groups.append(group(4, 7, [_MANY + 9 * turn for turn in turns]))
    return groups


def shapes_of(given: Given, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Given:
    """Return inputs of the types of those given, and their shapes or others, without contents."""
    shapes = shapes or {}
    return {
        name: np.broadcast_to(np.zeros((), array.dtype), shapes.get(name, array.shape))
        for name, array in given.items()
    }


def _between(extent: int, turn: int, least: int, most: int) -> int:
    """Return the extent of a turn, between so many eighths of one; odd and even ones in turns."""
    low, high = least * extent // 8, most * extent // 8
    if least == most:
        return low
    if extent < _FEW:
        return _FEW + 1 + turn
    return low + (1 + turn * (_STEP * (high - low) // 8 | 1)) % (high - low + 1)


__all__ = ["Foretold", "shapes_of"]
