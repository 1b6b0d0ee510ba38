"""Pruning of partial points by lower bounds: branch and bound with two objectives.

A *complete* point is the total cost of a strategy for all operators, a *partial* one that of a few
of them. A point is *covered* by another that costs no more in any total; within an error eps, by
one that costs at most 1 + eps times as much. The steps between the complete points that are known
have *corners*: a complete point that none of them covers is at or below some corner in both totals.

For several weightings of the totals, `relaxation.py` gives a lower bound of the weighted sum of
every strategy that contains a class of configurations, or a partial point. What one weighting shows
to lie above every corner cannot become a new point of the frontier, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.algebra import reduce
from soapstone.search.parallel.frontier.leaves import Leaves
from soapstone.search.parallel.frontier.relaxation import NEVER, Relaxation
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Point, Problem, added
from soapstone.search.parallel.problem.compiling import compiled, entry

MARGIN = 1e-9  # by which sums of floating-point numbers may be off
TURNS = 3  # updates of shares for each weight, unless
EVEN = 1.2  # no block is this many times above the weighted mean
NEAR = 1e-5  # to which a certified error is worked out


@compiled
def _comes_to(costs: Array, point: int, weights: Array, at: int) -> float:
    """Return the weighted sum of a point's costs."""
    total = 0.0
    for coordinate in range(costs.shape[1]):
        total += weights[at, coordinate] * costs[point, coordinate]
    return total


@entry
def reachable(
    start: Array,
    costs: Array,
    bounds: Array,
    weights: Array,
    inside: Array,
    corners: Array,
    keep: Array,
) -> None:
    """Write to `keep` which points of a table may still be part of a point below some corner.

    Args:
        start, costs: (points, coordinates). bounds: (cells, weights) of what else there is.
        weights: (weights, 2), of totals: the first of the first alone, the second of the second.
        inside: (weights, coordinates), of the costs. corners: (corners, 2), ascending in the first
            total. keep: (points,).
    """
    many = corners.shape[0]
    for cell in range(start.shape[0] - 1):
        hint = 0
        for point in range(start[cell], start[cell + 1]):
            keep[point] = False
            low, high, need = 0, many, _comes_to(costs, point, inside, 0) + bounds[cell, 0]
            least = _comes_to(costs, point, inside, 1) + bounds[cell, 1]
            while low < high:
                middle = (low + high) // 2
                if corners[middle, 0] * weights[0, 0] < need:
                    low = middle + 1
                else:
                    high = middle
            for corner in range(low, many):
                right, up = corners[corner, 0], corners[corner, 1]
                if up * weights[1, 1] < least:
                    break
                rest = right * weights[hint, 0] + up * weights[hint, 1]
                if rest < _comes_to(costs, point, inside, hint) + bounds[cell, hint]:
                    continue
                good = True
                for at in range(2, weights.shape[0]):
                    rest = right * weights[at, 0] + up * weights[at, 1]
                    if rest < _comes_to(costs, point, inside, at) + bounds[cell, at]:
                        good, hint = False, at
                        break
                if good:
                    keep[point] = True
                    break


@entry
def uncovered(start: Array, costs: Array, bounds: Array, known: Array, keep: Array) -> None:
    """Write to `keep` which points the known ones do not cover, total by total.

    Args:
        start, costs: the table's, as `Table` has them.
        bounds: (cells, totals), the least of each total outside the table.
        known: (known points, totals).
        keep: (points,), written.
    """
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


@dataclass(eq=False)
class Known:
    """The complete points that are known: the frontier of those found so far, and what was chosen.

    Attributes:
        costs: (points, totals) int64.
        configurations, choices, edge_choices: as a `Result` has them.
    """

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
        """Return the corners, (points + 1, 2), of two totals; uncovered points are at or below one.

        Args:
            eps: the error within which a point counts as covered, as a share of its costs.
        """
        near = np.ceil(self.costs / (1 + eps)) - 1
        far = float(1 << 60)
        right = np.concatenate([near[:, 0], [far]])
        up = np.concatenate([[far], near[:, 1]])
        return np.stack([right, up], 1)


