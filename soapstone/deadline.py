"""The time by which work that was given a budget has to end, handed down to all that takes long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class TimeUpError(Exception):
    """Work ended before it was done, because its budget had: what was found until then counts."""


class Deadline:
    """When work has to end: after so many seconds from now, or once it is stopped.

    Args:
        seconds: from now; None: never.
        clock: what tells the seconds.

    Example:
        >>> deadline = Deadline(20.0)
        >>> search = deadline.keeping(5.0)  # five seconds before it, for what comes after a search
    """

    def __init__(
        self, seconds: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds
        self._stop = threading.Event()

    @property
    def left(self) -> float:
        """The seconds until then: 0 when it is over, infinite where there is no end."""
        return 0.0 if self.stopped else max(0.0, self._end - self._clock())

    @property
    def stopped(self) -> bool:
        """Whether work was stopped before its time, as by an interrupt."""
        return self._stop.is_set()

    @property
    def over(self) -> bool:
        """Whether nothing more may be begun."""
        return self.left <= 0.0

    def stop(self) -> None:
        """End the work now, and that which this is a part of."""
        self._stop.set()

    def check(self) -> None:
        """Raise a `TimeUpError` if it is over."""
        if self.over:
            raise TimeUpError("the budget is spent")

    def within(self, seconds: float) -> Deadline:
        """Return the deadline of a part of the work, of so many seconds at most."""
        part = self.keeping(0.0)
        part._end = min(self._end, self._clock() + seconds)
        part._stop = self._stop
        return part

    def part(self, share: float) -> Deadline:
        """Return the deadline of a part of the work: after a share of the time that is left."""
        return self.within(self.left * share)

    def keeping(self, seconds: float) -> Deadline:
        """Return a deadline so many seconds before this one; to stop it does not stop this one."""
        earlier = Deadline(clock=self._clock)
        earlier._end = self._end - seconds
        return earlier
