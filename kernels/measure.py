"""Measurements for the choice of kernels: the time of each variant for a call, kept between runs.

They are kept by the form of a call (operator, attributes, shapes, strides, types, threads,
precision), by the candidates with the stamps of their sources, and by this process's environment.
If any of these changes, all candidates are timed again together.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from soapstone.cache.changes import default_path
from soapstone.cache.environment import digest, environment as base_environment
from soapstone.cache.sources import closure, modules_of, stamp, stamp_of
from soapstone.cache.store import Store
from soapstone.deadline import Deadline
from soapstone.dtypes import kind_of, name_of
from soapstone.kernels.choices import current
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import Variant, home, registered
from soapstone.locks import Lock
from soapstone.native.arrays import strided
from soapstone.native.memory import call as native_call, run
from soapstone.native.threads import openmp
from soapstone.system import preemptions

BUDGET_US = 20_000.0  # time after which a variant of one call is not run again
RUNS = 7
PATIENCE = 4  # times as long as that on a busy machine
MARGIN = 0.95  # by which a later one must beat an earlier one, so that noise decides nothing
_LARGE = 32 << 20  # bytes of a constant of which no two variants have something at once
Times = Mapping[str, float | None]  # of the variants that serve a call; of a sole one it is None
_MEASURING = Lock()
_UNTIL: ContextVar[Deadline | None] = ContextVar("until", default=None)


@cache
def environment() -> Mapping[str, str]:
    """Return the environment of measurements, including the libraries that kernels call."""
    from soapstone.kernels.cpu.onednn import library as onednn
    from soapstone.kernels.cpu.openblas import library as openblas

    found = {"onednn": "none", "openblas": "none", "openmp": openmp.described()}
    if onednn.available():
        path = digest(str(onednn.library()._name))
        found["onednn"] = f"{onednn.version()} {onednn.instructions():x} {path}"
    else:  # it is loaded only then
        blas, _ = openblas.attempt()
        if blas is not None:
            found["openblas"] = f"{blas.config} {digest(blas.path)}"
    return {**base_environment(), **found}


@cache
def store() -> Store:
    """Return the process's store of measurements."""
    return Store("choice", environment=environment())


def form(call: Call) -> str:
    """Return the form of a call; calls of equal forms are served alike."""

    def arrays(side: tuple[Array, ...]) -> list[Any]:
        return [[name_of(a.dtype), a.shape, a.strides] for a in side]

    parts = [
        *(call.operator, dict(sorted(call.attributes.items()))),
        *(arrays(call.inputs), arrays(call.outputs), call.threads, sorted(call.constants)),
        *([call.precision] if call.precision != "float32" else []),
    ]
    return json.dumps(parts, default=str)


def known(call: str, candidates: Sequence[Variant]) -> Times | None:
    """Return the recorded times of the variants that serve calls of a form, or None."""
    if _nothing_recorded():
        return None
    found = store().get(_question(call, candidates))
    return found if isinstance(found, dict) and _names(candidates) >= found.keys() else None


def measured(call: Call, of: str, candidates: Sequence[Variant]) -> Times:
    """Measure the variants that serve a call, record their times and return them.

    A single candidate is not run. Only one variant's packed form of a large constant is in memory
    at a time.

    of: the call's form. candidates: all that could serve it.
    """
    with _MEASURING:  # one at a time: workers bind in parallel, but must not time side by side
        again = known(of, candidates)
        if again is not None:  # another worker has been here
            return again
        harness = _harness(candidates[0].processor)
        try:
            copy = harness.scratch(call)
        except MemoryError:  # the first of those that serve is chosen
            return {each.name: None for each in candidates if each.bind(call) is not None}
        apart = any(call.inputs[number].nbytes > _LARGE for number in call.constants)
        times: dict[str, float | None] = {}
        for group in [[each] for each in candidates] if apart else [candidates]:
            times |= _timed(harness, copy, group, sole=apart)
        if not times:
            return times
        held: Times = store().put(_question(of, candidates), times)
        return held


def fastest(times: Times, names: Sequence[str]) -> str:
    """Return the first of the names with times that no later one clearly beats."""
    best, *later = (name for name in names if name in times)
    for name in later:
        us, least = times[name], times[best]
        if us is not None and least is not None and us < least * MARGIN:
            best = name
    return best


def of_computer(
    what: str, module: str, make: Callable[[], Mapping[str, Entry]]
) -> Mapping[str, float] | None:
    """Return the times of entries that characterise this computer, measured once.

    None if nothing is recorded and kernels are not measured now, if measurements are off, or if
    what is measured does not fit in memory.

    what: identifies the measurement, except its sources. module: their module. make: returns the
    entries by name.
    """
    tune = current().tune
    if not tune or (tune != "now" and _nothing_recorded()):
        return None
    of = json.dumps([what, stamp(module, compiled=True), _own_stamp()])
    found: Mapping[str, float] | None = store().get(of)
    if found is not None or tune != "now":
        return found  # who only asks waits for nobody who measures
    with _MEASURING:
        found = store().get(of)
        if found is None:
            with suppress(MemoryError):
                found = store().put(of, best_us(make()))
        return found


