"""Which values stay, for the fewest bytes copied: exact dynamic programming over cached sets.

The recurrence of ROC (Jia, section 4.3, Algorithm 3, corrected) for one order of the nodes. Gaps
between touches are decided by their beginnings, each bridged or not. A state is the memory that the
bridged gaps leave free from there on, with the values that have been copied out before; states that
agree in both are merged. Prices for the bytes of each step (Lagrange multipliers of the capacity)
give every state a lower bound of what follows: a state that cannot beat the best known plan is
dropped without loss. Only if more states than `width` remain does the search become a beam, and the
bounds of the dropped states give its gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import numpy as np

from soapstone.deadline import Deadline
from soapstone.ir.tensor import Array
from soapstone.search.placement.timeline import Gap, Timeline

Progress = Callable[[int, int, int], None]  # gaps decided, gaps in all, bytes of the best plan
WIDTHS = (64, 1024, 4096)
_ROUNDS, _LEAST_ROUNDS = 4000, 200  # of prices: at most, and whatever the time
_PATIENCE = (12, 25, 50, 100)  # rounds without a better bound, after which steps are halved


@dataclass(frozen=True)
class Kept:
    """The gaps that are bridged, the bytes that are then copied, and a lower bound of them."""

    gaps: frozenset[Gap]
    moved_bytes: int
    lower_bound_bytes: int

    @property
    def exact(self) -> bool:
        """Whether no choice copies less."""
        return self.moved_bytes == self.lower_bound_bytes


def fewest_bytes(
    known: Timeline,
    start: set[Gap],
    *,
    widths: Sequence[int] = WIDTHS,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
) -> Kept:
    """Return the gaps to bridge so that the fewest bytes are copied.

    Args:
        known: the nodes in their order, and the capacity.
        start: gaps that fit, such as a baseline's; the result is never worse.
        widths: the largest numbers of states kept after each decision, tried in turn until no state
            was dropped for them.
        deadline: when it has passed, or at an interrupt, the best so far is returned.
        progress: receives the progress.
    """
    deadline = deadline or Deadline()
    problem, best = Problem(known), _Best(frozenset(start), known.moved_bytes(start))
    lower = known.least_bytes
    try:
        for width, (prices, bound) in _attempts(problem, widths, best, deadline):
            lower = max(lower, min(best.moved, problem.rounded(bound)))
            best.offer(known, problem.greedy(prices))
            if lower >= best.moved or deadline.over:
                break
            if width:
                found, missed = search(
                    problem, prices, bound, best.moved, width, deadline, progress
                )
                if found is not None:
                    best.offer(known, found)
                lower = max(lower, problem.rounded(min(missed, best.moved)))
    except KeyboardInterrupt:
        deadline.stop()  # what was found is kept
    return Kept(best.gaps, best.moved, min(lower, best.moved))


@dataclass
class _Best:
    """The best choice so far, and the bytes that it copies."""

    gaps: frozenset[Gap]
    moved: int

    def offer(self, known: Timeline, gaps: set[Gap]) -> None:
        """Replace the choice if another is better."""
        moved = known.moved_bytes(gaps)
        if moved < self.moved:
            self.gaps, self.moved = frozenset(gaps), moved


def _attempts(
    problem: Problem, widths: Sequence[int], best: _Best, deadline: Deadline
) -> Iterator[tuple[int, tuple[Array, float]]]:
    """Yield the widths and prices of searches, with the bounds that the prices prove.

    The first attempts have few rounds and no search: the greedy choice by worth is nearly optimal
    already, and later ones start from it. Under other prices a beam drops other states, and the
    tightest prices distinguish many states least, so loose ones often find more.
    """
    yield 0, problem.prices(best.moved, _PATIENCE[0], deadline, _LEAST_ROUNDS)
    known: list[tuple[Array, float]] = []
    for width in widths:
        for number, patience in enumerate(_PATIENCE):
            if number == len(known):
                known.append(problem.prices(best.moved, patience, deadline))
            yield width, known[number]


class Problem:
    """The gaps that compete for space, as columns of numbers, and the steps at which they do.

    Gaps over steps with room for everything alive are bridged and are not among `gaps`. Gap k takes
    size[k] bytes of the steps low[k] <= step < high[k], and costs fetch[k] if it is not bridged.
    The last gap of a writing that is not bridged costs dirty[k] in addition.

    known: the nodes, and the capacity. among: the gaps to decide on, by default all. kept: those of
    the others that are bridged.
    """

    def __init__(
        self, known: Timeline, among: Set[Gap] | None = None, kept: Set[Gap] = frozenset()
    ) -> None:
        room = known.room
        chosen = known.gaps if among is None else [gap for gap in known.gaps if gap in among]
        out: dict[tuple[str, int], int] = {}  # bytes that are copied out whatever is decided
        self.least = known.least_bytes
        if among is not None:
            rest = [gap for gap in known.gaps if gap not in among]
            room -= known.load([gap for gap in rest if gap in kept])
            for gap in rest:
                if gap not in kept:
                    price = known.prices[gap]
                    key = gap.value, price.version
                    self.least += price.fetch
                    out[key] = max(out.get(key, 0), price.dirty)
            self.least += sum(out.values())
        tight = np.nonzero(known.load(chosen) > room)[0]
        ends = [
            (int(low), int(high), gap)
            for gap in chosen
            for low, high in [np.searchsorted(tight, (gap.first + 1, gap.last))]
        ]
        self.free = {gap for low, high, gap in ends if low == high}
        columns = _needed([e[:2] for e in ends if e[0] < e[1]], room[tight].tolist())
        self.room = room[tight][columns]
        rows = sorted(
            (*np.searchsorted(columns, (low, high)).tolist(), gap)
            for low, high, gap in ends
            if low < high
        )
        self.low = np.array([low for low, _, _ in rows], dtype=np.int64)
        self.high = np.array([high for _, high, _ in rows], dtype=np.int64)
        self.gaps = [gap for _, _, gap in rows]
        prices = [known.prices[gap] for gap in self.gaps]
        written = [(gap.value, price.version) for gap, price in zip(self.gaps, prices)]
        self.size = np.array([known.padded[gap.value] for gap in self.gaps], dtype=np.int64)
        self.fetch = np.array([price.fetch for price in prices], dtype=np.int64)
        self.dirty = np.array(
            [max(0, p.dirty - out.get(key, 0)) for p, key in zip(prices, written)], dtype=np.int64
        )
        numbers = {key: n for n, key in enumerate(dict.fromkeys(written))}
        self.group = np.array([numbers[key] for key in written], dtype=np.int64)
        self.groups = len(numbers)
        self.lead = np.full(self.groups, np.inf)
        np.minimum.at(self.lead, self.group, self.dirty)
        unit = gcd(*(n for p in known.prices.values() for n in (p.fetch, p.dirty)), self.least)
        self.unit = unit or 1

    def rounded(self, bound: float) -> int:
        """Return the least bytes that a plan may copy by a bound: multiples of `unit`."""
        return ceil((bound - 0.01 - 1e-11 * abs(bound)) / self.unit) * self.unit

    def per_gap(self, prices: Array) -> Array:
        """Return the price of each gap's space. prices: float64 (steps,)."""
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        paid: Array = self.size * (sums[self.high] - sums[self.low])
        return paid

    def _costs(self, prices: Array) -> tuple[Array, Array, Array]:
        """Return what gaps pay, and writings: with some gaps not bridged, and with all bridged."""
        paid = self.per_gap(prices)
        alone = np.bincount(self.group, np.minimum(paid, self.fetch), self.groups) + self.lead
        return paid, alone, np.bincount(self.group, paid, self.groups)

    def bound(self, prices: Array) -> float:
        """Return the bound that prices prove."""
        _, alone, whole = self._costs(prices)
        return float(self.least + np.minimum(alone, whole).sum() - prices @ self.room)

    def prices(
        self, best: int, patience: int, deadline: Deadline, rounds: int = _ROUNDS
    ) -> tuple[Array, float]:
        """Return prices of a byte at each step and the bound that they prove, by subgradients."""
        prices = np.zeros(self.room.size)
        found, scale, since = (prices, float(self.least)), 1.0, 0
        for number in range(rounds):
            paid, alone, whole = self._costs(prices)
            bound = float(self.least + np.minimum(alone, whole).sum() - prices @ self.room)
            since += 1
            if bound > found[1]:
                found, since = (prices, bound), 0
            if since >= patience:
                scale, since = scale / 2, 0
            bridged = (whole <= alone)[self.group] | (paid <= self.fetch)
            taken = self.size * bridged
            steps = self.room.size + 1
            load = np.bincount(self.low, taken, steps) - np.bincount(self.high, taken, steps)
            excess = np.cumsum(load)[:-1] - self.room
            excess[(prices == 0) & (excess < 0)] = 0
            norm = float(excess @ excess)
            if norm == 0 or scale < 1e-6 or self.rounded(found[1]) >= best:
                break
            if deadline.over and number >= _LEAST_ROUNDS:
                break
            prices = np.maximum(0, prices + scale * max(best - bound, 1.0) / norm * excess)
        return found

    def worth(self, prices: Array) -> Array:
        """Return what each gap saves beyond the price of its space. prices: float64 (steps,)."""
        members = np.bincount(self.group, minlength=self.groups)
        saved: Array = (self.fetch + self.dirty / members[self.group]) / np.maximum(
            self.per_gap(prices), 1.0
        )
        return saved

    def greedy(self, prices: Array) -> set[Gap]:
        """Return gaps to bridge, in the order of their worth as long as they fit."""
        room, kept = self.room.copy(), set(self.free)
        for k in np.argsort(-self.worth(prices), kind="stable").tolist():
            part = room[self.low[k] : self.high[k]]
            if part.min() >= self.size[k]:
                part -= self.size[k]
                kept.add(self.gaps[k])
        return kept


