"""Which partial points can still become points of the frontier, by bounds of the whole.

Complete points that are known leave corners: a complete point that none of them covers is at most
equal to a corner in both totals. For several weights there is a lower bound of what a class, or a
partial point, comes to; what lies beyond each corner for one of them goes. In (1 + eps) mode known
points cover what costs 1/(1 + eps) of theirs, and corners are that much nearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.search.parallel.frontier.algebra import reduce
from soapstone.search.parallel.frontier.eliminate import Joining, Leaves, Table
from soapstone.search.parallel.frontier.relaxation import NEVER, Relaxation, weighted
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Point, Problem, added
from soapstone.search.parallel.problem.arrays import Array
from soapstone.search.parallel.problem.compiling import entry

MARGIN = 1e-9  # by which sums of floating-point numbers may be off
STEPS = 1_000_000_000  # sums for bounds of cells at most, each way
ROOM = 1 << 25  # bounds of cells that are kept at most, all weights together


@entry
def lowest(cells: Array, steps: Array, a: Array, b: Array, made: Array) -> None:
    """Write the least weighted sums of a join: (cells, weights)."""
    weights = made.shape[1]
    for cell in range(made.shape[0]):
        for at in range(weights):
            made[cell, at] = NEVER
        for step in range(steps.shape[0]):
            i, j = cells[cell, 0] + steps[step, 0], cells[cell, 1] + steps[step, 1]
            for at in range(weights):
                cost = a[i, at] + b[j, at]
                made[cell, at] = cost if cost < made[cell, at] else made[cell, at]


@entry
def outside(
    cells: Array, steps: Array, a: Array, b: Array, out: Array, out_a: Array, out_b: Array
) -> None:
    """Write the least weighted sums of all that is not of one table, nor of the other."""
    weights = out.shape[1]
    for cell in range(out.shape[0]):
        for step in range(steps.shape[0]):
            i, j = cells[cell, 0] + steps[step, 0], cells[cell, 1] + steps[step, 1]
            for at in range(weights):
                cost = out[cell, at] + b[j, at]
                out_a[i, at] = cost if cost < out_a[i, at] else out_a[i, at]
                cost = out[cell, at] + a[i, at]
                out_b[j, at] = cost if cost < out_b[j, at] else out_b[j, at]


@entry
def reachable(
    start: Array, costs: Array, bounds: Array, weights: Array, corners: Array, keep: Array
) -> None:
    """Write which points of a table may come to less than a corner.

    Args:
        start, costs: (points, 2) of totals. bounds: (cells, weights) of what else there is.
        weights: (weights, 2), the first of the first total alone, the second of the second.
        corners: (corners, 2), ascending in the first total. keep: (points,).
    """
    many = corners.shape[0]
    for cell in range(start.shape[0] - 1):
        hint = 0
        for point in range(start[cell], start[cell + 1]):
            x, y = np.float64(costs[point, 0]), np.float64(costs[point, 1])
            keep[point] = False
            low, high, need = 0, many, x * weights[0, 0] + bounds[cell, 0]
            while low < high:
                middle = (low + high) // 2
                if corners[middle, 0] * weights[0, 0] < need:
                    low = middle + 1
                else:
                    high = middle
            for corner in range(low, many):
                right, up = corners[corner, 0], corners[corner, 1]
                if up * weights[1, 1] < y * weights[1, 1] + bounds[cell, 1]:
                    break
                if (right - x) * weights[hint, 0] + (up - y) * weights[hint, 1] < bounds[
                    cell, hint
                ]:
                    continue
                good = True
                for at in range(2, weights.shape[0]):
                    rest = (right - x) * weights[at, 0] + (up - y) * weights[at, 1]
                    if rest < bounds[cell, at]:
                        good, hint = False, at
                        break
                if good:
                    keep[point] = True
                    break


@entry
def uncovered(start: Array, costs: Array, bounds: Array, known: Array, keep: Array) -> None:
    """Write which points, with the least of each total, are not covered by known ones."""
    for cell in range(start.shape[0] - 1):
        for point in range(start[cell], start[cell + 1]):
            keep[point] = True
            for other in range(known.shape[0]):
                covered = True
                for at in range(costs.shape[1]):
                    if known[other, at] > costs[point, at] + bounds[cell, at]:
                        covered = False
                        break
                if covered:
                    keep[point] = False
                    break


@dataclass
class Known:
    """Complete points, a frontier of totals."""

    costs: Array
    configurations: Array
    choices: Array
    edge_choices: Array

    @classmethod
    def none(cls, problem: Problem) -> Known:
        """Return no points."""
        n, edges = len(problem.operators), len(problem.edges)
        shapes = ((0, problem.summing.shape[1]), (0, n), (0, n), (0, edges))
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def with_points(self, *points: Array) -> Known:
        """Return the frontier with other points: arrays as there are attributes."""
        mine = (self.costs, self.configurations, self.choices, self.edge_choices)
        every = [np.concatenate(pair) for pair in zip(mine, points)]
        order = reduce(every[0])
        return Known(*(each[order] for each in every))

    def corners(self, eps: float) -> Array:
        """Return corners of two totals: what is not covered is at most equal to one."""
        near = np.ceil(self.costs / (1 + eps)) - 1
        far = float(1 << 60)
        right = np.concatenate([near[:, 0], [far]])
        up = np.concatenate([[far], near[:, 1]])
        return np.stack([right, up], 1)


class Pruning:
    """Bounds for weights of totals, and what they leave of tables.

    Attributes:
        known: complete points. tried: (assignments, operators), configurations that were good.
        weights: (weights, totals) for which there are bounds, those of one total alone first.
        least: (weights,) of all points. bounds: (configurations, weights) of those with each
            configuration, for each operator.
    """

    def __init__(self, problem: Problem, eps: float) -> None:
        self.problem, self.eps = problem, eps
        self.known = Known.none(problem)
        self.tried = np.zeros((0, len(problem.operators)), np.int64)
        totals = problem.summing.shape[1]
        self.weights, self.least = np.zeros((0, totals)), np.zeros(0)
        self.bounds = [np.zeros((len(item.costs), 0)) for item in problem.operators]
        adds = np.array([monoid == "sum" for monoid in problem.monoids])
        self.adding = problem.summing * adds[:, None]  # (coordinates, totals)

    def learn(self, leaves: Leaves, weights: Array, run: Any = map) -> None:
        """Get bounds for more weights of totals, and good points.

        Args:
            run: as `map`, several at a time.
        """
        relaxation, rows = Relaxation(leaves), []
        found = list(run(lambda weight: relaxation.bound(self.adding @ weight), weights))
        for weight, (_, _, chosen) in zip(weights, found):
            for row in np.unique(chosen, axis=0):
                at = relaxation.points(row, self.adding @ weight)
                if at is not None:
                    rows.append(self._complete(leaves, at))
        ends = np.cumsum([table.size for table in leaves.operators])[:-1]
        every = np.split(np.stack([bounds for _, bounds, _ in found], 1), ends)
        for op, (bounds, of) in enumerate(zip(every, leaves.classes)):
            dead = np.full((1, len(weights)), NEVER)
            new = np.concatenate([bounds, dead])[of]
            self.bounds[op] = np.concatenate([self.bounds[op], new], 1)
        self.weights = np.concatenate([self.weights, weights])
        self.least = np.append(self.least, [least for least, _, _ in found])
        if rows:
            complete = [np.array(each, np.int64) for each in zip(*rows)]
            self.known = self.known.with_points(*complete)
            self.tried = np.unique(np.concatenate([self.tried, complete[1]]), axis=0)

    def _complete(self, leaves: Leaves, at: Sequence[Any]) -> tuple[list[int], ...]:
        count = len(leaves.operators)
        own = [table.origins[i].tolist() for table, i in zip(leaves.operators, at)]
        edges = [int(table.origins[i, 1]) for table, i in zip(leaves.edges, at[count:])]
        point = Point((), tuple(c for c, _ in own), tuple(c for _, c in own), tuple(edges))
        costs = added(self.problem, point)
        return [*costs], [*point.configurations], [*point.choices], edges

    def keep(self, start: Array, totals: Array, bounds: Array, weights: Array) -> Array:
        """Return which points of a table, by totals, can come to what is not known.

        Args:
            bounds: (cells, weights).
        """
        keep = np.ones(len(totals), np.bool_)
        if not len(self.known.costs):
            return keep
        off = MARGIN * (weights @ self.known.costs.max(0))
        bounds = bounds - MARGIN * np.abs(bounds) - off
        if totals.shape[1] == 2:
            args = (np.ascontiguousarray(bounds), weights, self.known.corners(self.eps), keep)
            reachable(start, totals, *args)
        else:
            scale = weights[range(totals.shape[1]), range(totals.shape[1])]
            least = np.ceil(np.maximum(bounds[:, : totals.shape[1]] / scale, 0))
            least = np.minimum(least, float(1 << 60)).astype(np.int64)
            near = np.ceil(self.known.costs / (1 + self.eps)).astype(np.int64)
            uncovered(start, totals, least, near, keep)
        return keep

    def narrow(self, alive: list[Array]) -> None:
        """Leave out configurations that are part of nothing that is not known."""
        for live, bounds in zip(alive, self.bounds):
            where = np.flatnonzero(live)
            none = np.zeros((len(where), self.weights.shape[1]), np.int64)
            start = np.arange(len(where) + 1)
            live[where] = self.keep(start, none, bounds[where], self.weights)

    def slopes(self, many: int) -> Array:
        """Return weights of totals for which to get bounds: none if those there are say enough.

        At first each total alone, and mixtures; then normals of the hull of known points, where
        bounds do not say that nothing is beyond these.
        """
        totals, costs = self.weights.shape[1], self.known.costs
        if not len(self.weights):
            spread = np.maximum(self._magnitudes(), 1.0)
            mixes = np.linspace(0, 1, many + 2)[1:-1] if totals == 2 else np.array([0.5])
            mixed = [
                [share, 1 - share] if totals == 2 else [1 / totals] * totals for share in mixes
            ]
            return np.array([*np.eye(totals).tolist(), *mixed][: totals + many]) / spread
        if totals != 2 or len(costs) < 2:
            return np.zeros((0, totals))
        hull = _hull(costs)
        steps = np.diff(hull, axis=0)
        normals = np.stack([-steps[:, 1], steps[:, 0]], 1)
        normals /= np.abs(normals @ np.ptp(hull, 0))[:, None] + 1e-300
        corners = self.known.corners(self.eps)[1:-1]
        sums = corners @ self.weights.T
        open_ = (sums >= self.least - MARGIN * np.abs(self.least)).all(1)
        edges = np.searchsorted(hull[1:-1, 0], corners[open_, 0])
        edges = np.unique(edges)
        ratios = np.sort(self.weights[:, 0] / np.maximum(self.weights.sum(1), 1e-300))
        mine = normals[edges, 0] / normals[edges].sum(1)
        near = np.abs(ratios[None, :] - mine[:, None]).min(1, initial=1.0)
        edges = edges[near > 1e-12]
        if len(edges) > many:
            edges = edges[np.linspace(0, len(edges) - 1, many).round().astype(int)]
        chosen: Array = normals[edges]
        return chosen

    def spread(self, many: int) -> Array:
        """Return some of the weights that there are, each total alone among them."""
        totals = self.weights.shape[1]
        rest = self.weights[totals:]
        ratios = rest[:, 0] / rest.sum(1)
        order = np.argsort(ratios, kind="stable")
        if len(order) > many:
            order = order[np.linspace(0, len(order) - 1, many).round().astype(int)]
        return np.concatenate([self.weights[:totals], rest[order]])

    def _magnitudes(self) -> Array:
        """Return about what each total may come to."""
        tables = [each.costs for each in self.problem.operators]
        tables += [each.costs for each in self.problem.edges if each.costs.size]
        least = [
            np.median(np.where(costs < INFEASIBLE, costs, 0).reshape(-1, costs.shape[-1]), 0)
            for costs in tables
        ]
        return np.asarray(np.sum(least, axis=0) @ self.adding, float)


def _hull(costs: Array) -> Array:
    """Return the lower convex hull of a frontier of two totals."""
    found: list[Array] = []
    for point in costs.astype(float):
        while len(found) > 1:
            (a, b), (c, d) = found[-1] - found[-2], point - found[-2]
            if a * d - b * c > 0:
                break
            found.pop()
        found.append(point)
    return np.array(found)


class Cells:
    """Bounds of what is outside of each table of a plan, cell by cell, for weights."""

    def __init__(self, pruning: Pruning, joining: Joining, leaves: Leaves, weights: Array) -> None:
        tables = [*leaves.operators, *leaves.edges]
        size = sum(table.size for table in (*tables, *joining.made))
        totals = weights.shape[1]
        steps = sum(table.size * len(table.steps) for table in joining.made)
        many = min(ROOM // max(1, size), STEPS // max(1, steps)) - totals
        self.weights = weights[:totals]
        if many > 0:
            rest = np.linspace(totals, len(weights) - 1, min(many, len(weights) - totals))
            self.weights = weights[[*range(totals), *rest.round().astype(int)]]
        halves = [self.weights]
        if joining.pool is not None and len(self.weights) > 3:
            halves = [self.weights[::2], self.weights[1::2]]
        run: Any = map if joining.pool is None else joining.pool.map
        parts = list(run(lambda part: _outside(pruning, joining, tables, part), halves))
        self.of: dict[int, Array] = {}
        for key in parts[0]:
            made = np.empty((len(parts[0][key]), len(self.weights)))
            for at, part in enumerate(parts):
                made[:, at :: len(parts)] = part[key]
            self.of[key] = made


def _outside(
    pruning: Pruning, joining: Joining, tables: Sequence[Table], weights: Array
) -> dict[int, Array]:
    coordinates = (pruning.adding @ weights.T).T.copy()
    inner: dict[int, Array] = {}

    def of(table: Table) -> Array:
        if id(table) not in inner:
            made = np.empty((len(weights), len(table.start) - 1))
            for at, weight in enumerate(coordinates):
                weighted(table.start, table.costs, weight, made[at])
            inner[id(table)] = np.ascontiguousarray(made.T)
        return inner[id(table)]

    for table in joining.made:
        a, b = (of(part) for part in table.parts)
        inner[id(table)] = np.empty((table.size, len(weights)))
        lowest(table.cells, table.steps, a, b, inner[id(table)])
    found = {id(joining.made[-1]): np.zeros((1, len(weights)))} if joining.made else {}
    for table in reversed(joining.made):
        a, b = (of(part) for part in table.parts)
        out_a, out_b = np.full_like(a, NEVER), np.full_like(b, NEVER)
        outside(table.cells, table.steps, a, b, found[id(table)], out_a, out_b)
        for part, out in zip(table.parts, (out_a, out_b)):
            found[id(part)] = out
    return found
