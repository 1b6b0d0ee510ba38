"""Graphs of a model for inputs that have not come: a thread makes them once it has answered.

What graphs for several extents show of all others (`extended.py`, `in_rows.py`) is then known when
the first other length or number of rows comes, which waits for no translation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.extended import Known
from soapstone.frontend.inference.sources import Source
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.runtime.forks import wait_for

_FEW = 12  # of which a half and three quarters differ

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

        given: the inputs that came. make: returns the graph for such and takes note of it, or None
        where it depends on their contents. then: is done when they are made.
        """
        if self._stopped or not self._first.acquire(blocking=False):
            return
        others = list(_others(source, given))  # of which none keeps what came

        def work() -> None:
            for rows, inputs in others:
                if self._stopped:
                    return
                try:
                    known = make(inputs)
                except (GraphError, DataError):
                    continue  # the model has none for these
                if rows and known is not None:
                    self.rows = inputs, known
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


def _others(source: Source, given: Given) -> Iterator[tuple[bool, Given]]:
    """Yield inputs without contents of other extents than those given, and whether of other rows.

    Of rows one number is enough. Of other extents two are: a pair of graphs counts once it has
    foretold a third. One is odd and one even, and where they can be both are less, so that no
    constant that is as long as they is larger than what came. A quarter of many is made too: what
    two graphs cut of something is known of those between them alone.
    """
    extents = dict[Dim, int]()
    for field in source.inputs:
        extents |= zip(field.shape, given[field.name].shape)
    several = {d: n for d, n in extents.items() if isinstance(d, str) and d != source.rows}
    made = list[dict[Dim, int]]()
    if source.rows:
        made.append({source.rows: extents[source.rows] + 1})
    if several:
        others = (_odd, _even) if min(several.values()) < 4 * _FEW else (_quarter, _odd, _even)
        made += [{dim: other(n) for dim, n in several.items()} for other in others]
    for each in made:
        inputs = {}
        for field in source.inputs:
            shape = given[field.name].shape
            inputs[field.name] = tuple(each.get(dim, n) for dim, n in zip(field.shape, shape))
        yield source.rows in each, shapes_of(given, inputs)


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


def _even(extent: int) -> int:
    return 3 * extent // 4 & ~1 if extent >= _FEW else _FEW + 4


__all__ = ["Foretold", "shapes_of"]