def _needed(ends: Sequence[tuple[int, int]], room: list[int]) -> list[int]:
    """Return the relevant steps: no neighbour of theirs holds more gaps in less room."""
    kept = list(range(len(room)))
    lows, highs = (sorted(set(side)) for side in (zip(*ends) if ends else ((), ())))
    while True:
        starts = set(np.searchsorted(kept, lows).tolist())
        stops = set(np.searchsorted(kept, highs).tolist())
        implied: list[int] = []
        for place in range(1, len(kept)):
            if implied and implied[-1] == place - 1:
                continue
            before, here = room[kept[place - 1]], room[kept[place]]
            if place not in stops and before >= here:
                implied.append(place - 1)
            elif place not in starts and here >= before:
                implied.append(place)
        if not implied:
            return kept
        gone = set(implied)
        kept = [step for place, step in enumerate(kept) if place not in gone]


def search(
    problem: Problem,
    prices: Array,
    bound: float,
    best: int,
    width: int,
    deadline: Deadline,
    progress: Progress | None = None,
) -> tuple[set[Gap] | None, float]:
    """Return gaps that copy less than `best` bytes, None if none were found, and a lower bound.

    The bound is that of all states dropped for the width or the time; infinite if there were none.
    """
    count, limit = len(problem.gaps), best - problem.unit + 0.01 + 1e-11 * best
    paid = problem.per_gap(prices)
    whole, apart, following = _rests(problem, paid)
    columns, levels = _columns(problem, following)
    # Two states are the same if random sums of what they have free are: by 64 bits, wrapping.
    random = np.random.default_rng(0)
    weights = random.integers(-(2**62), 2**62, problem.room.size)
    marks = random.integers(-(2**62), 2**62, problem.groups)
    sums = np.concatenate([[0], np.cumsum(weights)])
    taken = problem.size * (sums[problem.high] - sums[problem.low])
    first = reach = 0  # of the steps where states differ, which are the columns of `free`
    free = np.zeros((1, 0), dtype=np.int64)
    written = np.zeros((1, max(columns, default=-1) + 1), dtype=np.uint16)  # levels
    key = np.zeros(1, dtype=np.int64)
    bounds = np.array([bound])
    missed = np.inf
    history: list[tuple[Array, Array]] = []
    for k in range(count):
        if deadline.over:
            return None, min(missed, float(bounds.min(initial=np.inf)))
        low, high, group = int(problem.low[k]), int(problem.high[k]), int(problem.group[k])
        if high > reach:
            more = np.broadcast_to(problem.room[reach:high], (len(free), high - reach))
            free, reach = np.hstack([free, more]), high
        if low > first:  # what is free at steps behind serves nobody any more
            bounds = bounds + free[:, : low - first] @ prices[first:low]
            key = key - free[:, : low - first] @ weights[first:low]
            free, first = free[:, low - first :], low
        column, after = columns[k], following[k]
        dirty, fetch = float(problem.dirty[k]), float(problem.fetch[k])
        level = written[:, column] if column >= 0 else np.zeros(len(free), np.uint16)
        known = levels[k]
        out = known[level]  # bytes copied out before

        def rest(k: int, out: Any) -> Any:
            """Bound what a writing costs from a gap on, when so much of it was copied out."""
            return np.minimum(whole[k], apart[k] + np.maximum(0, problem.dirty[k] - out))

        now = bounds - rest(k, out)
        bridged = now + paid[k] + (rest(after, out) if after >= 0 else 0.0)
        left = now + fetch + (dirty - out) + (rest(after, dirty) if after >= 0 else 0.0)
        fits = free[:, : high - low].min(axis=1) >= problem.size[k]
        stay, leave = np.nonzero(fits & (bridged <= limit))[0], np.nonzero(left <= limit)[0]
        reached = int(np.searchsorted(known, problem.dirty[k]))
        key_stay, key_leave = key[stay] - taken[k : k + 1], key[leave]
        if column >= 0:  # whether something was copied out is forgotten where it is no more asked
            key_leave = key_leave + marks[group] * ((reached if after >= 0 else 0) - level[leave])
            if after < 0:
                key_stay = key_stay - marks[group] * level[stay].astype(np.int64)
        parents = np.concatenate([stay, leave])
        bounds = np.concatenate([bridged[stay], left[leave]])
        key = np.concatenate([key_stay, key_leave])
        order = np.argsort(bounds, kind="stable")
        _, firsts = np.unique(key[order], return_index=True)
        chosen = order[np.sort(firsts)]
        if chosen.size > width:
            missed = min(missed, float(bounds[chosen[width]]))
            chosen = chosen[:width]
        if not chosen.size:
            return None, missed
        parents, bounds, key = parents[chosen], bounds[chosen], key[chosen]
        bridging = chosen < stay.size
        free, written = free[parents], written[parents]
        free[bridging, : high - low] -= problem.size[k]
        if column >= 0:
            if after < 0:
                written[:, column] = 0
            else:
                written[~bridging, column] = reached
        history.append((parents.astype(np.int32), bridging))
        if progress is not None:
            progress(k + 1, count, best)
    total = bounds + free @ prices[first:reach]  # what is left free after the last gap counts too
    state = int(np.argmin(total))
    if total[state] > limit:
        return None, missed
    kept = set(problem.free)
    for k in range(count - 1, -1, -1):
        parents, bridging = history[k]
        if bridging[state]:
            kept.add(problem.gaps[k])
        state = int(parents[state])
    return kept, missed


