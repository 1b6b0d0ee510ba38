"""Patterns: layers outside of cells that occur together often run as one.

Of the first steps the subgraphs are counted. From then on each graph is tiled by those that were
frequent, and a tile is a call of a cell that replays its layers. What a tile makes inside is not
kept; where it is asked for all the same, its layers run again one by one, as far as they must.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, section 4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from soapstone.frontend.dynamic.cell import Cell, RowRecording, recorded
from soapstone.frontend.dynamic.values import RESULTS, Lazy, Occurrence
from soapstone.frontend.recording import Tensor
from soapstone.ir.tensor import Array
from soapstone.search.reuse.cover import GIVEN, leaving
from soapstone.search.reuse.subgraphs import Frequencies, Links

_Outputs = tuple[int, ...]  # a node's place in its tile, times `RESULTS`, and which of its results


class Patterns:
    """The patterns of a session.

    Args:
        add: makes a cell of what was recorded. seed: of the session.
        depth, collect, least: Liu's P_Depth, P_Collect (in steps) and P_Freq.
    """

    def __init__(
        self,
        add: Callable[[RowRecording], Cell],
        seed: int,
        *,
        depth: int,
        collect: int,
        least: int,
    ) -> None:
        self._add = add
        self._seed = seed
        self._left = collect
        self._counts = Frequencies(depth, least)
        self._cells: dict[tuple[int, _Outputs], Cell] = {}
        self._layers: dict[int, Cell] = {}

    def step(self) -> None:
        """A step is over."""
        self._left -= 1

    def applied(
        self, pending: list[Occurrence], layers: set[int], asked: Iterable[Lazy]
    ) -> tuple[list[Occurrence], list[Occurrence]]:
        """Return what runs in place of some calls, operands before users, and the tiles of it.

        Args:
            pending: in that order. layers: the numbers of cells that are layers alone.
            asked: values that must be there afterwards.
        """
        cells = [call.cell for call in pending]
        alone = {c.number: c for c in set(cells) if c.number in layers}
        if not alone:
            return pending, []
        self._layers.update(alone)
        place = np.full(pending[-1].number + 1, GIVEN, np.int64)
        place[[call.number for call in pending]] = np.arange(len(pending))
        operands_of = [call.operands for call in pending]
        given = list(chain.from_iterable(operands_of))
        starts = np.cumsum([0, *map(len, operands_of)])
        links = _links(cells, alone, given, starts, place)
        if self._left > 0:
            self._counts.collect(links)
            return pending, []
        tiling = self._counts.tiling(links)
        outputs_of = [call.outputs for call in pending]
        values = list(chain.from_iterable(outputs_of))
        firsts = np.cumsum([0, *map(len, outputs_of)])
        leave = leaving(links.first, links.makers, links.results, tiling.owner, firsts)
        for value in asked:
            if value.code >= 0 and value.code // RESULTS < len(place):
                at = place[value.code // RESULTS]
                if at != GIVEN:
                    leave[firsts[at] + value.code % RESULTS] = True
        sizes = np.diff(firsts)
        first = np.cumsum([0, *sizes[tiling.nodes]])  # results of the nodes of tiles, by tile
        within = np.arange(first[-1]) - np.repeat(first[:-1], sizes[tiling.nodes])
        result = np.repeat(firsts[tiling.nodes], sizes[tiling.nodes]) + within
        nth = np.arange(len(tiling.nodes)) - np.repeat(tiling.first[:-1], np.diff(tiling.first))
        codes = np.repeat(nth, sizes[tiling.nodes]) * RESULTS + within
        out = leave[result]
        ends = np.cumsum([0, *out])[first[tiling.first]].tolist()
        results, codes = result[out].tolist(), codes[out].tolist()
        inputs, at_inputs = tiling.inputs.tolist(), tiling.given.tolist()
        roots = tiling.nodes[tiling.first[1:] - 1].tolist()
        made = []
        for tile, number in enumerate(tiling.structures.tolist()):
            begin, end = ends[tile], ends[tile + 1]
            operands = tuple([given[i] for i in inputs[at_inputs[tile] : at_inputs[tile + 1]]])
            key = number, tuple(codes[begin:end])
            cell = self._cells.get(key) or self._cell(key, operands)
            call = Occurrence(cell, operands, pending[roots[tile]].number)
            call.outputs = tuple([values[i] for i in results[begin:end]])
            for value in call.outputs:
                value.call, value.code = call, -1
            made.append(call)
        loose = np.ones(len(pending), np.bool_)
        loose[tiling.nodes] = False
        units = [*made, *[pending[node] for node in np.flatnonzero(loose).tolist()]]
        return [units[unit] for unit in tiling.order.tolist()], made

    def _cell(self, key: tuple[int, _Outputs], operands: Sequence[Lazy]) -> Cell:
        """Return the cell of a pattern: its structure's number, and what of it is returned."""
        number, outputs = key
        structure = self._counts.structure(number)

        def replay(recording: RowRecording, *tensors: Tensor) -> tuple[Tensor, ...]:
            made: list[tuple[Tensor, ...]] = []
            words = iter(structure)
            for kind in words:
                pairs = [(next(words), next(words)) for _ in range(next(words))]
                inside = [
                    tensors[which] if maker == GIVEN else made[maker][which]
                    for maker, which in pairs
                ]
                made.append(self._layers[kind].replay(recording, inside))
            return tuple(made[code // RESULTS][code % RESULTS] for code in outputs)

        specs = [operand.rows.spec for operand in operands]
        name = f"pattern{len(self._cells) + 1}"
        cell = self._cells[key] = self._add(recorded(name, self._seed, specs, replay))
        return cell


def _links(
    cells: Sequence[Cell], layers: Iterable[int], given: Sequence[Lazy], starts: Array, place: Array
) -> Links:
    """Return calls as arrays.

    cells: of each. given: all operands, each one's from `starts` on. place: of calls, by number.
    """
    numbers = np.array([cell.number for cell in cells], np.int64)
    kinds = np.where(np.isin(numbers, list(layers)), numbers, -1)
    codes = np.array([operand.code for operand in given], np.int64)
    before = (codes >= 0) & (codes < len(place) * RESULTS)
    makers = np.where(before, place[np.where(before, codes, 0) // RESULTS], GIVEN)
    results = codes % RESULTS
    outside = np.flatnonzero(makers == GIVEN)
    results[outside] = [id(given[at]) for at in outside.tolist()]
    return Links(kinds, starts, makers, results)


def needed(pending: Iterable[Occurrence], asked: Iterable[Lazy]) -> list[Occurrence]:
    """Return calls with all that they and some values need and that is not done, in order."""
    found = {id(call): call for call in pending}
    makers = [value.call for value in asked]
    makers += [operand.call for call in found.values() for operand in call.operands]
    while makers:
        call = makers.pop()
        if call is not None and not call.done and id(call) not in found:
            found[id(call)] = call
            makers += [operand.call for operand in call.operands]
    return sorted(found.values(), key=lambda call: call.number)


__all__ = ["Patterns", "needed"]
