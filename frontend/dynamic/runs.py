"""Runs of a cell on many rows at once: forward, back, and the sums of its parameters' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soapstone.engine.session import Bound
from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.dynamic.rows import Bounds, Graphs, Rows, fill, gathered, pieces
from soapstone.frontend.dynamic.values import Occurrence
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.guard import STEP
from soapstone.ir.tensor import Array, Role, TensorSpec


@dataclass(frozen=True)
class Run:
    """A run of a cell that the backward pass goes through again.

    Attributes:
        cell: with its graphs. size: rows of the graph that ran, of which `count` are used.
        first: the row of the cell's kept values that is the run's first. counter: of its random
            numbers.
        places: of each operand's rows. outputs: the first row of each output.
    """

    cell: CellRuns
    size: int
    count: int
    first: int
    counter: int
    places: tuple[Any, ...]
    outputs: tuple[int, ...]


class CellRuns:
    """A cell with its bound graphs, and what they keep for the backward pass of a step.

    Args:
        graphs: of the session. operands, outputs: the arrays that their rows are in.
    """

    def __init__(
        self, graphs: Graphs, cell: Cell, operands: Sequence[Rows], outputs: Sequence[Rows]
    ) -> None:
        self._graphs = graphs
        self.cell = cell
        self.operands = tuple(operands)
        self.outputs = tuple(outputs)
        layout = cell.layout
        self.forward = Bounds(graphs, lambda rows: cell.parts(rows).forward)
        self.backward = Bounds(graphs, lambda rows: _there(cell.parts(rows).backward))
        self.weights = Bounds(graphs, lambda rows: _there(cell.parts(rows).weights))
        self.inference = Bounds(graphs, lambda rows: cell.build(rows, training=False))
        tensors = dict(layout.forward.tensors)
        for part in (layout.backward, layout.weights):
            tensors.update(part.tensors if part is not None else {})
        self.kept = {name: Rows(_row(tensors[name])) for name in layout.kept}
        self.passed = {name: Rows(_row(tensors[name])) for name in layout.passed}
        self.rows = 0  # of kept values
        self.calls = 0  # since the session began
        self.runs = 0

    def reset(self) -> None:
        """Let go of what was kept."""
        self.rows = 0
        for each in (*self.kept.values(), *self.passed.values()):
            each.size = 0

    def run(self, calls: Sequence[Occurrence], training: bool, counter: int) -> list[Run]:
        """Compute calls, and return what the backward pass needs to know of that."""
        count = len(calls)
        places = [
            np.fromiter((call.operands[i].row for call in calls), np.intp, count)
            for i in range(len(self.operands))
        ]
        firsts = [rows.take(count) for rows in self.outputs]
        for position, first in enumerate(firsts):
            for row, call in enumerate(calls, first):
                call.outputs[position].row = row
        for call in calls:
            call.done = True
        self.calls += count
        made: list[Run] = []
        at = 0
        for many, size in pieces(count):
            bound = (self.forward if training else self.inference).get(size)
            here = tuple(place[at : at + many] for place in places)
            feeds = bound.feeds
            for number, (rows, place) in enumerate(zip(self.operands, here)):
                feed = feeds.get(f"x{number}")
                if feed is not None:
                    gathered(feed, rows.data, place)
            _count(feeds, counter + len(made))
            self._graphs.run(bound)
            names = bound.graph.outputs
            outputs = tuple(first + at for first in firsts)
            for name, rows, first in zip(names, self.outputs, outputs):
                rows.data[first : first + many] = bound.results[name][:many]
            if training:
                self._keep(bound, here, many)
                run = Run(self, size, many, self.rows, counter + len(made), here, outputs)
                made.append(run)
                self.rows += many
            self.runs += 1
            at += many
        return made

    def _keep(self, bound: Bound, places: Sequence[Any], count: int) -> None:
        """Hold what the backward pass reads: values that were made, and operands."""
        for name, kept in self.kept.items():
            if name in bound.results:
                kept.put(bound.results[name][:count])
            else:
                number = int(name[1:])
                kept.put(self.operands[number].data[places[number]])

    def back(self, run: Run, grads: Mapping[Rows, Array]) -> None:
        """Carry the gradients of a run's outputs to its operands, to which they are added."""
        layout = self.cell.layout
        if layout.backward is None:
            return
        bound = self.backward.get(run.size)
        feeds, count = bound.feeds, run.count
        span = slice(run.first, run.first + count)
        for name, kept in self.kept.items():
            if name in feeds:
                fill(feeds[name], kept.data[span])
        for seed, output in layout.seeds:
            first = run.outputs[output]
            if seed in feeds:
                fill(feeds[seed], grads[self.outputs[output]][first : first + count])
        _count(feeds, run.counter)
        self._graphs.run(bound)
        names = bound.graph.outputs
        for number, name in zip(layout.operands, names):
            add_rows(grads[self.operands[number]], run.places[number], bound.results[name][:count])
        for name, passed in self.passed.items():
            if passed.size < self.rows:
                passed.take(self.rows - passed.size)
            passed.data[span] = bound.results[name][:count]

    def sums(self, runs: Sequence[Run], into: Mapping[str, Array]) -> None:
        """Add the gradients of parameters, of all runs of this cell."""
        layout = self.cell.layout
        if layout.weights is None:
            return
        joined = not layout.weights.inputs(Role.SCALAR)
        spans = [(0, self.rows, 0)] if joined else []
        spans += [] if joined else [(run.first, run.count, run.counter) for run in runs]
        for first, rows, counter in spans:
            for count, size in pieces(rows):
                bound = self.weights.get(size)
                for name, kept in (*self.kept.items(), *self.passed.items()):
                    if name in bound.feeds:
                        fill(bound.feeds[name], kept.data[first : first + count])
                _count(bound.feeds, counter)
                self._graphs.run(bound)
                for name, value in zip(layout.trained, bound.graph.outputs):
                    into[name] += bound.results[value]
                first += count


def _there(part: Graph | None) -> Graph:
    if part is None:
        raise GraphError("a part of a cell was asked for that it does not have")
    return part


def _row(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:])


def _count(feeds: Mapping[str, Array], counter: int) -> None:
    if STEP in feeds:
        feeds[STEP][...] = counter


def add_rows(target: Array, places: Any, values: Array) -> None:
    """Add rows to those at some places, of which some may be the same."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    starts = np.flatnonzero(np.diff(sorted_places, prepend=-1))
    if len(starts) < len(places):
        values, places = np.add.reduceat(values[order], starts, axis=0), sorted_places[starts]
    target[places] += values


__all__ = ["CellRuns", "Run", "add_rows"]
