"""Faults injected into random programs: whatever goes wrong, and whenever, ends in one error.

Each fault follows from a seed. After it the runtime is reset, the same program runs again on it
without the fault, and gives what sequential execution gives.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from zlib import crc32

import numpy as np
from helpers.runtime import programs as runtime_programs
from helpers.runtime.scenarios import Run, Scenario, scenario

from soapstone.runtime import Machine, MemoryExhausted, Runtime
from soapstone.runtime.machines.start import start

KINDS = ("raise", "bind", "question", "delay", "memory", "interrupt")


class Injected(Exception):
    """What a fault raises."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "no effect" (it came too late), or the error it ended in."""

    kind: str
    seed: int
    happened: str


class Wrong(AssertionError):
    """A fault that did not end as it must."""


def inject(kind: str, seed: int) -> Outcome:
    """Inject one fault.

    Raises: Wrong for no error, an error that does not name the place, or a wrong result after it.
    """
    rng = np.random.default_rng([seed, 11])
    given = scenario(seed)
    given = replace(given, setup=replace(given.setup, automatic=bool(rng.integers(0, 2))))
    events, seconds = _measure(given)
    if kind == "memory":
        return _memory(given, rng)
    with given.setup.runtime() as runtime:
        if kind == "interrupt":
            happened = _interrupted(given, runtime, float(rng.uniform(0, 1.1)) * seconds)
        elif kind == "delay":
            happened = _delayed(given, runtime, rng)
        else:
            word = {"raise": "body", "bind": "bind", "question": "question"}[kind]
            count = events.get(word, 0)
            if not count:
                return Outcome(kind, seed, "no effect")
            happened = _raised(given, runtime, word, int(rng.integers(0, count)))
        runtime.reset()
        Run(runtime, given, fresh=False).run()
    return Outcome(kind, seed, happened)


def _measure(given: Scenario) -> tuple[dict[str, int], float]:
    """How many bodies, binds and questions a program has, and how long it takes."""
    counts: dict[str, int] = {}
    lock = threading.Lock()

    def count(what: str) -> None:
        word = what.partition(" ")[0]
        with lock:
            counts[word] = counts.get(word, 0) + 1

    begin = time.perf_counter()
    with _listening(count), given.setup.runtime() as runtime:
        Run(runtime, given).run()
    return counts, time.perf_counter() - begin


@contextmanager
def _listening(listener: Callable[[str], None]) -> Iterator[None]:
    runtime_programs.BEFORE.append(listener)
    try:
        yield
    finally:
        runtime_programs.BEFORE.remove(listener)


def _raised(given: Scenario, runtime: Runtime, word: str, at: int) -> str:
    """An exception in the body, bind or mapper question number `at`."""
    left, lock, where = [at], threading.Lock(), []

    def strike(what: str) -> None:
        if what.startswith(word):
            with lock:
                left[0] -= 1
                if left[0] != -1:
                    return
            where.append(what)
            raise Injected(f"injected into {what}")

    try:
        with _listening(strike):
            Run(runtime, given).run()
    except Exception as error:
        told = str(error)
        if not where or f"injected into {where[0]}" not in told:
            raise Wrong(f"{type(error).__name__} does not name the place: {told}") from error
        if word != "question":
            _, name, point = where[0].split(" ")
            if f"task {name!r}, point {point}, on processor" not in told:
                raise Wrong(f"{type(error).__name__} does not name the task: {told}") from error
        return f"{type(error).__name__}: {told}"
    if where and word == "bind" and given.setup.automatic:
        return "a trace found by itself was given up"  # its launches run untraced, and bind again
    if where:
        raise Wrong(f"an exception in {where[0]} was lost")
    return "no effect"


def _delayed(given: Scenario, runtime: Runtime, rng: np.random.Generator) -> str:
    """Some bodies take long."""
    salt = int(rng.integers(0, 1 << 30))

    def linger(what: str) -> None:
        if (crc32(what.encode(), salt) & 31) == 0:
            time.sleep(0.003)

    with _listening(linger):
        Run(runtime, given).run()
    return "delayed"


def _memory(given: Scenario, rng: np.random.Generator) -> Outcome:
    """Memories smaller than the program needs."""
    setup = given.setup
    with setup.runtime() as runtime:
        Run(runtime, given).run()
        needed = runtime.statistics.bytes_allocated
    capacity = int(rng.integers(0, max(1, needed)))
    mapper = setup.mapper()
    machine = Machine.local(setup.cpus, memories=setup.memories, memory_bytes=max(1, capacity))
    happened = "no effect"
    with start("local", machine, mapper, automatic=setup.automatic) as runtime:
        try:
            Run(runtime, given).run()
        except MemoryExhausted as error:
            happened = f"MemoryExhausted: {error}"
            if "needs" not in str(error) or "are free" not in str(error):
                raise Wrong(f"MemoryExhausted does not name the place: {error}") from error
        runtime.reset()
        for memory in range(setup.memories):
            if runtime.memory.used(memory) > capacity:
                raise Wrong(f"{runtime.memory.used(memory)} bytes of {capacity} are in use")
    return Outcome("memory", given.seed, happened)


def _interrupted(given: Scenario, runtime: Runtime, after_s: float) -> str:
    """Ctrl-C after some time, wherever the program is then."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before: Any = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-5, after_s))
        Run(runtime, given).run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "no effect"
