"""Runs of a cell on many rows at once: forward, back, and the sums of its parameters' gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.dynamic.rows import GraphByRows, Graphs, RowGraph, Rows, pieces
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.native.memory import address
from soapstone.native.rows import ADD, Move


class Run(NamedTuple):
    """A run of a cell that the backward pass goes through again.

    Attributes:
        cell: with its graphs. size: rows of the graph that ran; used: how many of them.
        first: the row of the cell's kept values that is the run's first.
        places: rows of operands. at: the address in it of the row of the run's first operand, of
            its first call; of the next call it is the next one. step: bytes from that of an operand
            to that of the next.
        outputs: the first row of each output.
    """

    cell: CellRuns
    size: int
    used: int
    first: int
    places: Array
    at: int
    step: int
    outputs: tuple[int, ...]

    def place(self, operand: int) -> int:
        """Return the address of the rows of an operand."""
        return self.at + operand * self.step

    def places_of(self, operand: int) -> Array:
        """Return the rows of an operand."""
        first = (self.place(operand) - address(self.places)) // 8
        found: Array = self.places[first : first + self.used]
        return found


class _Moves:
    """What runs of a bound graph move: all that is known before one is run.

    Attributes:
        given: of operands that are inputs, the number and the input's address. kept: of what is
            kept the address of the result, or 0 of an operand and its number.
        seeds: of gradients of outputs, the output and the input's address. held: of what was kept,
            the address of the input. passed: of what is passed on, the address of the result.
    """

    def __init__(self, runs: CellRuns, graph: RowGraph) -> None:
        feeds, results = graph.feeds, graph.results
        numbers = range(len(runs.operands))
        self.given = [(n, feeds[f"x{n}"]) for n in numbers if f"x{n}" in feeds]
        self.kept = [
            (kept, results.get(name, 0), 0 if name in results else int(name[1:]))
            for name, kept in runs.kept.items()
            if name in results or (name[:1] == "x" and name[1:].isdecimal())
        ]
        seeds = runs.cell.layout.seeds
        self.seeds = [(output, feeds[seed]) for seed, output in seeds if seed in feeds]
        self.held = [(kept, feeds[name]) for name, kept in runs.kept.items() if name in feeds]
        self.passed = [
            (each, results[name]) for name, each in runs.passed.items() if name in results
        ]


class CellRuns:
    """A cell with its bound graphs, and what they keep for the backward pass of a step.

    Args:
        graphs: of the session. operands, outputs: the arrays that their rows are in.
    """

    def __init__(
        self, graphs: Graphs, cell: Cell, operands: Sequence[Rows], outputs: Sequence[Rows]
    ) -> None:
        self._work = graphs.work
        self.cell = cell
        self.operands = tuple(operands)
        self.outputs = tuple(outputs)
        layout = cell.layout
        self._flops = layout.forward.flops() / 2  # of a row
        self.forward = GraphByRows(graphs, lambda rows: cell.parts(rows).forward)
        self.backward = GraphByRows(graphs, lambda rows: _there(cell.parts(rows).backward))
        self.weights = GraphByRows(graphs, lambda rows: _there(cell.parts(rows).weights))
        self.inference = GraphByRows(graphs, lambda rows: cell.build(rows, training=False))
        tensors = dict(layout.forward.tensors)
        for part in (layout.backward, layout.weights):
            tensors.update(part.tensors if part is not None else {})
        self.kept = {name: Rows(_row(tensors[name]), self._work) for name in layout.kept}
        self.passed = {name: Rows(_row(tensors[name]), self._work) for name in layout.passed}
        self._moves: dict[RowGraph, _Moves] = {}
        self.rows = 0  # of kept values
        self.calls = 0  # since the session began
        self.runs = 0

    def reset(self) -> None:
        """Let go of what was kept."""
        self.rows = 0
        for each in (*self.kept.values(), *self.passed.values()):
            each.size = 0

    def run(
        self, count: int, places: Array, first: int, outputs: Sequence[int], training: bool
    ) -> list[Run]:
        """Compute calls, and return what the backward pass needs to know of that.

        Args:
            count: how many. places: rows of operands, these calls' from `first` on, those of the
                first operand first. outputs: the row that each result of the first call will be.
        """
        start, step = address(places) + 8 * first, 8 * count
        self.calls += count
        made: list[Run] = []
        at = 0
        for many, size in pieces(count, self._flops):
            begins = tuple([row + at for row, _ in zip(outputs, self.outputs)])
            run = Run(self, size, many, self.rows, places, start + 8 * at, step, begins)
            self._forward(run, training)
            made.append(run)
            at += many
            self.rows += many
        self.runs += len(made)
        return made

    def _forward(self, run: Run, training: bool) -> None:
        """Gather operands, run, and hold what is made, and what the backward pass reads."""
        graph = (self.forward if training else self.inference).get(run.size)
        count = run.used
        moves = self._moves_of(graph)
        before: list[Move] = []
        for number, feed in moves.given:
            rows = self.operands[number]
            before.append((rows.at, feed, rows.nbytes, count, run.place(number), run.size))
        self._work.move(before, run.places)
        self._work.run(graph)
        after: list[Move] = [
            (result, rows.at + first * rows.nbytes, rows.nbytes, count, 0, count)
            for result, rows, first in zip(graph.outputs, self.outputs, run.outputs)
        ]
        for kept, result, number in moves.kept if training else ():
            target = kept.take(count) * kept.nbytes + kept.at
            place = 0
            if not result:  # an operand
                result, place = self.operands[number].at, run.place(number)
            after.append((result, target, kept.nbytes, count, place, count))
        self._work.move(after)

    def _moves_of(self, graph: RowGraph) -> _Moves:
        moves = self._moves.get(graph)
        if moves is None:
            moves = self._moves[graph] = _Moves(self, graph)
        return moves

    def back(self, run: Run) -> None:
        """Carry the gradients of a run's outputs to its operands, to which they are added."""
        layout = self.cell.layout
        if layout.backward is None:
            return
        graph = self.backward.get(run.size)
        moves, count = self._moves_of(graph), run.used
        before: list[Move] = [
            (kept.at + run.first * kept.nbytes, feed, kept.nbytes, count, 0, run.size)
            for kept, feed in moves.held
        ]
        for output, feed in moves.seeds:
            rows = self.outputs[output]
            source = rows.grads_at + run.outputs[output] * rows.nbytes
            before.append((source, feed, rows.nbytes, count, 0, run.size))
        self._work.move(before, run.places)
        self._work.run(graph)
        after: list[Move] = []
        names = graph.bound.graph.outputs
        for number, name, result in zip(layout.operands, names, graph.outputs):
            rows = self.operands[number]
            if rows.spec.dtype == "float32":
                after.append((result, rows.grads_at, rows.nbytes, count, run.place(number), ADD))
            else:
                self._work.do()
                np.add.at(rows.grads, run.places_of(number), graph.bound.results[name][:count])
        for passed, result in moves.passed:
            if passed.size < self.rows:
                passed.take(self.rows - passed.size)
            target = passed.at + run.first * passed.nbytes
            after.append((result, target, passed.nbytes, count, 0, count))
        self._work.move(after)

    def sums(self, into: Mapping[str, Array]) -> None:
        """Add the gradients of parameters, of all runs of this cell."""
        layout = self.cell.layout
        if layout.weights is None:
            return
        first = 0
        for count, size in pieces(self.rows, self._flops):
            graph = self.weights.get(size)
            self._work.move(
                [
                    (held.at + first * held.nbytes, feed, held.nbytes, count, 0, size)
                    for name, held in (*self.kept.items(), *self.passed.items())
                    if (feed := graph.feeds.get(name)) is not None
                ]
            )
            self._work.run(graph)
            self._work.do()
            for name, value in zip(layout.trained, graph.bound.graph.outputs):
                into[name] += graph.bound.results[value]
            first += count


def _there(part: Graph | None) -> Graph:
    if part is None:
        raise GraphError("a part of a cell was asked for that it does not have")
    return part


def _row(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:])
