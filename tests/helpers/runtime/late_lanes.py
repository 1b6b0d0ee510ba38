"""Lanes that do what they are given late, each in a thread of its own, as streams of a device do.

Numba's simulator does all at once, so an order that nothing enforces would never show there.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable

from soapstone.native.cuda.device import Device, Enqueued, Lane


class Mark:
    """An event: occurs when all that a lane had been given has been done."""

    def __init__(self) -> None:
        self.occurred = threading.Event()


class LateLane(Lane):
    """A lane that takes its time: between any two things that it does, up to a millisecond."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._given: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._chance = random.Random(device.number)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            doing = self._given.get()
            if self._chance.random() < 0.5:
                time.sleep(self._chance.random() * 1e-3)
            doing()

    def enqueue(self, work: Enqueued) -> None:
        self._given.put(lambda: Lane.enqueue(self, work))

    def event(self) -> Mark:
        return Mark()

    def mark(self, event: Mark | None = None) -> Mark:
        """What waits for the event from now on waits for this record of it, as on a device."""
        found = Mark() if event is None else event
        found.occurred = mine = threading.Event()
        self._given.put(mine.set)
        return found

    def after(self, marks: Iterable[Mark]) -> None:
        for mark in marks:
            self._given.put(mark.occurred.wait)

    def wait(self, mark: Mark | None = None) -> None:
        assert (self.mark() if mark is None else mark).occurred.wait(60)