def _rests(problem: Problem, paid: Array) -> tuple[Array, Array, list[int]]:
    """Return, for each gap, two bounds of its writing's cost from there on, and its next gap.

    The first is with all gaps bridged, the second with some not, without the bytes copied out.
    """
    count = len(problem.gaps)
    whole, apart, following = np.zeros(count), np.zeros(count), [-1] * count
    latest: dict[int, int] = {}
    for k in range(count - 1, -1, -1):
        group = int(problem.group[k])
        after = latest.get(group, -1)
        following[k] = after
        apart[k] = min(paid[k], problem.fetch[k]) + (apart[after] if after >= 0 else 0.0)
        whole[k] = paid[k] + (whole[after] if after >= 0 else 0.0)
        latest[group] = k
    return whole, apart, following


def _columns(problem: Problem, following: Sequence[int]) -> tuple[list[int], list[Array]]:
    """Return, for each gap, the column in which states record how much was copied out.

    That is of the gap's writing; -1: none. A column serves one writing after another. Also returns
    the bytes of its levels.
    """
    count = len(problem.gaps)
    places, levels = [-1] * count, [np.zeros(1)] * count
    unused: list[int] = []
    made = 0
    steps: dict[int, Array] = {}
    begun: dict[int, int] = {}
    by_group: dict[int, list[int]] = {}
    for k in range(count):
        by_group.setdefault(int(problem.group[k]), []).append(k)
    for group, members in by_group.items():
        steps[group] = np.unique([0, *problem.dirty[members].tolist()])
    for k in range(count):
        group = int(problem.group[k])
        levels[k] = steps[group]
        if len(by_group[group]) < 2 or steps[group].size < 2:
            continue
        if group not in begun:
            if not unused:
                unused.append(made)
                made += 1
            begun[group] = unused.pop()
        places[k] = begun[group]
        if following[k] < 0:
            unused.append(begun[group])
    return places, levels
