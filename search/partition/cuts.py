"""Where to cut the vertices of a graph into consecutive ranges: by vertices, by edges, or by cost.

Costs are running sums, so that a range costs a difference, and a cut is found by binary search: for
P parts of V vertices in O(P log V), as in Lux and ROC (Jia 2020, section 4.4.2). Those cut where
the sum passes each share of the total. Here the largest part is made as small as can be: the bound
on it is bisected, each time in O(P log V), which matters where one vertex costs as much as a part.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.dims import equal_cuts
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array

Cuts = tuple[int, ...]  # from 0 to the number of vertices: a part lies between two neighbours

_HALVINGS = 60  # of the bound on a part's cost: beyond what a float tells apart


class PartitionError(GraphError):
    """A partition that cannot be, or costs that are of no use for it."""


def check_parts(vertices: int, parts: int) -> None:
    """Check that vertices can be cut into so many parts of which none is empty.

    Raises:
        PartitionError: more parts than vertices, or none; names both numbers.
    """
    if not 1 <= parts <= vertices:
        raise PartitionError(
            f"partition: {parts} parts found for {vertices} vertices; 1 to {vertices} needed, so"
            " that no part is empty"
        )


def equal_vertices(vertices: int, parts: int) -> Cuts:
    """Return the cuts into parts whose numbers of vertices differ by at most 1.

    Raises:
        PartitionError: more parts than vertices, or none.
    """
    check_parts(vertices, parts)
    return equal_cuts(vertices, parts)


def equal_edges(indptr: Array, parts: int) -> Cuts:
    """Return the cuts that minimise the largest number of edges that lead to one part.

    Args:
        indptr: (vertices + 1), of CSR: the number of edges that lead to earlier vertices.

    Raises:
        PartitionError: more parts than vertices, or none.
    """
    return least_largest(indptr, parts)


def least_largest(sums: Array, parts: int, own: Array | None = None) -> Cuts:
    """Return the cuts that minimise the cost of the costliest part; no part is empty.

    Args:
        sums: (vertices + 1), prefix sums of the vertices' costs, which must not decrease.
        own: (parts), a fixed cost of each part, by default 0. Where it leaves no room for a vertex
            within the optimum, the result may not be optimal.

    Raises:
        PartitionError: more parts than vertices, or none; or sums that decrease.
    """
    sums, vertices = np.asarray(sums, np.float64), len(sums) - 1
    check_parts(vertices, parts)
    costs = np.diff(sums)
    if not np.isfinite(sums).all() or costs.min() < 0:
        vertex = int(np.argmin(np.where(np.isfinite(costs), costs, -np.inf)))
        raise PartitionError(f"partition: cost {costs[vertex]} of vertex {vertex} found, 0 or more")
    own = np.zeros(parts) if own is None else own
    best = equal_vertices(vertices, parts)
    high = _largest(sums, best, own)
    low = max(float(sums[-1] - sums[0] + own.sum()) / parts, float(costs.max() + own.min()))
    for _ in range(_HALVINGS):
        if low >= high:
            break
        bound = (low + high) / 2
        found = _greedy(sums, parts, bound, own)
        largest = _largest(sums, found, own)
        if largest <= bound:
            best, high = found, largest
        else:
            low = bound
    last = _greedy(sums, parts, low, own)  # a bound met exactly, such as one vertex's cost
    return last if _largest(sums, last, own) < high else best


def _greedy(sums: Array, parts: int, bound: float, own: Array) -> Cuts:
    """Return cuts where each part but the last takes what it can within a bound, or one vertex."""
    cuts, vertices = [0], len(sums) - 1
    for part in range(1, parts):
        begin = cuts[-1]
        room = bound - own[part - 1]
        within = int(np.searchsorted(sums, sums[begin] + room, side="right")) - 1
        cuts.append(min(max(within, begin + 1), vertices - (parts - part)))
    return (*cuts, vertices)


def _largest(sums: Array, cuts: Cuts, own: Array) -> float:
    return float((np.diff(sums[list(cuts)]) + own).max())
