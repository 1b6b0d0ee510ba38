"""Cost models whose times are measured on this computer, each once, and kept in a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from soapstone.cache.store import Store
from soapstone.search.cost import database as store
from soapstone.search.cost.cost import CostModel
from soapstone.search.cost.measure import Weights
from soapstone.system import usable_cores


class MeasuredCost(CostModel):
    """What cost models share that measure.

    Args:
        threads: how many threads compute; all cores by default.
        database: where times are kept; the process's own by default.
        weights: whether constants are read from memory or from the last cache, which depends on the
            size of the whole network that a graph is part of: `Weights.of` tells.
    """

    noise = 0.03  # share of a cost that one measurement may be off

    def __init__(self, threads: int | None, database: Store | None, weights: Weights) -> None:
        self.threads = threads or usable_cores()
        self.weights = weights
        self._database = database
        self.measured = 0  # launches, groups and conversions that this model had to measure
        self.measuring_s = 0.0  # how long that took

    @property
    def database(self) -> Store:
        """Where times are kept."""
        if self._database is None:
            self._database = store.database()
        return self._database

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Hold what only one process and thread may at a time, and count the seconds."""
        began = time.monotonic()
        try:
            with self.database.measuring(self.deadline.check):
                yield
        finally:
            self.measuring_s += time.monotonic() - began

    def _kept(self, what: str, make: Callable[[], dict[str, Any]]) -> Any:
        """Return a record of the database, which is made and measured where there is none."""
        held = self.database.get(what)
        if held is None:
            with self._measuring():
                self.deadline.check()
                held = self.database.get(what)  # another process may have been first
                if held is None:
                    self.measured += 1
                    held = self.database.put(what, make())
        return held
