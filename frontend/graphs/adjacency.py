"""The edges of a graph: the neighbours of each vertex in CSR, its transpose, weights of edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.graphs.merge import union, with_own
from soapstone.frontend.graphs.transpose import offsets_of, transposed
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

_MOST_VERTICES = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Adjacency:
    """The edges of a graph, by the vertex that they lead to and by the one that they come from.

    Row v of (indptr, indices) has the sources of the edges into v in ascending order, row u of
    (indptr_t, indices_t) the targets of those out of u. Two edges from one vertex to another are
    two neighbours; an edge from a vertex to itself makes it its own neighbour. Arrays are not
    written to; those of a graph whose edges go both ways are shared by matrix and transpose.

    Attributes:
        indptr, indptr_t: (vertices + 1) int64. indices, indices_t: (edges) int32.
        weights, weights_t: (edges) float32, of the edges in these orders; None where all are 1.
    """

    indptr: Array
    indices: Array
    indptr_t: Array
    indices_t: Array
    weights: Array | None = None
    weights_t: Array | None = None

    @classmethod
    def from_edges(cls, sources: Any, targets: Any, vertices: int) -> Adjacency:
        """Return the adjacency of edges, in any order, each from a source to a target.

        Args:
            sources, targets: (edges) integers from 0 to vertices - 1.
            vertices: how many there are; those without edges count.

        Raises:
            DataError: lengths that differ, no integers, or an id outside; names the edge. Or more
                vertices than there is memory for.
        """
        if not 0 <= vertices <= _MOST_VERTICES:
            raise DataError(f"graph: {vertices} vertices found, 0 to {_MOST_VERTICES} needed")
        check_bytes(16 * vertices, "graph", DataError)
        ends = {"source": np.asarray(sources), "target": np.asarray(targets)}
        for name, ids in ends.items():
            if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
                raise DataError(
                    f"graph: {name}s: {ids.dtype} of shape {ids.shape} found, a list of integers"
                    " needed"
                )
            if ids.size and not 0 <= ids.min() <= ids.max() < vertices:
                edge = int(np.flatnonzero((ids < 0) | (ids >= vertices))[0])
                raise DataError(
                    f"graph: edge {edge}: {name} {ids[edge]} found, 0 to {vertices - 1} needed"
                )
        if len(ends["source"]) != len(ends["target"]):
            raise DataError(
                f"graph: {len(ends['source'])} sources found with {len(ends['target'])} targets"
            )
        # The edges as a matrix of a row each are transposed to those out of each source; then
        # each transpose is in the order of the vertices at the other end.
        source, target = (ids.astype(np.int32, copy=False) for ids in ends.values())
        edges = np.arange(len(source) + 1, dtype=np.int64)
        out, order, _ = transposed(edges, source, vertices)
        indptr, indices, _ = transposed(out, target[order], vertices)
        return cls._both(indptr, indices)

    @classmethod
    def _both(cls, indptr: Array, indices: Array) -> Adjacency:
        indptr_t, indices_t, _ = transposed(indptr, indices, len(indptr) - 1)
        if np.array_equal(indptr, indptr_t) and np.array_equal(indices, indices_t):
            indptr_t, indices_t = indptr, indices
        return cls(indptr, indices, indptr_t, indices_t)

    @property
    def vertices(self) -> int:
        """How many vertices there are."""
        return len(self.indptr) - 1

    @property
    def edges(self) -> int:
        """How many edges there are, each in one direction."""
        return len(self.indices)

    @cached_property
    def targets(self) -> Array:
        """The vertex that each edge leads to, (edges) int32, in the order of `indices`."""
        return np.repeat(np.arange(self.vertices, dtype=np.int32), self.in_degrees)

    @cached_property
    def into(self) -> Adjacency:
        """The matrix (vertices, edges) of which row v has the edges that lead to v.

        Edges are counted as in `indices`; there are no weights.
        """
        return self._ends(self.indptr, np.arange(self.edges), self.targets)

    @cached_property
    def out_of(self) -> Adjacency:
        """The matrix (vertices, edges) of which row u has the edges that come from u, as `into`."""
        indptr, _, origins = transposed(self.indptr, self.indices, self.vertices, tracked=True)
        return self._ends(indptr, origins, self.indices)

    def _ends(self, indptr: Array, indices: Array, vertices: Array) -> Adjacency:
        if self.edges > _MOST_VERTICES:
            raise DataError(
                f"graph: {self.edges} edges found; {_MOST_VERTICES} at most may have values"
            )
        each = np.arange(self.edges + 1, dtype=np.int64)
        return Adjacency(indptr, indices.astype(np.int32), each, vertices)

    @property
    def in_degrees(self) -> Array:
        """How many edges lead to each vertex, (vertices) int64."""
        return np.diff(self.indptr)

    @property
    def symmetric(self) -> bool:
        """Whether each edge has one in the other direction."""
        return self.indices is self.indices_t

    def undirected(self) -> Adjacency:
        """Return the graph with each edge in both directions, once, and without self edges."""
        both = union(self.indptr, self.indices, self.indptr_t, self.indices_t)
        return Adjacency(*both, *both)

    def simple(self) -> Adjacency:
        """Return the graph with one of equal edges, of weight 1, and no edge to the same vertex."""
        kept = self.indices != self.targets
        kept[1:] &= (np.diff(self.indices) != 0) | (np.diff(self.targets) != 0)
        return self._both(offsets_of(self.targets[kept], self.vertices), self.indices[kept])

    def with_self_edges(self) -> Adjacency:
        """Return the graph with an edge of each vertex to itself, where there is none."""
        there = with_own(self.indptr, self.indices)
        back = there if self.symmetric else with_own(self.indptr_t, self.indices_t)
        return Adjacency(*there, *back)

    def normalised(self) -> Adjacency:
        """Return D^-1/2 (A + I) D^-1/2: self edges where there are none, and weights of edges.

        An edge from u to v weighs 1 / sqrt(d(u) d(v)), where d counts the edges that lead to a
        vertex, its own among them.

        Source: Kipf and Welling, Semi-supervised classification with graph convolutional networks,
        ICLR 2017, section 3.1.
        """
        whole = self.with_self_edges()
        roots = (1 / np.sqrt(whole.in_degrees)).astype(np.float32)
        weights = roots[whole.targets] * roots[whole.indices]
        if whole.symmetric:
            return replace(whole, weights=weights, weights_t=weights)
        rows = np.repeat(roots, np.diff(whole.indptr_t))
        return replace(whole, weights=weights, weights_t=rows * roots[whole.indices_t])

    def __str__(self) -> str:
        return f"{self.vertices:,} vertices, {self.edges:,} edges"
