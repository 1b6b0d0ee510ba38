"""Graphs of a model for inputs that have not come: a thread makes them once it has answered.

What graphs for several extents show of all others (`extended.py`, `in_rows.py`) is then known when
the first other length or number of rows comes, which waits for no translation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import cycle

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.extended import Known, chosen_alike
from soapstone.frontend.inference.sources import Source
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.runtime.forks import wait_for

_FEW = 12  # of which a half and three quarters differ

Given = Mapping[str, Array]
Dim = int | str | None
Change = Callable[[int], int]  # of an extent


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
        first: Known,
        make: Callable[[Given], Known | None],
        then: Callable[[], None],
    ) -> None:
        """Begin to make them, if that has not begun.

        given: the inputs that came. first: the graph for them. make: returns that for others and
        takes note of it, or None where it depends on their contents. then: is done when some are
        made, and when all are.
        """
        if self._stopped or not self._first.acquire(blocking=False):
            return
        rows, lengths, short, apart, together = _others(source, given)  # none keeps what came

        def made(inputs: Given) -> Known | None:
            if self._stopped:
                return None
            with suppress(GraphError, DataError):  # the model may have none for these
                return make(inputs)
            return None

        def work() -> None:
            for inputs in rows:
                known = made(inputs)
                if known is not None and source.rows:
                    self.rows = inputs, known
            found = [made(inputs) for inputs in lengths]
            then()
            if found and found[0] and not chosen_alike(found[0], first):
                found += map(made, short)
            for inputs in (*apart, *together):
                made(inputs)
            then()

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


def _others(source: Source, given: Given) -> tuple[list[Given], ...]:
    """Return inputs without contents of other extents than those given, in groups.

    First of one more row, where there are rows. Then of other lengths: extents beyond 1 that are no
    numbers of rows. Three graphs with what came are one more than a pair, which counts once it has
    foretold a third. One is odd and one even, and where they can be all are less, so that no
    constant that is as long as they is larger than what came. A quarter of many is made too: what
    two graphs cut of something is known of those between them alone. Then of short ones, around a
    quarter, of which passes may choose otherwise; then of lengths that are equal in what came and
    need not be; and last of several rows with other lengths.
    """
    extents = dict[Dim, int]()
    for field in source.inputs:
        extents |= zip(field.shape, given[field.name].shape)
    named: dict[Dim, int] = {d: n for d, n in extents.items() if isinstance(d, str)}
    single = {d: n for d, n in named.items() if n == 1 or d == source.rows}
    several = {d: n for d, n in named.items() if d not in single}
    many = min(several.values(), default=0) >= 4 * _FEW

    def of(*others: Change, rows: int = 0) -> Given:
        turns = dict(zip(several, cycle(others)))
        made = {d: turns[d](n) for d, n in several.items()} | {
            d: n + rows for d, n in single.items()
        }
        shapes = {
            field.name: tuple(made.get(d, n) for d, n in zip(field.shape, given[field.name].shape))
            for field in source.inputs
        }
        return shapes_of(given, shapes)

    lengths = [of(_quarter), of(_odd), of(_even)] if many else [of(_odd), of(_even)]
    short = [of(_of(1, 8)), of(_of(3, 8)), of(_of(3, 16))] if many else []
    apart = [of(_odd, _even), of(_even, _odd)] if len(set(several.values())) < len(several) else []
    together = [of(_odd, rows=2), of(_even, rows=4)] if several or not source.rows else []
    return (
        [of(int, rows=1)] if single else [],
        lengths if several else [],
        short,
        apart,
        together if single else [],
    )


def shapes_of(given: Given, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Given:
    """Return inputs of the types of those given, and their shapes or others, without contents."""
    shapes = shapes or {}
    return {
        name: np.broadcast_to(np.zeros((), array.dtype), shapes.get(name, array.shape))
        for name, array in given.items()
    }


def _odd(extent: int) -> int:
    return extent // 2 | 1 if extent >= _FEW else _FEW + 1


def _quarter(extent: int) -> int:
    return extent // 4 | 1


def _of(part: int, whole: int) -> Change:
    return lambda extent: part * extent // whole


def _even(extent: int) -> int:
    return 3 * extent // 4 & ~1 if extent >= _FEW else _FEW + 4


__all__ = ["Foretold", "shapes_of"]
