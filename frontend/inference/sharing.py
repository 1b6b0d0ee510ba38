"""How many threads the next run has, while other processes have some of the cores.

A team of threads is as fast as its slowest member: with one core of two taken, a run takes twice as
long, while a single thread would take what it always does. No counter that is there everywhere
tells who else computes, but runs do: where they become slow, fewer threads are tried, and kept
while they are faster; more are tried again and again, less often each time in vain.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference.session import InferenceSession

Run = Callable[[Mapping[str, Array], Mapping[str, Any]], dict[str, Array]]

_FEW, _TRIES = 5, 3  # runs of which the middle one counts, and runs of a trial, the first not
_SLOW = 1.3  # times the best
_FEWER, _MORE = 0.9, 1.05  # of what it was: what fewer threads, and more, must reach
_SOON, _LATE = 8, 128  # runs between two trials


def widths(threads: int) -> tuple[int, ...]:
    """Return the numbers of threads that are tried, of so many at most: all, one less, fewer."""
    return tuple(sorted({threads, max(1, threads - 1), max(1, threads // 2), 1}, reverse=True))


class Sharing:
    """Which of some numbers of threads the runs of one shape of inputs have, by what they took.

    Args:
        choices: how many numbers there are, the most threads first.
    """

    def __init__(self, choices: int) -> None:
        self.at = 0  # the number of runs that are no trial
        self._choices = choices
        self._times = [deque[float](maxlen=_FEW) for _ in range(choices)]
        self._best = float("inf")  # middle time of as many threads as now, since that was chosen
        self._trial = -1
        self._whole = float("inf")  # the best with all threads
        self._since, self._wait = 0, _SOON
        self._fewer, self._told = True, False  # which way is next; whether slowness is known

    @property
    def next(self) -> int:
        """The number that the next run should have."""
        return self.at if self._trial < 0 else self._trial

    def took(self, number: int, seconds: float) -> None:
        """Take note of a run with a number of threads."""
        times = self._times[number]
        times.append(seconds)
        if number == self._trial:
            if len(times) == _TRIES:
                self._decide()
        elif self._trial < 0:
            self._since += 1
            if len(self._times[self.at]) == _FEW:
                self._look()

    def _look(self) -> None:
        """Begin a trial, if it is time for one."""
        now = statistics.median(self._times[self.at])
        self._best = min(self._best, now)
        if self.at == 0:
            self._whole = self._best
        slow = now > _SLOW * self._best
        if slow and self._wait > _SOON and not self._told:
            self._wait, self._told = _SOON, True  # something has changed
        if not slow:
            self._told = False
        if self._since < self._wait or (self.at == 0 and not slow):
            return
        fewer = self.at + 1 < self._choices and (self.at == 0 or self._fewer)
        self._trial, self._fewer = self.at + (1 if fewer else -1), not fewer
        self._times[self._trial].clear()

    def _decide(self) -> None:
        """End a trial."""
        tried = statistics.median(list(self._times[self._trial])[1:])
        gain = _FEWER if self._trial > self.at else _MORE
        if tried < gain * statistics.median(self._times[self.at]):
            self.at, self._wait, self._told = self._trial, _SOON, False
            self._best = self._whole if self.at == 0 else float("inf")
        else:
            self._wait = min(2 * self._wait, _LATE)
        self._trial, self._since = -1, 0


class Shared:
    """Runs of one session, each by the session itself or by one of fewer threads.

    Args:
        threads: of the session. make: returns one of so many. most: shapes that are told apart.
    """

    def __init__(self, threads: int, make: Callable[[int], InferenceSession], most: int) -> None:
        self._widths, self._make, self._most = widths(threads), make, most
        self._sharing: OrderedDict[tuple[tuple[int, ...], ...], Sharing] = OrderedDict()
        self._bound: dict[tuple[int, object], Future[object]] = {}
        self._pool = ThreadPoolExecutor(1, "binds fewer threads")
        self.sessions: dict[int, InferenceSession] = {}  # of fewer threads, by the number

    def run(
        self, whole: Run, given: Mapping[str, Array], out: Mapping[str, Any]
    ) -> dict[str, Array]:
        """Return the outputs by name. whole: runs with all threads. given, out: what it takes."""
        key = tuple(array.shape for array in given.values())
        sharing = self._sharing.setdefault(key, Sharing(len(self._widths)))
        self._sharing.move_to_end(key)
        if len(self._sharing) > self._most:
            gone, _ = self._sharing.popitem(last=False)
            for narrow in range(len(self._widths)):
                self._bound.pop((narrow, gone), None)
        number = sharing.next
        if number and not self._ready(number, key, given):
            number = sharing.at
        run = self.sessions[number]._run if number else whole
        start = time.perf_counter()
        found = run(given, out)
        sharing.took(number, time.perf_counter() - start)
        return found

    def _ready(self, number: int, key: object, given: Mapping[str, Array]) -> bool:
        """Return whether a session of fewer threads is bound; else a thread is at it meanwhile."""
        if number not in self.sessions:
            self.sessions[number] = self._make(self._widths[number])
        if (number, key) not in self._bound:
            kept = {name: array.copy() for name, array in given.items()}
            self._bound[number, key] = self._pool.submit(self.sessions[number]._run, kept, {})
        done = self._bound[number, key]
        return done.done() and done.exception() is None

    def close(self) -> None:
        """Close the sessions of fewer threads."""
        self._pool.shutdown()
        for session in self.sessions.values():
            session.close()
