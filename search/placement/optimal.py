"""Which values stay, for the fewest bytes copied: exact dynamic programming over cached sets.

The recurrence of ROC (Jia, section 4.3, Algorithm 3, corrected), for one order of the nodes: gaps
between touches are taken by their beginnings, each is bridged or not, and a state is what of the
fast memory those bridged leave free from there on, with which values have been copied out before.
States that agree in both are one. Prices of the bytes of each step (Lagrange multipliers of the
capacity) give every state a lower bound on what follows: one that cannot become better than the
best plan known is dropped, which loses nothing. Only where more states are left than `width` is the
search a beam, and the bounds of those left out tell its gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import numpy as np

from soapstone.deadline import Deadline
from soapstone.search.placement.timeline import Gap, Timeline

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int, int], None]  # gaps decided, gaps in all, bytes of the best plan
WIDTHS = (64, 1024, 4096)
_ROUNDS, _LEAST_ROUNDS = 4000, 200  # of prices: at most, and whatever the time
_PATIENCE = (12, 25, 50, 100)  # rounds without a better bound, after which steps are halved


@dataclass(frozen=True)
class Kept:
    """The gaps that are bridged, what that moves, and what no choice goes below; in bytes."""

    gaps: frozenset[Gap]
    moved_bytes: int
    lower_bound_bytes: int

    @property
    def exact(self) -> bool:
        """Whether no choice moves less."""
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
        start: gaps that fit, such as a baseline's; no worse ones are returned.
        widths: the most states kept after each decision, tried in turn until none was left out.
        deadline: when it is over, or at an interrupt, the best so far is returned.
        progress: told how far it is.
    """
    deadline = deadline or Deadline()
    problem = _Problem(known)
    best = known.moved_bytes(start), frozenset(start)
    lower = known.least_bytes
    try:
        for width, (prices, bound) in _attempts(problem, widths, best[0], deadline):
            lower = max(lower, min(best[0], problem.rounded(bound)))
            if lower >= best[0] or deadline.over:
                break
            found, missed = _search(problem, prices, bound, best[0], width, deadline, progress)
            if found is not None:
                best = known.moved_bytes(found), frozenset(found)
            lower = max(lower, problem.rounded(min(missed, best[0])))
    except KeyboardInterrupt:
        deadline.stop()  # what was found is kept
    return Kept(best[1], best[0], min(lower, best[0]))


def _attempts(
    problem: _Problem, widths: Sequence[int], best: int, deadline: Deadline
) -> Iterator[tuple[int, tuple[Array, float]]]:
    """Yield the widths and the prices of searches, with the bounds that the prices prove.

    A beam leaves out other states under other prices, and the tightest tell many states apart the
    least: loose ones often find more.
    """
    known: list[tuple[Array, float]] = []
    for width in widths:
        for number, patience in enumerate(_PATIENCE):
            if number == len(known):
                known.append(problem.prices(best, patience, deadline))
            yield width, known[number]


