"""The store of measured kernel times: one SQLite file, shared by processes and kept between runs.

A time is keyed by operator, attributes, shapes, strides, types, thread count, variant and machine,
so a call is measured once on a machine and never again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sqlite3
import statistics
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import Bind

BUDGET_US = 20_000.0  # most time spent on one variant of one call
RUNS = 7
_MEASURING = threading.Lock()


@cache
def machine_name() -> str:
    """Return what identifies this machine's processor in the store."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} x{os.cpu_count()}"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()} x{os.cpu_count()}"


def default_path() -> Path:
    """Return the store's file: under SOAPSTONE_CACHE, or the user's cache folder."""
    folder = os.environ.get("SOAPSTONE_CACHE")
    if folder:
        return Path(folder) / "kernels.sqlite"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "soapstone" / "kernels.sqlite"


class Store:
    """Measured times in microseconds; falls back to memory alone when the file cannot be written."""

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, float] = {}
        self._database: sqlite3.Connection | None = None
        path = path or default_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(path, timeout=10, check_same_thread=False)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE IF NOT EXISTS times (key TEXT PRIMARY KEY, us REAL, what TEXT)")
            self._known = dict(database.execute("SELECT key, us FROM times"))
            self._database = database
        except (OSError, sqlite3.Error):
            self._database = None

    def get(self, key: str) -> float | None:
        """Return the time of a key in microseconds, or None."""
        return self._known.get(key)

    def put(self, key: str, us: float, what: str) -> None:
        """Record a time; the first record of a key stays, so that choices do not drift."""
        self._known.setdefault(key, us)
        if self._database is None:
            return
        try:
            with self._database:
                self._database.execute("INSERT OR IGNORE INTO times VALUES (?, ?, ?)", (key, us, what))
        except sqlite3.Error:
            self._database = None


@cache
def store() -> Store:
    """Return the process's store."""
    return Store()


def signature(call: Call, variant: str) -> tuple[str, str]:
    """Return the key of a call and variant, and its readable form."""

    def form(arrays: tuple[Array, ...]) -> list[Any]:
        return [[a.dtype.name, a.shape, a.strides] for a in arrays]

    attributes: Mapping[str, Any] = dict(sorted(call.attributes.items()))
    parts = [call.operator, attributes, form(call.inputs), form(call.outputs), call.threads]
    what = json.dumps([*parts, variant, machine_name()], default=str)
    return hashlib.sha256(what.encode()).hexdigest()[:32], what


def scratch(call: Call) -> Call:
    """Return the same call on scratch arrays of equal shapes and strides."""

    def clone(array: Array) -> Array:
        if array.size == 0:
            return array
        extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.itemsize
        flat = np.zeros(-(-extent // array.itemsize) + 16, array.dtype)
        if array.dtype.kind == "f":
            flat[:] = np.random.default_rng(0).random(flat.size, np.float32) + 0.1
        elif array.dtype.kind == "b":
            flat[:] = True
        return np.lib.stride_tricks.as_strided(flat, array.shape, array.strides)

    return Call(
        call.operator,
        call.attributes,
        tuple(clone(a) for a in call.inputs),
        tuple(clone(a) for a in call.outputs),
        call.threads,
    )


def time_entry(entry: Entry) -> float:
    """Return the median time of one execution in microseconds."""
    from soapstone.kernels.cpu.native import run

    run(entry)
    times: list[float] = []
    while len(times) < RUNS and (len(times) < 2 or sum(times) < BUDGET_US):
        start = time.perf_counter()
        run(entry)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measured_us(call: Call, variant: str, bind: Bind) -> float | None:
    """Return the time of a variant on such a call, measuring it the first time; None if not served."""
    key, what = signature(call, variant)
    known = store().get(key)
    if known is not None:
        return known
    with _MEASURING:  # one at a time: workers bind in parallel, but must not time side by side
        entry = bind(scratch(call))
        if entry is None:
            return None
        us = time_entry(entry)
        store().put(key, us, what)
    return us
