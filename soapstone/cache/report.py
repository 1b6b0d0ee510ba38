"""What the caches hold: for people, and for `soapstone doctor`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from soapstone.cache.answers import kept
from soapstone.cache.changes import OPENED, ROWS, SESSIONS, default_path
from soapstone.cache.environment import environment, folder, key

TOLD = {  # by folder: answers of libraries (`told`)
    "processor": "processor as LLVM sees it",
    "onnx": "declarations of ONNX",
    "sources": "stamps of sources",
    "kernels": "modules of kernels",
    "operators": "modules of operators",
}
_FORMER = ("kernels.sqlite", "costs.sqlite")  # stores of other formats: never read


@dataclass(frozen=True)
class Cache:
    """One cache on disk.

    Attributes:
        name: what it is. path: where it is.
        entries: how many records or compiled functions, by kind or module.
        nbytes: what it takes on disk.
        environment: the key of this process's environment, under which entries are found.
        stale: how many entries are of another environment, and of compiled functions also how many
            are of other sources: not used here and now.
        problem: what is wrong with it, if anything.
    """

    name: str
    path: Path
    entries: Mapping[str, int]
    nbytes: int
    environment: str
    stale: int
    problem: str = ""

    def __str__(self) -> str:
        count = sum(self.entries.values())
        text = f"{self.name}: {count} entries, {self.stale} stale, {self.nbytes} bytes, {self.path}"
        return f"{text} ({self.problem})" if self.problem else text


def caches() -> tuple[Cache, ...]:
    """Return all caches of this user that are on disk."""
    found = [_measured(default_path()), _compiled()]
    told = ((folder() / name, what) for name, what in TOLD.items())
    found += [_told(path, what) for path, what in told if path.is_dir()]
    for name, what in (
        (SESSIONS, "bound sessions"),
        (OPENED, "notes on files of models"),
        (ROWS, "notes on rows of bound sessions"),
    ):
        place = folder() / name
        if place.is_dir():
            count = {name: sum(1 for _ in place.iterdir())}
            found.append(Cache(what, place, count, _nbytes(place), _key(), 0))
    for name in _FORMER:
        path = folder() / name
        if path.exists():
            problem = "of an earlier version, not used"
            found.append(Cache("former times", path, {}, _nbytes(path), _key(), 0, problem))
    broken = default_path().with_suffix(".broken")
    if broken.exists():
        problem = "was no sound database, and was set aside"
        found.append(Cache("broken store", broken, {}, _nbytes(broken), _key(), 0, problem))
    return tuple(found)


def _key() -> str:
    return key(environment())


def _measured(path: Path) -> Cache:
    """Return what is measured: times and choices by kind."""
    entries: dict[str, int] = {}
    stale, problem = 0, ""
    if path.exists():
        try:
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
                query = "SELECT environment, kind, count(*) FROM records GROUP BY 1, 2"
                about = dict(file.execute("SELECT key, what FROM environments"))
                for place, kind, count in file.execute(query):
                    entries[kind] = entries.get(kind, 0) + count
                    stale += 0 if _current(about.get(place, "")) else count
        except sqlite3.Error as error:
            problem = str(error)
    return Cache("measured times", path, entries, _nbytes(path), _key(), stale, problem)


def _current(text: str) -> bool:
    """Return whether an environment is this one, but for libraries that only some records name."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and environment().items() <= found.items()


def _compiled() -> Cache:
    """Return what is compiled: functions by module."""
    from soapstone.cache.kept import DEVICE_SUFFIX
    from soapstone.cache.objects import SUFFIX
    from soapstone.cache.places import ABOUT, root, stamped

    entries: dict[str, int] = {}
    stale = 0
    suffixes = (".nbi", SUFFIX, DEVICE_SUFFIX)
    for about in root().glob(f"*/{ABOUT}"):
        with contextlib.suppress(OSError, ValueError):
            now = stamped(*json.loads(about.read_text()))
            for place in about.parent.iterdir():
                count = sum(1 for file in place.rglob("*") if file.suffix in suffixes)
                if count:
                    name = about.parent.name.partition("+")[0]
                    entries[name] = entries.get(name, 0) + count
                    stale += count if place.name != now else 0
    return Cache("compiled functions", root(), entries, _nbytes(root()), _key(), stale)


def _told(path: Path, what: str) -> Cache:
    """Return what is kept of what a library said; a file is found by who wrote it alone."""
    entries = {file.stem: len(kept(file)) for file in path.glob("*.json")}
    return Cache(what, path, entries, _nbytes(path), _key(), 0)


def _nbytes(path: Path) -> int:
    """Return the bytes of a folder, or of a file with those that stand beside it."""
    nbytes = 0
    for file in _files(path):
        with contextlib.suppress(OSError):
            nbytes += file.stat().st_size
    return nbytes


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in path.rglob("*") if file.is_file())
    else:
        yield from (path.with_name(path.name + tail) for tail in ("", "-wal", "-shm"))
