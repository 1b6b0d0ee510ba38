"""The cost database: measured times, each taken once on a machine and kept between runs.

One SQLite file serves several processes at once. A time is keyed by a text that says all there is
to what was measured, and by the machine. TASO, section 2.6: an operator is measured once.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from soapstone.kernels.measure import default_path, machine_name
from soapstone.system import locked

ROUNDS = 7
_BATCH = 500  # keys of one query


class CostDatabase:
    """Times in microseconds by key; kept in memory alone when the file cannot be used.

    Args:
        path: the SQLite file; by default beside the kernels' store, see `SOAPSTONE_CACHE`.
        machine: the name under which times are kept; by default that of this computer.
    """

    def __init__(self, path: Path | None = None, machine: str | None = None) -> None:
        self.path = path or default_path().with_name("costs.sqlite")
        self.machine = machine or machine_name()
        self._known: dict[str, float] = {}
        self._lock = threading.RLock()
        self._held = 0
        self._connection: sqlite3.Connection | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(
                "CREATE TABLE IF NOT EXISTS costs"
                " (key TEXT PRIMARY KEY, us REAL NOT NULL, samples INTEGER, what TEXT,"
                " machine TEXT)"
            )
            self._connection = connection
        except (OSError, sqlite3.Error):
            self._connection = None

    def get(self, what: str) -> float | None:
        """Return the time of what was measured, or None."""
        return self.find([what]).get(what)

    def find(self, whats: Iterable[str]) -> dict[str, float]:
        """Return the times of those that were measured, by any process."""
        keys = {what: self._key(what) for what in whats}
        with self._lock:
            asked = [key for key in keys.values() if key not in self._known]
            for first in range(0, len(asked), _BATCH):
                self._known.update(self._read(asked[first : first + _BATCH]))
            return {what: self._known[key] for what, key in keys.items() if key in self._known}

    def put(self, what: str, us: float, samples: int = 1) -> float:
        """Record a time and return the one that holds: the first of a key stays."""
        return self.update({what: us}, samples)[what]

    def lowest(self, what: str, us: float) -> float:
        """Record a time unless a lower one is known, and return the lowest."""
        known = self.put(what, us)
        if us >= known:
            return known
        with self._lock:
            self._known[self._key(what)] = us
            if self._connection is not None:
                with contextlib.suppress(sqlite3.Error), self._connection:
                    self._connection.execute(
                        "UPDATE costs SET us = ? WHERE key = ? AND us > ?",
                        (us, self._key(what), us),
                    )
        return us

    def update(self, times: Mapping[str, float], samples: int = 1) -> dict[str, float]:
        """Record times and return those that hold, so that all processes use the same."""
        rows = [(self._key(what), us, samples, what, self.machine) for what, us in times.items()]
        with self._lock:
            if self._connection is not None:
                try:
                    with self._connection:
                        self._connection.executemany(
                            "INSERT OR IGNORE INTO costs VALUES (?, ?, ?, ?, ?)", rows
                        )
                except sqlite3.Error:
                    self._connection = None
            found = self.find(times)
            for key, us, _, what, _ in rows:
                if what not in found:
                    found[what] = self._known.setdefault(key, us)
            return found

    def __len__(self) -> int:
        """The number of times of this machine."""
        with self._lock:
            if self._connection is None:
                return len(self._known)
            query = "SELECT count(*) FROM costs WHERE machine = ?"
            return int(self._connection.execute(query, (self.machine,)).fetchone()[0])

    def close(self) -> None:
        """Close the file; times found so far stay known."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold what only one process and thread may at a time: side by side, both would be slow."""
        with _MEASURING, contextlib.ExitStack() as stack:
            if not self._held:
                stack.enter_context(locked(self.path.with_suffix(".lock")))
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1

    def _key(self, what: str) -> str:
        return hashlib.sha256(f"{self.machine}\n{what}".encode()).hexdigest()[:32]

    def _read(self, keys: Sequence[str]) -> list[tuple[str, float]]:
        if self._connection is None:
            return []
        marks = ",".join("?" * len(keys))
        try:
            return self._connection.execute(
                f"SELECT key, us FROM costs WHERE key IN ({marks})", list(keys)
            ).fetchall()
        except sqlite3.Error:
            return []


_MEASURING = threading.RLock()


@cache
def database() -> CostDatabase:
    """Return the process's database."""
    return CostDatabase()


def robust(samples: Sequence[float]) -> float:
    """Return the median of the lowest group of samples that agree.

    Another process can only make a run slower, and on a busy machine it does so to most runs. A
    group is three samples or more within a tenth; without one it is the lower quartile.
    """
    ordered = sorted(samples)
    low = _group(ordered)
    if low is None:
        return ordered[(len(ordered) - 1) // 4]
    return statistics.median(us for us in ordered if low <= us <= 1.2 * low)


class Timing(NamedTuple):
    """A robust time in microseconds, and whether the best runs agree on it."""

    us: float
    settled: bool


def interleaved(runs: Sequence[Callable[[], float]], rounds: int = ROUNDS) -> list[Timing]:
    """Return a robust time of each run, taken in turns so that a busy machine hurts all alike.

    Each call of a run returns the time of one execution; a negative time is one in which the
    process was preempted, and counts only where there is no other. A run is taken again, up to six
    times as often, until it has `rounds` times of which the lowest agree.
    """
    clean: list[list[float]] = [[] for _ in runs]
    rest: list[list[float]] = [[] for _ in runs]
    for _ in range(6 * rounds):
        waiting = [i for i in range(len(runs)) if not _settled(clean[i], rounds)]
        if not waiting:
            break
        for i in waiting:
            us = runs[i]()
            (clean if us >= 0 else rest)[i].append(abs(us))
    return [
        Timing(robust(mine if len(mine) > 2 else mine + other), _settled(mine, 3))
        for mine, other in zip(clean, rest)
    ]


def _group(ordered: Sequence[float]) -> float | None:
    """Return the first of three sorted samples within a tenth, or None."""
    for low, high in zip(ordered, ordered[2:]):
        if high <= 1.1 * low:
            return low
    return None


def _settled(samples: Sequence[float], rounds: int) -> bool:
    """Return whether there are enough samples, and the lowest of them agree."""
    ordered = sorted(samples)
    return len(ordered) >= rounds and _group(ordered) in ordered[:2]


__all__ = ["CostDatabase", "Timing", "database", "interleaved", "robust"]
