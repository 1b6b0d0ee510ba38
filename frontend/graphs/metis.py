"""Parts of a graph between which few edges lead, by METIS: a baseline of learned cuts.

METIS gives each vertex a part of its own choice; parts here are ranges of consecutive vertices. So
vertices are numbered anew, part after part. The library is imported on first use.
Source: Karypis and Kumar, A fast and high quality multilevel scheme, SIAM J. Sci. Comput. 1998.
"""

from __future__ import annotations

import numpy as np

from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.ir.tensor import Array
from soapstone.search.partition.cuts import Cuts, PartitionError, check_parts


def renumbered_by_metis(data: GraphData, parts: int) -> tuple[GraphData, Cuts]:
    """Return a data set whose parts are ranges of vertices, in their order, and where it is cut.

    parts: how many. A vertex weighs 1 and the edges that lead to it, of which parts have about as
        much; equal edges, both directions, and edges of a vertex to itself count once or not.

    Raises:
        PartitionError: METIS is not installed, or leaves a part empty, or more parts than vertices.
    """
    place = metis_parts(data.adjacency, parts)
    counts = np.bincount(place, minlength=parts)
    if not counts.all():
        raise PartitionError(
            f"partition: METIS leaves part {int(np.argmin(counts))} of {parts} empty, of"
            f" {len(place)} vertices; fewer parts needed"
        )
    cuts = (0, *np.cumsum(counts).tolist())
    return data.renumbered(np.argsort(place, kind="stable")), cuts


def metis_parts(edges: Adjacency, parts: int) -> Array:
    """Return the part of each vertex, (vertices) int64; see `renumbered_by_metis`."""
    try:
        import pymetis
    except ImportError as error:
        raise PartitionError(
            f"partitioner 'metis' needs pymetis (pip install soapstone[metis]): {error}"
        ) from error
    check_parts(edges.vertices, parts)
    both = edges.undirected()
    _, found = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(both.indptr, both.indices),
        vweights=1 + edges.in_degrees,
        options=pymetis.Options(seed=0),
    )
    return np.asarray(found, np.int64)
