"""Symbolic contents of instances, as the operations of a log leave them one after the other."""

from __future__ import annotations

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.observe.checker.cells import Grid, empty
from soapstone.runtime.observe.checker.order import span
from soapstone.runtime.observe.checker.records import Box, Records, Storage
from soapstone.runtime.observe.checker.versions import Versions


class Memory:
    """The contents of each storage, one for each cell of its grid.

    A write to one storage marks the cells of others that share its bytes as overwritten.
    """

    def __init__(self, records: Records, grids: dict[int, Grid], versions: Versions) -> None:
        self._records = records
        self._grids = grids
        self._versions = versions
        self._held: dict[int, Array] = {}
        self._spans: dict[int, tuple[Array, Array]] = {}
        spans = sorted((*span(s, s.box), s.id) for s in records.storages.values())
        self._lows, self._highs, self._numbers = (
            np.array([item[i] for item in spans], dtype=np.int64) for i in range(3)
        )
        self._longest = int((self._highs - self._lows).max(initial=0))
        self._whole: set[int] = set()  # storages that hold anything that was not overwritten

    def held(self, number: int) -> Array:
        """The contents of a storage, by its number: int64, one for each cell."""
        cells = self._held.get(number)
        if cells is None:
            storage = self._records.storages[number]
            region, grid = self._records.regions[storage.region], self._grids[storage.region]
            if storage.valid is not None:
                cells = grid.full(storage.box, self._versions.of("stale"))
                for box in storage.valid:
                    known = self._versions.of("known", region.id)
                    cells[grid.slices(box, storage.box)] = known
            elif region.transient:
                cells = grid.full(storage.box, self._versions.of("junk"))
            else:
                cells = grid.full(storage.box, self._versions.of("value", region.zero))
                self._spoil(storage, storage.box, f"a new instance of {region.name!r}")
            self._held[number] = cells
            self._whole.add(number)
        return cells

    def read(self, number: int, box: Box) -> Array:
        """The contents of the cells in a box of a storage, as a view."""
        storage = self._records.storages[number]
        view: Array = self.held(number)[self._grids[storage.region].slices(box, storage.box)]
        return view

    def write(self, number: int, box: Box, contents: Array | int, who: str) -> None:
        """Replace the contents of a box. who: the writer, for messages about what it overwrote."""
        self.read(number, box)[...] = contents
        self._whole.add(number)
        self._spoil(self._records.storages[number], box, who)

    def _spoil(self, storage: Storage, box: Box, who: str) -> None:
        if empty(box):
            return
        low, high = span(storage, box)
        start, stop = np.searchsorted(self._lows, [low - self._longest, high])
        near = self._numbers[start:stop][self._highs[start:stop] > low]
        for number in near.tolist():
            if number == storage.id or number not in self._whole:
                continue
            lows, highs = self._cells(self._records.storages[number])
            hit = (lows < high) & (highs > low)
            if hit.any():
                self._held[number][hit] = self._versions.of("overwritten", who)
                if hit.all():
                    self._whole.discard(number)

    def _cells(self, storage: Storage) -> tuple[Array, Array]:
        """The bytes each cell of a storage spans: from, to."""
        ends = self._spans.get(storage.id)
        if ends is None:
            low = np.array(storage.address, dtype=np.int64)
            high = np.array(storage.address + storage.itemsize, dtype=np.int64)
            for axis, cut in enumerate(self._grids[storage.region].cuts):
                base, end = storage.box[0][axis], storage.box[1][axis]
                inside = cut[(cut >= base) & (cut <= end)]
                step = storage.strides[axis]
                low = low[..., None] + (inside[:-1] - base) * step
                high = high[..., None] + (inside[1:] - 1 - base) * step
            ends = self._spans[storage.id] = (low, high)
        return ends
