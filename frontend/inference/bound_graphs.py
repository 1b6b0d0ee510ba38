"""The graphs of a model that are bound: one for each of the input shapes that came last."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from soapstone.engine.session import Bound, Session
from soapstone.frontend.inference.background import Background
from soapstone.frontend.inference.binding import Binder
from soapstone.frontend.inference.families import Known
from soapstone.frontend.inference.in_rows import InRows
from soapstone.frontend.inference.shape_warmup import shapes_of
from soapstone.frontend.inference.snapshot_places import RowsMark, Shapes
from soapstone.frontend.onnx.texts import TEXT
from soapstone.garbage_collection import paused
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import NOTHING, Array
from soapstone.turns import ahead

Key = tuple[object, ...]
MOST, _MOST_BYTES = 128, 256 << 20  # of what stays bound, where nobody says how many do
_LAUNCH_BYTES = 1 << 14  # that Python and kernels keep of a launch, about


class BoundGraphs:
    """Graphs of a model, bound to one session of the engine.

    Args:
        binder: what binds them.
        asked: how many stay bound; by default those that fit in 256 MB, `MOST` at most. The least
            recently used one is released.
        mark: is told if rows of the first inputs are found to be apart.

    Attributes:
        most: how many stay bound at most.
        session: the engine's session that runs them.
        held: the bound graphs in order of use, by the shapes of inputs or by a key of `under`.
        rows: what is known of the model's rows; None where batches are not run in steps.
    """

    def __init__(self, binder: Binder, asked: int | None, mark: RowsMark | None = None) -> None:
        self.most = MOST if asked is None else asked
        self._most_bytes = _MOST_BYTES if asked is None else math.inf
        self.held: OrderedDict[Key, Bound] = OrderedDict()
        stepwise = binder.tune is not False and binder.plans is None and not binder.plain
        self.rows = InRows(binder.source) if stepwise and binder.source.rows else None
        self._binder, self._mark = binder, mark
        self._values: dict[str, Array] = {}  # what streamed weights begin with
        self._telling: set[str] = set()  # inputs on whose contents graphs depend
        self._made: tuple[Key, Known] | None = None  # the last graph, until it is bound
        self._to_begin: Callable[[], None] | None = None  # once it has answered
        self.start()

    def start(self) -> None:
        """Begin a session of the engine, in which nothing is bound."""
        self.held.clear()
        self._beside: dict[Key, Session] = {}  # of those that were bound meanwhile
        self._background = Background[tuple[Bound, Session]]()
        self.session = self._binder.session(self._values)

    def in_rows(
        self, given: Mapping[str, Array], out: Mapping[str, Any]
    ) -> dict[str, Array] | None:
        """Return the outputs for a new number of rows by steps of others, or None: to be bound.

        given, out: as of `InferenceSession.run`.
        """
        if self.rows is None:
            return None
        self._take()
        if self._key(given) in self.held:
            return None
        warmup = self._binder.packed.warmup
        if self.rows.undecided(given):
            warmup.wait_for_rows(given)
        for warmed in tuple(warmup.rows):
            if self.rows.undecided(given):
                self.rows.note(*warmed)
        if self.rows.undecided(given):
            try:
                with self._binder.packed.lock, paused():
                    self._known(given)
            except GraphError:
                return None  # who binds it says so
        if self.rows is None:
            return None  # the graph depends on contents
        later = partial(self._begin, given)
        return self.rows.run(given, out, self._of_shapes, self.session.run, later)

    def of(self, given: Mapping[str, Array]) -> Bound:
        """Return the graph that is bound for inputs, which is done if need be.

        Raises:
            GraphError: the model has none for these shapes.
        """
        bound = self.held.get(self._key(given))
        if bound is None:
            self._leave_room()
            with self._binder.packed.lock, paused():
                known = self._known(given)
                bound = self._binder.bind(self.session, self._values, known, in_turn=True)
                self._to_begin = partial(self._warm_up, given, known)
            self._made = None
            self.held[self._key(given)] = bound
        self.held.move_to_end(self._key(given))
        return bound

    def under(
        self,
        key: Key,
        make: Callable[[], Graph],
        constants: Mapping[str, Array] = NOTHING,
        runs: int = 1,
    ) -> Bound:
        """Return what is bound under a key of its own; see `InferenceSession.bound_as`."""
        bound = self.held.get(key)
        if bound is None:
            with self._binder.packed.lock, paused():
                graph = make()
                self._leave_room(runs)
                known = self._binder.folded(graph, constants)
                bound = self.held[key] = self._binder.bind(self.session, self._values, known)
        self.held.move_to_end(key)
        return bound

    def answered(self) -> None:
        """Begin the warm-up for other shapes, if a graph was bound since the last call."""
        begin = self._to_begin
        self._to_begin = None
        if begin is not None:
            begin()

    @property
    def reads_contents(self) -> bool:
        """Whether graphs depend on what inputs hold, and not on their shapes alone."""
        return bool(self._telling)

    @property
    def peak_bytes(self) -> int:
        """Bytes of inputs, outputs and arenas of all that is bound."""
        return sum(each.peak_bytes for each in (self.session, *self._beside.values()))

    def close(self) -> None:
        """Stop the workers and free the memory."""
        self._binder.packed.warmup.close()
        if (made := self._background.take()) is not None:
            _, (_, session) = made
            session.close()
        self._background.close()
        self.held.clear()
        for each in self._beside.values():
            each.close()
        self._beside.clear()
        self.session.close()

    def wait(self) -> None:
        """Wait for threads that make more, of which none begins once this is closed."""
        self._binder.packed.warmup.wait()
        self._background.wait()

    def _known(self, given: Mapping[str, Array]) -> Known:
        """Return the graph for inputs, and take note of what it shows."""
        if self._made is not None and self._made[0] == self._key(given):
            return self._made[1]
        known, contents = self._binder.known(given)
        self._telling.update(contents)
        if contents:
            self.rows = None
        elif self.rows is not None:
            self.rows.note(given, known)
        self._made = self._key(given), known
        return known

    def _warm_up(self, given: Mapping[str, Array], known: Known) -> None:
        def make(inputs: Mapping[str, Array]) -> Known | None:
            known, contents = self._binder.known(inputs)
            return None if contents else known

        def undecided(inputs: Mapping[str, Array], known: Known) -> bool:
            rows = self.rows
            if rows is None:
                return False
            rows.note(inputs, known)
            if self._mark is not None and rows.apart(first):
                self._mark.found(tuple(array.shape for array in first.values()))
            return rows.undecided(first, told=False)

        source = self._binder.source
        plain = all(not field.holds and field.dtype != TEXT for field in source.inputs)
        if known.notes is not None and self._binder.extends and plain and not self._telling:
            warmup, first = self._binder.packed.warmup, shapes_of(given)
            prepare = partial(self._binder.prepare_families, self.session)
            warmup.begin(source, given, make, prepare, undecided)
            if self._binder.has_unprepared:
                warmup.later(prepare)

    def _leave_room(self, runs: int = 1) -> None:
        if len(self.held) >= self.most * runs:
            self._forget_one()
        while sum(map(_own_bytes, self.held.values())) > self._most_bytes:
            self._forget_one()

    def _forget_one(self) -> None:
        key, bound = self.held.popitem(last=False)
        beside = self._beside.pop(key, None)
        if beside is None:
            self.session.forget(bound)
        else:
            beside.close()

    def _begin(self, given: Mapping[str, Array]) -> bool:
        """Let a thread bind the graph for inputs; return whether it does, or will be asked again.

        It holds nothing that runs need, stops between two launches while a request's graph is
        bound, and what it fails at is bound here, where errors are told.
        """
        if not self._binder.binds_beside:
            return False
        shapes, give_way = shapes_of(given), self._binder.packed.warmup.give_way
        rows = self.rows

        def make() -> tuple[Bound, Session]:
            with ahead(give_way), paused():
                known, contents = self._binder.known(shapes)
                if contents:
                    raise GraphError("the graph depends on what inputs hold, not on shapes alone")
                session = self._binder.beside(self.session)
                bound = self._binder.bind(session, {}, known)
                if rows is not None:
                    rows.note(shapes, known)
            session.runtime.executor.here = False
            return bound, session

        return self._background.begin(self._key(given), make)

    def _take(self) -> None:
        """Take over what was bound meanwhile."""
        made = self._background.take()
        if made is not None:
            key, (bound, session) = made
            if key in self.held:
                session.close()
                return
            self._leave_room()
            self.held[key], self._beside[key] = bound, session

    def _of_shapes(self, shapes: Shapes) -> Bound | None:
        """Return what is bound for inputs of these shapes, as the one that was used last."""
        found = self.held.get((shapes, ()))
        if found is not None:
            self.held.move_to_end((shapes, ()))
        return found

    def _key(self, given: Mapping[str, Array]) -> Key:
        shapes = tuple(getattr(array, "shape", None) for array in given.values())
        return shapes, tuple(given[name].tobytes() for name in sorted(self._telling))


def _own_bytes(bound: Bound) -> int:
    """Return about how many bytes go with a bound graph: arenas, outputs and weights are shared."""
    fed = sum(array.nbytes for array in bound.feeds.values())
    return fed + _LAUNCH_BYTES * len(bound.trace.operations)
