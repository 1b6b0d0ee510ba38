"""Patterns: layers outside of cells that occur together often run as one.

Of the first steps the subgraphs are counted. From then on each graph is tiled by those that were
frequent, and a tile is a call of a cell that replays its layers. What a tile makes inside is not
kept; where it is asked for all the same, its layers run again one by one, as far as they must.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, section 4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Any

from soapstone.frontend.dynamic.cell import Cell, RowRecording, recorded
from soapstone.frontend.dynamic.values import Lazy, Occurrence
from soapstone.frontend.recording import Tensor
from soapstone.search.reuse.subgraphs import GIVEN, Frequencies, Node, Subgraph

_Outputs = tuple[tuple[int, int], ...]  # a node's place in its tile, and which of its results


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
        self._cells: dict[tuple[Hashable, _Outputs], Cell] = {}
        self._layers: dict[int, Cell] = {}

    def step(self) -> None:
        """A step is over."""
        self._left -= 1

    def applied(
        self, pending: Sequence[Occurrence], layers: set[int], asked: Iterable[Lazy]
    ) -> tuple[list[Occurrence], list[Occurrence]]:
        """Return what runs in place of some calls, operands before users, and the tiles of it.

        Args:
            pending: in that order. layers: the numbers of cells that are layers alone.
            asked: values that must be there afterwards.
        """
        if not any(call.cell.number in layers for call in pending):
            return list(pending), []
        place = {id(call): number for number, call in enumerate(pending)}
        nodes = [_node(call, place, layers) for call in pending]
        if self._left > 0:
            self._counts.collect(nodes)
            return list(pending), []
        tiles = self._counts.tiles(nodes)
        wanted = {id(value) for value in asked}
        owner = {node: number for number, tile in enumerate(tiles) for node in tile.nodes}
        read: dict[tuple[int, int], bool] = {}  # results: whether a reader is in another tile
        for number, node in enumerate(nodes):
            for maker, result in node.operands:
                if maker != GIVEN:
                    apart = number not in owner or owner[number] != owner.get(maker)
                    read[maker, result] = read.get((maker, result), False) or apart
        made = [self._occurrence(pending, tile, read, wanted) for tile in tiles]
        rest = [call for number, call in enumerate(pending) if number not in owner]
        known = {id(call): call for call in (*made, *rest)}
        order: TopologicalSorter[int] = TopologicalSorter()
        for key, call in known.items():
            before = (operand.call for operand in call.operands)
            order.add(key, *(id(maker) for maker in before if id(maker) in known))
        return [known[key] for key in order.static_order()], made

    def _occurrence(
        self,
        pending: Sequence[Occurrence],
        tile: Subgraph,
        read: dict[tuple[int, int], bool],
        wanted: set[int],
    ) -> Occurrence:
        """Return the call of a pattern that a tile is; what it makes is the tile's results."""
        calls = [pending[number] for number in tile.nodes]
        results = [
            (place, result, value)
            for place, (number, call) in enumerate(zip(tile.nodes, calls))
            for result, value in enumerate(call.outputs)
            if read.get((number, result), True) or id(value) in wanted
        ]
        outputs = tuple((place, result) for place, result, _ in results)
        for call in calls:
            self._layers[call.cell.number] = call.cell
        operands = []
        for maker, result in tile.inputs:
            operands.append(
                pending[maker].outputs[result] if maker != GIVEN else _given(calls, result)
            )
        key = (tile.structure, outputs)
        cell = self._cells.get(key)
        if cell is None:
            specs = [operand.rows.spec for operand in operands]
            name = f"pattern{len(self._cells) + 1}"

            def replay(recording: RowRecording, *tensors: Tensor) -> tuple[Tensor, ...]:
                return self._replayed(tile.structure, outputs, recording, tensors)

            cell = self._cells[key] = self._add(recorded(name, self._seed, specs, replay))
        made = Occurrence(cell, tuple(operands), calls[-1].number)
        made.outputs = tuple(value for _, _, value in results)
        for value in made.outputs:
            value.call = made
        return made

    def _replayed(
        self,
        structure: tuple[Any, ...],
        outputs: _Outputs,
        recording: RowRecording,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Record the layers of a pattern."""
        made: list[tuple[Tensor, ...]] = []
        for kind, *operands in structure:
            given = [
                tensors[result] if maker == GIVEN else made[maker][result]
                for maker, result in operands
            ]
            made.append(self._layers[kind].replay(recording, given))
        return tuple(made[place][result] for place, result in outputs)


def _node(call: Occurrence, place: dict[int, int], layers: set[int]) -> Node:
    operands = []
    for operand in call.operands:
        maker = place.get(id(operand.call), GIVEN) if operand.call is not None else GIVEN
        if maker == GIVEN:
            operands.append((GIVEN, id(operand)))
        else:
            outputs = operand.call.outputs if operand.call is not None else ()
            operands.append((maker, next(i for i, o in enumerate(outputs) if o is operand)))
    kind = call.cell.number if call.cell.number in layers and not call.cell.random else None
    return Node(kind, tuple(operands))


def _given(calls: Iterable[Occurrence], number: int) -> Lazy:
    """Return the operand of some calls that has a number."""
    return next(o for call in calls for o in call.operands if id(o) == number)


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
