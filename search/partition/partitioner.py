"""Where a graph is cut while a model runs over it: after each few steps nearer to equal times.

The graph partitioner of ROC (Jia 2020, section 4.4): what each layer took on each part is added to
a regression, from which follow cuts whose costliest part costs least. Besides, both simple ways to
cut are run once, since two partitions tell features apart that one does not, and cuts stay in the
end where the steps that were measured were shortest: learning is then no worse than either. What
else a computer does only makes tasks longer, so the least of several times counts, of steps in
which no processor was taken away if there are some; and a partition of which the prediction is far
off is run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.engine.parallelism import in_blocks
from soapstone.ir.tensor import Array
from soapstone.search.partition.costs import Costs
from soapstone.search.partition.cuts import (
    Cuts,
    PartitionError,
    check_parts,
    equal_edges,
    equal_vertices,
    least_largest,
)
from soapstone.search.partition.features import Features

METHODS = ("learned", "vertex", "edge", "metis")
_WARM = 1  # steps after a cut that are not looked at
_EACH, _MOST = 4, 16  # undisturbed steps of which the least times count; of all, if there are fewer
_ROUNDS = 12  # of steps at one partition, at most
_GAIN = 0.02  # of a step: what cuts are moved for
_MISS = 0.1  # of what was measured: predictions that miss by more are not believed
_SHARES = (0.5, 0.8, 0.95, 1.0)  # by which one layer's costs count for more than the others'


class Partitioner:
    """The cuts of a graph's vertices into consecutive parts, and what they are learned from.

    Attributes:
        cuts: from 0 to the number of vertices. costs: what has been learned so far.
        settled: whether the cuts stay as they are.
        measured: nanoseconds of each layer on each part, (layers, parts), by cuts that were run.
        processors: that have the parts in blocks; by default one each.

    Args:
        features: of the graph. parts: how many.
        method: "learned"; "vertex" for as many vertices in each part, "edge" for as many edges;
            "metis" for given cuts.
        costs: what was learned before, of this graph or others; learning goes on from there.
        given: the cuts of vertices that METIS has numbered.

    Raises:
        PartitionError: more parts than vertices, another method, costs of other layers, or METIS
            without its cuts.
    """

    def __init__(
        self,
        features: Features,
        parts: int,
        method: str = "learned",
        costs: Costs | None = None,
        given: Cuts | None = None,
    ) -> None:
        if method not in METHODS:
            raise PartitionError(
                f"partitioner {method!r} found, one of {', '.join(METHODS)} needed"
            )
        check_parts(features.vertices, parts)
        if (method == "metis") != (given is not None):
            raise PartitionError(
                f"partitioner {method!r} found {'without' if given is None else 'with'} cuts;"
                " those of vertices that METIS has numbered needed"
            )
        if costs is not None:
            costs.check(len(features.widths))
        self.features, self.parts, self.method = features, parts, method
        self.processors = parts
        self.costs = self._known = costs or Costs.of(len(features.widths))
        self.measured: dict[Cuts, Array] = {}
        self.settled = method != "learned" or parts == 1
        self._even = equal_vertices(features.vertices, parts)
        simple = self._even, equal_edges(features.edges, parts)
        self._simple = () if self.costs.count else simple
        learned = method == "learned" and self.costs.count > 0
        self.cuts: Cuts = given or (self._best() if learned else simple[method == "edge"])
        self._steps: list[tuple[bool, Array]] = []
        self._rounds = 0

    def observe(self, ns: Array, disturbed: bool = False) -> bool:
        """Take what a step took, and return whether the cuts have moved.

        ns: (layers, parts), nanoseconds of each layer on each part. disturbed: whether others took
            processors away in the step.
        """
        if self.settled:
            return False
        self._steps.append((disturbed, np.asarray(ns, np.float64)))
        taken = self._steps[_WARM:]
        quiet = [ns for disturbed, ns in taken if not disturbed]
        if len(quiet) < _EACH and len(taken) < _MOST:
            return False
        least = np.min(quiet if len(quiet) >= _EACH else [ns for _, ns in taken], axis=0)
        self._steps.clear()
        self._rounds += 1
        before = self.cuts
        self.measured[before] = np.minimum(least, self.measured.get(before, np.inf))
        self.costs = self._known
        for cuts, ns in self.measured.items():
            self.costs = self.costs.seen(self._parts(cuts), ns)
        self.cuts = self._next()
        return self.cuts != before

    def predicted(self, cuts: Sequence[int] | None = None) -> Array:
        """Return what each layer takes on each part by what was learned: (layers, parts) ns.

        cuts: of other parts than those that are run.
        """
        return self.costs.ns(self._parts(self.cuts if cuts is None else cuts))

    def _parts(self, cuts: Sequence[int]) -> Array:
        devices = in_blocks(self.parts, self.processors)
        return self.features.parts(cuts, (np.diff(devices, prepend=-1) > 0).tolist())

    def __str__(self) -> str:
        vertices, edges = np.diff(self.cuts), np.diff(self.features.edges[list(self.cuts)])
        lines = [f"partition {self.method!r}, {self.parts} parts"]
        columns = ["vertices", "edges"]
        rows = [[f"{count:,}" for count in each] for each in (vertices, edges)]
        if self.cuts in self.measured:
            columns += ["measured us", "predicted us"]
            times = self.measured[self.cuts], self.predicted()
            rows += [[f"{ns / 1e3:,.0f}" for ns in each.sum(axis=0)] for each in times]
            lines[0] += f", learned from {len(self.measured)} partitions"
        lines.append("".join(f"{name:>14}" for name in ("part", *columns)))
        for part, cells in enumerate(zip(*rows)):
            lines.append("".join(f"{cell:>14}" for cell in (part, *cells)))
        return "\n".join(lines)

    def _best(self) -> Cuts:
        """Return the cuts that promise the shortest step.

        Parts wait for each other at each gather, so a part that is short in one layer and long in
        another makes up for nothing. Besides those of all layers' costs, cuts are looked at in
        which one layer counts for more.
        """
        sums, own = self.costs.sums(self.features), self.costs.own(self._parts(self._even))
        mixed = [np.ones(len(sums))]
        if len(sums) > 1:
            mixed += [(1 - share) + share * one for one in np.eye(len(sums)) for share in _SHARES]
        return min(
            (least_largest(shares @ sums, self.parts, shares @ own) for shares in mixed),
            key=lambda cuts: slowest(np.diff(sums[:, list(cuts)], axis=1) + own),
        )

    def _next(self) -> Cuts:
        """Return the cuts to run next; where none promises more, settle for the best so far."""
        fastest = min(self.measured, key=lambda cuts: slowest(self.measured[cuts]))
        untried = [cuts for cuts in self._simple if cuts not in self.measured]
        if untried:
            return untried[0]
        learned = self._best()
        gain = 1 - slowest(self.predicted(learned)) / slowest(self.measured[fastest])
        missed = {cuts: self._miss(cuts) for cuts in self.measured}
        furthest = max(missed, key=lambda cuts: missed[cuts])
        if self._rounds < _ROUNDS and learned not in self.measured and gain >= _GAIN:
            return learned
        if self._rounds < _ROUNDS and missed[furthest] > _MISS:
            return furthest
        self.settled = True
        return fastest

    def _miss(self, cuts: Cuts) -> float:
        """Return by how much predictions of parts that were run miss at most, as a share."""
        measured = self.measured[cuts].sum(axis=0)
        return float(np.abs(self.predicted(cuts).sum(axis=0) / measured - 1).max())


def slowest(ns: Array) -> float:
    """Return what a step takes where all parts of a layer are waited for, nanoseconds.

    ns: (layers, parts), of each layer on each part.
    """
    return float(ns.max(axis=1).sum())
