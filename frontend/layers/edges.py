"""What layers of one's own over neighbours are made of: values of edges, to and from vertices.

An edge has its values in memory here, which `aggregate` and the convolutions spare; edges are in
the order of `Adjacency.indices`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.graphs import GraphLayers
from soapstone.ir.errors import GraphError, ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.graphs.adjacency import Adjacency
    from soapstone.frontend.recording import Tensor


class EdgeLayers(GraphLayers):
    """Rows at the ends of edges, and sums, means, maxima and softmax over edges of a vertex."""

    def edge_gather(
        self, x: Tensor, graph: Adjacency, end: str = "source", *, name: str | None = None
    ) -> Tensor:
        """Return the row of x of the vertex at one end of each edge.

        x: (vertices, width); result: (edges, width).

        Args:
            graph: the edges, whose weights take no part.
            end: "source", where edges come from, or "target".

        Raises:
            ShapeError: x has another number of rows than the graph has vertices.
            GraphError: another end.
        """
        node = self._name("edge_gather", name)
        label = f"edge_gather {node!r}"
        self._check_vertices(label, x, graph)
        if end not in ("source", "target"):
            raise GraphError(f"{label}: end {end!r} found, 'source' or 'target' needed")
        indptr, indices, *back = self._matrix(graph.into if end == "target" else graph.out_of)
        return self.apply("spmm", x, *back, indptr, indices, name=node)

    def edge_reduce(
        self, x: Tensor, graph: Adjacency, reduction: str = "sum", *, name: str | None = None
    ) -> Tensor:
        """Return, for each vertex, the sum, mean or maximum of x over the edges that lead to it.

        x: (edges, width); result: (vertices, width), 0 where no edge leads to a vertex.

        Args:
            graph: the edges, whose weights take no part.
            reduction: "sum", "mean" or "max".

        Raises:
            ShapeError: x has another number of rows than the graph has edges.
            GraphError: another reduction.
        """
        node = self._name("edge_reduce", name)
        self._check_edges(f"edge_reduce {node!r}", x, graph)
        return self._reduced(f"edge_reduce {node!r}", x, graph.into, reduction, node)

    def edge_softmax(self, x: Tensor, graph: Adjacency, *, name: str | None = None) -> Tensor:
        """Return softmax of each column of x over the edges that lead to the same vertex.

        x: (edges, width); result: of that shape.

        Args:
            graph: the edges, whose weights take no part.

        Raises:
            ShapeError: x has another number of rows than the graph has edges.
        """
        node = self._name("edge_softmax", name)
        self._check_edges(f"edge_softmax {node!r}", x, graph)
        return self.apply("segment_softmax", x, self._matrix(graph.into)[0], name=node)

    def _check_edges(self, label: str, x: Tensor, graph: Adjacency) -> None:
        if len(x.shape) != 2 or x.shape[0] != graph.edges:
            raise ShapeError(
                f"{label}: x {x.spec} found; (edges, width) needed, with {graph.edges} edges"
            )
