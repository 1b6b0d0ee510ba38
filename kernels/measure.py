"""The store of measured kernel times: one SQLite file, shared by processes and kept between runs.

A time is keyed by operator, attributes, shapes, strides, types, thread count, variant and machine,
so a call is measured once on a machine and never again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from soapstone import system
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import Variant

BUDGET_US = 20_000.0  # time after which a variant of one call is not run again
RUNS = 7
_MEASURING = threading.RLock()


@cache
def machine_name() -> str:
    """Return what identifies this machine's processor in the store."""
    return f"{system.processor_name()} x{os.cpu_count()}"


def default_path() -> Path:
    """Return the store's file: under SOAPSTONE_CACHE, or the user's cache folder."""
    folder = os.environ.get("SOAPSTONE_CACHE")
    if folder:
        return Path(folder) / "kernels.sqlite"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "soapstone" / "kernels.sqlite"


class Store:
    """Measured times in microseconds; kept in memory alone when the file cannot be written."""

    def __init__(self, path: Path | None = None) -> None:
        self._known: dict[str, float] = {}
        self._writing = threading.Lock()  # workers bind in parallel, and the connection is shared
        self._database: sqlite3.Connection | None = None
        path = path or default_path()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(path, timeout=10, check_same_thread=False)
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS times (key TEXT PRIMARY KEY, us REAL, what TEXT)"
            )
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
            with self._writing, self._database:
                self._database.execute(
                    "INSERT OR IGNORE INTO times VALUES (?, ?, ?)", (key, us, what)
                )
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
    if call.constants:
        parts.append(sorted(call.constants))
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

    inputs, outputs = (tuple(clone(a) for a in side) for side in (call.inputs, call.outputs))
    return replace(call, inputs=inputs, outputs=outputs)


def known_us(call: Call, candidates: Sequence[Variant]) -> dict[str, float] | None:
    """Return the recorded time of each variant, without binding any, or None unless all have one.

    A variant that was found not to serve such a call has an infinite time.
    """
    known = {v.name: store().get(signature(call, v.name)[0]) for v in candidates}
    times = {name: us for name, us in known.items() if us is not None}
    return times if len(times) == len(known) else None


def remember(call: Call, candidates: Sequence[Variant], serve: Collection[str]) -> None:
    """Record which variants do not serve such a call, and the time of one that alone does."""
    for candidate in candidates:
        if candidate.name not in serve:
            store().put(*_record(call, candidate, math.inf))
        elif len(serve) == 1:
            store().put(*_record(call, candidate, 0.0))


def _record(call: Call, candidate: Variant, us: float) -> tuple[str, float, str]:
    key, what = signature(call, candidate.name)
    return key, us, what


def measured_us(call: Call, candidates: Sequence[Variant]) -> dict[str, float]:
    """Return the time of each variant that serves such a call, measuring those that have none.

    Variants are timed in turns and by their best run, so that a busy machine hurts them alike.
    """
    keys = {variant.name: signature(call, variant.name) for variant in candidates}
    known = {name: store().get(key) for name, (key, _) in keys.items()}
    if any(us is None for us in known.values()):
        with _MEASURING:  # one at a time: workers bind in parallel, but must not time side by side
            copy = scratch(call)
            bound = {variant.name: variant.bind(copy) for variant in candidates}
            entries = {name: entry for name, entry in bound.items() if entry is not None}
            for name, us in _best_us(entries).items():
                store().put(keys[name][0], us, keys[name][1])
        known = {name: store().get(key) for name, (key, _) in keys.items()}
    return {name: us for name, us in known.items() if us is not None}


def _best_us(entries: Mapping[str, Entry]) -> dict[str, float]:
    """Return the best time of each entry over runs taken in turns, in microseconds."""
    from soapstone.kernels.cpu.native import run

    best = dict.fromkeys(entries, float("inf"))
    for entry in entries.values():
        run(entry)
    began = time.perf_counter()
    for turn in range(RUNS):
        if turn >= 2 and (time.perf_counter() - began) * 1e6 > BUDGET_US * len(entries):
            break
        for name, entry in entries.items():
            start = time.perf_counter()
            run(entry)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
    return best
