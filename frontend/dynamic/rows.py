"""What runs of cells work on: growing arrays of rows, and graphs bound for certain numbers of rows.

A run of any number of rows is divided into powers of two so that it costs least; the last of them
may have rows to spare. So few graphs are bound, and few rows are computed in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from soapstone.engine.mapper import GraphMapper, strategy_of
from soapstone.engine.session import Bound, Session
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.native.memory import address
from soapstone.native.rows import RUN, Move, work

MOST_ROWS = 256  # of a bound graph
_RUN_FLOPS = 2.5e6  # that take as long as what a run costs besides its rows, as measured
_SPLIT = 32  # rows from which several processors, if there are, share a run


class Rows:
    """A growing array of rows, which holds all values of one type during a step.

    Attributes:
        spec: the type of one row.
        data: (capacity, *shape); rows from `size` on are free.
        nbytes: the bytes of a row.
        at, grads_at: the addresses of the first row, and of its gradient.

    Args:
        work: the moves and runs that are still to be done.
        number: the number of the array in its session.
    """

    def __init__(self, spec: TensorSpec, work: Work, number: int = 0) -> None:
        self.spec = spec
        self.number = number
        self.size = 0
        self._work = work
        self.nbytes = spec.nbytes
        self.grads: Array = np.zeros((0, *spec.shape), spec.dtype)
        self.grads_at: int = address(self.grads)
        self._hold(np.zeros((MOST_ROWS, *spec.shape), spec.dtype))

    def _hold(self, data: Array) -> None:
        self.data = data
        self.at: int = address(data)

    def take(self, count: int) -> int:
        """Reserve `count` consecutive free rows, and return the first."""
        first, self.size = self.size, self.size + count
        if self.size > len(self.data):
            self._work.do()  # what is to be done knows where rows are
            grown = np.zeros((2 * self.size, *self.spec.shape), self.spec.dtype)
            grown[:first] = self.data[:first]
            self._hold(grown)
        return first

    def put(self, values: Array) -> int:
        """Append rows with the given contents, and return the first."""
        first = self.take(len(values))
        self.data[first : self.size] = values
        return first

    def clear_gradients(self) -> None:
        """Set the gradients of all rows in use to zero."""
        if len(self.grads) < self.size:
            self.grads = np.empty_like(self.data)
            self.grads_at = address(self.grads)
        self.grads[: self.size] = 0


def pieces(rows: int, flops: float) -> tuple[tuple[int, int], ...]:
    """Return the runs for a number of rows: how many rows each has, and how many its graph has.

    flops: the arithmetic operations of a row, against which the fixed cost of a run is weighed.
    """
    whole, rest = divmod(rows, MOST_ROWS)
    run_cost = min(round(_RUN_FLOPS / max(flops, 1)), MOST_ROWS)
    return ((MOST_ROWS, MOST_ROWS),) * whole + _cheapest(rest, run_cost)[1]


@cache
def _cheapest(rows: int, run_cost: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return what at most `MOST_ROWS` rows cost, in rows, and the pieces that cost least."""
    if rows == 0:
        return 0, ()
    size = 1 << (rows - 1).bit_length()
    together = size + run_cost, ((rows, size),)
    if size == rows:
        return together
    half = size // 2
    cost, rest = _cheapest(rows - half, run_cost)
    return min(together, (half + run_cost + cost, ((half, half), *rest)))


class RowGraph:
    """A graph bound for some number of rows.

    Attributes:
        bound: the graph. feeds, results: the addresses of inputs and outputs, by name; `outputs`
            in order.
        entries: what running it is nothing but, the addresses of functions and of blocks and how
            many, or None.
    """

    def __init__(self, bound: Bound, entries: tuple[Array, Array] | None) -> None:
        self.bound = bound
        self.entries: tuple[int, int, int] | None = None
        if entries is not None:
            functions, blocks = entries
            self.entries = address(functions), address(blocks), len(functions)
        self.feeds = {name: address(array) for name, array in bound.feeds.items()}
        self.results = {name: address(array) for name, array in bound.results.items()}
        self.outputs = tuple(self.results[name] for name in bound.graph.outputs)


class Work:
    """A queue of moves and runs, which one native call carries out in order.

    So small graphs cost no more than their contents: the call's overhead is shared.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows: list[Move] = []
        self._runs: list[RowGraph] = []
        self._places: list[Array] = []  # that moves have the addresses of

    def move(self, moves: Sequence[Move], places: Array | None = None) -> None:
        """Move rows, in order, after all before. places: that moves have the address of."""
        self._rows += moves
        if places is not None:
            self._places.append(places)

    def run(self, graph: RowGraph) -> None:
        """Run a graph once, after all before."""
        if graph.entries is None:
            self.do()
            self._session.run(graph.bound)
            return
        functions, blocks, count = graph.entries
        self._rows.append((functions, blocks, count, len(self._runs), 0, RUN))
        self._runs.append(graph)

    def do(self) -> None:
        """Carry out everything in the queue.

        Raises: TaskError when a graph's task fails; what follows it is not done.
        """
        rows, runs, kept = self._rows, self._runs, self._places
        self.forget()
        while rows:
            failed = self._session.together(partial(work, rows), len(runs))
            if failed < 0:
                break
            self._session.run(runs[rows[failed][3]].bound)  # it says what fails
            rows = rows[failed + 1 :]
        kept.clear()

    def forget(self) -> None:
        """Drop everything in the queue."""
        self._rows, self._runs, self._places = [], [], []


class Graphs:
    """Binds a session's graphs, and holds the queue of their runs.

    seconds: the time that binding took.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.work = Work(session)
        self.seconds = 0.0

    def bind(self, graph: Graph, apart: bool) -> Bound:
        """Bind a graph. apart: whether several processors share its work."""
        self.work.do()
        began = time.perf_counter()
        mapper = self.session.mapper if apart else GraphMapper()
        strategy = strategy_of(mapper, graph, self.session.machine)
        bound = self.session.bind(graph, strategy)
        self.seconds += time.perf_counter() - began
        return bound

    def run(self, bound: Bound) -> None:
        """Run a bound graph once."""
        self.session.run(bound)


class GraphByRows:
    """A graph that is made and bound for each number of rows that occurs.

    Args:
        graphs: those of the session. make: returns the graph for a number of rows.
    """

    def __init__(self, graphs: Graphs, make: Callable[[int], Graph]) -> None:
        self._graphs = graphs
        self._make = make
        self._bound: dict[int, RowGraph] = {}

    def get(self, rows: int) -> RowGraph:
        """Return the graph bound for a number of rows."""
        bound = self._bound.get(rows)
        if bound is None:
            graph = self._graphs.bind(self._make(rows), rows >= _SPLIT)
            entries = self._graphs.session.entries(graph)
            bound = self._bound[rows] = RowGraph(graph, entries)
        return bound

    def __len__(self) -> int:
        return len(self._bound)


def fill(feed: Array, rows: Array) -> None:
    """Copy rows to the first rows of an input; the others, which nothing reads, become 0."""
    feed[: len(rows)] = rows
    feed[len(rows) :] = 0


def gathered(feed: Array, data: Array, places: Any) -> None:
    """Copy the rows at some places to the first rows of an input."""
    count = len(places)
    np.take(data, places, axis=0, out=feed[:count], mode="clip")
    feed[count:] = 0
