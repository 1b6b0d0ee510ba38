"""Shape warm-up: a thread makes graphs for other input shapes, once a session has answered.

They form the families (`families.py`, `in_rows.py`) from which graphs of further shapes are
derived, so the first input of another length or number of rows waits for no translation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.families import Known
from soapstone.frontend.inference.sources import Source
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.locks import wait_for
from soapstone.turns import ahead

_FEW = 12  # of which a half and three quarters differ
_TURNS = 7  # graphs of a group that are made at most
_DERIVED = 2  # graphs of a group that need only be derived from others, which ends it
_MANY = 30  # rows
_MULTIPLES = 8  # of which sides of images are, where each level of a network halves them
_TURN_S = 0.1  # from one look at whether the thread is there to the next
_STEP = 3  # eighths of the range from one extent to the next

Given = Mapping[str, Array]
Dim = int | str | None


class ShapeWarmup:
    """The warm-up of one model, which happens once.

    Args:
        binding: held by whoever binds a graph that a request waits for. Meanwhile no further graph
            is begun here: two threads would take turns of the interpreter, and who binds waits for
            one after each call of a library.

    Attributes:
        rows: inputs of more rows than those that came, and the graphs for them, once made.
    """

    def __init__(self, binding: threading.Lock) -> None:
        self._binding = binding
        self.rows: list[tuple[Given, Known]] = []
        self._rows_of: object = None  # the shapes of a row in `rows`
        self._told = threading.Event()  # once `rows` are all there
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._first = threading.Lock()  # taken for good by the first session that begins
        wait_for(self)

    def begin(
        self,
        source: Source,
        given: Given,
        make: Callable[[Given], Known | None],
        then: Callable[[], None],
        undecided: Callable[[Given, Known], bool],
    ) -> None:
        """Begin the warm-up, unless it has begun.

        given: the inputs that came. make: makes the graph for other inputs and returns it, or None
        if it depends on their contents. then: called after each group of graphs. undecided: returns
        whether another number of rows is needed to see how rows are treated.
        """
        if self._stopped or not self._first.acquire(blocking=False):
            return
        self._rows_of = _of_a_row(given)
        rows, *groups = _others(source, given)  # copies of types and shapes: `given` is let go

        def made(inputs: Given) -> Known | None:
            self.give_way()
            if self._stopped:
                return None
            with suppress(GraphError, DataError):  # the model may have none for these
                return make(inputs)
            return None

        def work() -> None:
            try:
                for inputs, _ in rows:
                    known = made(inputs)
                    if known is None or not source.rows:
                        break
                    self.rows.append((inputs, known))
                    if not undecided(inputs, known):
                        break
            finally:
                self._told.set()
            for group in groups:
                derived = 0
                for inputs, rounded in group:
                    known = made(inputs) or made(rounded)
                    derived += known is not None and known.given is None
                    if known is None or derived == _DERIVED:
                        break
                if self._stopped:
                    return
                then()
                if group and not derived:
                    return  # nor would those of later groups be

        self._start(work)

    def give_way(self) -> None:
        """Wait while a graph is bound that a request waits for."""
        with self._binding:
            pass

    def wait_for_rows(self, given: Given) -> None:
        """Wait while the thread makes graphs that show how rows of the shapes given are treated."""
        thread = self._thread
        while thread is not None and thread.is_alive() and self._rows_of == _of_a_row(given):
            if self._told.wait(_TURN_S):
                break

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, unless that is busy."""
        if not self._stopped and not (self._thread is not None and self._thread.is_alive()):
            self._start(work)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            with ahead(self.give_way):
                work()

        self._thread = threading.Thread(target=run, name="soapstone-shape-warmup", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread is done."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Make no further graphs; the one that is under way is finished."""
        self._stopped = True


def _others(source: Source, given: Given) -> list[list[tuple[Given, Given]]]:
    """Return inputs without contents whose extents differ from those given, in groups.

    A length is a symbolic extent beyond 1 that is no number of rows. The groups are: more rows;
    other lengths with one row; several rows; short lengths; long lengths; and many rows. They are
    apart because passes may decide differently for them. The warm-up leaves a group as soon as its
    graphs can be derived from earlier ones.

    Lengths are odd and even in turns, and lengths that are equal in `given` differ from each other.
    All but the long ones are below those given where possible, so that constants as long as the
    inputs do not grow. Each entry has a second form whose lengths are multiples of eight, for
    models that have no graph for others.
    """
    extents = dict[Dim, int]()
    axes = {field.name: field.axes(given[field.name].ndim) for field in source.inputs}
    for name, dims in axes.items():
        extents |= zip(dims, given[name].shape)
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
            name: tuple(made.get(d, n) for d, n in zip(dims, given[name].shape))
            for name, dims in axes.items()
        }
        return shapes_of(given, shapes)

    def group(least: int, most: int, rows: Sequence[int]) -> list[tuple[Given, Given]]:
        turns = [(turn, least, most, number) for turn, number in enumerate(rows)]
        return [(of(*turn), of(*turn, multiples=_MULTIPLES)) for turn in turns]

    turns = range(_TURNS)
    groups = [group(8, 8, [1, 2]) if single else []]
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
    """Return inputs without contents, of the types of those given and of their or other shapes."""
    shapes = shapes or {}
    return {
        name: np.broadcast_to(np.zeros((), array.dtype), shapes.get(name, array.shape))
        for name, array in given.items()
    }


def _of_a_row(given: Given) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape[1:] for array in given.values())


def _between(extent: int, turn: int, least: int, most: int) -> int:
    """Return the extent of a turn, from `least` to `most` eighths of one; odd and even in turns."""
    low, high = least * extent // 8, most * extent // 8
    if least == most:
        return low
    if extent < _FEW:
        return _FEW + 1 + turn
    return low + (1 + turn * (_STEP * (high - low) // 8 | 1)) % (high - low + 1)


__all__ = ["ShapeWarmup", "shapes_of"]
