"""Runs of a cell on many rows at once: forward, back, and the sums of its parameters' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.dynamic.rows import Bounds, Graphs, Rows, pieces
from soapstone.frontend.dynamic.values import Occurrence
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.native.memory import address
from soapstone.native.rows import ADD, Move, move


@dataclass(frozen=True)
class Run:
    """A run of a cell that the backward pass goes through again.

    Attributes:
        cell: with its graphs. size: rows of the graph that ran, of which `count` are used.
        first: the row of the cell's kept values that is the run's first. counter: of its random
            numbers.
        places: the rows of operands of all calls that ran together, (operands, calls), of which
            `at` is the run's first call.
        outputs: the first row of each output.
    """

    cell: CellRuns
    size: int
    count: int
    first: int
    counter: int
    places: Array
    at: int
    outputs: tuple[int, ...]

    def place(self, operand: int) -> int:
        """Return the address of the rows of an operand."""
        return address(self.places, 8 * (operand * self.places.shape[1] + self.at))


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
        """Compute calls, and return what the backward pass needs to know of that.

        counter: of the step, which random numbers follow, with rows of the cell before: so they are
        the same in whatever order cells were met.
        """
        count = len(calls)
        numbers = range(len(self.operands))
        rows = [[call.operands[number].row for call in calls] for number in numbers]
        places = np.array(rows, np.int64)
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
            outputs = tuple(first + at for first in firsts)
            run = Run(self, size, many, self.rows, counter + self.rows, places, at, outputs)
            self._forward(run, training)
            made.append(run)
            at += many
            self.rows += many
        self.runs += len(made)
        return made

    def _forward(self, run: Run, training: bool) -> None:
        """Gather operands, run, and hold what is made, and what the backward pass reads."""
        graph = (self.forward if training else self.inference).get(run.size)
        count = run.count
        gathers = [(rows, run.place(number)) for number, rows in enumerate(self.operands)]
        before: list[Move] = []
        for number, (rows, place) in enumerate(gathers):
            feed = graph.feeds.get(f"x{number}")
            if feed is not None:
                before.append((rows.at, feed, rows.nbytes, count, place, run.size))
        move(before)
        graph.run(run.counter)
        after: list[Move] = [
            (result, rows.at + first * rows.nbytes, rows.nbytes, count, 0, count)
            for result, rows, first in zip(graph.outputs, self.outputs, run.outputs)
        ]
        for name, kept in self.kept.items() if training else ():
            target = kept.take(count) * kept.nbytes + kept.at
            result = graph.results.get(name)
            if result is None:  # an operand
                rows, place = gathers[int(name[1:])]
                after.append((rows.at, target, kept.nbytes, count, place, count))
            else:
                after.append((result, target, kept.nbytes, count, 0, count))
        move(after)

    def back(self, run: Run) -> None:
        """Carry the gradients of a run's outputs to its operands, to which they are added."""
        layout = self.cell.layout
        if layout.backward is None:
            return
        graph = self.backward.get(run.size)
        feeds, count = graph.feeds, run.count
        before: list[Move] = [
            (kept.at + run.first * kept.nbytes, feeds[name], kept.nbytes, count, 0, run.size)
            for name, kept in self.kept.items()
            if name in feeds
        ]
        for seed, output in layout.seeds:
            if seed in feeds:
                rows = self.outputs[output]
                source = rows.grads_at + run.outputs[output] * rows.nbytes
                before.append((source, feeds[seed], rows.nbytes, count, 0, run.size))
        move(before)
        graph.run(run.counter)
        after: list[Move] = []
        names = graph.bound.graph.outputs
        for number, name, result in zip(layout.operands, names, graph.outputs):
            rows = self.operands[number]
            if rows.spec.dtype == "float32":
                after.append((result, rows.grads_at, rows.nbytes, count, run.place(number), ADD))
            else:
                places = run.places[number, run.at : run.at + count]
                np.add.at(rows.grads, places, graph.bound.results[name][:count])
        for name, passed in self.passed.items():
            if passed.size < self.rows:
                passed.take(self.rows - passed.size)
            target = passed.at + run.first * passed.nbytes
            after.append((graph.results[name], target, passed.nbytes, count, 0, count))
        move(after)

    def sums(self, runs: Sequence[Run], into: Mapping[str, Array]) -> None:
        """Add the gradients of parameters, of all runs of this cell."""
        layout = self.cell.layout
        if layout.weights is None:
            return
        spans = [(0, self.rows, 0)]
        if layout.weights.inputs(Role.SCALAR):  # numbers that are drawn differ from run to run
            spans = [(run.first, run.count, run.counter) for run in runs]
        for first, rows, counter in spans:
            for count, size in pieces(rows):
                graph = self.weights.get(size)
                move(
                    [
                        (held.at + first * held.nbytes, feed, held.nbytes, count, 0, size)
                        for name, held in (*self.kept.items(), *self.passed.items())
                        if (feed := graph.feeds.get(name)) is not None
                    ]
                )
                graph.run(counter)
                for name, value in zip(layout.trained, graph.bound.graph.outputs):
                    into[name] += graph.bound.results[value]
                first += count


def _there(part: Graph | None) -> Graph:
    if part is None:
        raise GraphError("a part of a cell was asked for that it does not have")
    return part


def _row(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:])


__all__ = ["CellRuns", "Run"]