class _Problem:
    """The gaps that compete for space, as columns of numbers, and the steps where they do.

    Gaps over steps whose room suffices for everything alive are bridged, and not among `gaps`.
    A gap k takes size[k] bytes of the steps low[k] <= step < high[k], and costs fetch[k] if it is
    not bridged; write[k] beside, if it is the first one of its value that is not.
    """

    def __init__(self, known: Timeline) -> None:
        self.known = known
        room = (known.capacity_bytes - known.needs).astype(np.int64)
        load = np.zeros(room.size + 1, dtype=np.int64)
        for gap in known.gaps:
            load[gap.first + 1] += known.padded[gap.value]
            load[gap.last] -= known.padded[gap.value]
        tight = np.nonzero(np.cumsum(load)[:-1] > room)[0]
        ends = [
            (int(low), int(high), gap)
            for gap in known.gaps
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
        self.size = self._per_gap(known.padded)
        self.fetch = self._per_gap(known.nbytes)
        self.write = np.array(
            [known.nbytes[g.value] if known.dirty(g.value) else 0 for g in self.gaps],
            dtype=np.int64,
        )
        numbers = {value: n for n, value in enumerate(dict.fromkeys(g.value for g in self.gaps))}
        self.value = np.array([numbers[gap.value] for gap in self.gaps], dtype=np.int64)
        self.values = len(numbers)
        self.unit = gcd(*(known.nbytes[value] for value in known.touches)) or 1

    def _per_gap(self, sizes: dict[str, int]) -> Array:
        return np.array([sizes[gap.value] for gap in self.gaps], dtype=np.int64)

    def rounded(self, bound: float) -> int:
        """Return the least number of bytes that a plan may move by a bound: all are multiples."""
        return ceil((bound - 0.01 - 1e-11 * abs(bound)) / self.unit) * self.unit

    def per_gap(self, prices: Array) -> Array:
        """Return what each gap pays for its space. prices: float64 (steps,)."""
        sums = np.concatenate([[0.0], np.cumsum(prices)])
        paid: Array = self.size * (sums[self.high] - sums[self.low])
        return paid

    def _costs(self, prices: Array) -> tuple[Array, Array, Array]:
        """Return what gaps pay, and what values do: some gaps not bridged, and all bridged."""
        paid = self.per_gap(prices)
        write = np.zeros(self.values)
        write[self.value] = self.write
        alone = np.bincount(self.value, np.minimum(paid, self.fetch), self.values) + write
        return paid, alone, np.bincount(self.value, paid, self.values)

    def bound(self, prices: Array) -> float:
        """Return the bound that prices prove."""
        _, alone, whole = self._costs(prices)
        return float(self.known.least_bytes + np.minimum(alone, whole).sum() - prices @ self.room)

    def prices(self, best: int, patience: int, deadline: Deadline) -> tuple[Array, float]:
        """Return prices of a byte at each step, and the bound that they prove (subgradients)."""
        prices = np.zeros(self.room.size)
        found, scale, since = (prices, float(self.known.least_bytes)), 1.0, 0
        for number in range(_ROUNDS):
            paid, alone, whole = self._costs(prices)
            bound = self.bound(prices)
            since += 1
            if bound > found[1]:
                found, since = (prices, float(bound)), 0
            if since >= patience:
                scale, since = scale / 2, 0
            bridged = (whole <= alone)[self.value] | (paid <= self.fetch)
            load = np.zeros(self.room.size + 1)
            np.add.at(load, self.low, self.size * bridged)
            np.add.at(load, self.high, -self.size * bridged)
            excess = np.cumsum(load)[:-1] - self.room
            excess[(prices == 0) & (excess < 0)] = 0
            norm = float(excess @ excess)
            if norm == 0 or scale < 1e-6 or self.rounded(found[1]) >= best:
                break
            if deadline.over and number >= _LEAST_ROUNDS:
                break
            prices = np.maximum(0, prices + scale * max(best - bound, 1.0) / norm * excess)
        return found


def _needed(ends: Sequence[tuple[int, int]], room: list[int]) -> list[int]:
    """Return the steps that matter: all but those where a neighbour holds more in less room."""
    kept = list(range(len(room)))
    while True:
        starts = {int(np.searchsorted(kept, low)) for low, _ in ends}
        stops = {int(np.searchsorted(kept, high)) for _, high in ends}
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


def _search(
    problem: _Problem,
    prices: Array,
    bound: float,
    best: int,
    width: int,
    deadline: Deadline,
    progress: Progress | None,
) -> tuple[set[Gap] | None, float]:
    """Return gaps that move less than `best`, None where none were found, and a lower bound.

    The bound is of all that was left out for the width or for the time; infinite if nothing was.
    """
    count, limit = len(problem.gaps), best - problem.unit + 0.01 + 1e-11 * best
    paid = problem.per_gap(prices)
    rest_fresh, rest_written, following = _rests(problem, paid)
    # Two states are the same if random sums of what they have free are: by 64 bits, wrapping.
    random = np.random.default_rng(0)
    weights = random.integers(-(2**62), 2**62, problem.room.size)
    marks = random.integers(-(2**62), 2**62, problem.values)
    sums = np.concatenate([[0], np.cumsum(weights)])
    taken = problem.size * (sums[problem.high] - sums[problem.low])
    free = problem.room[None, :].copy()
    written = np.zeros((1, problem.values), dtype=bool)
    key = np.zeros(1, dtype=np.int64)
    bounds = np.array([bound])
    passed, missed = 0, np.inf
    history: list[tuple[Array, Array]] = []
    for k in range(count):
        if deadline.over:
            return None, min(missed, float(bounds.min(initial=np.inf)))
        low, high, value = int(problem.low[k]), int(problem.high[k]), int(problem.value[k])
        if low > passed:  # what is free at steps behind serves nobody any more
            bounds = bounds + free[:, passed:low] @ prices[passed:low]
            key = key - free[:, passed:low] @ weights[passed:low]
            free[:, passed:low] = 0
            passed = low
        out = written[:, value]
        now = bounds - np.where(out, rest_written[k], rest_fresh[k])
        after = following[k]
        later_fresh, later_written = (
            (rest_fresh[after], rest_written[after]) if after >= 0 else (0.0, 0.0)
        )
        bridged = now + paid[k] + np.where(out, later_written, later_fresh)
        left = now + problem.fetch[k] + np.where(out, 0, problem.write[k]) + later_written
        fits = free[:, low:high].min(axis=1) >= problem.size[k]
        stay, leave = np.nonzero(fits & (bridged <= limit))[0], np.nonzero(left <= limit)[0]
        more = after >= 0 and problem.write[k] > 0  # whether it matters later that it was written
        key_stay = key[stay] - taken[k : k + 1]
        key_leave = key[leave] + np.where(out[leave] | (not more), 0, marks[value])
        if problem.write[k] > 0 and not more:
            key_stay = key_stay - np.where(out[stay], marks[value], 0)
            key_leave = key_leave - np.where(out[leave], marks[value], 0)
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
        free[bridging, low:high] -= problem.size[k]
        if problem.write[k] > 0:
            written[:, value] = (written[:, value] | ~bridging) if more else False
        history.append((parents.astype(np.int32), bridging))
        if progress is not None:
            progress(k + 1, count, best)
    state = int(np.argmin(bounds + free @ prices)) if count else 0
    kept = set(problem.free)
    for k in range(count - 1, -1, -1):
        parents, bridging = history[k]
        if bridging[state]:
            kept.add(problem.gaps[k])
        state = int(parents[state])
    return kept, missed


def _rests(problem: _Problem, paid: Array) -> tuple[Array, Array, list[int]]:
    """Return, for each gap, the bound of its value's cost from there on, and the value's next gap.

    The first bound is of a value that was never copied out, the second of one that was.
    """
    count = len(problem.gaps)
    fresh, written, following = np.zeros(count), np.zeros(count), [-1] * count
    latest: dict[int, int] = {}
    whole: dict[int, float] = {}
    for k in range(count - 1, -1, -1):
        value = int(problem.value[k])
        after = latest.get(value, -1)
        following[k] = after
        written[k] = min(paid[k], problem.fetch[k]) + (written[after] if after >= 0 else 0.0)
        whole[value] = whole.get(value, 0.0) + paid[k]
        fresh[k] = min(whole[value], problem.write[k] + written[k])
        latest[value] = k
    return fresh, written, following