class Pruning:
    """Lower bounds for several weightings of the totals, and what they leave of tables.

    The maximum over blocks is bounded from below by any weighted mean of them, with *shares* that
    add up to one; so a cost of which the largest block counts becomes a sum, too.

    Attributes:
        known: the complete points found so far.
        tried: (assignments, operators), the configurations of good complete points.
        weights: (weightings, totals), for which there are bounds; those of one total alone first.
        shares: (weightings, blocks), the share of each block in the mean.
        summing: which costs each total adds up, as `Problem.summing`.
        largest: (coordinates,), the costs of which the largest block counts.
        work: how many cells of edges' tables were gone through, over all weightings.
        offset: (totals,), what is part of the totals and not of the tables.
        least: (weightings,), lower bounds of the weighted sum of any strategy.
        beyond: further weightings with such bounds, which hold for more strategies than these.
        bounds: for each operator (configurations, weightings), the lower bounds of strategies that
            contain each of its configurations.
    """

    def __init__(self, problem: Problem, eps: float) -> None:
        self.problem, self.eps, self.work = problem, eps, 0
        self.known = Known.none(problem)
        self.tried = np.zeros((0, len(problem.operators)), np.int64)
        totals = problem.summing.shape[1]
        self.weights, self.least = np.zeros((0, totals)), np.zeros(0)
        self.beyond: tuple[Array, Array] = self.weights, self.least
        self.bounds = [np.zeros((len(item.costs), 0)) for item in problem.operators]
        self.summing, self.offset = problem.summing, np.zeros(totals)
        self.largest = np.array([monoid == "max" for monoid in problem.monoids])
        blocks = problem.block_of if self.largest.any() else [0] * len(problem.operators)
        self.block = np.array(blocks, np.int64)
        self.shares = np.zeros((0, max(blocks) + 1))
        self._open_corners: tuple[Any, Array] | None = None

    def learn(
        self, leaves: Leaves, weights: Array, run: Any = map, shares: Array | None = None
    ) -> None:
        """Compute the bounds of more weightings, and keep the complete points met on the way.

        Args:
            leaves: the tables of the problem.
            weights: (weightings, totals).
            run: `map`, or a pool's that runs several at a time.
            shares: (weightings, blocks), to begin with; None: those of the nearest weighting.
        """
        relaxation = Relaxation(leaves, self.block)
        if shares is None:
            shares = np.array([self.near(weight) for weight in weights])
        pairs = list(zip(weights, shares))
        found = list(run(lambda pair: self._bounded(relaxation, *pair), pairs))
        rows = [self._complete(leaves, at) for *_, points in found for at in points]
        ends = np.cumsum([table.size for table in leaves.operators])[:-1]
        every = np.split(np.stack([bounds for _, bounds, *_ in found], 1), ends)
        for op, (bounds, of) in enumerate(zip(every, leaves.classes)):
            dead = np.full((1, len(weights)), NEVER)
            new = np.concatenate([bounds, dead])[of]
            self.bounds[op] = np.concatenate([self.bounds[op], new], 1)
        self.work += len(weights) * sum(table.size for table in leaves.edges)
        self.weights = np.concatenate([self.weights, weights])
        self.shares = np.concatenate([self.shares, [share for _, _, share, _ in found]])
        self.least = np.append(self.least, [least for least, *_ in found])
        if rows:
            complete = [np.array(each, np.int64) for each in zip(*rows)]
            self.known = self.known.with_points(*complete)
            self.tried = np.unique(np.concatenate([self.tried, complete[1]]), axis=0)

    def inside(self, weight: Array, share: Array) -> Array:
        """Return the weights of the costs in each block, (blocks, coordinates), for one weighting.

        Args:
            weight: (totals,).
            share: (blocks,), each block's share in the mean that bounds the largest.
        """
        alone = self.summing @ weight
        return np.where(self.largest, share[:, None] * alone, alone)

    def near(self, weight: Array) -> Array:
        """Return the shares, (blocks,), of the nearest weighting for which there are bounds.

        For the first weighting they are equal among the blocks that cost at least half of the most
        expensive one. They are 0 unless there are two totals, since points are then compared total
        by total.
        """
        if self.weights.shape[1] != 2:
            return np.zeros(self.shares.shape[1])
        if len(self.weights):
            ratios = self.weights[:, 0] / self.weights.sum(1)
            at = int(np.abs(ratios - weight[0] / weight.sum()).argmin())
            return np.asarray(self.shares[at])
        least = np.zeros(self.shares.shape[1])
        for op, item in enumerate(self.problem.operators):
            mine = np.where(item.costs < INFEASIBLE, item.costs, 0)[..., self.largest].max(1)
            least[self.block[op]] += sum(
                column[column > 0].min() for column in mine.T if column.any()
            )
        much = least * 2 >= least.max()
        return np.asarray(much / much.sum())

    def _bounded(
        self, relaxation: Relaxation, weight: Array, share: Array
    ) -> tuple[float, Array, Array, list[Any]]:
        """Return the best bound, those with each class, the shares it took, and complete points."""
        leaves, points = relaxation.leaves, []
        best, every, chosen_share = -np.inf, np.zeros(0), share
        for _ in range(TURNS):
            inside = self.inside(weight, share)
            least, bounds, chosen = relaxation.bound(inside)
            every = np.maximum(every, bounds) if len(every) else bounds
            if least > best:
                best, chosen_share = least, share
            found = [relaxation.points(row, inside) for row in np.unique(chosen, axis=0)]
            last = relaxation.points(chosen[-1], inside)
            points += [at for at in found if at is not None]
            if last is None or not (self.largest.any() and share.any()):
                break
            held = self._held(leaves, last, weight)
            mean = float(share @ held)
            if mean <= 0 or held.max() <= mean * EVEN:
                break
            share = self._alike(leaves, share * (0.5 + 0.5 * held / mean))
        return best, every, chosen_share, points

    def _held(self, leaves: Leaves, at: Sequence[Any], weight: Array) -> Array:
        """Return, (blocks,), what a choice of points costs in each block of the `largest` costs."""
        held = np.zeros(self.shares.shape[1])
        alone = np.where(self.largest, self.summing @ weight, 0.0)
        for table, i in zip((*leaves.operators, *leaves.edges), at):
            held[self.block[table.scope[-1]]] += table.costs[i] @ alone
        return held

    def _alike(self, leaves: Leaves, share: Array) -> Array:
        """Return shares averaged over blocks with equal tables, which then stay equal."""
        kinds: dict[int, list[int]] = {}
        for table in (*leaves.operators, *leaves.edges):
            kinds.setdefault(int(self.block[table.scope[-1]]), []).append(id(table.start))
        alike: dict[tuple[int, ...], list[int]] = {}
        for block, tables in kinds.items():
            alike.setdefault(tuple(tables), []).append(block)
        made = share.copy()
        for blocks in alike.values():
            made[blocks] = share[blocks].mean()
        return np.asarray(made / made.sum())

    def _complete(self, leaves: Leaves, at: Sequence[Any]) -> tuple[list[int], ...]:
        count = len(leaves.operators)
        own = [table.origins[i].tolist() for table, i in zip(leaves.operators, at)]
        edges = [int(table.origins[i, 1]) for table, i in zip(leaves.edges, at[count:])]
        point = Point((), tuple(c for c, _ in own), tuple(c for _, c in own), tuple(edges))
        costs = added(self.problem, point)
        return [*costs], [*point.configurations], [*point.choices], edges

    def keep(self, start: Array, costs: Array, bounds: Array, rows: Array, blocks: Array) -> Array:
        """Return, (points,), which points of a table may be part of a point that is not covered.

        Args:
            start, costs: the table's, as `Table` has them.
            bounds: (cells, rows), lower bounds of all that is outside the table.
            rows: the weightings that `bounds` has, by number.
            blocks: (blocks,), 1 for the blocks that the table belongs to.
        """
        keep = np.ones(len(costs), np.bool_)
        if not len(self.known.costs):
            return keep
        weights = self.weights[rows]
        off = MARGIN * (weights @ self.known.costs.max(0))
        bounds = bounds - MARGIN * np.abs(bounds) - off
        if weights.shape[1] == 2:
            shares = self.shares[rows] @ blocks
            inside = weights @ self.summing.T
            inside = np.where(self.largest, shares[:, None] * inside, inside)
            corners = self.open_corners() - self.offset
            args = (np.ascontiguousarray(bounds), weights, inside, corners, keep)
            reachable(start, np.ascontiguousarray(costs), *args)
        else:
            count = weights.shape[1]
            totals = np.ascontiguousarray(costs @ self.summing)
            scale = weights[range(count), range(count)]
            least = np.ceil(np.maximum(bounds[:, :count] / scale, 0))
            least = np.minimum(least, float(1 << 60)).astype(np.int64)
            near = np.ceil(self.known.costs / (1 + self.eps)).astype(np.int64)
            uncovered(start, totals, least, near, keep)
        return keep

    def level(self, least: int) -> Pruning:
        """Return the pruning of tables without the cost of which the largest block counts.

        Args:
            least: the least that this cost comes to; it becomes a part of `offset`.
        """
        made = copy(self)
        made.summing, made.largest = self.summing[~self.largest], self.largest[~self.largest]
        made.offset = least * self.summing[self.largest][0]
        made.shares, made.block = np.ones((len(self.weights), 1)), 0 * self.block
        return made

    def open_corners(self) -> Array:
        """Return the corners, (corners, 2), below which bounds allow strategies."""
        key = (self.known, len(self.weights), len(self.beyond[0]), self.eps)
        if self._open_corners is None or self._open_corners[0] != key:
            corners = self.known.corners(self.eps)[self.rooms(self.eps)[0] >= 0]
            self._open_corners = key, corners
        return self._open_corners[1]

    def certified(self) -> float:
        """Return the least error eps for which bounds show that known points cover all others.

        It is infinite where they show none up to 1.
        """
        if self.weights.shape[1] != 2 or not len(self.known.costs):
            return math.inf
        low, high = 0.0, 1.0
        if self._open(high):
            return math.inf
        while high - low > NEAR:
            middle = (low + high) / 2
            low, high = (middle, high) if self._open(middle) else (low, middle)
        return high

    def _open(self, eps: float) -> bool:
        """Return whether bounds allow a point that known points do not cover within eps."""
        return bool((self.rooms(eps)[0] >= 0).any())

    def rooms(self, eps: float) -> tuple[Array, Array]:
        """Return how far each corner is above the lower bounds, and by which weightings.

        Returns:
            (corners,), the least distance over all weightings as a share of the bound; where it is
            negative no strategy lies below the corner. (corners, weightings, totals), the
            weightings of each corner, those of the least distance first.
        """
        weights, least = (
            np.concatenate(pair) for pair in zip((self.weights, self.least), self.beyond)
        )
        sums = self.known.corners(eps) @ weights.T
        above = (sums - least) / np.maximum(np.abs(least), 1e-9) + MARGIN
        order = np.argsort(above, 1, kind="stable")
        return np.take_along_axis(above, order[:, :1], 1)[:, 0], weights[order]

    def part(self) -> Pruning:
        """Return the pruning of a part of the strategies, for which no bounds are computed yet."""
        made = Pruning(self.problem, self.eps)
        made.known = self.known
        (weights, least), mine = self.beyond, (self.weights, self.least)
        made.beyond = np.concatenate([mine[0], weights]), np.concatenate([mine[1], least])
        return made

    def narrow(self, alive: list[Array]) -> None:
        """Clear in `alive` the configurations that are part of no strategy that is not covered."""
        for live, bounds in zip(alive, self.bounds):
            where = np.flatnonzero(live)
            none = np.zeros((len(where), len(self.largest)), np.int64)
            start, rows = np.arange(len(where) + 1), np.arange(len(self.weights))
            live[where] = self.keep(start, none, bounds[where], rows, 0 * self.shares[0])

    def slopes(self, many: int) -> Array:
        """Return further weightings to compute bounds for, (at most `many`, totals).

        The first ones are each total alone and even mixtures; later ones are normals of the convex
        hull of known points, where bounds leave room. There are none where they leave none.
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
        """Return numbers of weightings: each total alone, and at most `many` others, spread out."""
        totals = self.weights.shape[1]
        rest = self.weights[totals:]
        ratios = rest[:, 0] / rest.sum(1)
        order = np.argsort(ratios, kind="stable")
        if len(order) > many:
            order = order[np.linspace(0, len(order) - 1, many).round().astype(int)]
        return np.concatenate([np.arange(totals), totals + order])

    def reach(self, near: float) -> int:
        """Return how many points cover the span of the known ones, if each covers 1 + near."""
        if not len(self.known.costs):
            return 0
        ends = np.maximum(self.known.costs[[0, -1]].astype(float), 1.0)
        return int(np.abs(np.log(ends[1] / ends[0])).min() / np.log1p(near))

    def _magnitudes(self) -> Array:
        """Return a rough estimate of each total, (totals,), from the medians of all tables."""
        tables = [each.costs for each in self.problem.operators]
        tables += [each.costs for each in self.problem.edges if each.costs.size]
        least = [
            np.median(np.where(costs < INFEASIBLE, costs, 0).reshape(-1, costs.shape[-1]), 0)
            for costs in tables
        ]
        adding = self.summing * ~self.largest[:, None]
        return np.asarray(np.sum(least, axis=0) @ adding, float)


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
