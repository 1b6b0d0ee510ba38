"""Captures of launches like those of an earlier trace, on regions of other shapes."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.runtime import Machine, Partition, Read, ReadWrite, Region, Runtime, Task, Write
from soapstone.runtime.tracing import analysis_cache
from soapstone.runtime.tracing.analysis_cache import AnalysisCache


def _add(a, b, y):
    y[...] = a + b


def _double(y):
    y[...] *= 2


add, double = Task("add", (Read, Read, Write), _add), Task("double", (ReadWrite,), _double)


@pytest.fixture
def analysed(monkeypatch):
    """How many captures were analysed."""
    counted = []
    issue = analysis_cache.issue
    monkeypatch.setattr(analysis_cache, "issue", lambda *given: (counted.append(1), issue(*given)))
    return counted


def capture(runtime, known, n, again=True):
    """A step on (n,) regions: the trace, its inputs and outputs."""
    a, b, y, z = (Region((n,), np.float32, name) for name in "abyz")
    t, u = (Region((n,), np.float32, name, transient=True) for name in "tu")
    with runtime.capture("step", known) as recording:
        runtime.launch(add, a, b, t)
        runtime.launch(double, t)
        runtime.launch(add, t, b, u)
        runtime.launch(add, u, u if again else a, y)
        runtime.launch(double, Partition.of(y, [[0]], [[n // 2]]))
        runtime.launch(add, y, t, z)
    return recording.trace, (a, b), (y, z)


def check(runtime, made, n, again=True):
    trace, (a, b), (y, z) = made
    rng = np.random.default_rng(n)
    x, w = rng.random(n, np.float32), rng.random(n, np.float32)
    runtime.write(a, x)
    runtime.write(b, w)
    for _ in range(2):
        trace.replay()
    t = 2 * (x + w)
    whole = (t + w) + ((t + w) if again else x)
    whole[: n // 2] *= 2
    np.testing.assert_allclose(runtime.read(y), whole, rtol=1e-6)
    np.testing.assert_allclose(runtime.read(z), whole + t, rtol=1e-6)


def test_other_extents_are_not_analysed(analysed):
    known = AnalysisCache()
    with Runtime(Machine.local(1)) as runtime:
        made = {n: capture(runtime, known, n) for n in (8, 100, 3, 64)}
        assert len(analysed) == 1
        for n, each in made.items():
            check(runtime, each, n)


def test_other_regions_of_launches_are_analysed(analysed):
    known = AnalysisCache()
    with Runtime(Machine.local(1)) as runtime:
        made = [
            (n, again, capture(runtime, known, n, again)) for n, again in ((8, 1), (9, 0), (10, 1))
        ]
        assert len(analysed) == 2
        for n, again, each in made:
            check(runtime, each, n, again)


def test_what_a_forgotten_trace_found_is_analysed_anew(analysed):
    known = AnalysisCache()
    with Runtime(Machine.local(1)) as runtime:
        capture(runtime, known, 8)
        check(runtime, capture(runtime, known, 9), 9)
        assert len(analysed) == 2


def test_several_workers_are_analysed(analysed):
    known = AnalysisCache()
    with Runtime(Machine.local(2)) as runtime:
        made = {n: capture(runtime, known, n) for n in (8, 16)}
        assert len(analysed) == 2
        for n, each in made.items():
            check(runtime, each, n)


def test_no_arena_is_kept():
    known = AnalysisCache()
    with Runtime(Machine.local(1)) as runtime:
        used = []
        for n in (1 << 16, 1 << 10):
            made = capture(runtime, known, n)
            used.append(made[0].peak_bytes)
        assert used[1] < used[0] // 32


def test_an_error_within_a_capture_leaves_the_runtime_free():
    with Runtime(Machine.local(1)) as runtime:
        with pytest.raises(ZeroDivisionError), runtime.capture("step", AnalysisCache()):
            raise ZeroDivisionError
        assert not runtime.capturing
        check(runtime, capture(runtime, AnalysisCache(), 12), 12)
