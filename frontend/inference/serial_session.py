"""What serves one run at a time: the way of a run, from its inputs to its outputs.

An `InferenceSession` has one of these for each request that may proceed at once; they share
weights. `SerialSession.run` finds or binds the graph for the shapes of the inputs
(`bound_graphs.py`), copies the inputs to where it reads them, replays its trace
(`engine/session.py`), and copies its outputs out. Two kinds of runs go other ways: batches of a new
size by steps of sizes that are bound (`in_rows.py`), and models whose shapes depend on computed
values in pieces (`frontend/onnx/pieces.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.engine.session import Bound
from soapstone.errors import DataError
from soapstone.frontend.exchange import targets
from soapstone.frontend.inference.binding import Binder
from soapstone.frontend.inference.bound_graphs import BoundGraphs
from soapstone.frontend.inference.snapshot_places import RowsMark
from soapstone.frontend.inference.snapshots import Keeper
from soapstone.garbage_collection import paused
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import NOTHING, Array
from soapstone.runtime import StoppedError
from soapstone.runtime.forks import tell
from soapstone.runtime.machines.machine import CUDA

if TYPE_CHECKING:
    from soapstone.frontend.onnx.pieces import Pieces
    from soapstone.frontend.purpose import Purpose


class SerialSession:
    """A model bound to the processors of one request.

    Whoever calls a method that runs or binds holds `lock`; `turn` takes it.

    Args:
        binder: the model, and how its graphs are bound.
        bound_shapes: see `InferenceSession`.
        keeper: keeps a snapshot of what answers first.
        mark: of that snapshot, or of an earlier one.

    Attributes:
        binder, source: as given, and the model.
        bounds: the graphs that are bound.
        pieces: what runs the model in pieces; None where it need not be.
        lock: held during a run.
        asked: has an element for each run that waits for this session, or runs.
    """

    def __init__(
        self,
        binder: Binder,
        bound_shapes: int | None,
        keeper: Keeper | None = None,
        mark: RowsMark | None = None,
    ) -> None:
        self.binder, self.source = binder, binder.source
        self.bounds = BoundGraphs(binder, bound_shapes, mark)
        self.pieces: Pieces | None = None
        self.lock = threading.Lock()
        self.asked: list[None] = []
        self._keeper = keeper
        self._keeping: threading.Thread | None = None  # writes the snapshot
        self._close = weakref.finalize(self, self.bounds.close)
        tell(self)

    def forked(self) -> None:
        """In a child process, reset locks and bind shapes again, to new workers."""
        self.lock = threading.Lock()
        self.asked = []
        if self._close.alive:
            self.bounds.start()
        else:
            self.bounds.held.clear()

    @property
    def load(self) -> tuple[bool, int]:
        """Whether a run is under way, and how many wait.

        Whoever is interrupted while it waits may be counted for good, so the lock counts first.
        """
        return self.lock.locked(), len(self.asked)

    # The way of a run

    def run(self, given: Mapping[str, Array], out: Mapping[str, Any]) -> dict[str, Array]:
        """Return the outputs by name; given: as `InferenceSession.checked` returns it."""
        self.check_open()
        self.source.check()
        stepped = self.bounds.in_rows(given, out)
        if stepped is not None:
            return stepped
        bound = self._bound_or_pieces(given)
        if not isinstance(bound, Bound):
            found = bound.run(given)
            for name, array in targets(self.source.name, out, found).items():
                np.copyto(array, found[name])
                found[name] = array
            return found
        into = targets(self.source.name, out, bound.results)
        for name, feed in bound.feeds.items():
            np.copyto(feed, given[name])
        self.bounds.session.run(bound)
        found = {}
        for name, array in bound.results.items():
            if name in into:
                np.copyto(into[name], array)
            found[name] = into[name] if name in into else array.copy()
        self.bounds.answered()
        self._begin_to_keep(bound)
        return found

    def _bound_or_pieces(self, given: Mapping[str, Array]) -> Bound | Pieces:
        """Return the bound graph, or what runs a model in pieces, whose shapes are computed."""
        if self.pieces is None:
            try:
                return self.bounds.of(given)
            except GraphError as error:
                from soapstone.frontend.onnx import UnboundError

                if self.source.onnx is None or not isinstance(error, UnboundError):
                    raise
                from soapstone.frontend.onnx.pieces import Pieces

                self.pieces = Pieces(self.source.onnx, weakref.proxy(self))  # which has them
        return self.pieces

    def _begin_to_keep(self, bound: Bound) -> None:
        """Let a thread keep a snapshot of the first graph that has answered."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeping = threading.Thread(target=self._keep, args=(keeper, bound))
            with suppress(RuntimeError):  # no more threads, or the interpreter ends
                keeping.start()
                self._keeping = keeping

    def _keep(self, keeper: Keeper, bound: Bound) -> None:
        """Keep a snapshot for later processes, if shapes alone decide what runs."""
        with paused():
            with self.lock:
                alike = not self.bounds.reads_contents
                keep = keeper.take(self.source, bound) if alike else None
            if keep is not None:
                keep()

    def variants(self, given: Mapping[str, Array]) -> Mapping[str, str]:
        """Return which kernel variant serves each launch; see `InferenceSession.variants`."""
        bound = self._bound_or_pieces(given)
        return dict(bound.variants if isinstance(bound, Bound) else bound.variants(given))

    def moved_bytes(self, given: Mapping[str, Array]) -> tuple[int, int] | None:
        """Return what a run copies, in bytes; see `InferenceSession.moved_bytes`."""
        bound = self._bound_or_pieces(given)
        return bound.moved_bytes if isinstance(bound, Bound) else None

    # Runs of a model in steps of the caller's own (`frontend/generation`, `frontend/onnx/pieces`)

    @contextmanager
    def turn(self) -> Iterator[SerialSession]:
        """Run nothing else of this session inside the block; yields the session.

        Raises:
            StoppedError: the session was closed.
        """
        with self.lock:
            self.check_open()
            yield self

    @property
    def in_main_memory(self) -> bool:
        """Whether everything that runs read and write is in the computer's main memory."""
        return self.binder.plans is None and self.binder.machine.processors[0].kind != CUDA

    def graph_of(self, inputs: Mapping[str, Array], purpose: Purpose) -> Graph:
        """Return the graph for inputs of these shapes.

        inputs: an array for each input. purpose: see `frontend/purpose.py`.

        Raises:
            DataError: it depends on their contents too; names the input.
        """
        graph, contents = self.source.graph(inputs, purpose)
        if contents:
            raise DataError(
                f"model {self.source.name!r}: shapes depend on the contents of input"
                f" {next(iter(contents))!r}; on extents alone needed"
            )
        return graph

    def bound_as(
        self,
        key: tuple[object, ...],
        make: Callable[[], Graph],
        constants: Mapping[str, Array] = NOTHING,
        runs: int = 1,
    ) -> Bound:
        """Return a graph bound under a key of its own; it is made if no such graph is bound.

        It is kept among the graphs of input shapes, and updates of its inputs are carried out in
        place. key: identifies it. make: returns the graph. constants: what it reads besides the
        model's weights. runs: the number of graphs that make up one run of the model, each of which
        stays bound.
        """
        return self.bounds.under(key, make, constants, runs)

    def run_bound(self, bound: Bound) -> None:
        """Run a bound graph once on the contents of its feeds. bound: of `bound_as`."""
        self.source.check()
        self.bounds.session.run(bound)

    # Its end

    def check_open(self) -> None:
        """Raise StoppedError if the session was closed."""
        if not self._close.alive:
            raise closed(self.source.name)

    def close(self) -> None:
        """Stop the workers and free the memory, once the run under way is over."""
        with self.lock:
            self._close()
        self.bounds.wait()
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.join()


def closed(name: str) -> StoppedError:
    """Return the error that the session of a model was closed. name: the model's."""
    return StoppedError(f"session of model {name!r}: it was closed")


__all__ = ["SerialSession", "closed"]
