"""The store of what was measured: one SQLite file, shared by processes and kept between runs.

A record is a JSON value under a kind and a text that says all there is to what was measured. It is
valid in the environment it was made in, and its text names the stamps of the sources it depends on
(`sources.stamp`): what has changed is not found. A time is a number: zero, infinity and NaN are
refused. The first record of a key stays, so that all processes use the same.

What is wrong with the file is said once; work then goes on in memory. A file that is no database is
set aside. Files of other formats have other names and are never read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from soapstone.cache.changes import default_path, tell_changed
from soapstone.cache.deferred import Late
from soapstone.cache.environment import CacheWarning, digest, environment, key
from soapstone.errors import warn
from soapstone.locks import Lock
from soapstone.system import locked

if TYPE_CHECKING:
    import sqlite3
else:
    sqlite3 = Late("sqlite3")  # where nothing is measured, it is not needed

_BATCH = 500  # keys of one query
_WAIT_S = 10.0  # for another process that is writing
_LOOK_S = 0.05  # between looks at whether another thread still measures
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS environments (key TEXT PRIMARY KEY, what TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, kind TEXT NOT NULL,"
    " value TEXT NOT NULL, what TEXT NOT NULL, environment TEXT NOT NULL)",
)
T = TypeVar("T")


class Store:
    """The records of one kind in one environment.

    Args:
        kind: what records there are: each has a meaning of its own, known to who writes it.
        path: the file; by default the one of all caches, see `SOAPSTONE_CACHE`.
        environment: what records are valid for; by default this process's environment.
    """

    def __init__(
        self, kind: str, path: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.path = path or default_path()
        self._environment = environment
        self._key: str | None = None
        self._known: dict[str, Any] = {}
        self._told = False
        self._file: sqlite3.Connection | None = None
        self._reset()
        _STORES.add(self)

    @property
    def environment(self) -> Mapping[str, str]:
        """What records are valid for."""
        if self._environment is None:
            self._environment = environment()
        return self._environment

    def get(self, what: str) -> Any:
        """Return the record of what was measured, by any process, or None."""
        return self.find([what]).get(what)

    def find(self, whats: Iterable[str]) -> dict[str, Any]:
        """Return the records of what was measured, by any process."""
        keys = {what: self._name(what) for what in whats}
        with self._lock:
            asked = [name for name in keys.values() if name not in self._known]
            for first in range(0, len(asked), _BATCH):
                self._read(asked[first : first + _BATCH])
            return {what: self._known[name] for what, name in keys.items() if name in self._known}

    def put(self, what: str, value: Any) -> Any:
        """Record a value and return the one that holds: the first of a key stays.

        Raises:
            ValueError: a time that is none (zero, less, infinite, NaN), or no JSON.
        """
        return self.update({what: value})[what]

    def update(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Record values and return those that hold, so that all processes use the same.

        Raises:
            ValueError: a time that is none (zero, less, infinite, NaN), or no JSON.
        """
        return self._write(values, "INSERT OR IGNORE INTO records VALUES (?, ?, ?, ?, ?)")

    def replace(self, values: Mapping[str, Any]) -> None:
        """Record values in place of what is recorded.

        Raises:
            ValueError: a time that is none (zero, less, infinite, NaN), or no JSON.
        """
        with self._lock:
            for what in values:
                self._known.pop(self._name(what), None)
            self._write(values, "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)")

    def lowest(self, what: str, us: float) -> float:
        """Record a time unless a lower one is known, and return the lowest.

        Raises:
            ValueError: a time that is none: zero, less, infinite, NaN.
        """
        name = self._name(what)
        with self._lock:
            known = float(self.put(what, us))
            if us >= known:
                return known
            self._known[name] = us
            tell_changed(self.path)
            lower = "UPDATE records SET value = ? WHERE key = ? AND CAST(value AS REAL) > ?"
            self._do(lambda file: _commit(file, lower, [(json.dumps(us), name, us)]))
            return us

    def __len__(self) -> int:
        """The number of records of this kind in this environment."""
        query = "SELECT count(*) FROM records WHERE kind = ? AND environment = ?"
        with self._lock:
            found = self._do(
                lambda file: file.execute(query, (self.kind, self._place())).fetchone()
            )
            return int(found[0]) if found is not None else len(self._known)

    def close(self) -> None:
        """Close the file; what was found so far stays known."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._usable = None, False

    @contextlib.contextmanager
    def measuring(self, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold what only one process and thread may at a time: side by side, both would be slow.

        waiting: called again and again while another one holds it; what it raises ends the waiting.
        """
        with contextlib.ExitStack() as stack:
            while not _MEASURING.acquire(timeout=-1 if waiting is None else _LOOK_S):
                assert waiting is not None
                waiting()
            stack.callback(_MEASURING.release)
            if not self._held:
                stack.enter_context(locked(self.path.with_suffix(".lock"), waiting))
            self._held += 1
            try:
                yield
            finally:
                self._held -= 1

    # The file

    def _reset(self) -> None:
        """Forget the connection: it is opened on first use, in each process anew."""
        self._lock = threading.RLock()  # workers bind in parallel, and the connection is shared
        self._file = None
        self._usable = True
        self._held = 0  # times that `measuring` is held

    def _place(self) -> str:
        if self._key is None:
            self._key = key(self.environment)
        return self._key

    def _name(self, what: str) -> str:
        return digest(self.kind, self._place(), what)

    def _read(self, names: Sequence[str]) -> None:
        query = f"SELECT key, value FROM records WHERE key IN ({','.join('?' * len(names))})"
        rows = self._do(lambda file: file.execute(query, names).fetchall())
        for name, text in rows or ():
            with contextlib.suppress(ValueError):  # not as it was written
                self._known[name] = json.loads(text)

    def _write(self, values: Mapping[str, Any], statement: str) -> dict[str, Any]:
        place = self._place()
        texts = {what: _text(what, value) for what, value in values.items()}
        rows = [(self._name(what), self.kind, text, what, place) for what, text in texts.items()]
        with self._lock:
            tell_changed(self.path)
            self._do(lambda file: _commit(file, statement, rows))
            found = self.find(values)
            for name, _, text, what, _ in rows:
                if what not in found:
                    found[what] = self._known.setdefault(name, json.loads(text))
            return found

    def _do(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Return what some work with the file gives, or None where the file cannot be used."""
        for again in (True, False):
            if not self._usable:
                break
            try:
                if self._file is None:
                    self._file = self._open()
                return work(self._file)
            except sqlite3.OperationalError as error:  # locked, full, not writable
                self._stop(f"{error}; what is measured is not kept")
            except sqlite3.DatabaseError as error:  # no database, or a broken one
                self._stop(f"{error}; {_set_aside(self.path)}")
                self._usable = again
            except OSError as error:
                self._stop(f"{error}; what is measured is not kept")
        return None

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = sqlite3.connect(self.path, timeout=_WAIT_S, check_same_thread=False)
        try:
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=NORMAL")
            for table in _SCHEMA:
                file.execute(table)
            about = (self._place(), json.dumps(dict(self.environment), sort_keys=True))
            _commit(file, "INSERT OR IGNORE INTO environments VALUES (?, ?)", [about])
        except BaseException:
            file.close()
            raise
        return file

    def _stop(self, why: str) -> None:
        """Use the file no more, and say why, once."""
        with contextlib.suppress(sqlite3.Error):
            if self._file is not None:
                self._file.close()
        self._file, self._usable = None, False
        if not self._told:
            self._told = True
            warn(f"cache {str(self.path)!r}: {why}", CacheWarning)


def _commit(file: sqlite3.Connection, statement: str, rows: Sequence[Sequence[Any]]) -> None:
    with file:
        file.executemany(statement, rows)


def _text(what: str, value: Any) -> str:
    """Return a value as it is kept, checked."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not 0 < value < math.inf:
        raise ValueError(f"cache: {value} found for {what!r}, a time above 0 needed")
    return json.dumps(value, allow_nan=False)


def _set_aside(path: Path) -> str:
    """Rename a broken file, unless another process has done so; return what became of it."""
    aside = path.with_suffix(".broken")
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(path.with_suffix(".lock")))
        if _sound(path):
            return "another process has begun a new one"
        try:
            os.replace(path, aside)
            for tail in ("-wal", "-shm"):
                path.with_name(path.name + tail).unlink(missing_ok=True)
        except OSError as error:
            return f"what is measured is not kept ({error})"
    return f"set aside as {aside.name!r}, a new one is begun"


def _sound(path: Path) -> bool:
    """Return whether a file is a database, or absent."""
    if not path.exists():
        return True
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_WAIT_S)) as file:
            return bool(file.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.OperationalError:
        return True
    except sqlite3.DatabaseError:
        return False


_MEASURING = Lock()
_STORES: weakref.WeakSet[Store] = weakref.WeakSet()
_LEFT: list[Any] = []  # connections of a parent: never used and never closed by the child


def _after_fork() -> None:
    for store in _STORES:
        _LEFT.append(store._file)
        store._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