def _nothing_recorded() -> bool:
    """Return whether nothing is recorded, without reading a file or stamping sources."""
    return not store.cache_info().currsize and not default_path().exists()


def _timed(harness: Any, call: Call, group: Sequence[Variant], sole: bool) -> Times:
    """Return the times of the variants that serve a call. sole: whether to time one alone."""
    bound = {each.name: each.entry(call) for each in group}
    entries = {name: entry for name, entry in bound.items() if entry is not None}
    if len(entries) + sole < 2:
        return dict.fromkeys(entries)
    times: Times = harness.best_us(entries)
    return times


def made_of(candidates: Sequence[Variant]) -> list[tuple[str, str]]:
    """Return the names of variants with the stamps of their sources."""
    return [(each.name, _stamp(each)) for each in candidates]


def _question(call: str, candidates: Sequence[Variant]) -> str:
    where = [_harness(kind).where() for kind in {each.processor for each in candidates} - {"cpu"}]
    return json.dumps([call, made_of(candidates), _own_stamp(), *where])


def _harness(processor: str) -> Any:
    """Return the module that measures variants for a kind of processor."""
    module = __name__ if processor == "cpu" else f"{__package__}.{processor}.measuring"
    return importlib.import_module(module)


def _names(candidates: Sequence[Variant]) -> set[str]:
    return {each.name for each in candidates}


@cache
def _stamp(variant: Variant) -> str:
    """Return the stamp of a variant's sources; of all kernels where it chooses among others."""

    def modules() -> frozenset[str]:
        found = modules_of(variant.kernel)
        if "soapstone.kernels.select" in closure(found):
            found |= _modules_of_all(variant.processor)
        return found

    name = f"{variant.operator} {variant.name} {variant.processor}"
    return stamp_of(name, home(variant), modules)


@cache
def _modules_of_all(processor: str) -> frozenset[str]:
    return modules_of(*(each.kernel for each in registered(processor)))


@cache
def _own_stamp() -> str:
    return stamp(__name__, compiled=True)


def scratch(call: Call) -> Call:
    """Return the same call on scratch arrays of equal shapes and strides.

    Inputs that nobody writes are used themselves, since they may be in a file larger than memory;
    what kernels packed of a promised constant is found again.
    """

    def clone(array: Array) -> Array:
        if array.size == 0 or (kind_of(array.dtype) == "f" and not array.flags.writeable):
            return array
        flat = numbers(array.shape, array.strides, array.dtype)
        return strided(flat, array.shape, array.strides)

    inputs, outputs = (tuple(clone(a) for a in side) for side in (call.inputs, call.outputs))
    return replace(call, inputs=inputs, outputs=outputs)


def numbers(shape: Sequence[int], strides: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return elements as an array of a shape and strides spans: positive, or 0 for integers."""
    extent = sum((n - 1) * s for n, s in zip(shape, strides)) + dtype.itemsize
    flat = np.zeros(-(-extent // dtype.itemsize) + 16, dtype)
    if kind_of(dtype) == "f":
        flat[:] = np.random.default_rng(0).random(flat.size, np.float32) + 0.1
    elif kind_of(dtype) == "b":
        flat[:] = True
    return flat


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Set a deadline for measurements inside the block, in this thread."""
    before = _UNTIL.set(deadline)
    try:
        yield
    finally:
        _UNTIL.reset(before)


def best_us(entries: Mapping[str, Entry]) -> dict[str, float]:
    """Return the best time of each entry over runs taken in turns, in microseconds.

    Because of the turns, other load on the machine affects all alike. A run during which another
    process had the core counts little, so more turns are taken then, up to `PATIENCE` times as
    many.

    Raises:
        TimeUpError: the deadline of `until` passed first.
    """
    deadline = _UNTIL.get() or Deadline()
    best = dict.fromkeys(entries, float("inf"))
    undisturbed = dict.fromkeys(entries, 0)
    for entry in entries.values():
        deadline.check()
        run(entry)
    began, budget_us = time.perf_counter(), BUDGET_US * len(entries)
    for _ in range(RUNS * PATIENCE):
        spent_us, fewest = (time.perf_counter() - began) * 1e6, min(undisturbed.values())
        enough = fewest >= RUNS or (fewest >= 2 and spent_us > budget_us)
        if enough or spent_us > budget_us * PATIENCE:
            break
        for name, entry in entries.items():
            deadline.check()
            before = preemptions()
            start = time.perf_counter()
            native_call(entry.address, entry.block)
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
            undisturbed[name] += preemptions() == before
    return best
