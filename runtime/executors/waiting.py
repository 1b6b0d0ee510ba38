"""How long threads of OpenMP look for work before they sleep, by whether others want their cores.

A thread that looks is there at once when its team goes on; one that sleeps has to be woken, which
takes longer than many kernels. But where other processes compute, who looks holds a core that
another of its team may be waiting for. Whether it is so the system tells: how often threads were
taken off their cores. They then look little, and now and again it is tried whether that is over.

GNU's library reads once how often a thread looks (`system.openmp_waiting`), and lets it look little
where all teams together have more threads than there are cores. So a team that never does anything
makes the difference, while there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from soapstone import system
from soapstone.runtime.forks import tell

_WINDOW_S = 0.05  # of runs, after which is counted
_OFTEN = 40.0  # times a second that threads are taken off their cores: where others compute too
_SOON_S, _LATE_S = 0.5, 16.0  # until it is tried again; twice as long each time in vain


class Waiting:
    """Whether threads look for work for long, by what happened in the runs before.

    Args:
        lost: returns how often threads were taken off their cores so far.
        brief: is told that they are to look little, or long again.
    """

    def __init__(self, lost: Callable[[], int], brief: Callable[[bool], None]) -> None:
        self._lost, self._brief = lost, brief
        self.forked()
        tell(self)

    def forked(self) -> None:
        """Begin anew in a child process, which has this thread alone."""
        self._lock = threading.Lock()  # of the workers that have run something; none waits for it
        self._before: int | None = None  # what was lost when a window began
        self._busy_s, self._began = 0.0, 0.0
        self._until, self._wait_s = 0.0, _SOON_S  # when it is tried again; 0: they look long

    def ran(self, seconds: float, now: float) -> None:
        """Take note of a run that took so long and has ended now."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._until:
                self._count(seconds, now)
            elif now >= self._until:
                self._look_long()
        finally:
            self._lock.release()

    def rest(self) -> None:
        """Begin anew: nobody waits any more."""
        with self._lock:
            if self._until:
                self._look_long()
            self._wait_s = _SOON_S

    def _count(self, seconds: float, now: float) -> None:
        if self._before is None:
            self._before, self._busy_s, self._began = self._lost(), 0.0, now
            return
        self._busy_s += seconds
        if self._busy_s < _WINDOW_S:
            return
        lost = self._lost()
        often = (lost - self._before) / (now - self._began) > _OFTEN
        self._before, self._busy_s, self._began = lost, 0.0, now
        if often:
            self._until = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, _LATE_S)
            self._brief(True)
        else:
            self._wait_s = _SOON_S

    def _look_long(self) -> None:
        self._until, self._before = 0.0, None
        self._brief(False)


class Crowd:
    """A team of OpenMP that makes all teams together more than there are cores, or none.

    Args:
        others: returns how many threads the other teams have, but for those that lead them.
    """

    def __init__(self, others: Callable[[], int]) -> None:
        self._others = others
        self._end: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __call__(self, there: bool) -> None:
        """Start the team, or end it and wait until it is gone."""
        if there:
            self._end = threading.Event()
            self._thread = threading.Thread(target=self._stay, args=(self._end,), daemon=True)
            self._thread.start()
        elif self._end is not None and self._thread is not None:
            self._end.set()
            self._thread.join()

    def _stay(self, end: threading.Event) -> None:
        system.idle_team(max(2, system.usable_cores() + 1 - self._others()))
        end.wait()


__all__ = ["Crowd", "Waiting"]
