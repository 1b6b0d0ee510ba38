"""Bytes that tiles of a value lack in one place and have in another, from their boxes alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from soapstone.ir.dims import Ints
from soapstone.ir.tensor import TensorSpec
from soapstone.records import dataclass


@dataclass(frozen=True)
class Tiles:
    """Boxes of a value, lo and hi int64 (points, rank), and the place of each."""

    lo: Ints
    hi: Ints
    places: Sequence[Hashable]


class Held:
    """Which elements of a value each place has, by cells between all faces of tiles.

    Args:
        seen: all tiles that it will be asked for.
    """

    def __init__(self, spec: TensorSpec, seen: Sequence[Tiles]) -> None:
        self._itemsize = np.dtype(spec.dtype).itemsize
        faces = [np.concatenate([bound for tiles in seen for bound in (tiles.lo, tiles.hi)])]
        self._faces = [
            np.unique(np.concatenate([faces[0][:, axis], [0, extent]]))
            for axis, extent in enumerate(spec.shape)
        ]
        self._volume = np.ones(tuple(len(cuts) - 1 for cuts in self._faces), np.int64)
        for axis, cuts in enumerate(self._faces):
            shape = [-1 if i == axis else 1 for i in range(len(self._faces))]
            self._volume = self._volume * np.diff(cuts).reshape(shape)
        self._has: dict[Hashable, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]] = {}

    def _cells(self, lo: Ints, hi: Ints) -> tuple[slice, ...]:
        return tuple(
            slice(*np.searchsorted(cuts, (a, b)).tolist())
            for cuts, a, b in zip(self._faces, lo, hi)
        )

    def put(self, tiles: Tiles) -> None:
        """Note what is written: the places of its tiles alone have it."""
        for lo, hi, place in zip(tiles.lo, tiles.hi, tiles.places):
            for other, has in self._has.items():
                if other != place:
                    has[self._cells(lo, hi)] = False
            self._at(place)[self._cells(lo, hi)] = True

    def get(self, tiles: Tiles) -> dict[Hashable, int]:
        """Return the bytes that each place lacks of what it reads; it has them afterwards."""
        lacked: dict[Hashable, int] = {}
        for lo, hi, place in zip(tiles.lo, tiles.hi, tiles.places):
            has, cells = self._at(place), self._cells(lo, hi)
            lacks = int(self._volume[cells][~has[cells]].sum()) * self._itemsize
            lacked[place] = lacked.get(place, 0) + lacks
            has[cells] = True
        return lacked

    def _at(self, place: Hashable) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        if place not in self._has:
            self._has[place] = np.zeros(self._volume.shape, bool)
        return self._has[place]


def lacking(spec: TensorSpec, held: Tiles, needed: Tiles) -> Mapping[Hashable, int]:
    """Return the bytes that each place lacks of the tiles that it needs, given those it has."""
    value = Held(spec, (held, needed))
    value.put(held)
    return value.get(needed)
