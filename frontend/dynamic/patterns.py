"""Patterns: layers outside of cells that occur together often run as one.

Of the first steps the subgraphs are counted. From then on each graph is tiled by those that were
frequent, and a tile is a call of a cell that replays its layers. What a tile makes inside is not
kept; where it is asked for all the same, its layers run again one by one, as far as they must.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, section 4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from soapstone.frontend.dynamic.cell import Cell, RowRecording, recorded
from soapstone.frontend.dynamic.tape import RESULTS, Units
from soapstone.frontend.recording import Tensor
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.search.reuse.cover import GIVEN, Links, leaving
from soapstone.search.reuse.subgraphs import Frequencies

_Outputs = tuple[int, ...]  # a node's place in its tile, times `RESULTS`, and which of its results


class Patterns:
    """The patterns of a session.

    Args:
        add: makes a cell of what was recorded. cell_of: returns that of a number.
        seed: of the session.
        depth, collect, least: Liu's P_Depth, P_Collect (in steps) and P_Freq.
    """

    def __init__(
        self,
        add: Callable[[RowRecording], Cell],
        cell_of: Callable[[int], Cell],
        seed: int,
        *,
        depth: int,
        collect: int,
        least: int,
    ) -> None:
        self._add = add
        self._cell_of = cell_of
        self._seed = seed
        self._left = collect
        self._counts = Frequencies(depth, least)
        self._cells: dict[tuple[int, _Outputs], Cell] = {}

    def step(self) -> None:
        """A step is over."""
        self._left -= 1

    def applied(
        self, units: Units, results: int, layers: Iterable[int], asked: Array
    ) -> tuple[Units, bool]:
        """Return what runs in place of some calls, and whether tiles are among it.

        Args:
            units: the calls. results: how many the step has. layers: the numbers of cells that are
                layers alone. asked: results that must be there afterwards.
        """
        alone = np.isin(units.cells, list(layers))
        if not alone.any():
            return units, False
        makers = units.makers(results)
        place = units.places(results)
        made, firsts = makers != GIVEN, units.outs
        which = units.operands.copy()  # a number of its own of what no call here makes
        which[made] = place[which[made]] - firsts[makers[made]]
        links = Links(np.where(alone, units.cells, -1), units.first, makers, which)
        if self._left > 0:
            self._counts.collect(links)
            return units, False
        tiling = self._counts.tiling(links)
        leave = leaving(links, tiling.owner, firsts)
        asked = place[asked]
        leave[asked[asked >= 0]] = True
        inside = units.taken(tiling.nodes)
        first = inside.outs  # results of the nodes of tiles, by tile
        sizes = np.diff(first)
        nth = np.arange(len(tiling.nodes)) - np.repeat(tiling.first[:-1], np.diff(tiling.first))
        codes = (
            np.repeat(nth, sizes) * RESULTS + np.arange(first[-1]) - np.repeat(first[:-1], sizes)
        )
        out = leave[place[inside.results]]
        outs = np.cumsum([0, *out])[first[tiling.first]]
        codes, ends = codes[out].tolist(), outs.tolist()
        cells = []
        for tile, number in enumerate(tiling.structures.tolist()):
            key = number, tuple(codes[ends[tile] : ends[tile + 1]])
            cell = self._cells.get(key)
            if cell is None:
                inputs = tiling.inputs[tiling.given[tile] : tiling.given[tile + 1]]
                cell = self._cell(key, [self._spec(units, at) for at in inputs.tolist()])
            cells.append(cell.number)
        operands = units.operands[tiling.inputs]
        numbers = np.array(cells, np.int64)
        tiles = Units(numbers, tiling.given, operands, outs, inside.results[out])
        loose = np.ones(len(units), np.bool_)
        loose[tiling.nodes] = False
        made_of = tiles.joined(units.taken(np.flatnonzero(loose)))
        return made_of.taken(tiling.order), len(tiles) > 0

    def _spec(self, units: Units, operand: int) -> TensorSpec:
        """Return the type of a row of an operand, by its place among all."""
        unit = int(np.searchsorted(units.first, operand, "right")) - 1
        return self._cell_of(int(units.cells[unit])).inputs[operand - int(units.first[unit])]

    def _cell(self, key: tuple[int, _Outputs], specs: Sequence[TensorSpec]) -> Cell:
        """Return the cell of a pattern: its structure's number, and what of it is returned.

        specs: the types of its operands.
        """
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
                made.append(self._cell_of(kind).replay(recording, inside))
            return tuple(made[code // RESULTS][code % RESULTS] for code in outputs)

        name = f"pattern{len(self._cells) + 1}"
        cell = self._cells[key] = self._add(recorded(name, self._seed, specs, replay))
        return cell
