"""What the work of a range of a graph's vertices depends on, in O(1) by prefix sums.

The features of a vertex are those of table 4.2 of Jia (2020): the vertex, its neighbours, the
blocks of consecutive ids that these form, and the memory accesses that load their ids and their
rows. A warp of a GPU loads 32 consecutive words at once; here a core loads a cache line, of 16.
They are there twice, since a training step also runs along the edges backward, where the vertices
that a vertex leads to are its neighbours. A part is a feature too: its tasks take some time
whatever they compute. Where a processor has several parts, the first of them also loads into its
cache what the others find there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from soapstone.ir.tensor import Array

LINE = 16  # words of 4 bytes that are loaded together
_ALONG = ("neighbours", "blocks", "lines of ids", "lines of rows")
FEATURES = ("vertices", *_ALONG, *(f"{name} backward" for name in _ALONG), "first parts", "parts")
_AT_ONCE = 1 << 22  # edges whose blocks are looked at together


@dataclass(frozen=True, eq=False)
class Features:
    """The features of all ranges of a graph's vertices, for each of a model's layers.

    Attributes:
        sums: (layers, vertices + 1, features) float64, of the vertices before each. Layers that
            load rows of one width share theirs.
        widths: of each layer, how many columns the rows have that it loads from neighbours.
        edges: (vertices + 1) int64, the edges that lead to the vertices before each.
    """

    sums: tuple[Array, ...]
    widths: tuple[int, ...]
    edges: Array

    @classmethod
    def of(
        cls, forward: tuple[Array, Array], backward: tuple[Array, Array], widths: Sequence[int]
    ) -> Features:
        """Return the features of a graph.

        Args:
            forward: (indptr, indices), in CSR, the neighbours of each vertex in ascending order.
            backward: those of the transpose; the same arrays where edges go both ways.
            widths: of each layer, the columns of the rows that it loads.
        """
        kinds = sorted(set(widths))
        there = _along(*forward, kinds)
        back = there if backward[1] is forward[1] else _along(*backward, kinds)
        count = np.arange(len(forward[0]), dtype=np.float64)
        none = np.zeros((len(count), 2))  # no vertex has a share of being a part
        sums = {
            width: np.column_stack(
                [count, *there[:3], there[3 + i], *back[:3], back[3 + i], none],
            )
            for i, width in enumerate(kinds)
        }
        return cls(tuple(sums[width] for width in widths), tuple(widths), forward[0])

    @property
    def vertices(self) -> int:
        """How many vertices the graph has."""
        return len(self.edges) - 1

    def parts(self, cuts: Sequence[int], first: Sequence[bool] | None = None) -> Array:
        """Return the features of the ranges between cuts: (layers, parts, features).

        first: whether a part is its processor's first; by default each has a processor of its own.
        """
        bounds = np.asarray(cuts)
        found = np.stack([np.diff(sums[bounds], axis=0) for sums in self.sums])
        found[:, :, -2:] = 1
        if first is not None:
            found[:, :, -2] = first
        return found


def _along(indptr: Array, indices: Array, widths: Sequence[int]) -> Array:
    """Return prefix sums of neighbours, blocks, lines of ids, and lines of rows of each width."""
    sums = np.zeros((3 + len(widths), len(indptr)), np.int64)
    sums[0] = indptr
    for first, past in _groups(indptr):
        begin, end = int(indptr[first]), int(indptr[past])
        ids = indices[begin:end]
        new = np.ones(len(ids), bool)
        new[1:] = np.diff(ids) != 1
        rows = indptr[first:past] - begin
        new[rows[rows < len(ids)]] = True  # a block ends with its row
        starts = np.flatnonzero(new)
        lengths = np.diff(starts, append=len(ids))
        ended = np.searchsorted(starts, indptr[first + 1 : past + 1] - begin)
        words = (1, *(lengths * width for width in (1, *widths)))
        for number, each in enumerate(words, start=1):
            lines = np.broadcast_to(-(-np.asarray(each) // LINE), lengths.shape)
            total = np.concatenate([[0], np.cumsum(lines)])
            sums[number, first + 1 : past + 1] = sums[number, first] + total[ended]
    return sums


def _groups(indptr: Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about as many entries as are looked at together."""
    faces = np.searchsorted(indptr, np.arange(0, int(indptr[-1]), _AT_ONCE))
    bounds = np.unique([0, *faces, len(indptr) - 1]).tolist()
    yield from pairwise(bounds)
